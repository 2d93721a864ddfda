# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the distribution a token was drawn from: penalties, min-p, top-k and top-p, renormalised over what is kept.

With truncated sampling the engine reports log-probs over the tokens it kept, and the mean ratio to log-probs over the
whole vocabulary is the probability mass that was kept, not 1. Here the trainer's logits go through the same steps, in
tiles, so that (batch, tokens, vocabulary) never exists. `metrics/measure.py` counts what the two sides keep differently.

Shapes: N positions, V vocabulary, P and O tokens of prompt and output before a position; B rows of L tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable


_TRANSFORMERS = ("top_k", "top_p", "min_p")
ORDERS = {"vllm": ("min_p", "top_k", "top_p"), "transformers": _TRANSFORMERS, "continuous_batching": _TRANSFORMERS}
"""What each engine truncates by, in its order: top-p looks at the mass that is left by then. Penalties come first, then
the temperature."""

NOTHING = -1
"""An id that is no token."""


@dataclass(frozen=True)
class Sampling:
    """What shapes the distribution that tokens are drawn from, besides the temperature; the defaults change nothing.

    Example: `Sampling(top_p=0.8)` keeps the likeliest tokens up to the one with which their mass reaches 0.8.
    """

    top_p: float = 1.0
    """Mass to keep. The token that crosses it stays."""
    top_k: int = 0
    """Number of tokens to keep, with all that tie with the last one; 0 and below keep all."""
    min_p: float = 0.0
    """Smallest probability to keep, as a share of the largest, inclusive."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens seen before, prompt included, and multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time the token was generated."""
    order: tuple[str, ...] = ORDERS["vllm"]
    """One of [`ORDERS`]."""

    @property
    def penalizes(self) -> bool:
        """Whether the distribution depends on earlier tokens beyond the model."""
        return self.repetition_penalty != 1 or self.counts_outputs

    @property
    def counts_outputs(self) -> bool:
        """Whether it matters where the prompt ends."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def reshapes(self) -> bool:
        """Whether the distribution differs from that of the model at all."""
        return self.penalizes or self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def penalized(
    logits: Float[Tensor, "N V"], prompt: Int[Tensor, "N P"], output: Int[Tensor, "N O"], sampling: Sampling
) -> Float[Tensor, "N V"]:
    """Logits after the penalties, before the temperature. Differentiable.

    Args:
        logits (`torch.Tensor` of shape `(N, V)`): Logits of the model.
        prompt, output (`torch.Tensor` of shape `(N, P)` and `(N, O)`): Ids before each position; `NOTHING` is ignored.
        sampling ([`Sampling`]): The penalties.
    """

    vocabulary = logits.shape[1]
    slots = (len(logits), vocabulary + 1)  # the last one for `NOTHING`
    if sampling.repetition_penalty != 1:
        seen = torch.cat([prompt, output], dim=1)
        values = logits.detach().gather(1, seen.clamp(min=0))
        factors = torch.where(values > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        index = torch.where(seen == NOTHING, vocabulary, seen)
        logits = logits * logits.new_ones(slots).scatter_(1, index, factors.to(logits.dtype))[:, :-1]
    if sampling.counts_outputs:
        index = torch.where(output == NOTHING, vocabulary, output)
        penalty = logits.new_zeros(slots).scatter_(1, index, sampling.presence_penalty)
        each = penalty.new_full((), sampling.frequency_penalty).expand(index.shape)
        logits = logits - penalty.scatter_add_(1, index, each)[:, :-1]
    return logits


# A nucleus is nearly always among this many tokens, which are found much faster than the whole vocabulary is sorted.
_LIKELIEST = 1024


@torch.no_grad()
def support_floor(logits: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, " N"]:
    """The smallest logit that is kept: all rules keep the likeliest tokens, so that one number says which.

    Tokens that tie with the last one are kept. An engine keeps them too by top-k and min-p; by top-p it keeps any of them.

    Args:
        logits (`torch.Tensor` of shape `(N, V)`): After penalties and temperature.
        sampling ([`Sampling`]): The rules, and their order.
    """
    floor = torch.full_like(logits[:, 0], -math.inf)
    for rule in sampling.order:
        if rule == "min_p" and sampling.min_p > 0:
            floor = torch.maximum(floor, logits.amax(-1) + math.log(sampling.min_p))
        elif rule == "top_k" and 0 < sampling.top_k < logits.shape[1]:
            floor = torch.maximum(floor, logits.topk(sampling.top_k).values[:, -1])
        elif rule == "top_p" and sampling.top_p < 1:
            floor = torch.maximum(floor, _nucleus_floor(logits, floor, sampling))
    return floor


def _nucleus_floor(
    logits: Float[Tensor, "N V"], floor: Float[Tensor, " N"], sampling: Sampling
) -> Float[Tensor, " N"]:
    """Top-p among the logits at `floor` and above."""
    left, top_p = logits.masked_fill(logits < floor.unsqueeze(1), -math.inf), sampling.top_p
    log_mass = left.logsumexp(-1, keepdim=True)
    if 0 < sampling.top_k < logits.shape[1]:  # there are no other values
        return _crossing(left.topk(sampling.top_k).values, log_mass, top_p)
    if logits.device.type != "cpu" or logits.shape[1] <= _LIKELIEST:  # elsewhere, to look at the mass is a host sync
        return _crossing(left.sort(-1, descending=True).values, log_mass, top_p)
    ordered = left.topk(_LIKELIEST).values
    result = _crossing(ordered, log_mass, top_p)
    spread = (ordered - log_mass).exp().sum(-1) < top_p  # rows with more than that
    if spread.any():
        result[spread] = _crossing(left[spread].sort(-1, descending=True).values, log_mass[spread], top_p)
    return result


def _crossing(ordered: Tensor, log_mass: Tensor, top_p: float) -> Tensor:
    """The last of the logits, likeliest first, before which there is less mass than `top_p`."""
    mass = (ordered - log_mass).exp().cumsum(-1)
    return ordered.gather(1, (mass[:, :-1] < top_p).sum(-1, keepdim=True))[:, 0]


def restricted(
    logits: Float[Tensor, "N V"], floor: Float[Tensor, " N"], targets: Int[Tensor, " N"], with_entropy: bool = True
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Log-prob of the target and entropy, of the softmax over the logits at `floor` and above. Gradients flow through
    these only.

    The target is always among them: it was sampled, so where the trainer alone would have dropped it, the engine did not.

    Args:
        logits (`torch.Tensor` of shape `(N, V)`): After penalties and temperature.
        floor (`torch.Tensor` of shape `(N,)`): From [`support_floor`].
        targets (`torch.Tensor` of shape `(N,)`): The sampled ids.
    """
    dropped = (logits < floor.unsqueeze(1)).scatter(1, targets.unsqueeze(1), False)
    logps = logits.masked_fill(dropped, -math.inf).log_softmax(-1)
    # H = -sum_kept p log p
    entropy = -(logps.exp() * logps.masked_fill(dropped, 0.0)).sum(-1) if with_entropy else None
    return logps.gather(1, targets.unsqueeze(1))[:, 0], entropy


