# SPDX-License-Identifier: Apache-2.0
"""The completions of a record on which trainer and engine disagree most, token by token."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..correction.kl import kl_k3
from ..records.record import MismatchRecord


if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class Token:
    """One token of a completion as it is shown."""

    text: str
    """Empty where it is a part of a character that ends in a later token."""
    position: int
    """Where it stands in the sequence, prompt included."""
    inside: bool
    """Whether it is in the loss mask; tool results are not."""
    kept: bool
    """Whether the correction left it in."""
    p_train: float
    """Its probability in the trainer."""
    p_rollout: float
    """Its probability in the engine; NaN if unscored."""
    d: float
    """`log p_train - log p_rollout`, nats; NaN if unscored."""
    weight: float | None
    """What the correction made of it."""


@dataclass(frozen=True)
class Completion:
    """A completion as it is shown, or a window of it around its worst token."""

    step: int
    row: int
    """Of the record."""
    tokens: list[Token]
    before: int
    """Tokens that are not shown before the window."""
    after: int
    """The same after it."""
    k3: float
    """Mean over its scored tokens."""
    sequence_log_ratio: float
    """The sum of `d` over its scored tokens."""
    kept: bool
    """Whether the correction left any of its tokens in the loss."""
    advantage: float | None
    """Of the completion; `None` where it has none of its own."""


def worst_completions(run: "Run", count: int = 5, window: int = 500) -> list[Completion]:
    """The completions that contribute most to k3, of the worst record and of the newest.

    Args:
        run ([`Run`]): From [`load_run`].
        count (`int`, *optional*, defaults to `5`): How many at most, all records together.
        window (`int`, *optional*, defaults to `500`): Tokens of one that are shown, around its worst.
    """
    records = run.looked_into()
    steps = [step for step in dict.fromkeys((run._worst, run.records[-1].step)) if step in records] if records else []
    found: list[Completion] = []
    for index, step in enumerate(steps):
        share = (count + len(steps) - 1 - index) // len(steps)
        record = records[step]
        d, mask = record.mismatch_log_ratio, record.mask.bool()
        k3 = kl_k3(d, mask)
        total = k3.nan_to_num(posinf=1e30).sum(1)
        for row in total.topk(min(share, len(total))).indices.tolist():
            if mask[row].any():
                found.append(_completion(record, row, d[row], k3[row], window, run.tokenizer))
    return found


def _completion(
    record: MismatchRecord, row: int, d: torch.Tensor, k3: torch.Tensor, window: int, tokenizer: Any
) -> Completion:
    present, mask = record.completion_mask[row].bool(), record.mask[row].bool()
    scored = mask & ~torch.isnan(d)
    length = int(present.sum())  # padding is on the right
    start = max(0, min(int(k3.argmax()) - window // 2, length - window))
    end = min(length, start + window)
    part = slice(start, end)
    texts = _pieces(tokenizer, record.completion_ids[row, part].tolist())
    weights = record.weights[row, part].tolist() if record.weights is not None else [None] * (end - start)
    kept = (mask if record.keep_mask is None else record.keep_mask[row].bool())[part].tolist()
    columns = zip(
        texts,
        record.position_ids[row, part].tolist(),
        mask[part].tolist(),
        kept,
        record.old_per_token_logps[row, part].double().exp().tolist(),
        record.sampling_per_token_logps[row, part].double().exp().tolist(),
        torch.where(mask, d, math.nan)[part].tolist(),
        weights,
        strict=True,
    )
    advantages = record.advantages
    return Completion(
        step=record.step,
        row=row,
        tokens=[Token(*values) for values in columns],
        before=start,
        after=length - end,
        k3=float(k3.sum() / scored.sum().clamp(min=1)),
        sequence_log_ratio=float(torch.where(scored, d, 0.0).sum()),
        kept=record.keep_mask is None or bool(record.keep_mask[row].any()),
        advantage=float(advantages[row]) if advantages is not None and advantages.dim() == 1 else None,
    )


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token as it stands in the whole; a character of several tokens stands at its last one."""
    if tokenizer is None:
        return [f"<{token}>" for token in ids]

    def text(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    pieces: list[str] = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        known, whole = text(start, read), text(start, end)
        if whole.endswith("\ufffd") and end - read < 4:
            pieces.append("")
        else:
            pieces.append(whole[len(known) :])
            start, read = read, end
    return pieces
