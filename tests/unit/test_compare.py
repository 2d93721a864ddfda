# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import math

import pytest
import torch

from trl_consistent import PRESETS, Correction, Rejection, TrustRegion, cli
from trl_consistent.compare.replay import DEFAULT, correction_from, in_force, replay, token_factors
from trl_consistent.compare.runs import compare_runs, is_run
from trl_consistent.records.logs import append_logs

from ..recorded import record_of, write


# Three completions, 6 tokens, denominator 6 (`dapo`):
#
#   ratios         A    sequence ratio    sum |A|    sum A    sum rho_seq A
#   1/2 1/2       +1    1/4               2           2        .5
#   4             -1    4                 1          -1       -4
#   1   2   1     +2    2                 6           6       12
#                                         9           7        8.5
RATIOS = [[0.5, 0.5], [4.0], [1.0, 2.0, 1.0]]
ADVANTAGES = [1.0, -1.0, 2.0]


def outcomes(paths, *names, **fingerprint):
    found = replay(paths, names)
    return found, {(each.correction, each.group): each for each in found.outcomes}


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run", record_of(RATIOS, ADVANTAGES, step=50))


def test_the_untruncated_sequence_ratio_is_the_reference(run):
    found, _ = outcomes([run], "none")
    # (1/4 + 4 + 2)^2 / (3 (1/16 + 16 + 4)) = 39.0625 / 60.1875 = .649
    assert found.reference == "sequence"
    assert any("0.649 of 3" in note and "sequence ratio, which is exact" in note for note in found.notes)


def test_no_correction_is_weight_one_and_its_bias_the_whole_gap(run):
    _, each = outcomes([run], "none")
    none = each["none", "all"]
    assert (none.completions, none.tokens, none.ess, none.cosine) == (3, 6, 1.0, pytest.approx(1.0))
    assert (none.weight_min, none.weight_mean, none.weight_max) == (1.0, 1.0, 1.0)
    assert (none.truncated, none.masked, none.rejected) == (0.0, 0.0, 0.0)
    # b = (2 - .5, -1 + 4, 6 - 12) = (1.5, 3, -6): net -1.5, above 0 -4.5, below 3
    assert none.bias == pytest.approx(-1.5 / 9)
    assert none.bias_apart == pytest.approx(7.5 / 9)
    # mean -.5, squares of (2, 3.5, -5.5): 46.5; sqrt(3 * 46.5 / 2) = sqrt(69.75)
    assert none.bias_error == pytest.approx(math.sqrt(69.75) / 9)


def test_truncated_importance_sampling_by_hand(run):
    _, each = outcomes([run], "tis")
    tis = each["tis", "all"]
    # weights 1/2 1/2 | 2 (from 4) | 1 2 1; the 2 of the last row is on the bound, inside
    assert (tis.weight_min, tis.weight_max) == (0.5, 2.0) and tis.weight_mean == pytest.approx(7 / 6)
    assert tis.ess == pytest.approx(49 / (6 * 10.5))
    assert (tis.truncated, tis.masked, tis.rejected) == (pytest.approx(1 / 6), 0.0, 0.0)
    # sum w A = (1, -2, 8), b = (.5, 2, -4)
    assert tis.bias == pytest.approx(-1.5 / 9) and tis.bias_apart == pytest.approx(5.5 / 9)
    # squares of (1, 2.5, -3.5): 19.5; sqrt(3 * 19.5 / 2)
    assert tis.bias_error == pytest.approx(math.sqrt(29.25) / 9)
    # g = .5 .5 | -2 | 2 4 2, plain = 1 1 | -1 | 2 2 2: g g0 = 1 + 2 + 16, g^2 = .5 + 4 + 24, g0^2 = 2 + 1 + 12
    assert tis.cosine == pytest.approx(19 / math.sqrt(28.5 * 15))


