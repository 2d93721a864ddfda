# SPDX-License-Identifier: Apache-2.0
"""What arrived in the engine at a weight sync: names and checksums, exact where log-probs only have noise to go by."""

import contextlib
import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..upstream.substitution import substituted


logger = logging.getLogger(__name__)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 1 << 18}  # elements at a time, so that they stay in the cache


class WeightSyncError(RuntimeError):
    """The rollout engine does not hold the trainer's weights."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits read as integers, a scalar int64 on the tensor's device.

    Exact and without rounding. It is that of the same elements in another order, and adds up when tensors are
    concatenated, so that an engine's fused or transposed copy has the checksum of the parts: a part in the wrong place
    is left to the probe.
    """
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
    chunks = bits.reshape(-1).split(_CHUNK.get(bits.device.type, 1 << 24))
    return torch.stack([chunk.to(torch.int64).sum() for chunk in chunks]).sum()


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """[`checksum`] of each tensor, in one transfer per device."""
    sums = {name: checksum(tensor) for name, tensor in tensors}
    return dict(zip(sums, torch.stack([total.cpu() for total in sums.values()]).tolist(), strict=True)) if sums else {}


def weights_hash(sums: Mapping[str, int]) -> str:
    """Sixteen hexadecimal digits for a set of checksums: equal for equal weights, in any process."""
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]


def listed(names: Iterable[str]) -> str:
    """The first few of some names, for a message."""
    names = sorted(names)
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class SyncLedger:
    """Follows the tensors of each sync into a colocated engine, and compares what is there afterwards.

    Parameters whose checksum differs after their first sync are transformed by the engine: they are named in a warning,
    and left to the probe from then on.
    """

    def __init__(self) -> None:
        self.engine: dict[str, int] = {}  # checksums after the last sync, of what the engine holds as it came
        self._first: frozenset[str] | None = None
        self._transformed: set[str] = set()

    @contextlib.contextmanager
    def recording(self, model: Any) -> Iterator[None]:
        """Within the block, every tensor that is loaded into the engine's `model` gets an entry."""
        self._loaded: dict[str, set[str] | None] = {}
        self._expected: defaultdict[str, Tensor | int] = defaultdict(int)
        self._unclear: set[str] = set()
        load, parameters = model.load_weights, dict(model.named_parameters())

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            everything: set[str] = set()
            for name, tensor in weights:
                names = load([(name, tensor)])
                self._loaded[name] = names and {_resolved(target, parameters) for target in names}
                for target in self._loaded[name] or ():
                    if len(names) == 1 and target in parameters and parameters[target].is_floating_point():
                        self._expected[target] += checksum(tensor.to(parameters[target].dtype))
                    else:
                        self._unclear.add(target)
                everything |= names or set()
            return everything

        with substituted(model, load_weights=load_weights):
            yield

    def check(self, model: Any, plain: bool) -> bool:
        """Raises [`WeightSyncError`] if a tensor did not arrive; call it when the sync is over.

        Returns whether every tensor was found in the engine bit by bit (in whatever order).

        Args:
            model (`torch.nn.Module`): The engine's.
            plain (`bool`): Whether the engine holds weights as they come: neither quantised nor in shards.
        """
        is_first = self._first is None
        self._first = self._first or frozenset(self._loaded)
        if not self._loaded or self._first - self._loaded.keys():
            what = listed(self._first - self._loaded.keys()) if self._loaded else "any weight"
            raise WeightSyncError(
                f"The rollout engine is stale: the weight sync did not stream {what} into it. `sync_weights` was replaced, "
                "or the trainer's model has changed since the first sync."
            )
        if None in self._loaded.values():
            return False  # a model that does not say what it loads
        if lost := {name for name, targets in self._loaded.items() if not targets}:
            raise WeightSyncError(
                f"The rollout engine loaded nothing from {listed(lost)}: it does not know the name (its architecture or "
                "prefix is not the trainer's), or takes the weight for tied to another."
            )
        parameters = dict(model.named_parameters())
        written = set().union(*filter(None, self._loaded.values()))
        if is_first and plain and (missed := parameters.keys() - written):
            logger.warning(
                f"Weight syncs do not write to {listed(missed)} of the rollout engine, which the trainer does not have: "
                "they keep the values that the engine loaded."
            )
        if not plain:
            return False
        apart = self._unclear | self._transformed
        compared = {name: int(total) for name, total in self._expected.items() if name not in apart}
        self.engine = checksums((name, parameters[name]) for name in compared)
        if wrong := {name for name, expected in compared.items() if self.engine[name] != expected}:
            if not is_first:
                raise WeightSyncError(
                    f"After the weight sync, {listed(wrong)} of the rollout engine does not hold what was streamed: it was "
                    "written to in part, or overwritten since."
                )
            self._transformed = wrong
            self.engine = {name: total for name, total in self.engine.items() if name not in wrong}
            logger.warning(
                f"The rollout engine changes {listed(wrong)} as it loads them: their syncs are checked by the probe only."
            )
        return not apart and not wrong

    def overwritten(self, model: Any) -> set[str]:
        """Names of the engine's parameters that hold something else than after the last sync."""
        parameters = dict(model.named_parameters())
        now = checksums((name, parameters[name]) for name in self.engine)
        return {name for name, total in self.engine.items() if now[name] != total}


def _resolved(name: str, parameters: Mapping[str, Any]) -> str:
    """A parameter by the name its `load_weights` reports: for experts, vLLM leaves out the module that holds them."""
    parent, _, leaf = name.rpartition(".")
    if name in parameters:
        return name
    found = [other for other in parameters if other.startswith(f"{parent}.") and other.endswith(f".{leaf}")]
    return found[0] if len(found) == 1 else name
