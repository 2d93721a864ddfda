# SPDX-License-Identifier: Apache-2.0
"""Records made by hand. Imports little, for the processes that tests kill."""

import torch

from trl_consistent.records import MismatchRecord


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
