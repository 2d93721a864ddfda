# SPDX-License-Identifier: Apache-2.0
"""The tokens of a record on which trainer and engine disagree most, as text."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .record import RECORDS, TOKENIZER, MismatchRecord
from .store import record_files


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenGap:
    """One token on which trainer and engine disagree."""

    step: int
    """Of the record."""
    completion: int
    """Row of the record."""
    index: int
    """Which token of the completion, from 0."""
    position: int
    """Where it stands in the sequence, from 0, prompt included."""
    token_id: int
    """In the vocabulary."""
    before: str
    """The text before it, as much as was asked for."""
    token: str
    """The token as text; its id where there is no tokenizer."""
    after: str
    """The text after it."""
    p_train: float
    """Its probability in the trainer, `pi_old`."""
    p_rollout: float
    """Its probability in the rollout engine, `mu`."""
    d: float
    """`log p_train - log p_rollout`, nats."""
    weight: float | None
    """What the correction made of it, 0 if it rejected the token; `None` without a correction."""


def worst_tokens(record: MismatchRecord, count: int = 20, tokenizer: Any = None, context: int = 8) -> list[TokenGap]:
    """The tokens with the largest `|d|`, worst first; those that cannot be scored are not among them.

    Args:
        record ([`MismatchRecord`]): From any rank, or merged.
        count (`int`, *optional*, defaults to `20`): How many at most.
        tokenizer (*optional*): From [`load_tokenizer`]; without one, texts are ids.
        context (`int`, *optional*, defaults to `8`): Tokens of text before and after.
    """
    d, mask = record.mismatch_log_ratio, record.mask.bool()
    size = torch.where(mask & ~torch.isnan(d), d.abs(), -1.0).flatten()
    values, places = size.topk(min(count, len(size)))
    positions, weights = record.position_ids, record.weights
    if weights is not None and record.keep_mask is not None:
        weights = torch.where(record.keep_mask.bool(), weights, 0.0)

    def text(row: int, start: int, end: int) -> str:
        ids = record.completion_ids[row, max(start, 0) : end][record.completion_mask[row, max(start, 0) : end].bool()]
        return decode(tokenizer, ids.tolist())

    found = []
    for place in places[values >= 0].tolist():
        row, index = divmod(place, d.shape[1])
        old, sampling = (x[row, index].double() for x in (record.old_per_token_logps, record.sampling_per_token_logps))
        found.append(
            TokenGap(
                step=record.step,
                completion=row,
                index=index,
                position=int(positions[row, index]),
                token_id=int(record.completion_ids[row, index]),
                before=text(row, index - context, index),
                token=text(row, index, index + 1),
                after=text(row, index + 1, index + 1 + context),
                p_train=old.exp().item(),
                p_rollout=sampling.exp().item(),
                d=d[row, index].item(),
                weight=None if weights is None else weights[row, index].item(),
            )
        )
    return found


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Ids as text, special tokens included; without a tokenizer, the ids themselves."""
    if tokenizer is None:
        return " ".join(f"<{token}>" for token in ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer beside the records at `path` (as of [`record_files`]); `None`, with a warning, if there is none that
    loads. Code that comes with it is not run: records travel."""
    records = record_files(path)[0].parent
    folder = records.parent / TOKENIZER
    if records.name != RECORDS or not folder.is_dir():
        logger.warning(f"No tokenizer in {folder}: tokens are shown as ids.")
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library under it raises nothing narrower
        logger.warning(f"The tokenizer in {folder} does not load, tokens are shown as ids: {error}")
        return None