def test_groups_are_by_length_and_by_sign(run):
    found, each = outcomes([run], "tis")
    # quartiles of the lengths 1, 2, 3: 1.5, 2, 2.5, so that every length is a group of its own
    assert [group for _, group in each] == ["all", "length 1", "length 2", "length 3", "A > 0", "A < 0"]
    three, negative, positive = (each["tis", group] for group in ("length 3", "A < 0", "A > 0"))
    assert (three.completions, three.tokens) == (1, 3)
    assert three.bias == pytest.approx(-4 / 6) and three.bias_error is None
    assert three.cosine == pytest.approx(16 / math.sqrt(24 * 12))
    assert three.ess == pytest.approx(16 / (3 * 6))  # weights 1 2 1
    # one token, weight 2 instead of 4, A = -1: -2 + 4 over 1
    assert negative.bias == pytest.approx(2.0) and negative.truncated == 1.0 and negative.tokens == 1
    assert positive.bias == pytest.approx((9 - 12.5) / 8) and positive.tokens == 5


def test_completions_of_one_length_are_not_split(tmp_path):
    run = write(tmp_path, record_of([[1.0], [2.0]], [1.0, 1.0], step=1))
    _, each = outcomes([run], "none")
    assert [group for _, group in each] == ["all", "A > 0"]


def test_a_masked_token_has_weight_zero_and_stays_in_the_denominator(run):
    _, each = outcomes([run], "token_mask:0.6,3")
    found = each["token_mask:0.6,3", "all"]
    # weights 0 0 | 0 | 1 2 1: ESS 16 / (6 * 6), sum w A = (0, 0, 8), b = (-.5, 4, -4)
    assert (found.masked, found.rejected, found.truncated) == (0.5, 0.0, 0.0)
    assert found.ess == pytest.approx(16 / 36)
    assert found.bias == pytest.approx(-0.5 / 9) and found.bias_apart == pytest.approx(8.5 / 9)
    assert each["token_mask:0.6,3", "length 1"].ess is None  # of weight 0
    assert each["token_mask:0.6,3", "length 1"].cosine is None


def test_a_rejected_completion_leaves_the_denominator(run):
    _, each = outcomes([run], "sequence_reject:,3")
    found = each["sequence_reject:,3", "all"]
    # weights 1/4 1/4 | gone | 2 2 2: (6.5)^2 / (5 * 12.125)
    assert (found.rejected, found.masked) == (pytest.approx(1 / 6), 0.0)
    assert found.ess == pytest.approx(42.25 / (5 * 12.125))
    # (.5 + 12) / 5 - 8.5 / 6, over 9 / 6
    assert found.bias == pytest.approx((12.5 / 5 - 8.5 / 6) / 1.5)


def test_denominators_are_those_of_the_runs_loss(tmp_path):
    settings = {"settings": {"loss_type": "grpo"}}
    run = write(tmp_path, record_of(RATIOS, ADVANTAGES, step=1, fingerprint=settings))
    _, each = outcomes([run], "sequence_reject:,3")
    # means over tokens, then over completions: (.25 + 2 * 2) / 2 of the 2 that are left, (.25 - 4 + 4) / 3, (1 + 1 + 2) / 3
    assert each["sequence_reject:,3", "all"].bias == pytest.approx((4.25 / 2 - 0.25 / 3) / (4 / 3))


def test_trust_regions_act_at_the_policy_about_to_be_updated(run):
    _, each = outcomes([run], "dppo_tv")
    found = each["dppo_tv", "all"]
    # p = e^-1.5 = .223. The token of ratio 2 has moved up by .223 > .15 while A > 0: weight 0. Those of ratio 1/2 moved down
    # while A > 0, the one of ratio 4 up while A < 0. Weights 1/2 1/2 | 4 | 1 0 1
    assert found.masked == pytest.approx(1 / 6) and found.weight_max == 4.0
    assert found.ess == pytest.approx(49 / (6 * 18.5))
    assert found.bias == pytest.approx((1 - 4 + 4 - 8.5) / 9)


def test_an_advantage_may_be_that_of_a_token(tmp_path):
    own = torch.tensor([[1.0, 1.0, 9.0], [-1.0, 9.0, 9.0], [2.0, 2.0, 2.0]])  # 9 is in the padding
    batch = dataclasses.replace(record_of(RATIOS, step=1), advantages=own)
    _, each = outcomes([write(tmp_path, batch)], "tis")
    assert each["tis", "all"].bias == pytest.approx(-1.5 / 9)


