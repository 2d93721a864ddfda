# SPDX-License-Identifier: Apache-2.0
"""Compares two runs: settings, logged metrics, and the steps that both recorded."""

import json
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..metrics.catalogue import METRICS
from ..records.folder import FOLDER, LOGS, STATE
from ..records.logs import run_logs
from ..records.store import Recorded, recorded_steps
from ..tables import KEY_METRICS, Table, flat, judged


def is_run(path: str | Path) -> bool:
    """Whether `path` is the output folder of a run, rather than records."""
    path = Path(path)
    return path.is_dir() and ((path / FOLDER).is_dir() or bool(run_logs(path)))


EDGE = 3
"""Number of logs that make up the start of a run, and its end."""
CLEARLY = 1.5
"""A k3 that is this many times another one is larger by more than noise."""
_PLACES = ("output_dir", "run_name", "logging_dir")  # settings that differ between any two runs


@dataclass(frozen=True)
class Course:
    """How a metric went over a run."""

    start: float
    """Mean of the first [`EDGE`] logs."""
    end: float
    """Mean of the last [`EDGE`] logs."""
    worst: float
    """The value farthest outside the healthy range or, if all are inside, nearest to its bound; for `reward`, the smallest."""
    worst_step: int
    """The step of that value."""


@dataclass(frozen=True)
class RunComparison:
    """What [`compare_runs`] found. Pairs are first run, second run, with `None` where a run has nothing."""

    runs: tuple[str, str]
    """The folders of the two runs."""
    healthier: str | None
    """The folder of the healthier run, if one is."""
    reason: str
    """Why, in a sentence."""
    differences: dict[str, tuple[Any, Any]]
    """What the fingerprints of the last records do not agree on, keys joined by dots."""
    metrics: dict[str, tuple[Course | None, Course | None]]
    """How the logged metrics went: `reward`, and the metrics with a healthy range."""
    steps: dict[int, tuple[dict[str, float], dict[str, float]]]
    """The metrics of the records, at the steps that both runs recorded."""
    notes: tuple[str, ...]
    """What is missing."""

    def tables(self) -> list[Table]:
        """Three tables for people: settings, logged metrics, recorded steps."""
        title = f"A: {self.runs[0]}   B: {self.runs[1]}"
        differences = [(key, *map(_shown, pair)) for key, pair in self.differences.items()]
        same = () if differences or self.notes else ("Settings, engine and versions are the same.",)
        logged = []
        for key, pair in self.metrics.items():
            healthy = METRICS[key].healthy_text if key in METRICS else ""
            logged.append((key, *(cell for course in pair for cell in _cells(key, course)), healthy))
        recorded = []
        for step, both in self.steps.items():
            cells = [judged(key, metrics.get(key)) for key in KEY_METRICS.values() for metrics in both]
            recorded.append((step, *cells))
        columns = (f"{what} {run}" for run in "AB" for what in ("start", "end", "worst", "at step"))
        return [
            Table(title, ("differs", "A", "B"), differences, same + self.notes),
            Table("From the logs", ("metric", *columns, "healthy"), logged),
            Table(
                "At the steps that both recorded",
                ("step", *(f"{name} {run}" for name in KEY_METRICS for run in "AB")),
                recorded,
                (f"Healthier: {self.healthier or 'neither'}. {self.reason}",),
            ),
        ]


def _cells(key: str, course: Course | None) -> tuple[Any, ...]:
    if course is None:
        return (None, None, None, None)
    return *(judged(key, value) for value in (course.start, course.end, course.worst)), course.worst_step


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else json.dumps(value, default=str)


