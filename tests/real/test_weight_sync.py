# SPDX-License-Identifier: Apache-2.0
"""Weight syncs into a real vLLM on the CPU: exact, complete, never stale; base weights stay as they were, bit for bit."""

import logging

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_consistent import ConsistentGRPOTrainer, read_records
from trl_consistent.rollout.vllm import ConsistentVLLMGeneration, WeightSyncError
from trl_consistent.upstream.vllm import engine_model

from ..short_training import build
from .test_integration import ENGINE, free_the_engine  # noqa: F401


pytestmark = pytest.mark.vllm

BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}, "rollout_precision": "match", "rollout_engine_kwargs": None}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def trainer_of(model, tmp_path, peft_config=None, **options):
    return build(ConsistentGRPOTrainer, model, tmp_path, inputs={"peft_config": peft_config}, **{**ENGINE, **options})


def engine_tensors(trainer):
    return dict(engine_model(trainer.vllm_generation.llm).named_parameters())


def messages(caplog):
    return [record.message for record in caplog.records if record.name.startswith("trl_consistent.rollout.vllm")]


@pytest.mark.parametrize("kind", ["dense", "tied", "experts"])
def test_bfloat16_training_leaves_the_base_alone_and_the_engine_with_base_plus_adapter(
    kind, tmp_path, request, caplog
):
    path = request.getfixturevalue({"dense": "tiny_model", "tied": "tied_model", "experts": "moe_model"}[kind])
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    if kind == "experts":
        config.target_parameters = EXPERTS
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of(path, tmp_path, config, correction="tis", max_steps=4, **BFLOAT16)
        trainer.train()
        trainer.vllm_generation.sync_weights()
    assert not messages(caplog), "a healthy run has nothing to say"
    base = trainer.model.get_base_model()
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    seen = 0
    for name, weight in base.named_parameters():
        plain = name.replace(".base_layer", "")
        if "lora_" not in name:
            assert torch.equal(weight, loaded[plain]), name
            seen += 1
    assert seen == len(list(AutoModelForCausalLM.from_pretrained(path).parameters()))

    def merged(layer):
        a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
        assert b.abs().max() > 1e-3
        return (layer.base_layer.weight.float() + (b @ a) * 2.0).to(torch.bfloat16)

    engine = engine_tensors(trainer)
    for index, block in enumerate(base.model.layers):
        attention, place = block.self_attn, f"model.layers.{index}.self_attn"
        expected = torch.cat([merged(attention.q_proj), merged(attention.k_proj), merged(attention.v_proj)])
        assert torch.equal(engine[f"{place}.qkv_proj.weight"], expected)
        assert torch.equal(engine[f"{place}.o_proj.weight"], merged(attention.o_proj))


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules="all-linear", use_dora=True),
        LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]),
    ],
    ids=["dora", "head-to-save", "embedding"],  # TRL refuses adapters on the head
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:.*ensure_weight_tying")
def test_an_engine_that_ties_follows_adapters_that_do_not(config, tied_model, tmp_path):
    trainer = trainer_of(tied_model, tmp_path, config, correction="tis", max_steps=3)
    trainer.train()
    generation = trainer.vllm_generation
    generation.sync_weights()
    ours, theirs = generation.probe()
    assert (ours - theirs).abs().mean() < 2e-5
    assert ("lm_head.weight" in engine_tensors(trainer)) == (not config.use_dora)


