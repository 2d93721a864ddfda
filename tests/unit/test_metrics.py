# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_consistent.correction.presets import PRESETS
from trl_consistent.correction.rules import Correction
from trl_consistent.correction.weights import correct
from trl_consistent.metrics.catalogue import METRICS
from trl_consistent.metrics.measure import (
    correction_metrics,
    finalize,
    histograms,
    mismatch_metrics,
    reference_metrics,
    support_metrics,
    trust_region_metrics,
)
from trl_consistent.ratios import mismatch_log_ratio
from trl_consistent.statistics import Stat, merge, on_host


NAN, INF = math.nan, math.inf
OLD = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.3, -1.2, 0.0, 0.0], [-4.0, -0.2, -0.7, 0.0]])
SAMPLING = torch.tensor([[-1.2, -0.5, -1.0, -0.3], [-0.3, -1.0, 0.0, 0.0], [-1.0, -0.2, -1.9, 0.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
# d: .2 0 -1 .2 | 0 -.2 | -3 0 1.2, nine tokens


def measured(old=OLD, sampling=SAMPLING, mask=MASK):
    return finalize(mismatch_metrics(old, sampling, mask))


def corrected(correction, old=OLD, sampling=SAMPLING, mask=MASK):
    result = correct(mismatch_log_ratio(old, sampling, mask), mask, correction)
    stats = mismatch_metrics(old, sampling, mask) | correction_metrics(mask, result, correction.action)
    return {key: value for key, value in finalize(stats).items() if key.startswith("correction/")}


def random_batch(seed=0, rows=6, tokens=20):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, tokens, generator=generator) * 4
    sampling = old + 0.1 * torch.randn(rows, tokens, generator=generator)
    mask = (torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)).long()
    return old, sampling, mask


def test_hand_numbers():
    m = measured()
    # sum d = -2.6, sum |d| = 5.8 over 9 tokens
    assert m["mismatch/diff/mean"] == pytest.approx(-2.6 / 9, abs=1e-6)
    assert m["mismatch/k1/mean"] == pytest.approx(2.6 / 9, abs=1e-6)
    assert m["mismatch/abs_diff/mean"] == pytest.approx(5.8 / 9, abs=1e-6)
    assert m["mismatch/abs_diff/max"] == pytest.approx(3.0, abs=1e-6)
    assert m["mismatch/abs_diff/p50"] == pytest.approx(0.2, rel=0.016)  # sorted: 0 0 0 .2 (.2) .2 1 1.2 3
    # exp: 1.221403 x2, 1 x3, .367879, .818731, .049787, 3.320117; sum 9.999320
    assert m["mismatch/ratio/mean"] == pytest.approx(9.999320 / 9, abs=1e-6)
    assert m["mismatch/ratio/min"] == pytest.approx(math.exp(-3), abs=1e-6)
    assert m["mismatch/ratio/max"] == pytest.approx(math.exp(1.2), abs=1e-5)
    # squares: 1.491825 x2, 1 x3, .135335, .670320, .002479, 11.023176; sum 17.814960
    assert m["mismatch/chi2/token"] == pytest.approx(17.814960 / 9 - 1, abs=1e-5)
    assert m["mismatch/ess/token"] == pytest.approx(9.999320**2 / (9 * 17.814960), abs=1e-6)
    # products e^-.6, e^-.2, e^-1.8; geometric e^-.15, e^-.1, e^-.6
    sequence = [math.exp(-0.6), math.exp(-0.2), math.exp(-1.8)]
    assert m["mismatch/sequence_ratio/mean"] == pytest.approx(sum(sequence) / 3, abs=1e-6)
    assert m["mismatch/ess/sequence"] == pytest.approx(
        sum(sequence) ** 2 / (3 * sum(x * x for x in sequence)), abs=1e-6
    )
    assert m["mismatch/geometric_ratio/min"] == pytest.approx(math.exp(-0.6), abs=1e-6)
    assert m["mismatch/geometric_ratio/max"] == pytest.approx(math.exp(-0.1), abs=1e-6)
    # mean -log p: (3.6/4, 1.5/2, 4.9/3) and (3/4, 1.3/2, 3.1/3)
    assert m["mismatch/log_ppl/old"] == pytest.approx((0.9 + 0.75 + 4.9 / 3) / 3, abs=1e-6)
    assert m["mismatch/log_ppl/sampling"] == pytest.approx((0.75 + 0.65 + 3.1 / 3) / 3, abs=1e-6)
    variance = 17.814960 / 9 - (9.999320 / 9) ** 2
    assert m["mismatch/z_ratio"] == pytest.approx((9.999320 / 9 - 1) / math.sqrt(variance / 9), abs=1e-5)


def test_one_scored_token_leaves_spread_metrics_out_instead_of_nan():
    m = measured(OLD[:1, :1], SAMPLING[:1, :1], torch.ones(1, 1))
    assert "mismatch/pearson" not in m and "mismatch/z_ratio" not in m
    assert m["mismatch/diff/mean"] == pytest.approx(0.2, abs=1e-6)
    assert all(math.isfinite(value) for value in m.values())


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4, -1e4])
def test_padding_is_ignored_whatever_it_holds(poison):
    old = torch.where(MASK.bool(), OLD, poison)
    sampling = torch.where(MASK.bool(), SAMPLING, -poison)
    assert measured(old, sampling) == measured()


