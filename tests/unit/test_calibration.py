# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
import torch

from trl_consistent.correction.calibration import (
    _AT_QUANTILE,
    _QUANTILE,
    WARM_UP_ROWS,
    NoiseEstimate,
    calibrated_bounds,
    expected_rejection,
    level_lengths,
    noise_statistics,
)
from trl_consistent.ratios import level_log_ratio
from trl_consistent.statistics import merge


NAN, INF = math.nan, math.inf
SIGMA = 0.02
LENGTHS = (16, 64, 256, 1024, 8192)
NOISES = ("normal", "laplace", "mixture")
TAIL, TAIL_SHARE = 10.0, 0.1  # the mixture: every tenth token is ten times noisier, excess kurtosis 22


def scales(mixture_of):
    """Token standard deviations of the mixture, for tokens in the tail or not; their variance averages to SIGMA^2."""
    return SIGMA / math.sqrt(1 - TAIL_SHARE + TAIL_SHARE * TAIL**2) * torch.where(mixture_of, TAIL, 1.0)


def token_noise(noise, *shape):
    """Healthy log-ratios, drift included."""
    x = SIGMA * torch.randn(shape)
    if noise == "laplace":  # a normal with an exponential variance
        x = x * torch.empty(shape).exponential_().sqrt()
    elif noise == "mixture":
        x = x / SIGMA * scales(torch.rand(shape) < TAIL_SHARE)
    return x - SIGMA**2 / 2


def summed_noise(noise, length, rows):
    """The sum of `length` of them, drawn at once."""
    variance = torch.full((rows,), length * SIGMA**2)
    if noise == "laplace":  # a sum of exponential variances is a gamma variate
        variance = SIGMA**2 * torch.distributions.Gamma(float(length), 1.0).sample((rows,))
    elif noise == "mixture":
        tail = torch.distributions.Binomial(length, torch.tensor(TAIL_SHARE)).sample((rows,))
        small, large = scales(torch.tensor([False, True])).square()
        variance = (length - tail) * small + tail * large
    return variance.sqrt() * torch.randn(rows) - length * SIGMA**2 / 2


