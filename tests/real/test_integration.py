# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on the CPU, in this process, on models of a few thousand parameters."""

import contextlib
import logging

import pytest
import torch
from trl.generation.vllm_generation import VLLMGeneration

from trl_consistent import ConsistentGRPOTrainer
from trl_consistent.rollout.audit import audit
from trl_consistent.rollout.vllm import ConsistentVLLMGeneration, WeightSyncError
from trl_consistent.upstream.trl import engine_class_replaced
from trl_consistent.upstream.vllm import engine_model, plain_cpu_weights

from ..short_training import Keep, assert_same_training, build


pytestmark = pytest.mark.vllm

ENGINE = {
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 64,
    "rollout_engine_kwargs": {"dtype": "float32"},
    "learning_rate": 1e-2,
}


@pytest.fixture(autouse=True)
def free_the_engine():
    yield
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def run(model, tmp_path, **options):
    keep = Keep()
    keep.trainer = build(
        ConsistentGRPOTrainer, model, tmp_path, callbacks=[keep], **{**ENGINE, "max_steps": 2, **options}
    )
    keep.trainer.train()
    # the weights of the last step have not been synced yet
    keep.trainer.vllm_generation.sync_weights()
    trainer, engine = keep.trainer.vllm_generation.probe()
    keep.gap = (trainer - engine).abs().mean().item()
    return keep


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("fixture", ["tiny_model", "tied_model", "moe_model"])
def test_float32_rollouts_agree_to_the_last_digits_after_syncs(fixture, lora, tmp_path, request):
    keep = run(request.getfixturevalue(fixture), tmp_path, correction="tis", lora=lora)
    moved = max((keep.weights[0][n] - keep.weights[1][n]).abs().max().item() for n in keep.weights[0])
    assert moved > 1e-3, "the syncs must have had something to carry"
    assert keep.gap < 2e-5
    for log in keep.logs[:2]:
        assert log["mismatch/abs_diff/max"] < 2e-3 and log["mismatch/abs_diff/mean"] < 1e-4
        assert log["correction/weight/mean"] == pytest.approx(1, abs=1e-3)


def test_bfloat16_rollouts_show_the_mismatch_and_are_corrected(tiny_model, tmp_path):
    keep = run(tiny_model, tmp_path, correction="icepop", rollout_engine_kwargs={"dtype": "bfloat16"})
    for log in keep.logs[:2]:
        assert 1e-3 < log["mismatch/abs_diff/mean"] < 0.3
        assert log["mismatch/ratio/min"] < 1 < log["mismatch/ratio/max"]
        assert torch.isfinite(torch.tensor(log["loss"]))


@pytest.mark.parametrize("fixture", ["tiny_model", "tied_model", "moe_model"])
def test_bfloat16_syncs_stay_at_the_noise_of_the_first(fixture, tmp_path, request):
    model = request.getfixturevalue(fixture)
    keep = run(model, tmp_path, correction="tis", rollout_engine_kwargs={"dtype": "bfloat16"}, max_steps=4)
    check = keep.trainer.vllm_generation._sync_check
    trainer, _ = keep.trainer.vllm_generation.probe()
    keep.trainer.model.load_state_dict(keep.weights[0], strict=False)  # a tied head is not among the weights
    moved = (trainer - keep.trainer.vllm_generation.probe()[0]).abs().mean().item()
    assert 1e-3 < check.first < 0.1
    assert keep.gap < 3 * check.first < moved, "an engine that had missed the last three steps would be off by more"


def test_trl_s_own_correction_is_measured_too(tiny_model, tmp_path):
    keep = run(tiny_model, tmp_path, rollout_engine_kwargs={"dtype": "bfloat16"}, temperature=0.7)
    log = keep.logs[0]
    assert log["mismatch/sequence_ratio/max"] != 1 and "correction/masked_fraction/high" in log
    assert log["mismatch/abs_diff/mean"] == pytest.approx(log["sampling/sampling_logp_difference/mean"], rel=1e-4)


def test_more_log_probs_than_asked_for_are_repaired(tiny_model, tmp_path):
    # TRL would take the most likely token's log-prob for the sampled one's
    keep = run(tiny_model, tmp_path, correction="tis", generation_kwargs={"logprobs": 5}, max_steps=1)
    assert keep.logs[0]["mismatch/abs_diff/max"] < 2e-3


