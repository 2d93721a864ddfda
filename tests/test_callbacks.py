# SPDX-License-Identifier: Apache-2.0
"""The learning-rate callback: its rules by hand, and what it does to a training whose planted noise grows."""

import logging
import math

import pytest
import torch
from transformers import TrainerControl, TrainerState

from trl_consistent import MismatchLRCallback

from .training import ConsistentGRPOTrainer, GRPOTrainer, Keep, assert_same_training, build, synthetic_engine, train


ESS, LENGTH = "mismatch/ess/sequence", "completions/mean_length"
SGD = {"optim": "sgd", "lr_scheduler_type": "linear", "max_grad_norm": 1.0}


class ByHand:
    """Calls a callback in the trainer's order, around an optimizer that we can look into."""

    def __init__(self, callback, lr=1.0, scheduler=None):
        self.callback, self.state = callback, TrainerState()
        self.parameter = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.parameter], lr=lr)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.callback.on_train_begin(None, self.state, TrainerControl())

    @property
    def lr(self):
        return self.optimizer.param_groups[0]["lr"]

    def step(self, **logs):
        """One step with gradient 1, and its log; returns the rate that the update used."""
        self.parameter.data.zero_()
        self.callback.on_step_begin(None, self.state, TrainerControl(), optimizer=self.optimizer)
        self.parameter.grad = torch.ones_like(self.parameter)
        self.optimizer.step()
        self.callback.on_optimizer_step(None, self.state, TrainerControl())
        if self.scheduler:
            self.scheduler.step()
        self.state.global_step += 1
        self.log(learning_rate=self.lr, **logs)
        return -self.parameter.item()

    def log(self, **logs):
        self.state.log_history.append(dict(logs))
        self.callback.on_log(None, self.state, TrainerControl(), logs=logs)


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
    monkeypatch.setattr("trl_consistent.callbacks._PATIENCE", 2)
    with caplog.at_level(logging.WARNING, "trl_consistent.callbacks"):
        kept = run(tiny_model, tmp_path, MismatchLRCallback(), cls=GRPOTrainer, max_steps=2)
    assert len(kept.steps) == 2
    (record,) = (r for r in caplog.records if r.name == "trl_consistent.callbacks")
    assert "`ConsistentGRPOTrainer` logs it" in record.message
