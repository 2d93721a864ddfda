# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from trl_consistent.kl import kl_k1, kl_k2, kl_k3


MASK = torch.tensor([[1, 1, 1, 0]])


def test_hand_numbers():
    d = torch.tensor([[0.5, -1.0, 0.0, 9.0]])
    assert kl_k1(d, MASK).tolist() == [[-0.5, 1.0, 0.0, 0.0]]
    assert kl_k2(d, MASK).tolist() == [[0.125, 0.5, 0.0, 0.0]]
    # e^.5 - 1.5 = .148721, e^-1 - 1 + 1 = .367879
    assert kl_k3(d, MASK)[0].tolist() == pytest.approx([0.148721, 0.367879, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("estimator", [kl_k1, kl_k3])
def test_expectation_is_the_exact_kl_from_engine_to_trainer(estimator):
    engine = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.2, 0.3, 0.1], dtype=torch.float64)
    d = (trainer.log() - engine.log())[None].float()
    exact = (engine * (engine / trainer).log()).sum()  # KL(engine || trainer), not the reverse
    expectation = (engine * estimator(d, torch.ones(1, 4))[0]).sum()
    assert expectation.item() == pytest.approx(exact.item(), abs=1e-7)


def test_k2_is_biased_to_third_order_only():
    engine = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for noise, bound in ((0.1, 1e-3), (0.01, 1e-6)):
        trainer = (engine.log() + noise * torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)).softmax(0)
        exact = (engine * (engine / trainer).log()).sum()
        d = (trainer.log() - engine.log())[None].float()
        assert abs((engine * kl_k2(d, torch.ones(1, 3))[0]).sum() - exact) < bound


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([[1e-3]])
    assert kl_k3(d, torch.ones(1, 1)).item() == pytest.approx(5.0016671e-07, rel=1e-3)


def test_k1_and_k3_agree_on_a_large_gap_the_engine_is_sure_of():
    # k3 = e^-59 - 1 + 59
    d = torch.tensor([[-59.0]])
    assert kl_k3(d, torch.ones(1, 1)).item() == pytest.approx(58.0) and kl_k1(d, torch.ones(1, 1)).item() == 59.0
    assert math.isfinite(kl_k3(-3 * d, torch.ones(1, 1)).item())


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_shapes_must_agree(estimator):
    with pytest.raises(ValueError, match=r"mismatch_log_ratio \(3, 3\), mask \(1, 3\)"):
        estimator.__wrapped__(torch.zeros(3, 3), torch.ones(1, 3))


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_unscored_and_padding_are_zero(estimator):
    d = torch.tensor([[math.nan, 0.3, math.nan, math.inf]])
    values = estimator(d, torch.tensor([[1, 1, 0, 0]]))
    assert values[0, [0, 2, 3]].tolist() == [0, 0, 0] and values[0, 1] != 0