def test_a_sync_that_does_not_arrive_is_stale(tiny_model, tmp_path, monkeypatch):
    arrived = []
    sync = VLLMGeneration.sync_weights
    monkeypatch.setattr(
        VLLMGeneration, "sync_weights", lambda self: arrived.append(1) or (len(arrived) < 2 and sync(self))
    )
    with pytest.raises(WeightSyncError, match="stale"):
        run(tiny_model, tmp_path, correction="tis")


def test_a_stale_bfloat16_engine_is_noticed_too(tiny_model, tmp_path, monkeypatch):
    arrived = []
    sync = VLLMGeneration.sync_weights
    monkeypatch.setattr(
        VLLMGeneration, "sync_weights", lambda self: arrived.append(1) or (len(arrived) < 2 and sync(self))
    )
    with pytest.raises(WeightSyncError, match="stale"):
        run(tiny_model, tmp_path, correction="tis", rollout_engine_kwargs={"dtype": "bfloat16"}, max_steps=4)


def test_a_real_engine_changes_nothing_in_training(tiny_model, tmp_path):
    """TRL's trainer and backend against ours, bfloat16 rollouts, with the sync check on: same rollouts, same weights."""
    from trl import GRPOTrainer

    extra = {"dtype": "bfloat16", "enforce_eager": True}
    options = {**ENGINE, "max_steps": 3, "rollout_engine_kwargs": extra, "vllm_importance_sampling_clip_max": 1.01}
    ours = Keep()
    build(ConsistentGRPOTrainer, tiny_model, tmp_path, callbacks=[ours], **options).train()
    options.pop("rollout_engine_kwargs")
    theirs = Keep()
    with (
        engine_class_replaced(lambda engine: lambda **kwargs: engine(**kwargs, **extra)),
        plain_cpu_weights(),
    ):
        trainer = build(GRPOTrainer, tiny_model, tmp_path, callbacks=[theirs], **options)
    trainer.train()
    assert_same_training(theirs, ours)
    assert ours.logs[0]["mismatch/abs_diff/mean"] > 1e-3


@pytest.mark.parametrize("when", [1, 2], ids=["first", "later"])
def test_a_sync_that_writes_garbage_raises(tiny_model, tmp_path, monkeypatch, when):
    syncs = []
    sync = VLLMGeneration.sync_weights

    def garbage(self):
        sync(self)
        syncs.append(1)
        if len(syncs) == when:
            weight = engine_model(self.llm).model.layers[0].mlp.down_proj.weight
            weight.data = torch.randn_like(weight) * 3

    monkeypatch.setattr(VLLMGeneration, "sync_weights", garbage)
    with pytest.raises(WeightSyncError, match="does not hold what was streamed|After the first weight sync"):
        run(tiny_model, tmp_path, correction="tis")


def test_experts_left_unpacked_are_noticed(moe_model, tmp_path, monkeypatch):
    # what TRL's sync does to a CPU engine's experts: plain data in packed storage, no error
    monkeypatch.setattr("trl_consistent.rollout.vllm.repack_cpu_experts", lambda llm: 0)
    with pytest.raises(WeightSyncError):
        run(moe_model, tmp_path, correction="tis")


def test_the_packed_tied_head_is_noticed(tied_model, tmp_path, monkeypatch):
    # with oneDNN packing left on, plain load_weights fails loudly or leaves the head stale
    monkeypatch.setattr("trl_consistent.rollout.vllm.plain_cpu_weights", contextlib.nullcontext)
    with pytest.raises((WeightSyncError, AttributeError), match="weight_loader|weight sync"):
        run(tied_model, tmp_path, correction="tis")


def test_verification_can_be_turned_off(tiny_model, tmp_path, monkeypatch):
    probes = []
    original = ConsistentVLLMGeneration.probe
    monkeypatch.setattr(ConsistentVLLMGeneration, "probe", lambda self: probes.append(1) or original(self))
    for setting, expected in (("off", 0), ("first", 1)):
        probes.clear()
        keep = Keep()
        trainer = build(
            ConsistentGRPOTrainer,
            tiny_model,
            tmp_path,
            callbacks=[keep],
            **ENGINE,
            max_steps=2,
            rollout_verify_sync=setting,
        )
        trainer.train()
        assert len(probes) == expected, setting


