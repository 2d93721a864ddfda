# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page that loads nothing, in the reader's theme, on any width.

Completions, settings and file names are other people's text: all of it is escaped, and the page's own policy forbids
scripts and connections.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from .. import __version__
from ..report import figures
from ..tables import visible
from .completions import Token, worst_completions
from .curve import Curve, healthy_range, number
from .run import Run, table


_EVENTS = 40  # alerts that are listed
_LEVELS = (0.05, 0.3, 1.0)  # |d| at which a token's color begins and deepens
_TEXT = 600  # characters of a setting
_LEADS = {
    "probabilities": "The probability of each token on both sides; on the diagonal they agree.",
    "confidence": "|d| grows with −log p when it is rounding. Large gaps on the left, where the trainer is sure, are not.",
    "position": "Median (solid) and 99th percentile (dashed) of |d|. Flat when healthy; high at the start: prompts differ; "
    "rising: errors add up over the context.",
    "sequences": "The sum of d over a completion, which is the log of its ratio, against its length.",
}


def render_html(run: Run, live: bool = False) -> str:
    """The report of a run: one page, nothing else needed.

    Args:
        run ([`Run`]): From [`load_run`].
        live (`bool`, *optional*, defaults to `False`):
            Whether `watch.py` serves it: then it renews itself when told to, and offers the records.
    """
    drawn = figures.available()
    sections: dict[str, list[tuple[figures.Plot, Markup]]] = {}
    if drawn:
        for plot in figures.plots(run):
            sections.setdefault(plot.section, []).append((plot, Markup(figures.svg(plot))))
    correction = run.fingerprint.get("correction") or {}
    bounds = figures.sequence_bounds(correction)[1]
    leads = {**_LEADS, "sequences": f"{_LEADS['sequences']} {bounds}"}
    completions, tokens = worst_completions(run), run.worst_tokens()
    return _rendered(
        "template.html",
        run=run,
        live=live,
        light=figures.LIGHT,
        dark=figures.DARK,
        drawn=drawn,
        hint=figures.HINT,
        figures=sections,
        about=about(run),
        tiles=[_tile(curve) for curve in run.headlines],
        rows=_rows(run),
        events=run.events[-_EVENTS:],
        more_events=max(0, len(run.events) - _EVENTS),
        token_sections=[(name, title, leads[name]) for name, title in figures.SECTIONS.items()],
        correction=correction_in_words(correction),
        completions=completions,
        legend=_legend(),
        tokens=tokens,
        audit=run.fingerprint.get("audit") or [],
        settings=settings(run),
        version=__version__,
    )


def render_notice(name: str, title: str, sentence: str) -> str:
    """A live page of a run that cannot be shown: it is replaced as soon as there is a report."""
    return _rendered("notice.html", live=True, name=name, title=title, sentence=sentence)


def _rendered(template: str, live: bool, **values: Any) -> str:
    """A template of this folder, filled in; a live page brings its script and the policy that allows it."""
    script = _file("live.js") if live else ""
    environment = _environment()
    return environment.from_string(_file(template)).render(
        live=live, script=Markup(script), policy=_policy(script), **values
    )


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
        "look": _look,
        "number": number,
        "numbers": _numbers,
        "range": healthy_range,
        "shown": _shown,
    }
    return environment


