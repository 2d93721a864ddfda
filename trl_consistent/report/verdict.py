# SPDX-License-Identifier: Apache-2.0
"""The verdict on a run: how bad the worst thing is that is open at its end, and since when."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..metrics.alerts import AlertEvent
from .curve import HEADLINES, Curve
from .wording import healthy_range, number


if TYPE_CHECKING:
    from .run import Run


_ENOUGH_VALUES = 5  # of a metric, for the alert rules to judge it


@dataclass(frozen=True)
class Verdict:
    """How bad the worst thing is that is open at the end of a run, and since when."""

    level: Literal["healthy", "warning", "critical", "unknown"]
    """Severity of the worst alert that is open at the end; `"unknown"` if no metric was logged that could tell."""
    sentence: str
    """Since when, and which metric, in words."""
    step: int | None = None
    """The step since which the level holds; `None` if it always did, or if there is no telling."""
    key: str | None = None
    """The metric that decides."""


def judge(run: "Run") -> Verdict:
    """The verdict on a run, from the alerts over its logs and, of metrics with few values, from the last one."""
    judged = [curve for curve in run.measured if curve.healthy != (None, None)]
    if not judged:
        return Verdict("unknown", "Nothing that was logged says how far the engine is from the trainer.")
    episodes = _Episodes(run.events)
    return (
        _of_open_alerts(run, episodes)
        or _of_last_values(judged)
        or _of_recovery(episodes)
        or _of_no_alert(run, judged)
    )


class _Episodes:
    """The alerts of a run by episode, which is the time from an alert to its recovery.

    Attributes:
        open: Of each metric that has not recovered, its alerts since the first.
        closed: First alert and recovery of each episode that is over.
    """

    def __init__(self, events: list[AlertEvent]):
        self.open: dict[str, list[AlertEvent]] = {}
        self.closed: list[tuple[AlertEvent, AlertEvent]] = []
        for event in events:
            if event.severity != "recovered":
                self.open.setdefault(event.key, []).append(event)
            elif alerts := self.open.pop(event.key, None):  # none where the metric was logged by another name
                self.closed.append((alerts[0], event))


def _of_open_alerts(run: "Run", episodes: _Episodes) -> Verdict | None:
    severity: Literal["critical", "warning"]
    for severity in ("critical", "warning"):
        firsts = [
            next(event for event in alerts if event.severity == severity)
            for alerts in episodes.open.values()
            if alerts[-1].severity == severity
        ]
        if not firsts:
            continue
        first = min(firsts, key=lambda event: event.step)
        sentence = f"Since step {first.step}. {first.message} "
        sentence += f"The last value is {number(run.curves[first.key].values[-1])}."
        if others := ", ".join(f"`{key}`" for key in episodes.open if key != first.key):
            sentence += f" Also open: {others}."
        return Verdict(severity, sentence, first.step, first.key)
    return None


def _of_last_values(judged: list[Curve]) -> Verdict | None:
    """The verdict of the metrics that have too few values for the alert rules; `None` if none of these is outside."""
    few = [curve for curve in judged if len(curve.steps) < _ENOUGH_VALUES]
    critical = [curve for curve in few if curve.is_critical(curve.values[-1])]
    outside = [curve for curve in few if curve.is_outside(curve.values[-1])]
    if not (critical or outside):
        return None
    curve = (critical or outside)[0]
    return Verdict(
        "critical" if critical else "warning",
        f"`{curve.key}` is {number(curve.values[-1])} at step {curve.steps[-1]}, healthy is "
        f"{healthy_range(curve.healthy)}. There are too few steps to tell since when.",
        key=curve.key,
    )


def _of_recovery(episodes: _Episodes) -> Verdict | None:
    if not episodes.closed:
        return None
    opening, recovery = max(episodes.closed, key=lambda pair: pair[1].step)
    return Verdict(
        "healthy",
        f"Since step {recovery.step}. Before, {len(episodes.closed)} alert(s); the last to end opened at step "
        f"{opening.step}: {recovery.message}",
        recovery.step,
        recovery.key,
    )


def _of_no_alert(run: "Run", judged: list[Curve]) -> Verdict:
    steps = judged[0].steps
    over = f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    curve = run.curves.get(HEADLINES[0], judged[0])
    return Verdict(
        "healthy",
        f"No alert over {over}. `{curve.key}` ends at {number(curve.values[-1])}, healthy is "
        f"{healthy_range(curve.healthy)}.",
    )
