# SPDX-License-Identifier: Apache-2.0
"""What of a run can be drawn: each plot draws into one axes, for the page (SVG in the colors of its theme) and for a PNG.

Matplotlib is imported only where something is drawn, and none of its global state is changed for long.
"""

import io
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..ratios import level_log_ratio, scored_tokens
from ..records.record import MismatchRecord
from .curve import TRAINING, Curve, metric_of, number
from .run import Run


HINT = "pip install 'trl-consistent[report]'"
LIGHT = {
    "ink": "#1f2328",
    "muted": "#59636e",
    "grid": "#d9dee4",
    "line": "#0a5fb4",
    "other": "#8250a8",
    "good": "#1a7f37",
    "warning": "#b35900",
    "critical": "#cf222e",
    "surface": "#ffffff",
}
DARK = {
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "grid": "#343b44",
    "line": "#58a6ff",
    "other": "#bc8cff",
    "good": "#3fb950",
    "warning": "#e3912a",
    "critical": "#ff6b62",
    "surface": "#161b22",
}
"""Colors by role, of the page too."""

# What stands in an SVG for the color of a role until the style sheet of the page says it.
_STAND_IN = {role: f"#5a{index:04x}" for index, role in enumerate(LIGHT)}

_SIZE = 3.6, 2.25  # inches; 360 pixels wide on the page
_POINTS = 500  # of a curve
_MARKERS = 400  # more points than these are drawn as cells
_CELLS = 44  # of a density along an axis
_SHADES = (0.3, 0.45, 0.6, 0.8, 1.0)  # opacity by density

Colors = Mapping[str, str]


SECTIONS = {
    "probabilities": "Trainer against engine",
    "confidence": "Gap against −log p",
    "position": "Gap against position",
    "sequences": "Sequence ratio against length",
}
"""Headings of the parts of the page that look into records."""


@dataclass(frozen=True)
class Plot:
    """One figure: what it is called, what it says, and what draws it."""

    section: str
    """Which part of the page it is in."""
    name: str
    """Unique in the report; a word for ids."""
    title: str
    """Short."""
    caption: str
    """What to see in it."""
    draw: Callable[[Any, Colors], None]
    """Draws into the axes given first, in the colors given second."""

    @property
    def full_title(self) -> str:
        """Its title where no heading stands above it."""
        return f"{SECTIONS[self.section]}, {self.title}" if self.section in SECTIONS else self.title


def available() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def plots(run: Run) -> list[Plot]:
    """Every figure that the run has data for, in the order of the page."""
    return [*_curve_plots(run), *_token_plots(run), *_correction_plots(run)]


def svg(plot: Plot) -> str:
    """The plot as an `<svg>` for a page that defines the colors as CSS variables, `--ink` and so on."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE)
    plot.draw(_axes(figure.add_axes((0.13, 0.16, 0.845, 0.75)), _STAND_IN), _STAND_IN)
    buffer = io.StringIO()
    with _LOCK, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue(), plot)


_LOCK = threading.Lock()  # rcParams are the process's


def _for_page(text: str, plot: Plot) -> str:
    text = text[text.index("<svg") :]
    # What follows is matplotlib's own; a style sheet inside would reach the whole page.
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    text = re.sub(r"\n\s*", "\n", text)
    text = re.sub(r" font-family: [^;\"]*;", "", text)  # the page's
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    text = re.sub(
        r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" id="plot-{plot.name}">', text, count=1
    )
    text = re.sub(r'(\sid="|url\(#|href="#)(?!plot-)', rf"\g<1>{plot.name}--", text)
    text = text.replace("xlink:href", "href")
    for role, color in _STAND_IN.items():
        text = text.replace(color, f"var(--{role})")
    return text


def png(plots: list[Plot], title: str) -> bytes:
    """All plots in one picture, three in a row, each section from a new row on, in the light theme."""
    from matplotlib.figure import Figure

    sections: dict[str, list[Plot]] = {}
    for plot in plots:
        sections.setdefault(plot.section, []).append(plot)
    rows = [part[start : start + 3] for part in sections.values() for start in range(0, len(part), 3)]
    width, height, top = 12.0, 2.9, 0.6  # inches: of the picture, of a row, of the title
    whole = top + height * len(rows)
    figure = Figure(figsize=(width, whole), facecolor=LIGHT["surface"])
    figure.text(0.02, 1 - 0.6 * top / whole, title, fontsize=13, color=LIGHT["ink"], va="center")
    for index, row in enumerate(rows):
        bottom = whole - top - height * (index + 1) + 0.5
        for column, plot in enumerate(row):
            axes = figure.add_axes((column / 3 + 0.045, bottom / whole, 0.275, 1.9 / whole))
            axes.set_title(plot.full_title, fontsize=9, loc="left", color=LIGHT["ink"], x=-0.11, pad=17)
            plot.draw(_axes(axes, LIGHT), LIGHT)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _axes(axes: Any, colors: Colors) -> Any:
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colors["grid"])
    axes.tick_params(which="both", colors=colors["muted"], labelsize=8, length=2.5, width=0.6, pad=2.5)
    axes.grid(True, color=colors["grid"], linewidth=0.5)
    axes.set_axisbelow(True)
    return axes


def _labels(axes: Any, colors: Colors, x: str, y: str) -> None:
    """The name of y stands above its axis, where it needs no width."""
    axes.set_xlabel(x, fontsize=8, color=colors["muted"], labelpad=1.5)
    axes.annotate(
        y,
        (0, 1),
        xytext=(-28, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=colors["muted"],
    )


def _scale(axis: Any, low: float = 0.0, high: float = 1.0, log: bool = False, whole: bool = False) -> None:
    """Ticks at round numbers, three to six of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if log:
        axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
        decades = math.log10(high / low)
        digits = (
            [1.0] if decades > 2 else [1.0, 2.0, 5.0] if decades > 0.7 else [float(digit) for digit in range(1, 10)]
        )
        axis.set_major_locator(LogLocator(subs=digits, numticks=6))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10], integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(_rounded(value))))