def learned(noise="normal", lengths=(16, 8192), rows=2048, spoil=lambda d: d, spoiled=0.0, estimate=None):
    """An estimate after batches of 128 rows with lengths that are even in the logarithm; some rows are spoiled."""
    estimate = estimate or NoiseEstimate()
    low, high = (math.log(length) for length in lengths)
    for _ in range(rows // 128):
        number = torch.exp(low + (high - low) * torch.rand(128, 1)).round().long()
        d = token_noise(noise, 128, int(number.max()))
        d = torch.where(torch.rand(128, 1) < spoiled, spoil(d), d)
        estimate = estimate.update(noise_statistics(d, torch.arange(d.shape[1]) < number))
    return estimate


class Known(NoiseEstimate):
    """Of which V is .02^2, and the tails are normal."""

    ready = torch.tensor(True)
    variance = torch.tensor(SIGMA**2, dtype=torch.float64)
    excess_kurtosis = torch.tensor(0.0, dtype=torch.float64)


class KnownLaplace(Known):
    excess_kurtosis = torch.tensor(3.0, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def estimates():
    torch.manual_seed(0)
    return {noise: learned(noise) for noise in NOISES}


def test_bounds_by_hand():
    # n = 100: mean -100 * .0004 / 2 = -.02, std .02 * 10 = .2, z(.975) = 1.959964;
    # e^(-.02 - .391993) = .662329, e^(-.02 + .391993) = 1.450622; the mean divides by 100: e^-.00411993, e^.00371993
    lengths = torch.tensor([[100]])
    lower, upper = calibrated_bounds(lengths, Known(), 0.05, "sequence")
    assert (lower.item(), upper.item()) == pytest.approx((0.662329, 1.450622), abs=1e-6)
    for level in ("geometric", "turn"):
        lower, upper = calibrated_bounds(lengths, Known(), 0.05, level)
        assert (lower.item(), upper.item()) == pytest.approx((0.9958885, 1.0037269), abs=1e-6)


def test_one_laplace_token_has_its_own_quantile():
    # P(|x| > q) = e^(-q sqrt 2) = .01 at q = ln 100 / sqrt 2 = 3.2563 standard deviations; the normal one is 2.5758,
    # ours 2.5758 + (17.0903 - 7.7275) / 24 * 3 / (1 + 3 / 4) = 3.2446
    _, upper = calibrated_bounds(torch.tensor([[1]]), KnownLaplace(), 0.01, "sequence")
    assert math.log(upper.item()) == pytest.approx(-0.0002 + 3.2446 * SIGMA, abs=1e-6)


def test_the_shares_that_fixed_bounds_keep():
    # .999 ... 1.001 geometric, n = 16: std .005, drift -.0002: Phi(.2399) - Phi(-.1601) = .5948 - .4364;
    # n = 4096: std .0003125: Phi(3.838) - Phi(-2.562) = .9999 - .0052
    # .5 ... 2 sequence, n = 16: std .08; n = 4096: std 1.28, drift -.8192: Phi(1.1815) - Phi(.0985) = .8813 - .5392
    lengths = torch.tensor([[16], [4096]])
    geometric = expected_rejection(lengths, Known(), 0.999, 1.001, "geometric")
    sequence = expected_rejection(lengths, Known(), 0.5, 2.0, "sequence")
    assert (1 - geometric)[:, 0].tolist() == pytest.approx([0.1584, 0.9947], abs=1e-4)
    assert (1 - sequence)[:, 0].tolist() == pytest.approx([1.0, 0.3421], abs=1e-4)
    # the default of TRL, sequence mask with upper bound 3, of 4096 tokens: 1 - Phi((1.0986 + .8192) / 1.28) = .0670
    assert expected_rejection(lengths, Known(), None, 3.0, "sequence")[1].item() == pytest.approx(0.0670, abs=1e-4)


def test_calibrated_bounds_reject_what_they_are_expected_to():
    lengths = torch.tensor([[16, 700, 0]])
    for level in ("sequence", "geometric", "turn"):
        lower, upper = calibrated_bounds(lengths, Known(), 0.1, level)
        for column in (0, 1):
            bounds = lower[0, column].item(), upper[0, column].item()
            share = expected_rejection(lengths, Known(), *bounds, level)[0]
            assert share[column].item() == pytest.approx(0.1, abs=1e-4) and share[2] == 0
        assert lower[0, 2] == 0 and upper[0, 2] == INF  # no tokens, nothing to judge


@pytest.mark.parametrize("rate", [0.01, 0.05])
@pytest.mark.parametrize("noise", NOISES)
def test_healthy_completions_of_every_length_are_rejected_at_the_target_rate(estimates, noise, rate):
    for length in LENGTHS:
        # 40000 rows: a rate of .05 is known to .0011 (one standard error), V to 1 % and the rate from it to .0025
        ratio = summed_noise(noise, length, 40_000).exp()
        lower, upper = calibrated_bounds(torch.tensor([[length]]), estimates[noise], rate, "sequence")
        below, above = (ratio < lower).double().mean().item(), (ratio > upper).double().mean().item()
        assert below + above == pytest.approx(rate, abs=0.01), length
        assert below == pytest.approx(rate / 2, abs=0.006) and above == pytest.approx(rate / 2, abs=0.006)


@pytest.mark.parametrize("noise", ["normal", "laplace"])
def test_short_completions_suffice(noise):
    estimate = learned(noise, lengths=(16, 16), rows=4096)
    for length in LENGTHS:
        ratio = summed_noise(noise, length, 40_000).exp()
        lower, upper = calibrated_bounds(torch.tensor([[length]]), estimate, 0.05, "sequence")
        rejected = ((ratio < lower) | (ratio > upper)).double().mean().item()
        assert rejected == pytest.approx(0.05, abs=0.01), length


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("shift", [-1.5, 1.5])
def test_a_planted_completion_is_caught_at_every_length(estimates, level, shift):
    # every token off by 1.5 standard deviations: 6 of them for 16 tokens, of which 2.6 are the bound
    for length in LENGTHS:
        d = token_noise("normal", 50, length) + shift * SIGMA
        mask = torch.ones_like(d)
        ratio = level_log_ratio(d, mask, level).exp()
        lower, upper = calibrated_bounds(level_lengths(d, mask, level), estimates["normal"], 0.01, level)
        assert (ratio < lower if shift < 0 else ratio > upper).double().mean() > 0.98, length


def test_a_minority_of_bad_completions_does_not_drag_the_estimate():
    # the .65 quantile becomes that of .65 / .95 = .684: chi-squared 8.194 for 7.806, a spread larger by 2.5 %
    worst = lambda d: 1e3 * d  # noqa: E731
    estimate, spreads = None, []
    for _ in range(6):
        estimate = learned(lengths=(16, 512), spoil=worst, spoiled=0.05, estimate=estimate)
        spreads.append(estimate.variance.sqrt().item() / SIGMA)
    assert max(spreads) < 1.05 and spreads[-1] < spreads[0] + 0.03
    assert estimate.excess_kurtosis < 0.1
    # and 30 % still do not carry it away: .65 / .7 = .929, chi-squared 13.1
    estimate = learned(lengths=(16, 512), spoil=worst, spoiled=0.3)
    assert 1.1 < estimate.variance.sqrt().item() / SIGMA < 1.5


def test_a_fault_common_to_all_tokens_of_a_completion_does_not_count():
    torch.manual_seed(1)
    clean = learned(lengths=(16, 512))
    torch.manual_seed(1)
    faulty = learned(lengths=(16, 512), spoil=lambda d: d - 1, spoiled=0.5)
    assert faulty.variance.item() == pytest.approx(clean.variance.item(), rel=1e-3)


def test_mean_square_by_hand():
    # eight blocks of two: sums 2, 0 ... 0, mean 2 / 16 = .125; centered sums 1.75 and seven times -.25:
    # (3.0625 + 7 * .0625) / 2 / 7 = .25, root .5, an edge of the bins
    d = torch.zeros(1, 20)
    d[0, 1:3] = 1.0
    d[0, 5] = NAN
    mask = torch.tensor([[0] + [1] * 17 + [0] * 2])
    rows, tokens, squares, fourths = noise_statistics(d, mask)["noise"].value.reshape(4, -1)
    bin = (24 - 1) * 32
    assert rows.nonzero().tolist() == [[bin]] and tokens[bin] == 16
    # 2 * .875^2 + 14 * .125^2 = 1.75, 2 * .875^4 + 14 * .125^4 = 1.17578
    assert squares[bin].item() == pytest.approx(1.75) and fourths[bin].item() == pytest.approx(1.17578, abs=1e-5)


def test_the_quantile_is_that_of_a_chi_squared():
    share = torch.special.gammainc(torch.tensor(3.5), torch.tensor(3.5 * _AT_QUANTILE))
    assert share.item() == pytest.approx(_QUANTILE, abs=1e-5)


def test_spread_and_tails_are_found(estimates):
    for noise, kurtosis in (("normal", 0.0), ("laplace", 3.0), ("mixture", 22.4)):
        assert estimates[noise].variance.sqrt().item() == pytest.approx(SIGMA, rel=0.02), noise
        assert estimates[noise].excess_kurtosis.item() == pytest.approx(kurtosis, rel=0.03, abs=0.02), noise


def test_correlated_tokens_are_not_taken_for_independent_ones():
    # x_t + x_(t+1), two neighbors share one draw: the sum has variance 4 n, the token 2
    estimate = NoiseEstimate()
    for _ in range(16):
        x = SIGMA * torch.randn(128, 1025)
        d = x[:, 1:] + x[:, :-1]
        estimate = estimate.update(noise_statistics(d, torch.ones_like(d)))
    assert estimate.variance.sqrt().item() == pytest.approx(2 * SIGMA, rel=0.025)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4])