def test_empty_rows_change_nothing():
    def padded(x):
        return torch.cat([x, torch.zeros(3, 4, dtype=x.dtype)])

    assert measured(padded(OLD), padded(SAMPLING), padded(MASK)) == measured()


def test_tool_tokens_never_count():
    # the mask is completion_mask * tool_mask: a tool span in the middle of a completion
    tool = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]])
    wild = torch.where(tool.bool(), OLD, -50.0)
    assert measured(wild, SAMPLING, MASK * tool) == measured(OLD, SAMPLING, MASK * tool)
    assert measured(OLD, SAMPLING, MASK * tool)["mismatch/diff/mean"] == pytest.approx((0.4 - 2.0) / 7, abs=1e-6)


def test_all_masked_batch_has_nothing_to_report():
    assert measured(mask=torch.zeros_like(MASK)) == {}
    assert corrected(PRESETS["tis"], mask=torch.zeros_like(MASK)) == {}


def test_unscored_and_infinite_tokens_are_counted_and_enter_nothing_else():
    sampling = SAMPLING.clone()
    sampling[0, 0], sampling[2, 1] = NAN, -INF
    m = measured(sampling=sampling)
    assert m["mismatch/unscored_fraction"] == pytest.approx(1 / 9)
    assert m["mismatch/nonfinite_count"] == 1
    # left: 0 -1 .2 | 0 -.2 | -3 1.2
    assert m["mismatch/diff/mean"] == pytest.approx(-2.8 / 7, abs=1e-6)
    # the completion with the infinite token enters no sequence statistic; the unscored token counts as ratio 1
    assert m["mismatch/sequence_ratio/min"] == pytest.approx(math.exp(-0.8), abs=1e-6)
    assert all(math.isfinite(value) for value in m.values())


def test_trainer_nan_is_counted_not_averaged():
    old = OLD.clone()
    old[1, 0] = NAN
    m = measured(old=old)
    assert m["mismatch/nonfinite_count"] == 1 and m["mismatch/unscored_fraction"] == 0
    assert all(math.isfinite(value) for value in m.values())


def test_huge_log_ratios_saturate_instead_of_overflowing():
    old, sampling = torch.full((2, 4096), -1.0), torch.full((2, 4096), -121.0)
    m = measured(old, sampling, torch.ones(2, 4096))
    assert all(math.isfinite(value) for value in m.values())
    assert m["mismatch/abs_diff/max"] == 120


def test_ratios_that_are_all_zero_have_no_effective_sample_size():
    # e^-9999 is 0 in any float: (sum w)^2 / (n sum w^2) would be 0 / 0
    m = measured(torch.full((1, 2), -1e4), torch.full((1, 2), -1.0), torch.ones(1, 2))
    assert "mismatch/ess/token" not in m
    assert m["mismatch/ratio/mean"] == 0 and m["mismatch/chi2/token"] == -1


def filled(histogram):
    """Counts of the bins that are not empty, by their edges."""
    bins = zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True)
    return {(low, high): count for low, high, count in bins if count}


