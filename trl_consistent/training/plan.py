# SPDX-License-Identifier: Apache-2.0
"""What is decided once, when a trainer is built: which correction, where old log-probs come from, what replaces what."""

import logging
from dataclasses import dataclass, field
from typing import Any

from transformers.generation import GenerationMode
from transformers.integrations import is_deepspeed_zero3_enabled

from ..config import correction_of, option
from ..correction.loss import obstacle, refuse, scales_late
from ..correction.rules import Correction
from ..rollout.reshaping import engine_of, sampling_of
from ..support import Sampling
from ..upstream.transformers import dropout_in
from ..upstream.trl import TRL_MODES
from .batch import Batch, LossShape
from .noise import TRL_DEFAULT
from .reference import ReferenceTerm


logger = logging.getLogger(__name__)

RELIANCE = "The correction, `old_logprobs='rollout'` and `kl_bias_correction_ratio='sampling'`"
"""What needs the engine's log-probs, in the words of messages."""


@dataclass(frozen=True)
class Plan:
    """What a trainer does beyond TRL's. Every default means TRL's own path, so that an empty plan changes nothing."""

    correction: Correction | None = None
    """The correction in force, TRL's own included; `None` if nothing acts."""
    replaces_ratio: bool = False
    """Whether our weights take the place of TRL's ratio."""
    old_logprobs: str = "recompute"
    """`recompute` (TRL's rule), `reuse` (the training forward) or `rollout` (the engine's)."""
    captures: bool = False
    """Whether log-probs are captured in `generate` of transformers, because no vLLM reports them."""
    needs_engine: bool = False
    """Whether training cannot go on without the engine's log-probs."""
    relies_on_engine: bool = False
    """Whether an option of ours, not only TRL's correction, relies on the engine's log-probs."""
    sampling: Sampling | None = None
    """How the engine reshapes the distribution, where the trainer's log-probs are to follow it."""
    reference: ReferenceTerm | None = None
    """The KL term that takes the place of TRL's."""
    scales_late: bool = False
    """Whether gradients are scaled after the last micro-batch, because only then it is known what rejections keep."""
    takes_ratio: bool = True
    """Whether TRL's loss takes an importance ratio, which it does with vLLM only."""
    excludes_rejected: bool = False
    """Whether completions that were rejected whole leave the reward baseline of their group."""
    explains_default: bool = False
    """Whether TRL's default correction is in force because nothing else was asked for."""
    loss: LossShape = field(default_factory=LossShape)
    """What TRL's loss divides by."""
    ratio_logs: tuple[tuple[str, str], ...] = ()
    """What TRL logs when it computes the ratio, with the metric that holds it when we do; in pairs."""

    @property
    def corrects_in_loss(self) -> bool:
        """Whether the correction is computed between the training forward and the loss."""
        return self.old_logprobs != "recompute"

    @property
    def decides_old_logprobs(self) -> bool:
        """Whether we tell TRL to compute old log-probs or to leave them out."""
        return self.corrects_in_loss or (self.correction is not None and not self.takes_ratio)

    @property
    def changes_loss(self) -> bool:
        """Whether the loss must be TRL's own for this plan to work."""
        return self.replaces_ratio or self.reference is not None or self.corrects_in_loss

    def hide_captured(self, batch: Batch) -> None:
        """Takes captured log-probs out of a batch that nobody relies on them in, so that the off-policy mask of TRL's loss
        sees what it sees without us."""
        if self.captures and not self.needs_engine:
            del batch["sampling_per_token_logps"]


def make_plan(trainer: Any) -> Plan:
    """Reads the plan of a [`ConsistentGRPOTrainer`] off its settings, its model and its engine.

    Raises:
        `ValueError`: settings that contradict each other; names the field, the value and what to set instead.
    """
    args, use_vllm = trainer.args, trainer.use_vllm
    correction = correction_of(args)
    if correction is not None and not correction.acts:
        correction = None
    replaces_ratio = correction is not None and _is_ours(args, correction)
    old_logprobs = _source_of_old_logprobs(trainer, correction, replaces_ratio)
    kl_ratio = option(args, "kl_bias_correction_ratio")
    relies = replaces_ratio or old_logprobs == "rollout" or kl_ratio == "sampling"
    decodes = None if use_vllm or trainer.rollout_func else trainer.generation_config.get_generation_mode()
    plan = Plan(
        correction=correction,
        replaces_ratio=replaces_ratio,
        old_logprobs=old_logprobs,
        captures=decodes == GenerationMode.SAMPLE,
        needs_engine=correction is not None or relies,
        relies_on_engine=relies,
        sampling=sampling_to_follow(trainer),
        reference=_reference_term(trainer),
        scales_late=old_logprobs != "recompute" and scales_late(args, correction),
        takes_ratio=use_vllm,
        excludes_rejected=option(args, "correction_reject_baseline") == "exclude",
        explains_default=option(args, "correction") is None and correction == TRL_DEFAULT,
        loss=LossShape(
            args.loss_type, trainer.max_completion_length, args.steps_per_generation, trainer.accelerator.num_processes
        ),
        ratio_logs=_ratio_logs(args) if use_vllm and old_logprobs != "recompute" else (),
    )
    if plan.needs_engine and decodes not in (None, GenerationMode.SAMPLE):
        raise ValueError(
            f"{RELIANCE} need the log-probs of sampled tokens, but `generation_kwargs={args.generation_kwargs}` decodes by "
            f"{decodes.value!r}. Sample, or leave these unset."
        )
    return plan


