# SPDX-License-Identifier: Apache-2.0
"""Each finding of the audit has a setup that plants it and one that clears it; precision asked for is precision got."""

import ast
import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from trl_consistent import ConsistentGRPOTrainer
from trl_consistent.rollout import checks
from trl_consistent.rollout.audit import audit, report, table
from trl_consistent.rollout.checks import Finding
from trl_consistent.rollout.engine import EngineSettings
from trl_consistent.rollout.precision import (
    check_deterministic,
    check_precision,
    compute_dtype,
    named_dtype,
    precision_arguments,
    weights_dtype,
)

from .. import inside
from ..short_training import build, synthetic_engine, train
from .test_config import config


FLOAT32 = EngineSettings(dtype=torch.float32, head_dtype=torch.float32, logprobs_mode="processed_logprobs")


def found(tiny_model, tmp_path, engine=FLOAT32, prepare=lambda trainer: None, **options):
    """Codes of what the audit finds."""
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_audit="off", **options)
        prepare(trainer)
        return {finding.code: finding for finding in audit(trainer, engine)}


def engine(**changes):
    return EngineSettings(**{**FLOAT32.__dict__, **changes})


def test_a_plain_setup_has_no_findings(tiny_model, tmp_path):
    assert found(tiny_model, tmp_path) == {}
    assert found(tiny_model, tmp_path, lora=True) == {}
    assert found(tiny_model, tmp_path, engine=EngineSettings()) == {}, "an engine that says nothing"


