# SPDX-License-Identifier: Apache-2.0
"""Sends histograms and tables to the trackers of `report_to`, each through its own API, because TRL's `log` takes numbers only.

TensorBoard, W&B and trackio get them if transformers has started them. The other trackers have no such API and get nothing.
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
"""Name of the table of the worst tokens."""
_COLUMNS = ("step", "completion", "index", "context", "p_train", "p_rollout", "d", "weight")
_OPEN_MARK = "⟦"
_CLOSE_MARK = "⟧"
_NOT_MARKUP = frozenset(" .,:;?!'()%=+/-" + _OPEN_MARK + _CLOSE_MARK)  # what Markdown never takes for markup in a line

# Callbacks whose tracker raised an error. They are not used again, so that a broken tracker neither stops a run nor fills
# its log.
_failed: WeakSet[Any] = WeakSet()


def tracking(callbacks: Iterable[Any]) -> bool:
    """Whether a tracker among `callbacks` takes histograms and tables; if none does, they need not be made."""
    return any(_tracker_of(callback) is not None for callback in callbacks)


def log_histograms(callbacks: Iterable[Any], histograms: dict[str, Histogram], step: int) -> None:
    """Sends histograms to the trackers among `callbacks`, after the numbers of the same step, on the main process.

    Args:
        callbacks: `trainer.callback_handler.callbacks`.
        histograms (`dict[str, Histogram]`):
            From [`histograms`], by their names in the logs, which begin with `eval_` for an evaluation.
        step (`int`): `trainer.state.global_step`.
    """
    _send(callbacks, {name: _trimmed(histogram) for name, histogram in histograms.items()}, step)


def log_worst_tokens(callbacks: Iterable[Any], tokens: list[TokenGap], step: int) -> None:
    """Sends the table of [`worst_tokens`] to the trackers among `callbacks`, as [`log_histograms`] does."""
    if tokens:
        _send(callbacks, {WORST_TOKENS: [_row(token) for token in tokens]}, step)


def _send(callbacks: Iterable[Any], values: dict[str, Any], step: int) -> None:
    values = as_transformers_logs(values)
    if not values:
        return
    for callback in callbacks:
        tracker = _tracker_of(callback)
        if tracker is None:
            continue
        try:
            if tracker.writer is not None:
                _to_tensorboard(tracker.writer, values, step)
            else:
                _to_module(tracker.module, values, step, tracker.row)
        except Exception as error:
            _give_up(callback, f"failed to take {', '.join(values)} at step {step} ({error!r})")


def _tracker_of(callback: Any) -> Tracker | None:
    """The tracker behind a callback; `None` if there is none, or if it has failed."""
    if callback in _failed:
        return None
    try:
        return tracker_of(callback)
    except Exception as error:  # the attributes that are read are private, and may be gone in another version
        _give_up(callback, f"has changed inside, in a version that is not supported ({error!r})")
        return None


def _give_up(callback: Any, why: str) -> None:
    _failed.add(callback)
    logger.warning(
        f"{type(callback).__name__} {why}. This tracker gets no more histograms and tables; training continues."
    )


def _to_tensorboard(writer: Any, values: dict[str, Any], step: int) -> None:
    """Writes histograms as such and tables as Markdown."""
    for name, value in values.items():
        if not isinstance(value, Histogram):
            writer.add_text(name, _markdown(value), step)
            continue
        counts, edges = value.counts, value.edges
        middles = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
        total = sum(n * x for n, x in zip(counts, middles, strict=True))
        squares = sum(n * x**2 for n, x in zip(counts, middles, strict=True))
        writer.add_histogram_raw(name, edges[0], edges[-1], sum(counts), total, squares, edges[1:], counts, step)
    writer.flush()


def _to_module(module: Any, values: dict[str, Any], step: int, row: int | None) -> None:
    """Logs to W&B or trackio, whose APIs are the same, one row with the step that charts are drawn over."""
    logs = as_transformers_logs({"global_step": step})
    for name, value in values.items():
        if isinstance(value, Histogram):
            logs[name] = module.Histogram(np_histogram=(value.counts, value.edges))
        else:
            logs[name] = module.Table(columns=list(_COLUMNS), data=value)
    module.log(logs, step=row)


def _trimmed(histogram: Histogram) -> Histogram:
    """The histogram without empty bins at its ends, because trackers draw every bin and most of these are empty."""
    filled = [index for index, count in enumerate(histogram.counts) if count]
    first = filled[0]
    last = filled[-1] + 1
    return Histogram(histogram.edges[first : last + 1], histogram.counts[first:last])


def _row(token: TokenGap) -> list[Any]:
    """A row of the table, in the order of its columns."""
    text = visible(token.token)
    context = f"{visible(token.before)}{_OPEN_MARK}{text}{_CLOSE_MARK}{visible(token.after)}"
    place = [token.step, token.completion, token.index]
    return [*place, context, token.p_train, token.p_rollout, token.d, token.weight]


def _markdown(rows: list[list[Any]]) -> str:
    return "\n".join(markdown_table(_COLUMNS, [[_cell(value) for value in row] for row in rows]))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):  # no text of a model may become a link, a picture or a new column
        return "".join(c if c.isalnum() or c in _NOT_MARKUP else f"&#{ord(c)};" for c in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
