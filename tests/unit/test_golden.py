# SPDX-License-Identifier: Apache-2.0
"""Our numbers against verl 0.9.1's, run on the same inputs (`tests/data/verl_golden.json`). Where ours differ on
purpose, the test says so."""

import json
import math
from pathlib import Path

import pytest
import torch

from trl_consistent.correction.presets import PRESETS
from trl_consistent.correction.rules import Correction, Rejection
from trl_consistent.correction.weights import correct
from trl_consistent.metrics.measure import correction_metrics, finalize, mismatch_metrics
from trl_consistent.ratios import mismatch_log_ratio


GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "verl_golden.json").read_text())

SHARED_METRICS = {
    "kl": "mismatch/k1/mean",
    "k3_kl": "mismatch/k3/mean",
    "chi2_token": "mismatch/chi2/token",
    "chi2_seq": "mismatch/chi2/sequence",
    "training_log_ppl": "mismatch/log_ppl/old",
    "rollout_log_ppl": "mismatch/log_ppl/sampling",
    "log_ppl_diff": "mismatch/log_ppl/diff",
}


def load(name):
    case = GOLDEN[name]
    old, sampling = torch.tensor(case["train"]), torch.tensor(case["rollout"])
    return old, sampling, torch.tensor(case["mask_in"]), case["out"]


def run(name, correction):
    old, sampling, mask, out = load(name)
    result = correct(mismatch_log_ratio(old, sampling, mask), mask, correction)
    stats = mismatch_metrics(old, sampling, mask) | correction_metrics(mask, result, correction.action)
    return result, finalize(stats), mask, out


def weights_of(out):
    return torch.tensor(out["weights"])


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("A_") or name == "B_no_empty_row"])
def test_off_policy_metrics(name):
    old, sampling, mask, out = load(name)
    ours = finalize(mismatch_metrics(old, sampling, mask))
    for theirs, key in SHARED_METRICS.items():
        assert ours[key] == pytest.approx(out["metrics"][theirs], abs=2e-6), key


@pytest.mark.parametrize(
    ("name", "correction"),
    [
        ("A_token_tis2", PRESETS["tis"]),
        ("A_token_icepop_0.5_5", PRESETS["icepop"]),
        ("A_seq_tis2", PRESETS["seq_tis"]),
        ("A_seq_icepop_0.5_2", Correction("sequence", "mask", 0.5, 2.0)),
        ("B_asymmetric_icepop_0.5_5", PRESETS["icepop"]),
    ],
)
def test_weights(name, correction):
    # Outside the mask verl's weights are 0, ours 1 (TRL takes logs of them).
    result, _, mask, out = run(name, correction)
    inside = mask.bool()
    torch.testing.assert_close(result.weights[inside], weights_of(out)[inside], atol=1e-6, rtol=1e-6)
    assert torch.equal(result.keep_mask, inside)


@pytest.mark.parametrize(("name", "correction"), [("A_token_tis2", "tis"), ("A_token_icepop_0.5_5", "icepop")])
def test_weight_metrics(name, correction):
    _, ours, _, out = run(name, PRESETS[correction])
    verb = {"tis": "truncated", "icepop": "masked"}[correction]
    assert ours["correction/weight/mean"] == pytest.approx(out["metrics"]["rollout_is_mean"], abs=1e-6)
    assert ours["correction/weight/max"] == pytest.approx(out["metrics"]["rollout_is_max"], abs=1e-6)
    assert ours["correction/ess"] == pytest.approx(out["metrics"]["rollout_is_eff_sample_size"], abs=1e-6)
    assert ours[f"correction/{verb}_fraction/high"] == pytest.approx(
        out["metrics"]["rollout_is_ratio_fraction_high"], abs=1e-6
    )
    if correction == "tis":
        assert ours["correction/weight/std"] == pytest.approx(out["metrics"]["rollout_is_std"], abs=1e-6)


