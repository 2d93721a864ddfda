# SPDX-License-Identifier: Apache-2.0
"""The callbacks: their rules by hand, and what they do to a training whose planted noise grows."""

import logging
import math
import os
import pty
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from trl_consistent import METRICS, MismatchAlertCallback, MismatchLRCallback, MismatchPanelCallback
from trl_consistent.callbacks.guarded import GuardedCallback
from trl_consistent.callbacks.panel import panel
from trl_consistent.metrics.alerts import Alerts, replay

from ..short_training import (
    ConsistentGRPOTrainer,
    GRPOTrainer,
    Keep,
    assert_same_training,
    build,
    noise,
    synthetic_engine,
    train,
)


ESS, LENGTH = "mismatch/ess/sequence", "completions/mean_length"
SGD = {"optim": "sgd", "lr_scheduler_type": "linear", "max_grad_norm": 1.0}


class ByHand:
    """Calls a callback in the trainer's order, around an optimizer that we can look into."""

    def __init__(self, *callbacks, lr=1.0, scheduler=None):
        self.callbacks, self.state, self.control = callbacks, TrainerState(), TrainerControl()
        self.callback = callbacks[0]
        self.parameter = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.parameter], lr=lr)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.call("on_train_begin")

    def call(self, hook, **kwargs):
        for callback in self.callbacks:
            getattr(callback, hook)(None, self.state, self.control, **kwargs)

    @property
    def lr(self):
        return self.optimizer.param_groups[0]["lr"]

    def step(self, **logs):
        """One step with gradient 1, and its log; returns the rate that the update used."""
        self.parameter.data.zero_()
        self.call("on_step_begin", optimizer=self.optimizer)
        self.parameter.grad = torch.ones_like(self.parameter)
        self.optimizer.step()
        self.call("on_optimizer_step")
        if self.scheduler:
            self.scheduler.step()
        self.state.global_step += 1
        self.log(learning_rate=self.lr, **logs)
        return -self.parameter.item()

    def log(self, **logs):
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)


