# SPDX-License-Identifier: Apache-2.0
"""Weights and keep-masks that correct a policy gradient for training-inference mismatch.

A correction is a level, an action and bounds on the ratio, plus any number of rejections; `PRESETS` holds the published
ones. `ratios.py` has the ratios themselves, `metrics.py` counts what a correction did.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from .kl import kl_k1, kl_k2, kl_k3
from .ratios import (
    LEVELS,
    MAX_LOG_RATIO,
    check_shapes,
    level_log_ratio,
    scored_tokens,
    turn_index,
    turn_sums,
)


ACTIONS = ("none", "truncate", "mask", "reject")
NORMALIZATIONS = ("none", "token", "sequence")

STATISTICS = ("ratio", "k1", "k2", "k3", "tv", "binary_kl", "exp_abs")
"""What a rejection can look at; see [`Rejection`]."""

RATIO_LEVELS = (*LEVELS, "sequence_min", "sequence_max")
STATISTIC_LEVELS = ("token", "turn_mean", "turn_max", "sequence_sum", "sequence_mean", "sequence_max")


def check_bounds(owner: str, lower: float | None, upper: float | None, signed: bool = False) -> None:
    """Refuses bounds that nothing can satisfy: NaN, `lower >= upper`, or, unless `signed`, negative.

    Raises:
        `ValueError`: names `owner`, the bound and the value.
    """
    for name, value in (("lower", lower), ("upper", upper)):
        if value is not None and not (value >= 0 or (signed and value < 0)):  # also catches NaN
            raise ValueError(f"{owner}: the {name} bound is {value}, but what it bounds is never negative or NaN.")
    if lower is not None and upper is not None and lower >= upper:
        raise ValueError(f"{owner}: the lower bound ({lower}) must be less than the upper bound ({upper}).")


@dataclass(frozen=True)
class Rejection:
    """A rule on top of a correction: tokens (turns, completions) whose statistic leaves the bounds leave the loss mask.

    Bounds are on the named statistic itself, inclusive; `None` is open. Statistics of a token, with `d` the mismatch
    log-ratio and `p`, `q` the token's probability under trainer and engine:

    - `ratio`: `exp(d)`;
    - `k1`, `k2`, `k3`: `-d`, `d^2 / 2` and `exp(d) - 1 - d` (see `kl.py`);
    - `tv`: `|p - q|`, the total variation between the two on "this token or another";
    - `binary_kl`: the larger of `KL(p || q)` and `KL(q || p)` on "this token or another", as in KPop;
    - `exp_abs`: `exp(|d|)`, the multiplicative error of NeMo-RL.

    Example:

    ```python
    >>> Rejection("sequence_mean", upper=0.01, statistic="k3")
    >>> Rejection("sequence_min", lower=1e-4)  # one catastrophic token vetoes its completion
    ```
    """

    level: str
    """For `ratio`: `token`, `sequence`, `geometric`, `prefix`, `turn` as for a correction, or the smallest and largest
    token ratio of a completion, `sequence_min` and `sequence_max`. For the others: `token`, or the mean or maximum over
    a turn, or the sum, mean or maximum over a completion: `turn_mean`, `turn_max`, `sequence_sum`, ..."""
    lower: float | None = None
    """Smallest value that is kept."""
    upper: float | None = None
    """Largest value that is kept."""
    statistic: str = "ratio"
    """One of [`STATISTICS`]."""

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise ValueError(f"Rejection statistic is {self.statistic!r}. Expected one of {', '.join(STATISTICS)}.")
        levels = RATIO_LEVELS if self.statistic == "ratio" else STATISTIC_LEVELS
        if self.level not in levels:
            raise ValueError(
                f"Rejection level of {self.statistic} is {self.level!r}. Expected one of {', '.join(levels)}."
            )
        check_bounds(f"Rejection {self.name}", self.lower, self.upper, signed=self.statistic == "k1")
        if self.lower is None and self.upper is None:
            raise ValueError(f"Rejection {self.name} needs a lower or an upper bound, got neither.")

    @property
    def name(self) -> str:
        """`<statistic>/<level>`, the key of `correction_rejections`."""
        return f"{self.statistic}/{self.level}"


@dataclass(frozen=True)
class Correction:
    """What to do with the mismatch ratio: level x action x bounds, then rejections.

    Bounds are on the ratio (never on its inverse), inclusive; `None` is open.

    Example:

    ```python
    >>> icepop = Correction(level="token", action="mask", lower=0.5, upper=5.0)
    ```
    """

    level: str = "token"
    """`token` (each token's ratio), `sequence` (their product), `geometric` (its length-normalised form), `prefix` (the
    product up to the token) or `turn` (geometric over a turn)."""
    action: str = "none"
    """`none` (weight 1), `truncate` (clamp), `mask` (weight 0 outside) or `reject` (leaves the loss mask)."""
    lower: float | None = None
    """Smallest ratio inside the bounds."""
    upper: float | None = None
    """Largest ratio inside the bounds."""
    rejections: tuple[Rejection, ...] = ()
    """Further rules; a token stays in the loss only if it passes all of them."""
    normalize: str = "none"
    """`token` or `sequence`: divide the weights by their mean over kept tokens (over completions of their mean weight),
    so that a correction does not change the size of the step. The mean is over all ranks, so the caller divides, see
    [`normalized`]; `none` leaves the weights alone."""
    source: str = field(default="", compare=False)
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Correction level is {self.level!r}. Expected one of {', '.join(LEVELS)}.")
        if self.action not in ACTIONS:
            raise ValueError(f"Correction action is {self.action!r}. Expected one of {', '.join(ACTIONS)}.")
        if self.normalize not in NORMALIZATIONS:
            raise ValueError(
                f"Correction normalize is {self.normalize!r}. Expected one of {', '.join(NORMALIZATIONS)}."
            )
        check_bounds(f"Correction {self.level}_{self.action}", self.lower, self.upper)
        if self.action == "truncate" and self.lower is None and self.upper is None:
            raise ValueError(f"Correction {self.level}_truncate needs a lower or an upper bound, got neither.")

    @property
    def rejects(self) -> bool:
        """Whether tokens can leave the loss mask."""
        return self.action == "reject" or bool(self.rejections)


PRESETS: dict[str, Correction] = {
    "none": Correction(source="measure only"),
    "tis": Correction("token", "truncate", None, 2.0, source="https://fengyao.notion.site/off-policy-rl (C = 2)"),
    "tis_two_sided": Correction(
        "token", "truncate", 0.5, 2.0, source="clip(ratio, 1/C, C) with C = 2; the published TIS has no lower bound"
    ),
    "icepop": Correction("token", "mask", 0.5, 5.0, source="https://huggingface.co/papers/2510.18855 (0.5, 5)"),
    "seq_tis": Correction("sequence", "truncate", None, 2.0, source="https://richardli.xyz/rl-collapse (C = 2)"),
    "seq_mis": Correction(
        "sequence", "mask", None, 3.0, source="https://richardli.xyz/rl-collapse; TRL's default mode and cap"
    ),
    "geo_mis": Correction(
        "geometric",
        "mask",
        0.99,
        1.01,
        source="https://richardli.xyz/rl-collapse, part 3; ratio of https://huggingface.co/papers/2507.18071",
    ),
    "tis_geo_rs": Correction(
        "token",
        "truncate",
        0.5,
        1.5,
        rejections=(Rejection("geometric", 0.99, 1.001),),
        source="slime mismatch report, runs (2) and (3)",
    ),
    "prefix_tis": Correction(
        "prefix", "truncate", None, 2.0, source="per-decision importance sampling (Precup et al., 2000), truncated"
    ),
}
"""The published corrections by name."""

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


def _outside(
    d: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], level: str, lower: float | None, upper: float | None
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
    """Where a rejection finds its statistic below and above the bounds; infinite log-ratios are above any."""
    if rule.statistic == "ratio" and rule.level in LEVELS:
        _, low, high = _outside(d, inside, rule.level, rule.lower, rule.upper)
        return low, high
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

    Returns:
        [`CorrectionResult`], detached. With the four modes TRL has, `weights` equals TRL's ratio bit for bit.

    Sign: a weight above 1 means that the trainer finds the token likelier than the engine did.
    Masked positions: weight 1 (TRL's `vespo` loss takes logs of them) and out of `keep_mask`.
    Source: the importance weight of an off-policy sample, https://huggingface.co/papers/1802.01561, sec. 4.1.
    """
    check_shapes(mismatch_log_ratio=mismatch_log_ratio, mask=mask)
    inside = mask.bool()
    d = torch.where(inside, mismatch_log_ratio.detach().float(), 0.0)
    none = torch.zeros_like(inside)

    if correction.action == "none":
        weights, low, high = torch.ones_like(d), none, none
    else:
        ratio, low, high = _outside(d, inside, correction.level, correction.lower, correction.upper)
        if correction.action == "truncate":
            weights = ratio.clamp(correction.lower, correction.upper).masked_fill(torch.isnan(ratio), 0.0)
        else:
            weights = ratio.masked_fill(low | high, 0.0)
        if correction.upper is None:
            weights = weights.clamp(max=math.exp(MAX_LOG_RATIO))  # inf times a zero advantage would be NaN
        low, high = low & inside, high & inside

    rejected_low, rejected_high = (low, high) if correction.action == "reject" else (none, none)
    for rule in correction.rejections:
        rule_low, rule_high = _violations(d, inside, rule, sampling)
        rejected_low = rejected_low | (rule_low & inside)
        rejected_high = rejected_high | (rule_high & inside)
    keep_mask = inside & ~rejected_low & ~rejected_high

    weights = torch.where(keep_mask, weights, 1.0)
    return CorrectionResult(weights, keep_mask, low, high, rejected_low, rejected_high)


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