def test_sequence_ratio_metrics():
    _, ours, _, out = run("A_seq_tis2", PRESETS["seq_tis"])
    for theirs, key in (("mean", "mean"), ("max", "max"), ("min", "min")):
        assert ours[f"mismatch/sequence_ratio/{key}"] == pytest.approx(
            out["metrics"][f"rollout_is_seq_{theirs}"], abs=1e-6
        )


@pytest.mark.parametrize(
    ("name", "rejection"),
    [
        ("A_rs_seq_sum_k1_0.5_2", Rejection("sequence", 0.5, 2.0)),
        # verl bounds 1/ratio: k1 = -log ratio must lie in log .9 ... log 1.1, so ours are the inverses, swapped.
        ("A_rs_seq_mean_k1_0.9_1.1", Rejection("geometric", 1 / 1.1, 1 / 0.9)),
    ],
)
def test_rejected_sequences(name, rejection):
    result, _, _, out = run(name, Correction(rejections=(rejection,)))
    assert result.keep_mask.int().tolist() == out["mask"]


LOG_HALF, LOG_TWO = math.log(0.5), math.log(2.0)
GOLDEN_RULES = {
    "A_rs_token_k2_0.4": Rejection("token", None, 0.4, "k2"),
    "A_rs_token_k3_0.3": Rejection("token", None, 0.3, "k3"),
    # verl gives k1 rules bounds whose logs bound k1; ours bound k1
    "A_rs_seq_sum_k1_0.5_2": Rejection("sequence_sum", LOG_HALF, LOG_TWO, "k1"),
    "A_rs_seq_sum_k2_1": Rejection("sequence_sum", None, 1.0, "k2"),
    "A_rs_seq_sum_k3_1": Rejection("sequence_sum", None, 1.0, "k3"),
    "A_rs_seq_mean_k1_0.9_1.1": Rejection("sequence_mean", math.log(0.9), math.log(1.1), "k1"),
    "A_rs_seq_mean_k2_0.15": Rejection("sequence_mean", None, 0.15, "k2"),
    "A_rs_seq_mean_k3_0.1": Rejection("sequence_mean", None, 0.1, "k3"),
    "A_rs_seq_max_k2_0.6": Rejection("sequence_max", None, 0.6, "k2"),
    "A_rs_seq_max_k3_0.4": Rejection("sequence_max", None, 0.4, "k3"),
    "B_asymmetric_token_k1_0.5_5": Rejection("token", LOG_HALF, math.log(5.0), "k1"),
}


@pytest.mark.parametrize("name", GOLDEN_RULES)
def test_rejection_rules(name):
    result, _, _, out = run(name, Correction(rejections=(GOLDEN_RULES[name],)))
    assert result.keep_mask.int().tolist() == out["mask"]


def test_a_chain_of_rules():
    case = GOLDEN["A_rs_chain_token_k1_seq_max_k3"]["kwargs"]
    assert case["rollout_rs"].replace(" ", "") == "token_k1,seq_max_k3"
    k1_bounds, k3_bound = (part.strip() for part in case["rollout_rs_threshold"].split(","))
    low, high = (math.log(float(bound)) for bound in k1_bounds.split("_"))
    rules = (Rejection("token", low, high, "k1"), Rejection("sequence_max", None, float(k3_bound), "k3"))
    result, _, _, out = run("A_rs_chain_token_k1_seq_max_k3", Correction(rejections=rules))
    assert result.keep_mask.int().tolist() == out["mask"]


def test_token_rejection_with_truncated_weights():
    # symmetric bounds .5 ... 2 are their own inverse: here the orientation does not show
    correction = Correction("token", "truncate", None, 2.0, rejections=(Rejection("token", 0.5, 2.0),))
    result, _, _, out = run("A_token_tis2_rs_token_k1_0.5_2", correction)
    assert result.keep_mask.int().tolist() == out["mask"]
    kept = result.keep_mask
    torch.testing.assert_close(result.weights[kept], weights_of(out)[kept], atol=1e-6, rtol=1e-6)