PLANTED = {
    "dtype": ({"engine": engine(dtype=torch.bfloat16)}, {"engine": engine(dtype=torch.float32)}),
    "dtype of the trainer": ({"bf16": True}, {"bf16": True, "engine": engine(dtype=torch.bfloat16)}),
    "bfloat16-twice": (
        {"bf16": True, "engine": engine(dtype=torch.bfloat16, head_dtype=torch.bfloat16)},
        {"fp16": False, "engine": engine(dtype=torch.float32)},
    ),
    "quantized-engine": ({"engine": engine(quantization="compressed-tensors")}, {}),
    "fp32-head": (
        {
            "bf16": True,
            "cast_lm_head_to_fp32": True,
            "engine": engine(dtype=torch.bfloat16, head_dtype=torch.bfloat16),
        },
        {"bf16": True, "cast_lm_head_to_fp32": True, "engine": engine(dtype=torch.bfloat16)},
    ),
    "fp32-head of the engine": (
        {"bf16": True, "engine": engine(dtype=torch.bfloat16)},
        {"bf16": True, "engine": engine(dtype=torch.bfloat16, head_dtype=torch.bfloat16)},
    ),
    "raw-logprobs": ({"engine": engine(logprobs_mode="raw_logprobs")}, {}),
    "temperature": ({"generation_kwargs": {"temperature": 0.7}}, {"temperature": 0.7}),
    "reshaped-sampling": ({"top_p": 0.8}, {"top_p": 0.8, "rollout_support": True}),
    "reshaped-sampling of transformers": (
        {"use_vllm": False, "generation_kwargs": {"typical_p": 0.5}},
        {"use_vllm": False, "generation_kwargs": {"presence_penalty": 0.5}},  # which transformers does not know
    ),
    "reshaped-sampling by a bias": (
        {"generation_kwargs": {"logit_bias": {3: 1.0}}},
        {"generation_kwargs": {"seed": 3}},
    ),
    "dropout": (
        {"inputs": {"peft_config": LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear")}},
        {"inputs": {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear")}},
    ),
    "half-adapters": ({"lora": True, "prepare": lambda trainer: trainer.model.to(torch.bfloat16)}, {"lora": True}),
    "rounded-merge": (
        {"lora": True, "bf16": True, "engine": engine(dtype=torch.bfloat16)},
        {"lora": True, "bf16": True},
    ),
    "casting-batches": (
        {"use_vllm": False, "use_transformers_continuous_batching": True, "bf16": True},
        {"use_vllm": False, "use_transformers_continuous_batching": True},
    ),
    "model-implementation": (
        {"engine": engine(model_class="TransformersForCausalLM")},
        {"engine": engine(model_class="LlamaForCausalLM")},
    ),
    "extra-stops": ({"generation_kwargs": {"stop_token_ids": [5]}}, {"generation_kwargs": {"stop_token_ids": []}}),
    "extra-stops of the model": (
        {"prepare": lambda trainer: setattr(trainer.model.config, "eos_token_id", [1, 7])},
        {"prepare": lambda trainer: setattr(trainer.model.config, "eos_token_id", [1])},
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_planted_is_found_and_what_is_cleared_is_not(tiny_model, tmp_path, case):
    planted, cleared = PLANTED[case]
    code = case.split(" ")[0]
    assert code in found(tiny_model, tmp_path, **planted)
    assert code not in found(tiny_model, tmp_path, **cleared)


def test_a_quantized_base_under_adapters_is_found(tiny_model, tmp_path):
    # bitsandbytes needs a GPU: what transformers says of a model that it quantized is set by hand
    def quantized(trainer):
        trainer.model.base_model.model.is_quantized = True

    assert "quantized-base" in found(tiny_model, tmp_path, lora=True, prepare=quantized)
    assert "quantized-base" not in found(tiny_model, tmp_path, lora=True)


def test_experts_are_found(tiny_model, moe_model, tmp_path):
    assert "moe-routing" in found(moe_model, tmp_path)
    assert "moe-routing" not in found(tiny_model, tmp_path)


def gpt2(tokenizer):
    torch.manual_seed(0)
    settings = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(**settings, **quiet, bos_token_id=None, eos_token_id=1, pad_token_id=0))


def test_absolute_positions_are_found_and_are_a_gap_indeed(tiny_model, tokenizer, tmp_path):
    inputs = {"processing_class": tokenizer}
    options = {"use_vllm": False, "inputs": inputs}
    assert "absolute-positions" in found(gpt2(tokenizer), tmp_path, **options)
    assert "absolute-positions" not in found(tiny_model, tmp_path, use_vllm=False)
    # prompts of one, two and three tokens; and the remedy: prompts of one length
    padded = train(ConsistentGRPOTrainer, gpt2(tokenizer), tmp_path, max_steps=1, **options)
    equal = train(
        ConsistentGRPOTrainer, gpt2(tokenizer), tmp_path, max_steps=1, rows=[{"prompt": "one two"}] * 8, **options
    )
    assert equal.logs[0]["mismatch/abs_diff/max"] < 1e-4
    assert padded.logs[0]["mismatch/abs_diff/max"] > 0.01


def with_bos(tiny_model, times):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.bos_token = "w0"
    bos = ("w0", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join(["w0"] * times + ["$A"]), special_tokens=[bos]
    )
    return tokenizer


CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"


def test_prompts_with_two_or_no_bos_are_found(tiny_model, tmp_path):
    def codes(tokenizer, prompt):
        return found(tiny_model, tmp_path, inputs={"processing_class": tokenizer}, rows=[{"prompt": prompt}] * 8)

    message = [{"role": "user", "content": "one two"}]
    assert "bos" not in codes(with_bos(tiny_model, 1), "one two")
    assert "2 'w0'" in codes(with_bos(tiny_model, 2), "one two")["bos"].found
    without = with_bos(tiny_model, 1)
    without.chat_template = CHAT  # tokenized without special tokens, and the template brings none
    assert "wants one" in codes(without, message)["bos"].found
    without.chat_template = "w0 " + CHAT
    assert "bos" not in codes(without, message)


def test_plain_prompts_for_a_model_that_chats_are_found(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = CHAT
    inputs = {"processing_class": tokenizer}
    assert "chat-template" in found(tiny_model, tmp_path, inputs=inputs)
    conversation = [{"prompt": [{"role": "user", "content": "one two"}]}] * 8
    assert "chat-template" not in found(tiny_model, tmp_path, inputs=inputs, rows=conversation)

    def rendered_otherwise(trainer):
        trainer.chat_template = "{# another #}" + CHAT

    assert "chat-template" in found(tiny_model, tmp_path, inputs=inputs, rows=conversation, prepare=rendered_otherwise)


def test_every_code_has_a_case():
    here = {case.split(" ")[0] for case in PLANTED}
    here |= {"quantized-base", "moe-routing", "absolute-positions", "bos", "chat-template"}
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(checks))) if isinstance(n, ast.Call)]
    findings = [call for call in calls if getattr(call.func, "id", "") == "Finding"]
    assert {call.args[0].value for call in findings} == here


def test_findings_are_printed_once_and_strictness_refuses_them(tiny_model, tmp_path, caplog):
    with synthetic_engine(), caplog.at_level(logging.INFO):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, top_p=0.8)
    [record] = [record for record in caplog.records if "disagree" in record.message]
    assert record.levelno == logging.WARNING and "rollout_support=True" in record.message
    with synthetic_engine(), pytest.raises(ValueError, match="(?s)`rollout_audit='strict'`.*reshaped-sampling"):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, top_p=0.8, rollout_audit="strict")
    caplog.clear()
    with synthetic_engine(), caplog.at_level(logging.INFO):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, top_p=0.8, rollout_audit="off")
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_audit="strict")
    assert "reshaped" not in caplog.text and "Nothing in the settings" in caplog.text


