# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from trl_consistent.ratios import check_shapes, level_log_ratio, mismatch_log_ratio, scored_tokens, turn_index


NAN, INF = math.nan, math.inf
OLD = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.3, -1.2, 7.0, 7.0]])
SAMPLING = torch.tensor([[-1.2, -0.5, -1.0, -0.3], [-0.3, -1.0, -7.0, 7.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_log_ratio_is_trainer_minus_engine():
    # -1 - -1.2 = .2, 0, -2 - -1 = -1, -.1 - -.3 = .2; second row 0, -1.2 - -1 = -.2, padding 0
    expected = torch.tensor([[0.2, 0.0, -1.0, 0.2], [0.0, -0.2, 0.0, 0.0]])
    torch.testing.assert_close(mismatch_log_ratio(OLD, SAMPLING, MASK), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4, -1e4])
def test_padding_is_ignored_whatever_it_holds(poison):
    sampling = torch.where(MASK.bool(), SAMPLING, poison)
    old = torch.where(MASK.bool(), OLD, -poison)
    clean = mismatch_log_ratio(OLD, SAMPLING, MASK)
    assert torch.equal(mismatch_log_ratio(old, sampling, MASK), clean)


def test_unscored_and_impossible_tokens_are_told_apart():
    old = torch.tensor([[-1.0, -1.0, -INF, NAN, -INF, NAN]])
    sampling = torch.tensor([[NAN, -INF, -1.0, -1.0, -INF, NAN]])
    d = mismatch_log_ratio(old, sampling, torch.ones(1, 6))
    # NaN only where the engine has no log-prob; the engine's -inf is +inf; the trainer's -inf or NaN is -inf
    assert torch.isnan(d).tolist() == [[True, False, False, False, False, True]]
    assert d[0, 1:5].tolist() == [INF, -INF, -INF, INF]
    assert scored_tokens(d, torch.ones(1, 6)).tolist() == [[False, True, True, True, True, False]]


def test_levels():
    d = torch.tensor([[0.2, NAN, -1.0, 0.2], [0.1, -0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert level_log_ratio(d, mask, "token")[0].tolist() == pytest.approx([0.2, 0.0, -1.0, 0.2])
    # sums .2 - 1 + .2 = -.6 and .1 - .2 = -.1; an empty row has ratio 1
    assert level_log_ratio(d, mask, "sequence")[:, 0].tolist() == pytest.approx([-0.6, -0.1, 0.0], abs=1e-6)
    # divided by 3 scored tokens (of 4) and by 2
    assert level_log_ratio(d, mask, "geometric")[:, 0].tolist() == pytest.approx([-0.2, -0.05, 0.0], abs=1e-6)


def test_prefix_is_the_running_product():
    d = torch.tensor([[0.2, NAN, -1.0, 0.2, 5.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    expected = [0.2, 0.2, -0.8, -0.6, 0.0]  # the unscored token adds nothing, padding is 0
    assert level_log_ratio(d, mask, "prefix")[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_tool_tokens_separate_turns():
    #                      turn 1   tool     turn 2  tool  turn 3  padding
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0], [0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]])
    assert turn_index(mask).tolist() == [[1, 1, 0, 0, 2, 2, 2, 0, 3, 0, 0], [0, 1, 0, 2, 2, 0, 0, 0, 0, 0, 0]]
    d = torch.tensor([[0.1, 0.3, 9.0, 9.0, 0.6, NAN, 0.2, 9.0, -1.0, 9.0, 9.0], [9.0, 0.5] + [0.0] * 9])
    # means .2, (.6 + .2) / 2 scored, -1; second row .5 and 0
    expected = [[0.2, 0.2, 0, 0, 0.4, 0.4, 0.4, 0, -1, 0, 0], [0, 0.5] + [0] * 9]
    got = level_log_ratio(d, mask, "turn")
    assert got.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_one_turn_is_the_whole_completion():
    generator = torch.Generator().manual_seed(1)
    d = torch.randn(3, 5, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    turn = level_log_ratio(d, mask, "turn")
    torch.testing.assert_close(turn, level_log_ratio(d, mask, "geometric").expand_as(d) * mask)


def test_low_precision_is_upcast_before_subtracting():
    old, sampling = torch.tensor([[-8.0]], dtype=torch.bfloat16), torch.tensor([[-8.0625]], dtype=torch.bfloat16)
    d = mismatch_log_ratio(old, sampling, torch.ones(1, 1))
    assert d.dtype == torch.float32 and d.item() == 0.0625


def test_result_is_detached():
    old = OLD.clone().requires_grad_()
    assert not mismatch_log_ratio(old, SAMPLING, MASK).requires_grad


def test_one_dimensional_and_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match=r"old \(2, 4\), sampling \(2,\)"):
        check_shapes(old=OLD, sampling=SAMPLING[:, 0])
    with pytest.raises(ValueError, match=r"mask \(2, 3\)"):
        check_shapes(old=OLD, mask=MASK[:, :3])


def test_unknown_level_lists_the_valid_ones():
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        level_log_ratio(OLD, MASK, "batch")
