# SPDX-License-Identifier: Apache-2.0
"""When a logged metric is worth an alert: outside its range, above its own past, or about to leave its range."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from .catalogue import METRICS, Range, excess
from .trends import _TREND_Z, _scatter, _slope


Severity = Literal["warning", "critical", "recovered"]
Kind = Literal["level", "baseline", "trend"]
Thresholds = Mapping[str, tuple[Any, Any] | None]


@dataclass(frozen=True)
class AlertEvent:
    """A metric went wrong, got worse, or recovered."""

    step: int
    """Optimizer step of the log."""
    key: str
    """The metric, by its name in the logs."""
    kind: Kind
    """`level`: outside the range of [`METRICS`]; `baseline`: a multiple of the run's own past; `trend`: on its way."""
    severity: Severity
    """`warning`, `critical` or `recovered`."""
    value: float
    """The metric at `step`."""
    threshold: float
    """What the value is compared with, in the unit of the metric."""
    message: str
    """All of this in words, with what the metric means and what to do."""


STOCK = {
    "mismatch/abs_diff/mean": "sampling/sampling_logp_difference/mean",
    "mismatch/abs_diff/max": "sampling/sampling_logp_difference/max",
}
"""What vanilla TRL logs of the same quantity (over a rank, then averaged over ranks)."""

# The same tokens make |d|, k3 and the ESS of tokens large. `thresholds` brings these back.
_SAID_BY_ANOTHER = ("mismatch/chi2/token", "mismatch/prob_diff/mean", "mismatch/abs_diff/p99")

# The ESS of sequence weights falls as exp(-n * variance of d) with the n tokens of a completion, so its range holds for
# short ones only. A value that healthy noise (k3 = variance / 2) explains at the logged length is no alert.
_LENGTH = "completions/mean_length"
_FALLS_WITH_LENGTH = ("mismatch/ess/sequence", "correction/ess")
_K3, _ABS_DIFF, _ESS = "mismatch/k3/mean", "mismatch/abs_diff/mean", "mismatch/ess/sequence"

# Against the run's own past, k3 or |d|: runs were reported to collapse from 2 to 5 times their own level.
_BASELINE = (_K3, _ABS_DIFF)
_BASELINE_FACTORS = (2.0, 5.0)
_BASELINE_LOGS = 10  # before there is one

# Change over a window that counts as a trend; of |d| the root of that of k3, which is its square.
_TREND_FACTORS = {_K3: 2.0, _ABS_DIFF: math.sqrt(2.0), _ESS: 2.0}


# Of a healthy limit: below it no multiple matters (k3 going from 1e-11 to 1e-10).
_FLOOR = 0.1
_SURE = 4.0  # standard errors beyond a limit

# The ranges come from published runs, to a digit: a warning opens this share of the way from healthy to critical (k3 at
# 1.9e-3, |d| at .023) and ends at healthy.
_EDGE = 0.1

_SYNC = "check that the engine had the weights of this step, then dtype, temperature and top-p of engine and trainer"
_ENGINE = "see which tokens in a record; if the engine never scores them, check its log-prob settings"
_LONG = "completions are too long or the gap too large for sequence weights: use token or geometric ones"
_BOUNDS = "see `correction/*_fraction/*`: widen the bounds, or find the cause of the mismatch"
_NEXT_STEP = {
    "mismatch/ratio/mean": "below 1, compare top-p, top-k, min-p and temperature of engine and trainer; above 1, the log-probs",
    "mismatch/pearson": "check that log-probs and tokens line up: shifted by one, or tokenized again after generation",
    "mismatch/ess/sequence": _LONG,
    "mismatch/unscored_fraction": _ENGINE,
    "mismatch/nonfinite_count": _ENGINE,
    "mismatch/outside_support_fraction": "compare top-p, top-k and min-p of engine and trainer",
    "correction/rejected_batches": _BOUNDS,
    "correction/weight/mean": _BOUNDS,
    "correction/weight/std": _BOUNDS,
    "correction/ess": _BOUNDS,
}


def _edge(healthy: Range, critical: Range) -> Range:
    """Where warnings open."""
    low, high = (
        limit if limit is None or far is None else limit + _EDGE * (far - limit)
        for limit, far in zip(healthy, critical, strict=True)
    )
    return low, high


# of d, at most, where the k3 of noise is no warning
_HEALTHY_VARIANCE = 2 * (_edge(METRICS[_K3].healthy, METRICS[_K3].critical)[1] or 0.0)


