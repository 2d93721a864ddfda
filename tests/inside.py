# SPDX-License-Identifier: Apache-2.0
"""The only place where tests and scripts touch private parts of `ConsistentGRPOTrainer`: a change inside the trainer changes
this file and no test. (Not named `inspect`: a script that is launched from this folder would hide Python's own module.)"""

from dataclasses import replace

from trl_consistent.training import trainer as module


NOISE_BATCHES = "trl_consistent.training.trainer._NOISE_BATCHES"
VLLM_IS_AVAILABLE = "trl_consistent.rollout.vllm.vllm_is_available"
REFERENCE_KL = "trl_consistent.training.trainer.reference_kl"


def correction(trainer):
    """Returns the correction that the trainer applies, or `None`."""
    return trainer._correction


def drop_trust_regions(trainer) -> None:
    """Makes the trainer's loss ignore the trust regions of its correction."""
    trainer._correction = replace(trainer._correction, trust_regions=())


def old_logprobs_source(trainer) -> str:
    """Returns the decision that `old_logprobs` led to: `recompute`, `reuse` or `rollout`."""
    return trainer._old_logprobs


def adds_own_kl(trainer) -> bool:
    """Returns whether our KL term replaces TRL's."""
    return trainer._own_kl


def reset_reference(trainer) -> None:
    """Makes the policy its own reference, as `ref_reset_steps` does."""
    trainer._reset_reference()


def engine_settings(trainer):
    """Returns the [`EngineSettings`] that the trainer found."""
    return trainer._engine_settings


def noise(trainer):
    """Returns the [`NoiseEstimate`] of the training so far."""
    return trainer._noise


def set_noise(trainer, estimate) -> None:
    """Lets the trainer go on from another [`NoiseEstimate`]."""
    trainer._noise = estimate


def sampling(trainer):
    """Returns the [`Sampling`] that the trainer's log-probs follow, or `None`."""
    return trainer._sampling


def set_sampling(trainer, value) -> None:
    """Lets the trainer's log-probs follow another [`Sampling`], or none."""
    trainer._sampling = value


def sampling_to_follow(trainer):
    """Returns the [`Sampling`] that the trainer would decide on now."""
    return trainer._sampling_to_follow()


def window(trainer) -> dict:
    """Returns the statistics since the last log, those of training or of evaluation, whichever is on."""
    return trainer._window.get("train" if trainer.model.training else "eval", {})


def windows(trainer) -> dict:
    """Returns the statistics since the last log, by `train` and `eval`."""
    return trainer._window


def waiting_micro_batches(trainer):
    """Returns the statistics of micro-batches that have not been merged yet."""
    return trainer._micro_batches


def loss_mask(batch):
    """Returns the mask of the tokens that enter the loss."""
    return module.ConsistentGRPOTrainer._loss_mask(batch)


def advantages_without(trainer, rejected, rewards):
    """Returns the advantages with the rejected completions out of the baseline of their group."""
    return trainer._advantages_without(rejected, rewards)


def recorder(trainer):
    """Returns the trainer's recorder, or `None`."""
    return trainer._recorder


def set_recorder(trainer, value, writes=True) -> None:
    """Lets the trainer record to `value`, which writes in the next step if `writes`, else not before it is due again."""
    trainer._recorder = value
    if value is not None:
        value._last_step = None if writes else trainer.state.global_step + 1


def wrap_merge(trainer, wrapper) -> None:
    """Replaces the function that merges statistics over the ranks, `merge(stats) -> stats`, by `wrapper(merge)`."""
    trainer._record = wrapper(trainer._record)


def wrap_measure(trainer, wrapper) -> None:
    """Replaces the function that measures the mismatch of a batch and returns its statistics by `wrapper(measure)`."""
    trainer._mismatch = wrapper(trainer._mismatch)


def wrap_work_in_loss(trainer, wrapper) -> None:
    """Replaces the function that does our work between the training forward and TRL's loss by `wrapper(work)`."""
    trainer._between_forward_and_loss = wrapper(trainer._between_forward_and_loss)
