# SPDX-License-Identifier: Apache-2.0
"""The KL term to the reference where its estimator is not TRL's, and the policy as its own reference every so many steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..correction.kl import reference_kl
from ..ratios import MAX_LOG_RATIO
from ..upstream.trl import copy_into_reference
from .batch import Batch, without_nonfinite
from .resumable import Resumable


_FOLDER = "reference"


@dataclass(frozen=True)
class ReferenceTerm:
    """The KL to the reference per token, in place of TRL's; `kl_estimator` and `kl_bias_correction_ratio` ask for it."""

    estimator: str = "k3"
    """One of `REFERENCE_ESTIMATORS`."""
    ratio: str = "old"
    """What `use_bias_correction_kl` multiplies by: `old` (pi / pi_old) or `sampling` (pi / mu)."""
    is_weighted: bool = False
    """TRL's `use_bias_correction_kl`."""
    importance_sampling_level: str = "token"
    """TRL's; `sequence` takes the mean log-ratio of a completion, where `ratio` is `old`."""

    def per_token(self, batch: Batch, per_token_logps: Tensor) -> Tensor:
        """KL term of each token, `(B, T)`, nats, with its gradient; `batch` is what the loss reads."""
        weights = self._weights(batch, per_token_logps) if self.is_weighted else None
        return reference_kl(per_token_logps - batch["ref_per_token_logps"], self.estimator, weights)

    def _weights(self, batch: Batch, per_token_logps: Tensor) -> Tensor:
        behavior = batch.get("old_per_token_logps")
        behavior = per_token_logps.detach() if behavior is None else behavior
        if self.ratio == "sampling":
            behavior = without_nonfinite(batch["sampling_per_token_logps"], behavior)
        log_weights = (per_token_logps - behavior).clamp(max=MAX_LOG_RATIO)
        if self.importance_sampling_level == "sequence" and self.ratio == "old":
            mask = batch["completion_mask"]
            log_weights = (log_weights * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        return torch.exp(log_weights)


class ReferenceResetCallback(Resumable):
    """Notes, every so many optimizer steps, that the reference is due to be reset; `ref_reset_steps` adds it."""

    _args, _attributes = ("steps",), ("is_due",)

    def __init__(self, steps: int):
        self.steps, self.is_due = steps, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_due = self.is_due or state.global_step % self.steps == 0

    def reset_if_due(self, model: Any, reference: Any) -> None:
        """Makes the policy its own reference if that is due; to be called between rollout batches, because the KL term of
        a batch is to one reference. Models are unwrapped; `reference` is `None` where TRL uses an adapter."""
        if self.is_due:
            copy_into_reference(model, reference)
            self.is_due = False


def save_reference(reference: Any, checkpoint: Path) -> None:
    """Writes the (unwrapped) reference model into a checkpoint, from which a resumed run takes it."""
    reference.save_pretrained(checkpoint / _FOLDER)


def load_reference(reference: Any, checkpoint: Path) -> None:
    """Loads the (unwrapped) reference model from a checkpoint, if it holds one."""
    if (folder := checkpoint / _FOLDER).exists():
        reference.load_state_dict(type(reference).from_pretrained(folder, dtype=reference.dtype).state_dict())
