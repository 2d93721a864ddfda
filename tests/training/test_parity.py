# SPDX-License-Identifier: Apache-2.0
"""Off means identical: with our options unset, loss, gradients and weights are TRL's, bit for bit. Never loosen these."""

import pytest
import torch
from trl import GRPOConfig

from ..short_training import (
    LOSS_TYPES,
    ConsistentGRPOTrainer,
    GRPOTrainer,
    assert_same_training,
    build,
    noise,
    synthetic_engine,
    train,
)


def mode(loss_type):
    # TRL refuses its own default, sequence_mask, for vespo
    return {"vllm_importance_sampling_mode": "token_truncate"} if loss_type == "vespo" else {}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_unset_is_bit_identical(tiny_model, tmp_path, loss_type, lora):
    options = {"loss_type": loss_type, "lora": lora, **mode(loss_type)}
    theirs = train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), **options)
    ours = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), **options)
    assert_same_training(theirs, ours)
    assert any(x.abs().sum() > 0 for x in theirs.gradients[0].values())
    shared = [{k: v for k, v in log.items() if k in theirs.logs[i]} for i, log in enumerate(ours.logs)]
    timed = ("runtime", "per_second", "step_time")
    for mine, trl in zip(shared, theirs.logs, strict=True):
        assert {k: v for k, v in mine.items() if not k.endswith(timed)} == {
            k: v for k, v in trl.items() if not k.endswith(timed)
        }


@pytest.mark.parametrize(
    "options",
    [
        {"vllm_importance_sampling_correction": False},
        {"beta": 0.1},
        {"num_iterations": 2},
        {"steps_per_generation": 4},
        {"importance_sampling_level": "sequence"},
        {"temperature": 0.7},
        {"mask_truncated_completions": True},
        {"off_policy_mask_threshold": 0.05},
        {"use_vllm": False},
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
    ],
    ids=lambda options: ",".join(map(str, options)),
)
def test_unset_is_bit_identical_with(tiny_model, tmp_path, options):
    assert_same_training(
        train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), **options),
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), **options),
    )


def test_unset_is_bit_identical_with_dropout(tiny_model, tmp_path):
    options = {"model_init_kwargs": {"attention_dropout": 0.1}, "disable_dropout": False}
    assert_same_training(
        train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), **options),
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), **options),
    )


def test_none_is_bit_identical_to_no_correction_and_measures(tiny_model, tmp_path):
    off = {"vllm_importance_sampling_correction": False}
    theirs = train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), **off)
    ours = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), correction="none")
    assert_same_training(theirs, ours)
    assert 0.1 < ours.logs[0]["mismatch/abs_diff/mean"] < 0.3


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("tis", ("token_truncate", None, 2.0)),
        ("tis_two_sided", ("token_truncate", 0.5, 2.0)),
        ("icepop", ("token_mask", 0.5, 5.0)),
        ("seq_tis", ("sequence_truncate", None, 2.0)),
        ("seq_mis", ("sequence_mask", None, 3.0)),
    ],
)
def test_presets_trl_can_express_are_bit_identical_to_trl(tiny_model, tmp_path, preset, fields, lora):
    names = ("mode", "clip_min", "clip_max")
    spelled = {f"vllm_importance_sampling_{name}": value for name, value in zip(names, fields, strict=True)}
    theirs = train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.6), lora=lora, **spelled)
    options = {"correction": preset, "old_logprobs": "recompute"}  # where TRL takes them from
    ours = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.6), lora=lora, **options)
    assert_same_training(theirs, ours)
    acted = {k: v for k, v in ours.logs[0].items() if k.startswith("correction/") and "_fraction/" in k}
    assert sum(acted.values()) > 0, "the planted noise must make the correction act"


def test_presets_change_the_weights(tiny_model, tmp_path):
    # what the tests above would not notice: that nothing is corrected at all
    plain = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.6), correction="none")
    tis = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.6), correction="tis")
    assert any(not torch.equal(plain.weights[0][n], tis.weights[0][n]) for n in tis.weights[0])


def test_a_plain_config_works(tiny_model, tmp_path):
    def plain(name):
        return GRPOConfig(
            output_dir=str(tmp_path / name), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_generations=4, max_completion_length=6, learning_rate=1e-2, logging_steps=1, use_vllm=True, use_cpu=True,
            bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, activation_checkpointing=False,
        )  # fmt: skip

    theirs = train(GRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), args=plain("a"))
    ours = train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(0.2), args=plain("b"))
    assert_same_training(theirs, ours)
    assert "mismatch/k3/mean" in ours.logs[0]


def test_no_config_and_positional_arguments_work(tiny_model, tmp_path, monkeypatch):
    from ..tiny import dataset, letters_reward

    monkeypatch.chdir(tmp_path)  # TRL's default output directory is relative
    # Without a config, TRL trains in bf16 and looks for a GPU that can.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainer = ConsistentGRPOTrainer(tiny_model, letters_reward, None, dataset())
    assert isinstance(trainer.args, GRPOConfig) and trainer.train_dataset is not None
    with synthetic_engine():
        keyword = build(ConsistentGRPOTrainer, tiny_model, tmp_path)
        positional = ConsistentGRPOTrainer(tiny_model, letters_reward, keyword.args, dataset())
    assert positional.args is keyword.args
