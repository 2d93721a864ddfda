# SPDX-License-Identifier: Apache-2.0
"""Every upstream name, signature and batch key we rely on. When one fails after an upgrade, `trl_consistent/upstream/` has the place."""

import ast
import importlib
import inspect
import re
import textwrap

import pytest
import trl.generation.vllm_generation as vllm_generation
import trl.trainer.grpo_trainer as grpo_trainer
from trl import GRPOConfig, GRPOTrainer

from trl_consistent.upstream.peft import peft_layers_that_merge_in_place
from trl_consistent.upstream.transformers import tied_weight_names
from trl_consistent.upstream.trl import (
    GRPO_MODULES,
    PASS_THROUGH_MODE,
    TRL_MODES,
    colocated_engine_stub,
    engine_class_replaced,
    generation_class_replaced,
    old_logprobs_computed,
    server_client_stub,
    vllm_is_available,
)

from ..short_training import build, noise, synthetic_engine
from ..tiny import dataset


def source(function) -> str:
    return textwrap.dedent(inspect.getsource(function))


def test_constructor_order():
    names = list(inspect.signature(GRPOTrainer.__init__).parameters)
    assert names[:4] == ["self", "model", "reward_funcs", "args"]
    assert "rollout_func" in names


def test_methods_we_override_have_the_signatures_we_know():
    def parameters(method):
        return list(inspect.signature(method).parameters)

    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    assert parameters(GRPOTrainer._compute_loss) == ["self", "model", "inputs"]
    assert parameters(GRPOTrainer.log) == ["self", "logs", "start_time"]
    assert "return completion_ids, logprobs" in source(GRPOTrainer._generate_single_turn)
    assert "return logps, entropies, aux_loss" in source(GRPOTrainer._get_per_token_logps_and_entropies)


def test_the_backend_and_the_engine_are_built_from_module_level_names():
    assert grpo_trainer.VLLMGeneration is vllm_generation.VLLMGeneration
    assert "self.vllm_generation = VLLMGeneration(" in source(GRPOTrainer.__init__)
    assert "self.llm = LLM(" in source(vllm_generation.VLLMGeneration._init_vllm)
    assert 'logprobs_mode="processed_logprobs"' in source(vllm_generation.VLLMGeneration._init_vllm)
    assert "self.vllm_client = VLLMClient(" in source(vllm_generation.VLLMGeneration._init_vllm)


def test_backend_attributes_and_results():
    init = source(vllm_generation.VLLMGeneration.__init__)
    for name in ("model", "accelerator", "processing_class", "mode", "enable_sleep_mode"):
        assert f"self.{name} = {name}" in init
    generate = source(vllm_generation.VLLMGeneration.generate)
    assert "return prompt_ids, completion_ids, logprobs, logprob_token_ids" in generate
    assert "reset_prefix_cache()" in source(vllm_generation.VLLMGeneration.sync_weights)
    assert "lp[0] for lp in seq" in source(GRPOTrainer._generate_single_turn)  # why sampled_token_first exists


def test_what_trl_reads_of_its_backend_has_a_stub_in_the_synthetic_engine():
    read = re.findall(r"self\.vllm_generation\.([\w.]+)", source(GRPOTrainer))
    assert sorted(set(read)) == [
        "generate",
        "llm.llm_engine.model_config.max_model_len",
        "sync_weights",
        "vllm_client.get_server_info",
    ]
    assert '.get_server_info()["model_config"]["logprobs_mode"]' in source(GRPOTrainer.__init__)
    assert server_client_stub("raw").get_server_info()["model_config"]["logprobs_mode"] == "raw"
    assert colocated_engine_stub(64).llm_engine.model_config.max_model_len == 64


