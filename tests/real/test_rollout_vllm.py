# SPDX-License-Identifier: Apache-2.0
"""The parts of the vLLM backend that need no engine."""

import math

import pytest
import torch

from trl_consistent.rollout import environment
from trl_consistent.rollout.completions import check_completions, check_logprobs_mode, sampled_token_first
from trl_consistent.rollout.sync_check import SyncCheck
from trl_consistent.rollout.vllm import WeightSyncError


BASE = -torch.arange(1.0, 24.0)


def noisy(scale, seed):
    return BASE + scale * torch.randn(23, generator=torch.Generator().manual_seed(seed))


def test_the_sampled_token_s_log_prob_comes_first():
    # two positions, sampled 7 then 3; by rank the sampled token stands third, then first
    logprobs = [[[-0.1, -0.5, -2.0], [-0.2, None]]]
    token_ids = [[[5, 9, 7], [3, 4]]]
    assert sampled_token_first([[7, 3]], logprobs, token_ids) == [[[-2.0, -0.1, -0.5], [-0.2, None]]]


def test_a_sampled_token_that_is_not_reported_is_an_error():
    with pytest.raises(ValueError, match=r"sampled token 8 at position 0 of completion 0.*\[5, 9\]"):
        sampled_token_first([[8]], [[[-0.1, -0.5]]], [[[5, 9]]])


def test_completions_and_log_probs_must_fit():
    check_completions([[1, 2]], [[-1.0, None]])
    check_completions([[1, 2]], None)
    with pytest.raises(ValueError, match="Completion 1 has 2 tokens but 3"):
        check_completions([[1], [1, 2]], [[-1.0], [-1.0, -1.0, -1.0]])
    with pytest.raises(ValueError, match="2 completions but 1 lists"):
        check_completions([[1], [2]], [[-1.0]])
    with pytest.raises(ValueError, match="Completion 0 is empty"):
        check_completions([[]], [[]])


def test_raw_log_probs_are_refused():
    check_logprobs_mode("processed_logprobs")
    check_logprobs_mode(None)
    with pytest.raises(ValueError, match="logprobs_mode='raw_logprobs'.*--logprobs-mode processed_logprobs"):
        check_logprobs_mode("raw_logprobs")


@pytest.mark.parametrize("scale", [1e-6, 0.04], ids=["fp32", "bf16"])
def test_healthy_syncs_pass(scale):
    check = SyncCheck()
    for step in range(20):
        moved = 0.2 * step * torch.sin(BASE)
        check(BASE + moved, noisy(scale, step) + moved)
    assert check.first < 0.1


@pytest.mark.parametrize("scale", [1e-6, 0.04], ids=["fp32", "bf16"])
def test_an_engine_that_never_changes_is_stale_however_noisy(scale):
    check = SyncCheck()
    engine = noisy(scale, 0)
    check(BASE, engine)
    with pytest.raises(WeightSyncError, match="stale.*reached none of its weights"):
        for step in range(1, 20):
            check(BASE + 0.01 * step, engine)
    assert step * 0.01 < 0.1, "noticed before the policy moved far"


def test_a_trainer_that_does_not_move_is_not_stale():
    check = SyncCheck()
    engine = noisy(0.04, 0)
    for _ in range(5):
        check(BASE, engine)


def test_partly_stale_weights_raise_with_the_usual_suspects():
    check = SyncCheck()
    check(BASE, noisy(1e-6, 0))
    with pytest.raises(WeightSyncError, match="Part of its weights are stale.*tied lm_head"):
        check(BASE + 0.1, noisy(1e-6, 1) + 0.05)


def test_garbage_raises():
    check = SyncCheck()
    check(BASE, noisy(1e-6, 0))
    with pytest.raises(WeightSyncError, match="garbage"):
        check(BASE + 0.01, noisy(3.0, 1))


@pytest.mark.parametrize("engine", [noisy(4.0, 1), torch.full((23,), math.nan)], ids=["random", "nan"])
def test_garbage_at_the_first_sync_raises(engine):
    with pytest.raises(WeightSyncError, match="After the first weight sync"):
        SyncCheck()(BASE, engine)


def test_a_float32_engine_is_expected_to_agree_from_the_start():
    SyncCheck()(BASE, BASE + 0.3)
    with pytest.raises(WeightSyncError, match=r"differ by 0.3 nats.*expected below 0.1"):
        SyncCheck(float32=True)(BASE, BASE + 0.3)


def test_one_thread_given_by_a_launcher_is_not_a_wish(monkeypatch):
    import os

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    environment.prepare()
    assert os.environ["OMP_NUM_THREADS"] == "1", "set by hand"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    environment.prepare()
    assert os.environ["OMP_NUM_THREADS"] == environment.cpu_variables()["OMP_NUM_THREADS"]


def test_environment_is_only_filled_where_it_is_unset(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    environment.prepare()
    import os

    assert os.environ["OMP_NUM_THREADS"] == "5" and os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_processes_share_the_cores():
    cores = int(environment.cpu_variables()["OMP_NUM_THREADS"])
    assert int(environment.cpu_variables(cores)["OMP_NUM_THREADS"]) == 1
    assert int(environment.cpu_variables(10 * cores)["OMP_NUM_THREADS"]) == 1
