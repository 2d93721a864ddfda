# SPDX-License-Identifier: Apache-2.0
"""Training on truncated samples: the trainer's log-probs, loss and gradients on the support of the engine."""

import contextlib
import math

import pytest
import torch
from transformers import GenerationConfig

from trl_consistent.support import Sampling
from trl_consistent.upstream.substitution import substituted

from .. import inside
from ..short_training import (
    ConsistentGRPOTrainer,
    GRPOTrainer,
    assert_same_training,
    build,
    noise,
    synthetic_engine,
    train,
)
from ..tiny import dataset
from .test_old_logprobs import ONE_STEP, assert_same_step, both


SETTINGS = [
    {"top_p": 0.8},
    {"top_k": 8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"top_p": 0.8, "top_k": 8, "min_p": 0.05, "repetition_penalty": 1.2},
]
ids = "+".join


@pytest.mark.parametrize("old_logprobs", ["recompute", "reuse", "rollout"])
@pytest.mark.parametrize("settings", SETTINGS, ids=ids)
def test_on_the_engine_s_support_the_ratio_is_one(tiny_model, tmp_path, settings, old_logprobs):
    options = {"correction": "tis", "temperature": 0.9, **settings}
    off = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options).logs[:3]
    on = train(
        ConsistentGRPOTrainer,
        tiny_model,
        tmp_path,
        rollout_support=True,
        old_logprobs=old_logprobs,
        **options,
    ).logs[:3]
    for before, after in zip(off, on, strict=True):
        assert before["mismatch/abs_diff/mean"] > 0.01
        assert after["mismatch/abs_diff/max"] < 5e-5  # float32, in batches and one by one
        assert after["mismatch/ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert after["mismatch/outside_support_fraction"] == 0
        assert "mismatch/outside_support_fraction" not in before
    if "repetition_penalty" not in settings:  # truncation: every ratio is the mass that was kept
        assert off[0]["mismatch/ratio/max"] < 1 + 5e-5


def test_settings_in_generation_kwargs_count(tiny_model, tmp_path):
    options = {"top_p": 0.5, "generation_kwargs": {"top_p": 0.9, "top_k": 9}, "rollout_support": True}
    log = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options).logs[0]
    assert log["mismatch/abs_diff/max"] < 5e-5


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_reuse_is_recompute_on_the_support(tiny_model, tmp_path, lora, beta):
    options = {
        "rollout_support": True,
        "correction": "tis_two_sided",
        "lora": lora,
        "beta": beta,
        **SETTINGS[-1],
    }
    recomputed, reused = both(tiny_model, tmp_path, lambda: noise(0.8), **options)
    assert_same_step(recomputed, reused)
    key = "mismatch/outside_support_fraction"
    assert recomputed.logs[0][key] == reused.logs[0][key] == 0


@pytest.mark.parametrize("old_logprobs", ["recompute", "reuse"])
def test_tokens_outside_the_trainer_s_support_are_counted(tiny_model, tmp_path, old_logprobs):
    # the engine keeps the mass .95 and the trainer .6 of it: tokens beyond are the trainer's sampled tokens all the same
    options = {"top_p": 0.95, "correction": "tis", "old_logprobs": old_logprobs, "rollout_support": True}
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options, **ONE_STEP)
    inside.set_sampling(trainer, Sampling(top_p=0.6))
    trainer.train()
    log = trainer.state.log_history[0]
    assert 0.05 < log["mismatch/outside_support_fraction"] < 0.6
    assert math.isfinite(log["mismatch/diff/mean"]) and log["mismatch/nonfinite_count"] == 0


@pytest.mark.parametrize("old_logprobs", ["recompute", "reuse"])
def test_what_the_reference_would_drop_is_not_counted(tiny_model, tmp_path, old_logprobs):
    options = {"top_p": 0.8, "correction": "tis", "old_logprobs": old_logprobs, "rollout_support": True}
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, beta=0.1, **options, **ONE_STEP)
    with torch.no_grad():
        trainer.ref_model.lm_head.weight.neg_()
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["kl/k1"] > 1 and math.isfinite(log["kl"])
    assert log["mismatch/outside_support_fraction"] == 0


