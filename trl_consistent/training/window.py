# SPDX-License-Identifier: Apache-2.0
"""Statistics between two logs: merged over ranks as they come, and transferred to the host once, when they are logged."""

from typing import Any

import torch

from ..statistics import Stat, merge, on_host


Statistics = dict[str, Stat]
"""Statistics by name, as functions of `metrics/measure.py` return them."""


def merged_over_ranks(stats: Statistics, accelerator: Any) -> Statistics:
    """Statistics of all ranks together, in one collective; every rank gets them.

    Args:
        stats (`dict[str, Stat]`): Of this rank; the same names in the same order on every rank.
        accelerator (`accelerate.Accelerator`): Gathers them; not asked where there is one rank.
    """
    ranks = accelerator.num_processes
    if ranks == 1:
        return stats
    sizes = [stat.value.numel() for stat in stats.values()]
    flat = torch.cat([stat.value for stat in stats.values()])
    parts = accelerator.gather(flat.unsqueeze(0)).split(sizes, dim=1)
    return merge(
        {key: Stat(values[rank], stat.reduction) for (key, stat), values in zip(stats.items(), parts, strict=True)}
        for rank in range(ranks)
    )


class Window:
    """Statistics of the batches since the last log, apart for training and evaluation."""

    def __init__(self) -> None:
        self._stats: dict[str, Statistics] = {}

    def add(self, mode: str, stats: Statistics) -> None:
        """Adds those of a batch to the window of `mode` (`train` or `eval`)."""
        before = self._stats.get(mode)
        self._stats[mode] = stats if before is None else merge([before, stats])

    def close(self, mode: str) -> Statistics:
        """Returns the statistics of `mode` on the host and begins a new window; empty if nothing was added."""
        return on_host(self._stats.pop(mode, {}))
