# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of the README that are generated: `python scripts/tables.py`. A test compares them."""

from trl_consistent import METRICS, PRESETS


def _bound(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _outside(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"outside {_bound(low)} … {_bound(high)}"
    return f"below {_bound(low)}" if high is None else f"above {_bound(high)}"


def metric_table() -> str:
    rows = ["| metric | unit | meaning | reduction | healthy |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        rows.append(
            f"| `{metric.key}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} | {metric.reduction} "
            f"| {metric.healthy_text} |"
        )
    return "\n".join(rows)


def preset_table() -> str:
    rows = ["| `correction` | ratio | action | bounds | on top | source |", "|---|---|---|---|---|---|"]
    for name, c in PRESETS.items():
        bounds = "–" if c.action == "none" else f"{_bound(c.lower) or '0'} … {_bound(c.upper) or '∞'}"
        on_top = [f"rejects `{r.name}` {_outside(r.lower, r.upper)}" for r in c.rejections]
        on_top += [f"trust region `{region.kind}` {_bound(region.bound)}" for region in c.trust_regions]
        level, action = ("–", "–") if c.action == "none" else (c.level, c.action)
        rows.append(f"| `{name}` | {level} | {action} | {bounds} | {', '.join(on_top) or '–'} | {c.source} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(metric_table(), preset_table(), sep="\n\n")
