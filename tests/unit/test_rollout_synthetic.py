# SPDX-License-Identifier: Apache-2.0
"""The synthetic engine: what it reports is what it sampled from, but for the planted fault; and trainers take it for vLLM."""

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from trl_consistent import ConsistentGRPOTrainer
from trl_consistent.rollout.engine import EngineSettings, RolloutEngine
from trl_consistent.rollout.synthetic import (
    SyntheticEngine,
    bfloat16_logprobs,
    constant_offset,
    gaussian_noise,
    healthy,
    shifted_logprobs,
    synthetic_engine,
    unscored_tokens,
)
from trl_consistent.rollout.vllm import ConsistentVLLMGeneration

from .. import inside
from ..short_training import build, train


IDS = [5, 6, 7]
LOGPS = [-1.0, -2.0, -4.0]


def accelerator(kind="NO"):
    return SimpleNamespace(process_index=0, distributed_type=SimpleNamespace(value=kind))


def engine(path, dtype=torch.float32, **options):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    options = {"max_completion_length": 6, "temperature": 1.0, **options}
    return SyntheticEngine(model, accelerator(), AutoTokenizer.from_pretrained(path), **options)


def test_plants_do_what_their_names_say():
    assert healthy(IDS, LOGPS) == LOGPS
    # old - sampling = 0.25 where old are the true log-probs: sampling = old - 0.25
    assert constant_offset(0.25)(IDS, LOGPS) == [-1.25, -2.25, -4.25]
    assert shifted_logprobs()(IDS, LOGPS) == [None, -1.0, -2.0]
    assert shifted_logprobs(-1)(IDS, LOGPS) == [-2.0, -4.0, None]
    assert shifted_logprobs(5)(IDS, LOGPS) == [None, None, None]
    assert unscored_tokens(2)(IDS, LOGPS) == [-1.0, None, -4.0]
    # bfloat16 has 8 bits of significand: between 1 and 2, steps of 1/128 = 0.0078125; 1.3 lies nearest to 1.296875
    assert bfloat16_logprobs(IDS, [-1.3, -2.0, -4.0]) == [-1.296875, -2.0, -4.0]


def test_gaussian_noise_has_the_scale_and_repeats_itself():
    first, second, other = gaussian_noise(0.5), gaussian_noise(0.5), gaussian_noise(0.5, seed=8)
    reported = first(IDS * 2000, [-1.0] * 6000)
    assert reported == second(IDS * 2000, [-1.0] * 6000) != other(IDS * 2000, [-1.0] * 6000)
    # of 6000 draws, the standard deviation of the mean is 0.5 / sqrt(6000) = 0.0065, that of the deviation 0.0046
    values = torch.tensor(reported)
    assert values.mean().item() == pytest.approx(-1, abs=0.03) and values.std().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (1.0, {}),
        (0.5, {"temperature": 0.5}),
        (2.0, {"temperature": 0.5, "generation_kwargs": {"temperature": 2.0}}),
        (3.0, {"temperature": 0.5, "generation_kwargs": {"temperature": 2.0}, "actual_temperature": 3.0}),
    ],
)
def test_what_is_reported_is_what_was_sampled_from(tiny_model, temperature, options):
    synthetic = engine(tiny_model, **options)
    prompts, completions, logprobs, tokens = synthetic.generate([[3, 4], [3, 4], [5]], None, 1)
    assert prompts == [[3, 4], [3, 4], [5]] and completions[0] != completions[1]
    assert [[row[0] for row in rows] for rows in tokens] == completions
    for prompt, ids, reported in zip(prompts, completions, logprobs, strict=True):
        logits = synthetic.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
        assert (torch.tensor(reported) - expected).abs().max() < 1e-5


def test_a_completion_ends_at_eos_or_at_its_length(tiny_model):
    synthetic = engine(tiny_model, max_completion_length=4)
    (whole,) = synthetic.generate([[3]], None, 1)[1]
    assert len(whole) == 4 and whole[1] not in whole[:1]
    again = engine(tiny_model, max_completion_length=4)
    again.processing_class = SimpleNamespace(eos_token_id=whole[1])
    assert again.generate([[3]], None, 1)[1] == [whole[:2]]


