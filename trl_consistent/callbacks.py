# SPDX-License-Identifier: Apache-2.0
"""Callbacks that act on the logged metrics, show them, and report them. What counts as an alert is `alerts.py`; what the
loss weighs is `corrections.py`."""

import atexit
import contextlib
import functools
import io
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from .alerts import AlertEvent, Alerts, Thresholds, name_in, replay, value_of
from .records import FOLDER, append_logs, set_aside


logger = logging.getLogger(__name__)

Rule = Literal["ess_sqrt", "ess_linear", "length"]

# Rule: the logged key it reads, and who logs it.
_SIGNALS = {
    "ess_sqrt": ("mismatch/ess/sequence", "`ConsistentGRPOTrainer` logs it when the engine reports log-probs"),
    "ess_linear": ("mismatch/ess/sequence", "`ConsistentGRPOTrainer` logs it when the engine reports log-probs"),
    "length": ("completions/mean_length", "TRL's `GRPOTrainer` logs it"),
}
_POWERS = {"ess_sqrt": 0.5, "ess_linear": 1.0}
_PATIENCE = 10  # logs without the key before it is missed
_FACTOR, _PERIOD, _FLOOR = 0.5, 1.8, 0.1  # of the length rule


_ACTIONS = ("log", "record", "stop", "lower_lr")
_LEVELS = {"warning": logging.WARNING, "critical": logging.ERROR, "recovered": logging.INFO}


class GuardedCallback(TrainerCallback):
    """A callback that cannot stop training: when one of its hooks raises, it says so once and does nothing from then on.

    Subclass it and write hooks as usual. A hook that only rank 0 fails in is off on rank 0 only, so what all ranks must do
    alike is not for code that can fail on one of them.
    """

    purpose = "what it does"
    """What is off after a failure, in the words of the message."""
    _is_off = False

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in vars(TrainerCallback).keys() & vars(cls).keys():
            if name.startswith("on_"):
                setattr(cls, name, _guarded(vars(cls)[name]))

    def _release(self) -> None:
        """Undoes what must not outlast a failure."""


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(self: GuardedCallback, *args: Any, **kwargs: Any) -> Any:
        if self._is_off:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            self._is_off = True
            with contextlib.suppress(Exception):
                self._release()
            with contextlib.suppress(Exception):
                logger.error(
                    f"`{type(self).__name__}` failed in `{hook.__name__}` with {error!r}. Training goes on; off from now on: "
                    f"{self.purpose}.",
                    exc_info=True,
                )
            return None

    return guarded


class ScalesLR(TrainerCallback):
    """Multiplies learning rates by `lr_scale`, from the start of a step until its update, so that no scheduler and no
    checkpoint sees it. Several such callbacks multiply, in any order."""

    lr_scale = 1.0

    def __init__(self) -> None:
        self._scales: dict[int, float] = {}
        self._groups: list[dict[str, Any]] = []

    # Not in `on_pre_optimizer_step`: DeepSpeed's engine steps within the backward pass.
    def _scale_lr(self, optimizer: Any) -> None:
        self._groups = optimizer.param_groups
        # One dict for all such callbacks, which outlasts the step for `report`.
        self._scales = self._groups[0].setdefault("_lr_scales", {})
        self._scales[id(self)] = self.lr_scale
        for group in self._groups:
            unscaled = group.setdefault("_unscaled_lr", group["lr"])
            scale = math.prod(self._scales.values())
            group["lr"] = unscaled if scale == 1 else unscaled * scale  # not in place: schedulers fill tensors

    def _restore_lr(self) -> None:
        for group in self._groups:
            group.pop("_lr_scales", None)
            if "_unscaled_lr" in group:
                group["lr"] = group.pop("_unscaled_lr")
        self._groups = []

    def report(self, logs: dict[str, Any]) -> None:
        """Adds the scale that the logged steps used, if these are the logs of training steps."""
        if "learning_rate" in logs and self._scales:
            logs["lr_scale"] = math.prod(self._scales.values())


