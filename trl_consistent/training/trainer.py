# SPDX-License-Identifier: Apache-2.0
"""`ConsistentGRPOTrainer`: TRL's trainer, with what it returned edited. The math is in `correction/weights.py` and
`metrics/measure.py`, the engine in `rollout/vllm.py`."""

import contextlib
import functools
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from ..callbacks.alert import MismatchAlertCallback
from ..callbacks.learning_rate import ScalesLR
from ..callbacks.report import MismatchReportCallback
from ..config import correction_of, option
from ..correction.calibration import (
    WARM_UP_ROWS,
    NoiseEstimate,
    calibrated_bounds,
    expected_rejection,
    level_lengths,
    noise_statistics,
)
from ..correction.kl import reference_kl
from ..correction.loss import ROW_COUNT_LOSSES, aggregated, obstacle, refuse, rejection_scale, scales_late
from ..correction.rules import Correction
from ..correction.weights import CorrectionResult, correct, normalized, trust_region_mask
from ..metrics.measure import (
    correction_metrics,
    counted_as_batch,
    finalize,
    histograms,
    mean_weight,
    mismatch_metrics,
    reference_metrics,
    support_metrics,
    trust_region_metrics,
)
from ..ratios import MAX_LOG_RATIO, mismatch_log_ratio, wide_dtype
from ..rollout.audit import audit, report
from ..rollout.checks import Finding
from ..rollout.client import ServerDownError
from ..rollout.completions import check_completions, check_logprobs_mode
from ..rollout.engine import EngineSettings
from ..rollout.precision import check_deterministic, check_precision, compute_dtype
from ..rollout.reshaping import engine_of, sampling_of
from ..rollout.transformers import decoding, settings
from ..rollout.vllm import consistent_generation
from ..statistics import Stat, merge, on_host
from ..support import RestrictedHead, Sampling
from ..upstream.substitution import substituted
from ..upstream.transformers import dropout_in, save_checkpoint
from ..upstream.trl import (
    PASS_THROUGH_MODE,
    TRL_MODES,
    copy_into_reference,
    fused_head_replaced,
    group_advantages,
    old_logprobs_computed,
)
from .recorder import Recorder, fingerprint
from .reference import ReferenceResetCallback
from .trackers import log_histograms, tracking


logger = logging.getLogger(__name__)


_RELIANCE = "The correction, `old_logprobs='rollout'` and `kl_bias_correction_ratio='sampling'`"
_NOISE_BATCHES = 100
_NOISE_FILE, _REFERENCE_FOLDER = "mismatch_noise.json", "reference"


def _as_trl_logs(args: GRPOConfig) -> dict[str, str]:
    """What TRL logs when it computes the ratio, with the metrics that hold it when we do."""
    known = args.vllm_importance_sampling_mode in TRL_MODES  # else it logs the raw ratio
    ratio = "correction/weight" if known else "mismatch/ratio"
    names = {f"importance_sampling_ratio/{name}": f"{ratio}/{name}" for name in ("min", "mean", "max")}
    names |= {f"sampling_logp_difference/{name}": f"mismatch/abs_diff/{name}" for name in ("mean", "max")}
    return {f"sampling/{name}": key for name, key in names.items()}


