# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics: what each key means, its unit, its formula, its healthy and critical range, and their source.

To add a metric, add a row here and, where the formula needs something new, a statistic in `metrics/measure.py`; logs, docs,
reports and alerts follow.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:  # the command line reads this catalogue without loading torch
    from ..statistics import Totals


Range = tuple[float | None, float | None]
"""Smallest and largest value; `None` is open."""

Formula = Callable[["Totals"], float | None]
"""Computes a metric from merged statistics; `None` if they do not measure it."""


def excess(value: float, allowed: Range) -> float:
    """How far `value` is outside a range; inside, minus the distance to the nearest end; minus infinity if both are open."""
    low, high = allowed
    return max(-math.inf if low is None else low - value, -math.inf if high is None else value - high)


def range_text(allowed: Range, form: Callable[[float], str] = "{:g}".format) -> str:
    """A range for people, such as `≤ 0.02`; empty if both ends are open."""
    low, high = allowed
    if low is not None and high is not None:
        return f"{form(low)} … {form(high)}"
    if low is not None:
        return f"≥ {form(low)}"
    return "" if high is None else f"≤ {form(high)}"


@dataclass(frozen=True)
class Metric:
    """One row of the catalogue."""

    key: str
    """Name in the logs, `area/quantity/statistic`."""
    unit: str
    """`nats`, `ratio`, `probability`, `share`, `count`, ..."""
    meaning: str
    """Its meaning in one line."""
    reduction: str
    """In words, how values of many tokens become one: what `formula` computes."""
    formula: Formula
    """Computes it from the statistics that `metrics/measure.py` names; `None` if it is undefined or was not measured."""
    healthy: Range = (None, None)
    """Smallest and largest value of a healthy dense bf16 run; `None` is open."""
    critical: Range = (None, None)
    """Values outside are critical; between healthy and critical is a warning. `None`: no value is critical."""
    source: str = ""
    """Where the definition or the range comes from."""

    def outside(self, value: float) -> float:
        """How far `value` is outside the healthy range; 0 inside, infinite if it is NaN."""
        return math.inf if math.isnan(value) else max(excess(value, self.healthy), 0.0)

    def badness(self, value: float) -> float:
        """A number that is larger the worse a value is: how far it is outside the healthy range or, inside, how near to an
        end; the size of the value if the metric has no range."""
        if math.isnan(value):
            return math.inf
        return abs(value) if self.healthy == (None, None) else excess(value, self.healthy)

    @property
    def healthy_text(self) -> str:
        """The healthy range for people, see [`range_text`]."""
        return range_text(self.healthy)


# Formulas. Each is measured only where a count is positive: of scored tokens, of completions, of kept tokens, ...

# A variance that is a smaller part of the mean square than this is rounding: squares of probabilities are float32.
_ROUNDING_OF_SQUARES = 1e-6


def _where(count: str, formula: Callable[["Totals", float], float | None]) -> Formula:
    """A formula that is measured where `count` is positive, and that gets it as its second argument."""

    def measured(totals: "Totals") -> float | None:
        n = totals.get(count)
        return formula(totals, n) if n else None

    return measured


def _value(name: str, count: str) -> Formula:
    """A statistic as it is, such as a maximum."""
    return _where(count, lambda totals, n: totals[name])


def _mean(name: str, count: str) -> Formula:
    """A sum divided by a count."""
    return _where(count, lambda totals, n: totals[name] / n)


def _exp(x: float) -> float:
    """The exponential, which saturates instead of overflowing."""
    return math.exp(min(x, 700.0))


def _exp_of(name: str, count: str) -> Formula:
    """The exponential of a statistic that is kept as a logarithm."""
    return _where(count, lambda totals, n: _exp(totals[name]))


def _size_quantile(q: float) -> Formula:
    """A quantile of |d| over scored tokens."""
    return _where(
        "scored",
        lambda totals, n: totals.quantile("diff_histogram", q, totals["abs_diff_min"], totals["abs_diff_max"]),
    )


def _mean_ratio(totals: "Totals", n: float) -> float:
    """Mean of the token ratios; the statistic is a sum of ratio - 1, which is exact near d = 0."""
    return 1 + totals["excess"] / n


def _mean_squared_ratio(totals: "Totals", n: float) -> float:
    # E[r^2] = 1 + 2 E[r - 1] + E[(r - 1)^2]
    return 1 + 2 * (totals["excess"] / n) + totals["excess_squared"] / n


