# SPDX-License-Identifier: Apache-2.0
"""Reports as files: `html` and `png` to look at, `json` to compute with, `md` to paste into an issue."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..tables import markdown_table, plain
from . import figures
from .html import render_html
from .run import Run, load_run
from .wording import correction_in_words, healthy_range, number, one_line, settings_by_group, subtitle


def write_report(path: str | Path, output: str | Path | None = None, format: str | None = None) -> Path:
    """Writes the report of a run, whole or not at all.

    Args:
        path (`str` or `Path`): The run's output folder or one record file, as [`load_run`] takes it.
        output (`str` or `Path`, *optional*): The file to write, by default `report.<format>` in the run's folder.
        format (`str`, *optional*):
            By default what the suffix of `output` says, or else `"html"`.

            - `"html"`: the page.
            - `"png"`: its figures in one picture.
            - `"json"`: curves, verdict, alerts, metrics of each record, worst tokens, fingerprint.
            - `"md"`: a summary.

    Returns:
        `Path`: the file that was written.

    Raises:
        `FileNotFoundError`: there is no run at `path`. `ValueError`: there is no such format. `ImportError`: `"png"` needs
        matplotlib.
    """
    if format is None:
        suffix = Path(output or "").suffix.removeprefix(".")
        format = suffix if suffix in FORMATS else "html"
    if format not in FORMATS:
        raise ValueError(f"`format` is {format!r}; choose one of {', '.join(FORMATS)}.")
    run = load_run(path)
    folder = run.path if run.path.is_dir() else run.path.parent
    output = Path(output) if output is not None else folder / f"report.{format}"
    _replace(output, FORMATS[format](run))
    return output


def _replace(file: Path, content: bytes) -> None:
    """Writes a file whole, or leaves it as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _html(run: Run) -> bytes:
    return render_html(run).encode()


def _png(run: Run) -> bytes:
    if not figures.available():
        raise ImportError(f"`format='png'` needs matplotlib: {figures.INSTALL}")
    return figures.png(figures.plots(run), f"{run.name}: {run.verdict.level}")


def _json(run: Run) -> bytes:
    verdict = run.verdict
    content = {
        "trl_consistent": __version__,
        "run": run.name,
        "verdict": dataclasses.asdict(verdict),
        "events": [dataclasses.asdict(event) for event in run.events],
        "metrics": run.metric_rows(),
        "curves": {key: {"steps": curve.steps, "values": curve.values} for key, curve in run.curves.items()},
        "records": [
            {
                "step": record.step,
                "reason": record.reason,
                "completions": record.completions,
                "tokens": record.tokens,
                "metrics": record.metrics,
            }
            for record in run.records
        ],
        "worst_tokens": [dataclasses.asdict(gap) for gap in run.worst_tokens(50)],
        "fingerprint": run.fingerprint,
        "missing": run.missing,
    }
    return (json.dumps(_json_value(content), default=str, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _json_value(value: Any) -> Any:
    """The value with words in place of numbers that JSON does not have: NaN and the infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    return value


def _md(run: Run) -> bytes:
    lines = [
        *(f"### {_plain(run.name)}: {run.verdict.level}", "", _plain(run.verdict.sentence), ""),
        *_subtitle_md(run),
        *_metrics_md(run),
        *_correction_md(run),
        *_worst_tokens_md(run),
        *_audit_md(run),
        *_settings_md(run),
        *_missing_md(run),
    ]
    return "\n".join(lines).encode()


def _subtitle_md(run: Run) -> list[str]:
    parts = subtitle(run)
    return [" · ".join(map(_plain, parts)), ""] if parts else []


def _metrics_md(run: Run) -> list[str]:
    rows = [
        (f"`{row['key']}`", *map(number, (row["start"], row["end"], row["worst"])), healthy_range(row["healthy"]))
        for row in run.metric_rows()
        if row["worst"] is not None or row["key"].startswith("sampling/")
    ]
    return _table("", ("metric", "start", "end", "worst", "healthy"), rows)


def _correction_md(run: Run) -> list[str]:
    words = correction_in_words(run.fingerprint.get("correction") or {})
    return [f"Correction: {_plain(words)}", ""] if words else []


def _worst_tokens_md(run: Run) -> list[str]:
    gaps = run.worst_tokens()
    rows = [
        (
            _code(f"{gap.before}▸{gap.token}◂{gap.after}"),
            *map(number, (gap.p_train, gap.p_rollout, gap.d, gap.weight)),
            str(gap.position),
        )
        for gap in gaps
    ]
    title = f"Worst tokens of step {gaps[0].step}:" if gaps else ""
    return _table(title, ("in context", "p trainer", "p engine", "d", "weight", "position"), rows)


def _audit_md(run: Run) -> list[str]:
    columns = ("code", "found", "cost", "remedy")
    findings = run.fingerprint.get("audit") or []
    rows = [tuple(_plain(str(finding.get(column, ""))) for column in columns) for finding in findings]
    return _table("Audit of the engine:", columns, rows)


def _settings_md(run: Run) -> list[str]:
    groups = settings_by_group(run.fingerprint)
    rows = [(group, _code(name), _code(value)) for group, values in groups.items() for name, value in values]
    if not rows:
        return []
    title = "<details><summary>Settings and versions</summary>"
    return [*_table(title, ("", "name", "value"), rows), "</details>", ""]


def _missing_md(run: Run) -> list[str]:
    return ["Missing:", "", *(f"- {_plain(sentence)}" for sentence in run.missing), ""] if run.missing else []


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table below its title; none without rows."""
    if not rows:
        return []
    return [*((title, "") if title else ()), *markdown_table(columns, rows), ""]


def _plain(text: str) -> str:
    """Text of which Markdown makes nothing else."""
    return plain(one_line(text))


def _code(text: str) -> str:
    """Text as code, whatever is in it."""
    text = one_line(text).replace("\\|", "\\ |").replace("|", "\\|")
    fence = "`"
    while fence in text:
        fence += "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


FORMATS = {"html": _html, "png": _png, "json": _json, "md": _md}
"""The formats of a report, and the function that writes each."""
