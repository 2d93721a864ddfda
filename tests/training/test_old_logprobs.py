# SPDX-License-Identifier: Apache-2.0
"""Where the old log-probs come from: `reuse` is `recompute` without its forward, `rollout` is what the loss sees."""

import logging
import math

import pytest
import torch
from trl import GRPOTrainer

from trl_consistent import ConsistentGRPOConfig
from trl_consistent.rollout.synthetic import SyntheticEngine

from .. import inside
from ..short_training import LOSS_TYPES, ConsistentGRPOTrainer, build, noise, synthetic_engine, train


ONE_STEP = {"max_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 1e9}  # a clipped gradient would hide its size


def alternating(*offsets):
    """A plant: completion i is off by noise and, on every token, by `offsets[i % len(offsets)]`."""
    noisy, seen = noise(0.3), []

    def plant(ids, logps):
        seen.append(None)
        return [lp - offsets[(len(seen) - 1) % len(offsets)] for lp in noisy(ids, logps)]

    return plant


def both(tiny_model, tmp_path, plant, **options):
    """The first step from recomputed and from reused old log-probs."""
    return [
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant(), old_logprobs=source, **ONE_STEP, **options)
        for source in ("recompute", "reuse")
    ]


def assert_same_step(a, b, tolerance=1e-6):
    for name, gradient in a.gradients[0].items():
        scale = max(gradient.abs().max().item(), 1.0)
        assert (gradient - b.gradients[0][name]).abs().max().item() <= tolerance * scale, name
    assert a.logs[0]["loss"] == pytest.approx(b.logs[0]["loss"], abs=1e-6)
    ours = {k: v for k, v in a.logs[0].items() if k.startswith(("mismatch/", "correction/"))}
    assert len(ours) > 30
    for key, value in ours.items():
        assert b.logs[0][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 1, "beta": 0.1},
        {"gradient_accumulation_steps": 4, "lora": True},
        {"gradient_accumulation_steps": 4, "beta": 0.1},
    ],
    ids=["1,beta", "4,lora", "4,beta"],
)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_reuse_is_recompute(tiny_model, tmp_path, loss_type, options):
    options |= {"loss_type": loss_type, "correction": "tis_two_sided"}
    recomputed, reused = both(tiny_model, tmp_path, lambda: noise(0.8), **options)
    assert_same_step(recomputed, reused)
    assert recomputed.logs[0]["correction/truncated_fraction/high"] > 0.02
    assert any(gradient.abs().sum() > 0 for gradient in reused.gradients[0].values())


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_reuse_is_recompute_with_rejections(tiny_model, tmp_path, loss_type, steps):
    options = {
        "loss_type": loss_type,
        "gradient_accumulation_steps": steps,
        "correction": "tis",
        # two of three completions, and single tokens
        "correction_rejections": {"ratio/geometric": [0.5, 2.0], "k2/token": [None, 0.2]},
        "beta": 0.1,
    }
    recomputed, reused = both(tiny_model, tmp_path, lambda: alternating(0.0, 2.0, 0.0), **options)
    assert_same_step(recomputed, reused)
    log = recomputed.logs[0]
    assert 0.2 < log["correction/rejected_fraction/high"] < 0.9 and log["loss"] != 0


@pytest.mark.parametrize(
    "mode", ["sequence_mask", "geometric_truncate", "prefix_truncate", "turn_mask", "geometric_reject"]
)
def test_reuse_is_recompute_at_every_level(tiny_model, tmp_path, mode):
    bounds = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.1}
    options = {"vllm_importance_sampling_mode": mode, "gradient_accumulation_steps": 4, **bounds}
    assert_same_step(*both(tiny_model, tmp_path, lambda: noise(0.4), **options))


@pytest.mark.parametrize("preset", ["dppo_tv", "dppo_kl", "opsm"])
def test_reuse_is_recompute_with_trust_regions(tiny_model, tmp_path, preset):
    recomputed, reused = both(tiny_model, tmp_path, lambda: alternating(-1.0, 0.6, -0.6), correction=preset)
    assert_same_step(recomputed, reused)
    assert 0.02 < recomputed.logs[0]["correction/trust_region_fraction"] < 0.9


def test_reuse_logs_what_trl_would_have_logged(tiny_model, tmp_path):
    recomputed, reused = both(tiny_model, tmp_path, lambda: noise(0.8), correction="icepop")
    keys = [key for key in recomputed.logs[0] if key.startswith("sampling/")]
    assert len(keys) == 5
    for key in keys:
        assert reused.logs[0][key] == pytest.approx(recomputed.logs[0][key], rel=1e-4, abs=1e-6), key


