# SPDX-License-Identifier: Apache-2.0
"""A callback that lowers the learning rate while the mismatch grows, and the scaling that it shares with alerts."""

import logging
import math
from typing import Any, Literal

from ..training.hooks import TrainerHooks
from ..training.resumable import Resumable


logger = logging.getLogger(__name__)

Rule = Literal["ess_sqrt", "ess_linear", "length"]

# For each rule, the logged key that it reads and the trainer that logs the key.
_SIGNALS = {
    "ess_sqrt": ("mismatch/ess/sequence", "`ConsistentGRPOTrainer` logs it when the engine reports log-probs"),
    "ess_linear": ("mismatch/ess/sequence", "`ConsistentGRPOTrainer` logs it when the engine reports log-probs"),
    "length": ("completions/mean_length", "TRL's `GRPOTrainer` logs it"),
}
_POWERS = {"ess_sqrt": 0.5, "ess_linear": 1.0}
PATIENCE = 10
"""Logs without its metric after which a callback says that the metric is missing."""
CUT = 0.5
"""The factor of one cut of the learning rate."""
_PERIOD = 1.8  # steps between the cuts of the length rule, in steps of the surge
_FLOOR = 0.1  # the lowest scale of the length rule


class ScalesLR(TrainerHooks):
    """A callback that multiplies the learning rates by `lr_scale`, from the start of a step until its update.

    No scheduler and no checkpoint sees the scaled rate. The scales of several such callbacks multiply, in any order.
    """

    lr_scale = 1.0
    """The scale of the steps to come."""

    def __init__(self) -> None:
        self._scales: dict[int, float] = {}  # of the last step, one of each callback
        self._groups: list[dict[str, Any]] = []

    def _scale_lr(self, optimizer: Any) -> None:
        """Scales the rates of the optimizer; to be called in `on_step_begin`.

        `on_pre_optimizer_step` would be too late: DeepSpeed's engine steps within the backward pass.
        """
        self._groups = optimizer.param_groups
        # All such callbacks share one dict, which outlasts the step for `edit_logs`.
        self._scales = self._groups[0].setdefault("_lr_scales", {})
        self._scales[id(self)] = self.lr_scale
        for group in self._groups:
            unscaled = group.setdefault("_unscaled_lr", group["lr"])
            scale = math.prod(self._scales.values())
            group["lr"] = unscaled if scale == 1 else unscaled * scale  # never in place: schedulers fill tensors

    def _restore_lr(self) -> None:
        """Gives the optimizer its own rates back; to be called in `on_optimizer_step`."""
        for group in self._groups:
            group.pop("_lr_scales", None)
            if "_unscaled_lr" in group:
                group["lr"] = group.pop("_unscaled_lr")
        self._groups = []

    def edit_logs(self, logs: dict[str, Any]) -> None:
        """Adds the scale of the logged steps, if these are the logs of training steps."""
        if "learning_rate" in logs and self._scales:
            logs["lr_scale"] = math.prod(self._scales.values())

    def _edit_logs_and_history(self, logs: dict[str, Any], state: Any) -> None:
        """Edits logs and their entry in the history, which the trainer has copied before it called `on_log`."""
        self.edit_logs(logs)
        if state.log_history:
            self.edit_logs(state.log_history[-1])


