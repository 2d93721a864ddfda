# SPDX-License-Identifier: Apache-2.0
"""What TRL's loss divides by, and what follows from it: how a term of ours joins the loss, how rejections scale it, and
what must be known before it. The weights themselves are in `correction/weights.py`."""

from typing import Any

import torch
from torch import Tensor

from ..statistics import Stat
from .rules import Correction


TOKEN_COUNT_LOSSES = ("cispo", "dapo", "vespo")
"""Losses that divide by the number of tokens in the whole rollout batch."""
ROW_COUNT_LOSSES = ("grpo", "sapo", "luspo", "dr_grpo")
"""Losses that divide by the number of completions. The one that is in neither divides by the tokens of a micro-batch."""


def aggregated(
    per_token: Tensor, mask: Tensor, loss_type: str, *, items: Tensor, longest: int, steps: int | float
) -> Tensor:
    """What the loss makes of a term of each token; a test compares it with TRL's.

    Args:
        per_token, mask (`torch.Tensor` of shape `(B, T)`):
            The term, and the loss mask.
        loss_type (`str`):
            TRL's `loss_type`.
        items (`torch.Tensor`, 0-dimensional):
            Tokens of the loss in a micro-batch, of all ranks and micro-batches the average.
        longest (`int`):
            `max_completion_length`.
        steps (`float`):
            Micro-batches in an optimizer step.
    """
    per_token = torch.where(mask.bool(), per_token, 0.0)
    if loss_type in TOKEN_COUNT_LOSSES:
        return per_token.sum() / items / steps
    if loss_type == "bnpo":
        return per_token.sum() / mask.sum().clamp(min=1.0) / steps
    if loss_type == "dr_grpo":
        return per_token.sum() / (per_token.size(0) * longest) / steps
    rows = per_token.sum(-1)
    return (rows if loss_type == "luspo" else rows / mask.sum(-1).clamp(min=1.0)).mean() / steps


def rejection_scale(stats: dict[str, Stat], items: Tensor, loss_type: str) -> Tensor:
    """By what a loss that divides by tokens or completions grows when it divides by those that are kept instead.

    Args:
        stats (`dict[str, Stat]`): Of [`correction_metrics`], of the whole rollout batch.
        items (`torch.Tensor`, 0-dimensional): Tokens it divides by.
    """
    kept, rows, gone = (stats[key].value[0] for key in ("kept", "rows", "rejected_rows"))
    return (
        items / kept.clamp(min=1) if loss_type in TOKEN_COUNT_LOSSES else rows / (rows - gone).clamp(min=1)
    ).float()


def scales_late(args: Any, correction: Correction | None) -> bool:
    """Whether, computed in the loss, `correction` leaves a micro-batch without the count its loss divides by, because
    others reject as well. Its gradient is scaled after the last one."""
    counts = args.loss_type in TOKEN_COUNT_LOSSES + ROW_COUNT_LOSSES
    return correction is not None and correction.rejects and counts and args.steps_per_generation > 1


def has_entropy_bonus(args: Any) -> bool:
    """Whether the loss has an entropy bonus."""
    return bool(args.entropy_coef != 0.0 or args.use_adaptive_entropy)


def _in_loss_obstacle(args: Any, correction: Correction | None) -> str | None:
    """Why `correction` cannot be computed between the training forward and the loss of one micro-batch; `None` if it
    can."""
    if correction is None:
        return None
    if correction.normalize != "none":
        return f"`correction_normalize={correction.normalize!r}` needs the mean weight of the whole rollout batch"
    if any(rule.level == "batch" for rule in correction.rejections):
        return "an `m2/batch` rejection needs the tokens of the whole rollout batch"
    if correction.rejects:
        if getattr(args, "correction_reject_baseline", "keep") == "exclude":
            return "`correction_reject_baseline='exclude'` needs the rejections of the whole group"
        if scales_late(args, correction):
            if args.gradient_accumulation_steps != args.steps_per_generation:
                return (
                    f"with rejections, `loss_type={args.loss_type!r}` divides by what the whole rollout batch keeps, and "
                    f"that is one optimizer step only if `gradient_accumulation_steps` "
                    f"({args.gradient_accumulation_steps}) equals `steps_per_generation` ({args.steps_per_generation})"
                )
            if has_entropy_bonus(args):
                return "with rejections, an entropy bonus needs to know what the whole rollout batch keeps"
            if "lomo" in args.optim:
                return f"`optim={args.optim!r}` updates before the last micro-batch says what rejections keep"
    return None


def obstacle(args: Any, correction: Correction | None, source: str) -> str | None:
    """Why the old log-probs cannot come from `source` (`reuse` or `rollout`), as far as a config shows; `None` if they
    can."""
    every = args.steps_per_generation * args.num_iterations
    if source == "reuse" and args.gradient_accumulation_steps % every:
        return (
            f"the weights change while a rollout batch is used: it lasts {every} micro-batches (`steps_per_generation` x "
            f"`num_iterations`), and `gradient_accumulation_steps={args.gradient_accumulation_steps}` is no multiple"
        )
    return _in_loss_obstacle(args, correction)


def refuse(source: str, reason: str | None) -> None:
    """Raises for an `old_logprobs` that has a reason against it.

    Raises:
        `ValueError`: with the reason, and what to set instead.
    """
    if reason is not None:
        raise ValueError(f"`old_logprobs={source!r}` is not possible: {reason}. Set 'recompute' or 'auto'.")