def _checked(rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(rollout_func)
    def checked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        output = rollout_func(*args, **kwargs)
        if "completion_ids" in output:  # if not, TRL says which keys it wants
            check_completions(output["completion_ids"], output.get("logprobs"))
        return output

    return checked


class ConsistentGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that measures and corrects training-inference mismatch.

    Everything is inherited; with our options unset, loss, gradients and weights are those of `GRPOTrainer`, bit for bit.
    Added are the metrics of [`METRICS`] on every rollout batch with sampling log-probs, the corrections of [`PRESETS`], and a
    rollout engine whose weight syncs are checked.

    Example:

    ```python
    >>> from trl_consistent import ConsistentGRPOConfig as GRPOConfig, ConsistentGRPOTrainer as GRPOTrainer
    ```

    Args:
        model, reward_funcs, args, ...:
            As of `GRPOTrainer`, in the same order. `args` may be a plain `GRPOConfig`.
    """

    _tag_names = [*GRPOTrainer._tag_names, "trl-consistent"]

    # Class-level, because TRL's tests build trainers without `__init__`; rebound, never changed in place.
    _correction: Correction | None = None
    _replaces_ratio = False
    _old_logprobs = "recompute"
    _in_loss: dict[str, Any] | None = None
    _aux_loss: Tensor | None = None
    _kl: Tensor | None = None
    _own_kl = False
    _needs_engine = False
    _captures = False
    _sampling: Sampling | None = None
    _outside_support: Tensor | None = None
    _decision: contextlib.ExitStack | None = None
    _reference_reset: ReferenceResetCallback | None = None
    _noise_batches = 0
    _micro_batches: tuple[dict[str, Stat], ...] = ()
    _late_losses: tuple[Tensor, ...] = ()
    _late_scale: Tensor | None = None
    _rewards: Tensor | None = None
    _noise = NoiseEstimate()
    _explains_default = False
    _seen: dict[str, Stat] = {}
    _lengths: Tensor | None = None
    _window: dict[str, dict[str, Stat]] = {}
    _recorder: Recorder | None = None
    rollout_func: Callable[..., dict[str, Any]] | None

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *others: Any, **kwargs: Any
    ):
        if args is not None and option(args, "rollout_deterministic"):
            check_deterministic(args.device)
            os.environ["VLLM_BATCH_INVARIANT"] = "1"  # for good: kernels read it whenever they run
        with consistent_generation(args):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        if self.rollout_func is not None:
            self.rollout_func = _checked(self.rollout_func)
        self._correction = correction_of(self.args)
        if self._correction is not None and not self._correction.acts:
            self._correction = None
        preset, mode = option(self.args, "correction"), self.args.vllm_importance_sampling_mode
        known_to_trl = mode in TRL_MODES
        c = self._correction
        self._replaces_ratio = c is not None and (
            preset is not None or not known_to_trl or c != Correction(c.level, c.action, c.lower, c.upper)
        )
        decoding = None if self.use_vllm or self.rollout_func else self.generation_config.get_generation_mode()
        self._captures = decoding == GenerationMode.SAMPLE
        self._old_logprobs = self._source_of_old_logprobs()
        if option(self.args, "rollout_support"):
            self._sampling = self._sampling_to_follow()
        estimator, ratio = (option(self.args, f"kl_{name}") for name in ("estimator", "bias_correction_ratio"))
        self._own_kl = self.beta != 0.0 and (estimator != "k3" or ratio != "old")
        relies = (
            self._replaces_ratio or self._old_logprobs == "rollout" or ratio == "sampling"
        )  # ours does, not only TRL's
        self._needs_engine = self._correction is not None or relies
        if self._needs_engine and decoding not in (None, GenerationMode.SAMPLE):
            raise ValueError(
                f"{_RELIANCE} need the log-probs of sampled tokens, but `generation_kwargs={self.args.generation_kwargs}` "
                f"decodes by {decoding.value!r}. Sample, or leave these unset."
            )
        changes_loss = self._replaces_ratio or self._own_kl or self._old_logprobs != "recompute"
        if changes_loss and super()._compute_loss.__func__ is not GRPOTrainer._compute_loss:
            raise ValueError(
                f"{type(self).__name__} inherits a loss that is not `GRPOTrainer`'s and may ignore weights: leave "
                "`correction`, `old_logprobs` and the `kl_*` options unset, or put the weights into that loss yourself."
            )
        if (steps := option(self.args, "ref_reset_steps")) is not None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("`ref_reset_steps` does not work with FSDP and DeepSpeed yet: leave it unset.")
            self._reference_reset = ReferenceResetCallback(steps)
            self.add_callback(self._reference_reset)
        self._explains_default = preset is None and self._correction == Correction("sequence", "mask", None, 3.0)
        findings = self._check_engine(relies)
        if option(self.args, "mismatch_record_steps"):
            made_of = fingerprint(self, self._engine_settings, self._correction, self._old_logprobs, findings)
            self._recorder = Recorder(self, made_of)
            self.add_callback(self._recorder)
        if not known_to_trl:  # TRL computes (and logs as sampling/*) the raw token ratio, we replace it
            self.vllm_importance_sampling_mode = PASS_THROUGH_MODE
            self.vllm_importance_sampling_clip_min = self.vllm_importance_sampling_clip_max = None

    def _check_engine(self, relies: bool) -> list[Finding]:
        """Refuses an engine that is not what was asked for, and says and returns what else makes it disagree."""
        engine, precision = self._engine_settings, option(self.args, "rollout_precision")
        check_precision(precision, compute_dtype(self.model, self.accelerator), engine.dtype)
        if option(self.args, "rollout_fp32_lm_head") and engine.head_dtype not in (None, torch.float32):
            raise ValueError(
                f"`rollout_fp32_lm_head=True`, but the head of the rollout engine computes in {engine.head_dtype}. Restart the "
                """vLLM server with `--hf-overrides '{"head_dtype": "float32"}'`."""
            )
        if relies:
            check_logprobs_mode(engine.logprobs_mode)
        if (audited := option(self.args, "rollout_audit")) == "off":
            return []
        findings = audit(self, engine)
        if audited == "strict" or self.accelerator.is_main_process:
            report(findings, strict=audited == "strict")
        return findings

    @property
    def _engine_settings(self) -> EngineSettings:
        if self.use_vllm:
            return getattr(self.vllm_generation, "settings", EngineSettings())
        return EngineSettings() if self.rollout_func is not None else settings(self)

    def _source_of_old_logprobs(self) -> str:
        """`recompute` (TRL's rule), `reuse` or `rollout`; speaks up, once, where `auto` would have liked to reuse."""
        asked, correction = option(self.args, "old_logprobs"), self._correction
        if asked == "auto" and not self._replaces_ratio or asked == "recompute":
            return "recompute"
        reason = obstacle(self.args, correction, "reuse" if asked == "auto" else asked)
        late = scales_late(self.args, correction)
        if reason is None and late and (self.aux_loss_enabled or self.is_deepspeed_enabled):
            name = "the auxiliary loss of the router" if self.aux_loss_enabled else "DeepSpeed"
            reason = f"with rejections, the gradient is scaled after the last micro-batch, which {name} does not allow"
        if asked == "rollout":
            refuse(asked, reason)
            if correction is not None and correction.action == "truncate" and self.accelerator.is_main_process:
                logger.warning(
                    "With `old_logprobs='rollout'`, the ratio of the loss is pi / mu already and every weight is 1: the "
                    "bounds of the truncation have no effect, those of the loss (`epsilon`) act in their place."
                )
            return asked
        if reason is None and (dropout := dropout_in(self.model)) is not None:
            reason = f"dropout is on (in {dropout!r}), so that two forwards differ"
        if reason is None:
            logger.info("The old log-probs are read from the training forward.")
            return "reuse"
        if asked == "reuse":
            refuse(asked, reason)
        if self.accelerator.is_main_process:
            logger.warning(
                f"The old log-probs take an extra forward per rollout batch, and cannot be read from the training "
                f"forward: {reason}. `old_logprobs='recompute'` silences this."
            )
        return "recompute"

    def _sampling_to_follow(self) -> Sampling | None:
        """What the trainer's log-probs are to follow; `None` where the engine samples from the model's distribution."""
        sampling = sampling_of(self.args, "vllm" if self.rollout_func is not None else engine_of(self.args))
        if sampling.counts_outputs and self.tools:
            raise ValueError(
                "`presence_penalty` and `frequency_penalty` count the tokens of one turn, which `rollout_support` cannot "
                "tell apart: leave them out where tools take turns with the model."
            )
        if is_deepspeed_zero3_enabled():
            raise ValueError("`rollout_support=True` does not work with DeepSpeed ZeRO-3 yet: leave it unset.")
        return sampling if sampling.reshapes else None

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        if self._captures:
            training = self.model.training
            with decoding(self) as engine:
                completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
            logprobs = engine.collect(completion_ids)
            if self._needs_engine:  # TRL's continuous batching leaves the model training, in an evaluation as well
                self.model.train(training)
        else:
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        check_completions(completion_ids, logprobs)
        return completion_ids, logprobs

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._generate(*args, **kwargs)
        if self._decision is not None:
            self._decision.enter_context(old_logprobs_computed(self, self._old_logprobs == "recompute"))
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._decision is not None:
            self._decision.close()  # a reward function sees the arguments as they are
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        reset = self._reference_reset
        if reset is not None and reset.is_due and self.model.training:  # not amid a rollout batch, whose KL is to one
            self._reset_reference()
            reset.is_due = False
        self._outside_support = None
        decides = self._old_logprobs != "recompute" or (self._correction is not None and not self.use_vllm)
        if decides:
            with (
                contextlib.ExitStack() as self._decision,
                substituted(self, vllm_importance_sampling_correction=False),
            ):
                output = super()._generate_and_score_completions(inputs)
            self._decision = None
        else:
            output = super()._generate_and_score_completions(inputs)
        rewards, self._rewards = self._rewards, None
        sampling, old = output.get("sampling_per_token_logps"), output.get("old_per_token_logps")
        if self._needs_engine and sampling is None:
            raise ValueError(
                f"{_RELIANCE} need the log-probs of the rollout engine, but the rollout returned none. Return them as "
                "'logprobs', or leave these unset."
            )
        if sampling is None or old is None:
            self._outside_support = None  # the reference's
            return output  # nothing to compare, or compared between the training forward and the loss
        mask = self._loss_mask(output)
        if self._correction is None:
            self._complete(self._record(self._mismatch(output, old, sampling, mask)))
            self._hide_captured(output)
            return output
        result, stats = self._measure(output, old, sampling, mask)
        correction = self._correction
        if not self._replaces_ratio:  # what counts is the ratio TRL will use
            weights = output["importance_sampling_ratio"].expand_as(result.weights)
            result = replace(result, weights=torch.where(result.keep_mask, weights, 1.0))
            self._complete(self._record(stats | correction_metrics(mask, result, correction.action)), result.weights)
            return output
        stats, weights = self._record(stats), result.weights
        if correction.normalize != "none":
            weights = normalized(weights, result.keep_mask, mean_weight(stats, correction.normalize))
        if correction.rejects:
            # TRL's loss mask is completion_mask * tool_mask; only the former also is an attention mask.
            output["tool_mask"] = result.keep_mask.to(output["completion_mask"].dtype)
            self._follow_rejections(output, stats)
            if option(self.args, "correction_reject_baseline") == "exclude" and rewards is not None:
                output["advantages"] = self._advantages_without(mask.any(1) & ~result.keep_mask.any(1), rewards)
        output.pop("importance_sampling_ratio", None)
        self._weight(output, weights)
        self._complete(stats, weights)
        return output

    def _complete(self, stats: dict[str, Stat], weights: Tensor | None = None) -> None:
        """Has a rollout batch of the training recorded, with the weights its loss will see."""
        if self._recorder is not None and self.model.training:
            if weights is not None:
                self._recorder.weigh(weights)
            self._recorder.complete(stats)

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
        batch, self._in_loss = self._in_loss, None
        if batch is not None:  # its completion_mask is the loss mask, what the model attends to is another
            attention_mask = torch.cat([attention_mask[:, :-logits_to_keep], batch["attended"]], dim=1)
        arguments = (model, input_ids, attention_mask, logits_to_keep, batch_size, *args)
        if self._sampling is None:
            output = super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
        else:
            head = RestrictedHead(self._sampling, input_ids, attention_mask, logits_to_keep, batch_size)
            with fused_head_replaced(head):
                output = super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
            if self._outside_support is None:  # that of the policy, whose turn is before the reference's
                self._outside_support = head.outside
        self._aux_loss = output[2]
        if batch is not None:
            self._between_forward_and_loss(batch, output[0])
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        batch = inputs
        regions = self._correction is not None and self._correction.trust_regions
        to_correct = "sampling_per_token_logps" in inputs and (regions or "old_per_token_logps" not in inputs)
        if to_correct or "ref_per_token_logps" in inputs:
            # TRL reads the loss mask after the forward, so that it can still be changed in between.
            batch = dict(inputs, completion_mask=self._loss_mask(inputs).clone(), attended=inputs["completion_mask"])
            batch.pop("tool_mask", None)
            self._in_loss = batch
        with substituted(self, beta=0.0 if self._own_kl else self.beta):
            loss = super()._compute_loss(model, batch)
        if self._kl is not None:
            loss, self._kl = loss + self.beta * self._aggregated(self._kl, batch), None
        self._in_loss, aux_loss, self._aux_loss = None, self._aux_loss, None
        if "rejection_scale" not in batch:
            return loss
        if aux_loss is None:
            return batch["rejection_scale"] * loss
        # The auxiliary loss of the router is no part of what rejections scale.
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        aux_loss = self.router_aux_loss_coef * aux_loss / steps
        return batch["rejection_scale"] * (loss - aux_loss) + aux_loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # What an interrupted run may have left.
        self._micro_batches, self._late_losses, self._late_scale, self._in_loss = (), (), None, None
        callbacks = self.callback_handler.callbacks
        if self._recorder is None and any(
            isinstance(c, MismatchAlertCallback) and "record" in c.actions for c in callbacks
        ):
            logger.warning(
                "With `mismatch_record_steps=0`, alerts record nothing: leave 'record' out of their `actions`."
            )
        reports = [c for c in callbacks if isinstance(c, MismatchReportCallback)]
        for callback in reports:
            callback.keeps_logs = self._recorder is None
        try:
            return super().train(*args, **kwargs)
        except ServerDownError as error:
            # Raised by a rollout, and on all ranks: what was done since the last checkpoint need not be lost.
            if self.args.save_strategy != "no" and self.state.global_step > 0:
                error.add_note(
                    f"Step {self.state.global_step} is saved in {save_checkpoint(self)}. Once the server is "
                    "there, go on with `trainer.train(resume_from_checkpoint=True)`."
                )
            raise
        finally:
            for callback in reports:
                callback.finish()  # of a training that failed

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._late_scale is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._late_scale)
            loss = self._late_scale * loss + (self._late_scale - 1) * sum(self._late_losses)
            self._late_scale, self._late_losses = None, ()
        elif self._is_late:
            self._late_losses += (loss,)
        return loss

    @property
    def _is_late(self) -> bool:
        """Whether a micro-batch does not know the count its loss divides by, see [`scales_late`]."""
        in_loss = self._old_logprobs != "recompute" and self.model.training
        return in_loss and scales_late(self.args, self._correction)

    def _measure(
        self, batch: dict[str, Any], old: Tensor, sampling: Tensor, mask: Tensor, mismatch: bool = True
    ) -> tuple[CorrectionResult, dict[str, Stat]]:
        """What the correction makes of a batch, and the statistics of it and of the mismatch."""
        assert self._correction is not None
        correction, d = self._correction, mismatch_log_ratio(old, sampling, mask)
        bounds = {
            level: calibrated_bounds(level_lengths(d, mask, level), self._noise, correction.reject_rate, level)
            for level in correction.calibrated_levels
            if correction.reject_rate is not None
        }
        result = correct(d, mask, correction, sampling=sampling, bounds=bounds)
        stats = correction_metrics(mask, result, correction.action)
        if mismatch:
            stats |= self._mismatch(batch, old, sampling, mask, result)
        if mismatch and (bounds or self._explains_default):
            stats |= noise_statistics(d, mask)
            self._lengths = level_lengths(d, mask, "sequence")
        return result, stats

    def _mismatch(
        self,
        batch: dict[str, Any],
        old: Tensor,
        sampling: Tensor,
        mask: Tensor,
        result: CorrectionResult | None = None,
    ) -> dict[str, Stat]:
        """Statistics of the gap between trainer and engine, in log-probs and in what they keep; hands the batch over to be
        recorded."""
        if self._recorder is not None and self.model.training:
            self._recorder.add(batch, old, sampling, mask, result)
        outside, self._outside_support = self._outside_support, None
        stats = mismatch_metrics(old, sampling, mask)
        return stats if outside is None else stats | support_metrics(outside, mask)

    def _between_forward_and_loss(self, batch: dict[str, Any], per_token_logps: Tensor) -> None:
        """Measures a micro-batch, puts weights and masks into `batch`, and records after the last one of a rollout batch."""
        mask, logps, stats = batch["completion_mask"], per_token_logps.detach(), dict[str, Stat]()
        if (sampling := batch.get("sampling_per_token_logps")) is not None:
            stats |= self._correct_in_loss(batch, logps, sampling, mask)
        if (reference := batch.get("ref_per_token_logps")) is not None:
            stats |= reference_metrics(logps, reference, mask)
            if self._own_kl:
                self._kl = self._reference_kl(batch, per_token_logps)
                used = torch.where(mask.bool(), self._kl.detach(), 0.0).sum(dtype=wide_dtype(logps))
                stats["reference_used"] = Stat(used.reshape(1), "sum")
        rejects = "kept" in stats and self._correction is not None and self._correction.rejects
        if self.model.training:
            self._micro_batches += (stats,)
            is_last = (self._step + 1) % self.args.steps_per_generation == 0
            if not (self.accelerator.sync_gradients or (is_last and rejects)):
                return
            stats, self._micro_batches = merge(self._micro_batches), ()
        if stats:
            stats = self._record(stats)
            self._complete(stats)
        if rejects:
            self._follow_rejections(batch, stats)

    def _correct_in_loss(
        self, batch: dict[str, Any], logps: Tensor, sampling: Tensor, mask: Tensor
    ) -> dict[str, Stat]:
        """What `_generate_and_score_completions` left to the loss: the whole correction, or the trust regions."""
        correction, stats, weights = self._correction, dict[str, Stat](), None
        if "old_per_token_logps" not in batch:
            # After the first update on a rollout batch (bypass only), the gap is staleness as well, and not measured.
            use = self._step % (self.args.steps_per_generation * self.num_iterations)
            fresh = not self.model.training or use < self.args.gradient_accumulation_steps
            if correction is None:
                stats = self._mismatch(batch, logps, sampling, mask) if fresh else {}
                self._hide_captured(batch)
            else:
                result, stats = self._measure(batch, logps, sampling, mask, mismatch=fresh)
                weights = result.weights
                if self._old_logprobs == "rollout":  # the ratio of the loss is pi / mu
                    weights = torch.where(weights > 0, 1.0, weights)
                self._weight(batch, weights)
                mask.copy_(result.keep_mask)
            if self._old_logprobs == "rollout":
                batch["old_per_token_logps"] = torch.where(torch.isfinite(sampling), sampling, logps)
        if correction is not None and correction.trust_regions:
            advantages = self._two_dimensional(batch["advantages"])
            passes = torch.ones_like(mask, dtype=torch.bool)
            for region in correction.trust_regions:
                passes = passes & trust_region_mask(logps, sampling, advantages, mask, region)
            stats |= trust_region_metrics(mask, passes)
            self._weight(batch, passes.to(logps.dtype))
            weights = None if weights is None else weights * passes
        if weights is not None and self._recorder is not None:
            self._recorder.weigh(weights)
        return stats

    def _hide_captured(self, batch: dict[str, Any]) -> None:
        """Without a correction, the off-policy mask of TRL's loss sees what it sees without us."""
        if self._captures and not self._needs_engine:
            del batch["sampling_per_token_logps"]

    def _reference_kl(self, batch: dict[str, Any], per_token_logps: Tensor) -> Tensor:
        """The KL term of each token, where `kl_estimator` or its ratio is not TRL's."""
        weights = None
        if self.args.use_bias_correction_kl:
            old = batch.get("old_per_token_logps")
            old = per_token_logps.detach() if old is None else old
            if option(self.args, "kl_bias_correction_ratio") == "sampling":
                sampling = batch["sampling_per_token_logps"]
                old = torch.where(torch.isfinite(sampling), sampling, old)
            log_weights = (per_token_logps - old).clamp(max=MAX_LOG_RATIO)
            if self.importance_sampling_level == "sequence" and option(self.args, "kl_bias_correction_ratio") == "old":
                mask = batch["completion_mask"]
                log_weights = (log_weights * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
            weights = log_weights.exp()
        log_ratio = per_token_logps - batch["ref_per_token_logps"]
        return reference_kl(log_ratio, option(self.args, "kl_estimator"), weights)

    def _aggregated(self, per_token: Tensor, batch: dict[str, Any]) -> Tensor:
        """What the loss makes of a term of each token."""
        training = self.model.training
        items = batch["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        return aggregated(
            per_token,
            batch["completion_mask"],
            self.args.loss_type,
            items=items / self.args.steps_per_generation if training else items,
            longest=self.max_completion_length,
            steps=self.current_gradient_accumulation_steps if training else 1.0,
        )

    def _reset_reference(self) -> None:
        reference = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        copy_into_reference(self.accelerator.unwrap_model(self.model), reference)

    def _explain_default(self, stats: dict[str, Stat]) -> None:
        """Tells users of TRL's default correction, once, how many of their completions it masks."""
        seen_stats = {key: stats[key] for key in ("outside_rows", "rows")}
        self._seen = merge([self._seen, seen_stats]) if self._seen else seen_stats
        seen = {key: int(stat.value[0]) for key, stat in self._seen.items()}
        if not self._noise.ready or self._lengths is None:
            self._explains_default = seen["rows"] < 8 * WARM_UP_ROWS  # else completions are too short to tell
            return
        lengths = self._lengths[self._lengths > 0].unsqueeze(1)
        shares = [
            expected_rejection(n, self._noise, None, 3.0, "sequence").mean().item() for n in (lengths, lengths * 8)
        ]
        masked = seen["outside_rows"] / seen["rows"]
        self._explains_default, self._seen, self._lengths = False, {}, None
        if not self.accelerator.is_main_process:
            return
        logger.log(
            logging.WARNING if max(masked, *shares) > 0.01 else logging.INFO,
            f"TRL's default correction, `sequence_mask` above a ratio of 3, has masked {masked:.1%} of the first "
            f"{seen['rows']} completions. With the measured noise (sigma = {self._noise.variance.sqrt().item():.2g} nats "
            f"per token), {shares[0]:.1%} of healthy completions of these lengths (mean "
            f"{lengths.float().mean().item():.0f} tokens) are above it, and {shares[1]:.1%} of those 8 times as long. "
            "`correction='tis'` weighs tokens instead; `correction_reject_rate=0.01` rejects the same share at every "
            "length.",
        )

    def _check_noise(self) -> None:
        """Says, once, that calibrated bounds do not come into being."""
        self._noise_batches += 1
        told = self._noise_batches != _NOISE_BATCHES or not self.accelerator.is_main_process
        if not told and not self._noise.ready:
            logger.warning(
                f"After {_NOISE_BATCHES} rollout batches, fewer than {WARM_UP_ROWS} completions had the 8 tokens it takes to "
                "measure the engine's noise, so that `correction_reject_rate` still uses the fixed bounds."
            )

    def _follow_rejections(self, batch: dict[str, Any], stats: dict[str, Stat]) -> None:
        """Makes the denominator of the loss count what was kept, over all ranks and micro-batches."""
        items, loss_type = batch["num_items_in_batch"], self.args.loss_type
        scale = rejection_scale(stats, items, loss_type)
        if self._is_late:
            self._late_scale = scale
            return
        batch["num_items_in_batch"] = stats["kept"].value[0].to(items.dtype)
        if loss_type in ROW_COUNT_LOSSES:
            batch["rejection_scale"] = scale

    def _weight(self, batch: dict[str, Any], weights: Tensor) -> None:
        """Multiplies the policy term of the loss of `batch` by `weights`, never negative."""
        if self.use_vllm:
            batch["importance_sampling_ratio"] = batch.get("importance_sampling_ratio", 1.0) * weights
        else:  # TRL's loss takes no ratio then; all but vespo are linear in the size of an advantage
            batch["advantages"] = self._two_dimensional(batch["advantages"]) * weights

    @staticmethod
    def _two_dimensional(advantages: Tensor) -> Tensor:
        """TRL's loss takes advantages of completions, `(B,)`, and of tokens, `(B, T)`."""
        return advantages if advantages.dim() == 2 else advantages.unsqueeze(1)

    def _advantages_without(self, rejected: Tensor, rewards: Tensor) -> Tensor:
        """The advantages of this rank's completions, with the rejected ones out of the baseline of their group.

        Args:
            rejected (`torch.Tensor` of shape `(B,)`): Completions of this rank that were rejected whole.
            rewards (`torch.Tensor` of shape `(N, functions)`): Rewards of all ranks, from TRL.
        """
        out = self.accelerator.gather(rejected)
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total = total.masked_fill(rewards.isnan().all(dim=1) | out, math.nan)
        advantages = group_advantages(
            total, self.num_generations if self.model.training else self.num_generations_eval, self.scale_rewards
        )
        return advantages[self.accelerator.process_index * len(rejected) :][: len(rejected)]

    @staticmethod
    def _loss_mask(batch: dict[str, Any]) -> Tensor:
        mask = batch["completion_mask"]
        return mask * batch["tool_mask"] if "tool_mask" in batch else mask

    def _record(self, stats: dict[str, Stat]) -> dict[str, Stat]:
        """Merges statistics over the ranks, in one collective, and adds them to the logging window."""
        if self.accelerator.num_processes > 1:
            sizes = [stat.value.numel() for stat in stats.values()]
            flat = torch.cat([stat.value for stat in stats.values()])
            ranks = self.accelerator.gather(flat.unsqueeze(0)).split(sizes, dim=1)
            stats = merge(
                {
                    key: Stat(values[rank], stat.reduction)
                    for (key, stat), values in zip(stats.items(), ranks, strict=True)
                }
                for rank in range(self.accelerator.num_processes)
            )
        stats = counted_as_batch(stats)
        mode = "train" if self.model.training else "eval"
        if "noise" in stats:
            if mode == "train":
                self._noise = self._noise.update(stats)
                if self._explains_default:
                    self._explain_default(stats)
                else:
                    self._check_noise()
            stats = {key: stat for key, stat in stats.items() if key != "noise"}
        before = self._window.get(mode)
        self._window = {**self._window, mode: stats if before is None else merge([before, stats])}
        return stats

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if not self.args.should_save:
            return
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self._correction is not None and self._correction.reject_rate is not None:
            partial = folder / f"{_NOISE_FILE}.tmp"
            partial.write_text(json.dumps(self._noise.state_dict()))
            partial.replace(folder / _NOISE_FILE)
        if self._reference_reset is not None and self.ref_model is not None:
            self.accelerator.unwrap_model(self.ref_model).save_pretrained(folder / _REFERENCE_FOLDER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if (path := Path(checkpoint, _NOISE_FILE)).exists():
            self._noise = NoiseEstimate.from_state(json.loads(path.read_text()))
        if (path := Path(checkpoint, _REFERENCE_FOLDER)).exists() and self.ref_model is not None:
            reference = self.accelerator.unwrap_model(self.ref_model)
            reference.load_state_dict(type(reference).from_pretrained(path, dtype=reference.dtype).state_dict())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode, window = "train" if self.model.training else "eval", dict[str, Stat]()
        if mode in self._window:
            window = on_host(self._window[mode])
            values = finalize(window)
            self._window = {other: stats for other, stats in self._window.items() if other != mode}
            if self.use_vllm and self._old_logprobs != "recompute" and "correction/weight/mean" in values:
                values |= {name: values[key] for name, key in _as_trl_logs(self.args).items() if key in values}
            for key, value in values.items():
                self._metrics[mode][key].append(value)
            if (batches := int(values.get("correction/rejected_batches", 0))) and self.accelerator.is_main_process:
                logger.warning(
                    f"The correction rejected every token of {batches} rollout batch(es) since the last log: "
                    "they contributed nothing to the update. See `correction/rejected_fraction/*`; widen the bounds "
                    "or find the cause of the mismatch."
                )
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ScalesLR):
                callback.report(logs)  # here, because the reporting integrations come before a user's callbacks
        super().log(logs, start_time)
        callbacks = self.callback_handler.callbacks
        if self.accelerator.is_main_process and tracking(callbacks):
            prefix = "eval_" if mode == "eval" else ""
            found = {f"{prefix}{key}": histogram for key, histogram in histograms(window).items()}
            log_histograms(callbacks, found, self.state.global_step)
        for callback in callbacks:
            if isinstance(callback, MismatchAlertCallback):
                events, callback.record_requests = callback.record_requests, []
                if events and self._recorder is not None:
                    self._recorder.write("; ".join(f"{event.severity} {event.key}" for event in events))
