# SPDX-License-Identifier: Apache-2.0
"""Prints tables for terminals and as Markdown, and results as JSON."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .metrics.catalogue import METRICS


KEY_METRICS = {"k3": "mismatch/k3/mean", "mean |d|": "mismatch/abs_diff/mean", "ESS": "mismatch/ess/token"}
"""The metrics that say most about a mismatch, by a short name for a column."""
MARK = "! is outside the healthy range of a dense bf16 run."
"""A note for tables with [`Marked`] metrics that says what the mark means."""


@dataclass(frozen=True)
class Marked:
    """A cell that stands out, such as a metric outside its healthy range."""

    value: Any
    """What the cell shows, as in a cell without a mark."""


@dataclass(frozen=True)
class Table:
    """A table with a title above and notes below. Each cell is a text, a number, `None` or [`Marked`]."""

    title: str
    """Title of the table."""
    columns: tuple[str, ...]
    """Headings of the columns."""
    rows: list[tuple[Any, ...]]
    """The rows, each with a cell for every column. Without rows, title and notes are shown alone."""
    notes: tuple[str, ...] = ()
    """Sentences to print below the table."""


def print_tables(tables: Iterable[Table], format: str = "table") -> None:
    """Prints tables, in the format `table` for a terminal or `md` for Markdown. Without `rich`, both are Markdown."""
    console = None
    if format == "table":
        console = _console()
        if console is None:
            print("Tables as Markdown. For better ones: pip install rich", file=sys.stderr)
    if console is None:
        print("\n\n".join(_markdown(table) for table in tables))
        return
    for table in tables:
        _print_rich(table, console)


def _console() -> Any:
    """A console of `rich`, if that is installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # whoever reads a pipe breaks lines itself
    return console


def print_json(value: Any) -> None:
    """Prints a dataclass as JSON; numbers that are not finite become null."""
    print(json.dumps(_finite(dataclasses.asdict(value)), indent=2, default=str, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def judged(key: str, value: float | None) -> Any:
    """A cell with the value of a metric, marked if it is outside the healthy range that [`METRICS`] gives."""
    if value is not None and key in METRICS and METRICS[key].outside(value) > 0:
        return Marked(value)
    return value


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dictionary as one of a single level, with keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def visible(text: str) -> str:
    """The text on one line, with escapes for characters that are not printable and might break it or move the cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def plain(text: str) -> str:
    """The text on one line, escaped so that Markdown and HTML read no column, link, image, mention or tag in it. Backticks
    still mark code."""
    return "".join(f"&#{ord(c)};" if c in "&<|[]@" else c for c in visible(text))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table whose cells are Markdown already."""
    separator = ["---"] * len(columns)
    return [f"| {' | '.join(row)} |" for row in (columns, separator, *rows)]


def _text(cell: Any) -> str:
    if isinstance(cell, Marked):
        return f"{_text(cell.value)} !"
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return visible(str(cell))


def _is_number(cell: Any) -> bool:
    value = cell.value if isinstance(cell, Marked) else cell
    return value is None or isinstance(value, (int, float))


def _print_rich(table: Table, console: Any) -> None:
    from rich.table import Table as Rich
    from rich.text import Text

    console.print(Text(_text(table.title), style="bold"))
    if table.rows:
        shown = Rich()
        for index, column in enumerate(table.columns):
            is_numeric = all(_is_number(row[index]) for row in table.rows)
            shown.add_column(column, justify="right" if is_numeric else "left")
        for row in table.rows:
            shown.add_row(*(Text(_text(cell), style="bold red" if isinstance(cell, Marked) else "") for cell in row))
        console.print(shown)
    for note in table.notes:
        console.print(Text(_text(note)))
    console.print()


def _markdown(table: Table) -> str:
    parts = [f"**{plain(table.title)}**"]
    if table.rows:
        columns = [plain(column) for column in table.columns]
        rows = [[plain(_text(cell)) for cell in row] for row in table.rows]
        parts.append("\n".join(markdown_table(columns, rows)))
    parts += [plain(note) for note in table.notes]
    return "\n\n".join(parts)
