# SPDX-License-Identifier: Apache-2.0
"""Plots of the tokens in records: trainer against engine, the gap against what may cause it, and the weights."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..ratios import level_log_ratio, scored_tokens
from ..records.record import MismatchRecord
from .drawing import Colors, Plot, Span, draw_cloud, label_axes, set_span
from .run import Run
from .wording import number


@dataclass(frozen=True)
class Section:
    """A part of the page that looks into records."""

    title: str
    lead: str
    """One paragraph on what to see in its plots."""


SECTIONS = {
    "probabilities": Section(
        "Trainer against engine", "The probability of each token on both sides; on the diagonal they agree."
    ),
    "confidence": Section(
        "Gap against −log p",
        "A gap from rounding grows with −log p. Large gaps on the left, where the trainer is sure, have another cause.",
    ),
    "position": Section(
        "Gap against position",
        "Median (solid) and 99th percentile (dashed) of |d|. Both are flat in a healthy run. They are high at the start "
        "where the prompts differ, and rise where errors add up over the context.",
    ),
    "sequences": Section(
        "Sequence ratio against length",
        "The sum of d over a completion, which is the log of its ratio, against its length.",
    ),
}
"""The parts of the page that look into records, in their order."""

_LOWEST = 1e-6  # the smallest |d| that has a place of its own; smaller ones are drawn there
_SMALLEST_GROUP = 20  # tokens that a percentile needs


@dataclass(frozen=True)
class ScoredTokens:
    """The scored tokens of a record, flat, and its completions."""

    old: np.ndarray
    """Log-probability of each token in the trainer."""
    sampling: np.ndarray
    """Log-probability of each token in the engine."""
    size: np.ndarray
    """|d| of each token, nats."""
    index: np.ndarray
    """Place of each token in its completion, from 0."""
    lengths: np.ndarray
    """Scored tokens of each completion that has any."""
    sums: np.ndarray
    """Sum of d over each of these completions, nats."""

    @classmethod
    def of(cls, record: MismatchRecord) -> "ScoredTokens":
        """The scored tokens of a record whose d is finite."""
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


def gap_plots(run: Run) -> Iterable[Plot]:
    """Yields the plots of each of the [`SECTIONS`], one for each record that is looked into."""
    steps = {step: ScoredTokens.of(record) for step, record in run.examined_records().items()}
    steps = {step: tokens for step, tokens in steps.items() if len(tokens.size)}
    if not steps:
        return
    highest = max(1.0, *(float(tokens.size.max()) for tokens in steps.values()))
    longest = max(int(tokens.index.max()) + 1 for tokens in steps.values())
    bounds = sequence_bounds(run.fingerprint.get("correction"))[0]
    gap = Span(_LOWEST, highest, log=True)
    draws: dict[str, Callable[..., None]] = {
        "probabilities": draw_probabilities,
        "confidence": partial(draw_confidence, gap=gap),
        "position": partial(draw_position, gap=gap, longest=longest),
        "sequences": partial(draw_sequences, bounds=bounds, longest=longest),
    }
    for name, draw in draws.items():
        for step, tokens in steps.items():
            yield Plot(
                section=name,
                name=f"{name}-{step}",
                title=f"step {step} ({run.examined_steps[step]})",
                caption="",
                draw=partial(draw, tokens=tokens),
                heading=SECTIONS[name].title,
            )


def draw_probabilities(axes: Any, colors: Colors, tokens: ScoredTokens) -> None:
    """Draws p of the trainer against p of the engine, token by token."""
    axes.plot([0, 1], [0, 1], color=colors["muted"], linewidth=0.7, gid="diagonal")
    draw_cloud(axes, colors, np.exp(tokens.sampling), np.exp(tokens.old), Span(0, 1), Span(0, 1))
    label_axes(axes, colors, "p in the engine", "p in the trainer")


def draw_confidence(axes: Any, colors: Colors, tokens: ScoredTokens, gap: Span) -> None:
    """Draws |d| against how unlikely the trainer finds the token."""
    surprise = -tokens.old
    span = Span(1e-4, max(20.0, float(surprise.max())), log=True)
    draw_cloud(axes, colors, surprise, tokens.size, span, gap)
    label_axes(axes, colors, "−log p in the trainer, nats", "|d|, nats")


def draw_position(axes: Any, colors: Colors, tokens: ScoredTokens, gap: Span, longest: int) -> None:
    """Draws |d| against the place of the token in its completion, with median and 99th percentile."""
    draw_cloud(axes, colors, tokens.index, tokens.size, Span(0, longest), gap)
    edges = np.unique(np.quantile(tokens.index, np.linspace(0, 1, 13)).round())
    places = np.searchsorted(edges, tokens.index, side="right")
    groups = [places == place for place in np.unique(places)]
    groups = [group for group in groups if group.sum() >= _SMALLEST_GROUP]
    if len(groups) > 1:
        x = [tokens.index[group].mean() for group in groups]
        for percent, style in ((50, "-"), (99, (0, (4, 2)))):
            y = np.maximum([np.percentile(tokens.size[group], percent) for group in groups], gap.low)
            axes.plot(x, y, color=colors["warning"], linewidth=1.2, linestyle=style, gid=f"percentile-{percent}")
    label_axes(axes, colors, "token of the completion", "|d|, nats")


@dataclass(frozen=True)
class SequenceBound:
    """A bound of the correction that can be drawn over completions."""

    value: float
    """The bound, on the ratio."""
    per_token: bool
    """Whether it bounds the geometric ratio, so that the sequence may reach it to the power of its length."""
    who: str
    """The rule that sets it and the bound, in words."""


def sequence_bounds(correction: Mapping[str, Any] | None) -> tuple[list[SequenceBound], str]:
    """The bounds on a completion's ratio in the fingerprint of a correction, and a sentence on them."""
    if not correction:
        return [], "No correction was in force."
    if correction.get("reject_rate") is not None:
        return [], "Bounds are calibrated for each batch and not drawn."
    found = [bound for rule, name in _ratio_rules(correction) for bound in _bounds_of(rule, name)]
    if not found:
        return [], "The correction has no bound on a whole completion."
    return found, "Lines are the bounds in force: " + "; ".join(bound.who for bound in found) + "."