def test_the_engine_keeps_training_threads(tiny_model, tmp_path, caplog):
    threads = torch.get_num_threads()
    with caplog.at_level(logging.WARNING):
        run(tiny_model, tmp_path, correction="tis", max_steps=1)
    assert torch.get_num_threads() == threads and "vLLM took torch" not in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.8},
        {"top_k": 20},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2},
        {"generation_kwargs": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.9}},
    ],
    ids="+".join,
)
def test_on_the_support_of_the_engine_the_mean_ratio_is_one(tiny_model, tmp_path, settings):
    shared = {"correction": "tis", "max_steps": 1, "gradient_accumulation_steps": 8, "max_completion_length": 32}
    (log, *_) = run(tiny_model, tmp_path, rollout_support=True, **shared, **settings).logs
    assert log["mismatch/abs_diff/mean"] < 1e-5
    assert abs(log["mismatch/ratio/mean"] - 1) < 1e-5
    assert log["mismatch/outside_support_fraction"] == 0
    # the same completions: the engine does not depend on what the trainer makes of them
    (before, *_) = run(tiny_model, tmp_path, **shared, **settings).logs
    assert before["mismatch/abs_diff/mean"] > 0.01
    assert before["mismatch/log_ppl/sampling"] == pytest.approx(log["mismatch/log_ppl/sampling"], rel=1e-5)


def audited(trainer):
    return {finding.code for finding in audit(trainer, trainer.vllm_generation.settings)}


@pytest.mark.parametrize("fixture", ["tiny_model", "tied_model"])
def test_precision_reaches_both_sides(fixture, tmp_path, request):
    # TRL passes no dtype, and vLLM makes bfloat16 of a float32 model
    model, bare = request.getfixturevalue(fixture), {"rollout_engine_kwargs": None}
    plain = run(model, tmp_path, correction="tis", max_steps=1, **bare)
    assert audited(plain.trainer) == {"dtype"}
    match = run(model, tmp_path, correction="tis", max_steps=1, rollout_precision="match", **bare)
    assert audited(match.trainer) == set()
    assert match.trainer.vllm_generation.settings.dtype == torch.float32
    assert match.logs[0]["mismatch/abs_diff/mean"] < 1e-4 < 1e-3 < plain.logs[0]["mismatch/abs_diff/mean"]


@pytest.mark.parametrize("fixture", ["tiny_model", "tied_model"])
def test_a_head_in_float32_is_one_on_both_sides(fixture, tmp_path, request):
    options = {"correction": "tis", "rollout_precision": "bf16", "bf16": None, "rollout_engine_kwargs": None}
    model = request.getfixturevalue(fixture)
    trainer_only = run(model, tmp_path, cast_lm_head_to_fp32=True, max_steps=1, **options)
    assert audited(trainer_only.trainer) == {"fp32-head", "bfloat16-twice"}
    both = run(model, tmp_path, rollout_fp32_lm_head=True, **options)
    assert audited(both.trainer) == {"bfloat16-twice"}
    assert both.trainer.vllm_generation.settings.head_dtype == torch.float32
    head = both.trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = both.trainer.model.get_output_embeddings().weight.detach()
    assert torch.equal(head.compute_logits(hidden), hidden.float() @ weight.bfloat16().float().T)
    for log in both.logs[:2]:
        assert 1e-4 < log["mismatch/abs_diff/mean"] < 0.1


def test_a_check_that_failed_is_not_the_first_one(tiny_model, tmp_path, monkeypatch):
    trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, rollout_verify_sync="first", **ENGINE)
    generation, probed = trainer.vllm_generation, []

    def probe(self, probe=ConsistentVLLMGeneration.probe):
        probed.append(len(probed))
        if len(probed) == 1:
            raise ConnectionError
        return probe(self)

    monkeypatch.setattr(ConsistentVLLMGeneration, "probe", probe)
    with pytest.raises(ConnectionError):
        generation.sync_weights()
    generation.sync_weights()
    generation.sync_weights()
    assert probed == [0, 1]
