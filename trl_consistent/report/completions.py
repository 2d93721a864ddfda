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


_LONGEST_CHARACTER = 4  # tokens, one for each byte in UTF-8


@dataclass(frozen=True)
class Token:
    """One token of a completion as it is shown."""

    text: str
    """Its text; empty where the token is a part of a character that ends in a later token."""
    position: int
    """Its place in the sequence, prompt included, from 0."""
    inside: bool
    """Whether it is in the loss mask; the results of tools are not."""
    kept: bool
    """Whether the correction left it in the loss."""
    p_train: float
    """Its probability in the trainer."""
    p_rollout: float
    """Its probability in the engine; NaN if unscored."""
    d: float
    """`log p_train - log p_rollout`, nats; NaN if unscored."""
    weight: float | None
    """Its weight in the loss; `None` without a correction."""


@dataclass(frozen=True)
class Completion:
    """A completion as it is shown, or a window of it around its worst token."""

    step: int
    row: int
    """Its row in the record."""
    tokens: list[Token]
    """The tokens of the window."""
    before: int
    """How many tokens before the window are not shown."""
    after: int
    """How many tokens after the window are not shown."""
    k3: float
    """Mean of k3 over its scored tokens."""
    sequence_log_ratio: float
    """Sum of `d` over its scored tokens, nats."""
    kept: bool
    """Whether the correction left any of its tokens in the loss."""
    advantage: float | None
    """Advantage of the completion; `None` where it has none of its own."""


def worst_completions(run: "Run", count: int = 5, window: int = 500) -> list[Completion]:
    """The completions that contribute most to k3, from the worst record and from the newest.

    Args:
        run ([`Run`]): From [`load_run`].
        count (`int`, *optional*, defaults to `5`): How many at most, both records together.
        window (`int`, *optional*, defaults to `500`): How many tokens of each are shown, around its worst.
    """
    records = run.examined_records()
    if not records:
        return []
    steps = [step for step in dict.fromkeys((run.worst_step, run.records[-1].step)) if step in records]
    found: list[Completion] = []
    for index, step in enumerate(steps):
        share = (count + len(steps) - 1 - index) // len(steps)  # the first steps take what is left over
        record = records[step]
        k3 = kl_k3(record.mismatch_log_ratio, record.mask.bool())
        total = k3.nan_to_num(posinf=1e30).sum(1)
        for row in total.topk(min(share, len(total))).indices.tolist():
            if record.mask[row].any():
                found.append(_completion(record, row, k3[row], window, run.tokenizer))
    return found


def _completion(record: MismatchRecord, row: int, k3: torch.Tensor, window: int, tokenizer: Any) -> Completion:
    """The completion in a row of a record; `k3` is that of each of its tokens."""
    d, mask = record.mismatch_log_ratio[row], record.mask[row].bool()
    scored = mask & ~torch.isnan(d)
    length = int(record.completion_mask[row].sum())  # padding is on the right
    start = max(0, min(int(k3.argmax()) - window // 2, length - window))
    end = min(length, start + window)
    advantages = record.advantages
    return Completion(
        step=record.step,
        row=row,
        tokens=_tokens(record, row, slice(start, end), tokenizer),
        before=start,
        after=length - end,
        k3=float(k3.sum() / scored.sum().clamp(min=1)),
        sequence_log_ratio=float(torch.where(scored, d, 0.0).sum()),
        kept=record.keep_mask is None or bool(record.keep_mask[row].any()),
        advantage=float(advantages[row]) if advantages is not None and advantages.dim() == 1 else None,
    )


def _tokens(record: MismatchRecord, row: int, part: slice, tokenizer: Any) -> list[Token]:
    """The tokens in a part of a completion."""
    mask = record.mask[row].bool()
    kept = mask if record.keep_mask is None else record.keep_mask[row].bool()
    d = torch.where(mask, record.mismatch_log_ratio[row], math.nan)
    ids = record.completion_ids[row, part].tolist()
    columns = zip(
        _pieces(tokenizer, ids),
        record.position_ids[row, part].tolist(),
        mask[part].tolist(),
        kept[part].tolist(),
        record.old_per_token_logps[row, part].double().exp().tolist(),
        record.sampling_per_token_logps[row, part].double().exp().tolist(),
        d[part].tolist(),
        [None] * len(ids) if record.weights is None else record.weights[row, part].tolist(),
        strict=True,
    )
    return [Token(*values) for values in columns]


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token as it stands in the whole; a character of several tokens stands at its last one."""
    if tokenizer is None:
        return [f"<{token}>" for token in ids]

    def text(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # Each token is decoded after the one before it, because a space may depend on that.
    pieces: list[str] = []
    before = 0  # where the last token with a text begins
    done = 0  # tokens whose text is in `pieces`
    for end in range(1, len(ids) + 1):
        known, whole = text(before, done), text(before, end)
        is_part = whole.endswith("\ufffd") and end - done < _LONGEST_CHARACTER
        pieces.append("" if is_part else whole[len(known) :])
        if not is_part:
            before, done = done, end
    return pieces
