# SPDX-License-Identifier: Apache-2.0
"""Words that all forms of the report share: for numbers, ranges, the run in one line, its correction and its settings."""

import json
import math
from typing import TYPE_CHECKING, Any

from ..metrics.catalogue import Range, range_text
from ..tables import visible


if TYPE_CHECKING:
    from .run import Run


_LONGEST_SETTING = 600  # characters


def number(value: float | None) -> str:
    """A number for a reader: three digits, powers of ten where they save space, nothing for `None`."""
    if value is None:
        return ""
    if math.isnan(value):
        return "NaN"
    sign = "−" if value < 0 else ""
    return sign + _size(abs(value))


def _size(size: float) -> str:
    if math.isinf(size):
        return "∞"
    if size != 0 and not 1e-3 <= size < 1e6:
        mantissa, exponent = f"{size:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1000:
        return f"{size:.0f}"
    # Near 1, the third digit says too little.
    return f"{size:.4g}" if 0.9 < size < 1.1 else f"{size:.3g}"


def healthy_range(bounds: Range) -> str:
    """A healthy range in words; empty if it is open on both sides."""
    return "0" if bounds == (None, 0.0) else range_text(bounds, number)


def one_line(text: str) -> str:
    """Text on one line, with line breaks and what has no glyph made visible."""
    return visible(text.replace("\r", "").replace("\n", "⏎"))


def subtitle(run: "Run") -> list[str]:
    """The run in a few words each: model, last step, trainer, engine, recorded steps; what is not known is left out."""
    fingerprint = run.fingerprint
    trainer = fingerprint.get("trainer") or {}
    engine = fingerprint.get("engine") or {}
    parts = [
        str(fingerprint.get("model") or ""),
        f"step {run.last_step}" if run.last_step else "",
        _joined(trainer.get("class"), trainer.get("dtype")),
        _joined(engine.get("kind"), engine.get("dtype")),
    ]
    if run.records:
        parts.append(f"{len(run.records)} recorded step{'s' if len(run.records) > 1 else ''}")
    return [part for part in parts if part]


def _joined(*words: Any) -> str:
    return " ".join(str(word) for word in words if word)


def correction_in_words(correction: dict[str, Any]) -> str:
    """The correction of a fingerprint in one sentence; empty without one."""
    if not correction:
        return ""
    parts = []
    if correction.get("action") not in (None, "none"):
        parts.append(f"{correction.get('level')} {correction['action']} {_bounds(correction)}")
    parts += [_rejection_in_words(rule) for rule in correction.get("rejections") or ()]
    parts += [_trust_region_in_words(region) for region in correction.get("trust_regions") or ()]
    if correction.get("reject_rate") is not None:
        parts.append(f"bounds calibrated to reject {number(100 * correction['reject_rate'])} % of healthy completions")
    if correction.get("normalize") not in (None, "none"):
        parts.append(f"weights normalized per {correction['normalize']}")
    name = f"{correction['preset']}: " if correction.get("preset") else ""
    return f"{name}{', '.join(parts)}."


def _rejection_in_words(rule: Any) -> str:
    if not isinstance(rule, dict):
        return f"rejection {rule}"
    return f"rejection outside {rule.get('statistic', 'ratio')}/{rule.get('level')} {_bounds(rule)}"


def _trust_region_in_words(region: Any) -> str:
    if not isinstance(region, dict):
        return f"trust region {region}"
    return f"trust region {region.get('kind')} {number(region.get('bound'))}"


def _bounds(rule: dict[str, Any]) -> str:
    return f"{number(rule.get('lower')) or '0'} … {number(rule.get('upper')) or '∞'}"


def settings_by_group(fingerprint: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Names and values of a fingerprint without its audit, in groups; the group `run` has those that are in no other."""
    loose: list[tuple[str, str]] = []
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in fingerprint.items():
        if name == "audit" or value is None:
            continue
        if isinstance(value, dict):
            groups[str(name)] = [(str(key), _setting(each)) for key, each in value.items() if each is not None]
        else:
            loose.append((str(name), _setting(value)))
    groups = {name: values for name, values in groups.items() if values}
    return {"run": loose, **groups} if loose else groups


def _setting(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]} …"