def test_the_client_of_a_server_has_the_methods_we_override_and_call():
    from trl.generation.vllm_client import VLLMClient

    def parameters(method):
        return list(inspect.signature(method).parameters)

    assert parameters(VLLMClient.__init__)[1:] == [
        "base_url",
        "host",
        "server_port",
        "group_port",
        "connection_timeout",
    ]
    assert parameters(VLLMClient.check_server) == ["self", "total_timeout", "retry_interval"]
    assert parameters(VLLMClient.init_communicator) == ["self", "device"]
    assert parameters(VLLMClient.update_named_params) == ["self", "metadata", "named_params"]
    assert parameters(VLLMClient._get) == parameters(VLLMClient._post) == ["self", "url", "kwargs"]
    assert "self.session.mount(" in source(VLLMClient.__init__)
    assert "self._start_weight_update()" in source(VLLMClient.weight_update)
    assert "/finish_weight_update" in source(VLLMClient._finish_weight_update)
    assert '["vllm_config"]' in source(VLLMClient.get_server_info)
    assert "VLLM_SERVER_DEV_MODE=1" in source(VLLMClient.get_server_info)
    scoring = parameters(VLLMClient.get_sequence_logprobs)
    assert scoring[1:4] == ["sequences", "prompt_lengths", "top_logprobs"]


def test_what_rank_0_gets_from_a_server_is_read_on_every_rank():
    body = source(vllm_generation.VLLMGeneration.generate)
    init = source(vllm_generation.VLLMGeneration._init_vllm).rstrip()
    assert init.endswith("accelerator.wait_for_everyone()") and init.count("wait_for_everyone") == 1
    read = "all_completion_ids[process_slice]"
    assert body.index("self.vllm_client.generate(") < body.index("broadcast_object_list(") < body.index(read)
    sync = source(vllm_generation.VLLMGeneration.sync_weights)
    assert "self.vllm_client.update_named_params(self._weight_metadata, self._iter_named_params())" in sync
    assert "self.vllm_client.reset_prefix_cache()" in sync


def test_a_checkpoint_can_be_saved_between_steps():
    from transformers import Trainer

    assert list(inspect.signature(Trainer._save_checkpoint).parameters) == ["self", "model", "trial"]
    assert "_get_output_dir(trial=trial)" in source(Trainer._save_checkpoint)


def test_a_sync_streams_into_the_engine_s_model_one_tensor_at_a_time():
    sync = source(vllm_generation.VLLMGeneration.sync_weights)
    assert "for name, param in self._iter_named_params():" in sync
    assert "model_executor.driver_worker.model_runner.model.load_weights([(name, param)])" in sync
    iterate = source(vllm_generation.VLLMGeneration._iter_named_params)
    assert "model.merge_adapter()" in iterate and "self._fix_param_name_to_vllm(name" in iterate
    assert 'removeprefix("base_model.model.")' in iterate  # why names start at the base model
    for name in ("is_fsdp", "is_zero3"):
        assert isinstance(getattr(importlib.import_module("trl.distributed").DistributedBackend, name), property)
    generate = source(vllm_generation.VLLMGeneration.generate)
    assert "if self.state.global_step != self._last_loaded_step" in source(GRPOTrainer._generate_single_turn)
    assert "self.enable_sleep_mode and self._llm_weights_sleeping" in generate and "self.sync_weights()" in generate


def test_peft_names():
    from peft.tuners.lora.layer import Linear, LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge

    assert "self.merged_adapters.append(active_adapter)" in source(Linear.merge)
    assert "self._caches: dict[str, Any] = {}" in source(LoraLayer.__init__)
    assert "self.parameter_name = parameter_name" in source(ParamWrapper.__init__)
    assert "adapter_names = module.active_adapters" in source(check_adapters_to_merge)
    assert isinstance(BaseTunerLayer.merged, property)
    assert all(isinstance(layer, type) for layer in peft_layers_that_merge_in_place())


def test_tied_weight_names(tiny_model, tied_model):
    from transformers import AutoModelForCausalLM

    assert tied_weight_names(AutoModelForCausalLM.from_pretrained(tiny_model)) == ()
    assert tied_weight_names(AutoModelForCausalLM.from_pretrained(tied_model)) == ("lm_head.weight",)


def test_trl_knows_these_modes_and_passes_an_open_mask_through():
    body = source(GRPOTrainer._generate_and_score_completions)
    for mode in TRL_MODES:
        assert f'"{mode}"' in body
    assert PASS_THROUGH_MODE == "token_mask" and "-math.inf" in body