def test_a_note_is_no_warning(caplog):
    note = Finding("a-note", "this", "that", "other", warns=False)
    with caplog.at_level(logging.INFO):
        report([note], strict=True)
    assert caplog.records[0].levelno == logging.INFO


def test_the_table_fits_a_terminal_and_puts_warnings_first():
    note = Finding("a-note", "x " * 60, "that", "other", warns=False)
    lines = table([note, Finding("a-warning", "this", "that", "other")]).splitlines()
    assert lines[0].startswith("code") and lines[1].startswith("a-warning") and lines[2].startswith("a-note")
    assert max(map(len, lines)) <= 140 and len(lines) > 4


# --- precision -------------------------------------------------------------------------------------------------------


def mixing(precision, native_amp=True, distributed="NO"):
    kind = SimpleNamespace(value=distributed)
    return SimpleNamespace(mixed_precision=precision, native_amp=native_amp, distributed_type=kind)


def test_the_dtype_of_a_trainer_is_that_of_its_mixed_precision_or_else_of_its_weights(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    assert compute_dtype(model, mixing("no")) == torch.bfloat16
    assert compute_dtype(model, mixing("fp16")) == torch.float16
    assert compute_dtype(model.float(), mixing("no")) == torch.float32
    assert compute_dtype(model, mixing("fp16", native_amp=False)) == torch.float32, "accelerate ignores it on a CPU"
    assert compute_dtype(model, mixing("bf16", native_amp=False, distributed="DEEPSPEED")) == torch.bfloat16


def test_a_wider_head_is_not_what_the_layers_compute_in(tied_model, tmp_path):
    options = {"model_init_kwargs": {"dtype": "bfloat16"}, "rollout_fp32_lm_head": True}
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tied_model, tmp_path, **options)
    assert next(trainer.model.parameters()).dtype == torch.float32, "of the embedding, tied to the head"
    assert compute_dtype(trainer.model, trainer.accelerator) == torch.bfloat16
    with synthetic_engine(), pytest.raises(ValueError, match="the trainer computes in torch.bfloat16"):
        build(ConsistentGRPOTrainer, tied_model, tmp_path, **options, rollout_precision="fp32", bf16=None)


def test_a_large_vocabulary_does_not_outvote_the_layers():
    sizes = {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16()
    model.get_output_embeddings().float()
    assert weights_dtype(model) == torch.bfloat16


def test_float16_is_refused_where_accelerate_ignores_it(tiny_model, tmp_path):
    with synthetic_engine(), pytest.raises(ValueError, match="'fp16'.*computes in torch.float32.*float16 on a CPU"):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_precision="fp16", bf16=None)


def test_a_head_in_float32_is_one_in_generate_under_mixed_precision_too(tiny_model, tmp_path):
    options = {"use_vllm": False, "bf16": True, "max_steps": 1}
    trainer_only, both = (
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, **{name: True}, **options)
        for name in ("cast_lm_head_to_fp32", "rollout_fp32_lm_head")
    )
    found = [{f.code for f in audit(k.trainer, inside.engine_settings(k.trainer))} for k in (trainer_only, both)]
    assert found == [{"fp32-head", "bfloat16-twice"}, {"bfloat16-twice"}]
    gaps = [keep.logs[0]["mismatch/abs_diff/mean"] for keep in (trainer_only, both)]
    assert gaps[1] < 0.9 * gaps[0]


def test_a_server_s_head_must_be_what_was_asked_for(tiny_model, tmp_path):
    with (
        synthetic_engine(settings=engine(head_dtype=torch.bfloat16)),
        pytest.raises(ValueError, match="rollout_fp32_lm_head.*--hf-overrides"),
    ):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_fp32_lm_head=True)


@pytest.mark.parametrize("rows", ["streaming", "images", "no prompt", "transformed"])
def test_training_data_that_cannot_be_looked_at_is_left_alone(tiny_model, tmp_path, rows):
    tokenizer, calls = with_bos(tiny_model, 2), []
    plain = Dataset.from_list([{"prompt": "one two"}] * 8)
    data = {
        "streaming": IterableDataset.from_generator(lambda: iter([{"prompt": "one two"}] * 8)),
        "images": plain.add_column("images", [[] for _ in range(8)]),
        "no prompt": plain.rename_column("prompt", "question"),
        "transformed": plain.with_transform(lambda batch: calls.append(1) or batch),
    }[rows]

    def prepare(trainer):
        trainer.train_dataset = data

    codes = found(tiny_model, tmp_path, inputs={"processing_class": tokenizer}, prepare=prepare)
    assert ("bos" in codes) == (rows == "transformed") and not calls


