# SPDX-License-Identifier: Apache-2.0
"""What a vLLM engine is started with, and what it says of itself afterwards."""

from collections.abc import Mapping
from typing import Any

import torch

from ..config import option
from ..upstream.vllm import engine_config, engine_model
from .engine import EngineSettings
from .precision import named_dtype, precision_arguments


def engine_arguments(config: Any, trainer: torch.dtype, *, on_cpu: bool, unties_head: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that go before those of TRL.

    Args:
        config ([`ConsistentGRPOConfig`], `GRPOConfig` or `None`): Where the `rollout_*` options are.
        trainer (`torch.dtype`): In which the trainer computes.
        on_cpu (`bool`): Whether the engine computes on the CPU, where compiling the model does not pay.
        unties_head (`bool`): Whether the engine keeps embedding and head apart, which the checkpoint ties.
    """
    given = option(config, "rollout_engine_kwargs") or {}
    precise = precision_arguments(option(config, "rollout_precision"), option(config, "rollout_fp32_lm_head"), trainer)
    overrides = precise.pop("hf_overrides", {})
    arguments = {**({"enforce_eager": True} if on_cpu else {}), **given, **precise}
    if unties_head:
        # The checkpoint holds only one of the two weights; the first sync brings both.
        arguments.setdefault("load_format", "dummy")
        overrides["tie_word_embeddings"] = False
    if overrides:
        arguments["hf_overrides"] = {**(given.get("hf_overrides") or {}), **overrides}
    return arguments


def colocated_settings(llm: Any) -> EngineSettings:
    """What a `vllm.LLM` in this process says of itself."""
    config = engine_config(llm)
    cache_dtype = str(config.cache_config.cache_dtype)
    quantized_cache = f"a KV cache in {cache_dtype}" if cache_dtype.startswith(("fp8", "int8")) else None
    return EngineSettings(
        dtype=config.model_config.dtype,
        head_dtype=config.model_config.head_dtype,
        logprobs_mode=config.model_config.logprobs_mode,
        quantization=config.model_config.quantization or quantized_cache,
        model_class=type(engine_model(llm)).__name__,
    )


def server_settings(server_info: Mapping[str, Any]) -> EngineSettings:
    """What a vLLM server says of itself.

    Args:
        server_info (`Mapping[str, Any]`): Its answer, from `VLLMClient.get_server_info`.
    """
    config = server_info["model_config"]
    overrides = config.get("hf_overrides")
    head = overrides.get("head_dtype", config["dtype"]) if isinstance(overrides, dict) else None
    return EngineSettings(
        dtype=named_dtype(config["dtype"]),
        head_dtype=named_dtype(head),
        logprobs_mode=config["logprobs_mode"],
        quantization=config.get("quantization"),
    )
