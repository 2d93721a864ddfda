# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics: what each key means, its unit, its healthy and critical range, and where these come from."""

import math
from collections.abc import Callable
from dataclasses import dataclass


Bounds = tuple[float | None, float | None]
"""Smallest and largest value; `None` is open."""


def excess(value: float, bounds: Bounds) -> float:
    """How far `value` is outside the bounds; inside, minus the distance to the nearest; minus infinity if both are open."""
    low, high = bounds
    return max(-math.inf if low is None else low - value, -math.inf if high is None else value - high)


def range_text(bounds: Bounds, form: Callable[[float], str] = "{:g}".format) -> str:
    """The bounds for people, such as `≤ 0.02`; empty if both are open."""
    low, high = bounds
    if low is not None and high is not None:
        return f"{form(low)} … {form(high)}"
    return f"≥ {form(low)}" if low is not None else f"≤ {form(high)}" if high is not None else ""


@dataclass(frozen=True)
class Metric:
    """One row of the catalogue."""

    key: str
    """Name in the logs, `area/quantity/statistic`."""
    unit: str
    """`nats`, `ratio`, `probability`, `share` or `count`."""
    meaning: str
    """What it says, in one line."""
    reduction: str
    """How values of many tokens become one."""
    healthy: Bounds = (None, None)
    """Smallest and largest value of a healthy dense bf16 run; `None` is open."""
    critical: Bounds = (None, None)
    """Values outside are critical; between healthy and critical is a warning. `None`: no value is critical."""
    source: str = ""
    """Where the definition or the range comes from."""

    def outside(self, value: float) -> float:
        """How far `value` is outside the healthy range; 0 inside, infinite if it is NaN."""
        return math.inf if math.isnan(value) else max(excess(value, self.healthy), 0.0)

    def badness(self, value: float) -> float:
        """What makes a value worse than another: how far it is outside or, inside, how near to a bound; its size if it has no
        range."""
        if math.isnan(value):
            return math.inf
        return abs(value) if self.healthy == (None, None) else excess(value, self.healthy)

    @property
    def healthy_text(self) -> str:
        """The healthy range for people, as of [`range_text`]."""
        return range_text(self.healthy)


_KL = "http://joschu.net/blog/kl-approx.html"
_DPPO = "https://huggingface.co/papers/2602.04879"
_COLLAPSE = "https://richardli.xyz/rl-collapse"
_ESS = "https://huggingface.co/papers/2602.17616"
_SLIME = "slime: dense runs report .011 (abs_diff) and 1e-5 to 1e-3 (k3), collapsing ones 2 to 3 times their own level"
_VERL = "verl's documented alarms; the healthy mean is tightened"
_OURS = "synthesis of published runs, not validated against labelled ones"

METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("mismatch/diff/mean", "nats", "trainer minus engine log-prob; a bias, not a size", "mean over tokens"),
        Metric(
            "mismatch/abs_diff/mean",
            "nats",
            "size of the log-prob gap",
            "mean over tokens",
            (None, 0.02),
            (None, 0.05),
            _SLIME,
        ),
        Metric("mismatch/abs_diff/p50", "nats", "typical gap", "median over tokens, within 1.6 %"),
        Metric(
            "mismatch/abs_diff/p99",
            "nats",
            "gap of the worst 1 %",
            "quantile over tokens, within 1.6 %",
            (None, 0.2),
            (None, 1.0),
            _OURS,
        ),
        Metric(
            "mismatch/abs_diff/max", "nats", "largest gap of one token", "maximum", (None, 2.0), (None, 7.0), _OURS
        ),
        Metric("mismatch/k1/mean", "nats", "KL(engine || trainer), plain estimator", "mean over tokens", source=_KL),
        Metric(
            "mismatch/k3/mean",
            "nats",
            "KL(engine || trainer), low-variance estimator: the number to watch",
            "mean over tokens",
            (None, 1e-3),
            (None, 1e-2),
            f"{_KL}; {_SLIME}",
        ),
        Metric(
            "mismatch/prob_diff/mean",
            "probability",
            "size of the probability gap",
            "mean over tokens",
            (None, 0.004),
            (None, 0.01),
            _DPPO,
        ),
        Metric("mismatch/prob_diff/max", "probability", "largest probability gap of one token", "maximum"),
        Metric(
            "mismatch/ratio/mean",
            "ratio",
            "exp(diff), raw; 1 in expectation if tokens were drawn from the reported distribution",
            "mean over tokens",
            (0.98, 1.02),
            (0.95, 1.05),
            _OURS,
        ),
        Metric("mismatch/ratio/min", "ratio", "smallest raw ratio", "minimum"),
        Metric("mismatch/ratio/max", "ratio", "largest raw ratio", "maximum"),
        Metric(
            "mismatch/z_ratio",
            "standard errors",
            "how far the mean ratio is from 1; with a mean below 1: truncated sampling or a wrong temperature. Rounding "
            "alone makes it large where the gap is below 1e-4",
            "(mean - 1) / (std / sqrt(n))",
        ),
        Metric(
            "mismatch/pearson",
            "correlation",
            "correlation of trainer and engine probabilities; low: log-probs belong to other tokens",
            "over tokens",
            (0.99, None),
            (0.95, None),
            _OURS,
        ),
        Metric(
            "mismatch/ess/token",
            "share",
            "effective sample size of raw token ratios",
            "(sum w)^2 / (n sum w^2)",
            (0.95, None),
            (0.8, None),
            _ESS,
        ),
        Metric(
            "mismatch/ess/sequence",
            "share",
            "effective sample size of raw sequence ratios",
            "(sum w)^2 / (n sum w^2)",
            (0.5, None),
            (0.3, None),
            _ESS,
        ),
        Metric(
            "mismatch/chi2/token",
            "ratio",
            "mean squared ratio minus 1",
            "mean over tokens",
            (None, 0.05),
            (None, 1.0),
            _OURS,
        ),
        Metric(
            "mismatch/chi2/sequence",
            "ratio",
            "mean squared sequence ratio minus 1",
            "mean over completions",
            source=_COLLAPSE,
        ),
        Metric(
            "mismatch/sequence_ratio/mean", "ratio", "product of a completion's ratios, raw", "mean over completions"
        ),
        Metric("mismatch/sequence_ratio/min", "ratio", "smallest sequence ratio", "minimum"),
        Metric("mismatch/sequence_ratio/max", "ratio", "largest sequence ratio", "maximum"),
        Metric(
            "mismatch/geometric_ratio/mean", "ratio", "length-normalised sequence ratio, raw", "mean over completions"
        ),
        Metric("mismatch/geometric_ratio/min", "ratio", "smallest geometric ratio", "minimum"),
        Metric("mismatch/geometric_ratio/max", "ratio", "largest geometric ratio", "maximum"),
        Metric(
            "mismatch/log_ppl/old", "nats", "minus mean log-prob of a completion, trainer", "mean over completions"
        ),
        Metric(
            "mismatch/log_ppl/sampling", "nats", "minus mean log-prob of a completion, engine", "mean over completions"
        ),
        Metric(
            "mismatch/log_ppl/diff",
            "nats",
            "log_ppl/old minus log_ppl/sampling",
            "mean over completions",
            (-0.005, 0.005),
            (-0.02, 0.02),
            _OURS,
        ),
        Metric(
            "mismatch/unscored_fraction",
            "share",
            "tokens without a sampling log-prob",
            "over tokens",
            (None, 0.0),
            (None, 0.0),
            "a log-prob that is missing is a fault of the engine",
        ),
        Metric(
            "mismatch/nonfinite_count",
            "count",
            "tokens with an infinite log-ratio",
            "sum",
            (None, 0.0),
            (None, 0.0),
            "a sampled token cannot be impossible",
        ),
        Metric(
            "mismatch/outside_support_fraction",
            "share",
            "tokens that the trainer's own top-p, top-k or min-p would have dropped; they are kept all the same",
            "over tokens in the mask",
            (None, 0.02),
            source=_OURS,
        ),
        *(
            Metric(
                f"correction/{verb}_fraction/{side}",
                "share",
                f"tokens {verb} for a ratio {where} the bounds",
                "over tokens in the mask",
            )
            for verb in ("truncated", "masked", "rejected")
            for side, where in (("low", "below"), ("high", "above"))
        ),
        Metric(
            "correction/trust_region_fraction",
            "share",
            "tokens that a trust region gives weight 0",
            "over tokens in the mask after rejections",
        ),
        Metric(
            "kl/k1", "nats", "KL(policy || reference), plain estimator", "mean over tokens in the loss", source=_KL
        ),
        Metric("kl/k2", "nats", "the same, half the squared log-ratio", "mean over tokens in the loss", source=_KL),
        Metric("kl/k3", "nats", "the same, low-variance estimator", "mean over tokens in the loss", source=_KL),
        Metric(
            "kl/k2_over_k3",
            "ratio",
            "1 near the reference; away from 1, the policy has left it, or tokens came from another policy",
            "of the means",
        ),
        Metric(
            "correction/rejected_batches",
            "count",
            "rollout batches (of all ranks) that were rejected whole",
            "sum",
            (None, 0.0),
            source="it contributes nothing to the update",
        ),
        Metric(
            "correction/weight/mean",
            "ratio",
            "weight before normalization",
            "mean over kept tokens",
            (0.9, 1.1),
            (0.5, 2.0),
            _VERL,
        ),
        Metric(
            "correction/weight/std", "ratio", "spread of the weights", "over kept tokens", (None, 1.0), source=_VERL
        ),
        Metric("correction/weight/min", "ratio", "smallest weight", "minimum"),
        Metric("correction/weight/max", "ratio", "largest weight", "maximum"),
        Metric(
            "correction/ess",
            "share",
            "effective sample size of the weights",
            "(sum w)^2 / (n sum w^2)",
            (0.95, None),
            (0.3, None),
            _ESS,
        ),
    )
}
"""Every metric this package logs, by key."""