def counted(old=OLD, sampling=SAMPLING, mask=MASK):
    return {key: filled(each) for key, each in histograms(mismatch_metrics(old, sampling, mask)).items()}


def test_histograms_count_signed_tokens_and_completions():
    # half octaves: edges 2^k and 1.5 * 2^k, on both sides of 0. d: .2 0 -1 .2 | 0 -.2 | -3.0 0 1.2; -1 is on an edge
    zero = (-(2.0**-16), 2.0**-16)
    assert counted()["mismatch/diff"] == {
        (-4.0, -3.0): 1, (-1.5, -1.0): 1, (-0.25, -0.1875): 1, zero: 3, (0.1875, 0.25): 2, (1.0, 1.5): 1
    }  # fmt: skip
    # sums of d: -.6, -.2, -1.8
    assert counted()["mismatch/log_sequence_ratio"] == {(-0.75, -0.5): 1, (-0.25, -0.1875): 1, (-2.0, -1.5): 1}


def test_histogram_edges_are_fixed_and_the_outermost_bins_are_open():
    # d: 1e-9 and -1e-5 are in the bin around 0, 2e-5 is the first above 2^-16 = 1.526e-5, +-300 and -1e6 are beyond 2^8
    d = torch.tensor([[1e-9, -1e-5, 2e-5, 300.0, -300.0, -1e6]])
    both = histograms(mismatch_metrics(d, torch.zeros_like(d), torch.ones_like(d)))
    edges = both["mismatch/diff"].edges
    assert edges == both["mismatch/log_sequence_ratio"].edges == [-edge for edge in reversed(edges)]
    assert len(edges) == 98 and edges[-3:] == [128.0, 192.0, 256.0] and edges[49:51] == [2.0**-16, 1.5 * 2.0**-16]
    zero, beyond = (-(2.0**-16), 2.0**-16), (192.0, 256.0)
    first = (2.0**-16, 1.5 * 2.0**-16)
    assert filled(both["mismatch/diff"]) == {(-256.0, -192.0): 2, zero: 2, first: 1, beyond: 1}


def test_histograms_of_two_ranks_add_up_to_that_of_all_tokens():
    old, sampling, mask = random_batch(rows=9)
    parts = [mismatch_metrics(old[rows], sampling[rows], mask[rows]) for rows in (slice(0, 2), slice(2, 9))]
    whole = histograms(mismatch_metrics(old, sampling, mask))
    assert histograms(merge(parts)) == whole
    assert sum(whole["mismatch/diff"].counts) == mask.sum()
    assert sum(whole["mismatch/log_sequence_ratio"].counts) == 9
    below = ((old - sampling < -(2.0**-16)) & mask.bool()).sum()
    assert sum(whole["mismatch/diff"].counts[:48]) == below


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4])
def test_histograms_ignore_padding_and_tokens_that_are_unscored_or_infinite(poison):
    assert counted(torch.where(MASK.bool(), OLD, poison), torch.where(MASK.bool(), SAMPLING, -poison)) == counted()
    sampling = SAMPLING.clone()
    sampling[0, 0], sampling[2, 1] = NAN, -INF
    # left: 0 -1 .2 | 0 -.2 | -3 1.2; sums -.8 and -.2, the last completion has an infinite token
    zero = (-(2.0**-16), 2.0**-16)
    assert counted(sampling=sampling) == {
        "mismatch/diff": {
            (-4.0, -3.0): 1, (-1.5, -1.0): 1, (-0.25, -0.1875): 1, zero: 2, (0.1875, 0.25): 1, (1.0, 1.5): 1
        },
        "mismatch/log_sequence_ratio": {(-1.0, -0.75): 1, (-0.25, -0.1875): 1},
    }  # fmt: skip


def test_no_tokens_no_histograms():
    assert counted(mask=torch.zeros_like(MASK)) == {}
    assert histograms(reference_metrics(OLD, SAMPLING, MASK)) == {} == histograms({})


def test_what_was_moved_to_the_host_makes_the_same_numbers():
    stats = mismatch_metrics(OLD, SAMPLING, MASK)
    assert finalize(on_host(stats)) == measured() and histograms(on_host(stats)) == histograms(stats)