def _nearest(value: float, bounds: Range) -> float:
    """The bound that the value is beyond, or would be first."""
    low, high = bounds
    if low is None or high is None:
        return high if low is None else low  # type: ignore[return-value]
    return low if value - low < high - value else high


@dataclass
class _Episode:
    told: AlertEvent
    """The last event."""
    since: int
    worst: float
    worst_step: int
    quiet: int = 0
    """Logs in a row with nothing wrong."""


@dataclass(frozen=True)
class _Vote:
    """What one rule says of the newest log."""

    severity: Severity
    kind: Kind
    threshold: float
    because: str


class _Watch:
    """All rules of one metric, its recent values and its open episode: one cause is told once."""

    def __init__(
        self, key: str, warn: Range, critical: Range, opens: Range, window: int, persistence: tuple[int, int]
    ):
        self.key, self.warn, self.critical, self.opens = key, warn, critical, opens
        self.at_once = warn == (None, 0.0)
        self.needed, self.of = (1, 1) if self.at_once else persistence
        self.quiet_logs = 2 * persistence[1]
        self.logs: deque[tuple[int, float, float | None]] = deque(maxlen=window)  # step, value, length
        self.past: deque[float] = deque(maxlen=window)  # before the last `of`; what goes wrong never becomes normal
        self.episode: _Episode | None = None

    def _bounds(self, bounds: Range, length: float | None) -> Range:
        low, high = bounds
        if length and low is not None and self.key in _FALLS_WITH_LENGTH:
            low = min(low, math.exp(-_HEALTHY_VARIANCE * length))
        return low, high

    def _scaled(self, value: float) -> float:
        """Sizes as logs, which makes their scatter even: one token can be half of the k3 of a small batch."""
        high = self.warn[1]
        if self.warn[0] is not None or high is None or high <= 0:
            return value
        return math.log(max(value, _FLOOR * high))

    def _beyond(self, bounds: Range) -> bool:
        """Whether the newest and `needed` of the last `of` values are outside, and by more than noise."""
        recent = list(self.logs)[-self.of :]
        if len(recent) < self.needed:
            return False
        excesses = []
        for _, value, length in recent:
            low, high = (None if bound is None else self._scaled(bound) for bound in self._bounds(bounds, length))
            excesses.append(excess(self._scaled(value), (low, high)))
        outside, needed = excesses[-1] > 0, sorted(excesses)[-self.needed]
        if not outside or self.at_once or len(self.logs) < 3:
            return outside and self.at_once
        values = [self._scaled(value) for _, value, _ in self.logs]
        # Standard errors of a median; more of them while few differences tell the scatter.
        sure = _SURE * (1 + 6 / (len(values) - 1))
        return needed > sure * 1.2533 * _scatter(values) / math.sqrt(len(recent))

    def _level(self) -> _Vote | None:
        _, value, length = self.logs[-1]
        levels: tuple[tuple[Severity, Range, Range, str], ...] = (
            ("critical", self.critical, self.critical, "critical"),
            ("warning", self.opens, self.warn, "healthy"),
        )
        for severity, opens, bounds, name in levels:
            if opens != (None, None) and self._beyond(opens):
                limit = _nearest(value, self._bounds(bounds, length))
                side = "above" if bounds[1] is not None and limit == bounds[1] else "below"
                return _Vote(severity, "level", limit, f"{side} {limit:.3g}, the {name} limit")
        return None

    @property
    def _baseline(self) -> float | None:
        return median(self.past) if len(self.past) >= _BASELINE_LOGS else None

    def _baseline_limits(self) -> dict[Severity, float]:
        """Above what a multiple of the baseline is a warning, and critical."""
        baseline, healthy = self._baseline, self.warn[1]
        if self.key not in _BASELINE or baseline is None or healthy is None:
            return {}
        warn, critical = (factor * baseline for factor in _BASELINE_FACTORS)
        return {"critical": max(critical, healthy), "warning": max(warn, _FLOOR * healthy)}

    def _against_baseline(self) -> _Vote | None:
        value, before = self.logs[-1][1], self._baseline or 1.0
        for severity, limit in self._baseline_limits().items():
            if self._beyond((None, limit)):
                because = f"above {limit:.3g}, at {value / before:.1f} times its own {before:.3g} before"
                return _Vote(severity, "baseline", limit, because)
        return None

    def _trend(self) -> _Vote | None:
        """A steady change that leaves the healthy range if it goes on for another window."""
        factor, n = _TREND_FACTORS.get(self.key), len(self.logs)
        if factor is None or n < (self.logs.maxlen or 0):
            return None
        falls, length = self.key == _ESS, self.logs[-1][2]
        if falls:  # -log ESS is n * variance: what each token adds
            series = [-math.log(max(value, 1e-300)) / (each or 1.0) for _, value, each in self.logs]
        else:
            series = [value for _, value, _ in self.logs]
        logs = [math.log(max(value, 1e-15)) for value in series]
        if median(logs[-n // 3 :]) - median(logs[: n // 3]) < math.log(factor) / 2:
            return None  # no need to look at all pairs
        slope, z = _slope(logs)
        change = slope * (n - 1)
        if z < _TREND_Z or change < math.log(factor):
            return None
        # The line's start and end, and where it will be
        line = [math.exp(median(logs) + change * windows) for windows in (-0.5, 0.5, 1.5)]
        start, end, ahead = (math.exp(-x * (length or 1.0)) for x in line) if falls else line
        if excess(ahead, self._bounds(self.opens, length)) <= 0:
            return None
        limit = _nearest(ahead, self._bounds(self.warn, length))
        because = (
            f"{'falling' if falls else 'rising'} over the last {n} logs, from {start:.3g} to {end:.3g}; as many more at this "
            f"pace lead past {limit:.3g}, the healthy limit"
        )
        return _Vote("warning", "trend", limit, because)

    def _is_quiet(self) -> bool:
        _, value, length = self.logs[-1]
        limit = self._baseline_limits().get("warning", math.inf)
        return excess(value, self._bounds(self.warn, length)) <= 0 and value <= limit

    def update(self, step: int, value: float, length: float | None, name: str) -> AlertEvent | None:
        if self.episode is None and len(self.logs) >= self.of:
            self.past.append(self.logs[-self.of][1])
        self.logs.append((step, value, length))
        trend = self._trend()
        votes = [vote for vote in (self._level(), self._against_baseline(), trend) if vote is not None]
        vote = next((vote for vote in votes if vote.severity == "critical"), votes[0] if votes else None)
        episode = self.episode
        if episode is None:
            if vote is None:
                return None
            told = self._event(vote, step, value, name)
            self.episode = _Episode(told, step, value, step)
            return told
        if excess(value, self.warn) > excess(episode.worst, self.warn):
            episode.worst, episode.worst_step = value, step
        if vote is not None and vote.severity == "critical" and episode.told.severity == "warning":
            episode.told = self._event(vote, step, value, name)
            return episode.told
        episode.quiet = episode.quiet + 1 if trend is None and self._is_quiet() else 0
        if episode.quiet < self.quiet_logs:
            return None
        self.episode = None
        limit = _nearest(value, self._bounds(self.warn, length))
        message = (
            f"`{name}` has recovered: {value:.3g} at step {step}, within {limit:.3g} for {episode.quiet} logs. The "
            f"{episode.told.severity} episode began at step {episode.since} and lasted {step - episode.since} steps; the "
            f"worst value was {episode.worst:.3g}, at step {episode.worst_step}."
        )
        return AlertEvent(step, name, episode.told.kind, "recovered", value, limit, message)

    def _event(self, vote: _Vote, step: int, value: float, name: str) -> AlertEvent:
        persistent = "" if self.at_once or vote.kind == "trend" else f", in {self.needed} of the last {self.of} logs"
        meaning = f" Meaning: {METRICS[self.key].meaning}." if self.key in METRICS else ""
        message = (
            f"`{name}` is {value:.3g} at step {step} ({vote.severity}): {vote.because}{persistent}.{meaning} "
            f"Next: {_NEXT_STEP.get(self.key, _SYNC)}."
        )
        return AlertEvent(step, name, vote.kind, vote.severity, value, vote.threshold, message)


def _bounds_of(key: str, thresholds: Any) -> tuple[Range, Range]:
    """The healthy and the critical range that a user's `(warn, critical)` stands for."""
    given = f"`thresholds[{key!r}]` is {thresholds!r}"
    if not isinstance(thresholds, (tuple, list)) or len(thresholds) != 2:
        raise ValueError(f"{given}; give `(warn, critical)`, or `None` to watch it no more.")
    low, high = METRICS[key].healthy if key in METRICS else (None, None)
    high_is_bad: bool | None = None
    if (low is None) != (high is None):
        high_is_bad = high is not None
    else:
        numbers = [value for value in thresholds if isinstance(value, (int, float))]
        if len(numbers) == 2 and numbers[0] != numbers[1]:
            high_is_bad = numbers[0] < numbers[1]

    def bounds(value: Any) -> Range:
        if value is None:
            return None, None
        if isinstance(value, (tuple, list)) and len(value) == 2:
            return value[0], value[1]
        if not isinstance(value, (int, float)) or high_is_bad is None:
            raise ValueError(
                f"{given}; {value!r} does not say which side is bad: give a pair (low, high), `None` is open."
            )
        return (None, value) if high_is_bad else (value, None)

    warn, critical = bounds(thresholds[0]), bounds(thresholds[1])
    for bound, is_inside in zip(critical, (warn[0], warn[1]), strict=True):
        if bound is not None and is_inside is not None and excess(bound, warn) < 0:
            raise ValueError(f"{given}: {bound} would be critical before it is a warning. Give `(warn, critical)`.")
    return warn, critical


def value_of(logs: Mapping[str, Any], key: str) -> float | None:
    """The logged value of a metric, if it is a finite number."""
    value = logs.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def name_in(logs: Mapping[str, Any], key: str) -> str:
    """A metric's name in these logs: ours, or what vanilla TRL calls it."""
    return STOCK[key] if key in STOCK and key not in logs else key


class Alerts:
    """Judges one log after another; knows each metric's recent past and what is wrong with it now.

    - *Level*: outside the healthy, or critical, range.
    - *Baseline*: k3 or |d| above 2 (critical: 5) times the run's own median before.
    - *Trend* (a warning): k3 or |d| rising, the ESS of sequences falling, steadily over `window` logs.

    One noisy log is no alert: levels and multiples must hold in `persistence[0]` of the last `persistence[1]` logs by more
    than the scatter of the values explains; only what must be 0 is told at once. A metric has one episode at a time: it
    opens, may turn critical, and ends after twice `persistence[1]` logs in a row with nothing wrong.

    Args:
        thresholds (`dict`, *optional*):
            `{key: (warn, critical)}` instead of the ranges of [`METRICS`], which are those of dense bf16. Either may be
            `None`, or a pair `(low, high)` where both sides are bad. `{key: None}` watches the metric no more. Any logged
            key will do.
        window (`int`, *optional*, defaults to `30`):
            Logs that make a trend, a baseline, and the scatter.
        persistence (`tuple[int, int]`, *optional*, defaults to `(3, 5)`):
            So many of the last so many logs.
    """

    def __init__(
        self, *, thresholds: Thresholds | None = None, window: int = 30, persistence: tuple[int, int] = (3, 5)
    ):
        if window < 25:
            raise ValueError(f"`window` is {window} logs, too few to tell a trend from noise: set it to 25 or more.")
        needed, of = persistence
        if not 1 <= needed <= of <= window:
            raise ValueError(
                f"`persistence` is {persistence}: it means n of the last m logs, so set 1 <= n <= m <= `window` ({window})."
            )
        ranges: dict[str, tuple[Range, Range, Range]] = {
            key: (metric.healthy, metric.critical, _edge(metric.healthy, metric.critical))
            for key, metric in METRICS.items()
            if metric.healthy != (None, None) and key not in _SAID_BY_ANOTHER
        }
        for key, pair in (thresholds or {}).items():
            if pair is None:
                ranges.pop(key, None)
            else:
                warn, critical = _bounds_of(key, pair)
                ranges[key] = warn, critical, warn
        self._watches = [_Watch(key, *bounds, window, (needed, of)) for key, bounds in ranges.items()]

    @property
    def open(self) -> dict[str, AlertEvent]:
        """What is wrong now: the last event of each open episode, by metric."""
        return {watch.key: watch.episode.told for watch in self._watches if watch.episode is not None}

    @property
    def has_seen_any(self) -> bool:
        """Whether any of the metrics has been in a log."""
        return any(watch.logs for watch in self._watches)

    def update(self, step: int, logs: Mapping[str, Any]) -> list[AlertEvent]:
        """Judges the log of a step. Values that are missing or not finite numbers are passed over."""
        events, length = [], value_of(logs, _LENGTH)
        for watch in self._watches:
            name = name_in(logs, watch.key)
            if (value := value_of(logs, name)) is not None and (event := watch.update(step, value, length, name)):
                events.append(event)
        return events


def replay(log_history: Iterable[Mapping[str, Any]], alerts: Alerts | None = None) -> list[AlertEvent]:
    """The alerts of a run so far, from the `log_history` of its `trainer_state.json`, vanilla TRL's too.

    Args:
        log_history (iterable of `dict`): Logs with a `step`.
        alerts ([`Alerts`], *optional*): A new one whose settings to use; it can go on from where the logs end.
    """
    alerts = Alerts() if alerts is None else alerts
    return [event for log in log_history for event in alerts.update(log.get("step", 0), log)]