# Logits that exist at a time: what is in between stays in a CPU's cache, or small on a GPU.
_LOGITS_AT_ONCE = {"cpu": 1 << 22}
_LOGITS_AT_ONCE_ELSEWHERE = 1 << 25


class _TiledLogProbs(torch.autograd.Function):
    """[`restricted`] of `hidden @ weight.T + bias`, a tile of positions at a time, forward and backward.

    The backward computes each tile again and keeps what the forward kept. Gradients of the head are summed in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: Callable[[Tensor, slice], Tensor],
        sampling: Sampling,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        device = hidden.device.type
        ctx.set_materialize_grads(False)
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.shape, ctx.with_entropy = shape, with_entropy
        results = []
        with torch.autocast(device, enabled=False):
            for rows in _tiles(hidden, weight):
                logits = shape(_projected(hidden[rows], weight, bias, ctx.dtype), rows)
                floor = support_floor(logits, sampling)
                logps, entropy = restricted(logits, floor, targets[rows], with_entropy)
                outside = logits.gather(1, targets[rows].unsqueeze(1))[:, 0] < floor
                results.append((floor, outside, logps, logps if entropy is None else entropy))
        floor, outside, logps, entropy = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, floor)
        ctx.mark_non_differentiable(outside)
        return logps, entropy if with_entropy else None, outside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, floor = ctx.saved_tensors
        wanted = [
            None if x is None or not needed else torch.zeros_like(x, dtype=torch.float32)
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        of_hidden, of_weight, of_bias = wanted
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _tiles(hidden, weight):
                logits = _projected(hidden[rows], weight, bias, ctx.dtype).requires_grad_()
                with torch.enable_grad():
                    values = restricted(ctx.shape(logits, rows), floor[rows], targets[rows], ctx.with_entropy)
                used = [(v, g[rows]) for v, g in zip(values, grads, strict=False) if v is not None and g is not None]
                (slope,) = torch.autograd.grad([v for v, _ in used], logits, [g for _, g in used])
                if of_hidden is not None:
                    of_hidden[rows] = (slope.to(ctx.dtype) @ weight.to(ctx.dtype)).float()
                if of_weight is not None:
                    of_weight.addmm_(slope.t(), hidden[rows].float())
                if of_bias is not None:
                    of_bias += slope.sum(0)
        back = (
            None if x is None else x.to(like.dtype) for x, like in zip(wanted, (hidden, weight, bias), strict=True)
        )
        return (*back, None, None, None, None)


def _tiles(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of positions whose logits fit into what may exist at a time; at least one."""
    size = max(_LOGITS_AT_ONCE.get(hidden.device.type, _LOGITS_AT_ONCE_ELSEWHERE) // len(weight), 1)
    return [slice(start, start + size) for start in range(0, max(len(hidden), 1), size)]


def _projected(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Logits in float32, of a product in `dtype`, as an engine has them."""
    logits = hidden.detach().to(dtype) @ weight.detach().to(dtype).t()
    if bias is not None:
        logits += bias.detach().to(dtype)
    return logits.float()


class RestrictedHead:
    """Stands in for the function that TRL's fused LM head calls, during the forwards of one batch: the same arguments,
    the log-probs and entropies of the restricted distribution.

    Args:
        sampling ([`Sampling`]):
            What the engine did.
        input_ids, attention_mask (`torch.Tensor` of shape `(B, L)`):
            The batch, prompts padded on the left, completions on the right.
        completion_length (`int`):
            Columns of the completions.
        batch_size (`int`, *optional*):
            Rows that TRL gives a forward.
    """

    def __init__(
        self,
        sampling: Sampling,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Shaped[Tensor, "B L"],
        completion_length: int,
        batch_size: int | None = None,
    ) -> None:
        self.sampling, self.completion_length = sampling, completion_length
        attended = attention_mask.bool()
        scored = attended[:, 1:].clone()
        scored[:, :-completion_length] = False
        tokens = input_ids.masked_fill(~attended, NOTHING)
        rows = batch_size or len(input_ids)
        self._forwards = list(zip(torch.split(tokens, rows), torch.split(scored, rows), strict=True))
        self._outside: list[Tensor] = []

    @property
    def outside(self) -> Bool[Tensor, "B T"]:
        """The completion's tokens that the trainer's logits alone would have dropped.

        Raises:
            `RuntimeError`: not every forward has come through here.
        """
        if self._forwards:
            raise RuntimeError(
                "The log-probs were not computed by TRL's fused LM head, so `rollout_support` had no effect on them: the "
                "model has a forward of its own. Set `rollout_support=False`."
            )
        return torch.cat(self._outside)

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        """What `ChunkedLogProbFunction.apply` returns; of the optional outputs, the entropy only.

        TRL gives the hidden states of all positions, or (on GPUs) of the scored ones. Others get 0, which TRL masks.
        """
        assert set(outputs) <= {"log_probs", "entropy"}, outputs
        tokens, scored = self._forwards.pop(0)
        everywhere = scored.flatten() if len(hidden) == scored.numel() else None
        if everywhere is not None:
            hidden, targets = hidden[everywhere], targets[everywhere]
        rows, columns = scored.nonzero(as_tuple=True)
        if len(rows) != len(hidden):
            raise ValueError(
                f"`rollout_support` knows of {len(rows)} scored tokens, but the model scores {len(hidden)}: adapters that "
                "add virtual tokens (prompt tuning) are not supported. Set `rollout_support=False`."
            )
        start = tokens.shape[1] - self.completion_length
        positions = torch.arange(tokens.shape[1], device=tokens.device)

        def shape(logits: Tensor, tile: slice) -> Tensor:
            """What happens to the logits before tokens are dropped."""
            logits = logits * logit_scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if self.sampling.penalizes:
                before = tokens[rows[tile]].masked_fill(positions > columns[tile].unsqueeze(1), NOTHING)
                logits = penalized(logits, before[:, :start], before[:, start:], self.sampling)
            return logits / temperature

        logps, entropy, outside = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, shape, self.sampling, "entropy" in outputs
        )
        everything = torch.zeros_like(scored).masked_scatter(scored, outside)
        self._outside.append(everything[:, -self.completion_length :])
        if everywhere is not None:
            zeros = logps.new_zeros(scored.numel())
            logps = zeros.masked_scatter(everywhere, logps)
            entropy = None if entropy is None else zeros.masked_scatter(everywhere, entropy)
        return logps, entropy, None, None, None
