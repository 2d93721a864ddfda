# SPDX-License-Identifier: Apache-2.0
"""A micro-batch between TRL's forward and its loss: measured, corrected, and the loss completed.

TRL reads the loss mask and the weights of its batch after the forward, so both can still be changed in between. This is
where batches are corrected whose old log-probs come from the training forward or from the engine, where trust regions
act, and where a KL term of ours is added.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..correction.apply import loss_weights, trust_region_passes
from ..metrics.measure import reference_metrics, trust_region_metrics
from ..ratios import wide_dtype
from ..statistics import Stat, merge
from .batch import Batch, loss_mask, two_dimensional, weigh, without_nonfinite
from .meter import Meter
from .moment import Moment
from .plan import Plan
from .window import Statistics


class StepSoFar:
    """What the micro-batches of an optimizer step leave for its last one: statistics, and losses whose scale only the last
    one knows."""

    def __init__(self) -> None:
        self._stats: list[Statistics] = []
        self._losses: list[Tensor] = []
        self.scale: Tensor | None = None
        """By what the gradient grows; set by the last micro-batch of a step whose plan `scales_late`."""

    def add(self, stats: Statistics) -> None:
        """Adds the statistics of a micro-batch."""
        self._stats.append(stats)

    def take(self) -> Statistics:
        """Returns what was added, merged, and forgets it."""
        stats, self._stats = merge(self._stats), []
        return stats

    def after_backward(self, loss: Tensor, parameters: Iterable[torch.nn.Parameter]) -> Tensor:
        """Scales the gradient of the whole step once the scale is known, and returns the loss to report: those of earlier
        micro-batches were reported unscaled, which the last one makes up for."""
        if self.scale is None:
            self._losses.append(loss)
            return loss
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)
        loss = self.scale * loss + (self.scale - 1) * sum(self._losses)
        self.scale, self._losses = None, []
        return loss


def needs_us(plan: Plan, inputs: Batch) -> bool:
    """Whether anything happens between the forward and the loss of a micro-batch, or TRL's own path is taken."""
    regions = plan.correction is not None and bool(plan.correction.trust_regions)
    to_correct = "sampling_per_token_logps" in inputs and (regions or "old_per_token_logps" not in inputs)
    return to_correct or "ref_per_token_logps" in inputs or "rejection_scale" in inputs


