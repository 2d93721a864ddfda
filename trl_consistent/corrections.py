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

from .ratios import LEVELS, MAX_LOG_RATIO, check_shapes, level_log_ratio


ACTIONS = ("none", "truncate", "mask", "reject")


def check_bounds(owner: str, lower: float | None, upper: float | None) -> None:
    """Refuses bounds that no ratio can satisfy: NaN, negative, or `lower >= upper`.

    Raises:
        `ValueError`: names `owner`, the bound and the value.
    """
    for name, value in (("lower", lower), ("upper", upper)):
        if value is not None and not value >= 0:  # also catches NaN
            raise ValueError(f"{owner}: the {name} bound is {value}, but a ratio is never negative or NaN.")
    if lower is not None and upper is not None and lower >= upper:
        raise ValueError(f"{owner}: the lower bound ({lower}) must be less than the upper bound ({upper}).")


@dataclass(frozen=True)
class Rejection:
    """A rule on top of a correction: tokens (completions) whose ratio leaves the bounds leave the loss mask.

    Bounds are on the ratio, inclusive; `None` is open.
    """

    level: str
    """Ratio the rule looks at: `token`, `sequence` (product) or `geometric` (length-normalised product)."""
    lower: float | None = None
    """Smallest ratio that is kept."""
    upper: float | None = None
    """Largest ratio that is kept."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Rejection level is {self.level!r}. Expected one of {', '.join(LEVELS)}.")
        check_bounds(f"Rejection at level {self.level}", self.lower, self.upper)


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
    """`token` (each token's ratio), `sequence` (their product) or `geometric` (its length-normalised form)."""
    action: str = "none"
    """`none` (weight 1), `truncate` (clamp), `mask` (weight 0 outside) or `reject` (leaves the loss mask)."""
    lower: float | None = None
    """Smallest ratio inside the bounds."""
    upper: float | None = None
    """Largest ratio inside the bounds."""
    rejections: tuple[Rejection, ...] = ()
    """Further rules; a token stays in the loss only if it passes all of them."""
    source: str = field(default="", compare=False)
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Correction level is {self.level!r}. Expected one of {', '.join(LEVELS)}.")
        if self.action not in ACTIONS:
            raise ValueError(f"Correction action is {self.action!r}. Expected one of {', '.join(ACTIONS)}.")
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
}
"""The published corrections by name."""


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
    """The ratio at a level, and where it is below and above the bounds; an infinite log-ratio is outside any bounds."""
    log_ratio = level_log_ratio(d, mask, level)
    ratio = torch.exp(log_ratio)
    low = log_ratio == -math.inf
    high = (log_ratio == math.inf) | torch.isnan(log_ratio)  # NaN: +inf and -inf in one completion
    if lower is not None:
        low = low | (ratio < lower)
    if upper is not None:
        high = high | (ratio > upper)
    return ratio, low, high


def correct(
    mismatch_log_ratio: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], correction: Correction
) -> CorrectionResult:
    """Weights and keep-mask of a correction.

    Args:
        mismatch_log_ratio (`torch.Tensor` of shape `(B, T)`):
            What [`mismatch_log_ratio`] returned, nats. NaN marks an unscored token: it counts as ratio 1. An infinite
            value is never trusted: weight 0 (rejected, where the action is `reject`), whatever the bounds, for the
            token and, at the sequence and geometric levels, for its completion.
        mask (`torch.Tensor` of shape `(B, T)`):
            `completion_mask * tool_mask`; any dtype, non-zero is in.
        correction ([`Correction`]):
            Level, action, bounds and rejections.

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
            untrusted = ~torch.isfinite(level_log_ratio(d, inside, correction.level))
            weights = ratio.clamp(correction.lower, correction.upper).masked_fill(untrusted, 0.0)
        else:
            weights = ratio.masked_fill(low | high, 0.0)
        if correction.upper is None:
            weights = weights.clamp(max=math.exp(MAX_LOG_RATIO))  # inf times a zero advantage would be NaN
        low, high = low & inside, high & inside

    rejected_low, rejected_high = (low, high) if correction.action == "reject" else (none, none)
    for rule in correction.rejections:
        _, rule_low, rule_high = _outside(d, inside, rule.level, rule.lower, rule.upper)
        rejected_low = rejected_low | (rule_low & inside)
        rejected_high = rejected_high | (rule_high & inside)
    keep_mask = inside & ~rejected_low & ~rejected_high

    weights = torch.where(keep_mask, weights, 1.0)
    return CorrectionResult(weights, keep_mask, low, high, rejected_low, rejected_high)
