# SPDX-License-Identifier: Apache-2.0
"""Weights and keep-masks that correct a policy gradient for training-inference mismatch.

`ratios.py` has the ratios themselves, `rules.py` what a correction is, `metrics/measure.py` counts what it did.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ..ratios import (
    LEVELS,
    MAX_LOG_RATIO,
    check_shapes,
    level_log_ratio,
    row_blocks,
    scored_tokens,
    turn_index,
    turn_sums,
    wide_dtype,
)
from .kl import kl_k1, kl_k2, kl_k3
from .rules import Correction, Rejection, TrustRegion


# The smallest 1 - p that float32 can tell from 0 near p = 1.
_RESOLUTION = 2.0**-24


@dataclass(frozen=True)
class CorrectionResult:
    """What [`correct`] decided. All tensors are `(B, T)` and detached."""

    weights: Float[Tensor, "B T"]
    """Multiplies the policy term of the loss; 1 outside `keep_mask`, unless a `mask` action set it to 0."""
    keep_mask: Bool[Tensor, "B T"]
    """The loss mask after rejections; never larger than the mask that went in."""
    low: Bool[Tensor, "B T"]
    """Tokens in the mask that the action found below the lower bound."""
    high: Bool[Tensor, "B T"]
    """Tokens in the mask that the action found above the upper bound, or not finite."""
    rejected_low: Bool[Tensor, "B T"]
    """Tokens that a rejection found below its lower bound."""
    rejected_high: Bool[Tensor, "B T"]
    """Tokens that a rejection found above its upper bound, or not finite."""


Bound = float | Tensor | None


def _outside(
    d: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], level: str, lower: Bound, upper: Bound
) -> tuple[Float[Tensor, "B #T"], Bool[Tensor, "B #T"], Bool[Tensor, "B #T"]]:
    """The ratio at a level, and where it is below and above the bounds; an infinite log-ratio is outside any bounds and
    its ratio NaN."""
    log_ratio = level_log_ratio(d, mask, level)
    ratio = torch.exp(torch.where(torch.isfinite(log_ratio), log_ratio, math.nan))
    low = log_ratio == -math.inf
    high = (log_ratio == math.inf) | torch.isnan(log_ratio)  # NaN: +inf and -inf in one completion
    if lower is not None:
        low = low | (ratio < lower)
    if upper is not None:
        high = high | (ratio > upper)
    return ratio, low, high


def _bernoulli_kl(log_p: Float[Tensor, "B T"], log_q: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    rest_p, rest_q = (-torch.expm1(x) for x in (log_p, log_q))
    rest_p, rest_q = rest_p.clamp(min=_RESOLUTION), rest_q.clamp(min=_RESOLUTION)
    # KL(p || q) = p log(p/q) + (1-p) log((1-p)/(1-q))
    return log_p.exp() * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())


def token_statistic(
    d: Float[Tensor, "B T"], statistic: str, sampling: Float[Tensor, "B T"] | None
) -> Float[Tensor, "B T"]:
    """A statistic of [`Rejection`] for each token; `d` must be finite, `sampling` is needed for `tv` and `binary_kl`."""
    if statistic in ("ratio", "exp_abs"):
        return torch.exp(d if statistic == "ratio" else d.abs())
    if statistic in ("k1", "k2", "k3"):
        estimator = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[statistic]
        return estimator(d, torch.ones_like(d))
    if sampling is None:
        raise ValueError(f"A rejection by {statistic} needs the log-probs of the engine: pass `sampling`.")
    old = sampling + d
    if statistic == "tv":
        return (old.exp() - sampling.exp()).abs()
    return torch.maximum(_bernoulli_kl(old, sampling), _bernoulli_kl(sampling, old))


def _violations(
    d: Float[Tensor, "B T"], inside: Bool[Tensor, "B T"], rule: Rejection, sampling: Float[Tensor, "B T"] | None
) -> tuple[Bool[Tensor, "B #T"], Bool[Tensor, "B #T"]]:
    """Where a rejection by anything but the ratio of a level finds its statistic below and above the bounds; infinite
    log-ratios are above any."""
    scored = scored_tokens(d, inside)
    untrusted = torch.isinf(d) & inside
    usable = scored & ~untrusted
    known = None if sampling is None else torch.where(usable, sampling.detach().float(), 0.0)
    x = torch.where(usable, token_statistic(torch.where(usable, d, 0.0), rule.statistic, known), 0.0)
    scope, _, aggregate = rule.level.partition("_")
    counted = usable  # where there is something to judge
    if scope == "sequence":
        untrusted, counted = untrusted.any(dim=-1, keepdim=True), usable.any(dim=-1, keepdim=True)
        if aggregate in ("sum", "mean"):
            x = x.sum(dim=-1, keepdim=True)
            x = x / usable.sum(dim=-1, keepdim=True).clamp(min=1) if aggregate == "mean" else x
        elif aggregate == "max":
            x = torch.where(usable, x, -math.inf).amax(dim=-1, keepdim=True)
        else:
            x = torch.where(usable, x, math.inf).amin(dim=-1, keepdim=True)
    elif scope == "turn":
        turns = turn_index(inside)
        untrusted = turn_sums(untrusted.to(x.dtype), turns) > 0
        number = turn_sums(usable.to(x.dtype), turns)
        counted = number > 0
        if aggregate == "mean":
            x = turn_sums(x, turns) / number.clamp(min=1)
        else:
            filled = torch.where(usable, x, -math.inf)
            largest = filled.new_full((x.shape[0], x.shape[1] + 1), -math.inf)
            x = largest.scatter_reduce(1, turns, filled, "amax").gather(1, turns)
    low = torch.zeros_like(counted) if rule.lower is None else counted & (x < rule.lower)
    high = torch.zeros_like(counted) if rule.upper is None else counted & (x > rule.upper)
    return low, high | untrusted


def correct(
    mismatch_log_ratio: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    correction: Correction,
    *,
    sampling: Float[Tensor, "B T"] | None = None,
    bounds: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> CorrectionResult:
    """Weights and keep-mask of a correction.

    Args:
        mismatch_log_ratio (`torch.Tensor` of shape `(B, T)`):
            What [`mismatch_log_ratio`] returned, nats. NaN marks an unscored token: it counts as ratio 1. An infinite
            value is never trusted: weight 0 (rejected, where the action is `reject`), whatever the bounds, for the
            token, and with it for all that its ratio is part of: the rest of the completion (`prefix`), the turn, or
            the completion (`sequence`, `geometric`).
        mask (`torch.Tensor` of shape `(B, T)`):
            `completion_mask * tool_mask`; any dtype, non-zero is in.
        correction ([`Correction`]):
            Level, action, bounds and rejections.
        sampling (`torch.Tensor` of shape `(B, T)`, *optional*):
            Log-probs (nats) the engine sampled with; only rejections by `tv` and `binary_kl` need them.
        bounds (`dict[str, tuple[torch.Tensor, torch.Tensor]]`, *optional*):
            For a correction with a `reject_rate`: by level, lower and upper bound on the ratio of each completion,
            `(B, 1)`, or token, `(B, T)`. Where they are NaN or missing, the fixed bounds stay.

    Returns:
        [`CorrectionResult`], detached. With the four modes TRL has, `weights` equals TRL's ratio bit for bit.

    Sign: a weight above 1 means that the trainer finds the token likelier than the engine did.
    Masked positions: weight 1 (TRL's `vespo` loss takes logs of them) and out of `keep_mask`.
    Source: the importance weight of an off-policy sample, https://huggingface.co/papers/1802.01561, sec. 4.1.
    """
    check_shapes(mismatch_log_ratio=mismatch_log_ratio, mask=mask)
    d, inside = mismatch_log_ratio.detach(), mask.bool()
    rules = [rule for rule in correction.rejections if rule.level != "batch"]
    squares = [rule.upper for rule in correction.rejections if rule.level == "batch" and rule.upper is not None]
    dropped = [_smallest_dropped(d, inside, bound) for bound in squares]
    whole = (torch.empty_like(d, dtype=torch.float32), *(torch.empty_like(inside) for _ in range(5)))
    for rows in row_blocks(d):
        known = None if sampling is None else sampling[rows]
        limits = {level: tuple(bound[rows] for bound in pair) for level, pair in (bounds or {}).items()}
        part = _correct_rows(d[rows], inside[rows], correction, limits, rules, dropped, known)
        for tensor, rows_of_it in zip(whole, part, strict=True):
            tensor[rows] = rows_of_it
    return CorrectionResult(*whole)


def _smallest_dropped(d: Float[Tensor, "B T"], inside: Bool[Tensor, "B T"], bound: float) -> Float[Tensor, ""]:
    """The smallest `d^2` to drop, with all larger ones, so that the mean over what stays is within the bound; inf if
    nothing needs to go."""
    squares = torch.where(inside & torch.isfinite(d), d.float().square(), math.inf).flatten().sort().values
    # the mean of the n smallest grows with n
    means = squares.cumsum(0, dtype=wide_dtype(d)) / torch.arange(1, len(squares) + 1, device=d.device)
    return torch.where(means > bound, squares, math.inf).amin() if len(squares) else d.new_full((), math.inf)


def _bounds_of(rule: Correction | Rejection, limits: Mapping[str, tuple[Tensor, ...]]) -> tuple[Bound, Bound]:
    """The bounds of a rule: those that came for its level where they are known, else its own."""
    if rule.level not in limits:
        return rule.lower, rule.upper
    lower, upper = limits[rule.level]
    own = (0.0 if rule.lower is None else rule.lower, math.inf if rule.upper is None else rule.upper)
    return torch.where(lower.isnan(), own[0], lower), torch.where(upper.isnan(), own[1], upper)


def _correct_rows(
    d: Float[Tensor, "B T"],
    inside: Bool[Tensor, "B T"],
    correction: Correction,
    limits: Mapping[str, tuple[Tensor, ...]],
    rules: list[Rejection],
    dropped: list[Float[Tensor, ""]],
    sampling: Float[Tensor, "B T"] | None,
) -> tuple[Tensor, ...]:
    """The fields of [`CorrectionResult`] for a few rows; `dropped` is what [`_smallest_dropped`] found on all."""
    d = torch.where(inside, d.float(), 0.0)
    none = torch.zeros_like(inside)

    if correction.action == "none":
        weights, low, high = torch.ones_like(d), none, none
        if correction.acts:
            weights = weights.masked_fill(torch.isinf(d), 0.0)
    else:
        lower, upper = _bounds_of(correction, limits)
        ratio, low, high = _outside(d, inside, correction.level, lower, upper)
        if correction.action == "truncate":
            # two steps, for the bounds are both tensors, or none or one or two numbers
            weights = ratio if lower is None else ratio.clamp(min=lower)
            weights = (weights if upper is None else weights.clamp(max=upper)).masked_fill(torch.isnan(ratio), 0.0)
        else:
            weights = ratio.masked_fill(low | high, 0.0)
        if upper is None or isinstance(upper, Tensor):
            weights = weights.clamp(max=math.exp(MAX_LOG_RATIO))  # inf times a zero advantage would be NaN
        low, high = low & inside, high & inside

    rejected_low, rejected_high = (low, high) if correction.action == "reject" else (none, none)
    for rule in rules:
        if rule.statistic == "ratio" and rule.level in LEVELS:
            _, rule_low, rule_high = _outside(d, inside, rule.level, *_bounds_of(rule, limits))
        else:
            rule_low, rule_high = _violations(d, inside, rule, sampling)
        rejected_low = rejected_low | (rule_low & inside)
        rejected_high = rejected_high | (rule_high & inside)
    for smallest in dropped:
        rejected_high = rejected_high | ((d.square() >= smallest) & inside)
    keep_mask = inside & ~rejected_low & ~rejected_high
    return torch.where(keep_mask, weights, 1.0), keep_mask, low, high, rejected_low, rejected_high


def normalized(
    weights: Float[Tensor, "B T"], keep_mask: Bool[Tensor, "B T"], mean: Shaped[Tensor, ""]
) -> Float[Tensor, "B T"]:
    """Weights divided by a mean; where that is 0 (everything masked), the weights as they are.

    Args:
        weights, keep_mask (`torch.Tensor` of shape `(B, T)`): As in [`CorrectionResult`].
        mean (`torch.Tensor`, 0-dimensional): Mean weight over all ranks, after rejections.

    Masked positions: weight 1.
    Source: self-normalised importance sampling; `tis_batch_normalize` of slime.
    """
    divisor = torch.where(mean > 0, mean, 1.0).to(weights.dtype)
    return torch.where(keep_mask, weights / divisor, 1.0)


def trust_region_mask(
    per_token_logps: Float[Tensor, "B T"],
    sampling: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B #T"],
    mask: Shaped[Tensor, "B T"],
    region: TrustRegion,
) -> Bool[Tensor, "B #T"]:
    """Where a trust region lets the gradient through.

    DPPO stops a token whose probability has left the region upward while its advantage is positive, or downward while
    it is negative. OPSM stops a completion with a negative advantage whose mean `log mu - log pi` is above the bound.

    Args:
        per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs (nats) of the current policy.
        sampling (`torch.Tensor` of shape `(B, T)`):
            Log-probs (nats) the engine sampled with. An unscored token (NaN) stops nothing.
        advantages (`torch.Tensor` of shape `(B, 1)` or `(B, T)`):
            Advantages of the completions.
        mask (`torch.Tensor` of shape `(B, T)`):
            `completion_mask * tool_mask`; any dtype, non-zero is in.
        region ([`TrustRegion`]):
            Kind and bound.

    Returns:
        `torch.Tensor` of bool, `(B, 1)` for `opsm` with one advantage per completion, else `(B, T)`.

    Sign: of `pi - mu`, against that of the advantage.
    Masked positions: `True` per token, ignored per completion.
    Source: https://huggingface.co/papers/2602.04879 and https://huggingface.co/papers/2512.02556, eq. 9.
    """
    check_shapes(per_token_logps=per_token_logps, sampling=sampling, mask=mask)
    current, sampling = per_token_logps.detach().float(), sampling.detach().float()
    usable = mask.bool() & torch.isfinite(current) & torch.isfinite(sampling)
    current, sampling = torch.where(usable, current, 0.0), torch.where(usable, sampling, 0.0)
    if region.kind == "opsm":
        # TRL divides by all tokens of the mask, an unscored one counts as 0
        mean = (sampling - current).sum(dim=-1, keepdim=True) / mask.bool().sum(dim=-1, keepdim=True).clamp(min=1)
        return (advantages >= 0) | (mean <= region.bound)
    away = (current - sampling).sign() * advantages > 0
    divergence = (current.exp() - sampling.exp()).abs() if region.kind == "tv" else _bernoulli_kl(sampling, current)
    return ~(away & (divergence > region.bound) & usable)