def test_the_second_moment_is_that_of_a_rank(tmp_path):
    # d^2 of rank 0: .01 .01 .09, mean .037 <= .04, all stay. Of rank 1: .09 each, none stays. Together, .01 .01 would.
    one = [[math.exp(0.1), math.exp(0.1), math.exp(0.3)]]
    two = [[math.exp(0.3)] * 3]
    run = write(tmp_path, record_of(one, [1.0], step=7, rank=0), record_of(two, [1.0], step=7, rank=1))
    _, each = outcomes([run], "m2po")
    assert each["m2po", "all"].rejected == pytest.approx(3 / 6)


def test_the_correction_in_force_is_replayed_with_all_that_is_set(tmp_path):
    stored = {
        "preset": "tis",
        "level": "token",
        "action": "truncate",
        "lower": None,
        "upper": 2.0,
        "normalize": "token",
    }
    stored |= {"rejections": [], "trust_regions": [], "reject_rate": None}
    # the mean weight, 7 / 6, is of both ranks together
    ranks = [
        record_of(RATIOS[:2], ADVANTAGES[:2], step=1, rank=0),
        record_of(RATIOS[2:], ADVANTAGES[2:], step=1, rank=1),
    ]
    run = write(tmp_path, *(dataclasses.replace(rank, fingerprint={"correction": stored}) for rank in ranks))
    found, each = outcomes([run])
    assert found.in_force == "token_truncate, as set"
    assert [name for name, group in each if group == "all"] == [*DEFAULT, "token_truncate, as set"]
    mine = each["token_truncate, as set", "all"]
    assert mine.weight_mean == pytest.approx(1.0) and mine.weight_max == pytest.approx(2 * 6 / 7)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_known_again_from_its_fingerprint(name):
    stored = json.loads(json.dumps(dataclasses.asdict(PRESETS[name]) | {"preset": name}))
    assert in_force({"correction": stored}) == (name, PRESETS[name])
    assert in_force({"correction": {**stored, "preset": None}}) == (name, PRESETS[name])  # set field by field


def test_a_correction_of_another_version_is_left_out(caplog):
    assert in_force({}) is None and in_force({"correction": None}) is None
    assert in_force({"correction": {"level": "paragraph", "action": "mask"}}) is None
    assert "'paragraph'" in caplog.text
    rules = {"rejections": [{"level": "batch", "statistic": "m2", "upper": 0.04}], "trust_regions": []}
    own = Correction(rejections=(Rejection("batch", None, 0.04, "m2"),))
    assert in_force({"correction": {"level": "token", "action": "none", **rules}}) == ("m2po", own)
    regions = {"trust_regions": [{"kind": "tv", "bound": 0.2}]}
    name, correction = in_force({"correction": regions})
    assert correction.trust_regions == (TrustRegion("tv", 0.2),)


def test_calibrated_bounds_come_from_the_records(tmp_path):
    torch.manual_seed(0)
    stored = dataclasses.asdict(Correction("sequence", "mask", None, 3.0, reject_rate=0.1))
    noise = (0.01 * torch.randn(300, 16)).exp().tolist()
    run = write(tmp_path / "many", record_of(noise, [1.0] * 300, step=1, fingerprint={"correction": stored}))
    found, each = outcomes([run])
    # 10 % of 300, give or take three standard deviations of 1.7 %; the fixed bound, 3, would mask none
    assert each[found.in_force, "all"].masked == pytest.approx(0.1, abs=0.052)
    few = write(tmp_path / "few", record_of(noise[:9], [1.0] * 9, step=1, fingerprint={"correction": stored}))
    found, each = outcomes([few])
    assert each[found.in_force, "all"].masked == 0.0
    assert any("Too few completions to calibrate" in note for note in found.notes)