class MismatchLRCallback(ScalesLR, Resumable):
    """
    Scales the scheduler's learning rate down while the mismatch, or an early sign of it, grows.

    A correction reweights the gradient; this callback shortens the step. Read `lr_scale` next to the key of the rule:

    - `"ess_sqrt"` (AdamW and its like) and `"ess_linear"` (SGD): `min(1, ESS / base_ess)`, to the power 1/2 or 1, where
      ESS is `mismatch/ess/sequence`. It recovers when the ESS does.
    - `"length"`: once `completions/mean_length` exceeds `surge` times its mean over the first `baseline_steps` steps, the
      rate is halved every 1.8 * (step of the surge) steps, counted from the surge, down to 0.1. It never recovers. Works
      with any trainer that logs this key, TRL's own `GRPOTrainer` included.

    The optimizer holds the scaled rate from the start of a step until its update, so that no scheduler and no checkpoint
    sees it. The logged `learning_rate` is the scheduler's; the update used `learning_rate * lr_scale`, also for decoupled
    weight decay. A log acts on the steps after it: with `logging_steps=1` the scale is one step late, where VCPO uses the
    ESS of the very batch. While the logs hold no usable value, the scale stays as it is, and a warning says so once. The
    scale is in every checkpoint, and a run resumed with the same arguments continues from it, whatever
    `restore_callback_states_from_checkpoint` says. Add at most one such callback. With `MismatchAlertCallback(["lower_lr"])`
    the scales multiply, and the logged `lr_scale` is their product.

    `lr_scale` is in `state.log_history`. `ConsistentGRPOTrainer` also gives it to the `report_to` integrations. With another
    trainer, they get it if you call `trainer.callback_handler.callbacks.insert(0, callback)` instead of adding the callback.

    Args:
        rule (`str`, *optional*, defaults to `"ess_sqrt"`):
            `"ess_sqrt"`, `"ess_linear"` or `"length"`.
        base_ess (`float`, *optional*, defaults to `1.0`):
            ESS (share, above 0 and at most 1) at which the rate is unscaled. VCPO's recipes use 1.0 for single-turn math
            and 0.55 for its multi-turn run, whose on-policy ESS is below 1. ESS rules only.
        surge (`float`, *optional*, defaults to `3.0`):
            Length, relative to the baseline, that counts as a surge. Length rule only.
        baseline_steps (`int`, *optional*, defaults to `50`):
            Steps whose logs make the baseline, which holds at least one log. Length rule only.

    Sign: `lr_scale` is at most 1; below 1 the update is shorter than the schedule says.
    Source: ESS rules, https://huggingface.co/papers/2602.17616 and the recipes of its code. Length rule,
    https://huggingface.co/papers/2602.01826 (Qwen3-4B, learning rate 1e-6, batch 64; surge near step 110). A public
    reproduction quotes 1/2, 1.8 and 0.1 from the paper. The numbers 3.0 and 50, and the count from the surge, are that
    reproduction's; as far as we know, they are not in the paper.

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
            raise ValueError(f"`base_ess` is {base_ess}, but an ESS is a share: set it above 0 and at most 1.")
        if not surge > 1:
            raise ValueError(f"`surge` is {surge}, so every length would be a surge: set it above 1.")
        if baseline_steps < 1:
            raise ValueError(f"`baseline_steps` is {baseline_steps}, but a baseline needs steps: set it to 1 or more.")
        super().__init__()
        self.rule = rule
        self.base_ess = base_ess
        self.surge = surge
        self.baseline_steps = baseline_steps
        self._has_warned = False
        self._missed = 0  # logs in a row without a usable value
        self._start()

    def _start(self) -> None:
        """Forgets an earlier training."""
        self.lr_scale = 1.0
        self.baseline_sum = 0.0
        self.baseline_logs = 0
        self.surge_step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start()
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.surge_step is not None:
            # scale = max(floor, cut ^ floor(steps since the surge / period))
            cuts = (state.global_step - self.surge_step) // max(1, round(_PERIOD * self.surge_step))
            self.lr_scale = max(_FLOOR, CUT**cuts)
        self._scale_lr(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restore_lr()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "learning_rate" not in logs:
            return  # an evaluation, or the summary at the end
        self._edit_logs_and_history(logs, state)
        value = logs.get(_SIGNALS[self.rule][0])
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            self._miss(value, state)
            return
        self._missed = 0
        if self.rule == "length":
            self._look_for_surge(value, state.global_step)
        else:
            # scale = min(1, ESS / base) ^ power
            self.lr_scale = min(1.0, value / self.base_ess) ** _POWERS[self.rule]

    def _miss(self, value: Any, state: Any) -> None:
        """Counts a log without a usable value, and warns once: after some logs without the key, or at once of a bad value."""
        self._missed += 1
        patience = (
            PATIENCE if value is None else 1
        )  # where a rollout serves several steps, not every log holds the key
        if self._missed < patience or self._has_warned or not state.is_world_process_zero:
            return
        self._has_warned = True
        key, logged_by = _SIGNALS[self.rule]
        logger.warning(
            f"`MismatchLRCallback({self.rule!r})` needs `{key}`, and the log of step {state.global_step} holds {value!r}: the "
            f"learning-rate scale stays at {self.lr_scale}. {logged_by}; if it never appears, use that trainer or another "
            "`rule`. Shown once."
        )

    def _look_for_surge(self, length: float, step: int) -> None:
        """Adds a length to the baseline, or compares it with the baseline."""
        if step <= self.baseline_steps or not self.baseline_logs:
            self.baseline_sum += length
            self.baseline_logs += 1
        elif self.surge_step is None and length > self.surge * self.baseline_sum / self.baseline_logs:
            self.surge_step = step
            logger.info(f"Completions surged to {length:.0f} tokens at step {step}: the learning rate will be halved.")