def _rounded(value: float) -> float:
    """Without what floating-point arithmetic leaves behind the digits of a tick."""
    return float(f"{value:.6g}")


# Curves

_SPREAD = 12  # largest over smallest value from which an axis is logarithmic
_ALSO_LOG = ("grad_norm", "kl")  # besides ours


def _curve_plots(run: Run) -> Iterable[Plot]:
    ours = any(curve.key.startswith("mismatch/") for curve in run.measured)
    for curve in run.measured:
        is_stock = curve.key.startswith("sampling/")
        told = not ours if is_stock else curve.healthy != (None, None)
        if told and not (curve.healthy == (None, 0.0) and not any(curve.values)):  # that it is 0 needs no picture
            yield _curve_plot(run, curve, "correction" if curve.key.startswith("correction/") else "metrics")
    for key in TRAINING:
        if key in run.curves:
            yield _curve_plot(run, run.curves[key], "training")


def _curve_plot(run: Run, curve: Curve, section: str) -> Plot:
    marks = [(event.step, event.severity) for event in run.events if event.key == curve.key]
    name = "curve-" + re.sub(r"\W+", "-", curve.key)
    return Plot(section, name, curve.key, curve.meaning, partial(draw_curve, curve=curve, marks=marks))


def draw_curve(axes: Any, colors: Colors, curve: Curve, marks: Sequence[tuple[int, str]]) -> None:
    """One metric over steps, its healthy band, what is outside it, and where alerts opened and closed."""
    steps, values = np.array(curve.steps), np.array(curve.values)
    finite = np.isfinite(values)
    bounds = [bound for bound in curve.healthy if bound is not None]
    low, high, log = _span(
        np.concatenate([values[finite], bounds]), may_be_log=curve.key not in TRAINING or curve.key in _ALSO_LOG
    )
    _scale(axes.yaxis, low, high, log)
    axes.set_ylim(low, high)
    if bounds:
        inner, outer = curve.healthy
        axes.axhspan(
            low if inner is None else inner,
            high if outer is None else outer,
            color=colors["good"], alpha=0.09, linewidth=0, gid="healthy",
        )  # fmt: skip
        for bound in bounds:
            axes.axhline(bound, color=colors["good"], linewidth=0.8, alpha=0.7, gid=f"bound-{bound:g}")
    for step, severity in marks:
        color = colors["good" if severity == "recovered" else severity]
        axes.axvline(step, color=color, linewidth=0.9, linestyle=(0, (3, 2)), gid=f"alert-{severity}-{step}")
        axes.plot([step], [1.0], "v", color=color, markersize=4, transform=axes.get_xaxis_transform(), clip_on=False)
    kept = _thinned(values)
    style = {"marker": "o", "markersize": 3.0} if len(steps) <= 30 else {}
    x, y = steps[kept], np.where(np.isfinite(values), np.maximum(values, low) if log else values, np.nan)[kept]
    axes.plot(x, y, color=colors["line"], linewidth=1.1, gid="curve", **style)
    for role, judge in (("warning", curve.is_outside), ("critical", curve.is_critical)):
        beyond = np.array([judge(value) for value in values[kept]])
        if beyond.any():
            axes.plot(
                x, np.where(_with_next(beyond), y, np.nan), color=colors[role], linewidth=1.3, gid=f"outside-{role}"
            )
    if not finite.all():
        far = steps[~finite][:_POINTS]
        axes.plot(
            far, np.full(len(far), 0.97), "^",
            color=colors["critical"], markersize=4, transform=axes.get_xaxis_transform(), gid="infinite",
        )  # fmt: skip
    _scale(axes.xaxis, whole=True)
    metric = metric_of(curve.key)
    _labels(axes, colors, "step", metric.unit if metric else "")