def forwards(monkeypatch):
    """Counts calls of the model for log-probs: with gradient, and without."""
    calls = {True: 0, False: 0}
    original = GRPOTrainer._get_per_token_logps_and_entropies

    def counted(self, model, *args, **kwargs):
        hook = model.register_forward_pre_hook(lambda *_: calls.update({grad: calls[grad] + 1}))
        grad = torch.is_grad_enabled()
        try:
            return original(self, model, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    return calls


@pytest.mark.parametrize(
    ("options", "without_grad"),
    [
        ({"old_logprobs": "recompute"}, 6),  # 3 steps x 8 completions in chunks of 4
        ({"old_logprobs": "reuse"}, 0),
        ({"old_logprobs": "rollout"}, 0),
        ({}, 0),  # auto
        ({"correction": "tis_geo_rs"}, 0),
        ({"beta": 0.1}, 6),  # the reference
        ({"old_logprobs": "rollout", "num_iterations": 2}, 0),
        ({"num_iterations": 2}, 4),  # auto falls back: 2 rollout batches in 3 steps
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_the_forward_runs_once_a_micro_batch(tiny_model, tmp_path, monkeypatch, options, without_grad):
    calls = forwards(monkeypatch)
    train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.01), **{"correction": "tis", **options})
    assert calls == {True: 6, False: without_grad}  # 3 steps x 2 micro-batches


# --- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_iterations": 2}, "lasts 4 micro-batches"),
        ({"steps_per_generation": 4}, "lasts 4 micro-batches"),
        ({"correction_normalize": "token"}, "correction_normalize='token'"),
        ({"correction": "m2po"}, "m2/batch"),
        ({"correction": "tis_geo_rs", "correction_reject_baseline": "exclude"}, "correction_reject_baseline"),
        ({"correction": "tis_geo_rs", "gradient_accumulation_steps": 4, "steps_per_generation": 2}, "equals"),
        ({"correction": "tis_geo_rs", "entropy_coef": 0.1}, "entropy bonus"),
    ],
    ids=str,
)
def test_auto_falls_back_and_says_so_once_and_reuse_is_refused(tiny_model, tmp_path, caplog, options, reason):
    options = {"correction": "tis", **options}
    with caplog.at_level(logging.WARNING):
        kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.01), **options)
    said = [record.message for record in caplog.records if "extra forward" in record.message]
    assert len(said) == 1 and reason in said[0] and "old_logprobs='recompute'" in said[0]
    assert inside.old_logprobs_source(kept.trainer) == "recompute"
    with pytest.raises(ValueError, match=f"`old_logprobs='reuse'` is not possible: .*{reason}.*Set 'recompute'"):
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, old_logprobs="reuse", **options)


@pytest.mark.parametrize("kind", ["lora", "attention"])
def test_dropout_makes_auto_recompute(tiny_model, tmp_path, caplog, kind, monkeypatch):
    options = {"correction": "tis"}
    if kind == "attention":
        options |= {"model_init_kwargs": {"attention_dropout": 0.1}, "disable_dropout": False}
    else:
        from peft import LoraConfig

        monkeypatch.setattr("tests.short_training.LoraConfig", lambda **k: LoraConfig(**{**k, "lora_dropout": 0.05}))
        options["lora"] = True
    with caplog.at_level(logging.WARNING), synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
        assert inside.old_logprobs_source(trainer) == "recompute"
        assert "dropout is on" in caplog.text
        with pytest.raises(ValueError, match="`old_logprobs='reuse'` is not possible: dropout is on"):
            build(ConsistentGRPOTrainer, tiny_model, tmp_path, old_logprobs="reuse", **options)


def test_auto_is_silent_where_it_reuses_and_where_nothing_of_ours_is_set(tiny_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING), synthetic_engine():
        for options, source in (
            ({"correction": "tis"}, "reuse"),
            ({}, "recompute"),
            ({"num_iterations": 2}, "recompute"),
        ):
            trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
            assert inside.old_logprobs_source(trainer) == source
    assert "forward" not in caplog.text


def test_trl_s_own_correction_can_reuse_when_asked(tiny_model, tmp_path):
    recomputed, reused = both(tiny_model, tmp_path, lambda: noise(0.8))  # sequence_mask, 3
    assert_same_step(recomputed, reused)
    assert reused.logs[0]["correction/masked_fraction/high"] > 0


def test_evaluation_reuses_too_and_keeps_out_of_the_training_window(tiny_model, tmp_path):
    from ..tiny import dataset

    losses = {}
    for source in ("recompute", "reuse"):
        with synthetic_engine(noise(0.5)):
            options = {"per_device_eval_batch_size": 4, "eval_strategy": "no", "correction": "tis_geo_rs"}
            trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, old_logprobs=source, **options)
            losses[source] = trainer.evaluate(dataset().select(range(2)))
            assert not inside.windows(trainer) and not inside.waiting_micro_batches(trainer)
    for key in ("eval_loss", "eval_mismatch/k3/mean", "eval_correction/rejected_fraction/low"):
        assert losses["reuse"][key] == pytest.approx(losses["recompute"][key], rel=1e-4, abs=1e-6)


# --- rollout (bypass) ------------------------------------------------------------------------------------------------


