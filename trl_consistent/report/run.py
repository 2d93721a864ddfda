# SPDX-License-Identifier: Apache-2.0
"""Reads the logs and records that a run left behind, and says what is missing. The other files of this folder show it."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..metrics.alerts import AlertEvent, replay
from ..metrics.catalogue import METRICS
from ..records.folder import FOLDER, LOGS, RECORDS, STATE, TOKENIZER
from ..records.logs import run_logs
from ..records.record import MismatchRecord, merge_ranks
from ..records.store import Recorded, recorded_steps, severity
from ..records.tokens import TokenGap, load_tokenizer, worst_tokens
from .curve import HEADLINES, Curve
from .verdict import Verdict, judge


_HOW_TO_GET_MORE = "train with `ConsistentGRPOTrainer` (or `trl-consistent run SCRIPT.py`)"


@dataclass
class Run:
    """
    The logs and records of a run; [`load_run`] makes it.

    Example:

    ```python
    >>> run = load_run("output")
    >>> run.verdict.sentence
    ```
    """

    path: Path
    """The folder or file it was read from."""
    logs: list[dict[str, Any]]
    """One entry for each logged step, ascending, each with its `step`."""
    records: list[Recorded]
    """One entry for each recorded step, ascending; [`Run.record`] reads the tensors."""
    missing: list[str] = field(default_factory=list)
    """One sentence for each thing that is not there, with the way to get it."""
    tokenizer: Any = None
    """The tokenizer that turns ids into text; `None` where there is none."""

    @property
    def name(self) -> str:
        """Name of its folder or file."""
        return self.path.resolve().name

    @property
    def last_step(self) -> int:
        """The last step that was logged or recorded; 0 without any."""
        steps = [entry["step"] for entry in self.logs[-1:]] + [record.step for record in self.records[-1:]]
        return max(steps, default=0)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint in the newest record; empty without records."""
        return self.records[-1].fingerprint if self.records else {}

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Every logged number over the steps, by key: ours in the order of [`METRICS`], TRL's `sampling/*`, the rest."""
        found: dict[str, Curve] = {}
        for entry in self.logs:
            for key, value in entry.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
                    curve = found.setdefault(key, Curve(key, [], []))
                    curve.steps.append(entry["step"])
                    curve.values.append(float(value))
        others = found.keys() - METRICS.keys() - {"step", "epoch"}
        ordered = [*METRICS, *sorted(others, key=lambda key: (not key.startswith("sampling/"), key))]
        return {key: found[key] for key in ordered if key in found}

    @cached_property
    def measured(self) -> list[Curve]:
        """The curves of our metrics and of TRL's `sampling/*`; the key numbers first."""
        keys = [key for key in self.curves if key in METRICS or key.startswith("sampling/")]
        return [self.curves[key] for key in sorted(keys, key=lambda key: [*HEADLINES, key].index(key))]

    @cached_property
    def headlines(self) -> list[Curve]:
        """The curves of the key numbers, six at most."""
        return [self.curves[key] for key in HEADLINES if key in self.curves][:6]

    @cached_property
    def events(self) -> list[AlertEvent]:
        """The alerts that the alert rules raise over the logs."""
        return replay(self.logs)

    @cached_property
    def verdict(self) -> Verdict:
        """How bad the worst thing is that is open at the end, and since when."""
        return judge(self)

    def metric_rows(self) -> list[dict[str, Any]]:
        """One row for each measured metric.

        Returns:
            `list[dict]` with `key`, `meaning`, `healthy`, `start`, `end`, `worst`, `worst_step`, and `outside`: how many of its
            `steps` are outside the healthy range.
        """
        rows = []
        for curve in self.measured:
            worst_step, worst = curve.worst or (None, None)
            rows.append(
                {
                    "key": curve.key,
                    "meaning": curve.meaning,
                    "healthy": curve.healthy,
                    "start": curve.values[0],
                    "end": curve.values[-1],
                    "worst": worst,
                    "worst_step": worst_step,
                    "outside": len(curve.outside),
                    "steps": len(curve.steps),
                }
            )
        return rows

    @cached_property
    def examined_steps(self) -> dict[int, str]:
        """The recorded steps that the report looks into, ascending, four at most, and why each is among them."""
        if not self.records:
            return {}
        steps = [record.step for record in self.records]
        if len(steps) == 1:
            return {steps[0]: "the only record"}
        found = {steps[0]: "first"}
        for step, why in ((self.worst_step, "worst"), (steps[-1], "newest")):
            found[step] = f"{found[step]} and {why}" if step in found else why
        before_alert = [step for step in steps if step < (self.verdict.step or 0)]
        if before_alert:
            found.setdefault(before_alert[-1], "before the alert")
        if len(found) < 3:
            found.setdefault(steps[len(steps) // 2], "halfway")
        return dict(sorted(found.items()))

    @property
    def worst_step(self) -> int:
        """The recorded step with the largest mismatch, the newest of equals; there must be records."""
        return max(reversed(self.records), key=lambda record: severity(record.metrics)).step

    def record(self, step: int) -> MismatchRecord | None:
        """The record of a step, its ranks merged; `None`, and a sentence in `missing`, if its files cannot be read."""
        if step not in self._loaded:
            files = next(record.files for record in self.records if record.step == step)
            self._loaded[step] = None
            try:
                self._loaded[step] = merge_ranks([MismatchRecord.load(file) for file in files])
            except (ValueError, OSError, SafetensorError) as error:
                self.missing.append(f"The record of step {step} cannot be read: {error}")
        return self._loaded[step]

    @cached_property
    def _loaded(self) -> dict[int, MismatchRecord | None]:
        return {}

    def examined_records(self) -> dict[int, MismatchRecord]:
        """The records of the [`Run.examined_steps`] that can be read."""
        found = {step: self.record(step) for step in self.examined_steps}
        return {step: record for step, record in found.items() if record is not None}

    def worst_tokens(self, count: int = 12) -> list[TokenGap]:
        """The worst tokens of the worst record, or of the newest if that one cannot be read."""
        found = self.examined_records()
        if not found:
            return []
        record = found.get(self.worst_step, next(reversed(found.values())))
        return worst_tokens(record, count, self.tokenizer)


def load_run(path: str | Path) -> Run:
    """Reads what there is of a run.

    Args:
        path (`str` or `Path`): The run's output folder (of our trainer or of TRL's), or one record file.

    Returns:
        [`Run`], with a sentence in `missing` for each thing that a full report needs and that is not there.

    Raises:
        `FileNotFoundError`: there is neither a log nor a record of a run; the message says where they were looked for.
    """
    path = Path(path)
    missing: list[str] = []
    logs = run_logs(path, missing)
    records = _recorded(path, missing)
    if not (logs or records):
        raise FileNotFoundError(_why_there_is_no_run(path, missing))
    run = Run(path, _with_metrics_of_records(logs, records), records, missing)
    if records:
        run.tokenizer = load_tokenizer(path)
        if run.tokenizer is None:
            missing.append(f"No tokenizer that can be read in {Path(FOLDER, TOKENIZER)}: tokens are shown as ids.")
    missing += [*_missing_logs(run, has_logs=bool(logs)), *_missing_records(run)]
    return run


def _recorded(path: Path, missing: list[str]) -> list[Recorded]:
    try:
        return sorted(recorded_steps(path, problems=missing), key=lambda each: each.step)
    except FileNotFoundError:
        return []


def _why_there_is_no_run(path: Path, missing: list[str]) -> str:
    if not path.exists():
        return f"No run at {path}: there is no such file or folder."
    problems = f". {' '.join(missing)}" if missing else ""
    return (
        f"No run at {path}: looked for {STATE}, checkpoint-*/{STATE}, {Path(FOLDER, LOGS)} and "
        f"{Path(FOLDER, RECORDS, 'step-*.safetensors')}{problems}."
    )


def _with_metrics_of_records(logs: list[dict[str, Any]], records: list[Recorded]) -> list[dict[str, Any]]:
    """The logs; if they hold none of our metrics, with those that the records hold of their steps."""
    if not records or any(key.startswith("mismatch/") for entry in logs for key in entry):
        return logs
    by_step = {record.step: {"step": record.step, **record.metrics} for record in records}
    for entry in logs:
        by_step[entry["step"]] = {**by_step.get(entry["step"], {}), **entry}
    return [by_step[step] for step in sorted(by_step)]


def _missing_logs(run: Run, has_logs: bool) -> list[str]:
    if not has_logs:
        return [f"No logs ({STATE} or {Path(FOLDER, LOGS)}): curves show recorded steps only."]
    if any(key.startswith("mismatch/") for key in run.curves):
        return []
    if any(key.startswith("sampling/") for key in run.curves):
        held = "only TRL's own `sampling/*`: the size of the gap, and weights as they are after the correction"
    else:
        held = "neither `mismatch/*` nor TRL's `sampling/*`, which needs `use_vllm=True`"
    return [f"The logs hold {held}. For KL, effective sample size and the rest, {_HOW_TO_GET_MORE}."]


def _missing_records(run: Run) -> list[str]:
    if not run.records:
        return [
            f"No records in {Path(FOLDER, RECORDS)}: the tokens, completions and settings behind the curves cannot be "
            f"shown. To have them, {_HOW_TO_GET_MORE}; it writes one every `mismatch_record_steps` steps."
        ]
    newest = run.records[-1]
    ranks = newest.fingerprint.get("processes") or 0
    if ranks > len(newest.files):
        return [f"Step {newest.step} has records of {len(newest.files)} of {ranks} processes."]
    return []
