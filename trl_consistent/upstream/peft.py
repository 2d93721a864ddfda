# SPDX-License-Identifier: Apache-2.0
"""What we rely on in PEFT beyond its documented API."""

import contextlib
from collections.abc import Iterator
from typing import Any

from .substitution import substituted


VERSIONS = {"peft": ">=0.17,<0.22"}

NAMES = {
    "peft.tuners.tuners_utils:BaseTunerLayer": {
        "merged_adapters": "names of the adapters that are merged into the base layer",
        "active_adapters": "names of the adapters that the forward adds",
    },
    "peft.tuners.lora:LoraLayer": {
        "base_layer": "the module that a layer with adapters wraps; other kinds of adapters have it as well",
        "_caches": "norms that `merge` keeps for the `unmerge` of DoRA",
    },
    "peft.tuners.ia3:IA3Layer": {"merge": "writes to the weights of the base layer and nothing else"},
    "peft.tuners.lycoris_utils:LycorisLayer": {"merge": "writes to the weights of the base layer and nothing else"},
    "peft.tuners.trainable_tokens:TrainableTokensLayer": {
        "merge": "writes to the weights of the base layer and nothing else"
    },
    "peft.utils.other:ModulesToSaveWrapper": {
        "original_module": "the module that is not trained",
        "modules_to_save": "its trained copies, by adapter",
    },
    "peft.utils.other:TrainableTokensWrapper": {"token_adapter": "the layer with the trained tokens"},
}


def peft_layers_that_merge_in_place() -> tuple[type, ...]:
    """peft layers whose `merge` writes to parameters of their base layer and leaves no other trace than
    `peft_merge_forgotten` undoes (others swap modules, or keep more state)."""
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lycoris_utils import LycorisLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    return LoraLayer, IA3Layer, LycorisLayer, TrainableTokensLayer


def peft_wrapped(module: Any) -> tuple[Any, bool]:
    """The module that peft uses in place of the one it wrapped (`None` if it wrapped none), and whether a layer with
    adapters is around it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, BaseTunerLayer):
        return module.base_layer, True
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter, False
    if isinstance(module, ModulesToSaveWrapper):
        saved = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
        return (saved or [module.original_module])[0], False
    return None, False


def peft_adapter_modules(tuner: Any) -> list[Any]:
    """The modules that hold the parameters of a peft layer itself, not those of what it wraps."""
    parts = [module for name, child in tuner.named_children() if name != "base_layer" for module in child.modules()]
    return [tuner, *parts]


@contextlib.contextmanager
def peft_merge_forgotten(tuners: Any) -> Iterator[None]:
    """Within the block, peft layers may `merge`; afterwards they do not remember that they did."""
    with contextlib.ExitStack() as stack:
        for tuner in tuners:
            stack.enter_context(substituted(tuner, merged_adapters=[]))
            if hasattr(tuner, "_caches"):  # a LoRA layer, which keeps norms for DoRA's `unmerge`
                stack.enter_context(substituted(tuner, _caches={}))
        yield