def test_trainer_attributes_trl_reads_at_every_step():
    body = source(GRPOTrainer._generate_and_score_completions) + source(GRPOTrainer._compute_loss)
    for name in ("mode", "clip_min", "clip_max", "correction"):
        assert f"self.vllm_importance_sampling_{name}" in body
    assert 'self._metrics[mode]["reward"].append' in body


def test_a_rollout_batch_is_made_every_so_many_micro_batches():
    assert "self._step += 1" in source(GRPOTrainer.training_step)
    prepare = source(GRPOTrainer._prepare_inputs)
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in prepare
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in prepare


def test_loss_mask_is_completion_mask_times_tool_mask_and_only_the_former_is_attention():
    body = source(GRPOTrainer._compute_loss)
    assert 'completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]' in body
    assert "attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)" in body
    names = [n.slice.value for n in ast.walk(ast.parse(body)) if isinstance(n, ast.Subscript)
             and isinstance(n.value, ast.Name) and n.value.id == "inputs" and isinstance(n.slice, ast.Constant)]  # fmt: skip
    assert names.count("tool_mask") == 1
    assert 'inputs["importance_sampling_ratio"]' in body and 'inputs["num_items_in_batch"]' in body


def test_the_loss_reads_what_we_change_after_its_forward_and_the_mask_from_the_batch_itself():
    body = source(GRPOTrainer._compute_loss)
    forward = body.index("self._get_per_token_logps_and_entropies(")
    call = " ".join(body[forward : body.index(")", forward)].split())
    assert "( model, input_ids, attention_mask, logits_to_keep, compute_entropy=True" in call
    for read in (
        'inputs["advantages"]',
        'inputs.get("old_per_token_logps")',
        'inputs["importance_sampling_ratio"]',
        'inputs.get("importance_sampling_ratio")',
        'inputs["num_items_in_batch"]',
        "get_high_entropy_mask(",
    ):
        assert body.index(read) > forward, read
    assert body.index("mask = completion_mask if") < forward  # the tensor, which is why it is changed in place
    assert "+ self.router_aux_loss_coef * aux_loss / normalizer" in body


def test_the_fused_head_takes_log_probs_from_a_module_level_name_and_gives_it_what_we_know():
    import trl.trainer.utils as utils

    head = source(utils.add_fused_lm_head)
    call = " ".join(head[head.index("_ChunkedLogProbFunction.apply(") :].split())
    assert call.startswith(
        "_ChunkedLogProbFunction.apply( hidden_states[mask] if compact else hidden_states.reshape(-1, "
        "hidden_states.size(-1)), weight, bias, labels[mask] if compact else labels.clamp(min=0).reshape(-1), "
        "temperature, _CHUNKED_LOGPROB_CHUNK_SIZE, final_logit_softcapping, logit_scale, outputs, )"
    )
    assert "mask = labels != -100" in head and "labels = labels[:, 1:]" in head
    assert "log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = per_token" in head
    assert 'outputs=("log_probs", "entropy")' in source(GRPOTrainer.__init__)
    forward = source(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "for start in range(0, input_ids.size(0), batch_size):" in forward
    assert "labels = input_ids_batch.masked_fill(attention_mask_batch == 0, -100)" in forward
    assert "labels[:, :-logits_to_keep] = -100" in forward and forward.count("fused_lm_head=True") == 1
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[1:6] == ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]


def test_the_policy_s_old_log_probs_come_before_the_reference_s():
    body = source(GRPOTrainer._generate_and_score_completions)
    old = body.index("old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(")
    assert old < body.index("ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(")


def test_the_order_in_which_engines_shape_the_distribution():
    from transformers import GenerationMixin

    body = source(GenerationMixin._get_logits_processor)
    names = ["RepetitionPenalty", "Temperature", "TopK", "TopP", "MinP"]
    places = [body.index(f"{name}Logits") for name in names]
    assert places == sorted(places)


