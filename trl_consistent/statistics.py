# SPDX-License-Identifier: Apache-2.0
"""Statistics that can be merged over micro-batches, ranks and steps, histograms among them, and their one transfer to the host.

`metrics/measure.py` fills them from a batch; `metrics/catalogue.py` turns them into the numbers that are logged.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from .ratios import wide_dtype


Reduction = Literal["sum", "max", "min", "logsumexp"]


@dataclass(frozen=True)
class Stat:
    """A statistic that can be merged: a tensor of shape `(n,)` and how two of them become one."""

    value: Shaped[Tensor, " n"]
    """On the device of the batch."""
    reduction: Reduction
    """How the values of several micro-batches, ranks or steps become one, element by element."""


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


def wide(value: Tensor) -> Tensor:
    """The same numbers in the type that sums are kept in, see [`wide_dtype`]."""
    return value.to(wide_dtype(value))


def scalar(value: Tensor, reduction: Reduction = "sum") -> Stat:
    """A statistic that is one number."""
    return Stat(wide(value).reshape(1), reduction)


def on_host(stats: dict[str, Stat]) -> dict[str, Stat]:
    """Returns the same statistics on the CPU, in one transfer, for [`finalize`] and [`histograms`] to share."""
    flat = torch.cat([stat.value for stat in stats.values()]).cpu() if stats else torch.empty(0)
    out = {}
    for key, stat in stats.items():
        out[key], flat = Stat(flat[: len(stat.value)], stat.reduction), flat[len(stat.value) :]
    return out


# A value falls into the bin of its own sign, exponent and top mantissa bits, as a float32 stores them: on each side of 0
# there are 32 bins per octave from 2^-24 to 2^8, and none is wider than 3.1 % of its values. Counting is exact, merging is
# a sum, and neither a sort nor a size limit is involved.
_MANTISSA_BITS = 5
_LOWEST_OCTAVE = -24
_HIGHEST_OCTAVE = 8
_PER_OCTAVE = 1 << _MANTISSA_BITS

BINS = (_HIGHEST_OCTAVE - _LOWEST_OCTAVE) * _PER_OCTAVE
"""How many bins of |x| there are."""

# A value is counted by all its leading bits, which takes fewer passes over memory than clamping every value into a bin. The
# counters become bins once, at the end.
_COUNTERS = 1 << (9 + _MANTISSA_BITS)
_FIRST_COUNTER = (127 + _LOWEST_OCTAVE) << _MANTISSA_BITS


class BinCounter:
    """Counts values in bins, in several calls, without a host sync.

    Example:

    ```python
    >>> counter = BinCounter(x.device)
    >>> counter.add(x)
    >>> positive, negative = counter.sides()
    ```
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = wide(torch.zeros(_COUNTERS, device=device))

    def add(self, x: Float[Tensor, "*shape"], weights: Tensor | None = None) -> None:
        """Adds the weight of each value, 1 if left out, to its bin."""
        leading = (x.view(torch.int32) >> (23 - _MANTISSA_BITS)).bitwise_and_(_COUNTERS - 1).long().flatten()
        if weights is None:
            each = self._counts.new_ones(()).expand(x.numel())
        else:
            each = weights.flatten().to(self._counts.dtype)
        self._counts.scatter_add_(0, leading, each)

    def remove_zeros(self, number: Tensor) -> None:
        """Takes back so many of the zeros that were added, such as those that stood in for tokens outside a mask."""
        self._counts[0] -= number

    def sides(self) -> Float[Tensor, "2 n"]:
        """The counts in the [`BINS`] bins of |x|: first of positive, then of negative values. The innermost bins hold 0 and
        all that is nearer to it, the outermost ones all that lies beyond."""
        below, inside, above = self._counts.view(2, -1).tensor_split((_FIRST_COUNTER, _FIRST_COUNTER + BINS), dim=1)
        counts = inside.clone()
        counts[:, 0] += below.sum(dim=1)
        counts[:, -1] += above.sum(dim=1)
        return counts


def sums_by_size(x: Float[Tensor, "*shape"], weights: Tensor) -> Float[Tensor, " n"]:
    """The sum of the weights of the values in each of the [`BINS`] bins of |x|."""
    counter = BinCounter(x.device)
    counter.add(x, weights)
    return counter.sides().sum(dim=0)