def growing_noise(step_size):
    """A plant whose noise grows by `step_size` nats with every step of 8 completions; the first step has none."""
    generator, calls = torch.Generator().manual_seed(7), iter(range(10**6))

    def plant(ids, logps):
        scale = step_size * (next(calls) // 8)
        return [lp - scale * torch.randn((), generator=generator).item() for lp in logps]

    return plant


def run(model, tmp_path, callback, cls=ConsistentGRPOTrainer, plant=None, resume=None, **options):
    keep = Keep()
    with synthetic_engine(plant or growing_noise(0.2)):
        keep.trainer = build(cls, model, tmp_path, callbacks=[keep, *([callback] if callback else [])], **options)
        keep.initial = {n: p.detach().clone() for n, p in keep.trainer.model.named_parameters()}
        keep.trainer.train(resume_from_checkpoint=resume)
    keep.steps = [log for log in keep.trainer.state.log_history if "loss" in log]
    return keep


@pytest.mark.parametrize(
    ("rule", "base_ess", "ess", "expected"),
    [
        ("ess_sqrt", 1.0, 0.25, 0.5),  # sqrt(.25)
        ("ess_linear", 1.0, 0.25, 0.25),
        ("ess_sqrt", 0.55, 0.22, 0.63245553),  # VCPO's multi-turn recipe: sqrt(.22 / .55) = sqrt(.4)
        ("ess_linear", 0.55, 0.22, 0.4),
        ("ess_sqrt", 0.55, 0.9, 1.0),  # above the base the rate is not raised
    ],
)
def test_ess_rules_by_hand(rule, base_ess, ess, expected):
    hand = ByHand(MismatchLRCallback(rule, base_ess=base_ess))
    assert hand.step(**{ESS: ess}) == 1.0, "a log acts on the steps after it"
    assert hand.step(**{ESS: 1.0}) == pytest.approx(expected, rel=1e-8)
    assert hand.step() == 1.0, "the rate recovers with the ESS"


def test_length_rule_follows_the_published_schedule():
    # Surge at step 110, so a period of 1.8 * 110 = 198: halved in steps 309 to 506, again to 704, then .125, then .1.
    hand = ByHand(MismatchLRCallback("length"))
    scales = {step: hand.step(**{LENGTH: 100.0 if step < 110 else 301.0}) for step in range(1, 1000)}
    expected = {1: 1.0, 110: 1.0, 308: 1.0, 309: 0.5, 506: 0.5, 507: 0.25, 704: 0.25, 705: 0.125, 902: 0.125, 903: 0.1}
    assert {step: scales[step] for step in expected} == expected
    assert hand.callback.surge_step == 110 and hand.callback.lr_scale == 0.1


def test_three_times_the_baseline_is_not_yet_a_surge():
    hand = ByHand(MismatchLRCallback("length", surge=3.0, baseline_steps=2))
    for length in (80.0, 120.0, 300.0):  # baseline (80 + 120) / 2 = 100, surge above 300
        hand.step(**{LENGTH: length})
    assert hand.callback.surge_step is None
    hand.step(**{LENGTH: 300.1})
    assert hand.callback.surge_step == 4
    # period round(1.8 * 4) = 7: the seventh step after the surge still has the full rate
    assert [hand.step() for _ in range(8)] == [1.0] * 7 + [0.5]


def test_a_surge_inside_the_baseline_and_sparse_logs_are_not_lost():
    callback = MismatchLRCallback("length", baseline_steps=2)
    hand = ByHand(callback)
    hand.state.global_step = 9  # logging_steps=10: the first log comes after the baseline's steps
    hand.step(**{LENGTH: 100.0})
    hand.step(**{LENGTH: 301.0})
    assert (callback.baseline_sum, callback.baseline_logs, callback.surge_step) == (100.0, 1, 11)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),  # lr_t = lr_{t-1} / 2: recursive
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    ],
)
def test_no_scheduler_sees_the_scale(scheduler):
    hand = ByHand(MismatchLRCallback("ess_linear"), scheduler=scheduler)
    taken = [hand.step(**{ESS: 0.25}) for _ in range(3)]
    assert taken == [1.0, 0.125, 0.0625]  # 1, 1/2 * 1/4, 1/4 * 1/4
    assert hand.lr == 0.125 == hand.scheduler.get_last_lr()[0]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    hand = ByHand(MismatchLRCallback("ess_linear"), lr=torch.tensor(1.0))
    rate = hand.lr
    assert [hand.step(**{ESS: 0.25}) for _ in range(2)] == [1.0, 0.25]
    assert hand.lr is rate and rate.item() == 1.0


def test_a_step_that_was_cut_short_does_not_scale_twice():
    hand = ByHand(MismatchLRCallback("ess_linear"))
    hand.step(**{ESS: 0.25})
    hand.callback.on_step_begin(None, hand.state, TrainerControl(), optimizer=hand.optimizer)
    assert hand.lr == 0.25
    assert hand.step() == 0.25 and hand.lr == 1.0


@pytest.mark.parametrize("rule", ["ess_sqrt", "length"])
@pytest.mark.parametrize("value", ["missing", None, math.nan, math.inf, -math.inf, 0.0, -0.1, "0.5"])
def test_an_unusable_value_warns_once_and_leaves_the_scale(rule, value, caplog):
    hand = ByHand(MismatchLRCallback(rule, baseline_steps=1))
    key = ESS if rule == "ess_sqrt" else LENGTH
    hand.step(**{key: 0.25})
    scale, state = hand.callback.lr_scale, hand.callback.state()
    logs = {} if value == "missing" else {key: value}
    missing = value in ("missing", None)  # not in every log where a rollout batch serves several steps
    with caplog.at_level(logging.WARNING, "trl_consistent.callbacks"):
        for _ in range(9):
            assert hand.step(**logs) == scale
        assert len(caplog.records) == (0 if missing else 1)
        for _ in range(3):
            assert hand.step(**logs) == scale
    assert hand.callback.state() == state
    (record,) = caplog.records
    assert (
        key in record.message
        and (f"step {11 if missing else 2} holds {None if missing else value!r}") in record.message
    )
    assert "another `rule`" in record.message