def _span(values: np.ndarray, may_be_log: bool) -> tuple[float, float, bool]:
    """The part of the y axis that shows the values, and whether it is logarithmic."""
    if not len(values):
        return 0.0, 1.0, False
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    if may_be_log and len(positive) > 0.9 * len(values) and high > _SPREAD * positive.min():
        low = max(float(positive.min()), float(np.median(positive)) / 1e4)
        factor = (high / low) ** 0.06
        return low / factor, high * factor, True
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin, False


def _with_next(points: np.ndarray) -> np.ndarray:
    """The points and their neighbors, so that a line through them shows one that is alone."""
    return points | np.r_[points[1:], False] | np.r_[False, points[:-1]]


def _thinned(values: np.ndarray) -> np.ndarray:
    """Where to look at a long curve so that its highs and lows are kept."""
    if len(values) <= _POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), _POINTS // 2)
    filled = np.nan_to_num(values, posinf=np.finfo(float).max, neginf=-np.finfo(float).max)
    found = [part[index] for part in parts for index in (filled[part].argmin(), filled[part].argmax())]
    return np.unique([0, *found, len(values) - 1])


# Tokens of a record


@dataclass(frozen=True)
class _Tokens:
    """The scored tokens of a record, flat, and its completions."""

    old: np.ndarray
    sampling: np.ndarray
    size: np.ndarray
    """|d|"""
    index: np.ndarray
    """In the completion, from 0."""
    lengths: np.ndarray
    """Scored tokens of each completion."""
    sums: np.ndarray
    """Of d, over each completion."""

    @classmethod
    def of(cls, record: MismatchRecord) -> "_Tokens":
        d, mask = record.mismatch_log_ratio, record.mask.bool()
        scored = scored_tokens(d, mask) & torch.isfinite(d)
        lengths = scored.sum(1)
        sums = level_log_ratio(torch.where(scored, d, 0.0), scored, "sequence").squeeze(1)
        index = torch.arange(d.shape[1]).expand_as(d)
        return cls(
            old=record.old_per_token_logps[scored].numpy(),
            sampling=record.sampling_per_token_logps[scored].numpy(),
            size=d.abs()[scored].numpy(),
            index=index[scored].numpy(),
            lengths=lengths[lengths > 0].numpy(),
            sums=sums[lengths > 0].numpy(),
        )


_LOWEST = 1e-6  # of |d| and of -log p that is drawn


def _token_plots(run: Run) -> Iterable[Plot]:
    steps = {step: tokens for step, record in run.looked_into().items() if len((tokens := _Tokens.of(record)).size)}
    if not steps:
        return
    highest = max(1.0, *(float(tokens.size.max()) for tokens in steps.values()))
    longest = max(int(tokens.index.max()) + 1 for tokens in steps.values())
    bounds = sequence_bounds(run.fingerprint.get("correction"))[0]
    kinds: dict[str, Callable[..., None]] = {
        "probabilities": draw_probabilities,
        "confidence": partial(draw_confidence, highest=highest),
        "position": partial(draw_position, highest=highest, longest=longest),
        "sequences": partial(draw_sequences, bounds=bounds, longest=longest),
    }
    for kind, draw in kinds.items():
        for step, tokens in steps.items():
            yield Plot(kind, f"{kind}-{step}", f"step {step} ({run.chosen[step]})", "", partial(draw, tokens=tokens))


def draw_probabilities(axes: Any, colors: Colors, tokens: _Tokens) -> None:
    """p of the trainer against p of the engine, token by token."""
    axes.plot([0, 1], [0, 1], color=colors["muted"], linewidth=0.7, gid="diagonal")
    _cloud(axes, colors, np.exp(tokens.sampling), np.exp(tokens.old), (0, 1), (0, 1))
    _labels(axes, colors, "p in the engine", "p in the trainer")