@pytest.mark.vllm
def test_the_order_in_which_vllm_shapes_the_distribution():
    from vllm.model_executor.layers.utils import apply_penalties
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    forward, sample = source(Sampler.forward), source(Sampler.sample)
    assert forward.index("self.apply_logits_processors(") < forward.index("self.sample(")
    places = [
        sample.rindex(step)
        for step in ("self.apply_temperature(", "logitsprocs.argmax_invariant", "self.topk_topp_sampler(")
    ]
    assert places == sorted(places)
    assert MinPLogitsProcessor.is_argmax_invariant(None)
    penalties = source(apply_penalties)
    assert penalties.index("apply_repetition_penalties(logits") < penalties.index("logits -= frequency_penalties")


def test_whether_old_log_probs_are_computed_hangs_on_two_things():
    body = source(GRPOTrainer._generate_and_score_completions)
    for name in ("args.gradient_accumulation_steps", "args.steps_per_generation", "num_iterations"):
        assert body.count(f"self.{name}") == 1, "old_logprobs_computed substitutes it, and nothing else may read it"
    assert "self.args.gradient_accumulation_steps % generate_every != 0 or (" in body
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in body
    decision = body.index("generate_every = ")
    assert body.index("self._generate(") < decision < body.index("self._calculate_rewards(")


def test_losses_divide_by_what_we_think():
    body = source(GRPOTrainer._compute_loss)
    assert '["grpo", "sapo"]' in body and ".sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()" in body
    assert "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)" in body
    assert "loss = (per_token_loss * mask).sum(-1).mean()" in body  # luspo
    assert '["cispo", "dapo", "vespo"]' in body and 'inputs["num_items_in_batch"].clamp(min=1.0)' in body


def test_batch_keys(tiny_model, tmp_path):
    with synthetic_engine(noise(0.1)):
        trainer = build(GRPOTrainer, tiny_model, tmp_path)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(row) for row in dataset().select([0] * 8)])
    assert set(batch) == {
        "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch",
        "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps",
    }  # fmt: skip
    shape = batch["completion_ids"].shape
    for key in ("completion_mask", "old_per_token_logps", "sampling_per_token_logps"):
        assert batch[key].shape == shape
    assert batch["num_items_in_batch"].shape == () and batch["num_items_in_batch"] == batch["completion_mask"].sum()


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"steps_per_generation": 4}], ids=str)
def test_old_log_probs_are_computed_or_left_out_as_asked(tiny_model, tmp_path, computed, options):
    with synthetic_engine():
        trainer = build(GRPOTrainer, tiny_model, tmp_path, vllm_importance_sampling_correction=False, **options)
    trainer.model.train()
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    before = vars(trainer.args) | {"num_iterations of the trainer": trainer.num_iterations}
    with old_logprobs_computed(trainer, computed):
        batch = trainer._generate_and_score_completions([dict(row) for row in dataset().select([0] * rows)])
    assert ("old_per_token_logps" in batch) == computed
    assert vars(trainer.args) | {"num_iterations of the trainer": trainer.num_iterations} == before


def test_old_log_probs_are_left_out_only_when_the_training_forward_has_them(tiny_model, tmp_path):
    off = {"vllm_importance_sampling_correction": False}
    for options, expected in (({}, False), ({"num_iterations": 2}, True), ({"steps_per_generation": 4}, True)):
        with synthetic_engine():
            trainer = build(GRPOTrainer, tiny_model, tmp_path, **off, **options)
        trainer.model.train()
        rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        batch = trainer._generate_and_score_completions([dict(row) for row in dataset().select([0] * rows)])
        assert ("old_per_token_logps" in batch) == expected, options


def test_logging_averages_what_is_appended_and_clears_it(tiny_model, tmp_path):
    with synthetic_engine():
        trainer = build(GRPOTrainer, tiny_model, tmp_path)
    trainer.model.train()
    trainer._metrics["train"]["x"] = [1.0, 3.0]
    trainer.log(logs := {})
    assert logs["x"] == 2.0 and not trainer._metrics["train"]


def test_config_fields_a_preset_writes():
    for name in ("correction", "mode", "clip_min", "clip_max", "cap"):
        assert f"vllm_importance_sampling_{name}" in GRPOConfig.__dataclass_fields__
    assert "generation_kwargs" in GRPOConfig._VALID_DICT_FIELDS


