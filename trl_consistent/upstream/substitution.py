# SPDX-License-Identifier: Apache-2.0
"""Attributes that are replaced for the time of a block. Nothing is patched at import."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def substituted(owner: Any, **names: Any) -> Iterator[None]:
    """Sets attributes of a module (or object) for the time of the block; only names that are there."""
    before = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def parameters_replaced(replacements: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Within the block, modules hold other tensors as parameters; the parameters themselves are not written to.

    Args:
        replacements (`dict[torch.nn.Module, dict[str, torch.Tensor]]`): By module and name.
    """
    from torch.nn import Parameter

    before = [(module, name, module._parameters[name]) for module, named in replacements.items() for name in named]
    try:
        for module, named in replacements.items():
            for name, tensor in named.items():
                module._parameters[name] = Parameter(tensor, requires_grad=False)
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter
