# SPDX-License-Identifier: Apache-2.0
"""Alerts while training, and what is done about them."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tqdm.auto import tqdm

from ..metrics.alerts import AlertEvent, Alerts, Thresholds, replay
from .guarded import GuardedCallback
from .learning_rate import _FACTOR, _PATIENCE, ScalesLR


logger = logging.getLogger(__name__)

_ACTIONS = ("log", "record", "stop", "lower_lr")
_LEVELS = {"warning": logging.WARNING, "critical": logging.ERROR, "recovered": logging.INFO}


class MismatchAlertCallback(GuardedCallback, ScalesLR):
    """
    Says when the mismatch leaves its healthy range, multiplies, or is about to, and acts on it.

    Reads the logs alone, so it works with any trainer that logs the keys of [`METRICS`], and with TRL's own `GRPOTrainer` by
    its `sampling/sampling_logp_difference/*`. Three rules, [`METRICS`] has the ranges:

    - *level*: outside the healthy range, or the critical one;
    - *baseline*: k3 or |d| above 2 (critical: 5) times the run's own level;
    - *trend*: k3 or |d| rising, or the ESS of sequences falling, so that another window leads out of the healthy range.

    One noisy log is no alert, see `persistence`; what must be zero, such as `mismatch/nonfinite_count`, is told at once. A
    metric has one episode at a time. It is told when it opens, when it turns critical, and when it is over: after twice
    `persistence[1]` logs in a row with nothing wrong. Every rank decides by itself, from the same logs; rank 0 writes. A
    resumed run reads its past from `state.log_history` and goes on as if it had never stopped.

    Args:
        actions (*optional*, defaults to `("log", "record")`):
            What to do with an event.

            - `"log"`: rank 0 logs a warning, an error (critical) or an info (recovered).
            - `"record"`: warnings and critical events go to `record_requests`; `ConsistentGRPOTrainer` writes the newest
              rollout batch, which with `logging_steps=1` and one batch a step is the one that set it off.
            - `"stop"`: a critical event ends training after the step, on every rank.
            - `"lower_lr"`: the learning rate is halved while a critical episode lasts, as by [`MismatchLRCallback`].
            - A function `(event, args, state, control)`: called on every rank with each [`AlertEvent`]; one that raises is
              called no more.
        thresholds (`dict`, *optional*):
            `{key: (warn, critical)}` in place of the ranges of [`METRICS`], which are those of dense bf16. For MoE or fp8, try
            `{"mismatch/abs_diff/mean": (0.04, 0.08), "mismatch/k3/mean": (3e-3, 2e-2)}`. Either may be `None`, or a pair
            `(low, high)` where both sides are bad; `{key: None}` watches the metric no more. Any logged key will do.
        window (`int`, *optional*, defaults to `30`):
            Logs that make a trend, a baseline, and the scatter that an alert must exceed.
        persistence (`tuple[int, int]`, *optional*, defaults to `(3, 5)`):
            A value must be outside in so many of the last so many logs.

    Attributes:
        record_requests (`list[AlertEvent]`):
            Events that ask for a record, on every rank. The trainer empties it after each log.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[MismatchAlertCallback(actions=["log", "stop"])])
    ```
    """

    purpose = "mismatch alerts and their actions"

    def __init__(
        self,
        actions: Iterable[str | Callable[[AlertEvent, Any, Any, Any], Any]] = ("log", "record"),
        *,
        thresholds: Thresholds | None = None,
        window: int = 30,
        persistence: tuple[int, int] = (3, 5),
    ):
        super().__init__()
        self.actions = (actions,) if isinstance(actions, str) or callable(actions) else tuple(actions)
        for action in self.actions:
            if action not in _ACTIONS and not callable(action):
                names = ", ".join(map(repr, _ACTIONS))
                raise ValueError(
                    f"`actions` holds {action!r}; choose from {names}, or give a function (event, args, state, control)."
                )
        self._new_alerts = functools.partial(Alerts, thresholds=thresholds, window=window, persistence=persistence)
        self._start(())

    def _start(self, log_history: Iterable[dict[str, Any]]) -> None:
        self._alerts, self._missed = self._new_alerts(), 0
        self._calls = [action for action in self.actions if callable(action)]
        self.record_requests: list[AlertEvent] = []
        replay(log_history, self._alerts)
        self._follow()

    def _follow(self) -> None:
        is_critical = any(event.severity == "critical" for event in self._alerts.open.values())
        self.lr_scale = _FACTOR if is_critical and "lower_lr" in self.actions else 1.0

    def _release(self) -> None:
        self._restore_lr()
        self._scales.pop(id(self), None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start(state.log_history)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if "lower_lr" in self.actions:
            self._scale_lr(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restore_lr()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs:
            return
        self.edit_logs(logs)
        if state.log_history:
            self.edit_logs(state.log_history[-1])  # the trainer copied the logs before it called us
        events = self._alerts.update(state.global_step, logs)
        # First what all ranks must do alike, then what can fail on one of them.
        if "record" in self.actions:
            self.record_requests += [event for event in events if event.severity != "recovered"]
        if "stop" in self.actions and any(event.severity == "critical" for event in events):
            control.should_training_stop = True
        self._follow()
        for event in events:
            with contextlib.suppress(Exception):  # of logging itself; a rank that falls silent must not act otherwise
                self._tell(event, args, state, control)
        if "learning_rate" in logs and not self._alerts.has_seen_any:
            self._missed += 1
            if self._missed == _PATIENCE and state.is_world_process_zero:
                logger.warning(
                    f"`MismatchAlertCallback` found none of its metrics in {_PATIENCE} logs, so it can alert to nothing. They "
                    "need the rollout engine's log-probs: use `ConsistentGRPOTrainer`, or `use_vllm=True` with `GRPOTrainer`."
                )

    def attached(self, keeps_records: bool) -> None:
        if "record" in self.actions and not keeps_records:
            logger.warning(
                "With `mismatch_record_steps=0`, alerts record nothing: leave 'record' out of their `actions`."
            )

    def reasons_to_record(self) -> list[str]:
        events, self.record_requests = self.record_requests, []
        return [f"{event.severity} {event.key}" for event in events]

    def _tell(self, event: AlertEvent, args: Any, state: Any, control: Any) -> None:
        writes = state.is_world_process_zero
        if "log" in self.actions and writes:
            with tqdm.external_write_mode(file=sys.stderr):  # not across the progress bar
                logger.log(_LEVELS[event.severity], event.message)
        if "stop" in self.actions and event.severity == "critical" and writes:
            logger.error(f"Training stops at step {event.step}: `{event.key}` is critical and `actions` holds 'stop'.")
        for call in list(self._calls):
            try:
                call(event, args, state, control)
            except Exception as error:
                self._calls.remove(call)
                name = getattr(call, "__qualname__", repr(call))
                logger.error(
                    f"The action `{name}` of `MismatchAlertCallback` raised {error!r} and is not called again. The other "
                    "actions go on.",
                    exc_info=True,
                )