def test_padding_is_ignored_whatever_it_holds(poison):
    d = token_noise("normal", 6, 40)
    mask = torch.arange(40) < torch.tensor([[40], [33], [16], [8], [7], [0]])
    stat = noise_statistics(torch.where(mask, d, poison), mask)["noise"].value
    assert torch.equal(stat, noise_statistics(torch.where(mask, d, 0.0), mask)["noise"].value)
    rows, tokens = stat.reshape(4, -1)[:2].sum(dim=1).tolist()
    assert (rows, tokens) == (4, 40 + 33 + 16 + 8)  # 7 tokens are too few


def test_an_infinite_token_takes_its_completion_out():
    d = token_noise("normal", 3, 40)
    d[0, 3], d[1, 4] = INF, -INF
    assert torch.equal(
        noise_statistics(d, torch.ones(3, 40))["noise"].value,
        noise_statistics(d[2:], torch.ones(1, 40))["noise"].value,
    )


def test_parts_merge_to_the_whole():
    d, mask = token_noise("laplace", 8, 100), torch.ones(8, 100)
    parts = merge(noise_statistics(d[rows], mask[rows]) for rows in (slice(0, 3), slice(3, 8)))
    torch.testing.assert_close(parts["noise"].value, noise_statistics(d, mask)["noise"].value)


