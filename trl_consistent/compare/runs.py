# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..metrics.catalogue import METRICS
from ..records.logs import run_logs
from ..records.record import FOLDER
from ..records.store import Recorded, recorded_steps
from ..tables import KEY_METRICS, Table, flat, judged


def is_run(path: str | Path) -> bool:
    """Whether `path` is the output folder of a run, rather than records."""
    path = Path(path)
    return path.is_dir() and ((path / FOLDER).is_dir() or bool(run_logs(path)))


EDGE = 3
"""Logs that make up the start and the end of a run."""
_CLEARLY = 1.5  # as many times the other k3 is no noise
_PLACES = ("output_dir", "run_name", "logging_dir")  # settings that differ between any two runs


@dataclass(frozen=True)
class Course:
    """A metric over a run."""

    start: float
    """Mean of the first [`EDGE`] logs."""
    end: float
    """Mean of the last [`EDGE`] logs."""
    worst: float
    """The value furthest outside the healthy range or, inside, nearest to its bound; of `reward`, the smallest."""
    worst_step: int
    """Where that was."""


@dataclass(frozen=True)
class RunComparison:
    """What [`compare_runs`] found. Pairs are of the first and the second run, `None` where one has nothing."""

    runs: tuple[str, str]
    """Their folders."""
    healthier: str | None
    """One of them, or neither."""
    reason: str
    """Why, in a sentence."""
    differences: dict[str, tuple[Any, Any]]
    """What the fingerprints of their last records do not agree on, keys joined by dots."""
    metrics: dict[str, tuple[Course | None, Course | None]]
    """From the logs: `reward`, and the metrics with a healthy range."""
    steps: dict[int, tuple[dict[str, float], dict[str, float]]]
    """The metrics of the records at steps that both have."""
    notes: tuple[str, ...]
    """What is missing."""

    def tables(self) -> list[Table]:
        """For people."""
        title = f"A: {self.runs[0]}   B: {self.runs[1]}"
        differences = [(key, *map(_shown, pair)) for key, pair in self.differences.items()]
        same = () if differences or self.notes else ("Nothing of settings, engine and versions differs.",)
        logged = []
        for key, pair in self.metrics.items():
            cells: list[Any] = [key]
            for course in pair:
                found = (None,) * 3 if course is None else (course.start, course.end, course.worst)
                cells += [judged(key, value) for value in found] + [None if course is None else course.worst_step]
            logged.append((*cells, METRICS[key].healthy_text if key in METRICS else ""))
        recorded = [
            (step, *(judged(key, metrics.get(key)) for key in KEY_METRICS.values() for metrics in pair))
            for step, pair in self.steps.items()
        ]
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


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else json.dumps(value, default=str)


def compare_runs(first: str | Path, second: str | Path) -> RunComparison:
    """Two runs side by side: what they were set to, how their metrics went, and which is healthier.

    The healthier run is the one of whose `mismatch/*` metrics fewer end outside their healthy range, among those that
    both logged; with as many, the one whose k3 ends lower, if by a factor of 1.5; else neither.

    Args:
        first, second (`str` or `Path`): Output folders.

    Raises:
        `FileNotFoundError`: one of them has neither logs nor records.
    """
    runs, notes = (str(first), str(second)), []
    recorded, logs = [], []
    for run in runs:
        try:
            recorded.append({each.step: each for each in recorded_steps(run)})
        except FileNotFoundError:
            recorded.append({})
        logs.append(run_logs(run))
        if not recorded[-1] and not logs[-1]:
            raise FileNotFoundError(
                f"{run} is no run: it has no records, no {FOLDER}/logs.jsonl and no trainer_state.json, nor has a "
                "checkpoint in it."
            )
        notes += [
            f"{run} has no {name}." for name, some in (("records", recorded[-1]), ("logs", logs[-1])) if not some
        ]
    prints = [_fingerprint(of_run) for of_run in recorded]
    keys = dict.fromkeys(key for print in prints for key in print) if all(recorded) else {}
    differences = {key: (prints[0].get(key), prints[1].get(key)) for key in keys}
    metrics = {}
    for key in ("reward", *(key for key, metric in METRICS.items() if metric.healthy != (None, None))):
        pair = _course(key, logs[0]), _course(key, logs[1])
        if pair != (None, None):
            metrics[key] = pair
    common = [step for step in recorded[0] if step in recorded[1]]
    healthier, reason = _healthier(runs, metrics)
    return RunComparison(
        runs=runs,
        healthier=healthier,
        reason=reason,
        differences={key: pair for key, pair in differences.items() if pair[0] != pair[1]},
        metrics=metrics,
        steps={step: (recorded[0][step].metrics, recorded[1][step].metrics) for step in common},
        notes=tuple(notes),
    )


def _fingerprint(recorded: dict[int, Recorded]) -> dict[str, Any]:
    """Of the last record, as one level, without what differs between any two runs."""
    if not recorded:
        return {}
    newest = recorded[max(recorded)].fingerprint
    found = flat({name: value for name, value in newest.items() if name != "weights"})
    audit = found.pop("audit", None) or []
    found["audit"] = sorted(finding["code"] for finding in audit if "code" in finding)
    return {key: value for key, value in found.items() if key.rpartition(".")[2] not in _PLACES}


def _course(key: str, logs: list[dict[str, Any]]) -> Course | None:
    values = [
        (float(log[key]), log["step"]) for log in logs if isinstance(log.get(key), (int, float)) and "step" in log
    ]
    if not values:
        return None
    badness = METRICS[key].badness if key in METRICS else lambda value: -value
    worst, step = max(values, key=lambda each: badness(each[0]))
    start, end = ([value for value, _ in part] for part in (values[:EDGE], values[-EDGE:]))
    return Course(sum(start) / len(start), sum(end) / len(end), worst, step)


def _healthier(
    runs: tuple[str, str], metrics: dict[str, tuple[Course | None, Course | None]]
) -> tuple[str | None, str]:
    """The rule that [`compare_runs`] documents, and its reason."""
    both = {
        key: (pair[0].end, pair[1].end)
        for key, pair in metrics.items()
        if key.startswith("mismatch/") and pair[0] is not None and pair[1] is not None
    }
    if not both:
        return None, "There is no metric of the mismatch that both have logged."
    outside = [[key for key, ends in both.items() if METRICS[key].outside(ends[run])] for run in (0, 1)]
    if len(outside[0]) != len(outside[1]):
        better, worse = (0, 1) if len(outside[0]) < len(outside[1]) else (1, 0)
        listed = ", ".join(f"{key} {both[key][worse]:.3g}" for key in outside[worse])
        return runs[better], (
            f"{len(outside[better])} of {len(both)} metrics end outside their healthy range, against "
            f"{len(outside[worse])} in the other ({listed})."
        )
    k3 = both.get("mismatch/k3/mean")
    if k3 is not None and max(k3) > _CLEARLY * min(k3):
        return runs[k3.index(min(k3))], (
            f"In both, {len(outside[0])} of {len(both)} metrics end outside their healthy range, but k3 ends at {min(k3):.2g} "
            f"against {max(k3):.2g} nats."
        )
    return None, f"In both, {len(outside[0])} of {len(both)} metrics end outside their healthy range, and k3 is alike."
