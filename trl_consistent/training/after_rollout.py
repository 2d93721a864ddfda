# SPDX-License-Identifier: Apache-2.0
"""A rollout batch on its way through TRL's `_generate_and_score_completions`, and what is made of what comes out.

This is where batches are measured and corrected whose old log-probs TRL computes after the rollout; those that take them
from the training forward pass through `in_loss.py`.
"""

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

from ..correction.apply import loss_weights
from ..correction.weights import CorrectionResult
from ..metrics.measure import correction_metrics, mean_weight
from .batch import Batch, Groups, loss_mask, reject, weigh
from .meter import Meter
from .moment import Moment
from .plan import RELIANCE, Plan
from .window import Statistics


class AfterRollout(contextlib.ExitStack):
    """One rollout batch: what TRL says of it while it makes it, and the edits of what it returns.

    What is entered on the way is left when rewards are computed, or with the block.

    Args:
        plan ([`Plan`]), meter ([`Meter`]), moment ([`Moment`]): Of the trainer.
        groups ([`Groups`]): How advantages are made of rewards.
    """

    def __init__(self, plan: Plan, meter: Meter, moment: Moment, groups: Groups):
        super().__init__()
        self._plan, self._meter = plan, meter
        self._moment, self._groups = moment, groups
        self._outside: Tensor | None = None
        self._rewards: Tensor | None = None

    def generated(self, decision: contextlib.AbstractContextManager[None]) -> None:
        """Is called when the completions are there: enters what decides whether TRL computes old log-probs."""
        if self._plan.decides_old_logprobs:
            self.enter_context(decision)

    def forwarded(self, outside: Tensor | None) -> None:
        """Takes the tokens that the trainer's support lacks, of the policy: its forward comes before the reference's."""
        if self._outside is None:
            self._outside = outside

    def scored(self, rewards: Tensor) -> None:
        """Takes TRL's rewards of all ranks, `(N, functions)`."""
        self._rewards = rewards

    def finish(self, batch: Batch) -> Batch:
        """Measures, corrects and records what TRL made of the rollout, and returns it.

        Raises:
            `ValueError`: the engine's log-probs are needed and there are none.
        """
        sampling, old = batch.get("sampling_per_token_logps"), batch.get("old_per_token_logps")
        if self._plan.needs_engine and sampling is None:
            raise ValueError(
                f"{RELIANCE} need the log-probs of the rollout engine, but the rollout returned none. Return them as "
                "'logprobs', or leave these unset."
            )
        if sampling is None or old is None:
            return batch  # nothing to compare, or compared between the training forward and the loss
        mask = loss_mask(batch)
        measured = (batch, old, sampling, mask, self._moment)
        if self._plan.correction is None:
            stats = self._meter.mismatch(*measured, outside=self._outside)
            self._meter.complete(self._meter.merged(stats, self._moment), self._moment)
            self._plan.hide_captured(batch)
            return batch
        result, stats = self._meter.correction(*measured, outside=self._outside)
        if self._plan.replaces_ratio:
            self._correct(batch, result, stats, mask)
        else:
            self._follow_trl(batch, result, stats, mask)
        return batch

    def _follow_trl(self, batch: Batch, result: CorrectionResult, stats: Statistics, mask: Tensor) -> None:
        """Measures TRL's own correction: what counts is the ratio that TRL's loss will use."""
        assert self._plan.correction is not None
        weights = batch["importance_sampling_ratio"].expand_as(result.weights)
        result = replace(result, weights=torch.where(result.keep_mask, weights, 1.0))
        stats = stats | correction_metrics(mask, result, self._plan.correction.action)
        self._meter.complete(self._meter.merged(stats, self._moment), self._moment, result.weights)

    def _correct(self, batch: Batch, result: CorrectionResult, stats: Statistics, mask: Tensor) -> None:
        """Puts our weights and rejections in the place of TRL's ratio."""
        correction, stats = self._plan.correction, self._meter.merged(stats, self._moment)
        assert correction is not None
        mean = None if correction.normalize == "none" else mean_weight(stats, correction.normalize)
        weights = loss_weights(result, mean_weight=mean)
        if correction.rejects:
            reject(batch, result.keep_mask)
            self._plan.loss.count_kept(batch, stats)
            if self._plan.excludes_rejected and self._rewards is not None:
                rejected = mask.any(1) & ~result.keep_mask.any(1)
                batch["advantages"] = self._groups.advantages_without(rejected, self._rewards)
        batch.pop("importance_sampling_ratio", None)
        weigh(batch, weights, self._plan.takes_ratio)
        self._meter.complete(stats, self._moment, weights)
