# SPDX-License-Identifier: Apache-2.0
"""What in the settings makes trainer and engine disagree: one function a reason."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from trl.data_utils import is_conversational

from ..upstream.transformers import dropout_in
from ..upstream.trl import first_prompt, first_prompt_ids, text_tokenizer
from .engine import EngineSettings
from .precision import compute_dtype
from .reshaping import FOLLOWED, unfollowed_sampling


HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Finding:
    """One reason for a mismatch.

    Args:
        code (`str`): Its name; never used for another one.
        found (`str`): What is set.
        cost (`str`): What it costs: measured by `scripts/dtype_table.py`, by hand, or from the literature.
        remedy (`str`): The setting that removes it.
        warns (`bool`): Whether `rollout_audit="strict"` refuses it.
    """

    code: str
    found: str
    cost: str
    remedy: str
    warns: bool = True


def _dtype(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    ours = compute_dtype(trainer.model, trainer.accelerator)
    if engine.dtype in (None, ours):
        if engine.dtype == torch.bfloat16:
            yield Finding(
                "bfloat16-twice",
                "trainer and engine both compute in bfloat16, and round differently",
                "SmolLM2-135M: mean |d| 0.058, max 0.5; a float16 on both sides, 0.007 and 0.05",
                "rollout_precision='fp16' on GPUs (loss scaling included), or 'fp32' where memory allows",
                warns=False,
            )
        return
    server = trainer.args.use_vllm and trainer.vllm_mode == "server"
    match = f"--dtype {str(ours).removeprefix('torch.')} for the server" if server else "rollout_precision='match'"
    yield Finding(
        "dtype",
        f"the trainer computes in {ours}, the engine in {engine.dtype}",
        "SmolLM2-135M: mean |d| 0.04, max 0.4 for bfloat16 on one side; 0.006 and 0.03 for float16",
        # by other kernels, two roundings to bfloat16 are no better than one
        "rollout_precision='fp32', or 'fp16' on GPUs" if ours == torch.bfloat16 and trainer.args.use_vllm else match,
    )


def _quantized_engine(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    if engine.quantization is not None:
        yield Finding(
            "quantized-engine",
            f"the engine computes with {engine.quantization}",
            "SmolLM2-135M with int8 weights and activations: mean |d| 0.29, max 2.1",
            "correction='fp8', or no quantization",
        )


def _head(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    ours = trainer.args.cast_lm_head_to_fp32
    both = {compute_dtype(trainer.model, trainer.accelerator), engine.dtype}
    if engine.head_dtype is not None and both <= set(HALF) and ours != (engine.head_dtype == torch.float32):
        yield Finding(
            "fp32-head",
            f"the head computes in float32 in the {'trainer' if ours else 'engine'} only",
            "the rounding of logits on one side: a correlation of log-probs of 0.9 instead of 0.99 (MiniMax-M1)",
            "rollout_fp32_lm_head=True"
            if trainer.args.use_vllm and trainer.vllm_mode == "colocate"
            else 'start the server with --hf-overrides \'{"head_dtype": "float32"}\', or cast_lm_head_to_fp32=False',
        )


def _raw_logprobs(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    if engine.logprobs_mode not in (None, "processed_logprobs"):
        yield Finding(
            "raw-logprobs",
            f"the engine reports {engine.logprobs_mode}: before temperature and penalties",
            "every ratio is off; mean |d| 0.5 at temperature 0.7",
            "start the server with --logprobs-mode processed_logprobs",
        )


def _sampling(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    for name, value in unfollowed_sampling(trainer.args).items():
        if name == "temperature":
            yield Finding(
                "temperature",
                f"the engine samples at temperature {value}, the trainer computes at {trainer.temperature}",
                "every ratio is off",
                f"temperature={value} instead of generation_kwargs",
            )
        else:
            yield Finding(
                "reshaped-sampling",
                f"{name}={value} reshapes what the engine samples from; the trainer computes without it",
                "ratios are off by the probability that was cut (0.9 of it kept at top-p 0.8)",
                f"rollout_support=True, or no {name}" if name in FOLLOWED else f"no {name}",
            )


def _dropout(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    if (module := dropout_in(trainer.model)) is not None:
        yield Finding(
            "dropout",
            f"dropout is on in {module!r} where log-probs are computed",
            "lora_dropout=0.05 alone: mean |d| 0.003 to 0.007 by step 3 in float32",
            "lora_dropout=0, or disable_dropout=True",
        )


def _quantized_base(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    if is_peft_model(trainer.model) and getattr(trainer.model.base_model.model, "is_quantized", False):
        yield Finding(
            "quantized-base",
            "adapters on a quantized base: what the engine gets is merged, and rounded to the base's few bits again",
            "other completions than the trainer's (trl#3466)",
            "a base in bfloat16",
        )


def _half_adapters(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    if not is_peft_model(trainer.model):
        return
    dtypes = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    if half := dtypes & set(HALF):
        yield Finding(
            "half-adapters",
            f"adapters are trained in {half.pop()}",
            "updates smaller than 0.4 % of a weight round away",
            "autocast_adapter_dtype=True (peft's default), or a base in float32 with bf16=True",
        )
    elif trainer.use_vllm and engine.dtype in HALF:
        yield Finding(
            "rounded-merge",
            f"the engine holds base + BA rounded to {engine.dtype}, the trainer adds the two unrounded",
            "updates smaller than 0.4 % of a weight show late; no more than the rounding of any weight",
            "rollout_precision='fp32' where memory allows",
            warns=False,
        )


def _moe(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    text = trainer.model.config.get_text_config()
    experts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    if any(isinstance(count, int) and count > 1 for count in experts):
        yield Finding(
            "moe-routing",
            "a mixture of experts, whose routers choose anew in the trainer",
            "3.5 % of the choices flip in bfloat16: mean |d| 0.087 against 0.025 with the same experts",
            "correction='moe' bounds what it does; replaying the router is to come",
        )


def _model_implementation(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    if engine.model_class is not None and engine.model_class.startswith("Transformers"):
        yield Finding(
            "model-implementation",
            f"vLLM runs {engine.model_class}, the layers of transformers under its own attention",
            "slower; weights stream under other names, which the check of the first sync looks at",
            "vllm_model_impl='vllm', where vLLM has the model",
            warns=False,
        )


def _absolute_positions(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    names = {"wpe", "embed_positions", "position_embeddings", "pos_emb"}
    for name, module in trainer.model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in names:
            yield Finding(
                "absolute-positions",
                f"{name!r} embeds absolute positions, and TRL pads prompts on the left without telling it",
                "padded rows are scored at other positions than they were sampled at (trl#6800)",
                "per_device_train_batch_size=1 or prompts of one length, or a model with rotary positions",
            )
            return


def _stops(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    overrides = trainer.args.generation_kwargs or {}
    extra = {name: overrides[name] for name in ("stop", "stop_token_ids", "eos_token_id") if overrides.get(name)}
    declared = trainer.model.config.get_text_config().eos_token_id
    declared = {declared} if isinstance(declared, int) else set(declared or ())
    if trainer.use_vllm and (unknown := declared - set(trainer.eos_token_ids)):
        extra["eos_token_id of the model's config"] = sorted(unknown)
    if extra:
        yield Finding(
            "extra-stops",
            f"the engine also stops at {extra}, the trainer knows {sorted(trainer.eos_token_ids)}",
            "such completions count as truncated (`completions/clipped_ratio`), and `mask_truncated_completions` drops "
            "them",
            "name the ids in the model's generation_config",
        )


def _bos(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    tokenizer = text_tokenizer(trainer)
    bos = tokenizer.bos_token_id
    if bos is None or not (ids := first_prompt_ids(trainer)):
        return
    leading = sum(1 for _ in itertools.takewhile(lambda token: token == bos, ids))
    wanted = tokenizer("a")["input_ids"][:1] == [bos]
    if leading > 1 or (wanted and leading == 0):
        yield Finding(
            "bos",
            f"prompts begin with {leading} {tokenizer.bos_token!r}"
            + (", and this tokenizer wants one" if leading == 0 else ""),
            "both engines see the same tokens, but not those the model was trained on",
            "a chat template or prompts with one" if leading else "a chat template that begins with it",
        )


def _chat_template(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    own = getattr(text_tokenizer(trainer), "chat_template", None)
    prompt = first_prompt(trainer)
    if own is None or prompt is None:
        return
    if not is_conversational({"prompt": prompt}):
        found, remedy = "prompts are plain text, though the tokenizer has a chat template", "prompts as messages"
    elif trainer.chat_template not in (None, own):
        found, remedy = (
            "prompts are rendered by TRL's template, not by the tokenizer's",
            "the same one where it is served",
        )
    else:
        return
    yield Finding(
        "chat-template", found, "the trained policy is that of other prompts than it will get", remedy, warns=False
    )


def _casting_batches(trainer: Any, engine: EngineSettings) -> Iterator[Finding]:
    half = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else None
    weights = next(trainer.model.parameters()).dtype
    if trainer.args.use_transformers_continuous_batching and not trainer.use_vllm and half and weights not in HALF:
        yield Finding(
            "casting-batches",
            f"continuous batching casts the trained weights to {half} for good at the first rollout",
            "updates smaller than 0.4 % of a weight round away",
            f"{half}=False, or use_transformers_continuous_batching=False",
        )


CHECKS: tuple[Callable[[Any, EngineSettings], Iterator[Finding]], ...] = (
    _dtype,
    _quantized_engine,
    _head,
    _raw_logprobs,
    _sampling,
    _dropout,
    _quantized_base,
    _half_adapters,
    _casting_batches,
    _moe,
    _model_implementation,
    _absolute_positions,
    _stops,
    _bos,
    _chat_template,
)
