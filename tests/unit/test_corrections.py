# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_consistent.correction.presets import PRESETS
from trl_consistent.correction.rules import STATISTICS, Correction, Rejection, TrustRegion
from trl_consistent.correction.weights import correct, normalized, token_statistic, trust_region_mask
from trl_consistent.ratios import LEVELS, mismatch_log_ratio


NAN, INF = math.nan, math.inf
D = torch.tensor([[0.2, 0.0, -1.0, 0.2], [0.0, -0.2, 0.0, 0.0], [-3.0, 0.0, 1.2, 0.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
# exp: 1.221403 1 .367879 1.221403 | 1 .818731 | .049787 1 3.320117


def rows(tensor):
    return [pytest.approx(row, abs=1e-6) for row in tensor]


def trl_ratio(old, sampling, mask, mode, clip_min, clip_max):
    """What TRL 1.16 documents for its four modes, in its order of operations: mask by product, NaN to 0, sum, exp,
    clamp or zero."""
    d = torch.nan_to_num((old - sampling) * mask, nan=0.0)
    level, action = mode.split("_")
    ratio = torch.exp(d.sum(dim=-1, keepdim=True) if level == "sequence" else d)
    if action == "truncate":
        return torch.clamp(ratio, min=clip_min, max=clip_max)
    low, high = -INF if clip_min is None else clip_min, INF if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def test_tis_truncates_from_above_only():
    result = correct(D, MASK, PRESETS["tis"])
    expected = [[1.221403, 1, 0.367879, 1.221403], [1, 0.818731, 1, 1], [0.049787, 1, 2, 1]]
    assert result.weights.tolist() == rows(expected)
    assert torch.equal(result.keep_mask, MASK.bool())
    assert result.high.sum() == 1 and result.low.sum() == 0


def test_tis_two_sided_truncates_from_below_too():
    result = correct(D, MASK, PRESETS["tis_two_sided"])
    expected = [[1.221403, 1, 0.5, 1.221403], [1, 0.818731, 1, 1], [0.5, 1, 2, 1]]
    assert result.weights.tolist() == rows(expected)


def test_icepop_bounds_the_ratio_not_its_inverse():
    # 3.32 is inside .5 ... 5; .368 and .0498 are not. On 1/ratio it would be the other way round.
    result = correct(D, MASK, PRESETS["icepop"])
    expected = [[1.221403, 1, 0, 1.221403], [1, 0.818731, 1, 1], [0, 1, 3.320117, 1]]
    assert result.weights.tolist() == rows(expected)
    assert torch.equal(result.keep_mask, MASK.bool())  # masked tokens stay in the denominator


def test_sequence_levels_broadcast_one_weight_per_completion():
    # products: e^-.6 = .548812, e^-.2 = .818731, e^-1.8 = .165299
    result = correct(D, MASK, PRESETS["seq_tis"])
    expected = [[0.548812] * 4, [0.818731] * 2 + [1, 1], [0.165299] * 3 + [1]]
    assert result.weights.tolist() == rows(expected)
    masked = correct(-D, MASK, PRESETS["seq_mis"])  # e^.6 = 1.822, e^.2 = 1.221, e^1.8 = 6.05 > 3
    assert masked.weights.tolist() == rows([[1.822119] * 4, [1.221403] * 2 + [1, 1], [0, 0, 0, 1]])


def test_geometric_level_does_not_grow_with_length():
    d = torch.zeros(2, 4096)
    d[0, :16], d[1] = 0.005, 0.005
    mask = torch.zeros(2, 4096)
    mask[0, :16], mask[1] = 1, 1
    weights = correct(d, mask, PRESETS["geo_mis"]).weights
    assert weights[0, 0].item() == pytest.approx(math.exp(0.005)) and weights[1, 0].item() == pytest.approx(
        math.exp(0.005), abs=1e-5
    )
    # the product of 4096 such ratios is e^20.5: any sequence-level bound masks the long completion only
    assert correct(d, mask, PRESETS["seq_mis"]).weights[:, 0].tolist() == pytest.approx([math.exp(0.08), 0.0])


def test_geo_mis_uses_both_published_bounds():
    d = torch.tensor([[0.0098, 0.0098], [-0.0102, -0.0102], [0.0102, 0.0102]])  # e^x: 1.00985, .98985, 1.01025
    weights = correct(d, torch.ones(3, 2), PRESETS["geo_mis"]).weights[:, 0]
    assert weights.tolist() == pytest.approx([1.009848, 0, 0], abs=1e-6)


def test_tis_geo_rs_truncates_tokens_and_rejects_completions():
    d = torch.tensor([[0.6, -0.6], [0.01, 0.01], [-0.9, 0.895]])
    result = correct(d, torch.ones(3, 2), PRESETS["tis_geo_rs"])
    # geometric 1, 1.01005 (> 1.001), e^-.0025 = .9975; tokens 1.822 -> 1.5, .5488; .4066 -> .5, 2.447 -> 1.5
    assert result.keep_mask[:, 0].tolist() == [True, False, True]
    assert result.weights.tolist() == rows([[1.5, 0.548812], [1, 1], [0.5, 1.5]])
    assert result.rejected_high.tolist() == [[False] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max"),
    [
        *itertools.product(
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"), (0.5, None), (1.3, 3.0)
        ),
        ("token_mask", None, None),
        ("sequence_mask", 0.7, None),
    ],
)
def test_trl_modes_come_out_bit_for_bit(mode, clip_min, clip_max):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(64, 37, generator=generator) * 3
    sampling = old - 0.3 * torch.randn(64, 37, generator=generator)
    sampling[3, 5] = NAN
    mask = (torch.arange(37) < torch.randint(0, 38, (64, 1), generator=generator)).long()
    level, action = mode.split("_")
    ours = correct(
        mismatch_log_ratio(old, sampling, mask), mask, Correction(level, action, clip_min, clip_max)
    ).weights
    theirs = trl_ratio(old, sampling, mask, mode, clip_min, clip_max).expand_as(ours)
    inside = mask.bool()
    assert torch.equal(ours[inside], theirs[inside])
    assert (ours[~inside] == 1).all()


@pytest.mark.parametrize(
    ("bound", "kept"),
    [
        # squares .01 .04 .09 .16 .25 (one padded, one unscored); means of the smallest: .01 .025 .0467 .075 .11
        (0.04, [True, False, True, False, False]),
        (0.0467, [True, True, True, False, False]),
        (0.2, [True] * 5),
        (0.001, [False] * 5),
    ],
)
def test_m2_drops_the_largest_until_the_mean_is_within_the_bound(bound, kept):
    d = torch.tensor([[0.1, -0.3, NAN, 9.0], [0.2, 0.4, -0.5, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    result = correct(d, mask, Correction(rejections=(Rejection("batch", None, bound, "m2"),)))
    assert result.keep_mask.tolist() == [[*kept[:2], True, False], [*kept[2:], False]]
    assert torch.equal(result.rejected_high, mask.bool() & ~result.keep_mask) and not result.rejected_low.any()


def test_m2_drops_equals_together_and_never_trusts_an_infinite_token():
    # .1, then four equal squares of .09: two of them would fit below .07, all four do not
    d = torch.tensor([[0.1, 0.3, -0.3, 0.3, -0.3, math.inf]])
    rule = Rejection("batch", None, 0.07, "m2")
    result = correct(d, torch.ones(1, 6), Correction(rejections=(rule,)))
    assert result.keep_mask.tolist() == [[True, False, False, False, False, False]]
    loose = correct(d, torch.ones(1, 6), Correction(rejections=(Rejection("batch", None, 9.0, "m2"),)))
    assert loose.keep_mask.tolist() == [[True] * 5 + [False]]


def test_m2_looks_at_the_whole_batch_and_not_at_blocks_of_rows():
    rows_apart = torch.zeros(40, 4096)  # more tokens than are worked on at once
    rows_apart[0], rows_apart[39] = 1.0, 0.5
    result = correct(rows_apart, torch.ones_like(rows_apart), PRESETS["m2po"])
    # squares 1 and .25 of 1/40 each: .03125 <= .04
    assert result.keep_mask.all()
    rows_apart[39] = 0.9  # .045: the ones go, as the larger
    result = correct(rows_apart, torch.ones_like(rows_apart), PRESETS["m2po"])
    assert not result.keep_mask[0].any() and result.keep_mask[1:].all()


@pytest.mark.parametrize(("lower", "upper"), [(None, None), (0.1, None), (0.01, 0.04)])
def test_m2_takes_an_upper_bound_only(lower, upper):
    with pytest.raises(ValueError, match="m2/batch (takes an upper bound only|needs a lower or an upper)"):
        Rejection("batch", lower, upper, "m2")
    with pytest.raises(ValueError, match="level of m2 is 'token'. Expected one of batch"):
        Rejection("token", None, 1.0, "m2")


P, Q = 0.8, 0.5  # policy and engine probability of a token


@pytest.mark.parametrize(
    ("kind", "divergence"),
    # KL of (.5, .5) from (.8, .2): .5 log(.5/.8) + .5 log(.5/.2) = -.2350 + .4581
    [("tv", 0.3), ("kl", 0.2231)],
)
@pytest.mark.parametrize("up", [True, False])
def test_dppo_stops_what_moves_away_and_lets_pass_what_comes_back(kind, divergence, up):
    current, sampling = torch.tensor([[P, Q]]).log(), torch.tensor([[Q, Q]]).log()
    if not up:  # .2 against .5: the same divergence, downward
        current = torch.tensor([[1 - P, Q]]).log()
    tight, loose = TrustRegion(kind, divergence - 0.001), TrustRegion(kind, divergence + 0.001)
    mask, away = torch.ones(1, 2), torch.tensor([[1.0 if up else -1.0]])
    assert trust_region_mask(current, sampling, away, mask, tight).tolist() == [[False, True]]
    assert trust_region_mask(current, sampling, away, mask, loose).all()
    assert trust_region_mask(current, sampling, -away, mask, tight).all()
    assert trust_region_mask(current, sampling, 0 * away, mask, tight).all()


def test_opsm_stops_negative_completions_that_the_policy_left():
    # mean log mu - log pi: .6 over both rows; masked tokens do not count
    current = torch.tensor([[-2.0, -1.2, -50.0]] * 2)
    sampling = torch.tensor([[-1.0, -1.0, -1.0]] * 2)
    mask = torch.tensor([[1, 1, 0]] * 2)
    advantages = torch.tensor([[-0.1], [0.1]])
    assert trust_region_mask(current, sampling, advantages, mask, TrustRegion("opsm", 0.59)).tolist() == [
        [False],
        [True],
    ]
    assert trust_region_mask(current, sampling, advantages, mask, TrustRegion("opsm", 0.61)).all()
    # the other direction of the gap is no reason
    assert trust_region_mask(sampling, current, advantages, mask, TrustRegion("opsm", 0.1)).all()


@pytest.mark.parametrize("kind", ["tv", "kl", "opsm"])
def test_trust_regions_ignore_padding_and_unscored_tokens(kind):
    current = torch.tensor([[-0.1, -0.1, NAN, -0.1]])
    sampling = torch.tensor([[NAN, -math.inf, -9.0, -9.0]])
    mask = torch.tensor([[1, 1, 0, 0]])
    for sign in (1.0, -1.0):
        assert trust_region_mask(current, sampling, torch.tensor([[sign]]), mask, TrustRegion(kind, 0.01)).all()


def test_trust_regions_of_the_wrong_form_are_refused():
    with pytest.raises(ValueError, match="Trust region is 'l2'. Expected one of tv, kl, opsm"):
        TrustRegion("l2", 0.1)
    with pytest.raises(ValueError, match="Trust region tv: the upper bound is -0.1"):
        TrustRegion("tv", -0.1)


def test_bounds_are_inclusive():
    d = torch.log(torch.tensor([[0.5, 2.0, 4.0]]))
    ratio = torch.exp(d)[0].tolist()
    correction = Correction("token", "mask", ratio[0], ratio[2])
    result = correct(d, torch.ones(1, 3), correction)
    assert not result.low.any() and not result.high.any() and (result.weights > 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_reject_takes_out_what_mask_zeroes(level):
    bounds = (0.9, 1.15)
    masked = correct(D, MASK, Correction(level, "mask", *bounds))
    rejected = correct(D, MASK, Correction(level, "reject", *bounds))
    gone = MASK.bool() & ~rejected.keep_mask
    assert gone.any() and torch.equal(gone, MASK.bool() & (masked.weights == 0))
    assert torch.equal(rejected.weights[rejected.keep_mask], masked.weights[rejected.keep_mask])
    assert (rejected.weights[~rejected.keep_mask] == 1).all()


def test_mask_equals_truncate_inside_the_bounds():
    mild = D * 0.1
    truncated = correct(mild, MASK, Correction("token", "truncate", 0.5, 2.0)).weights
    assert torch.equal(truncated, correct(mild, MASK, Correction("token", "mask", 0.5, 2.0)).weights)


def test_none_is_weight_one():
    result = correct(D * 100, MASK, PRESETS["none"])
    assert (result.weights == 1).all() and torch.equal(result.keep_mask, MASK.bool())


@pytest.mark.parametrize("preset", PRESETS)
def test_unscored_token_has_weight_one_and_leaves_the_rest_alone(preset):
    d = torch.tensor([[0.001, NAN, -0.001]])
    with_nan = correct(d, torch.ones(1, 3), PRESETS[preset])
    without = correct(torch.tensor([[0.001, 0.0, -0.001]]), torch.ones(1, 3), PRESETS[preset])
    assert torch.equal(with_nan.weights, without.weights) and with_nan.keep_mask.all()
    if PRESETS[preset].level == "token":
        assert with_nan.weights[0, 1] == 1


@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "none"])
def test_an_infinite_log_ratio_is_never_trusted(preset, value):
    d = torch.tensor([[0.0, value, 0.0], [0.0, 0.0, 0.0]])
    result = correct(d, torch.ones(2, 3), PRESETS[preset])
    out = (result.weights == 0) | ~result.keep_mask
    assert out[0, 1] and not out[1].any()
    # at the prefix level, what came before the token was fine
    expected = {"token": [False, True, False], "prefix": [False, True, True]}.get(PRESETS[preset].level, [True] * 3)
    whole = any(rule.level != "batch" for rule in PRESETS[preset].rejections)
    assert out[0].tolist() == ([True] * 3 if whole else expected)


@pytest.mark.parametrize("action", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_both_infinities_in_one_completion_are_not_trusted(level, action):
    # inf - inf: the completion's log-ratio is NaN
    result = correct(torch.tensor([[INF, -INF, 0.0]]), torch.ones(1, 3), Correction(level, action, 0.5, 2.0))
    assert (result.weights == 0).all() if action != "reject" else not result.keep_mask.any()


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4, -1e4])
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_is_ignored_whatever_it_holds(preset, poison):
    poisoned = torch.where(MASK.bool(), D, poison)
    clean, dirty = correct(D, MASK, PRESETS[preset]), correct(poisoned, MASK, PRESETS[preset])
    for name in ("weights", "keep_mask", "low", "high", "rejected_low", "rejected_high"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name


def test_overflow_without_upper_bound_stays_finite():
    weights = correct(torch.tensor([[200.0, 0.0]]), torch.ones(1, 2), Correction("token", "truncate", 0.5)).weights
    assert torch.isfinite(weights * 1e6).all() and weights[0, 1] == 1


def test_empty_mask_gives_weight_one_everywhere():
    for correction in PRESETS.values():
        result = correct(D, torch.zeros_like(MASK), correction)
        assert (result.weights == 1).all() and not result.keep_mask.any()


def test_weights_carry_no_gradient():
    d = D.clone().requires_grad_()
    assert not correct(d, MASK, PRESETS["tis"]).weights.requires_grad


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.floats(-8, 8, width=32), min_size=12, max_size=12),
    mask=st.lists(st.booleans(), min_size=12, max_size=12),
    level=st.sampled_from(LEVELS),
    action=st.sampled_from(["truncate", "mask", "reject"]),
)
def test_weights_stay_within_the_bounds(data, mask, level, action):
    d, inside = torch.tensor(data).view(3, 4), torch.tensor(mask).view(3, 4)
    result = correct(d, inside, Correction(level, action, 0.25, 3.0))
    kept = result.weights[result.keep_mask]
    assert ((kept == 0) | ((kept >= 0.25) & (kept <= 3.0))).all()
    assert not (result.keep_mask & ~inside).any()
    assert (result.weights[~result.keep_mask] == 1).all()


def enumerated_policies():
    """Every completion of two tokens over V = 3, with its log-probs under an engine and a trainer."""
    generator = torch.Generator().manual_seed(3)
    log_mu = torch.randn(2, 3, generator=generator).log_softmax(-1)
    log_pi = (log_mu + 0.5 * torch.randn(2, 3, generator=generator)).log_softmax(-1)
    completions = torch.tensor(list(itertools.product(range(3), repeat=2)))
    positions = torch.arange(2).expand_as(completions)
    mu, pi = log_mu[positions, completions], log_pi[positions, completions]
    return completions, mu, pi, generator


def test_sequence_weight_is_unbiased_on_an_enumerable_policy():
    # E_mu[w f] = E_pi[f] for an arbitrary f of the completion
    _, mu, pi, generator = enumerated_policies()
    f = torch.randn(9, generator=generator)
    exact = (pi.sum(-1).exp() * f).sum()
    weights = correct(mismatch_log_ratio(pi, mu, torch.ones(9, 2)), torch.ones(9, 2), Correction("sequence", "mask"))
    estimate = (mu.sum(-1).exp() * weights.weights[:, 0] * f).sum()
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-6)
    naive = (mu.sum(-1).exp() * f).sum()
    assert abs(naive - exact) > 1e-2  # without the weight it is not


def test_prefix_weights_are_unbiased_for_what_each_token_earns():
    # E_mu[sum_t w_t f_t(prefix)] = E_pi[sum_t f_t(prefix)]
    completions, mu, pi, generator = enumerated_policies()
    first, second = torch.randn(3, generator=generator), torch.randn(9, generator=generator)
    f = torch.stack([first[completions[:, 0]], second], dim=1)
    exact = (pi.sum(-1).exp()[:, None] * f).sum()
    d, mask = mismatch_log_ratio(pi, mu, torch.ones(9, 2)), torch.ones(9, 2)
    for level, unbiased in (("prefix", True), ("token", False)):
        weights = correct(d, mask, Correction(level, "mask")).weights
        estimate = (mu.sum(-1).exp()[:, None] * weights * f).sum()
        assert (abs(estimate - exact) < 1e-6) == unbiased, level


def test_normalized_weights_leave_the_rest_alone():
    weights, keep = torch.tensor([[2.0, 1.0, 1.0]]), torch.tensor([[True, True, False]])
    assert normalized(weights, keep, torch.tensor(1.5)).tolist() == [[pytest.approx(4 / 3), pytest.approx(2 / 3), 1.0]]
    assert normalized(weights, keep, torch.tensor(0.0)).tolist() == weights.tolist()
    with pytest.raises(ValueError, match="normalize is 'batch'. Expected one of none, token, sequence"):
        Correction(normalize="batch")


# --- rejections: every statistic, at every level, with asymmetric bounds ---------------------------------------------

OLD2 = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.3, -1.2, 0.0, 0.0], [-4.0, -0.2, -0.7, 0.0]])
SAMPLING2 = torch.tensor([[-1.2, -0.5, -1.0, -0.3], [-0.3, -1.0, 0.0, 0.0], [-1.0, -0.2, -1.9, 0.0]])
# Their log-ratios are D. Token values, by hand:
# k1       -.2 0 1 -.2 | 0 .2 | 3 0 -1.2
# k2       .02 0 .5 .02 | 0 .02 | 4.5 0 .72
# k3       .0214 0 .3679 .0214 | 0 .0187 | 2.0498 0 1.1201
# tv       .0667 0 .2325 .1640 | 0 .0667 | .3496 0 .3470
# exp_abs  1.2214 1 2.7183 1.2214 | 1 1.2214 | 20.0855 1 3.3201


