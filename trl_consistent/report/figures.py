# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, as SVG in the colors of the page's theme and as one PNG.

Matplotlib is imported only where something is drawn, and its global settings are changed for one drawing at a time.
"""

import io
import re
import threading

from .curve_plots import metric_plots, share_plots
from .drawing import LIGHT, Plot, style_axes
from .run import Run
from .token_plots import gap_plots, weight_plots


INSTALL = "pip install 'trl-consistent[report]'"
"""The command to run where matplotlib is missing."""

# What stands in an SVG for the color of a role until the style sheet of the page says it.
_STAND_IN = {role: f"#5a{index:04x}" for index, role in enumerate(LIGHT)}
_SVG_SIZE = (3.6, 2.25)  # inches; 360 pixels wide on the page
_PNG_WIDTH = 12.0  # inches, as all that follow
_ROW_HEIGHT = 2.9
_TITLE_HEIGHT = 0.6
_RC_LOCK = threading.Lock()  # matplotlib's rcParams belong to the whole process


def available() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def plots(run: Run) -> list[Plot]:
    """Every figure that the run has data for, in the order of the page."""
    return [*metric_plots(run), *gap_plots(run), *share_plots(run), *weight_plots(run)]


def svg(plot: Plot) -> str:
    """Draws the plot as an `<svg>` for a page that defines the colors as CSS variables, `--ink` and so on."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SVG_SIZE)
    plot.draw(style_axes(figure.add_axes((0.13, 0.16, 0.845, 0.75)), _STAND_IN), _STAND_IN)
    buffer = io.StringIO()
    with _RC_LOCK, matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(buffer.getvalue(), plot)


def _for_page(text: str, plot: Plot) -> str:
    """An SVG of matplotlib as a part of the page: smaller, in its font and colors, with ids that no other plot has."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.S)  # a style sheet would reach the whole page
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    text = re.sub(r"\n\s*", "\n", text)
    text = re.sub(r" font-family: [^;\"]*;", "", text)  # the page has its own
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)  # two decimals
    tag = rf'<svg viewBox="\1" role="img" id="plot-{plot.name}">'
    text = re.sub(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', tag, text, count=1)
    text = re.sub(r'(\sid="|url\(#|href="#)(?!plot-)', rf"\g<1>{plot.name}--", text)
    text = text.replace("xlink:href", "href")
    for role, color in _STAND_IN.items():
        text = text.replace(color, f"var(--{role})")
    return text


def png(plots: list[Plot], title: str) -> bytes:
    """Draws all plots in one picture, three in a row, each section from a new row on, in the light theme."""
    from matplotlib.figure import Figure

    sections: dict[str, list[Plot]] = {}
    for plot in plots:
        sections.setdefault(plot.section, []).append(plot)
    rows = [part[start : start + 3] for part in sections.values() for start in range(0, len(part), 3)]
    height = _TITLE_HEIGHT + _ROW_HEIGHT * len(rows)
    figure = Figure(figsize=(_PNG_WIDTH, height), facecolor=LIGHT["surface"])
    figure.text(0.02, 1 - 0.6 * _TITLE_HEIGHT / height, title, fontsize=13, color=LIGHT["ink"], va="center")
    for index, row in enumerate(rows):
        bottom = height - _TITLE_HEIGHT - _ROW_HEIGHT * (index + 1) + 0.5
        for column, plot in enumerate(row):
            axes = figure.add_axes((column / 3 + 0.045, bottom / height, 0.275, 1.9 / height))
            axes.set_title(plot.full_title, fontsize=9, loc="left", color=LIGHT["ink"], x=-0.11, pad=17)
            plot.draw(style_axes(axes, LIGHT), LIGHT)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
