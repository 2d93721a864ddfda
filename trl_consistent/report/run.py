# SPDX-License-Identifier: Apache-2.0
"""What a run left behind, read: logs, records and where they came from; what is missing said in words."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..metrics.alerts import AlertEvent, replay
from ..metrics.catalogue import METRICS
from ..records.logs import run_logs
from ..records.record import FOLDER, LOGS, RECORDS, STATE, TOKENIZER, MismatchRecord, merge_ranks
from ..records.store import Recorded, recorded_steps, severity
from ..records.tokens import TokenGap, load_tokenizer, worst_tokens
from .curve import _HEADLINES, Curve
from .verdict import Verdict, _verdict


@dataclass
class Run:
    """
    What was found of a run; see [`load_run`].

    Example:

    ```python
    >>> run = load_run("output")
    >>> run.verdict.sentence
    ```
    """

    path: Path
    """Where it was read from."""
    logs: list[dict[str, Any]]
    """One entry a step, ascending, each with its `step`."""
    records: list[Recorded]
    """One entry a recorded step, ascending; tensors are read by [`record`]."""
    missing: list[str] = field(default_factory=list)
    """What is not there and how to get it, a sentence each."""
    tokenizer: Any = None
    """Turns ids into text; `None` where there is none."""

    @property
    def name(self) -> str:
        """Of its folder or file."""
        return self.path.resolve().name

    @property
    def last_step(self) -> int:
        """The last one that was logged or recorded."""
        steps = [entry["step"] for entry in self.logs[-1:]] + [record.step for record in self.records[-1:]]
        return max(steps, default=0)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Of the newest record; empty without records."""
        return self.records[-1].fingerprint if self.records else {}

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Every logged number over the steps, by key: ours in the order of [`METRICS`], TRL's `sampling/*`, the rest."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for entry in self.logs:
            for key, value in entry.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
                    steps, values = found.setdefault(key, ([], []))
                    steps.append(entry["step"])
                    values.append(float(value))
        rest = found.keys() - METRICS.keys() - {"step", "epoch"}
        ordered = [*METRICS, *sorted(rest, key=lambda key: (not key.startswith("sampling/"), key))]
        return {key: Curve(key, *found[key]) for key in ordered if key in found}

    @cached_property
    def measured(self) -> list[Curve]:
        """The curves that are ours or that TRL logs of the same thing; the key numbers first."""
        keys = [key for key in self.curves if key in METRICS or key.startswith("sampling/")]
        return [self.curves[key] for key in sorted(keys, key=lambda key: [*_HEADLINES, key].index(key))]

    @cached_property
    def headlines(self) -> list[Curve]:
        """The curves of the key numbers, six at most."""
        return [self.curves[key] for key in _HEADLINES if key in self.curves][:6]

    @cached_property
    def events(self) -> list[AlertEvent]:
        """What the alert rules make of the logs."""
        return replay(self.logs)

    @cached_property
    def verdict(self) -> Verdict:
        """From the alerts over the logs."""
        return _verdict(self)

    @cached_property
    def chosen(self) -> dict[int, str]:
        """The recorded steps that are looked into, ascending, and why: four at most."""
        if not self.records:
            return {}
        steps = [record.step for record in self.records]
        if len(steps) == 1:
            return {steps[0]: "the only record"}
        found = {steps[0]: "first"}
        for step, why in ((self._worst, "worst"), (steps[-1], "newest")):
            found[step] = f"{found[step]} and {why}" if step in found else why
        before = [step for step in steps if step < (self.verdict.step or 0)]
        if before:
            found.setdefault(before[-1], "before the alert")
        if len(found) < 3:
            found.setdefault(steps[len(steps) // 2], "halfway")
        return dict(sorted(found.items()))

    @property
    def _worst(self) -> int:
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

    def looked_into(self) -> dict[int, MismatchRecord]:
        """The records of the [`chosen`] steps that can be read."""
        found = {step: self.record(step) for step in self.chosen}
        return {step: record for step, record in found.items() if record is not None}

    def worst_tokens(self, count: int = 12) -> list[TokenGap]:
        """The worst tokens of the worst record, or of the newest if that one cannot be read."""
        found = self.looked_into()
        if not found:
            return []
        record = found.get(self._worst, next(reversed(found.values())))
        return worst_tokens(record, count, self.tokenizer)


def load_run(path: str | Path) -> Run:
    """Reads what there is of a run.

    Args:
        path (`str` or `Path`): The run's output folder (of our trainer or of TRL's), or one record file.

    Returns:
        [`Run`], with a sentence in `missing` for each thing that a full report needs and that is not there.

    Raises:
        `FileNotFoundError`: nothing of a run is there; says what was looked for.
    """
    path = Path(path)
    missing: list[str] = []
    logs, records = run_logs(path, missing), _records(path, missing)
    logged = bool(logs)
    if not (logs or records):
        if not path.exists():
            raise FileNotFoundError(f"No run at {path}: there is no such file or folder.")
        raise FileNotFoundError(
            f"No run at {path}: looked for {STATE}, checkpoint-*/{STATE}, {Path(FOLDER, LOGS)} and "
            f"{Path(FOLDER, RECORDS, 'step-*.safetensors')}" + (f". {' '.join(missing)}" if missing else "") + "."
        )
    if records and not any(key.startswith("mismatch/") for entry in logs for key in entry):
        of_step = {record.step: {"step": record.step, **record.metrics} for record in records}
        of_step |= {entry["step"]: {**of_step.get(entry["step"], {}), **entry} for entry in logs}
        logs = [of_step[step] for step in sorted(of_step)]
    run = Run(path, logs, records, missing)
    if records:
        run.tokenizer = load_tokenizer(path)
        if run.tokenizer is None:
            missing.append(f"No tokenizer that can be read in {Path(FOLDER, TOKENIZER)}: tokens are shown as ids.")
    _say_what_is_missing(run, logged)
    return run


def _records(path: Path, missing: list[str]) -> list[Recorded]:
    try:
        return sorted(recorded_steps(path, problems=missing), key=lambda each: each.step)
    except FileNotFoundError:
        return []


def _say_what_is_missing(run: Run, logged: bool) -> None:
    how = "train with `ConsistentGRPOTrainer` (or `trl-consistent run SCRIPT.py`)"
    if not logged:
        run.missing.append(f"No logs ({STATE} or {Path(FOLDER, LOGS)}): curves show recorded steps only.")
    elif not any(key.startswith("mismatch/") for key in run.curves):
        stock = any(key.startswith("sampling/") for key in run.curves)
        has = (
            "only TRL's own `sampling/*`: the size of the gap, and weights as they are after the correction"
            if stock
            else "neither `mismatch/*` nor TRL's `sampling/*`, which needs `use_vllm=True`"
        )
        run.missing.append(f"The logs hold {has}. For KL, effective sample size and the rest, {how}.")
    if not run.records:
        run.missing.append(
            f"No records in {Path(FOLDER, RECORDS)}: which tokens, completions and settings are behind the curves cannot "
            f"be shown. To have them, {how}; it writes one every `mismatch_record_steps` steps."
        )
    else:
        newest = run.records[-1]
        if (ranks := newest.fingerprint.get("processes") or 0) > len(newest.files):
            run.missing.append(f"Step {newest.step} has records of {len(newest.files)} of {ranks} processes.")


def table(run: Run) -> list[dict[str, Any]]:
    """Each measured metric: `key`, `meaning`, `healthy`, `start`, `end`, `worst`, `worst_step`, steps `outside` of `steps`."""
    rows = []
    for curve in run.measured:
        worst = curve.worst or (None, None)
        rows.append(
            {
                "key": curve.key,
                "meaning": curve.meaning,
                "healthy": curve.healthy,
                "start": curve.values[0],
                "end": curve.values[-1],
                "worst": worst[1],
                "worst_step": worst[0],
                "outside": len(curve.outside),
                "steps": len(curve.steps),
            }
        )
    return rows
