# SPDX-License-Identifier: Apache-2.0
"""What is refused when a trainer is built, because it could not do what was asked for."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from ..config import option
from ..rollout.audit import audit, report
from ..rollout.checks import Finding
from ..rollout.completions import check_completions, check_logprobs_mode
from ..rollout.engine import EngineSettings
from ..rollout.precision import check_deterministic, check_precision, compute_dtype
from ..rollout.transformers import settings
from .plan import Plan


RolloutFunc = Callable[..., dict[str, Any]]


def prepare(args: Any) -> None:
    """Asks for deterministic kernels, if the config does, before TRL builds anything.

    Raises:
        `ValueError`: this machine has none.
    """
    if args is not None and option(args, "rollout_deterministic"):
        check_deterministic(args.device)
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # for good: kernels read it whenever they run


def checked(rollout_func: RolloutFunc) -> RolloutFunc:
    """A `rollout_func` whose completions are refused if they do not fit their log-probs."""

    @functools.wraps(rollout_func)
    def with_checks(*args: Any, **kwargs: Any) -> dict[str, Any]:
        output = rollout_func(*args, **kwargs)
        if "completion_ids" in output:  # if not, TRL says which keys it wants
            check_completions(output["completion_ids"], output.get("logprobs"))
        return output

    return with_checks


def check_trainer(trainer: Any, plan: Plan, has_trl_loss: bool) -> None:
    """Refuses a plan that the trainer it is for cannot follow.

    Args:
        trainer ([`ConsistentGRPOTrainer`]): Built by TRL.
        plan ([`Plan`]): Made for it.
        has_trl_loss (`bool`): Whether the loss it inherits is `GRPOTrainer`'s.
    """
    if plan.changes_loss and not has_trl_loss:
        raise ValueError(
            f"{type(trainer).__name__} inherits a loss that is not `GRPOTrainer`'s and may ignore weights: leave "
            "`correction`, `old_logprobs` and the `kl_*` options unset, or put the weights into that loss yourself."
        )
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if option(trainer.args, "ref_reset_steps") is not None and sharded:
        raise ValueError("`ref_reset_steps` does not work with FSDP and DeepSpeed yet: leave it unset.")


def engine_settings(trainer: Any) -> EngineSettings:
    """What the rollout engine of a trainer says of itself; nothing where a `rollout_func` is the engine."""
    if trainer.use_vllm:
        return getattr(trainer.vllm_generation, "settings", EngineSettings())
    return EngineSettings() if trainer.rollout_func is not None else settings(trainer)


def check_engine(trainer: Any, plan: Plan, engine: EngineSettings) -> list[Finding]:
    """Refuses an engine that is not what was asked for, and says and returns what else makes it disagree.

    Raises:
        `ValueError`: the engine's precision, head or log-probs are not those that the config asks for; or
        `rollout_audit="strict"` found a reason for a mismatch.
    """
    args = trainer.args
    check_precision(option(args, "rollout_precision"), compute_dtype(trainer.model, trainer.accelerator), engine.dtype)
    if option(args, "rollout_fp32_lm_head") and engine.head_dtype not in (None, torch.float32):
        raise ValueError(
            f"`rollout_fp32_lm_head=True`, but the head of the rollout engine computes in {engine.head_dtype}. Restart the "
            """vLLM server with `--hf-overrides '{"head_dtype": "float32"}'`."""
        )
    if plan.relies_on_engine:
        check_logprobs_mode(engine.logprobs_mode)
    if (audited := option(args, "rollout_audit")) == "off":
        return []
    findings = audit(trainer, engine)
    if audited == "strict" or trainer.accelerator.is_main_process:
        report(findings, strict=audited == "strict")
    return findings
