# SPDX-License-Identifier: Apache-2.0
"""What a glance at a run should tell."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..metrics.alerts import AlertEvent
from .curve import _HEADLINES, Curve, healthy_range, number


if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class Verdict:
    """What a glance should tell."""

    level: Literal["healthy", "warning", "critical", "unknown"]
    """The worst that is open at the end; `"unknown"` if nothing was logged that could tell."""
    sentence: str
    """Since when and which metric, in words."""
    step: int | None = None
    """Since when; `None` for always, or if there is no telling."""
    key: str | None = None
    """Which metric."""


_ENOUGH = 5  # values of a metric that the alert rules need


def _verdict(run: "Run") -> Verdict:
    judged = [curve for curve in run.measured if curve.healthy != (None, None)]
    if not judged:
        return Verdict("unknown", "Nothing that was logged says how far the engine is from the trainer.")
    episodes: dict[str, list[AlertEvent]] = {}  # what is open, from its opening on
    closed: list[tuple[AlertEvent, AlertEvent]] = []
    for event in run.events:
        if event.severity == "recovered":
            if opened := episodes.pop(event.key, None):  # none where the metric was logged by another name
                closed.append((opened[0], event))
        else:
            episodes.setdefault(event.key, []).append(event)
    severity: Literal["critical", "warning"]
    for severity in ("critical", "warning"):
        if found := [events for events in episodes.values() if events[-1].severity == severity]:
            first = min((next(event for event in events if event.severity == severity) for events in found), key=_step)
            also = ", ".join(f"`{key}`" for key in episodes if key != first.key)
            return Verdict(
                severity,
                f"Since step {first.step}. {first.message} The last value is {number(run.curves[first.key].values[-1])}."
                + (f" Also open: {also}." if also else ""),
                first.step,
                first.key,
            )
    few = [curve for curve in judged if len(curve.steps) < _ENOUGH]
    for severity, judge in (("critical", Curve.is_critical), ("warning", Curve.is_outside)):
        for curve in few:
            if judge(curve, curve.values[-1]):
                return Verdict(
                    severity,
                    f"`{curve.key}` is {number(curve.values[-1])} at step {curve.steps[-1]}, healthy is "
                    f"{healthy_range(curve.healthy)}. There are too few steps to tell since when.",
                    key=curve.key,
                )
    if closed:
        opening, recovery = max(closed, key=lambda pair: pair[1].step)
        return Verdict(
            "healthy",
            f"Since step {recovery.step}. Before, {len(closed)} alert(s); the last to end opened at step {opening.step}: "
            f"{recovery.message}",
            recovery.step,
            recovery.key,
        )
    steps = judged[0].steps
    over = f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    curve = run.curves.get(_HEADLINES[0], judged[0])
    return Verdict(
        "healthy",
        f"No alert over {over}. `{curve.key}` ends at {number(curve.values[-1])}, healthy is {healthy_range(curve.healthy)}.",
    )


def _step(event: AlertEvent) -> int:
    return event.step