def test_modules_a_script_may_import_from():
    for name in GRPO_MODULES:
        module = importlib.import_module(name)
        assert hasattr(module, "GRPOTrainer") or hasattr(module, "GRPOConfig")


def test_command_line_helpers():
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import TrainingCommand, _subtract_subsequence
    from trl.scripts.grpo import make_parser

    assert _subtract_subsequence(["--a", "1", "--b", "2"], ["--b", "2"]) == ["--a", "1"]
    assert resolve_accelerate_config_argument(["--x"]) == ["--x"]
    assert "prog" in inspect.signature(make_parser).parameters
    assert "separate_remaining_strings=True" in source(TrainingCommand.run)


@pytest.mark.vllm
def test_vllm_names():
    import vllm._custom_ops as ops
    import vllm.model_executor.models.registry as registry
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    assert list(inspect.signature(LoRARequest).parameters)[:3] == ["lora_name", "lora_int_id", "lora_path"]
    assert isinstance(ops._supports_onednn, bool)
    assert callable(registry._run_in_subprocess)
    assert current_platform.is_cpu()
    assert vllm_is_available()


@pytest.mark.vllm
def test_vllm_takes_weights_as_we_give_them():
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.worker.gpu_worker import Worker

    abstract = {"init_transfer_engine", "start_weight_update", "finish_weight_update", "receive_weights", "shutdown"}
    assert base.WeightTransferEngine.__abstractmethods__ == abstract
    assert "torch.accelerator.synchronize()" in source(base.WeightTransferEngine.update_weights)  # why we override it
    names = list(inspect.signature(WeightTransferEngineFactory.register_engine).parameters)
    assert names == ["name", "module_path_or_cls", "class_name"]
    assert list(inspect.signature(inspect.unwrap(BaseModelLoader.load_model)).parameters)[:2] == [
        "self",
        "vllm_config",
    ]
    loading = source(inspect.unwrap(Worker.load_model))
    assert loading.index("load_model(load_dummy_weights") < loading.index("WeightTransferEngineFactory.create_engine(")


def test_patches_undo_themselves_even_after_an_error():
    before = vllm_generation.LLM, grpo_trainer.VLLMGeneration
    try:
        with engine_class_replaced(lambda engine: None), generation_class_replaced(object):
            assert vllm_generation.LLM is None and grpo_trainer.VLLMGeneration is object
            raise KeyError
    except KeyError:
        pass
    assert (vllm_generation.LLM, grpo_trainer.VLLMGeneration) == before


def test_transformers_builds_its_logits_processors_in_one_place_and_batches_with_a_config():
    import inspect

    from transformers import ContinuousBatchingConfig, GenerationMixin
    from transformers.generation.continuous_batching import ContinuousMixin

    assert inspect.getsource(GenerationMixin.generate).count("self._get_logits_processor(") == 1
    assert "continuous_batching_config" in inspect.signature(ContinuousMixin.generate_batch).parameters
    assert ContinuousBatchingConfig().return_logprobs is False
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert source.count(".generate(") == 2 and "continuous_batching_config=self.continuous_batching_config" in source


def test_callbacks_of_trackers_hold_what_we_send_to():
    from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback, rewrite_logs

    assert "self.tb_writer.add_scalar(k, v, state.global_step)" in source(TensorBoardCallback.on_log)
    wandb, trackio = source(WandbCallback.on_log), source(TrackioCallback.on_log)
    assert 'self._wandb.log({**non_scalar_logs, "train/global_step": state.global_step})' in wandb
    assert 'define_metric("*", step_metric="train/global_step", step_sync=True)' in source(WandbCallback.setup)
    assert 'self._trackio.log({**non_scalar_logs, "train/global_step": state.global_step})' in trackio
    assert rewrite_logs({"a/b": 1, "eval_a/b": 2}) == {"train/a/b": 1, "eval/a/b": 2}


def test_trackio_counts_the_steps_of_its_calls():
    from trackio.context_vars import current_run
    from trackio.run import Run

    assert current_run.get() is None
    body = source(Run.log)
    assert "step = self._next_step\n" in body and "self._next_step = max(self._next_step, step + 1)" in body
