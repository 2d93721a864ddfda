# SPDX-License-Identifier: Apache-2.0
"""What we rely on in TRL beyond its documented API. Holds for trl 1.16."""

import contextlib
import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .substitution import substituted


TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""`vllm_importance_sampling_mode` values that TRL itself computes."""

PASS_THROUGH_MODE = "token_mask"
"""With open bounds, the TRL mode that leaves the ratio as it is: stands in for the modes TRL does not know."""

GRPO_MODULES = ("trl", "trl.trainer", "trl.trainer.grpo_trainer", "trl.trainer.grpo_config")
"""Modules a script may import `GRPOTrainer` or `GRPOConfig` from."""


def old_logprobs_computed(trainer: Any, computed: bool) -> contextlib.AbstractContextManager[None]:
    """While `_generate_and_score_completions` decides on old log-probs: compute them, or leave them out.

    With its correction off, TRL computes them if `gradient_accumulation_steps % (steps_per_generation *
    num_iterations)` is not 0; between `_generate` and `_calculate_rewards`, nothing else reads the former.
    """
    args = trainer.args
    steps = args.gradient_accumulation_steps
    if (steps % (args.steps_per_generation * trainer.num_iterations) != 0) != computed:
        steps = 0.5 if computed else 0
    return substituted(args, gradient_accumulation_steps=steps)


def text_tokenizer(trainer: Any) -> Any:
    """The tokenizer of `trainer`, also where its processing class is that of a vision model."""
    return trainer._tokenizer


def first_prompt(trainer: Any) -> Any:
    """The first prompt of the training data; `None` where looking at it would consume it, call a transform, or need more
    than the prompt (images, an environment)."""
    from datasets import Dataset

    dataset = trainer.train_dataset
    if not isinstance(dataset, Dataset) or not len(dataset) or trainer.environment_factories is not None:
        return None
    columns = set(dataset.column_names)
    if "prompt" not in columns or columns & {"image", "images"}:
        return None
    return dataset.with_format(None)[0]["prompt"]


def first_prompt_ids(trainer: Any) -> list[int]:
    """The ids that TRL makes of the first prompt; empty where it cannot be looked at."""
    prompt = first_prompt(trainer)
    return [] if prompt is None else list(trainer._tokenize_prompts([prompt])[0][0])


def group_advantages(rewards: Any, num_generations: int, scale_rewards: str) -> Any:
    """What TRL makes of the summed rewards of groups of completions: NaN is out of the baseline and gets 0.

    TRL has no function for it; a test compares the two, for its aggregation `sum_then_normalize`.
    """
    import torch
    from trl.trainer.utils import nanstd

    groups = rewards.view(-1, num_generations)
    advantages = groups - torch.nanmean(groups, dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (nanstd(groups, dim=1).unsqueeze(1) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (nanstd(rewards) + 1e-4)
    return torch.nan_to_num(advantages.flatten(), nan=0.0)


def copy_into_reference(model: Any, reference: Any) -> None:
    """Makes `reference` equal to `model`; without one, for an adapter, TRL takes the adapter "ref" if there is one."""
    from trl.trainer.callbacks import SyncRefModelCallback

    if reference is not None:
        SyncRefModelCallback.sync_target_model(model, reference, 1.0)
        return
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    name = model.active_adapter
    if "ref" not in model.peft_config:
        config = copy.deepcopy(model.peft_config[name])
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = False  # some initializations rewrite the base weights, under the live adapter
        model.add_adapter("ref", config)
    set_peft_model_state_dict(model, get_peft_model_state_dict(model, adapter_name=name), adapter_name="ref")


def generation_class_replaced(replacement: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """`GRPOTrainer.__init__` builds its vLLM backend from this module-level name."""
    return substituted(importlib.import_module("trl.trainer.grpo_trainer"), VLLMGeneration=replacement)


def engine_class_replaced(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> contextlib.AbstractContextManager:
    """`VLLMGeneration._init_vllm` builds the colocated engine from this module-level name."""
    module = importlib.import_module("trl.generation.vllm_generation")
    return substituted(module, LLM=wrap(module.LLM))


def fused_head_replaced(head: Any) -> contextlib.AbstractContextManager[None]:
    """The forward that `add_fused_lm_head` gives a model takes log-probs from `apply` of this module-level name."""
    return substituted(importlib.import_module("trl.trainer.utils"), _ChunkedLogProbFunction=head)


def client_class_replaced(replacement: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """`VLLMGeneration._init_vllm` builds the client of a server from this module-level name."""
    return substituted(importlib.import_module("trl.generation.vllm_generation"), VLLMClient=replacement)


def server_prompt_logprobs(client: Any, ids: list[int]) -> list[float]:
    """Log-probs that a vLLM server computes of the tokens of `ids` after the first, asked through TRL's `client`."""
    scored = client.get_sequence_logprobs([ids], prompt_lengths=[1], top_logprobs=0)
    return [logprob for [logprob] in scored["actual_logprobs"][0]]


def server_client_stub(logprobs_mode: str) -> Any:
    """A client that answers what `GRPOTrainer.__init__` asks of `vllm_generation.vllm_client`, without a server."""
    return SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": logprobs_mode}})


def colocated_engine_stub(max_model_length: int) -> Any:
    """An object with what TRL's loop over tool calls reads of `vllm_generation.llm`, without an engine."""
    return SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_length)))


def vllm_is_available() -> bool:
    """Whether TRL sees a vLLM (of any build) in this environment."""
    from trl.import_utils import is_vllm_available

    return is_vllm_available()


def split_launch_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments of `trl grpo` into those of `accelerate launch` and those of the script, as TRL does.

    Exits on `--help`. Runs inside a swap, so that the parser knows our options.
    """
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import _subtract_subsequence
    from trl.scripts.grpo import make_parser

    parser = make_parser(prog="trl-consistent grpo")
    *_, from_config, from_command_line = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    launch = resolve_accelerate_config_argument(from_config + from_command_line)
    return launch, _subtract_subsequence(argv, from_command_line)
