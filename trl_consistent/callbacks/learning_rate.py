# SPDX-License-Identifier: Apache-2.0
"""The learning rate follows the mismatch."""

import logging
import math
from typing import Any, Literal

from ..training.hooks import TrainerHooks
from ..training.resumable import Resumable


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


class ScalesLR(TrainerHooks):
    """Multiplies learning rates by `lr_scale`, from the start of a step until its update, so that no scheduler and no
    checkpoint sees it. Several such callbacks multiply, in any order."""

    lr_scale = 1.0

    def __init__(self) -> None:
        self._scales: dict[int, float] = {}
        self._groups: list[dict[str, Any]] = []

    # Not in `on_pre_optimizer_step`: DeepSpeed's engine steps within the backward pass.
    def _scale_lr(self, optimizer: Any) -> None:
        self._groups = optimizer.param_groups
        # One dict for all such callbacks, which outlasts the step for `edit_logs`.
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

    def edit_logs(self, logs: dict[str, Any]) -> None:
        """Adds the scale that the logged steps used, if these are the logs of training steps."""
        if "learning_rate" in logs and self._scales:
            logs["lr_scale"] = math.prod(self._scales.values())


class MismatchLRCallback(ScalesLR, Resumable):
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
        self.edit_logs(logs)
        if state.log_history:
            self.edit_logs(state.log_history[-1])  # the trainer copied the logs before it called us
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