def draw_confidence(axes: Any, colors: Colors, tokens: _Tokens, highest: float) -> None:
    """|d| against how unlikely the trainer finds the token."""
    surprise = -tokens.old
    _cloud(
        axes,
        colors,
        surprise,
        tokens.size,
        (1e-4, max(20.0, float(surprise.max()))),
        (_LOWEST, highest),
        True,
        True,
    )
    _labels(axes, colors, "−log p in the trainer, nats", "|d|, nats")


def draw_position(axes: Any, colors: Colors, tokens: _Tokens, highest: float, longest: int) -> None:
    """|d| against where the token stands in its completion, with median and 99th percentile."""
    _cloud(axes, colors, tokens.index, tokens.size, (0, longest), (_LOWEST, highest), False, True)
    edges = np.unique(np.quantile(tokens.index, np.linspace(0, 1, 13)).round())
    places = np.searchsorted(edges, tokens.index, side="right")
    for q, style in ((50, "-"), (99, (0, (4, 2)))):
        points = [
            (tokens.index[inside].mean(), np.percentile(tokens.size[inside], q))
            for place in np.unique(places) if (inside := places == place).sum() >= 20
        ]  # fmt: skip
        if len(points) > 1:
            x, y = zip(*points, strict=True)
            axes.plot(
                x,
                np.maximum(y, _LOWEST),
                color=colors["warning"],
                linewidth=1.2,
                linestyle=style,
                gid=f"percentile-{q}",
            )
    _labels(axes, colors, "token of the completion", "|d|, nats")


@dataclass(frozen=True)
class SequenceBound:
    """A bound of the correction that can be drawn over completions."""

    value: float
    """On the ratio."""
    per_token: bool
    """Whether it is on the geometric ratio, so that the sequence may reach it to the power of its length."""
    who: str
    """What sets it, in words."""


def sequence_bounds(correction: Mapping[str, Any] | None) -> tuple[list[SequenceBound], str]:
    """The bounds on a completion's ratio in the fingerprint of a correction, and what to say of them."""
    if not correction:
        return [], "No correction was in force."
    rules = [(correction.get("level"), correction, f"{correction.get('level')} {correction.get('action')}")]
    if correction.get("action") in (None, "none"):
        rules = []
    for rule in correction.get("rejections") or ():
        if isinstance(rule, Mapping) and rule.get("statistic", "ratio") == "ratio":
            rules.append((rule.get("level"), rule, f"{rule.get('level')} rejection"))
    found = [
        SequenceBound(float(value), level == "geometric", f"{who}: {number(value)}")
        for level, rule, who in rules
        if level in ("sequence", "geometric")
        for value in (rule.get("lower"), rule.get("upper"))
        if isinstance(value, int | float) and value > 0
    ]
    if correction.get("reject_rate") is not None:
        return [], "Bounds are calibrated for each batch and not drawn."
    if not found:
        return [], "The correction has no bound on a whole completion."
    return found, "Lines are the bounds in force: " + "; ".join(bound.who for bound in found) + "."


def draw_sequences(axes: Any, colors: Colors, tokens: _Tokens, bounds: list[SequenceBound], longest: int) -> None:
    """The log of each completion's ratio against its length, and the bounds on it."""
    reach = 1.15 * max(float(np.abs(tokens.sums).max()), 1e-3)
    flat = [abs(math.log(bound.value)) for bound in bounds if not bound.per_token]
    reach = max([reach, *(1.15 * each for each in flat if each < 4 * reach)])
    axes.axhline(0, color=colors["muted"], linewidth=0.7)
    _cloud(axes, colors, tokens.lengths, tokens.sums, (0, 1.05 * longest), (-reach, reach))
    lengths = np.array([0, 1.05 * longest])
    for bound in bounds:
        line = math.log(bound.value) * (lengths if bound.per_token else np.ones(2))
        axes.plot(
            lengths, line, color=colors["warning"], linewidth=1.1, linestyle=(0, (4, 2)), gid=f"bound-{bound.value:g}"
        )
    _labels(axes, colors, "tokens", "log ratio, nats")


