# SPDX-License-Identifier: Apache-2.0
"""The parts that all plots share: colors by role, axes and their ticks, thinning of long curves, clouds of many points.

`curve_plots.py` and `token_plots.py` decide which plots a run has; `figures.py` makes SVG and PNG of them. Matplotlib is
imported only where something is drawn.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .wording import number


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
"""Colors of the light theme by role, in figures and on the page."""
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
"""The same roles in the dark theme."""
Colors = Mapping[str, str]

FEW_POINTS = 30
"""A curve with at most so many points shows each of them."""
MOST_POINTS = 500
"""A longer curve is thinned to so many points."""
_MARKERS = 400  # more points than these are drawn as cells
_CELLS = 44  # of a density along an axis
_SHADES = (0.3, 0.45, 0.6, 0.8, 1.0)  # opacity by density


@dataclass(frozen=True)
class Plot:
    """One figure: its place, its texts, and the function that draws it."""

    section: str
    """Name of the part of the page that shows it."""
    name: str
    """Unique in the report, and fit to be a part of an HTML id."""
    title: str
    """Short title below the heading of its section."""
    caption: str
    """One sentence on what to see in it; may be empty."""
    draw: Callable[[Any, Colors], None]
    """Draws into the axes given first, in the colors given second."""
    heading: str = ""
    """Heading of its section, where the title needs it to be understood."""

    @property
    def full_title(self) -> str:
        """Title for a place where no heading stands above it."""
        return f"{self.heading}, {self.title}" if self.heading else self.title


@dataclass(frozen=True)
class Span:
    """The part of an axis that is shown."""

    low: float
    high: float
    log: bool = False
    """Whether the axis is logarithmic."""

    def clip(self, values: np.ndarray) -> np.ndarray:
        """The values, with those beyond the span moved to its ends."""
        return np.clip(values, self.low, self.high)

    def edges(self, cells: int) -> np.ndarray:
        """Edges of so many cells of equal width on the axis."""
        edges = (np.geomspace if self.log else np.linspace)(self.low, self.high, cells + 1)
        edges[[0, -1]] = self.low, self.high  # exactly, or a value that was clipped to an end falls out
        return edges


def style_axes(axes: Any, colors: Colors) -> Any:
    """Gives axes the look of the report and returns them."""
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colors["grid"])
    axes.tick_params(which="both", colors=colors["muted"], labelsize=8, length=2.5, width=0.6, pad=2.5)
    axes.grid(True, color=colors["grid"], linewidth=0.5)
    axes.set_axisbelow(True)
    return axes


def label_axes(axes: Any, colors: Colors, x: str, y: str) -> None:
    """Names both axes; the name of y stands above its axis, where it takes no width from the curve."""
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


def set_span(axis: Any, span: Span) -> None:
    """Sets the limits of an axis and its scale, with three to six ticks at round numbers."""
    is_x = axis.axis_name == "x"
    if span.log:
        (axis.axes.set_xscale if is_x else axis.axes.set_yscale)("log")
        _set_log_ticks(axis, span)
    else:
        set_round_ticks(axis)
    (axis.axes.set_xlim if is_x else axis.axes.set_ylim)(span.low, span.high)


def set_round_ticks(axis: Any, whole: bool = False) -> None:
    """Puts three to six ticks at round numbers on a linear axis; `whole` allows integers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10], integer=whole))
    _format_ticks(axis)


def _set_log_ticks(axis: Any, span: Span) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    decades = math.log10(span.high / span.low)
    digits = [float(digit) for digit in range(1, 10)]
    if decades > 2:
        digits = [1.0]
    elif decades > 0.7:
        digits = [1.0, 2.0, 5.0]
    axis.set_major_locator(LogLocator(subs=digits, numticks=6))
    axis.set_minor_locator(NullLocator())
    _format_ticks(axis)


def _format_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    # Six digits, without what floating-point arithmetic leaves behind them.
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(float(f"{value:.6g}"))))


def thinned(values: np.ndarray) -> np.ndarray:
    """Indices of at most about `MOST_POINTS` values that keep the highs and lows of a curve."""
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), MOST_POINTS // 2)
    filled = np.nan_to_num(values, posinf=np.finfo(float).max, neginf=-np.finfo(float).max)
    found = [part[index] for part in parts for index in (filled[part].argmin(), filled[part].argmax())]
    return np.unique([0, *found, len(values) - 1])


def point_markers(count: int) -> dict[str, Any]:
    """Line options that mark each point of a curve if it has few of them."""
    return {"marker": "o", "markersize": 3.0} if count <= FEW_POINTS else {}


def draw_cloud(axes: Any, colors: Colors, x: np.ndarray, y: np.ndarray, x_span: Span, y_span: Span) -> None:
    """Draws points, or their density where they are many; those beyond the spans stand at the edges."""
    set_span(axes.xaxis, x_span)
    set_span(axes.yaxis, y_span)
    x = x_span.clip(x)
    y = y_span.clip(y)
    if len(x) > _MARKERS:
        _draw_density(axes, colors, x, y, x_span.edges(_CELLS), y_span.edges(_CELLS))
        return
    axes.plot(
        x, y, "o", color=colors["line"], markersize=3.4, alpha=0.6, markeredgewidth=0, gid="points", clip_on=False
    )


def _draw_density(
    axes: Any, colors: Colors, x: np.ndarray, y: np.ndarray, x_edges: np.ndarray, y_edges: np.ndarray
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    counts = np.histogram2d(x, y, bins=(x_edges, y_edges))[0]
    # Shades by the logarithm of the count, so that a single token can be seen beside a million.
    shades = np.ceil(len(_SHADES) * np.log1p(counts) / np.log1p(counts.max())).astype(int)
    for shade, opacity in enumerate(_SHADES, 1):
        boxes = [box for column in range(_CELLS) for box in _boxes(shades[column] == shade, column, x_edges, y_edges)]
        if not boxes:
            continue
        outline = Path(
            np.array(boxes).reshape(-1, 2),
            [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes),
        )
        axes.add_patch(
            PathPatch(outline, facecolor=colors["line"], alpha=opacity, linewidth=0, gid=f"density-{shade}")
        )


def _boxes(
    cells: np.ndarray, column: int, x_edges: np.ndarray, y_edges: np.ndarray
) -> Iterable[list[tuple[float, float]]]:
    """Corners of one box around each run of set cells in a column."""
    changes = np.flatnonzero(np.diff(np.r_[False, cells, False].astype(int)))
    left, right = x_edges[column], x_edges[column + 1]
    for start, end in zip(changes[::2], changes[1::2], strict=True):
        bottom, top = y_edges[start], y_edges[end]
        yield [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