def bin_edges(device: torch.device) -> Float[Tensor, " n"]:
    """Where each bin of |x| starts, and last where the last one ends."""
    bits = torch.arange(BINS + 1, dtype=torch.int32, device=device) + _FIRST_COUNTER
    return (bits << (23 - _MANTISSA_BITS)).view(torch.float32)


def _quantile(counts: list[float], q: float, smallest: float, largest: float) -> float:
    """The value below which a share `q` of the values counted in bins of |x| lies, interpolated inside its bin."""
    rank = q * (sum(counts) - 1)
    before = 0.0
    for index, count in enumerate(counts):
        if rank < before + count:
            octave, step = divmod(index, _PER_OCTAVE)
            start = 2.0 ** (octave + _LOWEST_OCTAVE) * (1 + step / _PER_OCTAVE)
            width = 2.0 ** (octave + _LOWEST_OCTAVE - _MANTISSA_BITS)
            value = start + width * (rank - before + 0.5) / count if index else 0.0
            return min(max(value, smallest), largest)
        before += count
    return largest


class Totals:
    """Merged statistics as Python numbers, which the formulas of [`METRICS`] read. Takes one transfer to the host.

    Args:
        stats (`dict[str, Stat]`): Statistics of all micro-batches, ranks and steps that are to become one number.
    """

    def __init__(self, stats: dict[str, Stat]) -> None:
        flat = torch.cat([stat.value for stat in stats.values()]).tolist() if stats else []
        self._numbers: dict[str, float] = {}
        self._vectors: dict[str, list[float]] = {}
        self._sizes: dict[str, list[float]] = {}
        start = 0
        for name, stat in stats.items():
            end = start + stat.value.numel()
            if end - start == 1:
                self._numbers[name] = flat[start]
            else:
                self._vectors[name] = flat[start:end]
            start = end

    def __getitem__(self, name: str) -> float:
        """The value of a statistic that is one number."""
        return self._numbers[name]

    def get(self, name: str) -> float | None:
        """The same; `None` if it was not measured."""
        return self._numbers.get(name)

    def vector(self, name: str) -> list[float] | None:
        """The values of a statistic that is several numbers; `None` if it was not measured."""
        return self._vectors.get(name)

    def quantile(self, name: str, q: float, smallest: float, largest: float) -> float:
        """The value below which a share `q` of the sizes |x| in a histogram lies, within 1.6 % and between the two limits.

        Args:
            name (`str`): A statistic with the counts of [`BinCounter.sides`].
            q (`float`): The share, between 0 and 1.
            smallest, largest (`float`): The smallest and the largest size that was counted.
        """
        if name not in self._sizes:
            both = self._vectors[name]
            self._sizes[name] = [sum(sides) for sides in zip(both[:BINS], both[BINS:], strict=True)]
        return _quantile(self._sizes[name], q, smallest, largest)


@dataclass(frozen=True)
class Histogram:
    """How many values lie between one edge and the next."""

    edges: list[float]
    """Ascending, one more than there are counts; the same for every batch. The outermost bins hold what lies beyond."""
    counts: list[int]
    """A value on an edge is counted in the bin that is farther from 0."""


# A histogram for people has two bins per octave on each side of 0. What is smaller than 2^-16 is in one bin around 0.
_SHOWN_PER_OCTAVE = 2
_SMALLEST_SHOWN_OCTAVE = -16


def readable_histogram(sides: Float[Tensor, " n"]) -> Histogram | None:
    """The histogram of counts of [`BinCounter.sides`], on 97 bins that people can read; `None` if nothing was counted.

    Args:
        sides (`torch.Tensor`, flat, on the CPU): The counts of positive values, then those of negative ones.
    """
    merged = _PER_OCTAVE // _SHOWN_PER_OCTAVE
    first = (_SMALLEST_SHOWN_OCTAVE - _LOWEST_OCTAVE) * _SHOWN_PER_OCTAVE
    positive, negative = sides.view(2, -1, merged).sum(dim=-1)
    around = positive[:first].sum() + negative[:first].sum()
    counts = torch.cat([negative[first:].flip(0), around.reshape(1), positive[first:]])
    if not counts.any():
        return None
    outward = bin_edges(sides.device)[::merged][first:]
    return Histogram(torch.cat([-outward.flip(0), outward]).tolist(), counts.long().tolist())
