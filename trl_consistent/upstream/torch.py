# SPDX-License-Identifier: Apache-2.0
"""What we rely on in torch beyond its documented API."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


VERSIONS = {"torch": ">=2.7,<3"}

NAMES = {
    "torch.nn:Module": {"_parameters": "the dict of a module's own parameters, whose entries are replaced"},
}


@contextlib.contextmanager
def parameters_replaced(replacements: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Within the block, modules hold other tensors as parameters; the parameters themselves are not written to.

    Args:
        replacements (`dict[torch.nn.Module, dict[str, torch.Tensor]]`): By module and name.
    """
    from torch.nn import Parameter

    before = [(module, name, module._parameters[name]) for module, names in replacements.items() for name in names]
    try:
        for module, tensors in replacements.items():
            for name, tensor in tensors.items():
                module._parameters[name] = Parameter(tensor, requires_grad=False)
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter
