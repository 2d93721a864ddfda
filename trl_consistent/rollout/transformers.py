# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the tokens that `transformers` samples, from `generate` and from continuous batching, without vLLM.

A decoder with a KV cache and the training forward compute the same log-probs in different orders, so this engine has a
mismatch, too: the last digits in float32, more in bfloat16.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from ..config import option
from ..upstream.substitution import substituted
from ..upstream.transformers import batched_outputs_seen, last_logits_processor
from .engine import EngineSettings
from .precision import compute_dtype, weights_dtype


class SampledLogprobs:
    """The log-probs of what one `generate` samples; the last of its logits processors.

    Holds the scores of a single position at a time, `(B, V)`: the token they lead to is known one position later.
    """

    def __init__(self) -> None:
        self._scores: Tensor | None = None
        self._columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns `scores` as they are.

        Args:
            input_ids (`torch.Tensor` of shape `(B, L)`): Prompt and completion so far.
            scores (`torch.Tensor` of shape `(B, V)`): What the next token is sampled from, after all processors.
        """
        if self._scores is not None:
            self._columns.append(self._of(input_ids[:, -1]))
        self._scores = scores
        return scores

    def _of(self, ids: Tensor) -> Tensor:
        assert self._scores is not None
        scores = self._scores.float()
        # log mu(y) = s_y - log sum_v exp(s_v)
        return scores.gather(-1, ids[:, None])[:, 0] - scores.logsumexp(dim=-1)

    def collect(self, completion_ids: list[list[int]]) -> list[list[float]] | None:
        """The log-prob of every token of the completions; `None` from a model with a `generate` of its own.

        Args:
            completion_ids (`list[list[int]]`): What was sampled, `(B, T)` ragged: cut after the first eos.
        """
        if self._scores is None:
            return None
        last = [ids[-1] if len(ids) > len(self._columns) else 0 for ids in completion_ids]
        columns = [*self._columns, self._of(torch.tensor(last, device=self._scores.device))]
        self._scores = None
        logps = torch.stack(columns, dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(logps, completion_ids, strict=True)]


class BatchedLogprobs:
    """The log-probs that continuous batching computes; asks for them, and keeps them."""

    def __init__(self) -> None:
        self._logps: list[list[float]] = []

    def __call__(self, outputs: Any) -> None:
        self._logps = [list(output.logprobs) for output in outputs.values()]

    def collect(self, completion_ids: list[list[int]]) -> list[list[float]]:
        """As of [`SampledLogprobs`]."""
        return [row[: len(ids)] for row, ids in zip(self._logps, completion_ids, strict=True)]


@contextlib.contextmanager
def captured(continuous_batching: bool) -> Iterator[SampledLogprobs | BatchedLogprobs]:
    """While the block runs one generation of `transformers`, keep the log-probs of its tokens."""
    if continuous_batching:
        batched = BatchedLogprobs()
        with batched_outputs_seen(batched):
            yield batched
    else:
        sampled = SampledLogprobs()
        with last_logits_processor(sampled):
            yield sampled


@contextlib.contextmanager
def _float32_head(model: Any) -> Iterator[None]:
    """Within the block, the head of a model with `cast_lm_head_to_fp32` computes in float32 under mixed precision, too, as
    it does in TRL's training forward."""
    head = model.get_output_embeddings()
    forward = head.forward

    def outside(hidden_states: Tensor) -> Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return forward(hidden_states)

    with substituted(head, forward=outside):
        yield


@contextlib.contextmanager
def decoding(trainer: Any) -> Iterator[SampledLogprobs | BatchedLogprobs]:
    """[`captured`], in the precision that the options of `trainer` ask for."""
    with contextlib.ExitStack() as stack:
        if option(trainer.args, "rollout_precision") != "engine":
            stack.enter_context(trainer.accelerator.autocast())
        if option(trainer.args, "rollout_fp32_lm_head"):
            stack.enter_context(_float32_head(trainer.model))
        yield stack.enter_context(captured(trainer.use_transformers_continuous_batching))


def settings(trainer: Any) -> EngineSettings:
    """What `transformers` computes in when `trainer` generates."""
    # accelerate puts mixed precision around the forward of the model it was given, not of what adapters wrap
    escapes = is_peft_model(trainer.model) and not trainer.use_transformers_continuous_batching
    follows = not escapes or option(trainer.args, "rollout_precision") != "engine"
    weights = weights_dtype(trainer.model)
    dtype = compute_dtype(trainer.model, trainer.accelerator) if follows else weights
    # and under it, the head that TRL widens narrows again
    widened = trainer.args.cast_lm_head_to_fp32 and (option(trainer.args, "rollout_fp32_lm_head") or dtype == weights)
    return EngineSettings(dtype=dtype, head_dtype=torch.float32 if widened else dtype)
