# SPDX-License-Identifier: Apache-2.0
"""Where a batch stands in the training, as a value that is passed along, so that whoever needs it needs no trainer."""

from dataclasses import dataclass
from typing import Any, Literal

from ..upstream.trl import micro_batches_begun


@dataclass(frozen=True)
class Moment:
    """Where a micro-batch (or the rollout batch about to be used) stands.

    Example: `Moment(training=False)` is an evaluation.
    """

    training: bool = True
    """Whether the model trains; `False` in an evaluation."""
    step: int = 1
    """The optimizer step that is being made, from 1."""
    is_first_use: bool = True
    """Whether no update has been made on this rollout batch yet, so that the policy is still the one that sampled."""
    ends_rollout_batch: bool = True
    """Whether this is the last micro-batch of a rollout batch."""
    ends_step: bool = True
    """Whether the optimizer steps after this micro-batch."""
    micro_batches: float = 1.0
    """Micro-batches of an optimizer step, which the loss of each is divided by; 1 in an evaluation."""

    @property
    def mode(self) -> Literal["train", "eval"]:
        """The name that TRL gives the metrics of it."""
        return "train" if self.training else "eval"


def moment_of(trainer: Any) -> Moment:
    """Where the batch stands that a [`ConsistentGRPOTrainer`] is working on."""
    if not trainer.model.training:
        return Moment(training=False)
    args, step = trainer.args, micro_batches_begun(trainer)
    uses = args.steps_per_generation * trainer.num_iterations
    return Moment(
        step=trainer.state.global_step + 1,
        is_first_use=step % uses < args.gradient_accumulation_steps,
        ends_rollout_batch=(step + 1) % args.steps_per_generation == 0,
        ends_step=trainer.accelerator.sync_gradients,
        # fewer in the last step of an epoch; not there before training has begun
        micro_batches=getattr(trainer, "current_gradient_accumulation_steps", args.gradient_accumulation_steps),
    )