class Skip(TrainerCallback):
    """Makes TRL believe, after one step, that the engine has its weights."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.trainer._last_loaded_step = state.global_step


@pytest.mark.parametrize("verify", ["every", "off"])
def test_a_bfloat16_engine_that_missed_a_step_gets_the_weights(verify, tiny_model, tmp_path, caplog, monkeypatch):
    skip, generated = Skip(), []
    generate = ConsistentVLLMGeneration.__base__.generate

    def record(self, *args, **kwargs):
        norm = engine_tensors(skip.trainer)["model.layers.0.input_layernorm.weight"]
        trained = skip.trainer.model.model.layers[0].input_layernorm.weight
        generated.append(torch.equal(norm, trained.to(torch.bfloat16)))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(ConsistentVLLMGeneration.__base__, "generate", record)
    with caplog.at_level(logging.WARNING):
        skip.trainer = trainer_of(
            tiny_model, tmp_path, correction="tis", max_steps=4, rollout_verify_sync=verify,
            rollout_engine_kwargs={"dtype": "bfloat16"}, callbacks=[skip],
        )  # fmt: skip
        skip.trainer.train()
    if verify == "every":
        (message,) = messages(caplog)
        assert "21 of 21 trained tensors" in message and "Synced again" in message
        assert generated == [True, True, True, True]
    else:
        assert not messages(caplog) and generated == [True, True, False, True]


def test_a_second_train_and_an_overwritten_engine_get_the_weights(tiny_model, tmp_path, caplog):
    trainer = trainer_of(tiny_model, tmp_path, correction="tis", max_steps=1)
    generation = trainer.vllm_generation
    with caplog.at_level(logging.WARNING):
        trainer.train()
        assert not messages(caplog)
        before = generation.weight_fingerprint
        trainer.train()  # to TRL, it is step 0 again, whose weights it has loaded
        assert "a second `train()`" in messages(caplog)[0] and len(messages(caplog)) == 1
        assert generation.weight_fingerprint != before and len(before) == 16
        records = [
            read_records(tmp_path / "ConsistentGRPOTrainer" / folder)[0] for folder in ("mismatch.old", "mismatch")
        ]
        assert [r.fingerprint["weights"]["fingerprint"] for r in records] == [before, generation.weight_fingerprint]
        generation.sync_weights()
        weight = engine_tensors(trainer)["model.layers.1.mlp.gate_up_proj.weight"]
        weight.data[3, 3] += 0.5
        expected = torch.cat([getattr(trainer.model.model.layers[1].mlp, n).weight for n in ("gate_proj", "up_proj")])
        generation.generate([[3, 4, 5]], None, 1)
        assert torch.equal(weight, expected)
        assert "'model.layers.1.mlp.gate_up_proj.weight' of the engine were overwritten" in messages(caplog)[1]
        generation.generate([[3, 4, 5]], None, 1)
        assert len(messages(caplog)) == 2


def test_what_no_sync_carries_is_an_error(tiny_model, tmp_path):
    trainer = trainer_of(tiny_model, tmp_path, LoraConfig(r=4, target_modules=["q_proj"]))
    trainer.vllm_generation.sync_weights()
    trainer.model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
    for name, weight in trainer.model.named_parameters():
        if ".other." in name:
            weight.requires_grad_(True)
    with pytest.raises(WeightSyncError, match="No weight sync carries the trainable '.*lora_A.other.weight'"):
        trainer.vllm_generation.sync_weights()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_after_a_resume_the_engine_holds_the_checkpoint(lora, tiny_model, tmp_path, monkeypatch):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["o_proj"]) if lora else None
    options = {"correction": "tis", "save_strategy": "steps", "save_steps": 2}
    trainer_of(tiny_model, tmp_path, config, max_steps=2, **options).train()
    free()
    held, generate = [], ConsistentVLLMGeneration.generate

    def record(self, *args, **kwargs):
        weight = engine_model(self.llm).model.layers[1].self_attn.o_proj.weight
        held.append(weight.clone())
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(ConsistentVLLMGeneration, "generate", record)
    resumed = trainer_of(tiny_model, tmp_path, config, max_steps=3, **options)
    checkpoint = tmp_path / "ConsistentGRPOTrainer" / "checkpoint-2"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    name = "model.layers.1.self_attn.o_proj"
    if lora:
        saved = load_file(checkpoint / "adapter_model.safetensors")
        a, b = (saved[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_parameter(f"{name}.weight")
        expected = base.detach() + (b @ a) * 2.0
        assert b.abs().max() > 1e-3
    else:
        expected = load_file(checkpoint / "model.safetensors")[f"{name}.weight"]
    assert len(held) == 1 and torch.equal(held[0], expected)


def free():
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def test_no_prefix_survives_a_sync(tiny_model, tmp_path, monkeypatch):
    """The prompt fills a block of the cache; keys and values of old weights would be off by far more than noise."""
    engine = {"dtype": "float32", "enable_prefix_caching": True, "block_size": 32}
    trainer = trainer_of(tiny_model, tmp_path, rollout_engine_kwargs=engine, max_completion_length=4)
    generation, prompt = trainer.vllm_generation, [5 + i % 40 for i in range(40)]
    generation.sync_weights()

    def gap():
        _, (ids,), (reported,), _ = generation.generate([prompt], None, 1)
        with torch.no_grad():
            logps = trainer.model(torch.tensor([[*prompt, *ids]])).logits[0, 39:-1].log_softmax(-1)
        ours = logps.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        return (ours - torch.tensor(reported)[:, 0]).abs().max().item()

    def change(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
        generation.sync_weights()

    assert gap() < 1e-4
    change(1)
    assert gap() < 1e-4
    monkeypatch.setattr(generation.llm, "reset_prefix_cache", lambda: None)
    change(2)
    assert gap() > 1e-3, "without the reset, the test would have noticed"


@pytest.mark.parametrize("rslora", [False, True])
def test_an_engine_that_takes_adapters_gets_nothing_else(rslora, tiny_model, tmp_path, monkeypatch, caplog):
    def no_stream(self):
        raise AssertionError

    monkeypatch.setattr(ConsistentVLLMGeneration, "_iter_named_params", no_stream)
    config = LoraConfig(r=4, target_modules="all-linear", use_rslora=rslora)
    engine = {"dtype": "float32", "enable_lora": True, "max_lora_rank": 8}
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of(tiny_model, tmp_path, config, correction="tis", max_steps=3, rollout_engine_kwargs=engine)
        trainer.train()
        generation = trainer.vllm_generation
        stale = generation.probe()
        generation.sync_weights()
        ours, theirs = generation.probe()
    assert not messages(caplog)
    assert (stale[0] - stale[1]).abs().mean() > 1e-2 and (ours - theirs).abs().mean() < 2e-5
    assert generation.llm.llm_engine.list_loras() == {4}


def test_an_engine_that_takes_adapters_needs_one(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="enable_lora.*the model has none"):
        trainer_of(tiny_model, tmp_path, rollout_engine_kwargs={"dtype": "float32", "enable_lora": True})