class _Resumable(TrainerCallback, ExportableState):
    """Goes on, in a resumed run with the same arguments, from what the checkpoint holds, whatever
    `restore_callback_states_from_checkpoint` says."""

    _args: tuple[str, ...]
    _attributes: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        return {
            "args": {name: getattr(self, name) for name in self._args},
            "attributes": {name: getattr(self, name) for name in self._attributes},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The trainer fails to save when the checkpoint it resumed from does not know this callback.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step and isinstance(saved, dict) and saved["args"] == self.state()["args"]:
            for name, value in saved["attributes"].items():
                setattr(self, name, value)


class MismatchLRCallback(ScalesLR, _Resumable):
    """
    Scales the scheduler's learning rate down while the mismatch, or its early sign, grows.

    A correction reweights the gradient; this shortens the step. Read `lr_scale` next to the key of the rule:

    - `"ess_sqrt"` (AdamW and its like) and `"ess_linear"` (SGD): `min(1, ESS / base_ess)`, to the power 1/2 or 1, where
      ESS is `mismatch/ess/sequence`. It recovers when the ESS does.
    - `"length"`: once `completions/mean_length` exceeds `surge` times its mean over the first `baseline_steps` steps, the
      rate is halved every 1.8 * (step of the surge) steps, counted from the surge, down to 0.1. It never recovers. Works
      with any trainer that logs this key, TRL's own `GRPOTrainer` included.

    The optimizer holds the scaled rate from the start of a step until its update, so that no scheduler and no checkpoint
    sees it: the logged `learning_rate` is the scheduler's, and `learning_rate * lr_scale` is what the update used
    (decoupled weight decay included). A log acts on the steps after it: with `logging_steps=1` the scale is one step late,
    where VCPO uses the ESS of the very batch. Without a usable value the scale stays and a warning says so once. The scale
    is in every checkpoint, and a run resumed with the same arguments continues from it, whatever
    `restore_callback_states_from_checkpoint` says. Add at most one. With `MismatchAlertCallback(["lower_lr"])` the scales
    multiply, and the logged `lr_scale` is their product.

    `lr_scale` is in `state.log_history`. `ConsistentGRPOTrainer` also gives it to the `report_to` integrations; for these
    to have it from another trainer, call `trainer.callback_handler.callbacks.insert(0, callback)` instead of adding it.

    Args:
        rule (`str`, *optional*, defaults to `"ess_sqrt"`):
            `"ess_sqrt"`, `"ess_linear"` or `"length"`.
        base_ess (`float`, *optional*, defaults to `1.0`):
            ESS (share, above 0 and at most 1) at which the rate is unscaled. VCPO's recipes use 1.0 for single-turn math
            and 0.55 for its multi-turn run, whose on-policy ESS is below 1. ESS rules only.
        surge (`float`, *optional*, defaults to `3.0`):
            Length, relative to the baseline, that counts as a surge. Length rule only.
        baseline_steps (`int`, *optional*, defaults to `50`):
            Steps whose logs make the baseline, at least one log. Length rule only.

    Sign: `lr_scale` is at most 1; below 1 the update is shorter than the schedule says.
    Source: ESS rules, https://huggingface.co/papers/2602.17616 and the recipes of its code. Length rule,
    https://huggingface.co/papers/2602.01826 (Qwen3-4B, learning rate 1e-6, batch 64; surge near step 110); 1/2, 1.8 and 0.1
    are the paper's as quoted by a public reproduction. That reproduction, not the paper as far as we know, sets 3.0, 50 and
    that the count starts at the surge.

    Example:

    ```python
    trainer = ConsistentGRPOTrainer(..., callbacks=[MismatchLRCallback("ess_sqrt")])
    ```
    """

    _args = ("rule", "base_ess", "surge", "baseline_steps")
    _attributes = ("lr_scale", "baseline_sum", "baseline_logs", "surge_step")

    def __init__(
        self, rule: Rule = "ess_sqrt", *, base_ess: float = 1.0, surge: float = 3.0, baseline_steps: int = 50
    ):
        if rule not in _SIGNALS:
            raise ValueError(f"`rule` is {rule!r}; choose one of {', '.join(_SIGNALS)}.")
        if not 0 < base_ess <= 1:
            raise ValueError(f"`base_ess` is {base_ess}, an ESS is a share: set it above 0 and at most 1.")
        if not surge > 1:
            raise ValueError(f"`surge` is {surge}, and every length would be one: set it above 1.")
        if baseline_steps < 1:
            raise ValueError(f"`baseline_steps` is {baseline_steps}, a baseline needs steps: set it to 1 or more.")
        self.rule, self.base_ess, self.surge, self.baseline_steps = rule, base_ess, surge, baseline_steps
        super().__init__()
        self._warned, self._missed = False, 0
        self._start()

    def _start(self) -> None:
        self.lr_scale = 1.0
        self.baseline_sum, self.baseline_logs = 0.0, 0
        self.surge_step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start()
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.surge_step is not None:
            # scale = max(floor, factor ^ floor(steps since the surge / period))
            halvings = (state.global_step - self.surge_step) // max(1, round(_PERIOD * self.surge_step))
            self.lr_scale = max(_FLOOR, _FACTOR**halvings)
        self._scale_lr(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restore_lr()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "learning_rate" not in logs:
            return  # an evaluation, or the summary at the end
        self.report(logs)
        if state.log_history:
            self.report(state.log_history[-1])  # the trainer copied the logs before it called us
        key, logged_by = _SIGNALS[self.rule]
        value = logs.get(key)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            self._missed += 1
            patience = _PATIENCE if value is None else 1  # it is not in every log where a rollout serves several steps
            if self._missed >= patience and not self._warned and state.is_world_process_zero:
                self._warned = True
                logger.warning(
                    f"`MismatchLRCallback({self.rule!r})` needs `{key}`, and the log of step {state.global_step} holds "
                    f"{value!r}: the learning-rate scale stays at {self.lr_scale}. {logged_by}; if it never appears, use "
                    "that trainer or another `rule`. Shown once."
                )
            return
        self._missed = 0
        if self.rule == "length":
            self._watch(value, state.global_step)
        else:
            # scale = min(1, ESS / base) ^ power
            self.lr_scale = min(1.0, value / self.base_ess) ** _POWERS[self.rule]

    def _watch(self, length: float, step: int) -> None:
        if step <= self.baseline_steps or not self.baseline_logs:
            self.baseline_sum += length
            self.baseline_logs += 1
        elif self.surge_step is None and length > self.surge * self.baseline_sum / self.baseline_logs:
            self.surge_step = step
            logger.info(f"Completions surged to {length:.0f} tokens at step {step}: the learning rate will be halved.")


class ReferenceResetCallback(_Resumable):
    """Notes, every so many optimizer steps, that the reference is due to be reset; `ref_reset_steps` adds it."""

    _args, _attributes = ("steps",), ("is_due",)

    def __init__(self, steps: int):
        self.steps, self.is_due = steps, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_due = self.is_due or state.global_step % self.steps == 0


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
        self.report(logs)
        if state.log_history:
            self.report(state.log_history[-1])  # the trainer copied the logs before it called us
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


class MismatchPanelCallback(GuardedCallback):
    """
    Keeps a small panel under the progress bar: k3, |d|, ESS, what the correction did, and what is wrong now.

    Only rank 0 shows it, only where the progress bar is on a terminal; elsewhere it does nothing. It is redrawn in place at
    each log; with `log_completions=True`, which prints a table there, it is printed above that table instead. Needs `rich`.

    Args:
        thresholds, window, persistence (*optional*):
            As of [`MismatchAlertCallback`]: what the panel calls an alert.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[MismatchAlertCallback(), MismatchPanelCallback()])
    ```
    """

    purpose = "the mismatch panel"

    def __init__(
        self,
        *,
        thresholds: Thresholds | None = None,
        window: int = 30,
        persistence: tuple[int, int] = (3, 5),
    ):
        self._new_alerts = functools.partial(Alerts, thresholds=thresholds, window=window, persistence=persistence)
        self._alerts = self._new_alerts()
        self._bars: list[Any] = []
        self._lines: list[str] = []
        self._shows = self._is_live = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shows = state.is_world_process_zero and not args.disable_tqdm and sys.stderr.isatty()
        self._is_live = not getattr(args, "log_completions", False)
        self._lines = []
        if not self._shows:
            return
        try:
            import rich  # noqa: F401
        except ImportError:
            self._shows = False
            logger.warning("`MismatchPanelCallback` shows nothing, because rich is not installed: `pip install rich`.")
        self._alerts = self._new_alerts()
        replay(state.log_history, self._alerts)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not self._shows or not logs or "learning_rate" not in logs:
            return
        self._alerts.update(state.global_step, logs)
        self._lines = panel(state.global_step, logs, self._alerts, shutil.get_terminal_size().columns - 1)
        if not self._is_live:
            tqdm.write("\n".join(self._lines), file=sys.stderr)
            return
        while len(self._bars) < len(self._lines):  # below the progress bar, which has position 0
            self._bars.append(tqdm(position=len(self._bars) + 1, bar_format="{desc}", leave=False, file=sys.stderr))
        for bar, line in zip(self._bars, self._lines, strict=True):
            bar.set_description_str(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        was_live = bool(self._bars)
        self._release()
        if was_live:
            tqdm.write("\n".join(self._lines), file=sys.stderr)  # the last one stays

    def _release(self) -> None:
        while self._bars:
            self._bars.pop().close()


_STYLES = {"warning": "yellow", "critical": "bold red"}
_NUMBERS = (("k3", "mismatch/k3/mean", "{:.2g}"), ("|d|", "mismatch/abs_diff/mean", "{:.4f}"))
_SHARES = (("ESS token", "mismatch/ess/token"), ("sequence", "mismatch/ess/sequence"))


def panel(step: int, logs: dict[str, Any], alerts: Alerts, width: int) -> list[str]:
    """The panel of a log: five lines for a terminal of this width."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    wrong = alerts.open

    def shown(name: str, key: str, form: str) -> Text:
        value = value_of(logs, name_in(logs, key))
        style = _STYLES[wrong[key].severity] if key in wrong else "green" if value is not None else "dim"
        return Text(f"{name} ").append(form.format(value) if value is not None else "–", style)

    gap = Text("   ")
    numbers = [shown(*row) for row in _NUMBERS] + [shown(name, key, "{:.1%}") for name, key in _SHARES]
    acted = [
        f"{verb} {sum(shares):.2%}"
        for verb in ("truncated", "masked", "rejected")
        if (
            shares := [
                x
                for side in ("low", "high")
                if (x := value_of(logs, f"correction/{verb}_fraction/{side}")) is not None
            ]
        )
    ]
    state = gap.join(
        Text(f"{event.severity}: {event.key} since step {event.step}", _STYLES[event.severity])
        for event in sorted(wrong.values(), key=lambda event: event.severity)
    )
    body = [
        gap.join(numbers),
        Text("   ".join(acted) or "no correction in the logs"),
        state or Text("no alerts", "green"),
    ]
    for line in body:
        line.truncate(max(width - 4, 1), overflow="ellipsis")
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(Panel(Text("\n").join(body), title=f"mismatch, step {step}", title_align="left"))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


class MismatchReportCallback(GuardedCallback):
    """
    Writes `report.html` to the `output_dir` when training ends, is stopped, or fails.

    Works with any trainer that logs: with TRL's own `GRPOTrainer` the report shows its `sampling/*`, with
    `ConsistentGRPOTrainer` all metrics and the recorded batches. Every log goes to `output_dir/mismatch/logs.jsonl`, so
    that `trl-consistent report` can be asked at any time, without a checkpoint.

    A training that fails ends without a word to callbacks: `ConsistentGRPOTrainer` has the report written then, with
    another trainer it is written as the process exits. What cannot be written is said once and stops nothing.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[MismatchReportCallback()])
    ```
    """

    purpose = "the report of this run"

    def __init__(self) -> None:
        self._output_dir: str | None = None  # of a training that has not ended, on the rank that writes
        self.keeps_logs = True  # not where the trainer does

    def write(self, output_dir: str | Path) -> Path | None:
        """Writes the report of the run in `output_dir`, now instead of later; `None`, with a log, if that fails."""
        self._release()
        try:
            from .report import write_report

            path = write_report(output_dir)
        except Exception as error:  # whatever it is, it must not mask what ended the training
            logger.error(f"The report of {output_dir} could not be written: {error!r}. Training is not affected.")
            return None
        logger.info(f"The report of this run is in {path}.")
        return path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._output_dir = args.output_dir
        atexit.register(self.finish)
        if state.global_step == 0 and self.keeps_logs:
            set_aside(Path(args.output_dir, FOLDER))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and self._output_dir is not None and self.keeps_logs:  # not an evaluation of its own
            append_logs(Path(args.output_dir, FOLDER), {**logs, "step": state.global_step, "epoch": state.epoch})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.finish()

    def finish(self) -> None:
        """Writes the report of the training that has begun, once; does nothing if it has been."""
        if self._output_dir is not None:
            self.write(self._output_dir)

    def _release(self) -> None:
        self._output_dir = None
        atexit.unregister(self.finish)