def _token_ess(totals: "Totals", n: float) -> float | None:
    mean_square = _mean_squared_ratio(totals, n)  # 0 if all ratios are, as those of log-ratios below -100
    return _mean_ratio(totals, n) ** 2 / mean_square if mean_square else None


def _z_ratio(totals: "Totals", n: float) -> float | None:
    excess_mean = totals["excess"] / n
    variance = totals["excess_squared"] / n - excess_mean**2
    return excess_mean / math.sqrt(variance / n) if variance > 0 else None


def _pearson(totals: "Totals", n: float) -> float | None:
    """Correlation of the probabilities of trainer and engine."""
    old_square = totals["p_old_squared"] / n
    sampling_square = totals["p_sampling_squared"] / n
    old_variance = old_square - (totals["p_old"] / n) ** 2
    sampling_variance = sampling_square - (totals["p_sampling"] / n) ** 2
    old_varies = old_variance > _ROUNDING_OF_SQUARES * old_square  # also False if it overflowed to infinity or NaN
    sampling_varies = sampling_variance > _ROUNDING_OF_SQUARES * sampling_square
    if not (old_varies and sampling_varies):
        return None
    covariance = totals["p_product"] / n - totals["p_old"] * totals["p_sampling"] / n**2
    return covariance / math.sqrt(old_variance * sampling_variance)


def _log_mean(totals: "Totals", name: str, n: float) -> float:
    """Log of a mean, of a statistic that is the log of a sum."""
    return totals[name] - math.log(n)


def _sequence_ess(totals: "Totals", n: float) -> float:
    return _exp(2 * _log_mean(totals, "log_sequence", n) - _log_mean(totals, "log_sequence_doubled", n))


def _weight_variance(totals: "Totals", n: float) -> float:
    # Var w = E[(w - 1)^2] - E[w - 1]^2, exact near w = 1
    return max(totals["weight_excess_squared"] / n - (totals["weight"] / n - 1) ** 2, 0.0)


def _weight_ess(totals: "Totals", n: float) -> float | None:
    mean = totals["weight"] / n
    mean_square = _weight_variance(totals, n) + mean**2
    return mean**2 / mean_square if mean_square else None


def _rejected_batches(totals: "Totals", n: float) -> float:
    """Whether the batch was rejected whole; how many, if it was counted batch by batch, see [`counted_as_batch`]."""
    counted = totals.get("rejected_batches")
    return float(totals["kept"] == 0) if counted is None else counted


def _k2_over_k3(totals: "Totals", n: float) -> float | None:
    k2 = totals["reference_k2"] / n
    k3 = totals["reference_k3"] / n
    return k2 / k3 if k3 > 0 else None


