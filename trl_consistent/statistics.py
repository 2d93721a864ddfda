# SPDX-License-Identifier: Apache-2.0
"""Statistics that can be merged over micro-batches, ranks and steps, histograms among them, and their one transfer to the host."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from .ratios import wide_dtype


# A variance that is a smaller part of the mean square than this is rounding: squares are float32.
_SPREAD = 1e-6

Reduction = Literal["sum", "max", "min", "logsumexp"]


@dataclass(frozen=True)
class Stat:
    """A statistic that can be merged: a tensor of shape `(n,)` and how two of them become one."""

    value: Shaped[Tensor, " n"]
    reduction: Reduction


_REDUCE: dict[Reduction, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "logsumexp": lambda stacked: stacked.logsumexp(0),
}


def merge(parts: Iterable[dict[str, Stat]]) -> dict[str, Stat]:
    """Merges statistics of disjoint sets of tokens (micro-batches, ranks, steps), key by key."""
    found: dict[str, list[Stat]] = {}
    for part in parts:
        for key, stat in part.items():
            found.setdefault(key, []).append(stat)
    return {
        key: Stat(_REDUCE[stats[0].reduction](torch.stack([stat.value for stat in stats])), stats[0].reduction)
        for key, stats in found.items()
    }


# Values fall into bins of a float's own sign, exponent and top mantissa bits: on each side of 0, 32 bins per octave from
# 2^-24 to 2^8, each 3.1 % wide at most. Counting is exact, merging is a sum, and no sort or size limit is involved.
_MANTISSA_BITS = 5
_LOWEST_OCTAVE, _HIGHEST_OCTAVE = -24, 8
_BINS = (_HIGHEST_OCTAVE - _LOWEST_OCTAVE) << _MANTISSA_BITS


# Counted is by all the leading bits, which takes fewer passes than to clamp every value; folding them comes once, at the end.
_COUNTERS = 1 << (9 + _MANTISSA_BITS)


def _counters(device: torch.device) -> Float[Tensor, " m"]:
    return _wide(torch.zeros(_COUNTERS, device=device))


def _count(counters: Float[Tensor, " m"], x: Float[Tensor, "*shape"], weights: Tensor | None = None) -> None:
    """Adds the weights, 1 if left out, of the values to their counters."""
    leading = (x.view(torch.int32) >> (23 - _MANTISSA_BITS)).bitwise_and_(_COUNTERS - 1).long().flatten()
    each = counters.new_ones(()).expand(x.numel()) if weights is None else weights.flatten().to(counters.dtype)
    counters.scatter_add_(0, leading, each)


def _folded(counters: Float[Tensor, " m"]) -> Float[Tensor, "2 n"]:
    """The counts in the bins of |x|: of positive values, and of negative ones. 0 and what lies beyond are in the outermost."""
    sides, start = counters.view(2, -1), (127 + _LOWEST_OCTAVE) << _MANTISSA_BITS
    below, inside, above = sides.tensor_split((start, start + _BINS), dim=1)
    counts = inside.clone()
    counts[:, 0] += below.sum(dim=1)
    counts[:, -1] += above.sum(dim=1)
    return counts


def _histogram(x: Float[Tensor, "*shape"], weights: Tensor | None = None) -> Float[Tensor, " n"]:
    """The sum of weights, 1 if left out, in each bin of |x|."""
    counters = _counters(x.device)
    _count(counters, x, weights)
    return _folded(counters).sum(dim=0)


def _bin_edges(device: torch.device) -> Float[Tensor, " n"]:
    """Where the bins of |x| start, and where the last one ends."""
    bits = torch.arange(_BINS + 1, dtype=torch.int32, device=device) + ((127 + _LOWEST_OCTAVE) << _MANTISSA_BITS)
    return (bits << (23 - _MANTISSA_BITS)).view(torch.float32)


def _quantile(counts: list[float], q: float, lowest: float, highest: float) -> float:
    """The value below which a share `q` of the counted values lies, interpolated inside its bin."""
    rank = q * (sum(counts) - 1)
    before = 0.0
    for index, count in enumerate(counts):
        if rank < before + count:
            octave, step = divmod(index, 1 << _MANTISSA_BITS)
            start = 2.0 ** (octave + _LOWEST_OCTAVE) * (1 + step / (1 << _MANTISSA_BITS))
            width = 2.0 ** (octave + _LOWEST_OCTAVE - _MANTISSA_BITS)
            value = start + width * (rank - before + 0.5) / count if index else 0.0
            return min(max(value, lowest), highest)
        before += count
    return highest


def _wide(value: Tensor) -> Tensor:
    return value.to(wide_dtype(value))


def _scalar(value: Tensor, reduction: Reduction = "sum") -> Stat:
    return Stat(_wide(value).reshape(1), reduction)


def on_host(stats: dict[str, Stat]) -> dict[str, Stat]:
    """The same statistics on the CPU, in one transfer, for [`finalize`] and [`histograms`] to share."""
    flat = torch.cat([stat.value for stat in stats.values()]).cpu() if stats else torch.empty(0)
    out = {}
    for key, stat in stats.items():
        out[key], flat = Stat(flat[: len(stat.value)], stat.reduction), flat[len(stat.value) :]
    return out


@dataclass(frozen=True)
class Histogram:
    """How many values lie between one edge and the next."""

    edges: list[float]
    """Ascending, one more than there are counts; the same for every batch. The outermost bins hold what lies beyond."""
    counts: list[int]
    """A value on an edge is counted in the bin that is farther from 0."""


# On each side of 0, two bins per octave; what is smaller than the first edge is in one bin around 0.
_EDGE_OCTAVE = -16
_FINE_PER_COARSE = 1 << (_MANTISSA_BITS - 1)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))  # saturates instead of overflowing
