# SPDX-License-Identifier: Apache-2.0
"""What we rely on in transformers beyond its documented API."""

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

from .substitution import substituted


VERSIONS = {"transformers": ">=5.17,<5.25"}

NAMES = {
    "transformers:Trainer": {
        "_save_checkpoint": "overridden, and called between steps; writes everything a training goes on from",
        "_load_optimizer_and_scheduler": "overridden; called with the checkpoint before a training goes on",
        "_get_output_dir": "the folder that holds the checkpoints",
        "callback_handler": "holds the callbacks, those of trackers included",
        "is_fsdp_enabled": "whether FSDP shards the model",
        "is_deepspeed_enabled": "whether DeepSpeed does",
        "current_gradient_accumulation_steps": "micro-batches of this optimizer step; set once training has begun",
    },
    "transformers:TrainingArguments": {"_VALID_DICT_FIELDS": "fields that take JSON on the command line"},
    "transformers:PreTrainedModel": {"_tied_weights_keys": "names of the weights that can be tied"},
    "transformers:GenerationMixin": {"_get_logits_processor": "replaced; builds the processors of every `generate`"},
    "transformers.generation.continuous_batching:ContinuousMixin": {
        "generate_batch": "replaced; takes a config with `return_logprobs`, and returns outputs with `logprobs`"
    },
    "transformers.trainer_callback:ExportableState": {"state": "the state that goes with checkpoints"},
}


def dropout_in(model: Any) -> str | None:
    """The name of a module of `model` that drops something while training; `None` if none does.

    transformers passes attention dropout as a float, peft and torch use modules.
    """
    for name, module in model.named_modules():
        rates = [getattr(module, "p", 0.0)] if type(module).__name__.startswith("Dropout") else []
        rates += [value for key, value in vars(module).items() if "dropout" in key and isinstance(value, float)]
        if any(rate > 0 for rate in rates):
            return name
    return None


def tied_weight_names(model: Any) -> tuple[str, ...]:
    """Names of the weights of a transformers model that its config ties to another one."""
    tied = model._tied_weights_keys if model.config.get_text_config().tie_word_embeddings else None
    return tuple(tied or ())


def last_logits_processor(processor: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Every `generate` of transformers calls `processor` after all others.

    What is passed as `logits_processor` comes before the temperature and the truncations.
    """
    from transformers import GenerationMixin

    build = GenerationMixin._get_logits_processor

    def with_ours(model: Any, *args: Any, **kwargs: Any) -> Any:
        processors = build(model, *args, **kwargs)
        processors.append(processor)
        return processors

    return substituted(GenerationMixin, _get_logits_processor=with_ours)


def batched_outputs_seen(see: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Every `generate_batch` of transformers computes log-probs, and shows `see` its outputs."""
    from transformers.generation.continuous_batching import ContinuousMixin

    generate_batch = ContinuousMixin.generate_batch

    def seen(model: Any, *args: Any, continuous_batching_config: Any, **kwargs: Any) -> Any:
        config = copy.copy(continuous_batching_config)
        config.return_logprobs = True
        outputs = generate_batch(model, *args, continuous_batching_config=config, **kwargs)
        see(outputs)
        return outputs

    return substituted(ContinuousMixin, generate_batch=seen)


def save_checkpoint(trainer: Any) -> str:
    """Saves a checkpoint now, as transformers does between steps, unless this step has one; returns where it is."""
    from accelerate.utils import broadcast_object_list
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    path = os.path.join(trainer._get_output_dir(trial=None), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
    [is_there] = broadcast_object_list([os.path.isdir(path)])  # rank 0 says, for all take part
    if not is_there:
        trainer._save_checkpoint(trainer.model, trial=None)
    return path
