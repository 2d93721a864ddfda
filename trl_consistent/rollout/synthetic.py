# SPDX-License-Identifier: Apache-2.0
"""A rollout engine to try things with: it samples from the trainer's own model, and its only mismatch is planted.

A trainer that is built within [`synthetic_engine`] trains in seconds on a small model, without vLLM, a server or a
GPU. Because you know the fault, you know what metrics, alerts, corrections and reports should say about it.

```python
from trl_consistent.rollout.synthetic import gaussian_noise, synthetic_engine

with synthetic_engine(gaussian_noise(0.05)):
    trainer = ConsistentGRPOTrainer(model, reward_funcs=..., args=ConsistentGRPOConfig(..., use_vllm=True))
trainer.train()
```

What can be planted:

- a gap in the reported log-probs: a function from this file, or any function of your own, as `plant`;
- stale weights: `sync_every=4` takes every fourth weight sync only;
- a temperature that the trainer does not know of: `actual_temperature=0.7`;
- a truncated distribution: `top_p`, `top_k`, `min_p` or `repetition_penalty` in the training arguments, which this
  engine follows as vLLM does, and the trainer only with `rollout_support`;
- what the engine says of itself: `settings=EngineSettings(dtype=torch.bfloat16)` is what `rollout_audit` then reads.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..upstream.trl import colocated_engine_stub, server_client_stub
from .engine import EngineSettings, engine_replaced


logger = logging.getLogger(__name__)

Plant: TypeAlias = Callable[[list[int], list[float]], list[float | None]]
"""Takes the ids of one completion and their true log-probs, and returns the log-probs that the engine reports."""

# In the order of vLLM: processor, name of the setting, and the value that changes nothing.
_PROCESSORS: tuple[tuple[Any, str, float | None], ...] = (
    (RepetitionPenaltyLogitsProcessor, "repetition_penalty", 1.0),
    (TemperatureLogitsWarper, "temperature", None),
    (MinPLogitsWarper, "min_p", None),
    (TopKLogitsWarper, "top_k", 0),
    (TopPLogitsWarper, "top_p", 1.0),
)


def healthy(ids: list[int], logps: list[float]) -> list[float | None]:
    """The plant without a fault: reports the log-probs that the completion was sampled with."""
    return list(logps)


def gaussian_noise(scale: float, seed: int = 7) -> Plant:
    """A plant that adds Gaussian noise to the mismatch log-ratio of every token; `scale` is in nats.

    Kernels that round differently do the same. The noise is the same in every run with the same `seed`.
    """
    generator = torch.Generator().manual_seed(seed)

    def plant(ids: list[int], logps: list[float]) -> list[float | None]:
        return [logp - scale * torch.randn((), generator=generator).item() for logp in logps]

    return plant


def constant_offset(nats: float) -> Plant:
    """A plant that makes the mismatch log-ratio of every token `nats`.

    Sign: positive when the trainer finds the tokens likelier than the engine says.
    """
    return lambda ids, logps: [logp - nats for logp in logps]


def shifted_logprobs(by: int = 1) -> Plant:
    """A plant that reports each log-prob `by` positions late, or early if `by` is negative.

    Tokens at the edge, which get no log-prob, are unscored.
    """

    def plant(ids: list[int], logps: list[float]) -> list[float | None]:
        shifted = {position + by: logp for position, logp in enumerate(logps)}
        return [shifted.get(position) for position in range(len(logps))]

    return plant


def bfloat16_logprobs(ids: list[int], logps: list[float]) -> list[float | None]:
    """A plant that rounds the reported log-probs to bfloat16, as an engine with a head in bfloat16 does."""
    return torch.tensor(logps).bfloat16().tolist()


def unscored_tokens(every: int) -> Plant:
    """A plant that leaves out the log-prob of every so-many-th token of a completion."""
    return lambda ids, logps: [None if (index + 1) % every == 0 else logp for index, logp in enumerate(logps)]


class SyntheticEngine:
    """
    A [`RolloutEngine`] that samples from the model of the trainer itself; [`synthetic_engine`] puts it into trainers.

    The model runs once for each token of each completion, without a KV cache, in evaluation mode: use small models and
    short completions. Temperature, truncation and repetition penalty are those of vLLM, in vLLM's order.

    Args:
        model (`torch.nn.Module`): The trained model, in one piece: neither FSDP nor DeepSpeed works.
        accelerator (`accelerate.Accelerator`): That of the trainer. Each process samples with a seed of its own.
        processing_class ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer, for the id that ends a completion.
        max_completion_length (`int`): Number of tokens after which a completion is cut.
        plant (`Plant`, *optional*, defaults to [`healthy`]): The planted fault.
        actual_temperature (`float`, *optional*): The temperature to sample at, whatever the trainer asks for.
        sync_every (`int`, *optional*, defaults to `1`): The engine takes the first of every `sync_every` weight syncs.
        settings ([`EngineSettings`], *optional*): What the engine says of itself; by default nothing.
        generation_kwargs (`dict[str, Any]`, *optional*): As of vLLM; goes before arguments of the same name.
        **kwargs: The other arguments of TRL's `VLLMGeneration`.
    """

    def __init__(
        self,
        model: Any,
        accelerator: Any,
        processing_class: Any,
        *,
        max_completion_length: int,
        plant: Plant = healthy,
        actual_temperature: float | None = None,
        sync_every: int = 1,
        settings: EngineSettings | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        if accelerator.distributed_type.value in ("FSDP", "DEEPSPEED"):
            raise ValueError(
                "The synthetic engine needs the whole model in each process, which "
                f"{accelerator.distributed_type.value} does not keep there: launch without it, or train with vLLM."
            )
        if sync_every < 1:
            raise ValueError(
                f"`sync_every` is {sync_every}: the engine can take every weight sync (1) or fewer (2, 3, …)."
            )
        self.model = model
        self.accelerator = accelerator
        self.processing_class = processing_class
        self.max_completion_length = max_completion_length
        self.plant = plant
        self.sync_every = sync_every
        self.settings = settings or EngineSettings()
        self.generator = torch.Generator().manual_seed(1234 + accelerator.process_index)
        asked = {**kwargs, **(generation_kwargs or {})}
        if actual_temperature is not None:
            asked["temperature"] = actual_temperature
        self._processors = LogitsProcessorList(
            processor(asked[name]) for processor, name, neutral in _PROCESSORS if asked.get(name, neutral) != neutral
        )
        self._warn_of_ignored(generation_kwargs or {}, kwargs.get("structured_outputs_regex"))
        self._syncs = 0
        self._held_weights: dict[str, Tensor] | None = None  # of the last sync that was taken; `None`: the trainer's
        self.vllm_client = server_client_stub(self.settings.logprobs_mode or "processed_logprobs")
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30)
        self.llm = colocated_engine_stub(kwargs.get("max_model_length") or longest)

    @staticmethod
    def _warn_of_ignored(generation_kwargs: dict[str, Any], structured_outputs_regex: str | None) -> None:
        known = {name for _, name, _ in _PROCESSORS}
        if ignored := sorted(generation_kwargs.keys() - known):
            logger.warning(f"The synthetic engine ignores {', '.join(ignored)} of `generation_kwargs`.")
        if structured_outputs_regex is not None:
            logger.warning("The synthetic engine ignores `vllm_structured_outputs_regex`.")

    @property
    def weight_fingerprint(self) -> str | None:
        """`None`: the engine has no weights of its own to tell apart."""
        return None

    def sync_weights(self) -> None:
        """Takes the trainer's weights, if it is time: see `sync_every`."""
        if self.sync_every > 1 and self._syncs % self.sync_every == 0:
            self._held_weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._syncs += 1

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple:
        """As of [`RolloutEngine`]."""
        if images is not None:
            raise ValueError("The synthetic engine takes text only, and these prompts have images: train with vLLM.")
        training = self.model.training
        self.model.eval()
        completions: list[list[int]] = []
        reported: list[list[list[float | None]]] = []
        try:
            with profiler or contextlib.nullcontext():
                for prompt in prompts:
                    ids, logps = self._sampled(prompt)
                    completions.append(ids)
                    reported.append([[logp] for logp in self.plant(ids, logps)])
        finally:
            self.model.train(training)
        return prompts, completions, reported, [[[token] for token in ids] for ids in completions]

    def _sampled(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """One completion of `prompt`, and the log-probs of its tokens."""
        ids: list[int] = []
        values: list[float] = []
        device = next(self.model.parameters()).device
        while len(ids) < self.max_completion_length:
            tokens = torch.tensor([[*prompt, *ids]], device=device)
            logits = self._logits(tokens)[:, -1].float()
            logps = self._processors(tokens, logits)[0].log_softmax(-1).cpu()
            ids.append(int(torch.multinomial(logps.exp(), 1, generator=self.generator).item()))
            values.append(logps[ids[-1]].item())
            if ids[-1] == self.processing_class.eos_token_id:
                break
        return ids, values

    def _logits(self, tokens: Tensor) -> Tensor:
        if self._held_weights is None:
            return self.model(input_ids=tokens).logits
        return torch.func.functional_call(self.model, self._held_weights, kwargs={"input_ids": tokens}).logits


def synthetic_engine(
    plant: Plant | None = None,
    *,
    actual_temperature: float | None = None,
    sync_every: int = 1,
    settings: EngineSettings | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Within the block, trainers with `use_vllm=True` (ours or TRL's own) get a [`SyntheticEngine`] in place of vLLM.

    A trainer keeps the engine that it was built with: `train` may be called after the block. vLLM need not be
    installed.

    Args:
        plant (`Plant`, *optional*): The planted fault, such as `gaussian_noise(0.05)`; by default there is none.
        actual_temperature (`float`, *optional*): The temperature to sample at, whatever the trainer asks for.
        sync_every (`int`, *optional*, defaults to `1`): With 4, the engine samples with weights up to 3 steps old.
        settings ([`EngineSettings`], *optional*): What the engine says of itself; by default nothing.
    """
    engine = functools.partial(
        SyntheticEngine,
        plant=plant or healthy,
        actual_temperature=actual_temperature,
        sync_every=sync_every,
        settings=settings,
    )
    return engine_replaced(engine)
