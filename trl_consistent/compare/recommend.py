# SPDX-License-Identifier: Apache-2.0
"""Which of the replayed corrections to use, and why."""

from dataclasses import dataclass

from ..correction.rules import Correction
from ..metrics.catalogue import METRICS
from .outcome import Outcome


MIN_TOKENS = 1000
"""Smallest number of tokens for a recommendation. Fewer say nothing about rare large ratios."""
MIN_ESS = METRICS["mismatch/ess/token"].critical[0] or 0.0
"""Smallest effective sample size of the weights of a correction that is recommended."""
MIN_KEPT = 0.9
"""Smallest share of tokens that such a correction keeps at a weight above 0. Our choice; published runs mask far less than
1 %."""
GAP = ("mismatch/k3/mean", "mismatch/ess/token", "mismatch/nonfinite_count")
"""The metrics that say whether a correction is needed at all."""
TIED = 2.0
"""Two biases that differ by at most this many standard errors are treated as equal. One is not enough: each bias is a sum of
two absolute values, which noise alone makes larger than its standard error."""


@dataclass(frozen=True)
class Recommendation:
    """Which correction to use, and why."""

    correction: str | None
    """Name of the correction; `None` if the records cannot tell, or if none is good enough."""
    reason: str
    """Why, in one to three sentences."""


def recommend(
    outcomes: list[Outcome], corrections: dict[str, Correction], metrics: dict[str, float]
) -> Recommendation:
    """The correction to use, by the rule that [`replay`] documents.

    Args:
        outcomes (`list[Outcome]`): What each correction makes of all completions.
        corrections (`dict[str, Correction]`): The corrections by name.
        metrics (`dict[str, float]`): `mismatch/*` of all completions.
    """
    tokens = outcomes[0].tokens
    if tokens < MIN_TOKENS:
        return Recommendation(
            None, f"{tokens} tokens are too few for a recommendation, it takes {MIN_TOKENS}. Record more steps."
        )
    if "mismatch/k3/mean" not in metrics:
        return Recommendation(None, "No token has a log-prob of both trainer and engine.")
    unhealthy = [key for key in GAP if METRICS[key].outside(metrics[key])]
    if not unhealthy:
        return Recommendation("none", _healthy(metrics))
    gap = "; ".join(f"{key} is {metrics[key]:.3g}, not {METRICS[key].healthy_text}" for key in unhealthy)
    fit = [each for each in outcomes if corrections[each.correction].acts and _keeps_enough(each)]
    chosen, why = _best(fit, corrections)
    return Recommendation(chosen, f"The gap is not healthy ({gap}). {why}")


def _healthy(metrics: dict[str, float]) -> str:
    k3 = metrics["mismatch/k3/mean"]
    ess = metrics["mismatch/ess/token"]
    return (
        f"The gap is healthy (k3 {k3:.2g} nats, token ESS {ess:.3g}). `tis` would change next to nothing now, and would limit "
        "the weights if a later step has a larger gap."
    )


def _keeps_enough(outcome: Outcome) -> bool:
    return (outcome.ess or 0.0) >= MIN_ESS and outcome.kept >= MIN_KEPT


def _best(fit: list[Outcome], corrections: dict[str, Correction]) -> tuple[str | None, str]:
    """The name of the best correction that keeps enough, and why."""
    enough = f"an ESS of {MIN_ESS} and {MIN_KEPT:.0%} of the tokens"
    if not fit:
        return None, f"No correction keeps {enough}, so look for the cause of the gap."
    biases = {each.correction: each.bias_apart for each in fit if each.bias_apart is not None}
    if len(biases) < len(fit):
        best = min(fit, key=lambda each: _complexity(corrections[each.correction]))
        return (
            best.correction,
            f"There is no bias to compare, so this is the simplest correction that keeps {enough}.",
        )
    least = min(biases, key=lambda name: biases[name])
    best = next(each for each in fit if each.correction == least)
    for each in fit:
        is_tied = biases[each.correction] - biases[least] <= TIED * (each.bias_error or 0.0)
        if is_tied and _complexity(corrections[each.correction]) < _complexity(corrections[best.correction]):
            best = each
    bias = f"The bias of {best.correction}, signs apart, is {biases[best.correction]:.2g}, "
    if best.correction == least:
        bias += "the smallest of all."
    else:
        bias += f"within its error of that of {least} ({biases[least]:.2g}), and {best.correction} is simpler."
    return best.correction, f"{bias} It has an ESS of {best.ess:.2g} and keeps {best.kept:.1%} of the tokens."


def _complexity(correction: Correction) -> tuple[int, bool, int]:
    """How much there is to a correction; of two, the simpler one has the smaller value."""
    bounds = [correction.lower, correction.upper]
    for rule in correction.rejections:
        bounds += [rule.lower, rule.upper]
    regions = len(correction.trust_regions)
    parts = len(correction.rejections) + regions
    parts += correction.action != "none"
    parts += correction.normalize != "none"
    return parts, correction.level != "token", regions + sum(bound is not None for bound in bounds)