def step(tiny_model, tmp_path, d, **options):
    plant = lambda ids, logps: [lp - d for lp in logps]  # noqa: E731
    return train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant, **ONE_STEP, **options)


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_the_loss_sees_the_engine_s_log_probs(tiny_model, tmp_path, correction):
    # d = .1 everywhere: the ratio is e^.1, inside 1 +- .2, whatever the advantage
    plain = step(tiny_model, tmp_path, 0.1, correction="none")
    bypass = step(tiny_model, tmp_path, 0.1, correction=correction, old_logprobs="rollout")
    for name, gradient in plain.gradients[0].items():
        torch.testing.assert_close(bypass.gradients[0][name], math.exp(0.1) * gradient, rtol=1e-4, atol=1e-5)
    assert bypass.logs[0]["clip_ratio/region_mean"] == 0
    # d = .5: 1.65 > 1.2, tokens with a positive advantage are clipped
    clipped = step(tiny_model, tmp_path, 0.5, correction=correction, old_logprobs="rollout")
    assert clipped.logs[0]["clip_ratio/high_mean"] > 0.2
    assert step(tiny_model, tmp_path, 0.5, correction="none").logs[0]["clip_ratio/high_mean"] == 0


def test_bypass_says_that_truncation_has_no_effect(tiny_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING), synthetic_engine():
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, correction="tis", old_logprobs="rollout")
    assert "the bounds of the truncation have no effect" in caplog.text


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_rejections_act_on_the_policy_over_the_engine(tiny_model, tmp_path, loss_type):
    # half of the completions are off by .1 per token and stay, the others by .5 and are rejected
    def plant():
        seen = []
        return lambda ids, logps: [lp - (0.1, 0.5)[len(seen) % 2] for lp in logps] if not seen.append(None) else None

    options = {"correction": "none", "loss_type": loss_type}
    rules = {
        "vllm_importance_sampling_mode": "geometric_reject",
        "vllm_importance_sampling_clip_min": 0.9,
        "vllm_importance_sampling_clip_max": 1.3,
    }
    options = {"loss_type": loss_type, **rules, **ONE_STEP}
    bypass = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant(), old_logprobs="rollout", **options)
    weighted = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant(), old_logprobs="reuse", **options)
    assert bypass.logs[0]["correction/rejected_fraction/high"] == pytest.approx(0.5, abs=0.1)
    # what is kept has a ratio of e^.1, the geometric weight is the same number
    for name, gradient in weighted.gradients[0].items():
        torch.testing.assert_close(bypass.gradients[0][name], gradient, rtol=1e-4, atol=1e-5)
    assert bypass.logs[0]["correction/weight/max"] == pytest.approx(math.exp(0.1), rel=1e-4)


@pytest.mark.parametrize("value", [None, -math.inf])
def test_bypass_survives_tokens_without_a_usable_log_prob(tiny_model, tmp_path, value):
    options = {"correction": "icepop", "old_logprobs": "rollout"}
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=lambda i, lp: [value, *lp[1:]], **options)
    assert all(math.isfinite(log["loss"]) for log in kept.logs[:3])
    assert all(torch.isfinite(g).all() for g in kept.gradients[0].values())


# --- rollouts without vLLM -------------------------------------------------------------------------------------------


def own_rollout(plant):
    """A `rollout_func` that samples what the synthetic engine would sample."""
    engine = []

    def rollout(prompts, trainer):
        if not engine:
            options = {"temperature": trainer.temperature, "max_completion_length": trainer.max_completion_length}
            sides = (trainer.model, trainer.accelerator, trainer.processing_class)
            engine.append(SyntheticEngine(*sides, plant=plant, **options))
        ids = [trainer.processing_class(prompt).input_ids for prompt in prompts]
        _, completions, logprobs, _ = engine[0].generate(ids, None, 1)
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[v[0] for v in r] for r in logprobs]}

    return rollout


@pytest.mark.parametrize("source", ["recompute", "reuse"])
@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "vespo"])
def test_weights_folded_into_advantages_are_exact(tiny_model, tmp_path, loss_type, source):
    options = {"correction": "tis_two_sided", "loss_type": loss_type, "beta": 0.1, "old_logprobs": source}
    options |= {"correction_rejections": {"k2/token": [None, 0.5]}, **ONE_STEP}
    ours = train(
        ConsistentGRPOTrainer, tiny_model, tmp_path, use_vllm=False, rollout_func=own_rollout(noise(0.8)), **options
    )
    vllm = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.8), **options)
    assert_same_step(vllm, ours)
    assert vllm.logs[0]["correction/truncated_fraction/high"] > 0.02


def test_losses_that_ignore_weights_are_refused(tiny_model, tmp_path):
    from trl.experimental.gmpo import GMPOTrainer

    class Mixed(ConsistentGRPOTrainer, GMPOTrainer):
        pass

    with synthetic_engine(), pytest.raises(ValueError, match="Mixed inherits a loss that is not `GRPOTrainer`'s"):
        build(Mixed, tiny_model, tmp_path, correction="tis")
    with pytest.raises(ValueError, match="`loss_type='vespo'` takes its weights inside a sequence ratio"):
        ConsistentGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, loss_type="vespo", correction="tis")
