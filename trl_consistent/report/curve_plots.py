# SPDX-License-Identifier: Apache-2.0
"""Plots over optimizer steps: the logged metrics, and the share of tokens that the correction touched."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .curve import TRAINING, Curve, metric_of
from .drawing import MOST_POINTS, Colors, Plot, Span, label_axes, point_markers, set_round_ticks, set_span, thinned
from .run import Run


_SPREAD = 12  # largest over smallest value from which an axis is logarithmic
_ALSO_LOG = ("grad_norm", "kl")  # of the keys of training, whose axes are linear otherwise
_ACTION_COLORS = {"truncated": "line", "masked": "other", "rejected": "warning"}


def metric_plots(run: Run) -> Iterable[Plot]:
    """Yields a plot of each metric that says how large the mismatch is, then those of the training beside them."""
    logs_ours = any(curve.key.startswith("mismatch/") for curve in run.measured)
    for curve in run.measured:
        is_stock = curve.key.startswith("sampling/")
        if is_stock and logs_ours or not is_stock and curve.healthy == (None, None):
            continue
        must_be_zero = curve.healthy == (None, 0.0)
        if must_be_zero and not any(curve.values):
            continue  # that it is 0 needs no picture
        yield _metric_plot(run, curve, "correction" if curve.key.startswith("correction/") else "metrics")
    for key in TRAINING:
        if key in run.curves:
            yield _metric_plot(run, run.curves[key], "training")


def _metric_plot(run: Run, curve: Curve, section: str) -> Plot:
    marks = [(event.step, event.severity) for event in run.events if event.key == curve.key]
    name = "curve-" + re.sub(r"\W+", "-", curve.key)
    return Plot(section, name, curve.key, curve.meaning, partial(draw_metric, curve=curve, marks=marks))


def draw_metric(axes: Any, colors: Colors, curve: Curve, marks: Sequence[tuple[int, str]]) -> None:
    """Draws one metric over steps, its healthy band, what is outside it, and where alerts opened and closed.

    Args:
        marks: Step and severity of each alert of the metric.
    """
    span = _span_of(curve)
    set_span(axes.yaxis, span)
    _draw_healthy_band(axes, colors, curve, span)
    for step, severity in marks:
        color = colors["good" if severity == "recovered" else severity]
        axes.axvline(step, color=color, linewidth=0.9, linestyle=(0, (3, 2)), gid=f"alert-{severity}-{step}")
        axes.plot([step], [1.0], "v", color=color, markersize=4, transform=axes.get_xaxis_transform(), clip_on=False)
    _draw_values(axes, colors, curve, span)
    _draw_infinite_values(axes, colors, curve)
    set_round_ticks(axes.xaxis, whole=True)
    metric = metric_of(curve.key)
    label_axes(axes, colors, "step", metric.unit if metric else "")


def _span_of(curve: Curve) -> Span:
    """The part of the y axis that shows the finite values and the healthy range of a curve."""
    values = np.array(curve.values)
    values = np.concatenate([values[np.isfinite(values)], [bound for bound in curve.healthy if bound is not None]])
    if not len(values):
        return Span(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    may_be_log = curve.key not in TRAINING or curve.key in _ALSO_LOG
    if may_be_log and len(positive) > 0.9 * len(values) and high > _SPREAD * positive.min():
        low = max(float(positive.min()), float(np.median(positive)) / 1e4)
        factor = (high / low) ** 0.06
        return Span(low / factor, high * factor, log=True)
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return Span(low - margin, high + margin)


def _draw_healthy_band(axes: Any, colors: Colors, curve: Curve, span: Span) -> None:
    low, high = curve.healthy
    bounds = [bound for bound in (low, high) if bound is not None]
    if not bounds:
        return
    bottom = span.low if low is None else low
    top = span.high if high is None else high
    axes.axhspan(bottom, top, color=colors["good"], alpha=0.09, linewidth=0, gid="healthy")
    for bound in bounds:
        axes.axhline(bound, color=colors["good"], linewidth=0.8, alpha=0.7, gid=f"bound-{bound:g}")


def _draw_values(axes: Any, colors: Colors, curve: Curve, span: Span) -> None:
    """Draws the line of the curve, and over it, in the color of their severity, the values that are outside a range."""
    values = np.array(curve.values)
    kept = thinned(values)
    x = np.array(curve.steps)[kept]
    values = values[kept]
    y = np.where(np.isfinite(values), np.maximum(values, span.low) if span.log else values, np.nan)
    axes.plot(x, y, color=colors["line"], linewidth=1.1, gid="curve", **point_markers(len(curve.steps)))
    for role, is_beyond in (("warning", curve.is_outside), ("critical", curve.is_critical)):
        beyond = np.array([is_beyond(value) for value in values])
        if beyond.any():
            line = np.where(_with_neighbors(beyond), y, np.nan)
            axes.plot(x, line, color=colors[role], linewidth=1.3, gid=f"outside-{role}")


def _draw_infinite_values(axes: Any, colors: Colors, curve: Curve) -> None:
    """Marks the steps whose value is infinite at the top."""
    steps = np.array(curve.steps)[~np.isfinite(curve.values)][:MOST_POINTS]
    if len(steps):
        heights = np.full(len(steps), 0.97)
        transform = axes.get_xaxis_transform()
        axes.plot(steps, heights, "^", color=colors["critical"], markersize=4, transform=transform, gid="infinite")


def _with_neighbors(points: np.ndarray) -> np.ndarray:
    """The points and those beside them, so that a line through them shows a point that is alone."""
    return points | np.r_[points[1:], False] | np.r_[False, points[:-1]]


def action_shares(run: Run) -> dict[str, Curve]:
    """The share of tokens that each action of the correction touched, on both sides together, over the steps.

    Actions that never touched a token are left out.
    """
    found = {}
    for action in _ACTION_COLORS:
        keys = [f"correction/{action}_fraction/{side}" for side in ("low", "high")]
        sides = [run.curves[key] for key in keys if key in run.curves]
        if not any(any(curve.values) for curve in sides):
            continue
        total: dict[int, float] = {}
        for curve in sides:
            for step, value in zip(curve.steps, curve.values, strict=True):
                total[step] = total.get(step, 0.0) + value
        steps = sorted(total)
        found[action] = Curve(f"correction/{action}_fraction", steps, [total[step] for step in steps])
    return found


def share_plots(run: Run) -> Iterable[Plot]:
    """Yields the plot of [`action_shares`], if the correction touched any token."""
    if shares := action_shares(run):
        caption = "The tokens that the correction changed, below and above its bounds together."
        yield Plot("correction", "shares", "Share of tokens", caption, partial(draw_shares, shares=shares))


def draw_shares(axes: Any, colors: Colors, shares: dict[str, Curve]) -> None:
    """Draws truncated, masked and rejected tokens over steps, in percent."""
    for action, curve in shares.items():
        values = 100 * np.array(curve.values)
        kept = thinned(values)
        axes.plot(
            np.array(curve.steps)[kept],
            values[kept],
            color=colors[_ACTION_COLORS[action]],
            linewidth=1.2,
            label=action,
            gid=f"share-{action}",
            **point_markers(len(values)),
        )
    axes.set_ylim(bottom=0)
    set_round_ticks(axes.yaxis)
    set_round_ticks(axes.xaxis, whole=True)
    axes.legend(fontsize=8, frameon=False, labelcolor=colors["ink"], loc="upper left", handlelength=1.2, borderpad=0.1)
    label_axes(axes, colors, "step", "percent")
