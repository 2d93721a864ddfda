# SPDX-License-Identifier: Apache-2.0
"""Measures batches: the mismatch, and what a correction makes of it; has them recorded, and keeps them for the next log."""

import logging
from typing import Any

from torch import Tensor

from ..correction.apply import decide
from ..correction.weights import CorrectionResult
from ..metrics.measure import correction_metrics, counted_as_batch, finalize, mismatch_metrics, support_metrics
from ..ratios import mismatch_log_ratio
from .batch import Batch
from .moment import Moment
from .noise import NoiseTracker
from .plan import Plan
from .recorder import Recorder
from .window import Statistics, Window, merged_over_ranks


logger = logging.getLogger(__name__)


class Meter:
    """Turns batches into statistics, and statistics of rollout batches into what is logged.

    Args:
        plan ([`Plan`]): Of the trainer.
        noise ([`NoiseTracker`]): Gets the noise of each batch, and gives the bounds that follow from it.
        recorder ([`Recorder`], *optional*): Gets the batches of the training.
        accelerator (`accelerate.Accelerator`): Gathers from all ranks.
    """

    def __init__(self, plan: Plan, noise: NoiseTracker, recorder: Recorder | None, accelerator: Any):
        self.noise, self.recorder = noise, recorder
        self._plan, self._accelerator = plan, accelerator
        self._window = Window()

    def mismatch(
        self,
        batch: Batch,
        old: Tensor,
        sampling: Tensor,
        mask: Tensor,
        moment: Moment,
        *,
        outside: Tensor | None = None,
        result: CorrectionResult | None = None,
    ) -> Statistics:
        """Statistics of the gap between trainer and engine; hands the batch over to be recorded.

        Args:
            batch (`dict`): A rollout batch or a micro-batch of one.
            old, sampling, mask (`torch.Tensor` of shape `(B, T)`): As of [`mismatch_log_ratio`].
            moment ([`Moment`]): Batches of evaluations are not recorded.
            outside (`torch.Tensor` of shape `(B, T)`, *optional*): Tokens that the trainer's own support lacks.
            result ([`CorrectionResult`], *optional*): What the correction made of the batch.
        """
        if self.recorder is not None and moment.training:
            self.recorder.add(batch, old, sampling, mask, result, moment.step)
        stats = mismatch_metrics(old, sampling, mask)
        return stats if outside is None else stats | support_metrics(outside, mask)

    def correction(
        self,
        batch: Batch,
        old: Tensor,
        sampling: Tensor,
        mask: Tensor,
        moment: Moment,
        *,
        outside: Tensor | None = None,
    ) -> tuple[CorrectionResult, Statistics]:
        """What the correction makes of a batch, with the statistics of both; arguments as of [`mismatch`]. After an update
        on the rollout batch the gap is staleness as well, and only the correction is measured."""
        assert self._plan.correction is not None
        d = mismatch_log_ratio(old, sampling, mask)
        result = decide(d, sampling, mask, self._plan.correction, self.noise.estimate)
        stats = correction_metrics(mask, result, self._plan.correction.action)
        if moment.is_first_use:
            stats |= self.mismatch(batch, old, sampling, mask, moment, outside=outside, result=result)
            stats |= self.noise.statistics(d, mask)
        return result, stats

    def merged(self, stats: Statistics, moment: Moment) -> Statistics:
        """Statistics of a whole rollout batch, of all ranks, in one collective; they are logged with the next log."""
        stats = counted_as_batch(merged_over_ranks(stats, self._accelerator))
        if "noise" in stats:
            if moment.training:
                self.noise.update(stats)
            stats = {key: stat for key, stat in stats.items() if key != "noise"}
        self._window.add(moment.mode, stats)
        return stats

    def complete(self, stats: Statistics, moment: Moment, weights: Tensor | None = None) -> None:
        """Says that a rollout batch is whole, with its statistics and the weights that its loss will see."""
        if self.recorder is None or not moment.training:
            return
        if weights is not None:
            self.recorder.weigh(weights)
        self.recorder.complete(stats)

    def close(self, mode: str) -> tuple[dict[str, float], Statistics]:
        """The metrics since the last log, by key, with the statistics they come from, on the host; begins a new window."""
        stats = self._window.close(mode)
        if not stats:
            return {}, stats
        values = finalize(stats)
        if "correction/weight/mean" in values:
            values |= {name: values[key] for name, key in self._plan.ratio_logs if key in values}
        if (batches := int(values.get("correction/rejected_batches", 0))) and self._accelerator.is_main_process:
            logger.warning(
                f"The correction rejected every token of {batches} rollout batch(es) since the last log: they contributed "
                "nothing to the update. See `correction/rejected_fraction/*`; widen the bounds or find the cause of the "
                "mismatch."
            )
        return values, stats