def _kl_in_loss(totals: "Totals", n: float) -> float | None:
    used = totals.get("reference_used")
    return None if used is None else used / n


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
        Metric(
            "mismatch/diff/mean",
            "nats",
            "trainer minus engine log-prob; a bias, not a size",
            "mean over tokens",
            _mean("diff", "scored"),
        ),
        Metric(
            "mismatch/abs_diff/mean",
            "nats",
            "size of the log-prob gap",
            "mean over tokens",
            _mean("abs_diff", "scored"),
            (None, 0.02),
            (None, 0.05),
            _SLIME,
        ),
        Metric(
            "mismatch/abs_diff/p50", "nats", "typical gap", "median over tokens, within 1.6 %", _size_quantile(0.5)
        ),
        Metric(
            "mismatch/abs_diff/p99",
            "nats",
            "gap of the worst 1 %",
            "quantile over tokens, within 1.6 %",
            _size_quantile(0.99),
            (None, 0.2),
            (None, 1.0),
            _OURS,
        ),
        Metric(
            "mismatch/abs_diff/max",
            "nats",
            "largest gap of one token",
            "maximum",
            _value("abs_diff_max", "scored"),
            (None, 2.0),
            (None, 7.0),
            _OURS,
        ),
        Metric(
            "mismatch/k1/mean",
            "nats",
            "KL(engine || trainer), plain estimator",
            "mean over tokens",
            _where("scored", lambda totals, n: -totals["diff"] / n),
            source=_KL,
        ),
        Metric(
            "mismatch/k3/mean",
            "nats",
            "KL(engine || trainer), low-variance estimator: the number to watch",
            "mean over tokens",
            _mean("k3", "scored"),
            (None, 1e-3),
            (None, 1e-2),
            f"{_KL}; {_SLIME}",
        ),
        Metric(
            "mismatch/prob_diff/mean",
            "probability",
            "size of the probability gap",
            "mean over tokens",
            _mean("prob_diff", "scored"),
            (None, 0.004),
            (None, 0.01),
            _DPPO,
        ),
        Metric(
            "mismatch/prob_diff/max",
            "probability",
            "largest probability gap of one token",
            "maximum",
            _value("prob_diff_max", "scored"),
        ),
        Metric(
            "mismatch/ratio/mean",
            "ratio",
            "exp(diff), raw; 1 in expectation if tokens were drawn from the reported distribution",
            "mean over tokens",
            _where("scored", _mean_ratio),
            (0.98, 1.02),
            (0.95, 1.05),
            _OURS,
        ),
        Metric("mismatch/ratio/min", "ratio", "smallest raw ratio", "minimum", _exp_of("log_ratio_min", "scored")),
        Metric("mismatch/ratio/max", "ratio", "largest raw ratio", "maximum", _exp_of("log_ratio_max", "scored")),
        Metric(
            "mismatch/z_ratio",
            "standard errors",
            "how far the mean ratio is from 1; with a mean below 1: truncated sampling or a wrong temperature. Rounding "
            "alone makes it large where the gap is below 1e-4",
            "(mean - 1) / (std / sqrt(n))",
            _where("scored", _z_ratio),
        ),
        Metric(
            "mismatch/pearson",
            "correlation",
            "correlation of trainer and engine probabilities; low: log-probs belong to other tokens",
            "over tokens",
            _where("scored", _pearson),
            (0.99, None),
            (0.95, None),
            _OURS,
        ),
        Metric(
            "mismatch/ess/token",
            "share",
            "effective sample size of raw token ratios",
            "(sum w)^2 / (n sum w^2)",
            _where("scored", _token_ess),
            (0.95, None),
            (0.8, None),
            _ESS,
        ),
        Metric(
            "mismatch/ess/sequence",
            "share",
            "effective sample size of raw sequence ratios",
            "(sum w)^2 / (n sum w^2)",
            _where("sequences", _sequence_ess),
            (0.5, None),
            (0.3, None),
            _ESS,
        ),
        Metric(
            "mismatch/chi2/token",
            "ratio",
            "mean squared ratio minus 1",
            "mean over tokens",
            _where("scored", lambda totals, n: _mean_squared_ratio(totals, n) - 1),
            (None, 0.05),
            (None, 1.0),
            _OURS,
        ),
        Metric(
            "mismatch/chi2/sequence",
            "ratio",
            "mean squared sequence ratio minus 1",
            "mean over completions",
            _where("sequences", lambda totals, n: _exp(_log_mean(totals, "log_sequence_doubled", n)) - 1),
            source=_COLLAPSE,
        ),
        Metric(
            "mismatch/sequence_ratio/mean",
            "ratio",
            "product of a completion's ratios, raw",
            "mean over completions",
            _where("sequences", lambda totals, n: _exp(_log_mean(totals, "log_sequence", n))),
        ),
        Metric(
            "mismatch/sequence_ratio/min",
            "ratio",
            "smallest sequence ratio",
            "minimum",
            _exp_of("log_sequence_min", "sequences"),
        ),
        Metric(
            "mismatch/sequence_ratio/max",
            "ratio",
            "largest sequence ratio",
            "maximum",
            _exp_of("log_sequence_max", "sequences"),
        ),
        Metric(
            "mismatch/geometric_ratio/mean",
            "ratio",
            "length-normalised sequence ratio, raw",
            "mean over completions",
            _where("sequences", lambda totals, n: _exp(_log_mean(totals, "log_geometric", n))),
        ),
        Metric(
            "mismatch/geometric_ratio/min",
            "ratio",
            "smallest geometric ratio",
            "minimum",
            _exp_of("log_geometric_min", "sequences"),
        ),
        Metric(
            "mismatch/geometric_ratio/max",
            "ratio",
            "largest geometric ratio",
            "maximum",
            _exp_of("log_geometric_max", "sequences"),
        ),
        Metric(
            "mismatch/log_ppl/old",
            "nats",
            "minus mean log-prob of a completion, trainer",
            "mean over completions",
            _mean("log_ppl_old", "sequences"),
        ),
        Metric(
            "mismatch/log_ppl/sampling",
            "nats",
            "minus mean log-prob of a completion, engine",
            "mean over completions",
            _mean("log_ppl_sampling", "sequences"),
        ),
        Metric(
            "mismatch/log_ppl/diff",
            "nats",
            "log_ppl/old minus log_ppl/sampling",
            "mean over completions",
            _where("sequences", lambda totals, n: (totals["log_ppl_old"] - totals["log_ppl_sampling"]) / n),
            (-0.005, 0.005),
            (-0.02, 0.02),
            _OURS,
        ),
        Metric(
            "mismatch/unscored_fraction",
            "share",
            "tokens without a sampling log-prob",
            "over tokens",
            _mean("unscored", "tokens"),
            (None, 0.0),
            (None, 0.0),
            "a log-prob that is missing is a fault of the engine",
        ),
        Metric(
            "mismatch/nonfinite_count",
            "count",
            "tokens with an infinite log-ratio",
            "sum",
            _value("nonfinite", "tokens"),
            (None, 0.0),
            (None, 0.0),
            "a sampled token cannot be impossible",
        ),
        Metric(
            "mismatch/outside_support_fraction",
            "share",
            "tokens that the trainer's own top-p, top-k or min-p would have dropped; they are kept all the same",
            "over tokens in the mask",
            _mean("outside_support", "support_tokens"),
            (None, 0.02),
            source=_OURS,
        ),
        *(
            Metric(
                f"correction/{verb}_fraction/{side}",
                "share",
                f"tokens {verb} for a ratio {where} the bounds",
                "over tokens in the mask",
                _mean(f"{verb}_{side}", "correction_tokens"),
            )
            for verb in ("truncated", "masked", "rejected")
            for side, where in (("low", "below"), ("high", "above"))
        ),
        Metric(
            "correction/trust_region_fraction",
            "share",
            "tokens that a trust region gives weight 0",
            "over tokens in the mask after rejections",
            _mean("region_stopped", "region_tokens"),
        ),
        Metric(
            "kl/k1",
            "nats",
            "KL(policy || reference), plain estimator",
            "mean over tokens in the loss",
            _mean("reference_k1", "reference_tokens"),
            source=_KL,
        ),
        Metric(
            "kl/k2",
            "nats",
            "the same, half the squared log-ratio",
            "mean over tokens in the loss",
            _mean("reference_k2", "reference_tokens"),
            source=_KL,
        ),
        Metric(
            "kl/k3",
            "nats",
            "the same, low-variance estimator",
            "mean over tokens in the loss",
            _mean("reference_k3", "reference_tokens"),
            source=_KL,
        ),
        Metric(
            "kl",
            "nats",
            "KL(policy || reference) as the loss adds it, by `kl_estimator`; TRL logs it under the same key",
            "mean over tokens in the loss",
            _where("reference_tokens", _kl_in_loss),
        ),
        Metric(
            "kl/k2_over_k3",
            "ratio",
            "1 near the reference; away from 1, the policy has left it, or tokens came from another policy",
            "of the means",
            _where("reference_tokens", _k2_over_k3),
        ),
        Metric(
            "correction/rejected_batches",
            "count",
            "rollout batches (of all ranks) that were rejected whole",
            "sum",
            _where("correction_tokens", _rejected_batches),
            (None, 0.0),
            source="it contributes nothing to the update",
        ),
        Metric(
            "correction/weight/mean",
            "ratio",
            "weight before normalization",
            "mean over kept tokens",
            _mean("weight", "kept"),
            (0.9, 1.1),
            (0.5, 2.0),
            _VERL,
        ),
        Metric(
            "correction/weight/std",
            "ratio",
            "spread of the weights",
            "over kept tokens",
            _where("kept", lambda totals, n: math.sqrt(_weight_variance(totals, n))),
            (None, 1.0),
            source=_VERL,
        ),
        Metric("correction/weight/min", "ratio", "smallest weight", "minimum", _value("weight_min", "kept")),
        Metric("correction/weight/max", "ratio", "largest weight", "maximum", _value("weight_max", "kept")),
        Metric(
            "correction/ess",
            "share",
            "effective sample size of the weights",
            "(sum w)^2 / (n sum w^2)",
            _where("kept", _weight_ess),
            (0.95, None),
            (0.3, None),
            _ESS,
        ),
    )
}
"""Every metric this package logs, by key."""
