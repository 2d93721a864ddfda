# SPDX-License-Identifier: Apache-2.0
"""Tables of a run's records for people, which `trl-consistent records` prints. `export.py` writes them for programs."""

from pathlib import Path

from ..metrics.catalogue import METRICS
from ..tables import KEY_METRICS, MARK, Table, flat, judged
from .record import MismatchRecord, merge_ranks
from .store import Recorded, recorded_steps
from .tokens import load_tokenizer, worst_tokens


def listing(path: str | Path) -> Table:
    """A table of the records at `path` with a row for each step, from the headers of the files alone.

    Raises:
        `FileNotFoundError`: There are no records.
        `ValueError`: None of the records can be read.
    """
    rows = []
    for recorded in _readable_steps(path):
        metrics = recorded.metrics
        outside = [key for key in METRICS if key in metrics and METRICS[key].outside(metrics[key])]
        size = sum(file.stat().st_size for file in recorded.files)
        rows.append(
            (
                recorded.step,
                len(recorded.files),
                recorded.reason,
                recorded.completions,
                recorded.tokens,
                *(judged(key, metrics.get(key)) for key in KEY_METRICS.values()),
                f"{size / 1e6:.2f} MB",
                ", ".join(key.removeprefix("mismatch/") for key in outside),
            )
        )
    columns = ("step", "ranks", "reason", "completions", "tokens", *KEY_METRICS, "size", "outside the healthy range")
    return Table(f"Records of {path}", columns, rows, (MARK,))


def details(path: str | Path, step: int | None = None, tokens: int = 20) -> list[Table]:
    """Tables of one record at `path`, all ranks: where it is from, its metrics, the findings of the audit, and the tokens with
    the largest gap.

    Args:
        path (`str` or `Path`): A run's output folder, a folder of records, or one file.
        step (`int`, *optional*): The step whose record to show; the newest if left out.
        tokens (`int`, *optional*, defaults to `20`): How many tokens to show.

    Raises:
        `FileNotFoundError`: There are no records, or none of that step; says which steps there are.
        `ValueError`: The record cannot be read.
    """
    files = {each.step: each.files for each in _readable_steps(path)}
    chosen = max(files) if step is None else step
    if chosen not in files:
        raise FileNotFoundError(f"No record of step {step} at {path}: it has those of {', '.join(map(str, files))}.")
    record = merge_ranks([MismatchRecord.load(file) for file in files[chosen]])
    return [_origin(record), _metrics(record), _audit(record), _worst_tokens(record, tokens, path)]


def _readable_steps(path: str | Path) -> list[Recorded]:
    steps = recorded_steps(path)
    if not steps:
        raise ValueError(f"No record at {path} can be read.")
    return steps


def _origin(record: MismatchRecord) -> Table:
    title = f"Step {record.step}, {record.reason}: {len(record.mask)} completions, {int(record.mask.sum())} tokens"
    made_of = {name: value for name, value in record.fingerprint.items() if name != "audit"}
    return Table(title, ("from", "is"), list(flat(made_of).items()))


def _metrics(record: MismatchRecord) -> Table:
    rows = []
    for key, metric in METRICS.items():
        if key in record.metrics:
            value = judged(key, record.metrics[key])
            rows.append((key, value, metric.healthy_text, metric.unit, metric.meaning))
    columns = ("metric", "value", "healthy", "unit", "meaning")
    return Table("Metrics of the rollout batch, all ranks", columns, rows, (MARK,))


def _audit(record: MismatchRecord) -> Table:
    findings = record.fingerprint.get("audit") or []
    columns = ("code", "found", "cost", "remedy")
    rows = [tuple(finding.get(column) for column in columns) for finding in findings]
    return Table("What the audit found" if rows else "The audit found nothing", columns, rows)


def _worst_tokens(record: MismatchRecord, count: int, path: str | Path) -> Table:
    rows = []
    for gap in worst_tokens(record, count, load_tokenizer(path)) if count else ():
        text = f"{gap.before}[{gap.token}]{gap.after}"
        rows.append((gap.completion, gap.index, text, gap.p_train, gap.p_rollout, gap.d, gap.weight))
    columns = ("completion", "token", "in context", "p train", "p rollout", "d", "weight")
    return Table(f"The {len(rows)} tokens with the largest gap", columns, rows)