def test_logs_that_are_not_of_training_steps_are_left_alone(caplog):
    hand = ByHand(MismatchLRCallback("ess_sqrt"))
    hand.log(eval_loss=1.0, **{f"eval_{ESS}": 0.1})
    hand.log(train_runtime=1.0, train_loss=1.0)
    hand.callback.on_log(None, hand.state, TrainerControl(), logs=None)
    assert hand.callback.lr_scale == 1.0 and not caplog.records
    assert not any("lr_scale" in log for log in hand.state.log_history)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "ess"}, "`rule` is 'ess'; choose one of ess_sqrt, ess_linear, length"),
        ({"base_ess": 0.0}, "`base_ess` is 0.0"),
        ({"base_ess": 1.1}, "`base_ess` is 1.1"),
        ({"base_ess": math.nan}, "`base_ess` is nan"),
        ({"surge": 1.0}, "`surge` is 1.0"),
        ({"surge": math.nan}, "`surge` is nan"),
        ({"baseline_steps": 0}, "`baseline_steps` is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MismatchLRCallback(**options)


def test_scale_falls_as_noise_grows_and_every_update_is_that_much_shorter(tiny_model, tmp_path):
    kept = run(tiny_model, tmp_path, MismatchLRCallback("ess_linear"), max_steps=5, **SGD)
    scales = [log["lr_scale"] for log in kept.steps]
    assert scales == [1.0, *(min(1.0, log[ESS]) for log in kept.steps[:-1])]
    # No gap, then noise of .2, .4 and .6 nats a token: 1, .85, .37, .52, the ESS of eight completions each.
    assert scales[1] == pytest.approx(1.0, abs=1e-3) and scales[2] < 0.9 and max(scales[3:]) < 0.6
    # The schedule is what it would be without us: 1e-2 * (1 - step / 5).
    assert [log["learning_rate"] for log in kept.steps] == pytest.approx([1e-2, 8e-3, 6e-3, 4e-3, 2e-3])
    before = kept.initial
    for log, gradients, after in zip(kept.steps, kept.gradients, kept.weights, strict=True):
        rate = log["learning_rate"] * log["lr_scale"]
        for name, gradient in gradients.items():
            assert torch.equal(after[name], before[name].add(gradient, alpha=-rate)), (log["step"], name)
        before = after
    assert kept.trainer.optimizer.param_groups[0]["lr"] == kept.trainer.lr_scheduler.get_last_lr()[0] == 0.0


def test_without_a_surge_training_is_the_same_bit_for_bit(tiny_model, tmp_path):
    plain = train(ConsistentGRPOTrainer, tiny_model, tmp_path / "a", plant=growing_noise(0.2))
    watched = run(tiny_model, tmp_path / "b", MismatchLRCallback("length"))
    assert_same_training(plain, watched)


@pytest.mark.parametrize("restored_by_trainer", [False, True])
@pytest.mark.parametrize("rule", ["ess_sqrt", "length"])
def test_a_resumed_run_continues_from_the_scale(tiny_model, tmp_path, restored_by_trainer, rule):
    callback = MismatchLRCallback(rule, baseline_steps=2)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    kept = run(tiny_model, tmp_path, callback, plant=growing_noise(1.0), **options)
    second, third = kept.steps[1], kept.steps[2]
    assert second["step"] == 2 and third["step"] == 3
    checkpoint = kept.trainer.args.output_dir + "/checkpoint-2"
    resumed = run(
        tiny_model, tmp_path, MismatchLRCallback(rule, baseline_steps=2), resume=checkpoint,
        restore_callback_states_from_checkpoint=restored_by_trainer, **options,
    )  # fmt: skip
    (after,) = (cb for cb in resumed.trainer.callback_handler.callbacks if isinstance(cb, MismatchLRCallback))
    first = next(log for log in resumed.steps if log["step"] == 3)
    if rule == "ess_sqrt":
        assert first["lr_scale"] == third["lr_scale"] == second[ESS] ** 0.5 < 0.99
    else:
        # The mean of steps 1 and 2; a callback that had forgotten them would start over with step 3.
        assert (after.baseline_sum, after.baseline_logs) == (kept.steps[0][LENGTH] + second[LENGTH], 2)


def test_a_surge_survives_the_checkpoint():
    hand = ByHand(MismatchLRCallback("length", baseline_steps=1))
    hand.step(**{LENGTH: 100.0})
    hand.step(**{LENGTH: 301.0})  # surge at step 2, period round(3.6) = 4
    saved = hand.callback.state()
    again = ByHand(MismatchLRCallback("length", baseline_steps=1))
    again.state = TrainerState(global_step=5, stateful_callbacks={"MismatchLRCallback": saved})
    again.callback.on_train_begin(None, again.state, TrainerControl())
    assert [again.step() for _ in range(2)] == [1.0, 0.5]  # steps 6 and 7


def test_a_checkpoint_of_other_arguments_is_not_continued():
    saved = ByHand(MismatchLRCallback("ess_sqrt")).callback
    saved.lr_scale = 0.3
    for callback in (MismatchLRCallback("ess_linear"), MismatchLRCallback("ess_sqrt", base_ess=0.5)):
        state = TrainerState(global_step=5, stateful_callbacks={"MismatchLRCallback": saved.state()})
        callback.on_train_begin(None, state, TrainerControl())
        assert callback.lr_scale == 1.0


def test_a_new_run_starts_at_one():
    hand = ByHand(MismatchLRCallback("ess_sqrt"))
    hand.step(**{ESS: 0.25})
    hand.callback.on_train_begin(None, TrainerState(), TrainerControl())
    assert hand.callback.lr_scale == 1.0


def test_a_run_resumed_from_before_the_callback_can_save(tiny_model, tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    kept = run(tiny_model, tmp_path, None, **options)
    checkpoint = kept.trainer.args.output_dir + "/checkpoint-1"
    resumed = run(tiny_model, tmp_path, MismatchLRCallback(), resume=checkpoint, **options)
    saved = TrainerState.load_from_json(resumed.trainer.args.output_dir + "/checkpoint-2/trainer_state.json")
    assert saved.stateful_callbacks["MismatchLRCallback"]["attributes"]["lr_scale"] == pytest.approx(
        resumed.steps[-1][ESS] ** 0.5
    )


def scalars(directory, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = {file.parent for file in directory.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(path)).Reload()
    return [event.value for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def test_tensorboard_holds_the_scale(tiny_model, tmp_path):
    kept = run(tiny_model, tmp_path, MismatchLRCallback(), report_to="tensorboard")
    logged = [log["lr_scale"] for log in kept.steps]
    assert len(logged) == 3 and logged[-1] < 1
    assert scalars(tmp_path, "train/lr_scale") == pytest.approx(logged)


def test_length_rule_works_with_trl_own_trainer(tiny_model, tmp_path, caplog):
    callback = MismatchLRCallback("length")
    kept = run(tiny_model, tmp_path, callback, cls=GRPOTrainer, max_steps=2)
    assert [log["lr_scale"] for log in kept.steps] == [1.0, 1.0]
    assert callback.baseline_logs == 2 and not [r for r in caplog.records if "MismatchLRCallback" in r.message]
    assert callback.baseline_sum == pytest.approx(sum(log[LENGTH] for log in kept.steps))


def test_with_trl_own_trainer_tensorboard_needs_the_callback_first(tiny_model, tmp_path):
    """The way that the docstring names."""
    with synthetic_engine():
        trainer = build(GRPOTrainer, tiny_model, tmp_path, max_steps=2, report_to="tensorboard")
        trainer.callback_handler.callbacks.insert(0, MismatchLRCallback("length"))
        trainer.train()
    assert scalars(tmp_path, "train/lr_scale") == [1.0, 1.0]


def test_ess_rule_with_trl_own_trainer_warns_and_trains_on(tiny_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("trl_consistent.callbacks.learning_rate.PATIENCE", 2)
    with caplog.at_level(logging.WARNING, "trl_consistent.callbacks"):
        kept = run(tiny_model, tmp_path, MismatchLRCallback(), cls=GRPOTrainer, max_steps=2)
    assert len(kept.steps) == 2
    (record,) = (r for r in caplog.records if r.name.startswith("trl_consistent.callbacks"))
    assert "`ConsistentGRPOTrainer` logs it" in record.message


# ---------------------------------------------------------------------------------------------------------------- guard


class Failing(GuardedCallback):
    purpose = "the report at the end"

    def __init__(self, error):
        self.error, self.calls, self.released = error, [], 0

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.append("step_end")
        raise self.error

    def on_train_end(self, args, state, control, **kwargs):
        self.calls.append("train_end")

    def _release(self):
        self.released += 1
        raise OSError("and cannot clean up")


def test_a_callback_that_fails_says_so_once_and_training_goes_on(tiny_model, tmp_path, caplog):
    callback = Failing(OSError(28, "No space left on device"))
    kept = run(tiny_model, tmp_path, callback)
    assert len(kept.steps) == 3 and callback.calls == ["step_end"] and callback.released == 1
    (record,) = (r for r in caplog.records if r.name.startswith("trl_consistent.callbacks"))
    for part in (
        "`Failing`",
        "`on_step_end`",
        "No space left on device",
        "training continues without the report at the end",
    ):
        assert part in record.message
    assert record.levelno == logging.ERROR and record.exc_info[1] is callback.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_the_guard_lets_the_user_interrupt(error):
    with pytest.raises(type(error)):
        Failing(error).on_step_end(None, TrainerState(), TrainerControl())


def test_a_guarded_subclass_of_a_guarded_callback_is_guarded(caplog):
    class Child(Failing):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control)
            raise AssertionError("reached after what super caught")

    Child(ValueError("once")).on_step_end(None, TrainerState(), TrainerControl())
    assert [r.message.split(" with ")[1][:18] for r in caplog.records] == ["ValueError('once')", "AssertionError('re"]


def test_guarded_hooks_return_what_they_return():
    class Fine(GuardedCallback):
        def on_save(self, args, state, control, **kwargs):
            return control

    control = TrainerControl()
    assert Fine().on_save(None, None, control) is control


# --------------------------------------------------------------------------------------------------------------- alerts


ABS_DIFF = "mismatch/abs_diff/mean"
EPISODE = [0.011] * 9 + [0.06] * 5 + [0.011] * 12  # critical at step 12, recovered at 24, the tenth log back


def test_a_critical_episode_by_hand(caplog):
    seen = []
    callback = MismatchAlertCallback(["log", "record", lambda event, *rest: seen.append((event, rest))])
    hand = ByHand(callback)
    with caplog.at_level(logging.INFO, "trl_consistent.callbacks"):
        for value in EPISODE:
            hand.step(**{ABS_DIFF: value})
    assert [(event.step, event.severity) for event, _ in seen] == [(12, "critical"), (24, "recovered")]
    assert seen[0][1] == (None, hand.state, hand.control)
    assert [(r.levelno, r.message) for r in caplog.records] == [
        (logging.ERROR, seen[0][0].message),
        (logging.INFO, seen[1][0].message),
    ]
    assert callback.record_requests == [seen[0][0]], "a recovery needs no record"
    assert not hand.control.should_training_stop


def test_a_warning_is_logged_as_one_and_stops_nothing(caplog):
    callback = MismatchAlertCallback(["log", "stop", "lower_lr"])
    hand = ByHand(callback)
    taken = [hand.step(**{ABS_DIFF: value}) for value in [0.011] * 9 + [0.03] * 9]
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and callback.record_requests == []
    assert set(taken) == {1.0} and not hand.control.should_training_stop


def test_every_rank_decides_the_same_and_rank_0_writes(caplog):
    outcomes = []
    for rank in (0, 1):
        seen = []
        callback = MismatchAlertCallback(
            ["log", "record", "stop", "lower_lr", lambda event, *_, seen=seen: seen.append(event)]
        )
        hand = ByHand(callback)
        hand.state.is_world_process_zero = rank == 0
        with caplog.at_level(logging.INFO, "trl_consistent.callbacks"):
            caplog.clear()
            taken = [hand.step(**{ABS_DIFF: value}) for value in EPISODE]
        outcomes.append((seen, taken, callback.record_requests, hand.control.should_training_stop))
        assert len(caplog.records) == (3 if rank == 0 else 0)  # critical, that training stops, recovered
    assert outcomes[0] == outcomes[1] and len(outcomes[0][0]) == 2 and outcomes[0][3]


def test_an_action_that_raises_is_dropped_and_the_others_go_on(caplog):
    calls = []

    def broken(event, args, state, control):
        calls.append(event)
        raise RuntimeError("no network")

    kept = []
    hand = ByHand(MismatchAlertCallback([broken, "log", lambda event, *_: kept.append(event)]))
    for value in EPISODE:
        hand.step(**{ABS_DIFF: value})
    assert len(calls) == 1 and len(kept) == 2
    (record,) = (r for r in caplog.records if "broken" in r.message)
    assert "no network" in record.message and "not called again" in record.message


@pytest.mark.parametrize("actions", ["diagnose", ["log", "email"], [None]])
def test_an_unknown_action_is_refused_with_the_valid_ones(actions):
    with pytest.raises(ValueError, match="'log', 'record', 'stop', 'lower_lr', or give a function"):
        MismatchAlertCallback(actions)


def test_the_rate_is_halved_while_a_critical_episode_lasts():
    hand = ByHand(MismatchAlertCallback("lower_lr"))
    taken = [hand.step(**{ABS_DIFF: value}) for value in EPISODE]
    # told in the log of step 12, over in that of step 24
    assert taken == [1.0] * 12 + [0.5] * 12 + [1.0] * 2
    assert [log["lr_scale"] for log in hand.state.log_history] == taken
    assert hand.lr == 1.0 and set(hand.optimizer.param_groups[0]) == set(
        torch.optim.SGD([hand.parameter]).param_groups[0]
    )


@pytest.mark.parametrize("alerts_first", [True, False])
def test_scales_of_two_callbacks_multiply_in_any_order(alerts_first):
    callbacks = [MismatchAlertCallback("lower_lr"), MismatchLRCallback("ess_linear")]
    hand = ByHand(
        *(callbacks if alerts_first else callbacks[::-1]),
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    taken = [hand.step(**{ABS_DIFF: value, ESS: 0.6}) for value in EPISODE[:15]]
    # the ESS acts from step 2 on, the alert from 13 on; the schedule halves at each step, and no scale enters it
    scales = [1.0] + [0.6] * 11 + [0.3] * 3
    assert taken == pytest.approx([scale * 0.5**step for step, scale in enumerate(scales)], rel=1e-12)
    assert [log["lr_scale"] for log in hand.state.log_history] == pytest.approx(scales, rel=1e-12)
    assert hand.lr == 0.5**15


def test_a_step_that_was_cut_short_scales_no_one_twice():
    hand = ByHand(MismatchAlertCallback("lower_lr"), MismatchLRCallback("ess_linear"))
    for value in EPISODE[:13]:
        hand.step(**{ABS_DIFF: value, ESS: 0.6})
    hand.call("on_step_begin", optimizer=hand.optimizer)
    assert hand.lr == pytest.approx(0.3)
    assert hand.step(**{ABS_DIFF: 0.06, ESS: 0.6}) == pytest.approx(0.3) and hand.lr == 1.0


def test_a_callback_that_fails_within_a_step_leaves_the_rate_unscaled(monkeypatch):
    hand = ByHand(MismatchAlertCallback("lower_lr"))
    for value in EPISODE[:13]:
        hand.step(**{ABS_DIFF: value})
    hand.call("on_step_begin", optimizer=hand.optimizer)
    monkeypatch.setattr(Alerts, "update", lambda *_: 1 / 0)
    hand.log(learning_rate=1.0, **{ABS_DIFF: 0.06})  # some trainer that logs within a step
    assert hand.lr == 1.0 and [hand.step() for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("at", [8, 11, 12, 18, 25])
def test_a_resumed_run_goes_on_within_an_episode(at):
    def watched(values, state=None):
        seen = []
        hand = ByHand(MismatchAlertCallback(["lower_lr", lambda event, *_: seen.append(event)]))
        if state is not None:
            hand.state = TrainerState(**state)
            hand.call("on_train_begin")
        return seen, [hand.step(**{ABS_DIFF: value}) for value in values], hand.state

    whole, whole_rates, _ = watched(EPISODE)
    first, rates, state = watched(EPISODE[:at])
    rest, rest_rates, _ = watched(EPISODE[at:], {"global_step": at, "log_history": state.log_history})
    assert first + rest == whole and rates + rest_rates == whole_rates and len(whole) == 2


def test_a_new_run_knows_nothing_of_the_one_before():
    callback = MismatchAlertCallback(["record", "lower_lr"])
    hand = ByHand(callback)
    for value in EPISODE[:14]:
        hand.step(**{ABS_DIFF: value})
    assert callback.lr_scale == 0.5 and len(callback.record_requests) == 1
    callback.on_train_begin(None, TrainerState(), TrainerControl())
    assert callback.lr_scale == 1.0 and callback.record_requests == []


def test_logs_without_any_metric_are_told_once(caplog):
    hand = ByHand(MismatchAlertCallback())
    for _ in range(12):
        hand.step(reward=1.0)
    (record,) = caplog.records
    assert "none of its metrics in 10 logs" in record.message and "`ConsistentGRPOTrainer`" in record.message


def test_what_all_ranks_do_alike_is_done_before_what_can_fail_on_one(monkeypatch):
    """Else rank 0 would train on where the others stop."""
    thresholds = {ABS_DIFF: (0.1, 0.2)}
    called = []
    actions = ["log", "record", "stop", "lower_lr", lambda event, *_: called.append(event)]
    callback = MismatchAlertCallback(actions, thresholds=thresholds, persistence=(1, 1))
    hand = ByHand(callback)

    def broken(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("trl_consistent.callbacks.alert.logger.log", broken)
    rates = [hand.step(**{ABS_DIFF: 0.5}) for _ in range(5)]
    assert hand.control.should_training_stop and rates[-1] == 0.5
    assert [event.key for event in callback.record_requests] == [event.key for event in called] == [ABS_DIFF]


@pytest.mark.parametrize("cls", [ConsistentGRPOTrainer, GRPOTrainer])
def test_stop_ends_a_training_whose_gap_is_critical(cls, tiny_model, tmp_path, caplog):
    told = []
    callback = MismatchAlertCallback(["log", "record", "stop", lambda event, *_: told.append(event)])
    kept = run(tiny_model, tmp_path, callback, cls=cls, plant=noise(2.0), max_steps=12)
    # |d| is about 2 * .8 with a scatter of a fifth, in every log
    assert 3 <= len(kept.steps) < 12 and kept.trainer.state.global_step == len(kept.steps)
    events = [event for event in told if event.severity == "critical"]
    assert events and events[0].step == len(kept.steps)
    if cls is GRPOTrainer:
        assert events[0].key == "sampling/sampling_logp_difference/mean"
    assert any("Training stops" in r.message for r in caplog.records)
    assert told == replay(kept.trainer.state.log_history)
    asked = [event for event in told if event.severity != "recovered"]
    assert callback.record_requests == (asked if cls is GRPOTrainer else []), "ours has written them"


@pytest.mark.parametrize("cls", [ConsistentGRPOTrainer, GRPOTrainer])
def test_a_healthy_training_is_left_alone_bit_for_bit(cls, tiny_model, tmp_path, caplog):
    plain = train(cls, tiny_model, tmp_path / "a", plant=noise(0.005))
    callback = MismatchAlertCallback(["log", "record", "stop", "lower_lr"])
    watched = run(tiny_model, tmp_path / "b", callback, cls=cls, plant=noise(0.005))
    assert_same_training(plain, watched)
    assert callback.record_requests == [] and not [r for r in caplog.records if "callbacks" in r.name]


def test_tensorboard_holds_the_scale_of_alerts(tiny_model, tmp_path):
    kept = run(
        tiny_model, tmp_path, MismatchAlertCallback("lower_lr", persistence=(1, 1), thresholds={ABS_DIFF: (0.1, 0.2)}),
        plant=noise(2.0), max_steps=5, report_to="tensorboard",
    )  # fmt: skip
    logged = [log["lr_scale"] for log in kept.steps]
    assert logged[0] == 1.0 and logged[-1] == 0.5
    assert scalars(tmp_path, "train/lr_scale") == logged


# ---------------------------------------------------------------------------------------------------------------- panel


def text(lines):
    import re

    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


LOGS = {
    "learning_rate": 1e-6, "mismatch/k3/mean": 6.1e-4, ABS_DIFF: 0.0113, "mismatch/ess/token": 0.998, ESS: 0.914,
    "correction/truncated_fraction/low": 0.001, "correction/truncated_fraction/high": 0.002,
    "correction/masked_fraction/low": 0.0, "correction/masked_fraction/high": 0.0,
}  # fmt: skip


def test_the_panel_shows_numbers_shares_and_alerts():
    alerts = Alerts()
    shown = text(panel(7, LOGS, alerts, 80))
    assert "mismatch, step 7" in shown[0] and {len(line) for line in shown} == {80} and len(shown) == 5
    assert "k3 0.00061   |d| 0.0113   ESS token 99.8%   sequence 91.4%" in shown[1]
    assert "truncated 0.30%   masked 0.00%" in shown[2] and "rejected" not in shown[2]
    assert "no alerts" in shown[3]
    replay([{"step": step, ABS_DIFF: 0.06} for step in range(5)], alerts)
    assert f"critical: {ABS_DIFF} since step 2" in text(panel(8, LOGS, alerts, 80))[3]


@pytest.mark.parametrize("width", [12, 40, 200])
@pytest.mark.parametrize("value", [None, math.nan, "x", "missing"])
def test_the_panel_has_five_lines_whatever_the_logs_hold(width, value):
    logs = {} if value == "missing" else dict.fromkeys((*METRICS, *LOGS), value)
    alerts = Alerts()
    replay([{"step": step, **dict.fromkeys(METRICS, 1000.0)} for step in range(30)], alerts)
    shown = text(panel(1, logs, alerts, width))
    assert len(shown) == 5 and max(map(len, shown)) <= width


def test_the_panel_of_a_stock_run_reads_what_vanilla_trl_logs():
    assert "|d| 0.0113" in text(panel(1, {"sampling/sampling_logp_difference/mean": 0.0113}, Alerts(), 80))[1]


class OnTerminal:
    """Standard error is a terminal of 40 rows within the block; `.output` holds what was written to it."""

    def __enter__(self):
        import fcntl
        import struct
        import termios

        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.saved, sys.stderr = sys.stderr, os.fdopen(theirs, "w")
        return self

    def __exit__(self, *_):
        sys.stderr.flush()
        os.set_blocking(self.ours, False)
        parts = []
        while True:
            try:
                parts.append(os.read(self.ours, 65536))
            except OSError:
                break
        self.output = b"".join(parts).decode()
        sys.stderr.close()
        os.close(self.ours)
        sys.stderr = self.saved


def shown_by(callback, args=None, rank=0, steps=3):
    args = args or SimpleNamespace(disable_tqdm=False, log_completions=False)
    state = TrainerState(is_world_process_zero=rank == 0)
    with OnTerminal() as terminal:
        callback.on_train_begin(args, state, TrainerControl())
        for step in range(1, steps + 1):
            state.global_step = step
            callback.on_log(args, state, TrainerControl(), logs=dict(LOGS))
        callback.on_train_end(args, state, TrainerControl())
    return terminal.output


def test_on_a_terminal_the_panel_is_redrawn_in_place():
    output = shown_by(MismatchPanelCallback())
    for step in (1, 2, 3):
        assert f"mismatch, step {step}" in output
    # each line goes back up to the progress bar's, so that only the last panel moves the terminal on, by its five lines
    assert output.count("\x1b[A") >= 3 * (1 + 2 + 3 + 4 + 5)
    assert output.count("\n") - output.count("\x1b[A") == 5
    last = output[output.rindex("\x1b[A") :]
    assert "mismatch, step 3" in last and last.count("\n") == 5


def test_with_completions_printed_the_panel_is_printed_too():
    output = shown_by(MismatchPanelCallback(), SimpleNamespace(disable_tqdm=False, log_completions=True))
    assert output.count("mismatch, step") == 3 and "\x1b[A" not in output


@pytest.mark.parametrize(("rank", "disable_tqdm"), [(1, False), (0, True)])
def test_no_panel_on_other_ranks_nor_without_progress_bar(rank, disable_tqdm):
    args = SimpleNamespace(disable_tqdm=disable_tqdm, log_completions=False)
    assert shown_by(MismatchPanelCallback(), args, rank) == ""


def test_no_panel_where_there_is_no_terminal(tiny_model, tmp_path, capsys):
    run(tiny_model, tmp_path, MismatchPanelCallback(), disable_tqdm=False, max_steps=1)
    assert "mismatch, step" not in "".join(capsys.readouterr())


def test_without_rich_one_line_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert shown_by(MismatchPanelCallback()) == ""
    (record,) = caplog.records
    assert "`pip install rich`" in record.message


def test_a_panel_that_fails_leaves_the_terminal_clean(monkeypatch, caplog):
    callback = MismatchPanelCallback()
    calls = iter([["one", "two"]])
    monkeypatch.setattr("trl_consistent.callbacks.panel.panel", lambda *_: next(calls))  # the second raises
    shown_by(callback)
    assert callback._bars == []
    (record,) = caplog.records
    assert "StopIteration" in record.message and "training continues without the mismatch panel" in record.message
