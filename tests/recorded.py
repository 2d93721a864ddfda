# SPDX-License-Identifier: Apache-2.0
"""Records made by hand. Imports little, for the processes that tests kill."""

import math

import torch

from trl_consistent.records.folder import FOLDER, RECORDS
from trl_consistent.records.record import MismatchRecord


def record(step=1, gap=0.0, rows=2, rank=0, width=3, **changes):
    """Prompts of one and two tokens, completions of `width` and two tokens, the first token off by `gap`."""
    old = torch.full((rows, width), -1.0)
    sampling = old.clone()
    sampling[:, 0] -= gap
    mask = torch.ones(rows, width, dtype=torch.int64)
    mask[1:, 2:] = 0
    values = {
        "prompt_ids": torch.tensor([[0, 7]] + [[5, 6]] * (rows - 1)),
        "prompt_mask": torch.tensor([[0, 1]] + [[1, 1]] * (rows - 1)),
        "completion_ids": torch.arange(rows * width).reshape(rows, width),
        "completion_mask": mask,
        "mask": mask.clone(),
        "sampling_per_token_logps": sampling,
        "old_per_token_logps": old,
        "step": step,
        "rank": rank,
        "fingerprint": {"model": "tiny"},
    }
    return MismatchRecord(**{**values, **changes})


LOG_P = -1.5  # of every token, in the engine


def record_of(ratios, advantages=None, log_p=LOG_P, **fields) -> MismatchRecord:
    """`ratios`: a row for each completion, of any length; NaN is unscored. Token ids count up from 3, prompts are 2 ids."""
    width = max(map(len, ratios))
    rows = len(ratios)
    ratio = torch.tensor([[*row, *[1.0] * (width - len(row))] for row in ratios])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in ratios])
    sampling = torch.where(ratio.isnan(), math.nan, torch.full_like(ratio, log_p))
    old = torch.full_like(ratio, log_p) + ratio.nan_to_num(1.0).log()
    return MismatchRecord(
        prompt_ids=torch.tensor([[0, 3, 4]] * rows),
        prompt_mask=torch.tensor([[False, True, True]] * rows),
        completion_ids=torch.where(mask, torch.arange(3, 3 + rows * width).reshape(rows, width), 0),
        completion_mask=mask,
        mask=mask,
        sampling_per_token_logps=sampling,
        old_per_token_logps=old,
        advantages=None if advantages is None else torch.tensor(advantages),
        **fields,
    )


def write(run, *records, tokenizer=None):
    """Saves records as a run does."""
    folder = run / FOLDER / RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    for each in records:
        each.save(folder / f"step-{each.step:08}-rank-{each.rank:05}.safetensors")
    if tokenizer is not None:
        tokenizer.save_pretrained(run / FOLDER / "tokenizer")
    return run
