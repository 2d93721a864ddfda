# SPDX-License-Identifier: Apache-2.0
"""The tokens of a record on which trainer and engine disagree most, as text."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .folder import RECORDS, TOKENIZER
from .record import MismatchRecord
from .store import record_files


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenGap:
    """One token on which trainer and engine disagree."""

    step: int
    """Optimizer step of the record."""
    completion: int
    """Row of the completion in the record."""
    index: int
    """Index of the token in the completion, from 0."""
    position: int
    """Position of the token in the sequence, from 0, prompt included."""
    token_id: int
    """Id of the token in the vocabulary."""
    before: str
    """Some text before the token."""
    token: str
    """The token as text; its id where there is no tokenizer."""
    after: str
    """Some text after the token."""
    p_train: float
    """Probability of the token in the trainer, `pi_old`."""
    p_rollout: float
    """Probability of the token in the rollout engine, `mu`."""
    d: float
    """`log p_train - log p_rollout`, nats."""
    weight: float | None
    """Weight of the token after the correction, 0 if the token was rejected; `None` without a correction."""


def worst_tokens(record: MismatchRecord, count: int = 20, tokenizer: Any = None, context: int = 8) -> list[TokenGap]:
    """The tokens with the largest `|d|`, worst first. Unscored tokens are not among them.

    Args:
        record ([`MismatchRecord`]): The record of a rank, or a merged one.
        count (`int`, *optional*, defaults to `20`): How many tokens at most.
        tokenizer (*optional*): From [`load_tokenizer`]; without one, texts are ids.
        context (`int`, *optional*, defaults to `8`): How many tokens of text before and after.
    """
    d = record.mismatch_log_ratio
    gaps = torch.where(record.mask.bool() & ~torch.isnan(d), d.abs(), -1.0).flatten()
    largest, places = gaps.topk(min(count, len(gaps)))
    positions = record.position_ids
    weights = record.weights
    if weights is not None and record.keep_mask is not None:
        weights = torch.where(record.keep_mask.bool(), weights, 0.0)

    def text(row: int, start: int, end: int) -> str:
        columns = slice(max(start, 0), end)
        is_token = record.completion_mask[row, columns].bool()
        return decode(tokenizer, record.completion_ids[row, columns][is_token].tolist())

    found = []
    for place in places[largest >= 0].tolist():
        row, index = divmod(place, d.shape[1])
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
                p_train=record.old_per_token_logps[row, index].double().exp().item(),
                p_rollout=record.sampling_per_token_logps[row, index].double().exp().item(),
                d=d[row, index].item(),
                weight=None if weights is None else weights[row, index].item(),
            )
        )
    return found


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Text of token ids, special tokens included; without a tokenizer, the ids themselves."""
    if tokenizer is None:
        return " ".join(f"<{token}>" for token in ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer that a run saved beside its records; `None`, with a warning, if that is not possible.

    Code that comes with the tokenizer is not run, because records are sent from one person to another.

    Args:
        path (`str` or `Path`): A run's output folder, a folder of records, or one file.
    """
    records = record_files(path)[0].parent
    folder = records.parent / TOKENIZER
    if records.name != RECORDS or not folder.is_dir():
        logger.warning(f"No tokenizer in {folder}, so tokens are shown as ids.")
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library under it raises nothing narrower
        logger.warning(f"The tokenizer in {folder} does not load, so tokens are shown as ids: {error}")
        return None
