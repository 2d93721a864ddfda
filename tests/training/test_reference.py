# SPDX-License-Identifier: Apache-2.0
"""The KL term of the loss in training: TRL's where it is TRL's, ours where an option asks, and references that move."""

import pytest
import torch

from trl_consistent import ConsistentGRPOConfig
from trl_consistent.correction.kl import reference_kl

from .. import inside
from ..short_training import LOSS_TYPES, ConsistentGRPOTrainer, build, noise, synthetic_engine, train


FREE = {"max_grad_norm": 1e9, "beta": 0.5, "max_steps": 3, "learning_rate": 5e-2}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "bias-corrected"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_our_term_with_trl_s_estimator_is_trl_s_term(tiny_model, tmp_path, loss_type, corrected, level, monkeypatch):
    options = {"loss_type": loss_type, "importance_sampling_level": level, "use_bias_correction_kl": corrected, **FREE}
    options |= {"vllm_importance_sampling_mode": "token_truncate", "num_iterations": 2, "steps_per_generation": 2}
    theirs = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.1), **options)
    # k3+ has k3's value; with k3's gradient, too, it is TRL's
    monkeypatch.setattr(inside.REFERENCE_KL, lambda ratio, kind, w: reference_kl(ratio, kind.strip("+"), w))
    ours = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.1), kl_estimator="k3+", **options)
    assert inside.adds_own_kl(ours.trainer) and not inside.adds_own_kl(theirs.trainer)
    for step in (0, 1):  # in the second, the policy has left the reference
        for name, gradient in theirs.gradients[step].items():
            scale = max(gradient.abs().max().item(), 1.0)
            assert (gradient - ours.gradients[step][name]).abs().max() <= 1e-4 * scale, (step, name)
    assert theirs.logs[1]["kl"] > 1e-3
    assert ours.logs[1]["kl"] == pytest.approx(theirs.logs[1]["kl"], rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k1+", "k3+"])
def test_estimators_train_and_log_what_they_used(tiny_model, tmp_path, estimator):
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, kl_estimator=estimator, **FREE)
    log = kept.logs[2]
    assert log["kl"] == pytest.approx(log[f"kl/{estimator.strip('+')}"], rel=1e-6)
    k3 = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **FREE)
    assert any(not torch.equal(kept.weights[2][name], k3.weights[2][name]) for name in k3.weights[2])


def test_all_three_estimators_are_logged_whenever_there_is_a_reference(tiny_model, tmp_path):
    for options in ({"use_vllm": False}, {"correction": "tis"}, {"correction": "tis", "old_logprobs": "recompute"}):
        kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options, **FREE)
        first, last = kept.logs[0], kept.logs[2]
        assert first["kl/k3"] == pytest.approx(0, abs=1e-6)
        assert last["kl/k3"] > 0.01
        assert last["kl/k3"] == pytest.approx(last["kl"], rel=0.05)  # TRL's is a mean of means over micro-batches
        assert last["kl/k2_over_k3"] == pytest.approx(last["kl/k2"] / last["kl/k3"])
    assert not any(key.startswith("kl") for key in train(ConsistentGRPOTrainer, tiny_model, tmp_path).logs[0])


@pytest.mark.parametrize("source", ["recompute", "reuse", "rollout"])
def test_the_kl_is_weighted_by_the_ratio_to_the_engine_when_asked(tiny_model, tmp_path, source):
    # engine log-probs lower by .2 on every token: pi / mu = e^.2, while pi / pi_old = 1
    off_by = lambda ids, logps: [lp - 0.2 for lp in logps]  # noqa: E731
    options = {"kl_estimator": "k3+", "use_bias_correction_kl": True, "correction": "icepop", "old_logprobs": source}
    kept = train(
        ConsistentGRPOTrainer,
        tiny_model,
        tmp_path,
        plant=off_by,
        kl_bias_correction_ratio="sampling",
        **options,
        **FREE,
    )
    log = kept.logs[2]
    assert log["kl/k3"] > 0.01 and log["kl"] == pytest.approx(2.718281828**0.2 * log["kl/k3"], rel=1e-4)
    old = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=off_by, **options, **FREE).logs[2]
    factor = 2.718281828**0.2 if source == "rollout" else 1.0  # there, the old policy is the engine
    assert old["kl"] == pytest.approx(factor * old["kl/k3"], rel=1e-4)


def test_rejected_tokens_are_in_no_kl(tiny_model, tmp_path):
    def plant(ids, logps, seen=[]):  # noqa: B006 - counts completions
        seen.append(None)
        return [lp - 1.0 for lp in logps]

    kept = train(
        ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant, kl_estimator="k2", correction="tis_geo_rs", **FREE
    )
    assert kept.logs[0]["loss"] == 0 and "kl/k3" not in kept.logs[0]