def test_precision_arguments_follow_the_trainer():
    assert precision_arguments("engine", False, torch.float32) == {}
    assert precision_arguments("match", False, torch.bfloat16) == {"dtype": "bfloat16"}
    assert precision_arguments("fp16", True, torch.float16) == {
        "dtype": "float16",
        "hf_overrides": {"head_dtype": "float32"},
    }
    assert named_dtype("torch.bfloat16") == named_dtype("bfloat16") == torch.bfloat16
    assert named_dtype("auto") is None and named_dtype(None) is None


@pytest.mark.parametrize(
    ("precision", "expected"), [("fp16", (True, False)), ("bf16", (False, True)), ("fp32", (False, False))]
)
def test_a_precision_sets_both_sides(tmp_path, precision, expected):
    args = config(tmp_path, rollout_precision=precision, bf16=None, use_vllm=True)
    assert (args.fp16, args.bf16) == expected


def test_a_precision_does_not_contradict_what_is_set(tmp_path):
    with pytest.raises(ValueError, match="`rollout_precision='fp32'`.*contradicts `bf16=True`"):
        config(tmp_path, rollout_precision="fp32", bf16=True)
    with pytest.raises(ValueError, match="`rollout_precision='bf16'`.*contradicts `fp16=True`"):
        config(tmp_path, rollout_precision="bf16", fp16=True, bf16=None)
    with pytest.raises(ValueError, match="contradicts `rollout_engine_kwargs="):
        config(tmp_path, use_vllm=True, rollout_precision="match", rollout_engine_kwargs={"dtype": "float32"})
    with pytest.raises(ValueError, match="contradicts `rollout_engine_kwargs="):  # as on the command line
        config(tmp_path, use_vllm=True, rollout_precision="match", rollout_engine_kwargs='{"dtype": "float32"}')
    overrides = {"hf_overrides": {"head_dtype": "bfloat16"}}
    with pytest.raises(ValueError, match="`rollout_fp32_lm_head=True`.*contradicts"):
        config(tmp_path, use_vllm=True, rollout_fp32_lm_head=True, rollout_engine_kwargs=overrides)
    with pytest.raises(ValueError, match="`rollout_precision` is 'fp8'"):
        config(tmp_path, rollout_precision="fp8")


def test_weights_that_are_not_what_was_asked_for_are_refused(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    with synthetic_engine(), pytest.raises(ValueError, match="the trainer computes in torch.bfloat16.*'float32'"):
        build(ConsistentGRPOTrainer, model, tmp_path, rollout_precision="fp32", bf16=None)
    with pytest.raises(
        ValueError, match="engine computes in torch.bfloat16.*Restart the vLLM server with `--dtype float32`"
    ):
        check_precision("match", torch.float32, torch.bfloat16)
    check_precision("engine", torch.float32, torch.bfloat16)
    check_precision("match", torch.float32, None)


def test_an_fp32_head_is_one_on_both_sides(tmp_path):
    assert config(tmp_path, rollout_fp32_lm_head=True).cast_lm_head_to_fp32
    assert not config(tmp_path).cast_lm_head_to_fp32


def test_determinism_is_refused_where_there_is_none(tiny_model, tmp_path, monkeypatch):
    with synthetic_engine(), pytest.raises(ValueError, match="`rollout_deterministic=True`.*this is cpu"):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_deterministic=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"this is compute capability \(7, 5\)"):
        check_deterministic(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_deterministic(torch.device("cuda"))
    assert config(tmp_path, rollout_deterministic=True, use_vllm=True).full_determinism
    for elsewhere in ({}, {"use_vllm": True, "vllm_mode": "server"}):
        with pytest.raises(ValueError, match="is for a colocated vLLM.*VLLM_BATCH_INVARIANT=1"):
            config(tmp_path, rollout_deterministic=True, **elsewhere)


def test_adapters_decode_in_the_trainer_s_precision_when_asked_to(tiny_model, tmp_path):
    # accelerate's mixed precision does not reach what adapters wrap: decoded in float32, trained in bfloat16
    options = {"use_vllm": False, "lora": True, "bf16": True, "max_steps": 1}
    engine, match = (
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_precision=p, **options).logs[0]
        for p in ("engine", "match")
    )
    assert match["mismatch/abs_diff/mean"] < 0.8 * engine["mismatch/abs_diff/mean"]
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_audit="off", **options)
    assert [f.code for f in audit(trainer, inside.engine_settings(trainer))] == ["dtype"]


def test_a_plain_config_is_audited_too(tiny_model, tmp_path, caplog):
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, report_to="none", min_p=0.1, num_generations=4
    )
    with synthetic_engine(), caplog.at_level(logging.WARNING):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, args=args)
    assert "min_p=0.1" in caplog.text
    caplog.clear()
    with synthetic_engine(), caplog.at_level(logging.WARNING):
        build(GRPOTrainer, tiny_model, tmp_path, min_p=0.1)
    assert "min_p" not in caplog.text