def _code(text: str) -> Markup:
    """Escaped, with what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _key(text: str) -> Markup:
    """Escaped, with places where a long name may break."""
    return Markup(re.sub(r"([/_])", r"\1<wbr>", str(escape(text))))


def one_line(text: str) -> str:
    """[`visible`], with line breaks shown."""
    return visible(text.replace("\r", "").replace("\n", "⏎"))


def about(run: Run) -> list[str]:
    """The run in a few words."""
    mark = run.fingerprint
    trainer, engine = mark.get("trainer") or {}, mark.get("engine") or {}
    parts = [mark.get("model"), f"step {run.last_step}" if run.last_step else None]
    parts += [" ".join(str(x) for x in (trainer.get("class"), trainer.get("dtype")) if x)]
    parts += [" ".join(str(x) for x in (engine.get("kind"), engine.get("dtype")) if x)]
    if run.records:
        parts.append(f"{len(run.records)} recorded step{'s' if len(run.records) > 1 else ''}")
    return [str(part) for part in parts if part]


def _level(curve: Curve, value: float | None) -> str:
    if value is None or curve.healthy == (None, None):
        return ""
    return "critical" if curve.is_critical(value) else "warning" if curve.is_outside(value) else "healthy"


def _tile(curve: Curve) -> dict[str, Any]:
    healthy = healthy_range(curve.healthy)
    return {
        "key": curve.key,
        "meaning": curve.meaning,
        "value": number(curve.values[-1]),
        "notes": [f"healthy {healthy}"] * bool(healthy) + [f"began at {number(curve.values[0])}"],
        "level": _level(curve, curve.values[-1]),
    }


def _rows(run: Run) -> Iterable[dict[str, Any]]:
    marks = {"critical": "is-critical", "warning": "outside"}
    return [
        {
            **row,
            "end_class": marks.get(_level(run.curves[row["key"]], row["end"]), ""),
            "worst_class": marks.get(_level(run.curves[row["key"]], row["worst"]), ""),
        }
        for row in table(run)
    ]


def correction_in_words(correction: dict[str, Any]) -> str:
    """A correction of a fingerprint in a sentence; empty without one."""
    if not correction:
        return ""

    def bounds(rule: dict[str, Any]) -> str:
        return f"{number(rule.get('lower')) or '0'} … {number(rule.get('upper')) or '∞'}"

    parts = []
    if correction.get("action") not in (None, "none"):
        parts.append(f"{correction.get('level')} {correction.get('action')} {bounds(correction)}")
    for rule in correction.get("rejections") or ():
        parts.append(
            f"rejection outside {rule.get('statistic', 'ratio')}/{rule.get('level')} {bounds(rule)}"
            if isinstance(rule, dict)
            else f"rejection {rule}"
        )
    for region in correction.get("trust_regions") or ():
        parts.append(
            f"trust region {region.get('kind')} {number(region.get('bound'))}"
            if isinstance(region, dict)
            else f"trust region {region}"
        )
    if correction.get("reject_rate") is not None:
        parts.append(f"bounds calibrated to reject {number(100 * correction['reject_rate'])} % of healthy completions")
    if correction.get("normalize") not in (None, "none"):
        parts.append(f"weights normalized per {correction['normalize']}")
    name = f"{correction['preset']}: " if correction.get("preset") else ""
    return f"{name}{', '.join(parts)}."


def settings(run: Run) -> dict[str, list[tuple[str, str]]]:
    """What the fingerprint says, in groups of names and values, without the audit."""
    groups: dict[str, list[tuple[str, str]]] = {}
    loose: list[tuple[str, str]] = []
    for name, value in run.fingerprint.items():
        if name == "audit" or value is None:
            continue
        if isinstance(value, dict):
            groups[str(name)] = [(str(key), _text(each)) for key, each in value.items() if each is not None]
        else:
            loose.append((str(name), _text(value)))
    return ({"run": loose} if loose else {}) | {name: values for name, values in groups.items() if values}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} …"


# Tokens


def _shade(d: float) -> str:
    if math.isnan(d):
        return ""
    level = sum(abs(d) >= start for start in _LEVELS)
    return f"{'u' if d < 0 else 'd'}{level}" if level else ""


def _look(token: Token) -> str:
    """Its classes, with a space before each."""
    classes = [_shade(token.d)]
    if not token.inside:
        classes.append("outside-mask")
    elif math.isnan(token.d):
        classes.append("unscored")
    if token.inside and (not token.kept or token.weight == 0):
        classes.append("stopped")
    return "".join(f" {name}" for name in classes if name)


def _shown(token: Token) -> str:
    """Its text, with something to see where that is blank."""
    if not token.text:
        return "·"
    return token.text.replace("\r", "").replace("\n", "⏎\n")


def _numbers(token: Token) -> str:
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
    spans = [f"{number(low)} to {number(high)}" for low, high in zip(_LEVELS, _LEVELS[1:], strict=False)]
    spans.append(f"≥ {number(_LEVELS[-1])}")
    return {
        "up": [(f"d{index}", f" {span} ") for index, span in enumerate(spans, 1)],
        "down": [
            (f"u{index}", f" −{span} ".replace("to ", "to −").replace("−≥ ", "≤ −"))
            for index, span in enumerate(spans, 1)
        ],
    }
