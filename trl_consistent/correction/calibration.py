# SPDX-License-Identifier: Apache-2.0
"""Bounds that know the noise: how far the ratio of a healthy completion of a given length strays, and how often.

Two engines never agree to the last bit. The sum of `n` such differences spreads as `sqrt(n)` and their mean as
`1 / sqrt(n)`, so a fixed bound rejects long completions at one level and short ones at another. Here the healthy
spread is estimated from the rollouts themselves and bounds follow from it. `correction/weights.py` applies bounds, this file
sets them; `metrics/measure.py` reports the gap as it is, faults included.

A healthy completion of `n` scored tokens has `sum d ~ (-n V / 2, n V)`. The drift belongs to the spread: were it any
other, the mean ratio `E_mu[exp d]` would not be 1.
"""

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ..ratios import check_shapes, row_blocks, scored_tokens, turn_index, turn_sums
from ..statistics import BINS, Stat, bin_edges, merge, sums_by_size, wide
from .rules import CALIBRATED_LEVELS


WARM_UP_ROWS = 256
"""Completions an estimate needs: with so many, `sqrt(V)` is within 4 % (two standard errors)."""

_BLOCKS = 8
# The quantile of the mean square between 8 blocks that is taken for V, and its value at V = 1 under normal noise: a
# chi-squared of 7 degrees of freedom, divided by 7. At .65 heavier tails do not move it to first order, as they do the
# median; what remains is measured in the test of short completions.
_QUANTILE, _AT_QUANTILE = 0.65, 1.11516
# A completion this many times noisier than the estimate says nothing of healthy tails; of normal ones, .4 % are.
_TRIM = 3.0
# The spread of identical engines: float32 log-probs of a few nats do not resolve more.
_SMALLEST_SPREAD = 2.0**-20