def test_merging_parts_is_the_whole_batch():
    # of unequal sizes, so that a mean of means would show
    old, sampling, mask = random_batch(rows=9)
    correction = PRESETS["tis_two_sided"]

    def stats(rows):
        d = mismatch_log_ratio(old[rows], sampling[rows], mask[rows])
        result = correct(d, mask[rows], correction)
        return mismatch_metrics(old[rows], sampling[rows], mask[rows]) | correction_metrics(
            mask[rows], result, correction.action
        )

    whole = finalize(stats(slice(None)))
    parts = finalize(merge([stats(slice(0, 1)), stats(slice(1, 7)), stats(slice(7, 9))]))
    assert parts == pytest.approx(whole, rel=1e-6)
    means = [finalize(stats(rows))["mismatch/abs_diff/mean"] for rows in (slice(0, 1), slice(1, 7), slice(7, 9))]
    assert sum(means) / 3 != pytest.approx(whole["mismatch/abs_diff/mean"], rel=1e-3)


def test_merging_a_rank_without_tokens_changes_nothing():
    old, sampling, mask = random_batch()
    stats = mismatch_metrics(old, sampling, mask)
    assert finalize(merge([stats, mismatch_metrics(old, sampling, mask * 0)])) == finalize(stats)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-5, 1e-2, 1.0]), q=st.sampled_from(["p50", "p99"]))
def test_quantiles_are_those_of_a_sort_within_a_bin(seed, scale, q):
    generator = torch.Generator().manual_seed(seed)
    d = scale * torch.randn(4, 100, generator=generator)
    mask = torch.rand(4, 100, generator=generator) < 0.7
    old = torch.full_like(d, -2.0)
    exact = torch.sort((old - (old - d))[mask].abs()).values
    rank = {"p50": 0.5, "p99": 0.99}[q] * (len(exact) - 1)
    got = measured(old, old - d, mask)[f"mismatch/abs_diff/{q}"]
    tolerance = 0.032 * exact[math.ceil(rank)].item() + 1e-7
    assert exact[math.floor(rank)].item() - tolerance <= got <= exact[math.ceil(rank)].item() + tolerance


def test_identical_engines_measure_zero():
    m = measured(OLD, OLD)
    zero = ("diff/mean", "abs_diff/mean", "abs_diff/p50", "abs_diff/p99", "abs_diff/max", "k3/mean", "chi2/token")
    assert [m[f"mismatch/{key}"] for key in zero] == [0] * len(zero)
    assert m["mismatch/ratio/mean"] == m["mismatch/ess/token"] == m["mismatch/ess/sequence"] == 1
    assert m["mismatch/pearson"] == pytest.approx(1)
    assert "mismatch/z_ratio" not in m


def test_honest_noise_keeps_the_mean_ratio_at_one_and_truncation_does_not():
    # tokens drawn from mu: E[ratio] = 1 whatever pi is; from a truncated mu it is the kept mass
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(16, generator=generator)
    log_mu, log_pi = logits.log_softmax(-1), (logits + 0.3 * torch.randn(16, generator=generator)).log_softmax(-1)
    ids = torch.multinomial(log_mu.exp(), 40_000, replacement=True, generator=generator).view(400, 100)
    honest = measured(log_pi[ids], log_mu[ids], torch.ones(400, 100))
    assert abs(honest["mismatch/z_ratio"]) < 4
    kept = torch.topk(log_mu, 5).indices
    truncated = torch.full((16,), -INF).scatter(0, kept, log_mu[kept]).log_softmax(-1)
    ids = torch.multinomial(truncated.exp(), 40_000, replacement=True, generator=generator).view(400, 100)
    bad = measured(log_mu[ids], truncated[ids], torch.ones(400, 100))
    assert bad["mismatch/ratio/mean"] == pytest.approx(log_mu[kept].exp().sum().item(), abs=1e-4)


