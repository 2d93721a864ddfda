# SPDX-License-Identifier: Apache-2.0
"""The mismatch log-ratio `d = old - sampling` and its per-level forms.

Everything that says what a sign, an unscored token or an untrusted token is, stands here; `correction/weights.py` turns ratios
into weights, `metrics/measure.py` into numbers to log.

Shapes: B completions, T completion tokens.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


LEVELS = ("token", "sequence", "geometric", "prefix", "turn")

MAX_LOG_RATIO = 40.0
"""Where a ratio saturates: e^40 squared still fits in float32, and a ratio beyond it says nothing more."""


# Rows are worked on in blocks of about this many tokens: what is in between stays in a CPU's cache, or small on a GPU.
_TOKENS_AT_ONCE = {"cpu": 1 << 17}
_TOKENS_AT_ONCE_ELSEWHERE = 1 << 22


def row_blocks(x: Shaped[Tensor, "B T"]) -> Iterator[slice]:
    """Slices of rows that together are all of `x`, at least one of them."""
    rows = max(_TOKENS_AT_ONCE.get(x.device.type, _TOKENS_AT_ONCE_ELSEWHERE) // max(x.shape[1], 1), 1)
    for start in range(0, max(len(x), 1), rows):
        yield slice(start, start + rows)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The type sums of many values of `x` are kept in: float64, where its device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def check_shapes(**tensors: Tensor) -> None:
    """Refuses tensors that are not all of one (B, T) shape.

    `(B,)` against `(B, T)` broadcasts silently whenever B equals T, so every user tensor passes through here once.

    Raises:
        `ValueError`: names each argument with its shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected tensors of one shape (batch, completion tokens), got {listed}.")


def mismatch_log_ratio(
    old: Float[Tensor, "B T"], sampling: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Token log-ratio `d = old - sampling` between the trainer and the rollout engine, at equal weights.

    Args:
        old (`torch.Tensor` of shape `(B, T)`):
            Log-probs (nats) the trainer computes with the weights that generated, `old_per_token_logps`.
        sampling (`torch.Tensor` of shape `(B, T)`):
            Log-probs (nats) the rollout engine sampled with, `sampling_per_token_logps`. NaN where the engine could
            not score the token.
        mask (`torch.Tensor` of shape `(B, T)`):
            `completion_mask * tool_mask`; any dtype, non-zero is in.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float32, detached. NaN exactly where the token is unscored; `+inf` where
        `sampling` is -inf (the engine says it sampled the impossible); `-inf` where only `old` is -inf or NaN.

    Sign: positive when the trainer finds the token likelier than the engine did.
    Masked positions: 0, whatever they hold.
    Source: rho = exp(d) is the mismatch ratio of https://huggingface.co/papers/2510.18855, eq. 3.
    """
    check_shapes(old=old, sampling=sampling, mask=mask)
    old, sampling = old.detach().float(), sampling.detach().float()
    # d = log pi_old - log mu
    d = old - sampling
    d = torch.where(torch.isnan(d) & ~torch.isnan(sampling), -math.inf, d)
    d = torch.where(sampling == -math.inf, math.inf, d)
    return torch.where(mask.bool(), d, 0.0)


def scored_tokens(d: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Tokens in the mask that carry a sampling log-prob (finite or not).

    Args: `d` is what [`mismatch_log_ratio`] returned; `mask` as there.
    Masked positions: `False`.
    """
    return mask.bool() & ~torch.isnan(d)


def turn_index(mask: Shaped[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Numbers the turns of a completion: contiguous runs of model tokens, which tool tokens separate.

    Returns:
        `torch.Tensor` of shape `(B, T)`, int64: 1 for the tokens of the first turn, 2 for the second, ...

    Masked positions: 0.
    """
    inside = mask.bool()
    before = torch.nn.functional.pad(inside[:, :-1], (1, 0))
    return (inside & ~before).cumsum(dim=-1) * inside


def turn_sums(x: Float[Tensor, "B T"], turns: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The sum of `x` over the turn each token is in; `turns` is what [`turn_index`] returned. Meaningless outside."""
    sums = x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_add(1, turns, x)
    return sums.gather(1, turns)


def level_log_ratio(d: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], level: str) -> Float[Tensor, "B #T"]:
    """Log of the ratio at a level: `d_t` (token), `sum_t d_t` (sequence), `mean_t d_t` (geometric), `sum_{s<=t} d_s`
    (prefix) or the mean over the token's turn (turn).

    `sequence` is the product of token ratios, the exact importance weight of a completion; its spread grows with the
    length. `geometric` divides by the number of scored tokens, so that completions of all lengths are comparable, and
    `turn` does so for each contiguous run of model tokens. `prefix` is the product up to and including the token: exact
    for what the token's state and choice are weighted with, at less spread than `sequence`.

    Args: `d` is what [`mismatch_log_ratio`] returned; `mask` as there.

    Returns:
        `torch.Tensor`, float32: `(B, 1)` for `sequence` and `geometric`, else `(B, T)`. Unscored tokens count as
        `d = 0`. Not finite where a token in reach is not.

    Sign: positive when the trainer finds the token (completion) likelier.
    Masked positions: 0; a row without tokens has log-ratio 0.
    Source: sequence product and geometric mean as in https://huggingface.co/papers/2507.18071, eq. 5-7; prefix is
    per-decision importance sampling (Precup, Sutton and Singh, 2000).
    """
    scored = scored_tokens(d, mask)
    d = torch.where(scored, d, 0.0)
    if level == "token":
        return d
    if level == "prefix":
        return torch.where(mask.bool(), d.cumsum(dim=-1), 0.0)
    if level == "turn":
        turns = turn_index(mask)
        mean = turn_sums(d, turns) / turn_sums(scored.to(d.dtype), turns).clamp(min=1)
        return torch.where(turns > 0, mean, 0.0)
    # The sum runs over the zero-filled row, in the order of TRL's own sum, so that both agree bit for bit.
    total = d.sum(dim=-1, keepdim=True)
    if level == "sequence":
        return total
    if level == "geometric":
        return total / scored.sum(dim=-1, keepdim=True).clamp(min=1)
    raise ValueError(f"Unknown level {level!r}. Expected one of {', '.join(LEVELS)}.")
