# SPDX-License-Identifier: Apache-2.0
"""Histograms and tables for the trackers of `report_to`, each through its own API; TRL's `log` takes numbers only.

TensorBoard, W&B and trackio are served where transformers started them; the others have no such API and are left alone.
"""

import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from ..records.tokens import TokenGap
from ..statistics import Histogram
from ..tables import markdown_table, visible
from ..upstream.trackers import Tracker, as_transformers_logs, tracker_of


logger = logging.getLogger(__name__)

WORST_TOKENS = "mismatch/worst_tokens"
_COLUMNS = ("step", "completion", "index", "context", "p_train", "p_rollout", "d", "weight")
_MARKS = "⟦", "⟧"
_PLAIN = frozenset(" .,:;?!'()%=+/-" + "".join(_MARKS))  # what no Markdown takes for markup inside a line

# What raised once is not called again: a run does not stop, and its log does not fill up, because of a tracker.
_failed: WeakSet[Any] = WeakSet()


def tracking(callbacks: Iterable[Any]) -> bool:
    """Whether a tracker among `callbacks` takes histograms and tables, so that making them is worth it."""
    return any(_tracker_of(callback) is not None for callback in callbacks)


def log_histograms(callbacks: Iterable[Any], histograms: dict[str, Histogram], step: int) -> None:
    """Sends histograms to the trackers among `callbacks`, after the numbers of the same step, on the main process.

    Args:
        callbacks: `trainer.callback_handler.callbacks`.
        histograms (`dict[str, Histogram]`): From [`histograms`]. Names are as in the logs: `eval_...` for an evaluation.
        step (`int`): `trainer.state.global_step`.
    """
    _send(callbacks, {name: _trimmed(histogram) for name, histogram in histograms.items()}, step)


def log_worst_tokens(callbacks: Iterable[Any], tokens: list[TokenGap], step: int) -> None:
    """Sends the table of [`worst_tokens`] to the trackers among `callbacks`, as [`log_histograms`] does."""
    if tokens:
        _send(callbacks, {WORST_TOKENS: [_row(token) for token in tokens]}, step)


def _send(callbacks: Iterable[Any], values: dict[str, Any], step: int) -> None:
    named = as_transformers_logs(values)
    for callback in callbacks if named else ():
        if (tracker := _tracker_of(callback)) is None:
            continue
        try:
            if tracker.writer is not None:
                _to_tensorboard(tracker.writer, named, step)
            else:
                _to_module(tracker.module, named, step, tracker.row)
        except Exception as error:
            _give_up(callback, f"failed to take {', '.join(named)} at step {step} ({error!r})")


def _tracker_of(callback: Any) -> Tracker | None:
    """The tracker behind a callback; `None` if there is none, or it has failed."""
    if callback in _failed:
        return None
    try:
        return tracker_of(callback)
    except Exception as error:  # what it is asked for is private
        _give_up(callback, f"is not what it was ({error!r})")
        return None


def _give_up(callback: Any, why: str) -> None:
    _failed.add(callback)
    logger.warning(
        f"{type(callback).__name__} {why}. Training goes on; this tracker gets no more histograms and tables."
    )


def _to_tensorboard(writer: Any, values: dict[str, Any], step: int) -> None:
    for name, value in values.items():
        if not isinstance(value, Histogram):
            writer.add_text(name, _markdown(value), step)
            continue
        counts, edges = value.counts, value.edges
        middles = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
        total, squares = (sum(n * x**k for n, x in zip(counts, middles, strict=True)) for k in (1, 2))
        writer.add_histogram_raw(name, edges[0], edges[-1], sum(counts), total, squares, edges[1:], counts, step)
    writer.flush()


def _to_module(module: Any, values: dict[str, Any], step: int, row: int | None) -> None:
    """W&B and trackio, whose APIs are the same. The row holds the step that charts are drawn over."""
    converted = {
        name: module.Histogram(np_histogram=(value.counts, value.edges))
        if isinstance(value, Histogram)
        else module.Table(columns=list(_COLUMNS), data=value)
        for name, value in values.items()
    }
    module.log({**converted, **as_transformers_logs({"global_step": step})}, step=row)


def _trimmed(histogram: Histogram) -> Histogram:
    """Without empty bins at the ends: trackers draw what they are given, and most of it would be empty."""
    filled = [index for index, count in enumerate(histogram.counts) if count]
    first, last = filled[0], filled[-1] + 1
    return Histogram(histogram.edges[first : last + 1], histogram.counts[first:last])


def _row(token: TokenGap) -> list[Any]:
    before, text, after = (visible(x) for x in (token.before, token.token, token.after))
    context = f"{before}{_MARKS[0]}{text}{_MARKS[1]}{after}"
    numbers = token.p_train, token.p_rollout, token.d, token.weight
    return [token.step, token.completion, token.index, context, *numbers]


def _markdown(rows: list[list[Any]]) -> str:
    return "\n".join(markdown_table(_COLUMNS, [[_cell(value) for value in row] for row in rows]))


def _cell(value: Any) -> str:
    if isinstance(value, str):  # no text of a model may become a link, a picture or a new column
        return "".join(c if c.isalnum() or c in _PLAIN else f"&#{ord(c)};" for c in value)
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
