# SPDX-License-Identifier: Apache-2.0
"""The only place where tests and scripts touch private parts of `ConsistentGRPOTrainer`: a change inside the trainer changes
this file and no test. (Not named `inspect`: a script that is launched from this folder would hide Python's own module.)"""

from dataclasses import replace

from trl_consistent.training import batch as batch_module
from trl_consistent.training import checks, plan
from trl_consistent.training import trainer as module
from trl_consistent.upstream.trl import copy_into_reference


NOISE_BATCHES = "trl_consistent.training.noise.PATIENCE"
VLLM_IS_AVAILABLE = "trl_consistent.rollout.vllm.vllm_is_available"
REFERENCE_KL = "trl_consistent.training.reference.reference_kl"


def correction(trainer):
    """Returns the correction that the trainer applies, or `None`."""
    return trainer._plan.correction


def drop_trust_regions(trainer) -> None:
    """Makes the trainer's loss ignore the trust regions of its correction."""
    correction = replace(trainer._plan.correction, trust_regions=())
    trainer._plan = trainer._meter._plan = replace(trainer._plan, correction=correction)


def old_logprobs_source(trainer) -> str:
    """Returns the decision that `old_logprobs` led to: `recompute`, `reuse` or `rollout`."""
    return trainer._plan.old_logprobs


def adds_own_kl(trainer) -> bool:
    """Returns whether our KL term replaces TRL's."""
    return trainer._plan.reference is not None


def reset_reference(trainer) -> None:
    """Makes the policy its own reference, as `ref_reset_steps` does."""
    copy_into_reference(*trainer._models)


def engine_settings(trainer):
    """Returns the [`EngineSettings`] that the trainer found."""
    return checks.engine_settings(trainer)


def noise(trainer):
    """Returns the [`NoiseEstimate`] of the training so far."""
    return trainer._meter.noise.estimate


def set_noise(trainer, estimate) -> None:
    """Lets the trainer go on from another [`NoiseEstimate`]."""
    trainer._meter.noise.estimate = estimate


def sampling(trainer):
    """Returns the [`Sampling`] that the trainer's log-probs follow, or `None`."""
    return trainer._plan.sampling


def set_sampling(trainer, value) -> None:
    """Lets the trainer's log-probs follow another [`Sampling`], or none."""
    trainer._plan = replace(trainer._plan, sampling=value)


def sampling_to_follow(trainer):
    """Returns the [`Sampling`] that the trainer would decide on now."""
    return plan.sampling_to_follow(trainer)


def window(trainer) -> dict:
    """Returns the statistics since the last log, those of training or of evaluation, whichever is on."""
    return windows(trainer).get("train" if trainer.model.training else "eval", {})


def windows(trainer) -> dict:
    """Returns the statistics since the last log, by `train` and `eval`."""
    return trainer._meter._window._stats


def waiting_micro_batches(trainer):
    """Returns the statistics of micro-batches that have not been merged yet."""
    return trainer._so_far._stats


def loss_mask(batch):
    """Returns the mask of the tokens that enter the loss."""
    return batch_module.loss_mask(batch)


def advantages_without(trainer, rejected, rewards):
    """Returns the advantages with the rejected completions out of the baseline of their group."""
    return batch_module.groups_of(trainer).advantages_without(rejected, rewards)


def recorder(trainer):
    """Returns the trainer's recorder, or `None`."""
    return trainer._meter.recorder


def set_recorder(trainer, value, writes=True) -> None:
    """Lets the trainer record to `value`, which writes in the next step if `writes`, else not before it is due again."""
    trainer._meter.recorder = value
    if value is not None:
        value._last_step = None if writes else trainer.state.global_step + 1


def wrap_merge(trainer, wrapper) -> None:
    """Replaces the function that merges statistics over the ranks, `merge(stats) -> stats`, by `wrapper(merge)`."""
    meter, merged = trainer._meter, trainer._meter.merged
    meter.merged = lambda stats, moment: wrapper(lambda own: merged(own, moment))(stats)


def wrap_measure(trainer, wrapper) -> None:
    """Replaces the function that measures the mismatch of a batch and returns its statistics by `wrapper(measure)`."""
    trainer._meter.mismatch = wrapper(trainer._meter.mismatch)


def wrap_work_in_loss(trainer, wrapper) -> None:
    """Replaces the function that does our work between the training forward and TRL's loss by `wrapper(work)`."""
    timed = {"forwarded": wrapper(module.InLoss.forwarded)}
    module.InLoss = type("InLoss", (module.InLoss,), timed)
