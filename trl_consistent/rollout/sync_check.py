# SPDX-License-Identifier: Apache-2.0
"""Judges weight syncs by a probe that trainer and engine both score."""

import logging

from torch import Tensor

from .ledger import WeightSyncError


logger = logging.getLogger(__name__)


class SyncCheck:
    """Judges weight syncs by a probe: the same short prompt, scored by trainer and engine.

    Two engines at equal weights differ by their noise, which the first sync shows. A later gap far beyond it means that
    weights did not arrive; an engine whose log-probs did not change in a single bit while the trainer's did is stale,
    however noisy it is.
    """

    # Healthy gaps are .00001 (float32, .001 with TF32) to .3 nats (int8 weights); misread weights give 1 and more.
    GARBAGE, GARBAGE_FLOAT32 = 1.0, 0.1
    # Gap that is no longer the noise of the first sync, with a floor for engines that agree to the last digit.
    FACTOR, FLOOR = 10.0, 1e-4

    def __init__(self, float32: bool = False) -> None:
        """`float32`: whether trainer and engine both compute in float32, so that less is expected of the first gap."""
        self.largest_first = self.GARBAGE_FLOAT32 if float32 else self.GARBAGE
        self.first: float | None = None
        self._trainer: Tensor | None = None
        self._engine: Tensor | None = None

    def __call__(self, trainer: Tensor, engine: Tensor) -> float:
        """Raises [`WeightSyncError`] if the sync went wrong; returns the mean gap in nats.

        Args:
            trainer (`torch.Tensor` of shape `(n,)`): Log-probs of the probe's tokens under the trainer.
            engine (`torch.Tensor` of shape `(n,)`): The same under the engine, after the sync.
        """
        gap = (trainer - engine).abs().mean().item()
        if self.first is None:
            if not gap < self.largest_first:  # also catches NaN
                raise WeightSyncError(
                    f"After the first weight sync, trainer and rollout engine differ by {gap:.3g} nats per token on a "
                    f"probe prompt (expected below {self.largest_first}). The engine holds other weights than the trainer: "
                    "weights that the engine repacks at load (quantised, MoE experts, oneDNN) were overwritten with "
                    "plain data, or the engine loaded another model."
                )
            self.first, self._trainer, self._engine = gap, trainer, engine
            logger.info(f"Trainer and rollout engine agree to {gap:.2g} nats per token after the first weight sync.")
            return gap
        assert self._trainer is not None and self._engine is not None
        limit = self.FACTOR * self.first + self.FLOOR
        trainer_moved = (trainer - self._trainer).abs().mean().item()
        engine_moved = (engine - self._engine).abs().mean().item()
        numbers = (
            f"trainer and rollout engine differ by {gap:.3g} nats per token on a probe prompt (first sync: "
            f"{self.first:.3g}); since the engine last changed, the trainer moved by {trainer_moved:.3g} and the "
            f"engine by {engine_moved:.3g}"
        )
        if engine_moved == 0 and trainer_moved > max(self.first, self.FLOOR):
            raise WeightSyncError(
                f"The rollout engine is stale: {numbers}. The sync reached none of its weights: check that the "
                "trained parameters are streamed under names the engine knows, and that sleep mode did not drop them."
            )
        if not gap < limit:
            cause = (
                "The engine is further off than without any sync: its weights are garbage, as when tensors that it "
                "repacks at load (quantised, MoE experts, oneDNN) were overwritten with plain data"
                if not gap <= trainer_moved + limit
                else "Part of its weights are stale: typical are a tied lm_head, adapters that were not merged, and "
                "modules_to_save"
            )
            raise WeightSyncError(f"The weight sync is not exact: {numbers}. {cause}.")
        if engine_moved > 0:
            self._trainer, self._engine = trainer, engine
        return gap
