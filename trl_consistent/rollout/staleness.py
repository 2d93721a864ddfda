# SPDX-License-Identifier: Apache-2.0
"""Whether the trained weights are still those of the last weight sync, told by checksums.

Log-probs cannot tell: in bfloat16, an engine that missed an optimizer step differs by no more than its noise. `ledger.py`
is about the other side, the tensors inside the engine.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .ledger import checksums, listed, weights_hash


class SyncedWeights:
    """Checksums of the trained tensors, as they were at the last weight sync that was remembered."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}

    def remember(self, model: Any) -> None:
        """Takes the checksums of the trained tensors of `model`, which must not be in shards."""
        self._sums = checksums(_trained(model))

    def __bool__(self) -> bool:
        """Whether a sync was remembered."""
        return bool(self._sums)

    @property
    def hash(self) -> str | None:
        """A hash of the remembered tensors; `None` before the first sync."""
        return weights_hash(self._sums) if self._sums else None

    def changes(self, model: Any) -> str | None:
        """A message about the tensors of `model` that are not those of the last sync; `None` if all are."""
        now = checksums(_trained(model))
        changed = {name for name, _ in now.items() ^ self._sums.items()}
        if not changed:
            return None
        return (
            f"{len(changed)} of {len(now)} trained tensors ({listed(changed)}) changed after the last sync, with no "
            "optimizer step that TRL knows of (a second `train()`, weights loaded by hand or by a callback)"
        )


def _trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