def test_correction_fractions_are_of_raw_ratios_and_per_side():
    # below .5: .3679 and .0498; above 2: 3.32
    truncated = corrected(PRESETS["tis_two_sided"])
    assert truncated["correction/truncated_fraction/low"] == pytest.approx(2 / 9)
    assert truncated["correction/truncated_fraction/high"] == pytest.approx(1 / 9)
    assert truncated["correction/masked_fraction/low"] == truncated["correction/rejected_fraction/low"] == 0
    masked = corrected(PRESETS["icepop"])
    assert masked["correction/masked_fraction/low"] == pytest.approx(2 / 9)
    assert masked["correction/masked_fraction/high"] == masked["correction/truncated_fraction/low"] == 0


def test_masked_sequences_count_by_their_tokens():
    # products .549 (4 tokens), .819 (2), .165 (3)
    masked = corrected(Correction("sequence", "mask", 0.2, 0.7))
    assert masked["correction/masked_fraction/low"] == pytest.approx(3 / 9)
    assert masked["correction/masked_fraction/high"] == pytest.approx(2 / 9)


def test_rejected_fraction_and_weights_of_the_rest():
    rejected = corrected(Correction("sequence", "reject", 0.2, 0.7))
    assert rejected["correction/rejected_fraction/low"] == pytest.approx(3 / 9)
    assert rejected["correction/rejected_fraction/high"] == pytest.approx(2 / 9)
    assert rejected["correction/weight/mean"] == pytest.approx(math.exp(-0.6), abs=1e-6)
    assert rejected["correction/weight/std"] == pytest.approx(0, abs=1e-6) and rejected[
        "correction/ess"
    ] == pytest.approx(1)


def test_everything_rejected_is_reported_without_weights():
    m = corrected(Correction("token", "reject", 10.0))
    assert m["correction/rejected_fraction/low"] == 1 and "correction/weight/mean" not in m


def test_no_host_sync_before_finalize(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("host sync")

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    result = correct(mismatch_log_ratio(OLD, SAMPLING, MASK), MASK, PRESETS["tis_geo_rs"])
    merge([mismatch_metrics(OLD, SAMPLING, MASK) | correction_metrics(MASK, result, "truncate")] * 2)


def test_catalogue_and_functions_agree():
    old, sampling, mask = random_batch()
    result = correct(mismatch_log_ratio(old, sampling, mask), mask, PRESETS["tis"])
    logged = finalize(mismatch_metrics(old, sampling, mask) | correction_metrics(mask, result, "truncate"))
    logged |= finalize(trust_region_metrics(mask, result.keep_mask))
    logged |= finalize(reference_metrics(old, old - 0.1, mask) | {"reference_used": Stat(torch.ones(1), "sum")})
    logged |= finalize(support_metrics(old > sampling, mask))
    assert set(logged) == set(METRICS)
    assert all(
        metric.key == key and metric.meaning and metric.unit and metric.reduction for key, metric in METRICS.items()
    )


def test_percentiles_and_counts_are_right_above_two_to_the_24_tokens():
    # 86 rows of .4 and one of .0125 among 4213 of .1: of these alone there are 17256448 tokens
    d = torch.full((4300, 1), 0.1)
    d[:86], d[86] = 0.4, 0.0125
    old = (d - 3.0).expand(-1, 4096)
    stats = mismatch_metrics(old, torch.full_like(old, -3.0), torch.ones((), dtype=torch.bool).expand(old.shape))
    logged = finalize(stats)
    assert logged["mismatch/abs_diff/p50"] == pytest.approx(0.1, rel=0.016)
    assert logged["mismatch/abs_diff/p99"] == pytest.approx(0.4, rel=0.016)  # 86 / 4300 = 2 %
    # (86 * .4 + .0125 + 4213 * .1) / 4300
    assert logged["mismatch/abs_diff/mean"] == pytest.approx(0.1059797, rel=1e-5)
    counts = stats["diff_histogram"].value
    assert counts.sum() == 4300 * 4096 and counts.max() == 4213 * 4096


def test_the_spread_of_weights_near_one_is_not_lost_to_rounding():
    # d = +-1e-5, half of each: weights 1 +- 1e-5, far below the resolution of a float32 square
    d = torch.tensor([[1e-5, -1e-5] * 8])
    result = correct(d, torch.ones_like(d), PRESETS["tis"])
    logged = finalize(correction_metrics(torch.ones_like(d), result, "truncate"))
    assert logged["correction/weight/std"] == pytest.approx(1e-5, rel=0.02)
