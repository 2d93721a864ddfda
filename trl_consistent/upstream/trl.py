# SPDX-License-Identifier: Apache-2.0
"""What we rely on in TRL beyond its documented API."""

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from .substitution import substituted


VERSIONS = {"trl": ">=1.16,<1.17"}

NAMES = {
    "trl:GRPOTrainer": {
        # methods that `ConsistentGRPOTrainer` overrides
        "_generate_and_score_completions": "returns the rollout batch; decides whether old log-probs are computed",
        "_generate": "returns completions; called before that decision",
        "_generate_single_turn": "returns completions and their log-probs, from `vllm_generation` or `generate`",
        "_calculate_rewards": "returns rewards of all ranks; called after that decision",
        "_get_per_token_logps_and_entropies": "the forward; returns log-probs, entropies and the auxiliary loss",
        "_compute_loss": "reads advantages, weights and the mask from its inputs after the forward",
        # what we read or call
        "_step": "micro-batches since the training began",
        "_metrics": "lists of values for the next log, by mode and key",
        "_tag_names": "tags of a model card",
        "_tokenizer": "the tokenizer, also of a vision model",
        "_tokenize_prompts": "ids of prompts, as they are generated from",
        # attributes without documentation
        "vllm_generation": "the rollout engine, with `sync_weights` and `generate`",
        "use_vllm": "whether there is one",
        "vllm_mode": "`colocate` or `server`",
        "vllm_importance_sampling_correction": "substituted; whether TRL computes its ratio, and old log-probs for it",
        "vllm_importance_sampling_mode": "written; read at every rollout batch",
        "vllm_importance_sampling_clip_min": "written; read at every rollout batch",
        "vllm_importance_sampling_clip_max": "written; read at every rollout batch",
        "use_transformers_continuous_batching": "whether `generate_batch` samples",
        "generation_config": "how `generate` decodes",
        "rollout_func": "written; called in place of an engine",
        "tools": "whether completions have several turns",
        "environment_factories": "whether prompts come from an environment",
        "chat_template": "the template that prompts are rendered with, `None` for the tokenizer's",
        "eos_token_ids": "ids that end a completion",
        "temperature": "what the forward divides logits by",
        "max_completion_length": "a denominator of the loss",
        "num_iterations": "substituted; optimizer steps that a batch is used for",
        "num_generations": "completions of a group",
        "num_generations_eval": "the same in an evaluation",
        "reward_weights": "weights of the reward functions",
        "scale_rewards": "what advantages are divided by",
        "importance_sampling_level": "whether the ratio of the loss is of tokens or sequences",
        "beta": "substituted; the weight of the reference KL in the loss",
        "ref_model": "the reference, `None` if it is an adapter or there is none",
        "aux_loss_enabled": "whether the loss has a term of the router",
        "router_aux_loss_coef": "the weight of that term",
    },
    "trl.trainer.grpo_trainer": {"VLLMGeneration": "replaced; `GRPOTrainer` builds its rollout engine from it"},
    "trl.generation.vllm_generation:VLLMGeneration": {
        "_init_vllm": "overridden; builds the engine or the client",
        "_iter_named_params": "overridden; yields the weights of a sync",
        "_fix_param_name_to_vllm": "a parameter's name in vLLM",
        "_dist": "whether the model is sharded: `is_fsdp`, `is_zero3`",
        "llm": "the colocated engine",
        "vllm_client": "the client of a server",
        "mode": "`colocate` or `server`",
        "enable_sleep_mode": "whether the engine sleeps, and gets its weights when it wakes up",
        "tensor_parallel_size": "ranks that share an engine",
        "generation_kwargs": "what goes before TRL's sampling parameters",
    },
    "trl.generation.vllm_generation": {
        "LLM": "replaced; the colocated engine is built from it. There only if vLLM is installed",
        "VLLMClient": "replaced; the client of a server is built from it",
    },
    "trl.generation.vllm_client:VLLMClient": {
        "_get": "overridden; every GET but that of `get_server_info`",
        "_post": "overridden; every POST",
        "_start_weight_update": "overridden; opens a weight update",
        "_finish_weight_update": "overridden; closes it",
        "update_named_params": "overridden; a weight sync",
        "init_communicator": "overridden; called by `_init_vllm`",
        "close_communicator": "overridden; called at exit",
        "check_server": "overridden; waits for the server",
        "get_server_info": "the configuration that a server runs with",
        "get_sequence_logprobs": "scores given tokens",
        "get_world_size": "workers of the server",
        "communicator": "what sends weights",
        "session": "that of `requests`, whose retries are turned off",
        "base_url": "where the server is",
        "group_port": "the port that the trainer listens on",
        "model": "the name of the served model",
    },
    "trl.distributed:DistributedBackend": {
        "is_fsdp": "whether FSDP shards the model",
        "is_zero3": "whether DeepSpeed ZeRO-3 does",
    },
    "trl.trainer.utils": {
        "_ChunkedLogProbFunction": "replaced; the forward takes log-probs from it",
        "nanstd": "what advantages are divided by",
    },
    "trl.trainer.callbacks:SyncRefModelCallback": {"sync_target_model": "copies weights into the reference"},
    "trl.import_utils": {"is_vllm_available": "whether a vLLM of any build is installed"},
    "trl.data_utils": {"is_conversational": "whether a prompt is a list of messages"},
    "trl.scripts.grpo": {"make_parser": "the parser of `trl grpo`"},
    "trl.cli.accelerate_config": {"resolve_accelerate_config_argument": "the config that `--accelerate_config` names"},
    "trl.cli.commands.training": {"_subtract_subsequence": "the arguments that are not those of `accelerate launch`"},
}

TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""`vllm_importance_sampling_mode` values that TRL itself computes."""

PASS_THROUGH_MODE = "token_mask"
"""With open bounds, the TRL mode that leaves the ratio as it is: stands in for the modes TRL does not know."""

GRPO_MODULES = ("trl", "trl.trainer", "trl.trainer.grpo_trainer", "trl.trainer.grpo_config")
"""Modules a script may import `GRPOTrainer` or `GRPOConfig` from."""


@contextlib.contextmanager
def old_logprobs_computed(trainer: Any, computed: bool) -> Iterator[None]:
    """Makes TRL compute old log-probs, or leave them out, while `_generate_and_score_completions` decides on it.

    TRL has no switch for it. With its own correction off, TRL computes them for a batch that is still in use when the
    weights have changed, that is, if `gradient_accumulation_steps % (steps_per_generation * num_iterations)` is not 0.
    So within the block, the trainer says that its batch outlives an optimizer step by one micro-batch (computed), or
    that a single micro-batch uses it up (left out). The block lasts from the end of `_generate` to the beginning of
    `_calculate_rewards`, where TRL reads these numbers for nothing else; a contract test counts. To override the
    forward instead would look plainer, but an override can only leave log-probs out, and it cannot tell this call of
    the forward from that for the reference.
    """
    args = trainer.args
    batch = args.gradient_accumulation_steps + 1 if computed else 1
    with substituted(args, steps_per_generation=batch), substituted(trainer, num_iterations=1):
        yield


def micro_batches_begun(trainer: Any) -> int:
    """Number of micro-batches since the training began, the current one left out: what TRL times generations by."""
    return trainer._step


def text_tokenizer(trainer: Any) -> Any:
    """The tokenizer of `trainer`, also where its processing class is that of a vision model."""
    return trainer._tokenizer


def first_prompt(trainer: Any) -> Any:
    """The first prompt of the training data; `None` where it cannot be looked at without side effects.

    Looking would consume a stream, or call a transform; or a prompt needs more (images, an environment).
    """
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