def test_without_advantages_what_needs_them_is_left_out_and_said(tmp_path, capsys):
    run = write(tmp_path, record_of(RATIOS, ADVANTAGES, step=1), record_of(RATIOS, step=2))
    found, each = outcomes([run], "tis", "opsm")
    assert {group for _, group in each} == {"all", "length 1", "length 2", "length 3"}
    assert each["tis", "all"].ess == pytest.approx(49 / 63) and each["tis", "all"].tokens == 12
    assert all(one.bias is one.cosine is None for one in found.outcomes)
    assert ("opsm", "all") not in each
    assert any("without advantages" in note and note.endswith("need advantages: opsm.") for note in found.notes)
    assert cli.main(["compare", str(run), "--correction", "tis", "--format", "md"]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| correction"))
    assert "bias" not in header and "cosine" not in header and "ESS" in header


def test_what_leaves_nothing_to_say_is_said(tmp_path):
    run = write(tmp_path / "a", record_of(RATIOS, step=1))
    with pytest.raises(ValueError, match="Nothing to replay: opsm need advantages"):
        replay([run], ["opsm"])
    unscored = write(tmp_path / "b", record_of([[math.nan] * 10] * 100, [1.0] * 100, step=1))
    found = replay([unscored], ["tis"])
    assert found.recommended is None and "No token has a log-prob of both" in found.reason


def test_unscored_and_infinite_tokens_do_not_spread(tmp_path):
    batch = record_of([[math.nan, 2.0], [1.0, 1.0]], [1.0, 1.0], step=1)
    batch.old_per_token_logps[1, 1] = -math.inf  # impossible for the trainer: never trusted
    found, each = outcomes([write(tmp_path, batch)], "tis")
    # weights 1 2 | 1 0; the reference gives the second completion weight 0
    tis = each["tis", "all"]
    assert (tis.weight_mean, tis.masked) == (1.0, 0.25)
    # ratios of completions: 2 and 0, ESS 4 / (2 * 4) = .5; (3 + 1 - 4 - 0) / 4
    assert found.reference == "sequence" and tis.bias == pytest.approx(0.0)
    assert tis.bias_error == pytest.approx(math.sqrt(2 * 2) / 4)  # b = (-1, 1)


# Recommendations. A completion's tokens share a ratio unless said; |A| = 1.


def planted(tmp_path, rows, advantages):
    return replay([write(tmp_path, record_of(rows, advantages, step=1))])


def test_a_tiny_sample_gets_no_recommendation(run):
    found = replay([run])
    assert found.recommended is None and "6 tokens are too few for a recommendation, it takes 1000" in found.reason


def test_a_healthy_gap_needs_no_correction(tmp_path):
    # k3 = e^d - 1 - d = 5e-5 at d = .01
    found = planted(tmp_path, [[math.exp(0.01)] * 10, [math.exp(-0.01)] * 10] * 50, [1.0, -1.0] * 50)
    assert found.recommended == "none" and "The gap is healthy (k3 5e-05 nats" in found.reason


def test_a_heavy_tail_gets_the_simplest_that_the_errors_allow(tmp_path):
    # Of 1000 completions of 2 tokens, 10 have a token of ratio 8: k3 = (8 - 1 - log 8) / 200 = .0246.
    # Ratios of completions: mean 1.07, mean square 1.63, ESS .70. Each of the 10 counts 16 in the reference; `tis` makes it
    # 2 + 1, `prefix_tis` and `seq_tis` 4. 10 * 13 / 2000 and 10 * 12 / 2000, at an error of sqrt(10) 13 / 2000 = .02.
    rows = [[8.0, 1.0]] * 10 + [[1.0, 1.0]] * 990
    found = planted(tmp_path, rows, [1.0] * 1000)
    bias = {each.correction: each.bias_apart for each in found.outcomes if each.group == "all"}
    assert bias["tis"] == pytest.approx(0.065) and bias["seq_tis"] == bias["prefix_tis"] == pytest.approx(0.06)
    assert found.recommended == "tis"
    assert "within its error of that of seq_tis (0.06), and tis is simpler" in found.reason


def test_a_bias_beyond_its_error_decides(tmp_path):
    # Ratios 1.2 where A > 0, 1/1.2 where A < 0; completions 1.44 and .694, ESS 1.067^2 / 1.278 = .89.
    # `tis` is off by 2 (1.2 - 1.44) and -2 (.833 - .694): (.48 + .278) / 4 = .19, at an error of .002; `seq_tis` by nothing.
    found = planted(tmp_path, [[1.2, 1.2], [1 / 1.2, 1 / 1.2]] * 500, [1.0, -1.0] * 500)
    assert found.recommended == "seq_tis" and "is 0, the smallest" in found.reason


def test_where_sequence_ratios_collapse_the_token_ratio_judges(tmp_path):
    # 1.25^20 = 87 in a tenth of the completions, 1 in the others: mean 9.6, mean square 753, ESS .12.
    # Tokens: mean 1.025, mean square 1.05625, ESS .995; k3 = (.25 - log 1.25) / 10 = .0027
    found = planted(tmp_path, [[1.25] * 20] * 10 + [[1.0] * 20] * 90, [1.0, -1.0] * 50)
    assert found.reference == "token"
    assert any("0.12 of 100 completions, too few to judge by" in note and "0.995" in note for note in found.notes)
    tis = next(each for each in found.outcomes if (each.correction, each.group) == ("tis", "all"))
    assert tis.bias_apart == pytest.approx(0.0, abs=1e-6)
    assert found.recommended == "tis"


def test_where_neither_ratio_is_fit_there_is_no_bias_and_it_says_so(tmp_path, capsys):
    # one completion of a token of ratio 1000 among 1000: ESS 2^2 / 1001 = .004, of both
    run = write(tmp_path, record_of([[1000.0]] + [[1.0]] * 999, [1.0, -1.0] * 500, step=1))
    found = replay([run])
    assert found.reference is None and all(each.bias is None for each in found.outcomes)
    assert any("There is no bias to show" in note for note in found.notes)
    assert found.recommended == "tis" and "no bias to compare" in found.reason
    cli.main(["compare", str(run), "--correction", "none", "--format", "md"])
    assert "no bias to show" in capsys.readouterr().out


def test_a_gap_beyond_correction_is_to_be_found(tmp_path):
    # `tis` makes 2 and .05 of e^3 and e^-3: ESS 1.025^2 / 2.001 = .52; the others mask half or all
    found = planted(tmp_path, [[math.exp(3.0)] * 2, [math.exp(-3.0)] * 2] * 250, [1.0, -1.0] * 250)
    assert found.recommended is None and "look for the cause of the gap" in found.reason


def test_a_correction_that_keeps_half_is_not_recommended(tmp_path):
    # ESS 1 of what is kept, and half the tokens gone; k3 = (1.2 - 1 - log 1.2) / 2 = .0088
    run = write(tmp_path, record_of([[1.2, 1.2], [1.0, 1.0]] * 500, [1.0, -1.0] * 500, step=1))
    found = replay([run], ["sequence_reject:,1.1"])
    assert found.outcomes[0].ess == 1.0 and found.outcomes[0].rejected == 0.5
    assert found.recommended is None and "look for the cause of the gap" in found.reason


def test_log_probs_of_other_tokens_are_no_case_for_a_correction(tmp_path):
    batch = record_of([[1.0] * 4], [1.0], step=1)
    batch.old_per_token_logps[0] = torch.tensor([-1.0, -2.0, -1.0, -2.0])
    batch.sampling_per_token_logps[0] = torch.tensor([-2.0, -1.0, -2.0, -1.0])
    found = replay([write(tmp_path, batch)], ["tis"])
    assert any("mismatch/pearson is -1" in note and "Find the cause first" in note for note in found.notes)


def test_a_record_counts_once_and_runs_do_not_mix(tmp_path):
    runs = [write(tmp_path / name, record_of(RATIOS, ADVANTAGES, step=50)) for name in "ab"]
    twice = [
        runs[0],
        runs[0] / "mismatch",
        *(runs[0] / "mismatch" / "records").iterdir(),
    ]  # one file, named three times
    assert outcomes(twice, "none")[1]["none", "all"].tokens == 6
    assert outcomes(runs, "none")[1]["none", "all"].tokens == 12


def test_a_broken_record_is_left_out_with_a_warning(run, caplog):
    (run / "mismatch/records/step-00000099-rank-00000.safetensors").write_bytes(b"half")
    assert outcomes([run], "tis")[1]["tis", "all"].tokens == 6
    assert "step-00000099" in caplog.text


# The command


def test_the_table_and_the_recommendation_are_printed(run, capsys):
    assert cli.main(["compare", str(run), "--correction", "none", "tis"]) == 0
    output = capsys.readouterr().out
    assert "Corrections replayed on 3 completions, 6 tokens" in output
    row = next(line for line in output.splitlines() if line.startswith("│ tis"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    # ESS 49/63 is outside the healthy range of a correction's, and marked
    assert cells == [
        "tis", "0.778 !", "100 %", "16.7 %", "0 %", "0 %", "0.5 … 2", "1.17", "-0.167 ± 0.6", "0.611", "0.919"
    ]  # fmt: skip
    assert output.rstrip().splitlines()[-1].startswith("Recommended: nothing. 6 tokens are too few")


def test_json_is_all_of_it(run, capsys):
    assert cli.main(["compare", str(run), "--correction", "tis", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcomes"][0]["bias_apart"] == pytest.approx(5.5 / 9) and found["reference"] == "sequence"
    assert found["recommended"] is None and found["metrics"]["mismatch/ratio/max"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "text", ["tsi", "token_truncate", "token_truncate:2", "token_cut:,2", "token_truncate:a,2", "sequence_mask:3,2"]
)
def test_an_unknown_correction_is_refused_with_what_there_is(run, capsys, text):
    assert cli.main(["compare", str(run), "--correction", text]) == 2
    error = capsys.readouterr().err
    assert repr(text) in error and "icepop" in error and "token_truncate:0.5,2" in error


def test_the_help_names_what_is_replayed_by_default(capsys):
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert f"(default: {', '.join(DEFAULT)} and the correction that the run had)" in help_text


def test_a_correction_can_be_written_out():
    assert correction_from("icepop") is PRESETS["icepop"]
    assert correction_from("token_truncate:0.5,2") == Correction("token", "truncate", 0.5, 2.0)
    assert correction_from("geometric_reject:,1.5") == Correction("geometric", "reject", None, 1.5)


def test_records_that_are_not_there_are_an_error(tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


# Two runs


def finished(folder, dtype, k3s, steps=(50,), state=True):
    fingerprint = {"model": "m", "engine": {"kind": "vllm", "dtype": dtype}, "versions": {"trl": "1.16.0"}}
    fingerprint["settings"] = {"loss_type": "dapo", "output_dir": str(folder)}
    fingerprint["weights"] = {"step": 0, "fingerprint": folder.name}
    fingerprint["audit"] = [{"code": "E7", "found": "half precision"}] if dtype == "float16" else []
    metrics = {"mismatch/k3/mean": k3s[-1], "mismatch/abs_diff/mean": 0.01, "mismatch/ess/token": 0.99}
    for step in steps:
        write(folder, record_of(RATIOS, ADVANTAGES, step=step, fingerprint=fingerprint, metrics=metrics))
    logs = [
        {"step": step, "reward": 0.1 * step, "mismatch/k3/mean": k3, "mismatch/abs_diff/mean": 0.01}
        for step, k3 in enumerate(k3s, 1)
    ]
    if state:
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    else:
        for line in logs:
            append_logs(folder / "mismatch", line)
    return folder


@pytest.fixture
def two(tmp_path):
    a = finished(tmp_path / "a", "bfloat16", [2e-4, 3e-4, 4e-4, 9e-4, 5e-4], (50, 100))
    b = finished(tmp_path / "b", "float16", [2e-4, 1e-3, 3e-3, 2e-2, 4e-3], (100, 150), state=False)
    return a, b


def test_dr_grpo_divides_by_the_longest_completion_there_can_be():
    """Not by the longest of a record: 2 tokens of a completion, of 10 or of 100 columns, count the same."""
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[:, :2] = True
    narrow = token_factors(mask, "dr_grpo", longest=400)
    wide = token_factors(torch.nn.functional.pad(mask, (0, 90)), "dr_grpo", longest=400)
    assert narrow[0, 0] == wide[0, 0] == pytest.approx(1 / (3 * 400))


def test_two_runs_differ_in_what_was_planted(two):
    found = compare_runs(*two)
    # not in where they are, nor in what is alike
    assert found.differences == {"engine.dtype": ("bfloat16", "float16"), "audit": ([], ["E7"])}
    a, b = found.metrics["mismatch/k3/mean"]
    assert (a.start, a.end) == (pytest.approx(3e-4), pytest.approx(6e-4))  # means of 2 3 4 and of 4 9 5
    assert (a.worst, a.worst_step) == (9e-4, 4)  # inside the range, nearest to its bound
    assert (b.worst, b.worst_step) == (2e-2, 4) and b.end == pytest.approx(9e-3)  # of 3 20 4
    reward = found.metrics["reward"][0]
    assert (reward.worst, reward.worst_step) == (0.1, 1)  # of a reward, the smallest
    assert list(found.steps) == [100] and found.steps[100][1]["mismatch/k3/mean"] == 4e-3


def test_the_healthier_run_has_fewer_metrics_that_end_outside(two):
    found = compare_runs(*two)
    assert found.healthier == str(two[0])
    assert (
        "0 of 2 metrics end outside their healthy range, against 1 in the other (mismatch/k3/mean 0.009)"
        in found.reason
    )
    assert compare_runs(two[1], two[0]).healthier == str(two[0])


def test_with_as_many_outside_the_smaller_k3_decides_if_it_is_clearly_smaller(tmp_path):
    runs = [finished(tmp_path / name, "bfloat16", [k3]) for name, k3 in (("a", 1e-4), ("b", 1.4e-4), ("c", 2e-4))]
    assert compare_runs(runs[0], runs[1]).healthier is None
    found = compare_runs(runs[2], runs[0])
    assert found.healthier == str(runs[0]) and "k3 ends at 0.0001 against 0.0002" in found.reason
    assert "differ" not in found.reason and found.differences == {}


def test_what_a_run_lacks_is_said(two, tmp_path):
    stock = tmp_path / "stock"
    (stock / "checkpoint-9").mkdir(parents=True)
    (stock / "checkpoint-10").mkdir()
    for step in (9, 10):
        history = {"log_history": [{"step": step, "reward": float(step)}]}
        (stock / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(history))
    found = compare_runs(two[0], stock)
    assert found.notes == (f"{stock} has no records.",) and found.differences == {} and found.steps == {}
    assert found.metrics["reward"][1].end == 10.0  # of the newest checkpoint
    assert found.healthier is None and "no metric" in found.reason
    with pytest.raises(FileNotFoundError, match="is not a run"):
        compare_runs(two[0], tmp_path / "nowhere")


def test_live_logs_reach_beyond_the_last_checkpoint(two):
    append_logs(two[0] / "mismatch", {"step": 6, "mismatch/k3/mean": 2e-3})
    course, _ = compare_runs(*two).metrics["mismatch/k3/mean"]
    assert (course.worst, course.worst_step) == (2e-3, 6)


def test_two_folders_of_runs_without_corrections_are_compared_as_runs(two, capsys):
    assert all(map(is_run, two)) and not is_run(two[0] / "mismatch" / "records")
    assert cli.main(["compare", *map(str, two), "--format", "md"]) == 0
    output = capsys.readouterr().out
    assert "| engine.dtype | bfloat16 | float16 |" in output and f"Healthier: {two[0]}." in output
    assert "| 100 | 0.0005 | 0.004 ! | 0.01 | 0.01 | 0.99 | 0.99 |" in output
    assert cli.main(["compare", *map(str, two), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"]["engine.dtype"] == ["bfloat16", "float16"]
    # with a correction named, both are records
    assert cli.main(["compare", *map(str, two), "--correction", "tis"]) == 0
    assert "Corrections replayed on 12 completions" in capsys.readouterr().out