class InLoss:
    """One micro-batch.

    Args:
        plan ([`Plan`]), meter ([`Meter`]), moment ([`Moment`]): Of the trainer.
        so_far ([`StepSoFar`]): Of the optimizer step that this micro-batch is part of.
        inputs (`dict`): What TRL's loss is given; is not changed.

    Attributes:
        batch (`dict`):
            What TRL's loss is to be given instead. Its `completion_mask` is the loss mask, `attended` what the model attends
            to.
    """

    def __init__(self, plan: Plan, meter: Meter, moment: Moment, so_far: StepSoFar, inputs: Batch):
        self._plan, self._meter = plan, meter
        self._moment, self._so_far = moment, so_far
        self.batch = dict(inputs, completion_mask=loss_mask(inputs).clone(), attended=inputs["completion_mask"])
        self.batch.pop("tool_mask", None)
        self._is_forwarded = False
        self._kl: Tensor | None = None
        self._aux_loss: Tensor | None = None

    def attention_mask(self, attention_mask: Tensor, completion_length: int) -> Tensor:
        """TRL's attention mask of prompt and completion, which it makes of a mask that is the loss's here."""
        if self._is_forwarded:
            return attention_mask
        return torch.cat([attention_mask[:, :-completion_length], self.batch["attended"]], dim=1)

    def forwarded(self, per_token_logps: Tensor, aux_loss: Tensor | None, outside: Tensor | None) -> None:
        """Measures the micro-batch and puts weights and mask into `batch`, before TRL's loss reads them; after the last
        micro-batch, has the rollout batch logged and recorded.

        Args:
            per_token_logps (`torch.Tensor` of shape `(B, T)`): Of the forward, with gradient.
            aux_loss (`torch.Tensor`, *optional*): The auxiliary loss of the router.
            outside (`torch.Tensor` of shape `(B, T)`, *optional*): Tokens that the trainer's own support lacks.
        """
        if self._is_forwarded:
            return
        self._is_forwarded, self._aux_loss = True, aux_loss
        logps, stats = per_token_logps.detach(), dict[str, Stat]()
        if "sampling_per_token_logps" in self.batch:
            stats |= self._correct(logps, outside)
        if "ref_per_token_logps" in self.batch:
            stats |= self._refer(per_token_logps)
        correction = self._plan.correction
        rejects = "kept" in stats and correction is not None and correction.rejects
        if self._moment.training:
            self._so_far.add(stats)
            if not (self._moment.ends_step or (self._moment.ends_rollout_batch and rejects)):
                return
            stats = self._so_far.take()
        if stats:
            stats = self._meter.merged(stats, self._moment)
            self._meter.complete(stats, self._moment)
        if rejects:
            self._follow_rejections(stats)

    def end(self, loss: Tensor, beta: float, aux_weight: float) -> Tensor:
        """Completes TRL's loss of the micro-batch: adds our KL term, and makes rejections count in what it divides by.

        Args:
            loss (`torch.Tensor`, 0-dimensional): TRL's.
            beta (`float`): Weight of the KL term.
            aux_weight (`float`): Weight of the router's auxiliary loss, which is no part of what rejections scale.
        """
        if self._kl is not None:
            loss = loss + beta * self._plan.loss.aggregated(self._kl, self.batch, self._moment)
        scale = self.batch.get("rejection_scale")
        if scale is None:
            return loss
        if self._aux_loss is None:
            return scale * loss
        aux_loss = aux_weight * self._aux_loss / self._moment.micro_batches
        return scale * (loss - aux_loss) + aux_loss

    def _correct(self, logps: Tensor, outside: Tensor | None) -> Statistics:
        """What the rollout left to the loss: the whole correction, or its trust regions."""
        batch, plan = self.batch, self._plan
        mask, sampling = batch["completion_mask"], batch["sampling_per_token_logps"]
        result, stats = None, dict[str, Stat]()
        if "old_per_token_logps" not in batch:
            measured = (batch, logps, sampling, mask, self._moment)
            if plan.correction is None:
                stats = self._meter.mismatch(*measured, outside=outside) if self._moment.is_first_use else {}
                plan.hide_captured(batch)
            else:
                result, stats = self._meter.correction(*measured, outside=outside)
                mask.copy_(result.keep_mask)
            if plan.old_logprobs == "rollout":
                batch["old_per_token_logps"] = without_nonfinite(sampling, logps)
        passes = None
        if plan.correction is not None:
            advantages = two_dimensional(batch["advantages"])
            passes = trust_region_passes(plan.correction, logps, sampling, advantages, mask)
        if passes is not None:
            stats |= trust_region_metrics(mask, passes)
        if result is not None:
            weights = loss_weights(result, passes=passes, ratio_in_loss=plan.old_logprobs == "rollout")
            weigh(batch, weights, plan.takes_ratio)
            if self._meter.recorder is not None:
                self._meter.recorder.weigh(weights)
        elif passes is not None:
            weigh(batch, passes.to(logps.dtype), plan.takes_ratio)
        return stats

    def _refer(self, per_token_logps: Tensor) -> Statistics:
        """Measures the gap to the reference, and keeps our KL term for the end."""
        batch, mask = self.batch, self.batch["completion_mask"]
        stats = reference_metrics(per_token_logps.detach(), batch["ref_per_token_logps"], mask)
        if self._plan.reference is not None:
            self._kl = self._plan.reference.per_token(batch, per_token_logps)
            used = torch.where(mask.bool(), self._kl.detach(), 0.0).sum(dtype=wide_dtype(per_token_logps))
            stats["reference_used"] = Stat(used.reshape(1), "sum")
        return stats

    def _follow_rejections(self, stats: Statistics) -> None:
        if self._plan.scales_late and self._moment.training:
            self._so_far.scale = self._plan.loss.rejection_scale(self.batch, stats)
        else:
            self._plan.loss.count_kept(self.batch, stats)
