# SPDX-License-Identifier: Apache-2.0
"""What happens to a micro-batch between TRL's forward and its loss, and to a rollout batch after it, without a trainer."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from trl_consistent.correction.rules import Correction, Rejection, TrustRegion
from trl_consistent.training.after_rollout import AfterRollout
from trl_consistent.training.batch import Groups, LossShape
from trl_consistent.training.in_loss import InLoss, StepSoFar, needs_us
from trl_consistent.training.meter import Meter
from trl_consistent.training.moment import Moment
from trl_consistent.training.noise import NoiseTracker
from trl_consistent.training.plan import Plan
from trl_consistent.training.reference import ReferenceTerm


ONE_PROCESS = SimpleNamespace(num_processes=1, is_main_process=True, gather=lambda x: x)
TIS = Correction("token", "truncate", None, 2.0)
REUSE = {"replaces_ratio": True, "old_logprobs": "reuse", "needs_engine": True}


def meter_of(plan):
    return Meter(plan, NoiseTracker(plan.correction, False, tells=True), None, ONE_PROCESS)


def micro_batch(**more):
    """Two completions of three tokens; the last one of the second is padding that holds poison."""
    return {
        "prompt_ids": torch.zeros(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1),
        "completion_ids": torch.zeros(2, 3, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        # d = old - sampling: ln 4, 0, -ln 2; 0, ln 3
        "sampling_per_token_logps": torch.tensor(
            [[-2 - math.log(4), -2, -2 + math.log(2)], [-2, -2 - math.log(3), math.nan]]
        ),
        "advantages": torch.tensor([1.0, -1.0]),
        "num_items_in_batch": torch.tensor(5.0),
        **more,
    }


LOGPS = torch.full((2, 3), -2.0, requires_grad=True)


def forwarded(plan, moment, inputs, so_far=None):
    in_loss = InLoss(plan, meter_of(plan), moment, so_far or StepSoFar(), inputs)
    in_loss.forwarded(LOGPS, None, None)
    return in_loss


def test_nothing_happens_without_log_probs_to_compare_and_without_a_reference():
    assert not needs_us(Plan(), {"completion_mask": None})
    assert not needs_us(Plan(TIS), {"sampling_per_token_logps": None, "old_per_token_logps": None}), "done before"
    assert needs_us(Plan(TIS), {"sampling_per_token_logps": None})
    regions = Correction(trust_regions=(TrustRegion("tv", 0.1),))
    assert needs_us(Plan(regions), {"sampling_per_token_logps": None, "old_per_token_logps": None})
    assert needs_us(Plan(), {"ref_per_token_logps": None})


def test_weights_are_truncated_ratios_and_the_inputs_are_left_alone():
    inputs = micro_batch()
    before = dict(inputs)
    batch = forwarded(Plan(TIS, **REUSE), Moment(), inputs).batch
    expected = torch.tensor([[2.0, 1.0, 0.5], [1.0, 2.0, 1.0]])  # min(4, 2), 1, 1/2; 1, min(3, 2), padding
    torch.testing.assert_close(batch["importance_sampling_ratio"], expected)
    assert inputs.keys() == before.keys() and all(inputs[key] is before[key] for key in before)


def test_without_vllm_weights_multiply_advantages():
    batch = forwarded(Plan(TIS, takes_ratio=False, **REUSE), Moment(), micro_batch()).batch
    expected = torch.tensor([[2.0, 1.0, 0.5], [-1.0, -2.0, -1.0]])
    torch.testing.assert_close(batch["advantages"], expected)
    assert "importance_sampling_ratio" not in batch


def test_bypass_keeps_only_the_zeros_of_weights_and_the_engine_is_the_old_policy():
    icepop = Correction("token", "mask", 0.6, 3.5)  # 4 and 1/2 are outside
    plan = Plan(icepop, replaces_ratio=True, old_logprobs="rollout", needs_engine=True)
    batch = forwarded(plan, Moment(), micro_batch()).batch
    torch.testing.assert_close(batch["importance_sampling_ratio"], torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))
    sampling = micro_batch()["sampling_per_token_logps"]
    assert torch.equal(batch["old_per_token_logps"][0], sampling[0])
    assert batch["old_per_token_logps"][1, 2] == -2, "an unscored token takes the trainer's log-prob"


def test_trust_regions_act_on_advantages_as_they_are_and_multiply_weights():
    # tv of token 1: e^-2 - e^-2/4 = .10; of token 3: e^-2 - 2 e^-2 = -.135, with A > 0 on its way back
    plan = Plan(Correction("token", "truncate", None, 2.0, trust_regions=(TrustRegion("tv", 0.08),)), **REUSE)
    batch = forwarded(plan, Moment(), micro_batch()).batch
    torch.testing.assert_close(batch["importance_sampling_ratio"], torch.tensor([[0.0, 1.0, 0.5], [1.0, 2.0, 1.0]]))


@pytest.mark.parametrize(
    ("loss_type", "items", "scale"),
    [("dapo", 2.0, None), ("grpo", 2.0, 2.0)],  # tokens that are kept; of two completions, one is
)
def test_a_rejected_completion_leaves_the_mask_and_the_denominator(loss_type, items, scale):
    rule = Rejection("sequence_max", upper=3.5)  # the first completion has a ratio of 4
    plan = Plan(Correction(rejections=(rule,)), loss=LossShape(loss_type=loss_type), **REUSE)
    in_loss = forwarded(plan, Moment(), micro_batch())
    assert in_loss.batch["completion_mask"].tolist() == [[0, 0, 0], [1, 1, 0]]
    assert in_loss.batch["num_items_in_batch"] == items
    assert in_loss.end(torch.tensor(3.0), 0.0, 0.0) == (3.0 if scale is None else scale * 3.0)
    mask = in_loss.attention_mask(torch.ones(2, 4), 3)
    assert torch.equal(mask, torch.ones(2, 4)), "a later forward is not this micro-batch's"


def test_the_model_attends_to_what_the_loss_does_not_see():
    inputs = micro_batch(tool_mask=torch.tensor([[1, 0, 1], [1, 1, 1]]))
    in_loss = InLoss(Plan(TIS, **REUSE), meter_of(Plan(TIS)), Moment(), StepSoFar(), inputs)
    assert in_loss.batch["completion_mask"].tolist() == [[1, 0, 1], [1, 1, 0]] and "tool_mask" not in in_loss.batch
    trl_s = torch.cat([torch.ones(2, 1), in_loss.batch["completion_mask"]], dim=1)
    assert in_loss.attention_mask(trl_s, 3).tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_a_late_scale_makes_up_for_micro_batches_that_were_reported_unscaled():
    rule = Rejection("sequence_max", upper=3.5)
    plan = Plan(
        Correction(rejections=(rule,)), scales_late=True, loss=LossShape("dapo", steps_per_generation=2), **REUSE
    )
    weight, so_far = torch.nn.Parameter(torch.zeros(1)), StepSoFar()
    weight.grad = torch.tensor([6.0])
    inputs = micro_batch(num_items_in_batch=torch.tensor(10.0))
    forwarded(plan, Moment(ends_rollout_batch=False, ends_step=False), inputs, so_far)
    assert so_far.after_backward(torch.tensor(1.0), [weight]) == 1.0 and weight.grad == 6.0
    forwarded(plan, Moment(), inputs, so_far)
    # 4 of 10 tokens are kept: everything grows by 10 / 4, the reported 3 by it and the reported 1 by what it lacked
    assert so_far.after_backward(torch.tensor(3.0), [weight]) == 2.5 * 3.0 + 1.5 * 1.0
    assert weight.grad == 15.0 and so_far.scale is None


def test_our_kl_term_is_added_with_beta():
    reference = torch.full((2, 3), -2.5)  # k1 is .5 for each of the five tokens
    plan = Plan(reference=ReferenceTerm("k1"), loss=LossShape("dapo"))
    inputs = micro_batch(ref_per_token_logps=reference, old_per_token_logps=LOGPS.detach())
    in_loss = forwarded(plan, Moment(), inputs)
    assert in_loss.end(torch.tensor(1.0), 0.2, 0.0).item() == pytest.approx(1.0 + 0.2 * 0.5)


def test_an_evaluation_is_logged_apart_from_the_training():
    plan = Plan(TIS, **REUSE)
    meter, so_far = meter_of(plan), StepSoFar()
    InLoss(plan, meter, Moment(ends_step=False), so_far, micro_batch()).forwarded(LOGPS - 1, None, None)
    InLoss(plan, meter, Moment(training=False), so_far, micro_batch()).forwarded(LOGPS, None, None)
    assert meter.close("train")[0] == {} and "kept" in so_far.take(), "the step goes on after the evaluation"
    values, _ = meter.close("eval")
    assert values["mismatch/ratio/max"] == pytest.approx(4.0) and meter.close("eval")[0] == {}


def after_rollout(plan, **more):
    given = {"old_per_token_logps": LOGPS.detach(), "importance_sampling_ratio": torch.ones(2, 3), **more}
    groups = Groups(2, "none", torch.ones(1), ONE_PROCESS.gather, 0)
    meter = meter_of(plan)
    with AfterRollout(plan, meter, Moment(), groups) as rollout:
        rollout.scored(torch.tensor([[3.0], [1.0]]))
    return rollout.finish(micro_batch(**given)), meter


def test_after_a_rollout_our_weights_take_the_place_of_trl_s_ratio():
    batch, meter = after_rollout(Plan(TIS, replaces_ratio=True, needs_engine=True))
    torch.testing.assert_close(batch["importance_sampling_ratio"], torch.tensor([[2.0, 1.0, 0.5], [1.0, 2.0, 1.0]]))
    assert meter.close("train")[0]["correction/weight/max"] == 2.0


def test_after_a_rollout_trl_s_own_ratio_is_measured_and_left():
    ratio = torch.full((2, 1), 1.5)
    batch, meter = after_rollout(Plan(TIS, needs_engine=True), importance_sampling_ratio=ratio)
    assert batch["importance_sampling_ratio"] is ratio and meter.close("train")[0]["correction/weight/max"] == 1.5


def test_normalized_weights_have_mean_one():
    correction = Correction("token", "truncate", None, 2.0, normalize="token")
    batch, _ = after_rollout(Plan(correction, replaces_ratio=True, needs_engine=True))
    # (2 + 1 + .5 + 1 + 2) / 5 = 1.3
    expected = torch.tensor([[2.0, 1.0, 0.5], [1.0, 2.0, 1.3]]) / 1.3
    torch.testing.assert_close(batch["importance_sampling_ratio"], expected)


def test_a_rejected_completion_leaves_the_baseline_of_its_group():
    rule = Rejection("sequence_max", upper=3.5)
    plan = Plan(Correction(rejections=(rule,)), replaces_ratio=True, needs_engine=True, excludes_rejected=True)
    batch, _ = after_rollout(plan)
    assert batch["tool_mask"].tolist() == [[0, 0, 0], [1, 1, 0]] and batch["num_items_in_batch"] == 2
    assert batch["advantages"].tolist() == [0.0, 0.0], "the other one is its own baseline"


def test_missing_log_probs_are_an_error_only_where_they_are_needed():
    batch = {"completion_mask": torch.ones(1, 1)}
    groups = Groups(1, "none", torch.ones(1), ONE_PROCESS.gather, 0)
    assert AfterRollout(Plan(), meter_of(Plan()), Moment(), groups).finish(batch) is batch
    needy = Plan(TIS, needs_engine=True)
    with pytest.raises(ValueError, match="the rollout returned none"):
        AfterRollout(needy, meter_of(needy), Moment(), groups).finish(batch)


def test_what_decides_on_old_log_probs_ends_before_rewards_and_is_left_out_where_trl_decides():
    entered = []

    @contextlib.contextmanager
    def decision():
        entered.append("in")
        yield
        entered.append("out")

    groups = Groups(1, "none", torch.ones(1), ONE_PROCESS.gather, 0)
    for plan, expected in ((Plan(), []), (Plan(TIS, takes_ratio=False), ["in", "out"])):
        entered.clear()
        with AfterRollout(plan, meter_of(plan), Moment(), groups) as rollout:
            rollout.generated(decision())
            rollout.close()
            assert entered == expected
