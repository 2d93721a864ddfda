# SPDX-License-Identifier: Apache-2.0
"""The protocol of a rollout engine, and how another engine takes the place of vLLM.

`vllm.py` (colocated or behind a server) and `synthetic.py` implement the protocol. With `use_vllm=False`, TRL calls
the model's `generate` itself and no object stands between the two: `transformers.py` then captures the log-probs and
says what the settings are.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ..upstream.trl import generation_class_replaced


@dataclass(frozen=True)
class EngineSettings:
    """What an engine says of itself; `None` where it does not.

    Args:
        dtype (`torch.dtype`, *optional*): In which it multiplies matrices.
        head_dtype (`torch.dtype`, *optional*): In which it computes logits.
        logprobs_mode (`str`, *optional*): Of vLLM.
        quantization (`str`, *optional*): Of the weights or of the KV cache.
        model_class (`str`, *optional*): The class that runs the model.
    """

    dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    logprobs_mode: str | None = None
    quantization: str | None = None
    model_class: str | None = None


@runtime_checkable
class RolloutEngine(Protocol):
    """What a trainer needs of the object that samples its completions, `trainer.vllm_generation`.

    TRL calls the two methods. The two properties are read by `ConsistentGRPOTrainer` only.
    """

    @property
    def settings(self) -> EngineSettings:
        """What the engine computes in, and which log-probs it reports."""

    @property
    def weight_fingerprint(self) -> str | None:
        """A hash of the weights that the engine samples with; `None` if it does not compute one."""

    def sync_weights(self) -> None:
        """Makes the engine sample with the weights that the trainer has now.

        TRL calls it before the first rollout after an optimizer step.
        """

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[Any] | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float | None]]] | None, list[list[list[int]]] | None]:
        """Samples one completion for each prompt.

        Args:
            prompts (`list[list[int]]`): Token ids; each prompt stands there `num_generations` times.
            images (`list`, *optional*): The images of each prompt.
            num_generations (`int`): How many completions of the same prompt follow each other.
            profiler (context manager, *optional*): Measures the time of the sampling.

        Returns:
            Prompt ids; completion ids, `(B, T)` ragged; their log-probs, `(B, T, 1)` ragged and `None` for a token
            without one; and the ids that these log-probs belong to, of the same shape.
        """


_ANOTHER_STANDS_IN: ContextVar[bool] = ContextVar("another engine stands in for vLLM", default=False)


@contextlib.contextmanager
def engine_replaced(build: Callable[..., RolloutEngine]) -> Iterator[None]:
    """Within the block, trainers with `use_vllm=True` (ours or TRL's own) are built with another engine than vLLM.

    Args:
        build (`Callable[..., RolloutEngine]`):
            Returns the engine; called with the arguments of `trl.generation.vllm_generation.VLLMGeneration`.
    """
    before = _ANOTHER_STANDS_IN.set(True)
    try:
        with generation_class_replaced(build):
            yield
    finally:
        _ANOTHER_STANDS_IN.reset(before)


def engine_is_replaced() -> bool:
    """Whether this is a block of [`engine_replaced`]."""
    return _ANOTHER_STANDS_IN.get()