def _ratio_rules(correction: Mapping[str, Any]) -> Iterable[tuple[Mapping[str, Any], str]]:
    """Yields the rules of a correction that bound a ratio, each with its name: the action, then the rejections."""
    if correction.get("action") not in (None, "none"):
        yield correction, f"{correction.get('level')} {correction['action']}"
    for rule in correction.get("rejections") or ():
        if isinstance(rule, Mapping) and rule.get("statistic", "ratio") == "ratio":
            yield rule, f"{rule.get('level')} rejection"


def _bounds_of(rule: Mapping[str, Any], name: str) -> Iterable[SequenceBound]:
    level = rule.get("level")
    if level not in ("sequence", "geometric"):
        return
    for value in (rule.get("lower"), rule.get("upper")):
        if isinstance(value, int | float) and value > 0:
            yield SequenceBound(float(value), level == "geometric", f"{name}: {number(value)}")


def draw_sequences(axes: Any, colors: Colors, tokens: ScoredTokens, bounds: list[SequenceBound], longest: int) -> None:
    """Draws the log of each completion's ratio against its length, and the bounds on it."""
    reach = 1.15 * max(float(np.abs(tokens.sums).max()), 1e-3)
    flat = [abs(math.log(bound.value)) for bound in bounds if not bound.per_token]
    reach = max([reach, *(1.15 * each for each in flat if each < 4 * reach)])
    axes.axhline(0, color=colors["muted"], linewidth=0.7)
    draw_cloud(axes, colors, tokens.lengths, tokens.sums, Span(0, 1.05 * longest), Span(-reach, reach))
    lengths = np.array([0, 1.05 * longest])
    for bound in bounds:
        line = math.log(bound.value) * (lengths if bound.per_token else np.ones(2))
        axes.plot(
            lengths, line, color=colors["warning"], linewidth=1.1, linestyle=(0, (4, 2)), gid=f"bound-{bound.value:g}"
        )
    label_axes(axes, colors, "tokens", "log ratio, nats")


def weight_plots(run: Run) -> Iterable[Plot]:
    """Yields a histogram of the weights of each record that is looked into and has any."""
    for step, record in run.examined_records().items():
        if record.weights is None:
            continue
        kept = record.mask if record.keep_mask is None else record.keep_mask
        weights = record.weights[kept.bool() & torch.isfinite(record.weights)].numpy()
        if len(weights):
            caption = f"The {len(weights)} of {int(record.mask.sum())} tokens that are left in the loss."
            title = f"Weights, step {step} ({run.examined_steps[step]})"
            yield Plot("correction", f"weights-{step}", title, caption, partial(draw_weights, weights=weights))


def draw_weights(axes: Any, colors: Colors, weights: np.ndarray) -> None:
    """Draws how many tokens have which weight."""
    counts, edges = np.histogram(weights, bins=40, range=(0.0, max(2.0, float(weights.max()))))
    set_span(axes.yaxis, Span(0.7, max(2 * float(counts.max()), 20), log=True))
    axes.stairs(counts, edges, baseline=0.5, fill=True, color=colors["line"], linewidth=0, gid="weights")
    set_span(axes.xaxis, Span(edges[0], edges[-1]))
    label_axes(axes, colors, "weight", "tokens, log axis")
