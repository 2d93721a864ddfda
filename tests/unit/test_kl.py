# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from trl_consistent.correction.kl import REFERENCE_ESTIMATORS, kl_k1, kl_k2, kl_k3, reference_kl


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


# --- the reference KL of the loss, by enumeration over one token ------------------------------------------------------

LOGITS = torch.tensor([0.4, -0.3, 1.1, -1.2, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.5, 0.2, -0.4, -0.9], dtype=torch.float64).log_softmax(0)
BEHAVIOR = torch.tensor([0.9, -0.6, 0.3, 0.2, -0.5], dtype=torch.float64).log_softmax(0)


def exact(direction="reverse"):
    """KL(pi || ref) (or its reverse) and its gradient with respect to the logits, from the definition."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    p, q = (logp, REFERENCE) if direction == "reverse" else (REFERENCE, logp)
    kl = (p.exp() * (p - q)).sum()
    kl.backward()
    return kl.item(), logits.grad


def expected(estimator, sampler=None, live=False):
    """Expectation of an estimator and of its gradient over tokens from `sampler` (pi, if none), weighted or not."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(0)
    probs = (logp.detach() if sampler is None else sampler).exp()
    weights = None
    if live:
        weights = (logp - (logp.detach() if sampler is None else sampler)).exp()[None]
    value = reference_kl((logp - REFERENCE)[None], estimator, weights)[0]
    (probs * value).sum().backward()
    return (probs * value).sum().item(), logits.grad


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-12)


def test_reference_kl_values():
    kl, _ = exact()
    for estimator in ("k1", "k3", "k1+", "k3+"):
        assert expected(estimator)[0] == pytest.approx(kl, abs=1e-12)
        assert expected(estimator, BEHAVIOR, live=True)[0] == pytest.approx(kl, abs=1e-12)
        assert expected(estimator, BEHAVIOR)[0] != pytest.approx(kl, rel=0.05)
    second_order = (LOGITS.log_softmax(0).exp() * (LOGITS.log_softmax(0) - REFERENCE) ** 2).sum() / 2
    assert expected("k2")[0] == pytest.approx(second_order.item(), abs=1e-12)


def test_reference_kl_gradients_on_policy():
    _, reverse = exact()
    _, forward = exact("forward")
    assert not close(reverse, forward)
    for estimator in ("k2", "k1+", "k3+"):
        assert close(expected(estimator)[1], reverse), estimator
    assert close(expected("k1")[1], torch.zeros(5, dtype=torch.float64))
    assert close(expected("k3")[1], forward)  # TRL's


@pytest.mark.parametrize("sampler", [None, BEHAVIOR], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("estimator", REFERENCE_ESTIMATORS)
def test_weighted_reference_kl_gradients_are_exact_from_any_policy(estimator, sampler):
    _, reverse = exact()
    assert close(expected(estimator, sampler, live=True)[1], reverse)


@pytest.mark.parametrize("estimator", REFERENCE_ESTIMATORS)
def test_without_weights_the_gradient_is_off_when_another_policy_sampled(estimator):
    _, reverse = exact()
    assert not torch.allclose(expected(estimator, BEHAVIOR)[1], reverse, rtol=0, atol=1e-2)


def test_reference_kl_hand_numbers():
    d = torch.tensor([[0.5, -1.0]])
    assert reference_kl(d, "k1").tolist() == [[0.5, -1.0]]
    assert reference_kl(d, "k2").tolist() == [[0.125, 0.5]]
    # e^-.5 + .5 - 1 = .106531, e - 1 - 1 = .718282
    assert reference_kl(d, "k3")[0].tolist() == pytest.approx([0.106531, 0.718282], abs=1e-6)
    assert torch.equal(reference_kl(d, "k3+"), reference_kl(d, "k3"))
    assert torch.equal(reference_kl(d, "k1+"), reference_kl(d, "k1"))
    doubled = reference_kl(d, "k3", torch.full((1, 1), 2.0))
    assert doubled[0].tolist() == pytest.approx([0.213061, 1.436564], abs=1e-6)
    with pytest.raises(ValueError, match="Unknown estimator 'k4'. Expected one of k1, k2, k3, k1"):
        reference_kl(d, "k4")
