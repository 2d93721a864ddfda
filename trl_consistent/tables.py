# SPDX-License-Identifier: Apache-2.0
"""Tables for terminals, Markdown and JSON."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .metrics.catalogue import METRICS


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
