# SPDX-License-Identifier: Apache-2.0
"""What a run left behind, read: logs, records and where they came from; what is missing said in words.

`figures.py` draws it, `html.py` lays it out. Nothing here needs the trainer or matplotlib.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from ..alerts import STOCK, AlertEvent, replay
from ..kl import kl_k3
from ..metrics import METRICS, Bounds, Metric, excess, range_text
from ..records import (
    FOLDER,
    LOGS,
    RECORDS,
    STATE,
    TOKENIZER,
    MismatchRecord,
    Recorded,
    TokenGap,
    load_tokenizer,
    merge_ranks,
    recorded_steps,
    run_logs,
    severity,
    worst_tokens,
)


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


_ENOUGH = 5  # values of a metric that the alert rules need


def _verdict(run: Run) -> Verdict:
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


@dataclass(frozen=True)
class Token:
    """One token of a completion as it is shown."""

    text: str
    """Empty where it is a part of a character that ends in a later token."""
    position: int
    """Where it stands in the sequence, prompt included."""
    inside: bool
    """Whether it is in the loss mask; tool results are not."""
    kept: bool
    """Whether the correction left it in."""
    p_train: float
    """Its probability in the trainer."""
    p_rollout: float
    """Its probability in the engine; NaN if unscored."""
    d: float
    """`log p_train - log p_rollout`, nats; NaN if unscored."""
    weight: float | None
    """What the correction made of it."""


@dataclass(frozen=True)
class Completion:
    """A completion as it is shown, or a window of it around its worst token."""

    step: int
    row: int
    """Of the record."""
    tokens: list[Token]
    before: int
    """Tokens that are not shown before the window."""
    after: int
    """The same after it."""
    k3: float
    """Mean over its scored tokens."""
    sequence_log_ratio: float
    """The sum of `d` over its scored tokens."""
    kept: bool
    """Whether the correction left any of its tokens in the loss."""
    advantage: float | None
    """Of the completion; `None` where it has none of its own."""


def worst_completions(run: Run, count: int = 5, window: int = 500) -> list[Completion]:
    """The completions that contribute most to k3, of the worst record and of the newest.

    Args:
        run ([`Run`]): From [`load_run`].
        count (`int`, *optional*, defaults to `5`): How many at most, all records together.
        window (`int`, *optional*, defaults to `500`): Tokens of one that are shown, around its worst.
    """
    records = run.looked_into()
    steps = [step for step in dict.fromkeys((run._worst, run.records[-1].step)) if step in records] if records else []
    found: list[Completion] = []
    for index, step in enumerate(steps):
        share = (count + len(steps) - 1 - index) // len(steps)
        record = records[step]
        d, mask = record.mismatch_log_ratio, record.mask.bool()
        k3 = kl_k3(d, mask)
        total = k3.nan_to_num(posinf=1e30).sum(1)
        for row in total.topk(min(share, len(total))).indices.tolist():
            if mask[row].any():
                found.append(_completion(record, row, d[row], k3[row], window, run.tokenizer))
    return found


def _completion(
    record: MismatchRecord, row: int, d: torch.Tensor, k3: torch.Tensor, window: int, tokenizer: Any
) -> Completion:
    present, mask = record.completion_mask[row].bool(), record.mask[row].bool()
    scored = mask & ~torch.isnan(d)
    length = int(present.sum())  # padding is on the right
    start = max(0, min(int(k3.argmax()) - window // 2, length - window))
    end = min(length, start + window)
    part = slice(start, end)
    texts = _pieces(tokenizer, record.completion_ids[row, part].tolist())
    weights = record.weights[row, part].tolist() if record.weights is not None else [None] * (end - start)
    kept = (mask if record.keep_mask is None else record.keep_mask[row].bool())[part].tolist()
    columns = zip(
        texts,
        record.position_ids[row, part].tolist(),
        mask[part].tolist(),
        kept,
        record.old_per_token_logps[row, part].double().exp().tolist(),
        record.sampling_per_token_logps[row, part].double().exp().tolist(),
        torch.where(mask, d, math.nan)[part].tolist(),
        weights,
        strict=True,
    )
    advantages = record.advantages
    return Completion(
        step=record.step,
        row=row,
        tokens=[Token(*values) for values in columns],
        before=start,
        after=length - end,
        k3=float(k3.sum() / scored.sum().clamp(min=1)),
        sequence_log_ratio=float(torch.where(scored, d, 0.0).sum()),
        kept=record.keep_mask is None or bool(record.keep_mask[row].any()),
        advantage=float(advantages[row]) if advantages is not None and advantages.dim() == 1 else None,
    )


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token as it stands in the whole; a character of several tokens stands at its last one."""
    if tokenizer is None:
        return [f"<{token}>" for token in ids]

    def text(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    pieces: list[str] = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        known, whole = text(start, read), text(start, end)
        if whole.endswith("\ufffd") and end - read < 4:
            pieces.append("")
        else:
            pieces.append(whole[len(known) :])
            start, read = read, end
    return pieces
