# SPDX-License-Identifier: Apache-2.0
"""Edits of the batch that TRL's loss reads: its mask, its weights, and what it divides by."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..correction.loss import ROW_COUNT_LOSSES, aggregated, rejection_scale
from ..upstream.trl import group_advantages
from .moment import Moment
from .window import Statistics


Batch = dict[str, Any]
"""What TRL's `_generate_and_score_completions` returns and its loss takes."""


@dataclass(frozen=True)
class LossShape:
    """What TRL's loss divides by, as far as settings say."""

    loss_type: str = "dapo"
    """TRL's `loss_type`."""
    longest: int = 1
    """`max_completion_length`."""
    steps_per_generation: int = 1
    """Micro-batches of a rollout batch."""
    ranks: int = 1
    """Processes."""

    def aggregated(self, per_token: Tensor, batch: Batch, moment: Moment) -> Tensor:
        """What the loss makes of a term of each token, `(B, T)`: a number."""
        items = batch["num_items_in_batch"].clamp(min=1.0) / self.ranks
        return aggregated(
            per_token,
            batch["completion_mask"],
            self.loss_type,
            items=items / self.steps_per_generation if moment.training else items,
            longest=self.longest,
            steps=moment.micro_batches,
        )

    def rejection_scale(self, batch: Batch, stats: Statistics) -> Tensor:
        """By what the loss grows if it divides by what rejections keep, `stats` being of the whole rollout batch."""
        return rejection_scale(stats, batch["num_items_in_batch"], self.loss_type)

    def count_kept(self, batch: Batch, stats: Statistics) -> None:
        """Makes the loss of `batch` divide by what rejections kept, over all ranks and micro-batches."""
        items = batch["num_items_in_batch"]
        if self.loss_type in ROW_COUNT_LOSSES:
            batch["rejection_scale"] = self.rejection_scale(batch, stats)
        batch["num_items_in_batch"] = stats["kept"].value[0].to(items.dtype)


def loss_mask(batch: Batch) -> Tensor:
    """Mask of the tokens in the loss, `(B, T)`: model tokens of the completion, without those of tools."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def reject(batch: Batch, keep_mask: Tensor) -> None:
    """Takes rejected tokens out of the loss. TRL's loss mask is `completion_mask * tool_mask`, and only the former is an
    attention mask as well."""
    batch["tool_mask"] = keep_mask.to(batch["completion_mask"].dtype)


def two_dimensional(advantages: Tensor) -> Tensor:
    """Advantages as `(B, 1)` or `(B, T)`; TRL's loss takes one per completion, `(B,)`, or one per token."""
    return advantages if advantages.dim() == 2 else advantages.unsqueeze(1)


def weigh(batch: Batch, weights: Tensor, takes_ratio: bool) -> None:
    """Multiplies the policy term of the loss of `batch` by weights, which are never negative.

    Args:
        batch (`dict`): Is changed.
        weights (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): Detached.
        takes_ratio (`bool`): Whether TRL's loss takes an importance ratio, which it does with vLLM only.
    """
    if takes_ratio:
        batch["importance_sampling_ratio"] = batch.get("importance_sampling_ratio", 1.0) * weights
    else:  # all losses but vespo are linear in the size of an advantage
        batch["advantages"] = two_dimensional(batch["advantages"]) * weights


@dataclass(frozen=True)
class Groups:
    """How TRL makes advantages of rewards."""

    size: int
    """Completions of a prompt."""
    scale_rewards: str
    """TRL's `scale_rewards`."""
    reward_weights: Tensor
    """One per reward function."""
    gather: Callable[[Tensor], Tensor]
    """`accelerator.gather`: what ranks have, below each other."""
    rank: int
    """Of this process."""

    def advantages_without(self, rejected: Tensor, rewards: Tensor) -> Tensor:
        """Advantages of this rank's completions, `(B,)`, with the rejected ones out of the baseline of their group.

        Args:
            rejected (`torch.Tensor` of shape `(B,)`): Completions of this rank that were rejected whole.
            rewards (`torch.Tensor` of shape `(N, functions)`): Rewards of all ranks, from TRL.
        """
        out = self.gather(rejected)
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total = total.masked_fill(rewards.isnan().all(dim=1) | out, math.nan)
        advantages = group_advantages(total, self.size, self.scale_rewards)
        return advantages[self.rank * len(rejected) :][: len(rejected)]


def groups_of(trainer: Any) -> Groups:
    """The groups of the batch that a [`ConsistentGRPOTrainer`] is working on."""
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    accelerator = trainer.accelerator
    weights = trainer.reward_weights
    return Groups(size, trainer.scale_rewards, weights, accelerator.gather, accelerator.process_index)


def without_nonfinite(values: Tensor, instead: Tensor) -> Tensor:
    """`values`, with those of `instead` where they are not finite."""
    return torch.where(torch.isfinite(values), values, instead)