def _cloud(
    axes: Any,
    colors: Colors,
    x: np.ndarray,
    y: np.ndarray,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_log: bool = False,
    y_log: bool = False,
) -> None:
    """Points, or how many there are in each cell; what is beyond the ranges is drawn at their edges."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    x, y = np.clip(x, *x_range), np.clip(y, *y_range)
    _scale(axes.xaxis, *x_range, x_log)
    _scale(axes.yaxis, *y_range, y_log)
    axes.set_xlim(*x_range)
    axes.set_ylim(*y_range)
    if len(x) <= _MARKERS:
        axes.plot(
            x, y, "o", color=colors["line"], markersize=3.4, alpha=0.6, markeredgewidth=0, gid="points", clip_on=False
        )
        return
    edges = [
        np.geomspace(*span, _CELLS + 1) if log else np.linspace(*span, _CELLS + 1)
        for span, log in ((x_range, x_log), (y_range, y_log))
    ]
    edges[0][[0, -1]], edges[1][[0, -1]] = x_range, y_range
    counts = np.histogram2d(x, y, bins=edges)[0]
    # Shades by the logarithm of the count, so that a single token can be seen beside a million.
    shades = np.ceil(len(_SHADES) * np.log1p(counts) / np.log1p(counts.max())).astype(int)
    for shade, opacity in enumerate(_SHADES, 1):
        boxes = [box for column in range(_CELLS) for box in _runs(shades[column] == shade, column, *edges)]
        if boxes:
            vertices = np.array(boxes).reshape(-1, 2)
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
            axes.add_patch(
                PathPatch(
                    Path(vertices, codes), facecolor=colors["line"], alpha=opacity, linewidth=0, gid=f"density-{shade}"
                )
            )


def _runs(cells: np.ndarray, column: int, x: np.ndarray, y: np.ndarray) -> Iterable[list[tuple[float, float]]]:
    """Boxes around the runs of set cells in a column."""
    changes = np.flatnonzero(np.diff(np.r_[False, cells, False].astype(int)))
    left, right = x[column], x[column + 1]
    for start, end in zip(changes[::2], changes[1::2], strict=True):
        bottom, top = y[start], y[end]
        yield [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]


# What the correction did

_VERBS = {"truncated": "line", "masked": "other", "rejected": "warning"}


def shares(run: Run) -> dict[str, Curve]:
    """The share of tokens that each action touched on either side, over the steps; those that never act are left out."""
    found = {}
    for verb in _VERBS:
        sides = [
            run.curves[key] for side in ("low", "high") if (key := f"correction/{verb}_fraction/{side}") in run.curves
        ]
        if sides and any(any(curve.values) for curve in sides):
            total: dict[int, float] = {}
            for curve in sides:
                for step, value in zip(curve.steps, curve.values, strict=True):
                    total[step] = total.get(step, 0.0) + value
            found[verb] = Curve(f"correction/{verb}_fraction", sorted(total), [total[step] for step in sorted(total)])
    return found


def _correction_plots(run: Run) -> Iterable[Plot]:
    if found := shares(run):
        caption = "What the correction touched, below and above its bounds together."
        yield Plot("correction", "shares", "Share of tokens", caption, partial(draw_shares, shares=found))
    for step, record in run.looked_into().items():
        if record.weights is None:
            continue
        kept = record.mask if record.keep_mask is None else record.keep_mask
        weights = record.weights[kept.bool() & torch.isfinite(record.weights)].numpy()
        if len(weights):
            caption = f"{len(weights)} of {int(record.mask.sum())} tokens that are left in the loss."
            title = f"Weights, step {step} ({run.chosen[step]})"
            yield Plot("correction", f"weights-{step}", title, caption, partial(draw_weights, weights=weights))


def draw_shares(axes: Any, colors: Colors, shares: dict[str, Curve]) -> None:
    """Truncated, masked and rejected tokens over steps, in percent."""
    for verb, curve in shares.items():
        values = 100 * np.array(curve.values)
        kept = _thinned(values)
        style = {"marker": "o", "markersize": 3} if len(values) <= 30 else {}
        axes.plot(
            np.array(curve.steps)[kept],
            values[kept],
            color=colors[_VERBS[verb]],
            linewidth=1.2,
            label=verb,
            gid=f"share-{verb}",
            **style,
        )
    axes.set_ylim(bottom=0)
    _scale(axes.yaxis)
    _scale(axes.xaxis, whole=True)
    axes.legend(fontsize=8, frameon=False, labelcolor=colors["ink"], loc="upper left", handlelength=1.2, borderpad=0.1)
    _labels(axes, colors, "step", "percent")


def draw_weights(axes: Any, colors: Colors, weights: np.ndarray) -> None:
    """How many tokens have which weight."""
    counts, edges = np.histogram(weights, bins=40, range=(0.0, max(2.0, float(weights.max()))))
    high = float(counts.max()) * 2
    _scale(axes.yaxis, 0.7, max(high, 20), True)
    axes.set_ylim(0.7, max(high, 20))
    axes.stairs(counts, edges, baseline=0.5, fill=True, color=colors["line"], linewidth=0, gid="weights")
    _scale(axes.xaxis)
    axes.set_xlim(edges[0], edges[-1])
    _labels(axes, colors, "weight", "tokens, log axis")
