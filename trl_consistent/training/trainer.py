# SPDX-License-Identifier: Apache-2.0
"""`ConsistentGRPOTrainer`: the overrides of TRL's trainer, which hand over to the files beside this one."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from ..config import option
from ..metrics.measure import histograms
from ..rollout.client import ServerDownError
from ..rollout.completions import check_completions
from ..rollout.transformers import decoding
from ..rollout.vllm import consistent_generation
from ..support import RestrictedHead
from ..upstream.substitution import substituted
from ..upstream.transformers import save_checkpoint
from ..upstream.trl import PASS_THROUGH_MODE, TRL_MODES, fused_head_replaced, old_logprobs_computed
from .after_rollout import AfterRollout
from .batch import groups_of
from .checks import check_engine, check_trainer, checked, engine_settings, prepare
from .hooks import TrainerHooks
from .in_loss import InLoss, StepSoFar, needs_us
from .meter import Meter
from .moment import moment_of
from .noise import NoiseTracker
from .plan import Plan, make_plan
from .recorder import recorder_of
from .reference import ReferenceResetCallback, load_reference, save_reference
from .trackers import log_histograms, tracking


logger = logging.getLogger(__name__)


class ConsistentGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that measures and corrects training-inference mismatch.

    Everything is inherited; with our options unset, loss, gradients and weights are those of `GRPOTrainer`, bit for bit.
    Added are the metrics of [`METRICS`] on every rollout batch with sampling log-probs, the corrections of [`PRESETS`], and a
    rollout engine whose weight syncs are checked. Arguments are those of `GRPOTrainer`, in the same order; `args` may be a
    plain `GRPOConfig`.

    Example:

    ```python
    >>> from trl_consistent import ConsistentGRPOConfig as GRPOConfig, ConsistentGRPOTrainer as GRPOTrainer
    ```

    What each override changes, in the order in which TRL calls them:

    - `__init__`: builds our vLLM backend in the place of TRL's, makes the [`Plan`], refuses what cannot work.
    - `train`: tells [`TrainerHooks`] when it begins and how it ends; saves a checkpoint when a vLLM server stays away.
    - `_generate_and_score_completions`: measures, corrects and records what TRL returns ([`AfterRollout`]).
    - `_generate_single_turn`: captures log-probs where `generate` of transformers is the engine; checks completions.
    - `_generate`: decides, when the completions are there, whether TRL computes old log-probs.
    - `_calculate_rewards`: ends that decision, and keeps the rewards for the baseline.
    - `_get_per_token_logps_and_entropies`: follows the engine's sampling (`rollout_support`), and lets [`InLoss`] act
      between the forward and the loss.
    - `_compute_loss`: gives TRL's loss the batch of [`InLoss`], and completes it.
    - `training_step`: scales gradients whose denominator only the last micro-batch knows.
    - `log`: adds the metrics, and sends histograms to trackers.
    - `_save_checkpoint`, `_load_optimizer_and_scheduler`: noise estimate and reset reference go with checkpoints.
    """

    _tag_names = [*GRPOTrainer._tag_names, "trl-consistent"]

    # Class-level, because TRL's tests build trainers without `__init__`: an empty plan is TRL's own path.
    _plan = Plan()
    _meter: Meter | None = None
    _rollout: AfterRollout | None = None  # while a rollout batch is made
    _in_loss: InLoss | None = None  # while the loss of a micro-batch is computed
    _so_far = StepSoFar()
    _reference_reset: ReferenceResetCallback | None = None
    rollout_func: Callable[..., dict[str, Any]] | None

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *others: Any, **kwargs: Any
    ):
        prepare(args)
        with consistent_generation(args):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        if self.rollout_func is not None:
            self.rollout_func = checked(self.rollout_func)
        plan = make_plan(self)
        check_trainer(self, plan, has_trl_loss=super()._compute_loss.__func__ is GRPOTrainer._compute_loss)
        engine = engine_settings(self)
        findings = check_engine(self, plan, engine)
        if (steps := option(self.args, "ref_reset_steps")) is not None:
            self._reference_reset = ReferenceResetCallback(steps)
            self.add_callback(self._reference_reset)
        if (recorder := recorder_of(self, plan, engine, findings)) is not None:
            self.add_callback(recorder)
        noise = NoiseTracker(plan.correction, plan.explains_default, tells=self.accelerator.is_main_process)
        self._plan, self._so_far = plan, StepSoFar()
        self._meter = Meter(plan, noise, recorder, self.accelerator)
        if self.args.vllm_importance_sampling_mode not in TRL_MODES:
            # TRL computes (and logs as sampling/*) the raw token ratio, and our weights take its place.
            self.vllm_importance_sampling_mode = PASS_THROUGH_MODE
            self.vllm_importance_sampling_clip_min = self.vllm_importance_sampling_clip_max = None

    @property
    def _hooks(self) -> list[TrainerHooks]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, TrainerHooks)]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._so_far, self._in_loss = StepSoFar(), None  # not what an interrupted run may have left
        hooks, recorder = self._hooks, None if self._meter is None else self._meter.recorder
        for hook in hooks:
            hook.attached(keeps_records=recorder is not None)
        try:
            return super().train(*args, **kwargs)
        except ServerDownError as error:
            # Raised by a rollout, and on all ranks: what was done since the last checkpoint need not be lost.
            if self.args.save_strategy != "no" and self.state.global_step > 0:
                error.add_note(
                    f"Step {self.state.global_step} is saved in {save_checkpoint(self)}. Once the server is there, go on "
                    "with `trainer.train(resume_from_checkpoint=True)`."
                )
            raise
        finally:
            for hook in hooks:
                hook.training_ended()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._meter is None:
            return super()._generate_and_score_completions(inputs)
        if self._reference_reset is not None and self.model.training:
            self._reference_reset.reset_if_due(*self._models)
        ratio = {"vllm_importance_sampling_correction": False} if self._plan.decides_old_logprobs else {}
        rollout = AfterRollout(self._plan, self._meter, moment_of(self), groups_of(self))
        with rollout, substituted(self, _rollout=rollout, **ratio):
            batch = super()._generate_and_score_completions(inputs)
        return rollout.finish(batch)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        if self._plan.captures:
            training = self.model.training
            with decoding(self) as engine:
                completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
            logprobs = engine.collect(completion_ids)
            if (
                self._plan.needs_engine
            ):  # TRL's continuous batching leaves the model training, in an evaluation as well
                self.model.train(training)
        else:
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        check_completions(completion_ids, logprobs)
        return completion_ids, logprobs

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._generate(*args, **kwargs)
        if self._rollout is not None:
            self._rollout.generated(old_logprobs_computed(self, not self._plan.corrects_in_loss))
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._rollout is not None:
            self._rollout.close()  # a reward function sees the arguments as they are
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._rollout is not None:
            self._rollout.scored(rewards)
        return rewards

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        if self._in_loss is not None:
            attention_mask = self._in_loss.attention_mask(attention_mask, logits_to_keep)
        head = None
        if self._plan.sampling is not None:
            head = RestrictedHead(self._plan.sampling, input_ids, attention_mask, logits_to_keep, batch_size)
        with contextlib.nullcontext() if head is None else fused_head_replaced(head):
            output = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs
            )
        outside = None if head is None else head.outside
        if self._in_loss is not None:
            self._in_loss.forwarded(output[0], output[2], outside)
        elif self._rollout is not None:
            self._rollout.forwarded(outside)
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self._meter is None or not needs_us(self._plan, inputs):
            return super()._compute_loss(model, inputs)
        in_loss = InLoss(self._plan, self._meter, moment_of(self), self._so_far, inputs)
        beta = self.beta
        with substituted(self, _in_loss=in_loss, beta=0.0 if self._plan.reference is not None else beta):
            loss = super()._compute_loss(model, in_loss.batch)
        return in_loss.end(loss, beta, self.router_aux_loss_coef if self.aux_loss_enabled else 0.0)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        return self._so_far.after_backward(loss, self.model.parameters()) if self._plan.scales_late else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        values, stats = ({}, {}) if self._meter is None else self._meter.close(mode)
        for key, value in values.items():
            self._metrics[mode][key].append(value)
        for hook in self._hooks:
            hook.edit_logs(logs)  # here, because the reporting integrations come before a user's callbacks
        super().log(logs, start_time)
        callbacks = self.callback_handler.callbacks
        if self.accelerator.is_main_process and tracking(callbacks):
            prefix = "eval_" if mode == "eval" else ""
            found = {f"{prefix}{key}": histogram for key, histogram in histograms(stats).items()}
            log_histograms(callbacks, found, self.state.global_step)
        reasons = [reason for hook in self._hooks for reason in hook.reasons_to_record()]
        if reasons and self._meter is not None and self._meter.recorder is not None:
            self._meter.recorder.write("; ".join(reasons))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if not self.args.should_save or self._meter is None:
            return
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self._meter.noise.save(folder)
        if self._reference_reset is not None and self.ref_model is not None:
            save_reference(self._models[1], folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self._meter is None:
            return
        self._meter.noise.load(Path(checkpoint))
        if self.ref_model is not None:
            load_reference(self._models[1], Path(checkpoint))

    @property
    def _models(self) -> tuple[Any, Any]:
        """The unwrapped policy and reference; `None` for a reference that is an adapter of the policy."""
        unwrap = self.accelerator.unwrap_model
        return unwrap(self.model), None if self.ref_model is None else unwrap(self.ref_model)
