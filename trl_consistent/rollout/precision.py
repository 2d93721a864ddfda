# SPDX-License-Identifier: Apache-2.0
"""In which dtype a trainer computes, and how an engine is told to compute in the same."""

from collections import Counter
from typing import Any

import torch

from ..upstream.accelerate import mixes_precision


PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Values of `rollout_precision` that set both sides."""


def weights_dtype(model: Any) -> torch.dtype:
    """The dtype of most weights of a model; not that of embedding and head, which may be kept wider."""
    apart = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m for p in m.parameters()}
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in apart:
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def compute_dtype(model: Any, accelerator: Any) -> torch.dtype:
    """The dtype in which a trainer multiplies matrices.

    Args:
        model: The trained model, adapters included.
        accelerator (`accelerate.Accelerator`): That of the trainer.
    """
    mixed = PRECISIONS.get(accelerator.mixed_precision) if mixes_precision(accelerator) else None
    return mixed or weights_dtype(model)


def check_precision(precision: str, trainer: torch.dtype, engine: torch.dtype | None) -> None:
    """Refuses a trainer or an engine that does not compute in the dtype that was asked for.

    Args:
        precision (`str`): `rollout_precision`.
        trainer (`torch.dtype`): In which the trainer computes.
        engine (`torch.dtype`, *optional*): The same of the engine, where it says so.

    Raises:
        `ValueError`: with how to load the model, or to start the server.
    """
    if precision in PRECISIONS and trainer != PRECISIONS[precision]:
        name = str(PRECISIONS[precision]).removeprefix("torch.")
        raise ValueError(
            f"`rollout_precision={precision!r}`, but the trainer computes in {trainer}. Either its weights are in that dtype: "
            f"load them with `model_init_kwargs={{'dtype': '{name}'}}` (`--dtype {name}` in TRL's scripts). Or accelerate's "
            "mixed precision is not what was asked for: the launcher sets another, or this is float16 on a CPU, where there "
            "is none."
        )
    if precision != "engine" and engine not in (None, trainer):
        raise ValueError(
            f"`rollout_precision={precision!r}`, but the rollout engine computes in {engine} and the trainer in {trainer}. "
            f"Restart the vLLM server with `--dtype {str(trainer).removeprefix('torch.')}`."
        )


def precision_arguments(precision: str, fp32_lm_head: bool, trainer: torch.dtype) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that put the engine into the trainer's precision.

    Args:
        precision (`str`): `rollout_precision`.
        fp32_lm_head (`bool`): `rollout_fp32_lm_head`.
        trainer (`torch.dtype`): In which the trainer computes.
    """
    arguments: dict[str, Any] = {}
    if precision != "engine":
        arguments["dtype"] = str(trainer).removeprefix("torch.")
    if fp32_lm_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    return arguments


def named_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that `"bfloat16"` or `"torch.bfloat16"` names; `None` for what is none."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def check_deterministic(device: torch.device) -> None:
    """Refuses hardware on which vLLM has no batch-invariant kernels.

    Raises:
        `ValueError`: names the hardware.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return
    found = f"compute capability {torch.cuda.get_device_capability(device)}" if device.type == "cuda" else device.type
    raise ValueError(
        "`rollout_deterministic=True` needs vLLM's batch-invariant kernels, which exist for NVIDIA GPUs of compute "
        f"capability 8.0 and above; this is {found}. Leave it unset: the mismatch that batching makes is measured "
        "(`mismatch/*`) and corrected (`correction`) all the same."
    )
