# SPDX-License-Identifier: Apache-2.0
"""Which of the replayed corrections to use."""

from dataclasses import dataclass

from ..correction.rules import Correction
from ..metrics.catalogue import METRICS


MIN_TOKENS = 1000
"""Fewer say nothing of a tail, and get no recommendation."""
MIN_ESS = METRICS["mismatch/ess/token"].critical[0] or 0.0
"""Of the weights."""
MIN_KEPT = 0.9
"""Share of tokens with a weight above 0. Ours; published runs mask far less than 1 %."""


GAP = ("mismatch/k3/mean", "mismatch/ess/token", "mismatch/nonfinite_count")
"""The metrics that say whether a correction is needed at all."""


_TIED = 2.0  # standard errors; two signs make a sum of sizes, which noise alone puts above one


@dataclass(frozen=True)
class Outcome:
    """What one correction makes of one group of completions."""

    correction: str
    """Its name."""
    group: str
    """`all`, `length 5 … 12`, `A > 0` or `A < 0`."""
    completions: int
    """With at least one token."""
    tokens: int
    """In the loss mask, before rejections."""
    ess: float | None
    """Effective sample size of the weights, `(sum w)^2 / (n sum w^2)`, over tokens that are not rejected."""
    truncated: float
    """Share of tokens whose weight is that of a bound."""
    masked: float
    """Share of tokens that have weight 0 and stay in the denominator, trust regions included."""
    rejected: float
    """Share of tokens that left the loss mask."""
    weight_min: float | None
    """Of tokens that are not rejected."""
    weight_mean: float | None
    """As above."""
    weight_max: float | None
    """As above."""
    bias: float | None
    """`sum w A` minus the same with the reference's weights, over `sum |A|` without any; each over its denominator."""
    bias_error: float | None
    """Standard error of `bias`, over completions."""
    bias_apart: float | None
    """The same where advantages above and below 0 cannot cancel: the sum of both sizes. Decides the recommendation."""
    cosine: float | None
    """Between the gradient weights of all tokens with and without the correction."""


def _simplicity(correction: Correction) -> tuple[int, bool, int]:
    rejections, regions = correction.rejections, len(correction.trust_regions)
    parts = (correction.action != "none") + (correction.normalize != "none") + len(rejections) + regions
    bounds = [
        correction.lower,
        correction.upper,
        *(bound for rule in rejections for bound in (rule.lower, rule.upper)),
    ]
    return parts, correction.level != "token", regions + sum(bound is not None for bound in bounds)


def _recommend(
    outcomes: list[Outcome], corrections: dict[str, Correction], metrics: dict[str, float]
) -> tuple[str | None, str]:
    """The rule that [`replay`] documents, and its reason."""
    tokens = outcomes[0].tokens
    if tokens < MIN_TOKENS:
        return None, f"{tokens} tokens are too few to tell, it takes {MIN_TOKENS}: record more steps."
    if "mismatch/k3/mean" not in metrics:
        return None, "No token has a log-prob of both trainer and engine."
    gap = {key: metrics[key] for key in GAP}
    unhealthy = {key: value for key, value in gap.items() if METRICS[key].outside(value)}
    if not unhealthy:
        k3, ess = metrics["mismatch/k3/mean"], metrics["mismatch/ess/token"]
        return "none", (
            f"The gap is healthy (k3 {k3:.2g} nats, token ESS {ess:.3g}). `tis` would change next to nothing, and bound what "
            "a later step may bring."
        )
    why = "; ".join(f"{key} is {value:.3g}, not {METRICS[key].healthy_text}" for key, value in unhealthy.items())
    acting = [each for each in outcomes if corrections[each.correction].acts]
    fit = [each for each in acting if (each.ess or 0.0) >= MIN_ESS and _kept(each) >= MIN_KEPT]
    if not fit:
        return None, (
            f"The gap is not healthy ({why}), and no correction keeps an ESS of {MIN_ESS} and {MIN_KEPT:.0%} of the tokens. "
            "Find its cause."
        )
    if any(each.bias_apart is None for each in fit):
        best = min(fit, key=lambda each: _simplicity(corrections[each.correction]))
        return best.correction, (
            f"The gap is not healthy ({why}). Without a bias to go by, this is the simplest that keeps an ESS of {MIN_ESS} "
            f"and {MIN_KEPT:.0%} of the tokens."
        )
    best = least = min(fit, key=lambda each: each.bias_apart or 0.0)
    for each in fit:
        excess = (each.bias_apart or 0.0) - (least.bias_apart or 0.0)
        simpler = _simplicity(corrections[each.correction]) < _simplicity(corrections[best.correction])
        if simpler and excess <= _TIED * (each.bias_error or 0.0):
            best = each
    than = "the least"
    if best is not least:
        than = f"which its error does not tell from that of {least.correction} ({least.bias_apart:.2g}), and it is simpler"
    return best.correction, (
        f"The gap is not healthy ({why}). Its bias, signs apart, is {best.bias_apart:.2g}, {than}; it has an ESS of "
        f"{best.ess:.2g} and keeps {_kept(best):.1%} of the tokens."
    )


def _kept(outcome: Outcome) -> float:
    return 1 - outcome.masked - outcome.rejected