def compare_runs(first: str | Path, second: str | Path) -> RunComparison:
    """Compares two runs: what they were set to, how their metrics went, and which one is healthier.

    The healthier run is the one with fewer `mismatch/*` metrics that end outside their healthy range, among those that both
    runs logged. If both have equally many, it is the one whose k3 ends lower by a factor of at least [`CLEARLY`]. Otherwise
    neither is.

    Args:
        first, second (`str` or `Path`): Output folders.

    Raises:
        `FileNotFoundError`: One of them has neither logs nor records.
    """
    paths = (str(first), str(second))
    notes: list[str] = []
    one, two = (_read(path, notes) for path in paths)
    metrics = {}
    for key in ("reward", *(key for key, metric in METRICS.items() if metric.healthy != (None, None))):
        pair = _course(key, one.logs), _course(key, two.logs)
        if pair != (None, None):
            metrics[key] = pair
    healthier, reason = _healthier(paths, metrics)
    common = [step for step in one.steps if step in two.steps]
    return RunComparison(
        runs=paths,
        healthier=healthier,
        reason=reason,
        differences=_differences(one, two),
        metrics=metrics,
        steps={step: (one.steps[step].metrics, two.steps[step].metrics) for step in common},
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Run:
    """What was found in an output folder."""

    steps: dict[int, Recorded]
    """The recorded steps."""
    logs: list[dict[str, Any]]
    """One entry a logged step."""


def _read(path: str, notes: list[str]) -> _Run:
    """Reads records and logs of a run; adds a note for what it does not have."""
    try:
        steps = {each.step: each for each in recorded_steps(path)}
    except FileNotFoundError:
        steps = {}
    logs = run_logs(path)
    if not steps and not logs:
        raise FileNotFoundError(
            f"{path} is not a run: it has no records, no {FOLDER}/{LOGS} and no {STATE}, and neither has a checkpoint in it."
        )
    if not steps:
        notes.append(f"{path} has no records.")
    if not logs:
        notes.append(f"{path} has no logs.")
    return _Run(steps, logs)


def _differences(one: _Run, two: _Run) -> dict[str, tuple[Any, Any]]:
    """What the two fingerprints do not agree on; nothing if a run has no records."""
    if not one.steps or not two.steps:
        return {}
    first = _fingerprint(one)
    second = _fingerprint(two)
    pairs = {key: (first.get(key), second.get(key)) for key in {**first, **second}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _fingerprint(run: _Run) -> dict[str, Any]:
    """The fingerprint of the last record as one level, without what differs between any two runs."""
    newest = run.steps[max(run.steps)].fingerprint
    found = flat({name: value for name, value in newest.items() if name != "weights"})
    audit = found.pop("audit", None) or []
    found["audit"] = sorted(finding["code"] for finding in audit if "code" in finding)
    return {key: value for key, value in found.items() if key.rpartition(".")[2] not in _PLACES}


def _course(key: str, logs: list[dict[str, Any]]) -> Course | None:
    """How a metric went; `None` if it was not logged."""
    logged = [log for log in logs if isinstance(log.get(key), (int, float)) and "step" in log]
    if not logged:
        return None
    values = [float(log[key]) for log in logged]
    badness = METRICS[key].badness if key in METRICS else operator.neg
    worst = max(range(len(values)), key=lambda index: badness(values[index]))
    start = values[:EDGE]
    end = values[-EDGE:]
    return Course(sum(start) / len(start), sum(end) / len(end), values[worst], logged[worst]["step"])


def _healthier(
    runs: tuple[str, str], metrics: dict[str, tuple[Course | None, Course | None]]
) -> tuple[str | None, str]:
    """The healthier run, by the rule that [`compare_runs`] documents, and the reason."""
    ends = {}
    for key, (first, second) in metrics.items():
        if key.startswith("mismatch/") and first is not None and second is not None:
            ends[key] = (first.end, second.end)
    if not ends:
        return None, "There is no metric of the mismatch that both runs have logged."
    outside = [[key for key, pair in ends.items() if METRICS[key].outside(pair[run])] for run in (0, 1)]
    numbers = [len(keys) for keys in outside]
    if numbers[0] != numbers[1]:
        better = numbers.index(min(numbers))
        worse = 1 - better
        listed = ", ".join(f"{key} {ends[key][worse]:.3g}" for key in outside[worse])
        return runs[better], (
            f"{numbers[better]} of {len(ends)} metrics end outside their healthy range, against {numbers[worse]} in the other "
            f"({listed})."
        )
    same = f"In both, {numbers[0]} of {len(ends)} metrics end outside their healthy range"
    k3 = ends.get("mismatch/k3/mean")
    if k3 is None:
        return None, f"{same}."
    if max(k3) > CLEARLY * min(k3):
        return runs[k3.index(min(k3))], f"{same}, but k3 ends at {min(k3):.2g} against {max(k3):.2g} nats."
    return None, f"{same}, and the two values of k3 are close."
