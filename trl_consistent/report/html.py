# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page that loads nothing, in the reader's theme, on any width.

`template.html` is the page; this file fills it in. Completions, settings and file names are other people's text: all of it is
escaped, and the page's own policy forbids scripts and connections.
"""

import base64
import hashlib
import math
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from .. import __version__
from . import figures
from .completions import Token, worst_completions
from .curve import Curve
from .drawing import DARK, LIGHT, Plot
from .run import Run
from .token_plots import SECTIONS, sequence_bounds
from .wording import correction_in_words, healthy_range, number, one_line, settings_by_group, subtitle


_LISTED_EVENTS = 40
_SHADES_FROM = (0.05, 0.3, 1.0)  # |d| at which a token's color begins and deepens
_TABLE_CLASSES = {"critical": "is-critical", "warning": "outside"}


def render_html(run: Run, live: bool = False) -> str:
    """The report of a run as one page that needs no other file.

    Args:
        run ([`Run`]): From [`load_run`].
        live (`bool`, *optional*, defaults to `False`):
            Whether `watch.py` serves the page: it then renews itself, and offers the records.
    """
    correction = run.fingerprint.get("correction") or {}
    leads = {name: section.lead for name, section in SECTIONS.items()}
    leads["sequences"] += f" {sequence_bounds(correction)[1]}"
    return _rendered(
        "template.html",
        live,
        # These read records, and add to `run.missing` what cannot be read.
        figures=_figures(run),
        completions=worst_completions(run),
        tokens=run.worst_tokens(),
        run=run,
        light=LIGHT,
        dark=DARK,
        drawn=figures.available(),
        install=figures.INSTALL,
        subtitle=subtitle(run),
        tiles=[_tile(curve) for curve in run.headlines],
        rows=[_table_row(run, row) for row in run.metric_rows()],
        events=run.events[-_LISTED_EVENTS:],
        more_events=max(0, len(run.events) - _LISTED_EVENTS),
        token_sections=[(name, section.title, leads[name]) for name, section in SECTIONS.items()],
        correction=correction_in_words(correction),
        legend=_legend(),
        audit=run.fingerprint.get("audit") or [],
        settings=settings_by_group(run.fingerprint),
        version=__version__,
    )


def render_notice(name: str, title: str, sentence: str) -> str:
    """A live page for a run that cannot be shown: the report replaces it as soon as there is one."""
    return _rendered("notice.html", live=True, name=name, title=title, sentence=sentence)


def _rendered(template: str, live: bool, **values: Any) -> str:
    """A template of this folder, filled in; a live page brings its script and the policy that allows it."""
    script = _file("live.js") if live else ""
    page = _environment().from_string(_file(template))
    return page.render(live=live, script=Markup(script), policy=_policy(script), **values)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Content-Security-Policy of a page that runs this script and no other, or none if it is empty."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if not script:
        return policy
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{policy}; connect-src 'self'; script-src 'sha256-{digest}'"


def _environment() -> Environment:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "code": _code,
        "key": _key,
        "line": one_line,
        "number": number,
        "range": healthy_range,
        "token_classes": _token_classes,
        "token_numbers": _token_numbers,
        "token_text": _token_text,
    }
    return environment


def _code(text: str) -> Markup:
    """The text, escaped, with what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _key(text: str) -> Markup:
    """The text, escaped, with places where a long name may break."""
    return Markup(re.sub(r"([/_])", r"\1<wbr>", str(escape(text))))


def _figures(run: Run) -> dict[str, list[tuple[Plot, Markup]]]:
    """The plots of each section with their pictures; empty without matplotlib."""
    sections: dict[str, list[tuple[Plot, Markup]]] = {}
    if figures.available():
        for plot in figures.plots(run):
            sections.setdefault(plot.section, []).append((plot, Markup(figures.svg(plot))))
    return sections


def _level(curve: Curve, value: float | None) -> str:
    """How bad a value of a metric is: `critical`, `warning`, `healthy`, or empty where there is no telling."""
    if value is None or curve.healthy == (None, None):
        return ""
    if curve.is_critical(value):
        return "critical"
    return "warning" if curve.is_outside(value) else "healthy"


def _tile(curve: Curve) -> dict[str, Any]:
    """The texts of the tile of a key number, and its level."""
    notes = [f"began at {number(curve.values[0])}"]
    if healthy := healthy_range(curve.healthy):
        notes.insert(0, f"healthy {healthy}")
    value = curve.values[-1]
    return {
        "key": curve.key,
        "meaning": curve.meaning,
        "value": number(value),
        "notes": notes,
        "level": _level(curve, value),
    }


def _table_row(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table of metrics, with the classes of its values."""
    curve = run.curves[row["key"]]
    classes = {f"{name}_class": _TABLE_CLASSES.get(_level(curve, row[name]), "") for name in ("end", "worst")}
    return {**row, **classes}


# How a token of a completion looks


def _token_classes(token: Token) -> str:
    """The CSS classes of a token, each with a space before it."""
    classes = [_shade(token.d)]
    if not token.inside:
        classes.append("outside-mask")
    elif math.isnan(token.d):
        classes.append("unscored")
    if token.inside and (not token.kept or token.weight == 0):
        classes.append("stopped")
    return "".join(f" {name}" for name in classes if name)


def _shade(d: float) -> str:
    """The CSS class of the color of a gap: `d1` to `d3` where the trainer finds the token likelier, else `u1` to `u3`."""
    if math.isnan(d):
        return ""
    depth = sum(abs(d) >= start for start in _SHADES_FROM)
    return f"{'u' if d < 0 else 'd'}{depth}" if depth else ""


def _token_text(token: Token) -> str:
    """The text of a token, with something to see where it is blank."""
    if not token.text:
        return "·"
    return token.text.replace("\r", "").replace("\n", "⏎\n")


def _token_numbers(token: Token) -> str:
    """The numbers of a token, for its tooltip."""
    if not token.inside:
        return f"not written by the model, position {token.position}"
    parts = [f"p trainer {number(token.p_train)}"]
    if math.isnan(token.d):
        parts.append("unscored by the engine")
    else:
        parts += [f"p engine {number(token.p_rollout)}", f"d {number(token.d)}"]
    if not token.kept:
        parts.append("rejected")
    elif token.weight is not None:
        parts.append(f"weight {number(token.weight)}")
    return ", ".join([*parts, f"position {token.position}"])


def _legend() -> dict[str, list[tuple[str, str]]]:
    """Classes and texts of the shades: `up` where the trainer finds the token likelier, `down` where the engine does."""
    limits = [number(start) for start in _SHADES_FROM]
    spans = list(zip(limits, limits[1:], strict=False))
    up = [f" {start} to {end} " for start, end in spans] + [f" ≥ {limits[-1]} "]
    down = [f" −{start} to −{end} " for start, end in spans] + [f" ≤ −{limits[-1]} "]
    return {
        "up": [(f"d{depth}", text) for depth, text in enumerate(up, 1)],
        "down": [(f"u{depth}", text) for depth, text in enumerate(down, 1)],
    }