def test_asymmetric_bounds_are_on_the_ratio_where_verl_bounds_its_inverse():
    old, sampling, mask, out = load("B_asymmetric_token_k1_0.5_5")
    d = mismatch_log_ratio(old, sampling, mask)
    ours = correct(d, mask, Correction(rejections=(Rejection("token", 0.5, 5.0),))).keep_mask
    inverse = correct(d, mask, Correction(rejections=(Rejection("token", 0.2, 2.0),))).keep_mask
    assert inverse.int().tolist() == out["mask"] and ours.int().tolist() != out["mask"]


def test_empty_rows_do_not_dilute_where_verl_lets_them():
    old, sampling, mask, out = load("B_empty_row")
    _, _, _, without = load("B_no_empty_row")
    ours = finalize(mismatch_metrics(old, sampling, mask))
    assert ours["mismatch/log_ppl/old"] == pytest.approx(without["metrics"]["training_log_ppl"], abs=1e-6)
    assert out["metrics"]["training_log_ppl"] != pytest.approx(without["metrics"]["training_log_ppl"], abs=1e-3)


def test_impossible_token_has_no_weight_where_verl_gives_the_cap():
    old, sampling, mask, out = load("B_neginf_rollout_valid_token")
    result = correct(mismatch_log_ratio(old, sampling, mask), mask, PRESETS["tis"])
    impossible = (sampling == -math.inf) & mask.bool()
    assert (result.weights[impossible] == 0).all() and (weights_of(out)[impossible] == 2.0).all()


def test_unscored_token_has_weight_one_where_verl_has_nan():
    old, sampling, mask, out = load("B_nan_rollout_valid_token")
    result = correct(mismatch_log_ratio(old, sampling, mask), mask, PRESETS["tis"])
    unscored = torch.isnan(sampling) & mask.bool()
    assert (result.weights[unscored] == 1).all() and torch.isnan(weights_of(out)[unscored]).all()


def test_bf16_inputs_are_upcast_where_verl_keeps_bf16():
    old, sampling, mask, _ = load("A_token_tis2")
    result = correct(mismatch_log_ratio(old.bfloat16(), sampling.bfloat16(), mask), mask, PRESETS["tis"])
    assert result.weights.dtype == torch.float32
    # exp(-3) = .049787 in float32; verl's bf16 weight is .0498046875
    assert GOLDEN["C_bf16_token_tis2"]["metrics"]["rollout_corr/rollout_is_min"] == 0.0498046875
    assert result.weights.min().item() == pytest.approx(math.exp(-3), abs=1e-7)


def test_ratio_max_is_raw_where_verl_reports_it_truncated():
    _, ours, _, out = run("A_token_tis2", PRESETS["tis"])
    assert out["metrics"]["rollout_is_max"] == 2.0
    assert ours["mismatch/ratio/max"] == pytest.approx(math.exp(1.2), abs=1e-5)


def test_probability_metrics():
    old, sampling, mask, out = load("D_debug_A")
    ours = finalize(mismatch_metrics(old, sampling, mask))
    assert ours["mismatch/prob_diff/max"] == pytest.approx(out["training/rollout_probs_diff_max"], abs=1e-6)
    assert ours["mismatch/prob_diff/mean"] == pytest.approx(out["training/rollout_probs_diff_mean"], abs=1e-6)
    assert ours["mismatch/pearson"] == pytest.approx(out["training/rollout_actor_probs_pearson_corr"], abs=1e-6)


def test_long_completion_does_not_overflow():
    old, sampling = torch.full((1, 4096), -1.0), torch.full((1, 4096), -1.01)
    ours = finalize(mismatch_metrics(old, sampling, torch.ones(1, 4096)))
    theirs = GOLDEN["B_long_seq_4096x+0.01"]["out"]["metrics"]
    assert ours["mismatch/k3/mean"] == pytest.approx(theirs["k3_kl"], rel=2e-3)
    # verl clamps the log-ratio of a completion at 20, ours is e^40.96
    assert theirs["chi2_seq"] == pytest.approx(math.exp(40), rel=1e-3)
    assert math.log(ours["mismatch/chi2/sequence"]) == pytest.approx(2 * 40.96, rel=1e-3)