@pytest.mark.parametrize("cls", [GRPOTrainer, ConsistentGRPOTrainer])
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_any_trainer_takes_it_for_vllm_without_vllm_or_a_server(tiny_model, tmp_path, monkeypatch, cls, mode):
    monkeypatch.setattr(inside.VLLM_IS_AVAILABLE, lambda: False)
    with synthetic_engine(constant_offset(0.25)):
        trainer = build(cls, tiny_model, tmp_path, vllm_mode=mode)
    assert isinstance(trainer.vllm_generation, SyntheticEngine)


def test_outside_of_the_block_trainers_ask_for_vllm_again(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(inside.VLLM_IS_AVAILABLE, lambda: False)
    with pytest.raises(KeyError), synthetic_engine():
        raise KeyError
    with pytest.raises(ImportError, match="vLLM is not installed"):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path)


def test_the_trainer_measures_what_was_planted(tiny_model, tmp_path):
    options = {"max_steps": 1, "correction": "none"}
    first = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options).logs[0]
    assert first["mismatch/abs_diff/max"] < 1e-5
    planted = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=constant_offset(0.25), **options).logs[0]
    assert planted["mismatch/diff/mean"] == pytest.approx(0.25, abs=1e-5)
    silent = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=unscored_tokens(1), **options).logs[0]
    assert silent["mismatch/unscored_fraction"] == 1
    with synthetic_engine(actual_temperature=0.5):
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
    trainer.train()
    assert trainer.state.log_history[0]["mismatch/abs_diff/mean"] > 0.1


def test_an_engine_that_takes_every_other_sync_is_stale_in_between(tiny_model):
    synthetic, tokens = engine(tiny_model, sync_every=2), torch.tensor([[3, 4, 5]])

    def now():
        with torch.no_grad():
            return synthetic.model(input_ids=tokens).logits.clone()

    def train_and_sync():
        with torch.no_grad():
            for weight in synthetic.model.parameters():
                weight += 0.01
        synthetic.sync_weights()

    train_and_sync()
    first = now()
    assert torch.equal(synthetic._logits(tokens), first)
    train_and_sync()
    assert torch.equal(synthetic._logits(tokens), first) and not torch.equal(now(), first)
    train_and_sync()
    assert torch.equal(synthetic._logits(tokens), now())


def test_a_stale_engine_shows_in_the_mismatch(tiny_model, tmp_path):
    gaps = []
    for sync_every in (1, 3):
        with synthetic_engine(sync_every=sync_every):
            trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, correction="none", lora=True)
            trainer.train()
        logs = [log["mismatch/abs_diff/mean"] for log in trainer.state.log_history if "loss" in log]
        assert logs[0] < 1e-5, "the first sync is taken"
        gaps.append(logs[1:])
    assert max(gaps[0]) < 1e-5 < 1e-3 < min(gaps[1])


def test_what_it_says_of_itself_is_planted_too(tiny_model, tmp_path):
    settings = EngineSettings(dtype=torch.bfloat16)
    with synthetic_engine(settings=settings), pytest.raises(ValueError, match="torch.bfloat16 and the trainer in"):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_precision="match")


def test_what_it_cannot_do_it_says(tiny_model, caplog):
    with caplog.at_level(logging.WARNING):
        engine(tiny_model, generation_kwargs={"top_p": 0.9, "logit_bias": {}, "bad_words": []})
        engine(tiny_model, structured_outputs_regex="a*")
    assert [record.message for record in caplog.records] == [
        "The synthetic engine ignores bad_words, logit_bias of `generation_kwargs`.",
        "The synthetic engine ignores `vllm_structured_outputs_regex`.",
    ]
    with pytest.raises(ValueError, match="prompts have images: train with vLLM"):
        engine(tiny_model).generate([[3]], [["an image"]], 1)
    with pytest.raises(ValueError, match="`sync_every` is 0"):
        engine(tiny_model, sync_every=0)
    with pytest.raises(ValueError, match="which FSDP does not keep there"):
        SyntheticEngine(None, accelerator("FSDP"), None, max_completion_length=1)


def test_every_engine_has_what_the_protocol_names(tiny_model):
    assert isinstance(engine(tiny_model), RolloutEngine)
    members = {"settings", "weight_fingerprint", "sync_weights", "generate"}
    assert {name for name in vars(RolloutEngine) if not name.startswith("_")} == members
    assert all(hasattr(ConsistentVLLMGeneration, name) for name in members)
    for cls in (RolloutEngine, SyntheticEngine, ConsistentVLLMGeneration):
        assert list(inspect.signature(cls.generate).parameters) == list(
            inspect.signature(VLLMGeneration.generate).parameters
        ), cls
