# SPDX-License-Identifier: Apache-2.0
"""A short fixed prompt that trainer and engine both score; `sync_check.py` judges weight syncs by the two results."""

from typing import Any

import torch
from torch import Tensor


PROBE_LENGTH = 12
"""Tokens of the prompt, if the engine takes as many."""


def probe_ids(vocabulary: int, longest: int) -> list[int]:
    """The ids of the prompt, spread over the vocabulary.

    Args:
        vocabulary (`int`): Number of ids of the model.
        longest (`int`): Number of tokens that the engine takes, the one it samples included.
    """
    length = min(PROBE_LENGTH, longest - 1)
    return [(index + 1) * vocabulary // (length + 1) for index in range(length)]


@torch.no_grad()
def trainer_logps(model: Any, accelerator: Any, ids: list[int]) -> Tensor:
    """Log-probs, at temperature 1 and in evaluation mode, of the tokens of `ids` after the first: `(n,)`, on the CPU."""
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    training = model.training
    model.eval()
    try:
        with accelerator.autocast():
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    finally:
        model.train(training)
    logps = logits[0, :-1].float().log_softmax(dim=-1)
    return logps.gather(-1, tokens[0, 1:, None])[:, 0].cpu()