# --- references that move --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_policy_becomes_its_own_reference(tiny_model, tmp_path, lora):
    options = {**FREE, "max_steps": 4, "lora": lora, "ref_reset_steps": 2}
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
    k3 = [log["kl/k3"] for log in kept.logs[:4]]
    # the first step of a reference is on it, the second one step away
    assert k3[0] == pytest.approx(0, abs=1e-6) and k3[2] == pytest.approx(0, abs=1e-6)
    assert k3[1] > 1e-3 and k3[3] > 1e-3
    if lora:
        model = kept.trainer.model
        assert model.active_adapter == "default"
        assert not any(p.requires_grad for name, p in model.named_parameters() if ".ref." in name)
        assert any(p.requires_grad for name, p in model.named_parameters() if ".default." in name)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_resumed_run_has_the_reference_it_had(tiny_model, tmp_path, lora):
    options = {**FREE, "lora": lora, "ref_reset_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    whole = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
    for saved in (2, 3):  # when a reset was due, and after it
        with synthetic_engine():
            trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
            trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-{saved}")
        # steps 3 and 4 have the policy of step 2 as their reference
        if lora:
            params = dict(trainer.model.named_parameters())
            reference = {name.replace(".ref.", ".default."): p for name, p in params.items() if ".ref." in name}
        else:
            reference = dict(trainer.ref_model.named_parameters())
        assert reference
        for name, value in reference.items():
            assert torch.equal(value, whole.weights[1][name]), name


def test_a_reset_that_is_still_due_survives_a_checkpoint(tiny_model, tmp_path):
    # a rollout batch lasts three steps; the reset of step 2 waits for the next one, and the checkpoint comes before
    options = {**FREE, "ref_reset_steps": 2, "steps_per_generation": 6, "save_strategy": "steps", "save_steps": 1}
    whole = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **{**options, "max_steps": 4})
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **{**options, "max_steps": 4})
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-3")
    for name, value in trainer.ref_model.named_parameters():
        assert torch.equal(value, whole.weights[2][name]), name


@pytest.mark.parametrize("kind", ["gaussian", "pissa", "olora"])
def test_a_reset_leaves_the_policy_alone_whatever_initialized_its_adapter(tiny_model, tmp_path, kind, monkeypatch):
    from peft import LoraConfig

    monkeypatch.setattr("tests.short_training.LoraConfig", lambda **k: LoraConfig(**k, init_lora_weights=kind))
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, lora=True, beta=0.1, ref_reset_steps=1)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        before = trainer.model(input_ids=ids).logits
        for _ in range(2):
            inside.reset_reference(trainer)
        assert torch.equal(trainer.model(input_ids=ids).logits, before)
        trainer.model.set_adapter("ref")
        torch.testing.assert_close(trainer.model(input_ids=ids).logits, before)


def test_a_reset_waits_for_the_next_rollout_batch(tiny_model, tmp_path):
    # two steps on a rollout batch: its KL is to one reference, and the first step of the next is on the new one
    options = {**FREE, "max_steps": 4, "ref_reset_steps": 1, "steps_per_generation": 4}
    k3 = [log["kl/k3"] for log in train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options).logs[:4]]
    assert k3[0] == pytest.approx(0, abs=1e-6) and k3[2] == pytest.approx(0, abs=1e-6)
    assert k3[1] > 1e-3 and k3[3] > 1e-3


def test_options_without_a_kl_term_are_refused(tmp_path):
    def config(**kwargs):
        return ConsistentGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **kwargs)

    with pytest.raises(ValueError, match="`kl_estimator='k2'` needs a KL term: set `beta`"):
        config(kl_estimator="k2")
    with pytest.raises(ValueError, match="`ref_reset_steps=5` needs a KL term"):
        config(ref_reset_steps=5)
    with pytest.raises(ValueError, match="`kl_estimator` is 'k4'. Expected one of: k1, k2, k3"):
        config(kl_estimator="k4", beta=0.1)
    with pytest.raises(
        ValueError, match="`kl_bias_correction_ratio='sampling'` changes what `use_bias_correction_kl`"
    ):
        config(kl_bias_correction_ratio="sampling", use_bias_correction_kl=False, beta=0.1)
    with pytest.raises(ValueError, match="`kl_bias_correction_ratio='sampling'` needs a KL term"):
        config(kl_bias_correction_ratio="sampling")
    with pytest.raises(ValueError, match="`ref_reset_steps` is 0"):
        config(ref_reset_steps=0, beta=0.1)
    with pytest.raises(ValueError, match="both move the reference"):
        config(ref_reset_steps=2, beta=0.1, sync_ref_model=True)