def _is_ours(args: Any, correction: Correction) -> bool:
    """Whether a correction is more than TRL computes by its own fields."""
    in_trl_fields = Correction(correction.level, correction.action, correction.lower, correction.upper)
    known_to_trl = args.vllm_importance_sampling_mode in TRL_MODES
    return option(args, "correction") is not None or not known_to_trl or correction != in_trl_fields


def _ratio_logs(args: Any) -> tuple[tuple[str, str], ...]:
    known = args.vllm_importance_sampling_mode in TRL_MODES  # else TRL logs the raw ratio
    ratio = "correction/weight" if known else "mismatch/ratio"
    pairs = [(f"importance_sampling_ratio/{name}", f"{ratio}/{name}") for name in ("min", "mean", "max")]
    pairs += [(f"sampling_logp_difference/{name}", f"mismatch/abs_diff/{name}") for name in ("mean", "max")]
    return tuple((f"sampling/{name}", key) for name, key in pairs)


def _reference_term(trainer: Any) -> ReferenceTerm | None:
    args = trainer.args
    term = ReferenceTerm(
        option(args, "kl_estimator"),
        option(args, "kl_bias_correction_ratio"),
        args.use_bias_correction_kl,
        trainer.importance_sampling_level,
    )
    is_trl_s = term.estimator == "k3" and term.ratio == "old"
    return None if trainer.beta == 0.0 or is_trl_s else term


def _source_of_old_logprobs(trainer: Any, correction: Correction | None, replaces_ratio: bool) -> str:
    """`recompute`, `reuse` or `rollout`; says so, once, where `auto` would have liked to reuse."""
    asked, tells = option(trainer.args, "old_logprobs"), trainer.accelerator.is_main_process
    if asked == "recompute" or (asked == "auto" and not replaces_ratio):
        return "recompute"
    if asked == "rollout":
        refuse(asked, _against_in_loss(trainer, correction, asked))
        if correction is not None and correction.action == "truncate" and tells:
            logger.warning(
                "With `old_logprobs='rollout'`, the ratio of the loss is pi / mu already and every weight is 1: the "
                "bounds of the truncation have no effect, those of the loss (`epsilon`) act in their place."
            )
        return asked
    reason = _against_in_loss(trainer, correction, "reuse")
    if reason is None and (dropout := dropout_in(trainer.model)) is not None:
        reason = f"dropout is on (in {dropout!r}), so that two forwards differ"
    if reason is None:
        logger.info("The old log-probs are read from the training forward.")
        return "reuse"
    if asked == "reuse":
        refuse(asked, reason)
    if tells:
        logger.warning(
            f"The old log-probs take an extra forward per rollout batch, and cannot be read from the training forward: "
            f"{reason}. `old_logprobs='recompute'` silences this."
        )
    return "recompute"


def _against_in_loss(trainer: Any, correction: Correction | None, source: str) -> str | None:
    """Why old log-probs cannot come from `source`, by the settings and by how the trainer runs; `None` if they can."""
    reason = obstacle(trainer.args, correction, source)
    if reason is None and scales_late(trainer.args, correction):
        if trainer.aux_loss_enabled or trainer.is_deepspeed_enabled:
            name = "the auxiliary loss of the router" if trainer.aux_loss_enabled else "DeepSpeed"
            reason = f"with rejections, the gradient is scaled after the last micro-batch, which {name} does not allow"
    return reason


def sampling_to_follow(trainer: Any) -> Sampling | None:
    """What the trainer's log-probs are to follow; `None` where the engine samples from the model's distribution."""
    if not option(trainer.args, "rollout_support"):
        return None
    engine = "vllm" if trainer.rollout_func is not None else engine_of(trainer.args)
    sampling = sampling_of(trainer.args, engine)
    if sampling.counts_outputs and trainer.tools:
        raise ValueError(
            "`presence_penalty` and `frequency_penalty` count the tokens of one turn, which `rollout_support` cannot tell "
            "apart: leave them out where tools take turns with the model."
        )
    if is_deepspeed_zero3_enabled():
        raise ValueError("`rollout_support=True` does not work with DeepSpeed ZeRO-3 yet: leave it unset.")
    return sampling if sampling.reshapes else None