def noise_statistics(d: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> dict[str, Stat]:
    """What [`NoiseEstimate`] learns from, of disjoint sets of completions; can be joined with `mismatch_metrics`.

    The scored tokens of a completion are cut into 8 blocks of equal length. The mean square between the blocks is an
    unbiased estimate of V, whatever the token noise looks like, also when neighboring tokens are correlated, and it
    does not see what all tokens of a completion have in common: the drift, or a constant fault.

    Args:
        d (`torch.Tensor` of shape `(B, T)`): What [`mismatch_log_ratio`] returned, nats.
        mask (`torch.Tensor` of shape `(B, T)`): As there.

    Returns:
        `dict` of one [`Stat`]: by bins of the root of that mean square, the number of completions and of tokens, and
        the sums of centered squares and fourth powers. No host sync.

    Sign: none; mirrored noise gives the same.
    Masked positions: ignored, whatever they hold. Completions with an infinite token, or with fewer than 8 scored
    ones, enter nothing.
    Source: the between-group mean square of a one-way analysis of variance.
    """
    check_shapes(d=d, mask=mask)
    return merge(_noise_rows(d[rows].detach().float(), mask[rows]) for rows in row_blocks(d))


def _noise_rows(d: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> dict[str, Stat]:
    """[`noise_statistics`] of a few rows."""
    scored = scored_tokens(d, mask)
    usable = ~(torch.isinf(d) & scored).any(dim=-1, keepdim=True)
    scored = scored & usable
    number = scored.sum(dim=-1, keepdim=True)
    d = torch.where(scored, d, 0.0)
    d = torch.where(scored, d - d.sum(dim=-1, keepdim=True) / number.clamp(min=1), 0.0)
    block = ((scored.cumsum(dim=-1) - 1).clamp(min=0) * _BLOCKS) // number.clamp(min=1)
    empty = d.new_zeros(len(d), _BLOCKS)
    sums, sizes = empty.scatter_add(1, block, d), empty.scatter_add(1, block, scored.to(d.dtype))
    # MS = sum_k n_k (mean_k - mean)^2 / (K - 1)
    mean_square = (sums.square() / sizes.clamp(min=1)).sum(dim=-1, keepdim=True) / (_BLOCKS - 1)
    counted = number >= _BLOCKS
    columns = (counted, number, *((wide(d) ** power).sum(dim=-1, keepdim=True) for power in (2, 4)))
    histograms = [sums_by_size(mean_square.sqrt(), torch.where(counted, column, 0)) for column in columns]
    return {"noise": Stat(torch.cat(histograms), "sum")}


@dataclass(frozen=True)
class NoiseEstimate:
    """Running estimate of the healthy spread of `d`, over all ranks and steps.

    Completions are pooled, old ones fade, and V is a quantile of the pool. An arbitrary fault in up to 35 % of the
    completions cannot carry it away (one that makes engines agree, 65 %); a 5 % minority of the worst kind widens
    `sqrt(V)` by 2.5 %, a 1 % one by .5 %, and however long it persists, by no more. A fault that is the same at all
    tokens of a completion widens nothing.

    Example:

    ```python
    >>> estimate = NoiseEstimate().update(noise_statistics(d, mask))
    >>> lower, upper = calibrated_bounds(level_lengths(d, mask, "sequence"), estimate, 0.01, "sequence")
    ```
    """

    sums: Shaped[Tensor, "4 n"] = field(default_factory=lambda: torch.zeros(4, BINS, dtype=torch.float64))
    """The columns of [`noise_statistics`]."""
    window: float = 4096.0
    """Completions remembered: when there are more, all fade alike until there are not."""

    def __post_init__(self) -> None:
        if self.window <= WARM_UP_ROWS:
            raise ValueError(f"`window` is {self.window}. Expected more than the warm-up takes, {WARM_UP_ROWS}.")

    def update(self, stats: dict[str, Stat]) -> "NoiseEstimate":
        """The estimate after one more step; `stats` are those of [`noise_statistics`], merged over the ranks."""
        new = stats["noise"].value.reshape(4, BINS)
        sums = self.sums.to(new) + new
        return replace(self, sums=sums * (self.window / sums[0].sum()).clamp(max=1))

    @property
    def ready(self) -> Bool[Tensor, ""]:
        """Whether the warm-up is over."""
        return self.sums[0].sum() >= WARM_UP_ROWS

    @property
    def variance(self) -> Shaped[Tensor, ""]:
        """V, the variance (nats squared) that each token adds to the log-ratio of a completion."""
        rows, edges = self.sums[0], bin_edges(self.sums.device).to(self.sums.dtype)
        below = rows.cumsum(0)
        rank = _QUANTILE * below[-1:]
        at = torch.searchsorted(below, rank).clamp(max=BINS - 1)
        inside = 1 - (below[at] - rank) / rows[at]
        spread = edges[at] + (edges[at + 1] - edges[at]) * inside
        return (spread.square()[0] / _AT_QUANTILE).clamp(min=_SMALLEST_SPREAD**2)

    @property
    def excess_kurtosis(self) -> Shaped[Tensor, ""]:
        """Excess kurtosis of the token noise, over completions that are not far noisier than V; never negative."""
        healthy = bin_edges(self.sums.device)[:-1].square() < _TRIM * self.variance
        _, tokens, squares, fourths = torch.where(healthy, self.sums, 0.0).sum(dim=1)
        squared = squares.square().clamp(min=torch.finfo(squares.dtype).tiny)
        # kurt = E[x^4] / E[x^2]^2 - 3
        kurtosis: Tensor = fourths * tokens / squared - 3
        return kurtosis.clamp(min=0)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, exact, for a checkpoint. Transfers to the host."""
        bins = self.sums[0].nonzero()[:, 0]
        return {"window": self.window, "bins": bins.tolist(), "sums": self.sums[:, bins].tolist()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "NoiseEstimate":
        """What [`state_dict`] saved; on the CPU until the next update."""
        estimate = cls(window=state["window"])
        estimate.sums[:, state["bins"]] = torch.tensor(state["sums"], dtype=estimate.sums.dtype)
        return estimate


def level_lengths(d: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], level: str) -> Shaped[Tensor, "B #T"]:
    """Number of scored tokens that the ratio of a level is made of, in the shape of [`level_log_ratio`].

    Masked positions: 0.
    """
    _check_level(level)
    scored = scored_tokens(d, mask)
    if level == "turn":
        turns = turn_index(mask)
        return turn_sums(scored.float(), turns) * (turns > 0)
    return scored.sum(dim=-1, keepdim=True)


def calibrated_bounds(
    lengths: Shaped[Tensor, "B #T"], estimate: NoiseEstimate, reject_rate: float, level: str
) -> tuple[Float[Tensor, "B #T"], Float[Tensor, "B #T"]]:
    """Bounds on the ratio of a level that healthy completions of any length leave at the same rate.

    Right to a percentage point from 16 tokens on, for normal, Laplace and mildly mixed noise. Too narrow where most
    completions are shorter than the excess kurtosis of their tokens: too few of them show the tail.

    Args:
        lengths (`torch.Tensor`): Scored tokens, see [`level_lengths`].
        estimate ([`NoiseEstimate`]): The healthy spread.
        reject_rate (`float`): Share of healthy completions (turns) outside, half of it on each side.
        level (`str`): `sequence`, `geometric` or `turn`.

    Returns:
        Lower and upper bound on the ratio (never on its inverse), of the shape of `lengths`, float32. NaN during the
        warm-up, see [`WARM_UP_ROWS`], for [`correct`] to keep its fixed bounds; open (0 and inf) where there are no tokens.

    Sign: a ratio above the upper bound is of a completion that the trainer finds too likely.
    Source: Cornish and Fisher (1938), the kurtosis term, damped so that it also fits a single Laplace token.
    """
    _check_level(level)
    if not 0 < reject_rate < 1:
        raise ValueError(f"`reject_rate` is {reject_rate}. Expected a share between 0 and 1, such as 0.01.")
    n, mean, std = _healthy(lengths, estimate)
    normal = NormalDist().inv_cdf(1 - reject_rate / 2)
    # z_n = z + (z^3 - 3 z) / 24 * k / (1 + k / 4),  k = kurt / n
    kurtosis = estimate.excess_kurtosis / n
    z = normal + (normal**3 - 3 * normal) / 24 * kurtosis / (1 + kurtosis / 4)
    divisor = 1 if level == "sequence" else n
    lower, upper = (((mean + sign * z * std) / divisor).exp().float() for sign in (-1, 1))
    lower, upper = torch.where(lengths > 0, lower, 0.0), torch.where(lengths > 0, upper, math.inf)
    return torch.where(estimate.ready, lower, math.nan), torch.where(estimate.ready, upper, math.nan)


def expected_rejection(
    lengths: Shaped[Tensor, "B #T"], estimate: NoiseEstimate, lower: float | None, upper: float | None, level: str
) -> Float[Tensor, "B #T"]:
    """Share of healthy completions (turns) of these lengths that fixed bounds on the ratio would reject.

    Args:
        lengths, estimate, level: As of [`calibrated_bounds`].
        lower, upper (`float`, *optional*): Bounds on the ratio; `None` is open.

    Returns:
        `torch.Tensor` of the shape of `lengths`, float32, from the normal approximation. 0 where there are no tokens,
        NaN during the warm-up.
    """
    _check_level(level)
    n, mean, std = _healthy(lengths, estimate)
    factor = 1 if level == "sequence" else n
    below = 0.0 if not lower else torch.special.ndtr((math.log(lower) * factor - mean) / std)
    above = 0.0 if upper is None else torch.special.ndtr((mean - math.log(upper) * factor) / std)
    share = torch.where(lengths > 0, below + above, 0.0).float()
    return torch.where(estimate.ready, share, math.nan)


def _check_level(level: str) -> None:
    if level not in CALIBRATED_LEVELS:
        raise ValueError(f"Calibrated bounds have no level {level!r}. Expected one of {', '.join(CALIBRATED_LEVELS)}.")


def _healthy(
    lengths: Shaped[Tensor, "B #T"], estimate: NoiseEstimate
) -> tuple[Shaped[Tensor, "B #T"], Shaped[Tensor, "B #T"], Shaped[Tensor, "B #T"]]:
    """Length, and mean and standard deviation of the summed log-ratio of a healthy completion of that length."""
    n = wide(lengths).clamp(min=1)
    return n, -n * estimate.variance / 2, (n * estimate.variance).sqrt()