def kept(rule, d=D, mask=MASK):
    return correct(d, mask, Correction(rejections=(rule,)), sampling=SAMPLING2).keep_mask.int().tolist()


ALL = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rejection("token", 0.4, 3.0), [[1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 0]]),
        (Rejection("sequence_min", 0.1), [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]),
        (Rejection("sequence_max", None, 1.1), [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        # running products: e^.2 e^.2 e^-.8 e^-.6 | 1 e^-.2 | e^-3 e^-3 e^-1.8
        (Rejection("prefix", 0.5, 1.1), [[0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]),
        (Rejection("token", -0.9, 0.5, "k1"), [[1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 0]]),
        # sums .6 .2 1.8, means .15 .1 .6
        (Rejection("sequence_sum", 0.3, 1.0, "k1"), [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]),
        (Rejection("sequence_mean", 0.05, 0.12, "k1"), [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        (Rejection("token", None, 0.6, "k2"), [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]]),
        (Rejection("sequence_max", None, 0.4, "k2"), [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        (Rejection("token", None, 0.5, "k3"), [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]]),
        # means .1027 .0094 1.0566
        (Rejection("sequence_mean", 0.01, 0.5, "k3"), [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]),
        (Rejection("token", None, 0.2, "tv"), [[1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 0]]),
        # means .1158 .0333 .2322
        (Rejection("sequence_mean", None, 0.2, "tv"), [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]),
        # means 1.5403 1.1107 8.1352
        (Rejection("sequence_mean", None, 1.5, "exp_abs"), [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
    ],
    ids=lambda value: value.name if isinstance(value, Rejection) else "",
)
def test_rejections_by_hand(rule, expected):
    assert kept(rule) == expected


def test_binary_kl_is_the_larger_of_both_directions():
    # p = .9, q = .5: KL(p||q) = .9 ln 1.8 + .1 ln .2 = .368064; KL(q||p) = .5 ln(.5/.9) + .5 ln(.5/.1) = .510826
    sampling = torch.tensor([[0.5, 0.9]]).log()
    d = torch.tensor([[0.9, 0.5]]).log() - sampling
    for bound, survives in ((0.5107, 0), (0.5109, 1)):
        correction = Correction(rejections=(Rejection("token", None, bound, "binary_kl"),))
        keep = correct(d, torch.ones(1, 2), correction, sampling=sampling).keep_mask
        assert keep.int().tolist() == [[survives, survives]]


def test_binary_kl_of_sure_tokens_is_finite():
    # both sides round to probability 1
    d, sampling = torch.tensor([[0.0, -1e-7]]), torch.tensor([[0.0, 0.0]])
    values = token_statistic(d, "binary_kl", sampling)
    assert torch.isfinite(values).all() and (values.abs() < 1e-5).all()


def test_bounds_of_a_statistic_are_inclusive():
    d = torch.tensor([[-0.5, 0.25, 0.0]])  # k1 .5 -.25 0
    assert correct(d, torch.ones(1, 3), Correction(rejections=(Rejection("token", -0.25, 0.5, "k1"),))).keep_mask.all()


def test_turns_are_rejected_alone():
    d = torch.tensor([[0.1, 0.1, 9.0, 0.4, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    assert kept_turns(d, mask, Rejection("turn", 0.9, 1.15)) == [[1, 1, 0, 0, 0]]  # e^.1 and e^.2
    assert kept_turns(d, mask, Rejection("turn_mean", None, 0.01, "k2")) == [[1, 1, 0, 0, 0]]  # .005 and .04
    assert kept_turns(d, mask, Rejection("turn_max", None, 0.05, "k2")) == [[1, 1, 0, 0, 0]]  # .005 and .08
    assert kept_turns(d, mask, Rejection("turn_max", None, 0.09, "k2")) == [[1, 1, 0, 1, 1]]


def kept_turns(d, mask, rule):
    return correct(d, mask, Correction(rejections=(rule,))).keep_mask.int().tolist()


def test_rules_are_joined_by_and():
    both = (Rejection("sequence_min", 0.1), Rejection("sequence_max", None, 0.4, "k2"))
    result = correct(D, MASK, Correction(rejections=both))
    assert result.keep_mask.int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert result.rejected_low.int().tolist() == [[0] * 4, [0] * 4, [1, 1, 1, 0]]


RULES = [
    Rejection(level, None, 1e6, statistic)
    for statistic, levels in STATISTICS.items()
    for level in levels
    if level != "batch"
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rejections_meet_hostile_input(rule):
    assert kept(rule) == ALL
    # poisoned padding and unscored tokens change nothing, an infinite token rejects its scope and no other completion
    poisoned = torch.where(MASK.bool(), D, NAN)
    poisoned[0, 1] = NAN
    assert kept(rule, poisoned) == ALL
    for value in (INF, -INF):
        bad = D.clone()
        bad[0, 2] = value
        rows = kept(rule, bad)
        assert rows[0][2] == 0 and rows[1:] == ALL[1:]
        assert rows[0][:2] == ([1, 1] if rule.level in ("token", "prefix") else [0, 0])
    assert not correct(D, MASK * 0, Correction(rejections=(rule,)), sampling=SAMPLING2).keep_mask.any()


def test_a_completion_without_a_scored_token_is_not_judged():
    d = torch.full((1, 3), NAN)
    for rule in (
        Rejection("turn_mean", 0.5, None, "k3"),
        Rejection("sequence_mean", 0.5, None, "k3"),
        Rejection("sequence_min", 5.0),
        Rejection("token", 0.5, 1.0, "k2"),
    ):
        assert correct(d, torch.ones(1, 3), Correction(rejections=(rule,))).keep_mask.all(), rule.name


def test_rules_that_need_the_engine_s_log_probs_say_so():
    with pytest.raises(ValueError, match="rejection by tv needs .*pass `sampling`"):
        correct(D, MASK, Correction(rejections=(Rejection("token", None, 0.5, "tv"),)))


def test_rules_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="statistic is 'k4'. Expected one of ratio, k1"):
        Rejection("token", None, 1.0, "k4")
    with pytest.raises(ValueError, match="level of k3 is 'geometric'. Expected one of token, turn_mean"):
        Rejection("geometric", None, 1.0, "k3")
    with pytest.raises(ValueError, match="k3/token needs a lower or an upper bound"):
        Rejection("token", statistic="k3")
    with pytest.raises(ValueError, match="k2/token: the lower bound is -1"):
        Rejection("token", -1.0, 1.0, "k2")
    assert Rejection("token", -1.0, 1.0, "k1").lower == -1.0  # k1 is signed


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        (2.0, 1.0, r"lower bound \(2.0\) must be less than the upper bound \(1.0\)"),
        (1.0, 1.0, "must be less"),
        (-0.1, 1.0, "lower bound is -0.1"),
        (None, NAN, "upper bound is nan"),
        (NAN, None, "lower bound is nan"),
    ],
)
def test_impossible_bounds_are_refused(lower, upper, message):
    with pytest.raises(ValueError, match=message):
        Correction("token", "mask", lower, upper)
    with pytest.raises(ValueError, match=message):
        Rejection("geometric", lower, upper)


def test_unknown_names_and_missing_bounds_are_refused():
    with pytest.raises(ValueError, match="Expected one of none, truncate, mask, reject"):
        Correction("token", "clip", None, 2.0)
    with pytest.raises(ValueError, match="Expected one of token, sequence, geometric, prefix, turn"):
        Correction("batch", "mask", None, 2.0)
    with pytest.raises(ValueError, match="token_truncate needs a lower or an upper bound"):
        Correction("token", "truncate")


def test_presets_hold_the_published_numbers():
    published = {
        "none": ("token", "none", None, None),
        "tis": ("token", "truncate", None, 2.0),
        "tis_two_sided": ("token", "truncate", 0.5, 2.0),
        "icepop": ("token", "mask", 0.5, 5.0),
        "seq_tis": ("sequence", "truncate", None, 2.0),
        "seq_mis": ("sequence", "mask", None, 3.0),
        "geo_mis": ("geometric", "mask", 0.99, 1.01),
        "tis_geo_rs": ("token", "truncate", 0.5, 1.5),
        "prefix_tis": ("prefix", "truncate", None, 2.0),
        "dppo_tv": ("token", "truncate", None, 20.0),
        "dppo_kl": ("token", "truncate", None, 20.0),
        "opsm": ("token", "none", None, None),
        "m2po": ("token", "none", None, None),
        "dense": ("token", "truncate", None, 2.0),
        "moe": ("token", "mask", 0.5, 5.0),
        "fp8": ("token", "truncate", None, 2.0),
        "long_cot": ("token", "truncate", 0.5, 1.5),
        "async": ("token", "truncate", None, 5.0),
    }
    assert {name: (c.level, c.action, c.lower, c.upper) for name, c in PRESETS.items()} == published
    veto, m2 = Rejection("sequence_min", 1e-4), Rejection("batch", None, 0.04, "m2")
    assert {name: c.rejections for name, c in PRESETS.items() if c.rejections} == {
        "tis_geo_rs": (Rejection("geometric", 0.99, 1.001),),
        "m2po": (m2,),
        "dense": (veto,),
        "moe": (veto,),
        "fp8": (Rejection("sequence_mean", None, 0.01, "k3"),),
        "long_cot": (Rejection("geometric", 0.99, 1.001), veto),
        "async": (m2,),
    }
    regions = {"dppo_tv": ("tv", 0.15), "dppo_kl": ("kl", 0.05), "opsm": ("opsm", 0.5)}
    for name, c in PRESETS.items():
        assert [(r.kind, r.bound) for r in c.trust_regions] == [regions[name] for _ in range(name in regions)]
    assert [name for name, c in PRESETS.items() if not c.acts] == ["none"]
    assert all(correction.source for correction in PRESETS.values())


def test_bounds_that_come_with_a_batch_replace_fixed_ones_where_they_are_known():
    # four completions of two tokens, ratios e^.2, e^.2, e^-.6 and e^-1
    d = torch.tensor([[0.1, 0.1], [0.3, -0.1], [-0.3, -0.3], [-0.5, -0.5]])
    correction = Correction("sequence", "mask", 0.5, 1.1, reject_rate=0.01)
    known = (torch.tensor([[0.9], [NAN], [0.6], [NAN]]), torch.tensor([[1.3], [NAN], [2.0], [NAN]]))
    result = correct(d, torch.ones(4, 2), correction, bounds={"sequence": known})
    # inside .9 ... 1.3; above the fixed 1.1; .549 is below .6; .368 is below the fixed .5
    assert result.weights.tolist() == rows([[1.221403] * 2, [0, 0], [0, 0], [0, 0]])
    assert result.high[:, 0].tolist() == [False, True, False, False]
    assert result.low[:, 0].tolist() == [False, False, True, True]
    fixed = correct(d, torch.ones(4, 2), Correction("sequence", "mask", 0.5, 1.1))
    assert torch.equal(correct(d, torch.ones(4, 2), correction).weights, fixed.weights)


def test_bounds_that_come_with_a_batch_reach_rejections_and_truncation():
    d = torch.tensor([[0.1, 0.1], [0.4, 0.4]])
    rule = Correction("token", "truncate", None, 2.0, (Rejection("geometric", 0.5, 2.0),), reject_rate=0.05)
    assert rule.calibrated_levels == {"geometric"}
    tight = {"geometric": (torch.tensor([[0.9], [0.9]]), torch.tensor([[1.2], [1.2]]))}
    assert correct(d, torch.ones(2, 2), rule, bounds=tight).keep_mask[:, 0].tolist() == [True, False]
    assert correct(d, torch.ones(2, 2), rule).keep_mask.all()
    truncated = Correction("turn", "truncate", reject_rate=0.05)
    bounds = {"turn": (torch.full((2, 2), 0.5), torch.full((2, 2), 1.2))}
    # e^.1 = 1.105171, e^.4 = 1.49 -> 1.2
    assert correct(d, torch.ones(2, 2), truncated, bounds=bounds).weights.tolist() == rows([[1.105171] * 2, [1.2] * 2])


def test_bounds_that_come_with_a_batch_are_cut_into_the_same_blocks():
    d = torch.zeros(80, 4096)  # more tokens than are worked on at once
    d[70] = 0.001
    lower, upper = torch.full((80, 1), 0.5), torch.full((80, 1), math.inf)
    upper[70] = 2.0  # e^4.096 = 60
    correction = Correction("sequence", "reject", reject_rate=0.01)
    keep = correct(d, torch.ones_like(d), correction, bounds={"sequence": (lower, upper)}).keep_mask[:, 0]
    assert keep.tolist() == [row != 70 for row in range(80)]
