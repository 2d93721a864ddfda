# SPDX-License-Identifier: Apache-2.0
"""Tables for people: how the commands print, and what `trl-consistent records list` and `show` print.

`export.py` writes the records for other programs.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .metrics import METRICS
from .records import MismatchRecord, load_tokenizer, merge_ranks, recorded_steps, worst_tokens


@dataclass(frozen=True)
class Marked:
    """A cell that stands out, such as a metric outside its healthy range."""

    value: Any


@dataclass(frozen=True)
class Table:
    """Rows under columns, with a title above and notes below. A cell is a text, a number, `None` or [`Marked`]."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    notes: tuple[str, ...] = ()


def print_tables(tables: Iterable[Table], format: str = "table") -> None:
    """Prints tables for a terminal (`table`) or as Markdown (`md`), which also takes over where `rich` is missing."""
    if format == "table":
        try:
            from rich.console import Console
        except ImportError:
            print("Tables as Markdown. For better ones: pip install rich", file=sys.stderr)
        else:
            console = Console()
            if not console.is_terminal:
                console.width = 10_000  # whoever reads a pipe breaks lines itself
            for table in tables:
                _print_rich(table, console)
            return
    print("\n\n".join(map(_markdown, tables)))


def print_json(value: Any) -> None:
    """Prints a dataclass as JSON; what is not a finite number is null."""
    print(json.dumps(_finite(dataclasses.asdict(value)), indent=2, default=str, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(cell: Any) -> str:
    if isinstance(cell, Marked):
        return f"{_text(cell.value)} !"
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return visible(str(cell))


def visible(text: str) -> str:
    """Text on one line: what has no glyph, and might break the line or move a cursor, as an escape."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def plain(text: str) -> str:
    """Visible text of which Markdown and HTML make no column, link, picture, mention or tag; backticks stay code."""
    return "".join(f"&#{ord(c)};" if c in "&<|[]@" else c for c in visible(text))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose cells are Markdown already."""
    return [f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows)]


def _value(cell: Any) -> Any:
    return cell.value if isinstance(cell, Marked) else cell


def _print_rich(table: Table, console: Any) -> None:
    from rich.table import Table as Rich
    from rich.text import Text

    shown = Rich()
    for index, column in enumerate(table.columns):
        numbers = all(row[index] is None or isinstance(_value(row[index]), (int, float)) for row in table.rows)
        shown.add_column(column, justify="right" if numbers else "left")
    for row in table.rows:
        shown.add_row(*(Text(_text(cell), style="bold red" if isinstance(cell, Marked) else "") for cell in row))
    console.print(Text(_text(table.title), style="bold"))
    if table.rows:
        console.print(shown)
    for note in table.notes:
        console.print(Text(_text(note)))
    console.print()


def _markdown(table: Table) -> str:
    def line(cells: Iterable[Any]) -> list[str]:
        return [plain(_text(cell)) for cell in cells]

    parts = [f"**{plain(table.title)}**"]
    if table.rows:
        parts.append("\n".join(markdown_table(line(table.columns), map(line, table.rows))))
    return "\n\n".join([*parts, *map(plain, table.notes)])


def judged(key: str, value: float | None) -> Any:
    """The value of a metric as a cell, marked if it is outside the healthy range of [`METRICS`]."""
    bad = value is not None and key in METRICS and METRICS[key].outside(value) > 0
    return Marked(value) if bad else value


def flat(fingerprint: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dictionary as one level, keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in fingerprint.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


KEY_METRICS = {"k3": "mismatch/k3/mean", "mean |d|": "mismatch/abs_diff/mean", "ESS": "mismatch/ess/token"}
"""The metrics that say most, by a short name."""
MARK = "! is outside the healthy range of a dense bf16 run."
"""What [`Marked`] metrics mean, a note for their table."""


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
