# SPDX-License-Identifier: Apache-2.0
"""One logged metric over the steps: its meaning, its healthy range, and the values outside of it."""

from dataclasses import dataclass

from ..metrics.alerts import STOCK
from ..metrics.catalogue import METRICS, Metric, Range, excess


_OURS = {stock: ours for ours, stock in STOCK.items()}
_STOCK_MEANING = {
    f"sampling/importance_sampling_ratio/{name}": f"{word} weight, after TRL's correction"
    for name, word in (("mean", "mean"), ("min", "smallest"), ("max", "largest"))
}
TRAINING = (
    "reward",
    "reward_std",
    "entropy",
    "kl",
    "loss",
    "grad_norm",
    "learning_rate",
    "lr_scale",
    "completions/mean_length",
    "completions/clipped_ratio",
)
"""Keys that are shown beside our metrics."""
HEADLINES = (
    "mismatch/k3/mean",
    "mismatch/abs_diff/mean",
    "mismatch/ess/sequence",
    "mismatch/ratio/mean",
    "mismatch/log_ppl/diff",
    "correction/ess",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "reward",
)
"""Keys of the key numbers of a run, the most important first."""


def metric_of(key: str) -> Metric | None:
    """The entry of [`METRICS`] for a logged key, be it ours or TRL's name of the same quantity; `None` for other keys."""
    return METRICS.get(_OURS.get(key, key))


@dataclass(frozen=True)
class Curve:
    """One logged metric over the steps that logged it."""

    key: str
    """Its key in the logs."""
    steps: list[int]
    """The steps, ascending."""
    values: list[float]
    """The value at each step: infinite where the metric overflowed, never NaN."""

    @property
    def healthy(self) -> Range:
        """Its healthy range; `None` is open."""
        metric = metric_of(self.key)
        return metric.healthy if metric else (None, None)

    @property
    def meaning(self) -> str:
        """Its meaning in one line; empty for a key that is not in [`METRICS`] and measures nothing that is."""
        metric = metric_of(self.key)
        return metric.meaning if metric else _STOCK_MEANING.get(self.key, "")

    def is_outside(self, value: float) -> bool:
        """Whether a value is outside the healthy range."""
        return excess(value, self.healthy) > 0

    def is_critical(self, value: float) -> bool:
        """Whether a value is outside the critical range."""
        metric = metric_of(self.key)
        return metric is not None and excess(value, metric.critical) > 0

    @property
    def outside(self) -> list[int]:
        """The steps whose value is outside the healthy range."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if self.is_outside(value)]

    @property
    def worst(self) -> tuple[int, float] | None:
        """Step and value farthest out of the healthy range, or nearest to leaving it; `None` without a range."""
        if self.healthy == (None, None):
            return None
        return max(zip(self.steps, self.values, strict=True), key=lambda point: excess(point[1], self.healthy))
