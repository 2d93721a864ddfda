# SPDX-License-Identifier: Apache-2.0
"""Reports as files: `html` and `png` to look at, `json` to compute with, `md` to paste into an issue."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from .. import __version__
from ..report import figures
from ..tables import markdown_table, plain
from .curve import healthy_range, number
from .html import about, correction_in_words, one_line, render_html, settings
from .run import Run, load_run, table


def write_report(path: str | Path, output: str | Path | None = None, format: str | None = None) -> Path:
    """Writes the report of a run, whole or not at all.

    Args:
        path (`str` or `Path`): As of [`load_run`].
        output (`str` or `Path`, *optional*): The file; `report.<format>` in the run's folder if left out.
        format (`str`, *optional*):
            What the suffix of `output` says if left out, else `"html"`.
            `"html"`: the page; `"png"`: its figures in one picture; `"json"`: curves, verdict, alerts, metrics of each
            record, worst tokens, fingerprint; `"md"`: a summary.

    Returns:
        `Path`: what was written.

    Raises:
        `FileNotFoundError`: nothing of a run is at `path`. `ValueError`: no such format. `ImportError`: `"png"` without
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
    content = FORMATS[format](run)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return output


def _html(run: Run) -> bytes:
    return render_html(run).encode()


def _png(run: Run) -> bytes:
    if not figures.available():
        raise ImportError(f"`format='png'` needs matplotlib: {figures.HINT}")
    return figures.png(figures.plots(run), f"{run.name}: {run.verdict.level}")


def _json(run: Run) -> bytes:
    verdict = run.verdict
    content = {
        "trl_consistent": __version__,
        "run": run.name,
        "verdict": dataclasses.asdict(verdict),
        "events": [dataclasses.asdict(event) for event in run.events],
        "metrics": table(run),
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
    return (json.dumps(_finite(content), default=str, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _finite(value: Any) -> Any:
    """The same with words for what JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def _md(run: Run) -> bytes:
    mark = run.fingerprint
    lines = [f"### {_plain(run.name)}: {run.verdict.level}", "", _plain(run.verdict.sentence), ""]
    if parts := about(run):
        lines += [" · ".join(map(_plain, parts)), ""]
    if rows := [row for row in table(run) if row["worst"] is not None or row["key"].startswith("sampling/")]:
        cells = [
            (f"`{r['key']}`", *map(number, (r["start"], r["end"], r["worst"])), healthy_range(r["healthy"]))
            for r in rows
        ]
        lines += _table(("metric", "start", "end", "worst", "healthy"), cells)
    if correction := correction_in_words(mark.get("correction") or {}):
        lines += [f"Correction: {_plain(correction)}", ""]
    if gaps := run.worst_tokens():
        cells = [
            (
                _code(f"{gap.before}▸{gap.token}◂{gap.after}"),
                *map(number, (gap.p_train, gap.p_rollout, gap.d, gap.weight)),
                str(gap.position),
            )
            for gap in gaps
        ]
        lines += [f"Worst tokens of step {gaps[0].step}:", ""]
        lines += _table(("in context", "p trainer", "p engine", "d", "weight", "position"), cells)
    if audit := mark.get("audit"):
        cells = [
            tuple(_plain(str(finding.get(name, ""))) for name in ("code", "found", "cost", "remedy"))
            for finding in audit
        ]
        lines += ["Audit of the engine:", "", *_table(("code", "found", "cost", "remedy"), cells)]
    if groups := settings(run):
        lines += ["<details><summary>Settings and versions</summary>", ""]
        cells = [(f"{group}", _code(name), _code(value)) for group, values in groups.items() for name, value in values]
        lines += [*_table(("", "name", "value"), cells), "</details>", ""]
    if run.missing:
        lines += ["Missing:", "", *(f"- {_plain(sentence)}" for sentence in run.missing), ""]
    return "\n".join(lines).encode()


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [*markdown_table(head, rows), ""]


def _plain(text: str) -> str:
    return plain(one_line(text))


def _code(text: str) -> str:
    """Code, whatever is in it."""
    text = one_line(text).replace("\\|", "\\ |").replace("|", "\\|")
    fence = "`"
    while fence in text:
        fence += "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


FORMATS = {"html": _html, "png": _png, "json": _json, "md": _md}
"""What a report can be written as, and what writes it."""
