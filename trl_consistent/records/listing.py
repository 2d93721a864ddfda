# SPDX-License-Identifier: Apache-2.0
"""Tables of a run's records, for `trl-consistent records`."""

from pathlib import Path

from ..metrics.catalogue import METRICS
from ..tables import KEY_METRICS, MARK, Table, flat, judged
from .record import MismatchRecord, merge_ranks
from .store import recorded_steps
from .tokens import load_tokenizer, worst_tokens


def listing(path: str | Path) -> Table:
    """The records at `path`, a row for each step, from their headers alone.

    Raises:
        `FileNotFoundError`: there are none. `ValueError`: none of them can be read.
    """
    rows = []
    for each in recorded_steps(path):
        metrics = each.metrics
        outside = [key for key in METRICS if key in metrics and METRICS[key].outside(metrics[key])]
        rows.append(
            (
                each.step,
                len(each.files),
                each.reason,
                each.completions,
                each.tokens,
                *(judged(key, metrics.get(key)) for key in KEY_METRICS.values()),
                f"{sum(file.stat().st_size for file in each.files) / 1e6:.2f} MB",
                ", ".join(key.removeprefix("mismatch/") for key in outside),
            )
        )
    if not rows:
        raise ValueError(f"No record at {path} can be read.")
    columns = ("step", "ranks", "reason", "completions", "tokens", *KEY_METRICS, "size", "outside the healthy range")
    return Table(f"Records of {path}", columns, rows, (MARK,))


def details(path: str | Path, step: int | None = None, tokens: int = 20) -> list[Table]:
    """What one record at `path` holds, the newest unless `step` says which, all ranks: where it is from, its metrics, what
    the audit found, and the tokens with the largest gap.

    Raises:
        `FileNotFoundError`: there are none, or none of that step; says which there are. `ValueError`: it cannot be read.
    """
    steps = {each.step: each.files for each in recorded_steps(path)}
    if not steps:
        raise ValueError(f"No record at {path} can be read.")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"No record of step {step} at {path}: it has those of {', '.join(map(str, steps))}.")
    record = merge_ranks([MismatchRecord.load(file) for file in steps[max(steps) if step is None else step]])
    fingerprint = dict(record.fingerprint)
    audit = fingerprint.pop("audit", None) or []
    tables = [
        Table(
            f"Step {record.step}, {record.reason}: {len(record.mask)} completions, {int(record.mask.sum())} tokens",
            ("from", "is"),
            list(flat(fingerprint).items()),
        ),
        Table(
            "Metrics of the rollout batch, all ranks",
            ("metric", "value", "healthy", "unit", "meaning"),
            [
                (key, judged(key, record.metrics[key]), metric.healthy_text, metric.unit, metric.meaning)
                for key, metric in METRICS.items()
                if key in record.metrics
            ],
            (MARK,),
        ),
        Table(
            "What the audit found" if audit else "The audit found nothing",
            ("code", "found", "cost", "remedy"),
            [tuple(finding.get(key) for key in ("code", "found", "cost", "remedy")) for finding in audit],
        ),
    ]
    gaps = worst_tokens(record, tokens, load_tokenizer(path)) if tokens else []
    rows = [
        (gap.completion, gap.index, f"{gap.before}[{gap.token}]{gap.after}", gap.p_train, gap.p_rollout, gap.d, gap.weight)
        for gap in gaps
    ]  # fmt: skip
    columns = ("completion", "token", "in context", "p train", "p rollout", "d", "weight")
    return [*tables, Table(f"The {len(rows)} tokens with the largest gap", columns, rows)]
