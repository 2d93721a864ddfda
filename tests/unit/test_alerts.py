# SPDX-License-Identifier: Apache-2.0
"""Each alert fires on its planted cause, once, and stays silent on healthy runs, down to small batches."""

import dataclasses
import json
import math
import random

import pytest
import torch

from trl_consistent import METRICS, AlertEvent, finalize, mismatch_metrics
from trl_consistent.metrics.alerts import Alerts, replay


K3, ABS_DIFF, ESS, LENGTH = (
    "mismatch/k3/mean",
    "mismatch/abs_diff/mean",
    "mismatch/ess/sequence",
    "completions/mean_length",
)
NONFINITE = "mismatch/nonfinite_count"


def history(key, values, first=1, **also):
    return [{"step": first + i, key: value, **also} for i, value in enumerate(values)]


def wobble(value, count, share=0.01):
    """`count` values that go up and down around `value` by `share`, without trend."""
    return [value * (1 + share * (-1) ** i) for i in range(count)]


def told(events):
    return [(event.step, event.kind, event.severity) for event in events]


def simulated(seed, rows, tokens, size, steps=200, growth=1.0, scale=lambda step: 1.0):
    """Logs of a run whose gap is that of bf16: Laplace noise on the logits, so that d is (1 - p) times it.

    Three tenths of the tokens are unsure, with p uniform in 0 to 1, the others certain: mean |d| is about `size`, its
    standard deviation three times that, a sequence's length uniform between half of `tokens` and all.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    logs = []
    for step in range(steps):
        longest = int(tokens * growth ** (step / steps))
        mask = torch.arange(longest) < torch.randint(longest // 2, longest + 1, (rows, 1), generator=generator)
        doubt = torch.where(uniform(rows, longest) < 0.3, uniform(rows, longest), 1e-3 * uniform(rows, longest))
        sign_and_size = uniform(rows, longest) - 0.5
        laplace = -sign_and_size.sign() * torch.log1p(-2 * sign_and_size.abs().clamp(max=0.4999999))
        d = size * scale(step) / (0.3 * 0.5) * doubt * laplace  # E|laplace| = 1, E doubt = .3 * .5
        sampling = torch.log1p(-doubt.clamp(max=0.999))
        values = finalize(mismatch_metrics(sampling + d - (d * d).mean() / 2, sampling, mask))
        logs.append({**values, LENGTH: mask.sum(1).float().mean().item(), "step": step + 1})
    return logs


# ---------------------------------------------------------------------------------------------------------- healthy


# Forty seeds of each were silent when the rules were set; one is kept here.
@pytest.mark.parametrize(("rows", "tokens"), [(4, 16), (16, 32), (64, 64)])
@pytest.mark.parametrize("size", [0.011, 0.018])
def test_two_hundred_healthy_bf16_steps_raise_no_alert(rows, tokens, size):
    logs = simulated(0, rows, tokens, size)
    mean = sum(log[ABS_DIFF] for log in logs) / len(logs)
    spread = math.sqrt(2 * sum(log[K3] for log in logs) / len(logs))  # k3 of small d is d^2 / 2
    assert 0.9 * size < mean < 1.2 * size and 0.025 < spread < 0.06, "this is what bf16 runs report"
    assert replay(logs) == []


def test_longer_completions_raise_no_alert():
    # 16 to 1024 tokens: the ESS of sequence ratios falls below its .5, as healthy noise makes it
    logs = simulated(0, 16, 16, 0.013, growth=64.0)
    assert min(log[ESS] for log in logs[-20:]) < 0.5
    assert replay(logs) == []


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_a_float32_run_raises_no_alert_even_if_its_noise_grows_tenfold(factor):
    logs = simulated(0, 16, 32, 1e-6, steps=120, scale=lambda step: factor ** min(step / 60, 1.0))
    assert logs[-1][K3] < 1e-8
    assert replay(logs) == []


def test_one_wild_log_raises_no_alert():
    values = wobble(5e-4, 40) + [0.5] + wobble(5e-4, 20) + [0.5, 0.5] + wobble(5e-4, 20)
    assert replay(history(K3, values)) == []


def test_noise_around_a_limit_raises_no_alert():
    # a third of the values are above .02, and 2 % above .023 where the warning opens
    generator = random.Random(0)
    values = [generator.gauss(0.019, 0.002) for _ in range(400)]
    assert sum(value > 0.02 for value in values) > 100
    assert replay(history(ABS_DIFF, values)) == []


@pytest.mark.parametrize("seed", [4, 9])  # a test that takes neighbours for independent sees trends here
def test_noise_that_wanders_raises_no_alert(seed):
    generator, x, values = random.Random(seed), 0.0, []
    for _ in range(400):
        x = 0.95 * x + math.sqrt(1 - 0.95**2) * generator.gauss(0, 0.25)
        values.append(6e-4 * math.exp(x))
    assert max(values) > 9e-4 and replay(history(K3, values)) == []


# ------------------------------------------------------------------------------------------------------------ levels


def fault(key):
    """Healthy, warning and critical values of a metric, on its bad side; `None` where no value is critical."""
    (low, high), (worst_low, worst_high) = METRICS[key].healthy, METRICS[key].critical
    healthy = high / 2 if low is None else 1.0 if high is None else (low + high) / 2
    limit, worst = (low, worst_low) if high is None else (high, worst_high)
    if worst is None:
        return healthy, limit * 2, None
    return healthy, (limit + worst) / 2, worst + (worst - limit)


LEVELS = [
    key
    for key, metric in METRICS.items()
    if metric.healthy != (None, None)
    and key not in ("mismatch/chi2/token", "mismatch/prob_diff/mean", "mismatch/abs_diff/p99")
]
AT_ONCE = {"mismatch/unscored_fraction", NONFINITE, "correction/rejected_batches"}


@pytest.mark.parametrize("key", sorted(set(LEVELS) - AT_ONCE))
def test_a_level_is_told_as_it_persists(key):
    healthy, warning, critical = fault(key)
    # (3 of 5) with 9 quiet logs before: told at the third log outside
    events = replay(history(key, [healthy] * 9 + [warning] * 9))
    assert told(events) == [(12, "level", "warning")]
    assert (events[0].key, events[0].value) == (key, warning) and events[0].threshold in METRICS[key].healthy
    if critical is not None:
        events = replay(history(key, [healthy] * 9 + [critical] * 9))
        assert told(events) == [(12, "level", "critical")] and events[0].threshold in METRICS[key].critical
    assert replay(history(key, [healthy] * 9 + [warning] * 2 + [healthy] * 9)) == []


@pytest.mark.parametrize("key", sorted(AT_ONCE))
def test_what_must_be_zero_is_told_at_once(key):
    severity = "warning" if key == "correction/rejected_batches" else "critical"
    assert told(replay(history(key, [0.0, 0.0, 1.0, 1.0]))) == [(3, "level", severity)]
    assert replay(history(key, [0.0] * 50)) == []


def test_both_sides_of_a_range_are_watched():
    for value, bound in ((0.93, 0.95), (1.07, 1.05)):
        (event,) = replay(history("mismatch/ratio/mean", [1.0] * 9 + [value] * 5))
        assert (event.severity, event.threshold) == ("critical", bound)


def test_a_low_sequence_ess_that_length_does_not_explain_is_told():
    # k3 of a warning, 1.9e-3, is a variance of 3.8e-3: at 50 tokens noise explains e^-.19 = .83, at 500 e^-1.9 = .15
    short, long = ([{"step": i, ESS: 0.4, LENGTH: length} for i in range(9)] for length in (50.0, 500.0))
    assert [event.severity for event in replay(short)] == ["warning"] and replay(long) == []
    assert [event.severity for event in replay(history(ESS, [0.4] * 9))] == ["warning"], "no length in the logs"


def test_a_fault_in_the_first_log_is_told_soon():
    # log-probs of other tokens: |d| near .5 instead of .012, with the scatter of 512 tokens
    events = replay(simulated(1, 16, 32, 0.012, steps=6, scale=lambda step: 40.0))
    critical = {event.key: event.step for event in events if event.severity == "critical"}
    assert critical[ABS_DIFF] <= 6 and critical["mismatch/pearson"] <= 6


def test_few_logs_that_agree_by_chance_are_not_sure_yet():
    # 13 % above .023 where the warning opens; scatter log(.0266 / .026) / .95 = 2.4 %. Margin 4 * 1.25 * 2.4 % / sqrt(n)
    # times 1 + 6 / differences: 28 % at 3 logs, 9 % at 9
    values = [0.026, 0.0266] * 5
    assert replay(history(ABS_DIFF, values[:3])) == []
    assert len(replay(history(ABS_DIFF, values[:9]))) == 1


# ---------------------------------------------------------------------------------------------------------- baseline


def test_twice_its_own_past_is_a_warning_and_five_times_is_critical():
    past = wobble(3e-4, 20)
    events = replay(history(K3, past + [9e-4] * 8))  # 3 times, inside the healthy range of 1e-3
    assert told(events) == [(23, "baseline", "warning")]
    assert events[0].threshold == pytest.approx(6e-4, rel=0.02)
    events = replay(history(K3, past + [1.7e-3] * 8))  # 5.7 times, no warning by its level, which opens at 1.9e-3
    assert told(events) == [(23, "baseline", "critical")]
    assert events[0].threshold == pytest.approx(1.5e-3, rel=0.02) and "5.7 times its own 0.0003" in events[0].message
    assert replay(history(K3, past + [5e-4] * 20)) == [], "1.7 times"


def test_below_a_tenth_of_the_healthy_limit_a_multiple_is_nothing():
    assert replay(history(K3, wobble(1e-11, 20) + [9e-5] * 20)) == []
    # and is not critical inside the healthy range, however large
    assert told(replay(history(K3, wobble(1e-11, 20) + [9e-4] * 20))) == [(23, "baseline", "warning")]


def test_what_went_wrong_does_not_become_the_baseline():
    alerts = Alerts()
    replay(history(K3, wobble(3e-4, 20) + [9e-4] * 200), alerts)
    assert alerts.open[K3].kind == "baseline"


def test_without_a_past_there_is_no_baseline():
    assert replay(history(K3, [1e-4] * 9 + [9e-4] * 3)) == []


# ------------------------------------------------------------------------------------------------------------- trend


def test_rising_k3_is_told_before_it_is_outside():
    values = [2e-4 * math.exp(0.05 * i) * (1 + 0.1 * (-1) ** i) for i in range(60)]
    (event, *_) = replay(history(K3, values))
    # change over 30 logs: e^(29 * .05) = 4.3
    assert (event.kind, event.severity) == ("trend", "warning") and event.value < event.threshold == 1e-3
    assert "rising" in event.message


def test_a_rise_without_any_noise_is_a_trend_too():
    # it bends: e^(i^2 / 900) is 2.5-fold over the first 30 logs, and neighbours leave the line together
    (event, *_) = replay(history(K3, [5e-4 * math.exp((i / 30) ** 2) for i in range(40)]))
    assert (event.step, event.kind) == (30, "trend")


def test_falling_ess_is_told_before_it_is_outside():
    # -log ESS grows by 5 % a log, from .05; .69 is an ESS of .5, reached at log 54
    values = [math.exp(-0.05 * 1.05**i) for i in range(60)]
    (event, *_) = replay(history(ESS, values))
    assert (event.kind, event.severity) == ("trend", "warning") and event.value > event.threshold == 0.5
    assert "falling" in event.message


@pytest.mark.parametrize(
    "values",
    [
        [5e-4 * (1 - i / 100) for i in range(60)],  # falls
        [
            7e-4 * 1.02**i for i in range(30)
        ],  # 1.8-fold over the window, less than 2, though as much again ends at 2.2e-3
        [5e-6 * 1.05**i for i in range(60)],  # 4.3-fold to 9e-5, as much again is 4e-4: inside the healthy range
        [1e-12 * 1.1**i for i in range(60)],
    ],
)
def test_a_trend_that_leads_nowhere_bad_is_silent(values):
    assert replay(history(K3, values)) == []


def test_a_trend_in_noise_is_not_one():
    generator = random.Random(3)
    values = [6e-4 * math.exp(generator.gauss(0, 0.4)) for _ in range(400)]
    assert replay(history(K3, values)) == []


def test_a_simulated_collapse_is_told_by_its_trend_before_it_is_critical():
    # d grows e-fold in 25 steps from step 80 on; |d| is above .05 at step 80 + 25 * log(.05 / .012) = 116
    events = replay(simulated(1, 32, 64, 0.012, steps=140, scale=lambda step: math.exp(max(0, step - 80) / 25)))
    first = events[0]
    assert 81 <= first.step <= 108 and first.severity == "warning"
    assert {"trend"} <= {event.kind for event in events if event.step <= 108}
    assert any(event.severity == "critical" and event.key in (K3, ABS_DIFF) for event in events)


# ---------------------------------------------------------------------------------------------------------- episodes


def episode():
    # steps: 1-20 healthy, 21-40 a warning, 41-60 critical, 61-90 healthy
    return history(ABS_DIFF, wobble(0.011, 20) + [0.03] * 20 + [0.06] * 9 + [0.08] + [0.06] * 10 + wobble(0.011, 30))


def test_an_episode_opens_once_escalates_once_and_recovers_once():
    events = replay(episode())
    # outside from 21: third log 23; from 41: third log 43; back from 61: tenth log in a row 70
    assert told(events) == [(23, "level", "warning"), (43, "level", "critical"), (70, "level", "recovered")]
    assert [event.threshold for event in events] == [0.02, 0.05, 0.02]
    message = events[-1].message
    assert "step 23 and lasted 47 steps" in message and "0.08, at step 50" in message and "0.02 for 10 logs" in message


def test_a_message_names_metric_value_threshold_meaning_and_next_step():
    message = replay(episode())[0].message
    for part in (ABS_DIFF, "0.03", "step 23", "warning", "0.02", METRICS[ABS_DIFF].meaning, "Next: check"):
        assert part in message


def test_between_healthy_and_where_warnings_open_an_episode_neither_opens_nor_ends():
    # .021 is above .02, and below .02 + .1 * (.05 - .02) = .023
    assert replay(history(ABS_DIFF, [0.021] * 50)) == []
    alerts = Alerts()
    events = replay(history(ABS_DIFF, [0.03] * 20 + [0.021] * 50), alerts)
    assert [event.severity for event in events] == ["warning"] and ABS_DIFF in alerts.open


def test_one_log_outside_starts_the_way_back_anew():
    events = replay(history(ABS_DIFF, [0.03] * 20 + [0.01] * 9 + [0.03] + [0.01] * 9))
    assert [event.severity for event in events] == ["warning"]
    events = replay(history(ABS_DIFF, [0.03] * 20 + [0.01] * 9 + [0.03] + [0.01] * 10))
    assert told(events)[1:] == [(40, "level", "recovered")]


def test_a_second_episode_is_told_again():
    values = [0.01] * 9 + [0.03] * 9 + [0.01] * 20 + [0.03] * 9
    assert [event.severity for event in replay(history(ABS_DIFF, values))] == ["warning", "recovered", "warning"]


@pytest.mark.parametrize("at", [10, 22, 30, 45, 65])
def test_a_replayed_past_goes_on_as_if_it_had_never_stopped(at):
    logs = episode()
    whole = replay(logs)
    saved = json.loads(json.dumps(logs[:at]))  # what trainer_state.json holds
    alerts = Alerts()
    assert replay(saved, alerts) + replay(logs[at:], alerts) == whole and len(whole) == 3


# -------------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize("hole", ["missing", None, math.nan, math.inf, "0.06", [0.06]])
def test_what_is_not_a_number_is_passed_over(hole):
    logs = []
    for log in episode():
        logs += [log, {"step": log["step"], **({} if hole == "missing" else {ABS_DIFF: hole})}]
    assert replay(logs) == replay(episode())


def test_a_stock_run_is_judged_by_what_vanilla_trl_logs():
    stock = [
        {"step": log["step"], "loss": 0.1, "sampling/sampling_logp_difference/mean": log[ABS_DIFF]}
        for log in episode()
    ]
    stock.insert(30, {"step": 30, "eval_sampling/sampling_logp_difference/mean": 9.0, "eval_loss": 1.0})
    events = replay(stock)
    assert told(events) == told(replay(episode()))
    assert {event.key for event in events} == {"sampling/sampling_logp_difference/mean"}


def test_ours_is_read_where_both_names_are_logged():
    logs = [{**log, "sampling/sampling_logp_difference/mean": 5.0} for log in episode()]
    assert replay(logs) == replay(episode())


def test_events_are_frozen_and_compare():
    event = replay(episode())[0]
    assert event == AlertEvent(**dataclasses.asdict(event))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 0


# ---------------------------------------------------------------------------------------------------------- settings


def test_thresholds_replace_the_catalogue():
    values = [0.01] * 9 + [0.06] * 9
    (event,) = replay(history(ABS_DIFF, values), Alerts(thresholds={ABS_DIFF: (0.04, 0.08)}))
    assert (event.severity, event.threshold) == ("warning", 0.04)
    assert replay(history(ABS_DIFF, values), Alerts(thresholds={ABS_DIFF: None})) == []
    # a user's threshold is where the warning opens
    assert replay(history(ABS_DIFF, [0.041] * 9), Alerts(thresholds={ABS_DIFF: (0.04, 0.08)}))
    (event,) = replay(history(ABS_DIFF, values), Alerts(thresholds={ABS_DIFF: (None, 0.05)}))
    assert event.severity == "critical"


def test_any_logged_key_can_be_watched():
    low = Alerts(thresholds={"reward": (0.5, 0.2)})
    assert [e.severity for e in replay(history("reward", [0.9] * 9 + [0.1] * 5), low)] == ["critical"]
    both = Alerts(thresholds={"entropy": ((0.1, 3.0), (None, 5.0))})
    assert [e.threshold for e in replay(history("entropy", [1.0] * 9 + [0.05] * 5), both)] == [0.1]
    left_out = Alerts(thresholds={"mismatch/chi2/token": (0.05, 1.0)})
    assert len(replay(history("mismatch/chi2/token", [0.01] * 9 + [0.5] * 5), left_out)) == 1


def test_persistence_is_n_of_the_last_m():
    values = [0.01] * 9 + [0.06] + [0.01] * 3 + [0.06] * 2
    assert replay(history(ABS_DIFF, values)) == [], "three of the last six"
    assert told(replay(history(ABS_DIFF, values), Alerts(persistence=(3, 6)))) == [(15, "level", "critical")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 24}, "`window` is 24"),
        ({"persistence": (4, 3)}, r"`persistence` is \(4, 3\)"),
        ({"persistence": (0, 3)}, "n of the last m"),
        ({"persistence": (3, 50)}, r"`window` \(30\)"),
        ({"thresholds": {K3: (1e-2, 1e-3)}}, "0.001 would be critical before it is a warning"),
        ({"thresholds": {K3: 1e-2}}, r"give `\(warn, critical\)`"),
        ({"thresholds": {"reward": (0.5, None)}}, "which side is bad"),
        ({"thresholds": {"mismatch/ratio/mean": ((0.9, 1.1), (0.95, 1.2))}}, "0.95 would be critical before"),
        ({"thresholds": {K3: ("a", 1.0)}}, "'a' does not say"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Alerts(**settings)


@pytest.mark.parametrize("key", [key for key, metric in METRICS.items() if metric.critical != (None, None)])
def test_critical_is_never_tighter_than_healthy(key):
    (low, high), (worst_low, worst_high) = METRICS[key].healthy, METRICS[key].critical
    assert (low is None) == (worst_low is None) and (high is None) == (worst_high is None)
    assert low is None or worst_low <= low
    assert high is None or worst_high >= high
