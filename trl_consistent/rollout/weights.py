# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine gets at a weight sync, read off a model with adapters without writing to it.

TRL merges the adapters into the base weights, streams these, and subtracts the adapters again. In bfloat16 that is not
an inverse: the base weights drift with every sync (huggingface/trl#6688). Here each layer is merged aside.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..upstream.peft import peft_adapter_modules, peft_layers_that_merge_in_place, peft_merge_forgotten, peft_wrapped
from ..upstream.torch import parameters_replaced
from ..upstream.transformers import tied_weight_names


class _Source(NamedTuple):
    """Parameters of one module that the same peft layers act on, and where the engine looks for them."""

    path: str
    module: nn.Module
    names: tuple[str, ...]
    tuners: tuple[Any, ...]


def merged_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a peft model with its active adapters merged, named as in the base model.

    Names and order are those of TRL's stream, which also has them from `merge_adapter()`. Different are: both weights of
    a tied pair are yielded where adapters act on one of them only (merging in place changes both, the forward does
    not); `modules_to_save` of the active adapter are yielded whatever its name, those of others are not. peft's own
    `merge` runs on float32 copies, a layer at a time, and the result is rounded once.

    Args:
        model (`peft.PeftModel`): Not sharded, with adapters that [`can_merge_aside`] knows.
    """
    for path, module, names, tuners in _sources(model):
        tensors = _merged(module, names, tuners) if tuners else {name: getattr(module, name).data for name in names}
        for name in names:
            yield path + name, tensors.pop(name)


def can_merge_aside(model: Any) -> bool:
    """Whether [`merged_parameters`] works: each adapter is of a kind whose `merge` writes to floating-point weights of its
    base layer and nothing else, and all weights are in memory."""
    known = peft_layers_that_merge_in_place()
    for _, module, names, tuners in _sources(model):
        weights = [getattr(module, name) for name in names]
        if any(weight.is_meta or (tuners and not weight.is_floating_point()) for weight in weights):
            return False
        if not all(isinstance(tuner, known) for tuner in tuners):
            return False
    return True


def left_out(model: Any) -> list[str]:
    """Names of trainable parameters of a peft model on which nothing that [`merged_parameters`] yields depends."""
    reached = set()
    for _, module, names, tuners in _sources(model):
        weights = [getattr(module, name) for name in names]
        weights += [weight for tuner in tuners for weight in _adapters(tuner)]
        reached |= {weight.data_ptr() for weight in weights}
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return [name for name, weight in trained.items() if weight.data_ptr() not in reached]


def splits_tied_weights(model: Any) -> bool:
    """Whether adapters make embedding and head of a peft model differ, though the base model ties them."""
    tied = tied_weight_names(model.get_base_model())
    return any(path + name in tied for path, _, names, _ in _sources(model) for name in names)


def _sources(model: Any) -> Iterator[_Source]:
    """What there is to yield, in the order of the parameters; tied weights once, unless adapters tell them apart."""
    seen: set[tuple[int, frozenset[int]]] = set()
    for source in _walk(model.get_base_model(), "", ()):
        # by memory, because adapters that peft ties are two parameters (and in bfloat16 it ties them in vain)
        acting = frozenset(weight.data_ptr() for tuner in source.tuners for weight in _adapters(tuner))
        keys = {name: (getattr(source.module, name).data_ptr(), acting) for name in source.names}
        if new := tuple(name for name, key in keys.items() if key not in seen):
            yield source._replace(names=new)
        seen.update(keys.values())


def _adapters(tuner: Any) -> list[Tensor]:
    """The parameters of a peft layer that belong to its active adapters."""
    active = set(tuner.active_adapters)
    return [weight for name, weight in tuner.named_parameters() if active & set(name.split("."))]


def _walk(module: nn.Module, path: str, tuners: tuple[Any, ...]) -> Iterator[_Source]:
    """Descends through what peft put around the modules of the base model."""
    inner, is_tuner = peft_wrapped(module)
    if inner is not None:
        yield from _walk(inner, path, (*tuners, module) if is_tuner else ())
        return
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        # a layer for single parameters says which; the others may write to any (`lora_bias`)
        acting = tuple(t for t in tuners if getattr(t, "parameter_name", name) == name and not t.merged)
        groups.setdefault(acting, []).append(name)
    for acting, names in groups.items():
        yield _Source(path, module, tuple(names), acting)
    for name, child in module.named_children():
        yield from _walk(child, f"{path}{name}.", ())


@torch.no_grad()
def _merged(module: nn.Module, names: tuple[str, ...], tuners: tuple[Any, ...]) -> dict[str, Tensor]:
    """The parameters `names` of a base layer after the `merge` of its peft layers, each rounded once to its dtype."""
    weights = {name: getattr(module, name) for name in names}
    copies = {name: _wide(weight, copy=True) for name, weight in weights.items()}
    with peft_merge_forgotten(tuners), parameters_replaced({module: copies}):
        adapters = {
            part: {name: _wide(weight) for name, weight in part.named_parameters(recurse=False)}
            for tuner in tuners
            for part in peft_adapter_modules(tuner)
        }
        with parameters_replaced(adapters):
            for tuner in tuners:
                tuner.merge()
        return {name: getattr(module, name).data.to(weight.dtype) for name, weight in weights.items()}


def _wide(weight: Tensor, copy: bool = False) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=copy)