@contextlib.contextmanager
def dense_forward(settings, temperature):
    """TRL's trainer, with the log-probs of whole logits restricted by the processors of transformers."""
    from ..unit.test_support import ORDERS, transformers_logits

    def dense(self, model, input_ids, attention_mask, logits_to_keep, *args, compute_entropy=False, **kwargs):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1].float()
        rows = []
        for row in range(len(input_ids)):
            logps = []
            for position in range(input_ids.shape[1] - logits_to_keep, input_ids.shape[1]):
                seen = input_ids[row, :position][attention_mask[row, :position].bool()].unique().unsqueeze(0)
                raw, token = logits[row, position - 1].unsqueeze(0), input_ids[row, position]
                shaped = transformers_logits(raw, seen, temperature, ORDERS["vllm"], **settings)
                penalty = {"repetition_penalty": settings["repetition_penalty"]}
                untruncated = transformers_logits(raw, seen, temperature, (), **penalty)
                shaped = torch.where(torch.arange(shaped.shape[1]) == token, untruncated, shaped)  # it was sampled
                logps.append(shaped.log_softmax(-1)[0, token])
            rows.append(torch.stack(logps))
        logps = torch.stack(rows).masked_fill(attention_mask[:, -logits_to_keep:] == 0, 0.0)
        return logps, torch.zeros_like(logps) if compute_entropy else None, None

    with substituted(GRPOTrainer, _get_per_token_logps_and_entropies=dense):
        yield


@pytest.mark.parametrize("options", [{}, {"lora": True}, {"beta": 0.1}, {"gradient_checkpointing": True}], ids=ids)
def test_three_steps_equal_those_of_a_dense_reference(tiny_model, tmp_path, options):
    options = {**SETTINGS[-1], "learning_rate": 1e-3, "temperature": 0.9, "max_grad_norm": 1e9, **options}
    if "gradient_checkpointing" in options:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    ours = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.3), rollout_support=True, **options)
    with dense_forward(SETTINGS[-1], 0.9):
        theirs = train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.3), **options)
    for got, want in zip(ours.gradients, theirs.gradients, strict=True):
        assert any(x.abs().max() > 1e-3 for x in want.values())
        for name in want:
            torch.testing.assert_close(got[name], want[name], atol=2e-5, rtol=2e-4)
    for mine, trl in zip(ours.logs[:3], theirs.logs[:3], strict=True):
        assert mine["loss"] == pytest.approx(trl["loss"], abs=1e-5)


def test_the_reference_is_restricted_too_so_that_its_kl_starts_at_zero(tiny_model, tmp_path):
    options = {**SETTINGS[-1], "beta": 0.1, **ONE_STEP, "rollout_support": True}
    for lora in (False, True):
        log = train(ConsistentGRPOTrainer, tiny_model, tmp_path, lora=lora, **options).logs[0]
        assert abs(log["kl"]) < 1e-6


def test_bf16_training_works(tiny_model, tmp_path):
    options = {**SETTINGS[-1], "rollout_support": True, "correction": "tis"}
    keep = train(ConsistentGRPOTrainer, tiny_model, tmp_path, bf16=True, **options)
    assert keep.logs[0]["mismatch/abs_diff/mean"] < 0.1  # the engine computes in float32
    assert all(x.isfinite().all() for x in keep.gradients[0].values())


def test_neutral_settings_leave_trl_s_head_in_place_bit_for_bit(tiny_model, tmp_path):
    assert_same_training(
        train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.2)),
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), rollout_support=True),
    )


@pytest.mark.parametrize("settings", [*SETTINGS, {"top_p": 0.75, "min_p": 0.2}], ids=ids)
def test_it_follows_transformers_generate(tiny_model, tmp_path, settings):
    options = {"use_vllm": False, "rollout_support": True, "temperature": 0.9, **settings}
    trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
    tokenizer = trainer.processing_class
    encoded = tokenizer([row["prompt"] for row in dataset().select(range(4))], return_tensors="pt", padding=True,
                        padding_side="left", return_token_type_ids=False)  # fmt: skip
    torch.manual_seed(0)
    trainer.model.eval()
    config = GenerationConfig(**trainer.generation_kwargs, output_scores=True, return_dict_in_generate=True)
    output = trainer.model.generate(**encoded, generation_config=config)
    completions = output.sequences[:, encoded["input_ids"].shape[1] :]
    engine = torch.stack([scores.log_softmax(-1) for scores in output.scores], dim=1)
    engine = engine.gather(-1, completions.unsqueeze(-1))[..., 0]
    mask = (completions == tokenizer.eos_token_id).cumsum(-1).cumsum(-1) <= 1  # up to the first EOS
    attention = torch.cat([encoded["attention_mask"], mask.long()], dim=1)
    with torch.no_grad():
        ours, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, output.sequences, attention, completions.shape[1], batch_size=3
        )
    torch.testing.assert_close(ours[mask], engine[mask], atol=1e-5, rtol=1e-5)


def test_penalties_on_outputs_are_refused_with_tools(tiny_model, tmp_path):
    def tool(a: int) -> int:
        """Adds.

        Args:
            a: A number.

        Returns:
            Another.
        """
        return a

    options = {"rollout_support": True, "generation_kwargs": {"presence_penalty": 0.5}}
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
    assert inside.sampling(trainer).presence_penalty == 0.5
    trainer.tools = [tool]
    with pytest.raises(ValueError, match="presence_penalty"):
        inside.sampling_to_follow(trainer)
