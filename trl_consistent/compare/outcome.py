# SPDX-License-Identifier: Apache-2.0
"""What one correction makes of one group of completions.

Batches are too large to keep, so [`sums_of`] keeps a few sums for each completion, and [`outcome`] turns those of a group
into the numbers that people compare. Which corrections are replayed is in `replay.py`, which one to take in `recommend.py`.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


BINS = 4
"""Into how many groups of similar length the completions are split."""


@dataclass(frozen=True)
class Outcome:
    """What one correction makes of one group of completions."""

    correction: str
    """Name of the correction."""
    group: str
    """`all`, `length 5 … 12`, `A > 0` or `A < 0`."""
    completions: int
    """Number of completions with at least one token in the loss mask."""
    tokens: int
    """Number of tokens in the loss mask, before rejections."""
    ess: float | None
    """Effective sample size of the weights, `(sum w)^2 / (n sum w^2)`, over tokens that are not rejected."""
    truncated: float
    """Share of tokens whose weight was clamped to a bound."""
    masked: float
    """Share of tokens that have weight 0 and stay in the denominator of the loss; trust regions count."""
    rejected: float
    """Share of tokens that left the loss mask."""
    weight_min: float | None
    """Smallest weight of a token that is not rejected."""
    weight_mean: float | None
    """Mean weight of the tokens that are not rejected."""
    weight_max: float | None
    """Largest weight of a token that is not rejected."""
    bias: float | None
    """`sum w A` minus the same sum with the weights of the reference, divided by `sum |A|` without weights. Each sum is over
    the denominator of its loss."""
    bias_error: float | None
    """Standard error of `bias`, over completions."""
    bias_apart: float | None
    """The bias of completions with A > 0 plus that of completions with A < 0, both without their signs, so that they cannot
    cancel. It decides the recommendation."""
    cosine: float | None
    """Cosine between the gradient weights of all tokens with and without the correction."""

    @property
    def kept(self) -> float:
        """Share of tokens that keep a weight above 0."""
        return 1 - self.masked - self.rejected


@dataclass(frozen=True)
class CompletionSums:
    """Sums over the tokens of each completion. Every field has shape `(n,)`, float64, an entry for each completion.

    The gradient weight of a token is the factor of its grad log-prob: weight times advantage, over the denominator of the
    loss. `plain` says that no correction is applied.
    """

    tokens: Tensor
    """Tokens in the loss mask."""
    kept: Tensor
    """Tokens that are not rejected."""
    positive: Tensor
    """Tokens that are not rejected and have a weight above 0."""
    truncated: Tensor
    """Tokens whose weight was clamped to a bound."""
    weight: Tensor
    """Weights of the tokens that are not rejected."""
    weight_squared: Tensor
    """Squares of these weights."""
    gradient: Tensor
    """Gradient weights; NaN without advantages, as all the following up to `plain_squared`."""
    plain: Tensor
    """Plain gradient weights."""
    plain_size: Tensor
    """Absolute values of the plain gradient weights."""
    product: Tensor
    """Products of gradient weight and plain gradient weight."""
    gradient_squared: Tensor
    """Squares of the gradient weights."""
    plain_squared: Tensor
    """Squares of the plain gradient weights."""
    smallest: Tensor
    """Smallest weight of a token that is not rejected; infinite if all are."""
    largest: Tensor
    """Largest weight of a token that is not rejected; minus infinity if all are."""

    def pick(self, index: Tensor) -> "CompletionSums":
        """The sums of some of the completions."""
        return CompletionSums(*(values[index] for values in vars(self).values()))

    @classmethod
    def joined(cls, parts: Iterable["CompletionSums"]) -> "CompletionSums":
        """The sums of the completions of several batches, one batch after the other."""
        return cls(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))


def sums_of(
    mask: Tensor, keep_mask: Tensor, weights: Tensor, truncated: Tensor, gradient: Tensor, plain: Tensor
) -> CompletionSums:
    """The sums of a batch, without completions that have no token in the loss mask.

    Args:
        mask, keep_mask (`torch.Tensor` of shape `(B, T)`): Loss mask before and after rejections.
        weights (`torch.Tensor` of shape `(B, T)`): Float64, 0 outside `keep_mask`.
        truncated (`torch.Tensor` of shape `(B, T)`): Which weights were clamped to a bound.
        gradient, plain (`torch.Tensor` of shape `(B, T)`): Gradient weights with and without the correction.
    """
    per_token = {
        "tokens": mask,
        "kept": keep_mask,
        "positive": weights > 0,
        "truncated": truncated,
        "weight": weights,
        "weight_squared": weights.square(),
        "gradient": gradient,
        "plain": plain,
        "plain_size": plain.abs(),
        "product": gradient * plain,
        "gradient_squared": gradient.square(),
        "plain_squared": plain.square(),
    }
    sums = CompletionSums(
        **{name: values.sum(1, dtype=torch.float64) for name, values in per_token.items()},
        smallest=torch.where(keep_mask, weights, math.inf).amin(1),
        largest=torch.where(keep_mask, weights, -math.inf).amax(1),
    )
    return sums.pick(mask.any(1))


def effective_sample_size(weight: Tensor, weight_squared: Tensor, count: Tensor | int) -> float | None:
    """`(sum w)^2 / (count * sum w^2)`; `None` if all weights are 0."""
    squares = weight_squared.sum()
    return (weight.sum() ** 2 / (count * squares)).item() if squares > 0 else None


def groups_of(sums: CompletionSums, has_advantages: bool) -> dict[str, Tensor]:
    """Which completions belong to which group, by name: all of them, those of similar length, those of one sign of the
    advantage."""
    lengths = sums.tokens
    groups = {"all": torch.ones_like(lengths, dtype=torch.bool)}
    edges = lengths.quantile(torch.linspace(0, 1, BINS + 1, dtype=lengths.dtype)[1:-1])
    bins = torch.bucketize(lengths, edges)
    present = bins.unique()
    for each in present if len(present) > 1 else ():
        inside = lengths[bins == each]
        shortest = int(inside.min())
        longest = int(inside.max())
        name = f"length {shortest}" if shortest == longest else f"length {shortest} … {longest}"
        groups[name] = bins == each
    if has_advantages:
        signs = {"A > 0": sums.plain > 0, "A < 0": sums.plain < 0}
        groups |= {name: index for name, index in signs.items() if index.any()}
    return groups


def outcome(correction: str, group: str, sums: CompletionSums, reference: CompletionSums | None) -> Outcome:
    """What a correction makes of a group, from the sums of its completions.

    Args:
        correction, group (`str`): Names, for the result.
        sums ([`CompletionSums`]): Those of the group under the correction.
        reference ([`CompletionSums`], *optional*): The same under the reference; there is no bias without it.
    """
    tokens = sums.tokens.sum().item()
    kept = sums.kept.sum().item()
    squares = (sums.gradient_squared.sum() * sums.plain_squared.sum()).sqrt().item()
    found = Outcome(
        correction=correction,
        group=group,
        completions=len(sums.tokens),
        tokens=int(tokens),
        ess=effective_sample_size(sums.weight, sums.weight_squared, sums.kept.sum()),
        truncated=sums.truncated.sum().item() / tokens,
        masked=(kept - sums.positive.sum().item()) / tokens,
        rejected=(tokens - kept) / tokens,
        weight_min=sums.smallest.min().item() if kept else None,
        weight_mean=sums.weight.sum().item() / kept if kept else None,
        weight_max=sums.largest.max().item() if kept else None,
        bias=None,
        bias_error=None,
        bias_apart=None,
        cosine=sums.product.sum().item() / squares if squares > 0 else None,
    )
    return found if reference is None else _with_bias(found, sums, reference)


def _with_bias(found: Outcome, sums: CompletionSums, reference: CompletionSums) -> Outcome:
    size = sums.plain_size.sum().item()
    if not size > 0:
        return found
    # bias = (sum_i b_i) / sum |A|, with b_i what completion i adds to the difference of the two sums
    each = sums.gradient - reference.gradient
    by_sign = [each[side].sum().abs().item() for side in (sums.plain > 0, sums.plain < 0)]
    return dataclasses.replace(
        found,
        bias=each.sum().item() / size,
        bias_error=math.sqrt(len(each)) * each.std().item() / size if len(each) > 1 else None,
        bias_apart=sum(by_sign) / size,
    )