def test_old_completions_fade():
    estimate = NoiseEstimate(window=512.0)
    for scale in (5.0, 1.0):
        for _ in range(32):
            d = scale * token_noise("normal", 128, 64)
            estimate = estimate.update(noise_statistics(d, torch.ones_like(d)))
    # of the first noise a share (512 / 640)^32 = 8e-4 remains
    assert estimate.sums[0].sum().item() == pytest.approx(512)
    assert estimate.variance.sqrt().item() == pytest.approx(SIGMA, rel=0.05)


def test_there_are_no_bounds_during_the_warm_up():
    d = token_noise("normal", WARM_UP_ROWS - 1, 64)
    estimate = NoiseEstimate().update(noise_statistics(d, torch.ones_like(d)))
    lengths = torch.tensor([[16], [64]])
    for early in (NoiseEstimate(), estimate):
        lower, upper = calibrated_bounds(lengths, early, 0.01, "sequence")
        assert lower.isnan().all() and upper.isnan().all()
        assert expected_rejection(lengths, early, 0.5, 2.0, "sequence").isnan().all()
    lower, upper = calibrated_bounds(
        lengths, estimate.update(noise_statistics(d[:1], torch.ones(1, 64))), 0.01, "sequence"
    )
    assert (lower > 0.5).all() and (upper < 2).all()


def test_engines_that_agree_are_not_rejected_for_rounding():
    d = torch.zeros(512, 64)
    estimate = NoiseEstimate().update(noise_statistics(d, torch.ones_like(d)))
    lower, upper = calibrated_bounds(torch.tensor([[64]]), estimate, 0.01, "geometric")
    assert 1 - 1e-5 < lower.item() < 1 < upper.item() < 1 + 1e-5 and estimate.excess_kurtosis == 0


def test_state_survives_json():
    estimate = learned("laplace", lengths=(16, 256), rows=512)
    restored = NoiseEstimate.from_state(json.loads(json.dumps(estimate.state_dict())))
    assert torch.equal(restored.sums, estimate.sums) and restored.window == estimate.window


def test_lengths_count_the_scored_tokens_of_the_turn():
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0]])
    d = torch.zeros(2, 7)
    d[0, 4] = NAN
    assert level_lengths(d, mask, "turn").tolist() == [[2, 2, 0, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0, 0]]
    for level in ("sequence", "geometric"):
        assert level_lengths(d, mask, level).tolist() == [[4], [1]]


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match="no level 'token'. Expected one of sequence, geometric, turn"):
        calibrated_bounds(torch.tensor([[1]]), Known(), 0.01, "token")
    with pytest.raises(ValueError, match="`reject_rate` is 1.0"):
        calibrated_bounds(torch.tensor([[1]]), Known(), 1.0, "sequence")
    with pytest.raises(ValueError, match="`window` is 100.0"):
        NoiseEstimate(window=100.0)
