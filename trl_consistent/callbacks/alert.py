# SPDX-License-Identifier: Apache-2.0
"""A callback that raises alerts while training, and acts on them."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tqdm.auto import tqdm

from ..metrics.alerts import AlertEvent, Alerts, Thresholds, replay
from .guarded import GuardedCallback
from .learning_rate import CUT, PATIENCE, ScalesLR


logger = logging.getLogger(__name__)

_ACTIONS = ("log", "record", "stop", "lower_lr")
_LEVELS = {"warning": logging.WARNING, "critical": logging.ERROR, "recovered": logging.INFO}


class MismatchAlertCallback(GuardedCallback, ScalesLR):
    """
    Raises an alert when the mismatch leaves its healthy range, grows to a multiple of the run's own level, or is about to
    leave the range, and acts on it.

    It reads the logs alone, so it works with any trainer that logs the keys of [`METRICS`], and with TRL's own `GRPOTrainer`,
    which logs `sampling/sampling_logp_difference/*`. [`METRICS`] has the ranges of three rules:

    - *level*: a metric is outside the healthy range, or outside the critical one;
    - *baseline*: k3 or |d| is above 2 (critical: 5) times the run's own level;
    - *trend*: k3 or |d| rises, or the ESS of sequences falls, so that another window leads out of the healthy range.

    One noisy log raises no alert, see `persistence`; a metric that must be zero, such as `mismatch/nonfinite_count`, raises
    one at once. A metric has one episode at a time, with an event when it opens, when it turns critical, and when it is
    over: after twice `persistence[1]` logs in a row with nothing wrong. Every rank decides by itself, from the same logs;
    rank 0 writes. A resumed run reads its past from `state.log_history` and continues as if it had never stopped.

    Args:
        actions (*optional*, defaults to `("log", "record")`):
            What to do with an event.

            - `"log"`: rank 0 logs a warning, an error (critical) or an info (recovered).
            - `"record"`: a warning or critical event goes to `record_requests`; `ConsistentGRPOTrainer` then writes the newest
              rollout batch. With `logging_steps=1` and one batch a step, this is the batch that raised the alert.
            - `"stop"`: a critical event ends training after the step, on every rank.
            - `"lower_lr"`: the learning rate is halved while a critical episode lasts, as by [`MismatchLRCallback`].
            - A function `(event, args, state, control)`: it is called on every rank with each [`AlertEvent`]. If it raises an
              error, it is not called again.
        thresholds (`dict`, *optional*):
            `{key: (warn, critical)}` in place of the ranges of [`METRICS`], which are those of dense bf16. For MoE or fp8, try
            `{"mismatch/abs_diff/mean": (0.04, 0.08), "mismatch/k3/mean": (3e-3, 2e-2)}`. Each of the two may be `None`, or a
            pair `(low, high)` where both sides are bad. `{key: None}` ends the watch over a metric. Any logged key may be
            given.
        window (`int`, *optional*, defaults to `30`):
            Number of logs for a trend, for a baseline, and for the scatter that an alert must exceed.
        persistence (`tuple[int, int]`, *optional*, defaults to `(3, 5)`):
            `(n, m)`: a value must be outside in `n` of the last `m` logs.

    Attributes:
        record_requests (`list[AlertEvent]`):
            Events that ask for a record, on every rank. `ConsistentGRPOTrainer` empties it after each log.

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
        """Forgets an earlier training, and reads the past of this one."""
        self._alerts = self._new_alerts()
        self._missed = 0  # logs without any of the metrics
        self._calls = [action for action in self.actions if callable(action)]
        self.record_requests: list[AlertEvent] = []
        replay(log_history, self._alerts)
        self._set_lr_scale()

    def _set_lr_scale(self) -> None:
        is_critical = any(event.severity == "critical" for event in self._alerts.open.values())
        self.lr_scale = CUT if is_critical and "lower_lr" in self.actions else 1.0

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
        self._edit_logs_and_history(logs, state)
        events = self._alerts.update(state.global_step, logs)
        # What all ranks must do alike comes first, because the rest can fail on one of them.
        self._act(events, control)
        for event in events:
            with contextlib.suppress(Exception):  # a rank that cannot log must still act like the others
                self._tell(event, state)
            with contextlib.suppress(Exception):
                self._call(event, args, state, control)
        if "learning_rate" in logs and not self._alerts.has_seen_any:
            self._miss(state)

    def _act(self, events: list[AlertEvent], control: Any) -> None:
        if "record" in self.actions:
            self.record_requests += [event for event in events if event.severity != "recovered"]
        if "stop" in self.actions and any(event.severity == "critical" for event in events):
            control.should_training_stop = True
        self._set_lr_scale()

    def _tell(self, event: AlertEvent, state: Any) -> None:
        if not state.is_world_process_zero:
            return
        if "log" in self.actions:
            with tqdm.external_write_mode(file=sys.stderr):  # not across the progress bar
                logger.log(_LEVELS[event.severity], event.message)
        if "stop" in self.actions and event.severity == "critical":
            logger.error(f"Training stops at step {event.step}: `{event.key}` is critical and `actions` holds 'stop'.")

    def _call(self, event: AlertEvent, args: Any, state: Any, control: Any) -> None:
        """Calls the user's functions, and drops those that fail."""
        for function in list(self._calls):
            try:
                function(event, args, state, control)
            except Exception as error:
                self._calls.remove(function)
                name = getattr(function, "__qualname__", repr(function))
                logger.error(
                    f"The action `{name}` of `MismatchAlertCallback` raised {error!r} and is not called again. The other "
                    "actions continue.",
                    exc_info=True,
                )

    def _miss(self, state: Any) -> None:
        """Counts a log without any of the metrics, and warns when they are too many."""
        self._missed += 1
        if self._missed == PATIENCE and state.is_world_process_zero:
            logger.warning(
                f"`MismatchAlertCallback` found none of its metrics in {PATIENCE} logs, so it cannot raise an alert. They need "
                "the rollout engine's log-probs: use `ConsistentGRPOTrainer`, or `use_vllm=True` with `GRPOTrainer`."
            )

    def attached(self, keeps_records: bool) -> None:
        if "record" in self.actions and not keeps_records:
            logger.warning(
                "With `mismatch_record_steps=0`, alerts record nothing: leave 'record' out of the `actions` of "
                "`MismatchAlertCallback`."
            )

    def reasons_to_record(self) -> list[str]:
        reasons = [f"{event.severity} {event.key}" for event in self.record_requests]
        self.record_requests = []
        return reasons
