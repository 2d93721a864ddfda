# SPDX-License-Identifier: Apache-2.0
"""One logged metric over the steps, and its numbers in words."""

import math
from dataclasses import dataclass

from ..metrics.alerts import STOCK
from ..metrics.catalogue import METRICS, Bounds, Metric, excess, range_text


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
"""Logged keys that are shown beside ours."""

_HEADLINES = (
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


def metric_of(key: str) -> Metric | None:
    """The entry of [`METRICS`] that says what a logged key means; `None` for what is neither ours nor measures the same."""
    return METRICS.get(_OURS.get(key, key))


@dataclass(frozen=True)
class Curve:
    """One logged metric over the steps that logged it."""

    key: str
    """As logged."""
    steps: list[int]
    """Ascending."""
    values: list[float]
    """Infinite where it overflowed, never NaN."""

    @property
    def healthy(self) -> Bounds:
        """Its healthy range; `None` is open."""
        metric = metric_of(self.key)
        return metric.healthy if metric else (None, None)

    @property
    def meaning(self) -> str:
        """In one line; empty for what is not ours."""
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


def number(value: float | None) -> str:
    """A number for a reader: three digits, powers of ten where they save space, nothing for `None`."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e6:
        # Near 1, and from 1000 on, the third digit says too little.
        text = f"{size:.0f}" if size >= 1000 else f"{size:.4g}" if 0.9 < size < 1.1 else f"{size:.3g}"
    else:
        mantissa, exponent = f"{size:.2e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"−{text}" if value < 0 else text


def healthy_range(bounds: Bounds) -> str:
    """A healthy range in words; empty if it is open on both sides."""
    return "0" if bounds == (None, 0.0) else range_text(bounds, number)
