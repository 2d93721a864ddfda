# SPDX-License-Identifier: Apache-2.0
"""The report is tested on what a browser would build from it, never on pixels."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from bs4 import BeautifulSoup
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_consistent import METRICS, ConsistentGRPOTrainer, MismatchReportCallback, cli
from trl_consistent.callbacks import report as report_callback
from trl_consistent.metrics.alerts import replay
from trl_consistent.records.logs import append_logs, read_logs
from trl_consistent.records.record import MismatchRecord
from trl_consistent.report import load_run, render_html, write_report
from trl_consistent.report import write as write_module
from trl_consistent.report.completions import worst_completions
from trl_consistent.report.curve import Curve
from trl_consistent.report.token_plots import sequence_bounds
from trl_consistent.report.wording import healthy_range, number

from ..processes import fresh_environment
from ..short_training import build, synthetic_engine


K3, ABS_DIFF = "mismatch/k3/mean", "mismatch/abs_diff/mean"
HEALTHY = [2e-4 + 1e-6 * (step % 3) for step in range(60)]
NAN = math.nan


def write_logs(folder, **curves):
    """A log a step, from step 1 on; `__` in a name stands for `/`."""
    for step, values in enumerate(zip(*curves.values(), strict=True), 1):
        keys = (name.replace("__", "/") for name in curves)
        append_logs(folder / "mismatch", {"step": step, **dict(zip(keys, values, strict=True))})
    return folder


def write_state(folder, log_history, step=None):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step or log_history[-1]["step"], "log_history": log_history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def record(old, sampling, mask=None, step=10, ids=None, **fields):
    """A record of completions with these probabilities, after a prompt of two tokens."""
    old, sampling = torch.tensor(old), torch.tensor(sampling)
    completion_mask = old > 0  # 0 is padding
    return MismatchRecord(
        prompt_ids=torch.tensor([[3, 4]] * len(old)),
        prompt_mask=torch.ones(len(old), 2, dtype=torch.bool),
        completion_ids=torch.tensor(ids) if ids else torch.arange(5, 5 + old.shape[1]).expand(old.shape),
        completion_mask=completion_mask,
        mask=completion_mask.clone() if mask is None else torch.tensor(mask, dtype=torch.bool),
        sampling_per_token_logps=torch.where(completion_mask, sampling.log(), 0.0),
        old_per_token_logps=torch.where(completion_mask, old.log(), 0.0),
        step=step,
        **fields,
    )


def write_records(folder, *records, tokenizer=None):
    (folder / "mismatch" / "records").mkdir(parents=True, exist_ok=True)
    for each in records:
        each.save(folder / "mismatch" / "records" / f"step-{each.step:08}-rank-{each.rank:05}.safetensors")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "mismatch" / "tokenizer")
    return folder


def page(folder, **options):
    return BeautifulSoup(render_html(load_run(folder), **options), "html.parser")


def sections(soup):
    return [section["id"] for section in soup.find_all("section")]


# What is read


def test_nothing_at_the_path_names_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No run at .*trainer_state\.json.*logs\.jsonl.*step-\*\.safetensors"):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_run(tmp_path / "nowhere")


def test_the_checkpoint_that_got_farthest_gives_the_logs(tmp_path):
    for step in (90, 100):  # by name, 90 would be the last
        write_state(tmp_path / f"checkpoint-{step}", [{"step": step, "loss": float(step)}])
    assert load_run(tmp_path).curves["loss"].values == [100.0]
    write_state(tmp_path, [{"step": 110, "loss": 110.0}])
    assert load_run(tmp_path).curves["loss"].values == [110.0]


def test_a_resumed_run_forgets_what_it_had_logged_beyond(tmp_path):
    for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):  # went on from step 1
        append_logs(tmp_path / "mismatch", {"step": step, "loss": loss})
    append_logs(tmp_path / "mismatch", {"step": 2, "eval_loss": 0.9})  # one step, two logs
    run = load_run(tmp_path)
    assert run.curves["loss"] == Curve("loss", [1, 2], [0.1, 0.25]) and run.curves["eval_loss"].values == [0.9]


def test_live_logs_add_to_those_of_the_last_checkpoint(tmp_path):
    write_state(tmp_path / "checkpoint-2", [{"step": 1, "loss": 0.1, "reward": 1.0}, {"step": 2, "loss": 0.5}])
    for step, loss in ((2, 0.5), (3, 0.6)):  # recording began at step 2
        append_logs(tmp_path / "mismatch", {"step": step, "loss": loss})
    run = load_run(tmp_path)
    assert run.curves["loss"].values == [0.1, 0.5, 0.6] and run.curves["reward"].values == [1.0]


def test_values_that_are_no_numbers_make_no_points(tmp_path):
    write_logs(tmp_path, mismatch__k3__mean=[1e-4, NAN, math.inf], note=["a", None, True])
    curves = load_run(tmp_path).curves
    assert curves[K3] == Curve(K3, [1, 3], [1e-4, math.inf]) and "note" not in curves


def test_a_metric_that_recovers_under_another_name_is_no_accident(tmp_path):
    """A run of TRL that went on with our trainer."""
    stock = [{"step": step, "sampling/sampling_logp_difference/mean": 0.2} for step in range(1, 31)]
    ours = [{"step": step, ABS_DIFF: 0.001, K3: 1e-5} for step in range(31, 91)]
    run = load_run(write_state(tmp_path, [*stock, *ours]))
    assert {event.severity for event in run.events} >= {"critical", "recovered"}
    assert run.verdict.level in ("healthy", "critical") and render_html(run)


def test_bounds_that_no_ratio_has_are_not_drawn():
    correction = {"level": "sequence", "action": "mask", "lower": -1.0, "upper": "3"}
    assert sequence_bounds(correction) == ([], "The correction has no bound on a whole completion.")


def test_names_of_logs_are_escaped_everywhere(tmp_path):
    hostile = 'mismatch/x"><b>bold</b>'
    write_logs(tmp_path, **{hostile: [0.1, 0.2], "mismatch__k3__mean": [1e-4, 1e-4]})
    assert "<b>bold" not in render_html(load_run(tmp_path))


@pytest.mark.parametrize(
    ("name", "start"), [("a.md", b"###"), ("a.json", b"{"), ("a.html", b"<!doc"), ("a.txt", b"<!doc")]
)
def test_the_suffix_of_the_file_says_the_format(tmp_path, name, start):
    write_logs(tmp_path, mismatch__k3__mean=HEALTHY)
    path = write_report(tmp_path, tmp_path / name)
    assert path.read_bytes().startswith(start)


def test_an_unreadable_file_is_said_and_the_rest_is_shown(tmp_path):
    write_logs(tmp_path, mismatch__k3__mean=HEALTHY)
    (tmp_path / "trainer_state.json").write_text("{")
    write_records(tmp_path, record([[0.5, 0.5]], [[0.5, 0.5]]))
    (tmp_path / "mismatch" / "records" / "step-00000020-rank-00000.safetensors").write_bytes(b"torn")
    run = load_run(tmp_path)
    said = " ".join(run.missing)
    assert (
        "trainer_state.json cannot be read" in said and "step-00000020-rank-00000.safetensors cannot be read" in said
    )
    assert len(run.records) == 1 and len(run.logs) == 60


def test_a_record_that_went_away_while_reading_is_said(tmp_path):
    write_logs(tmp_path, mismatch__k3__mean=HEALTHY)
    run = load_run(write_records(tmp_path, record([[0.5, 0.5]], [[0.5, 0.4]])))
    run.records[0].files[0].unlink()
    soup = BeautifulSoup(render_html(run), "html.parser")
    assert "The record of step 10 cannot be read" in soup.find(id="missing").text and "completions" not in sections(
        soup
    )


def test_ranks_are_merged_and_absent_ones_are_said(tmp_path):
    mark = {"processes": 3}
    write_records(
        tmp_path,
        record([[0.5, 0.5]], [[0.5, 0.5]], rank=0, fingerprint=mark),
        record([[0.5, 0.5, 0.5]], [[0.5, 0.5, 0.1]], rank=1, fingerprint=mark),
    )
    run = load_run(tmp_path)
    assert run.records[0].completions == 2 and run.records[0].tokens == 5 and len(run.record(10).mask) == 2
    assert "Step 10 has records of 2 of 3 processes." in run.missing


def test_first_worst_newest_and_the_one_before_the_alert_are_looked_into(tmp_path):
    one = [[0.5, 0.5]]
    k3 = {10: 1e-4, 20: 2e-4, 30: 5e-2, 40: 4e-2}
    write_records(tmp_path, *(record(one, one, step=step, metrics={K3: value}) for step, value in k3.items()))
    assert load_run(tmp_path).examined_steps == {10: "first", 30: "worst", 40: "newest"}
    write_logs(tmp_path, mismatch__k3__mean=[1e-4 + 1e-6 * (step % 3) if step < 24 else 5e-2 for step in range(1, 41)])
    run = load_run(tmp_path)
    assert 24 <= run.verdict.step <= 29
    assert run.examined_steps == {10: "first", 20: "before the alert", 30: "worst", 40: "newest"}


# What it says


def test_a_healthy_run_is_called_so(tmp_path):
    soup = page(write_logs(tmp_path, mismatch__k3__mean=HEALTHY))
    verdict = soup.find(id="verdict")
    assert "healthy" in verdict["class"] and verdict.strong.text == "Healthy"
    assert "No alert over steps 1 to 60" in verdict.text and K3 in verdict.text and "≤ 0.001" in verdict.text
    assert "alerts" not in sections(soup)


@pytest.mark.parametrize(("level", "value"), [("warning", 4e-3), ("critical", 5e-2)])
def test_a_planted_fault_is_called_by_its_severity_since_its_step(tmp_path, level, value):
    # Warning: above 1e-3, below 1e-2 and, against a baseline as high, no multiple of its past.
    before = 9.5e-4 if level == "warning" else 2e-4
    values = [before + 1e-6 * (step % 3) if step < 40 else value for step in range(1, 61)]
    run = load_run(write_logs(tmp_path, mismatch__k3__mean=values))
    verdict = BeautifulSoup(render_html(run), "html.parser").find(id="verdict")
    assert level in verdict["class"] and verdict.strong.text == level.capitalize()
    assert run.verdict.key == K3 and 40 <= run.verdict.step <= 45
    assert f"Since step {run.verdict.step}." in verdict.text and verdict.code.text == K3
    assert f"The last value is {number(value)}." in verdict.text


def test_a_run_that_recovered_is_healthy_since_then(tmp_path):
    values = [5e-2 if 40 <= step < 50 else 2e-4 + 1e-6 * (step % 3) for step in range(1, 101)]
    run = load_run(write_logs(tmp_path, mismatch__k3__mean=values))
    recovery = replay(run.logs)[-1]
    assert recovery.severity == "recovered" and (run.verdict.level, run.verdict.step) == ("healthy", recovery.step)
    assert f"Since step {recovery.step}. Before, 1 alert(s)" in run.verdict.sentence


def test_the_worst_open_alert_decides(tmp_path):
    gap = [0.019 + 1e-5 * (step % 3) if step < 30 else 0.03 for step in range(1, 61)]  # a warning, earlier
    k3 = [2e-4 + 1e-6 * (step % 3) if step < 50 else 0.5 for step in range(1, 61)]
    verdict = load_run(write_logs(tmp_path, mismatch__abs_diff__mean=gap, mismatch__k3__mean=k3)).verdict
    assert (verdict.level, verdict.key) == ("critical", K3) and verdict.step >= 50
    assert f"Also open: `{ABS_DIFF}`" in verdict.sentence


def test_few_steps_are_judged_by_the_last_value(tmp_path):
    one = [[0.5, 0.5]]
    for index, (value, level) in enumerate(((5e-4, "healthy"), (5e-3, "warning"), (5e-2, "critical"))):
        folder = write_records(tmp_path / str(index), record(one, one, metrics={K3: value}))
        assert load_run(folder).verdict.level == level
    assert "`mismatch/k3/mean` is 0.05 at step 10, healthy is ≤ 0.001" in load_run(folder).verdict.sentence


def test_without_a_measure_there_is_no_verdict(tmp_path):
    run = load_run(write_logs(tmp_path, reward=[0.1, 0.2]))
    assert run.verdict.level == "unknown" and any("needs `use_vllm=True`" in sentence for sentence in run.missing)


def test_key_numbers_are_the_last_ones_beside_their_range(tmp_path):
    soup = page(write_logs(tmp_path, mismatch__k3__mean=[2e-4, 3e-3], mismatch__ess__sequence=[0.9, 0.8]))
    tiles = {tile.dt.text: tile for tile in soup.select(".tile")}
    assert [each.text for each in tiles[K3].find_all("dd")] == ["0.003", "healthy ≤ 0.001", "began at 2e-4"]
    assert "warning" in tiles[K3]["class"] and "healthy" in tiles["mismatch/ess/sequence"]["class"]


def test_the_table_has_start_end_worst_and_how_often_outside(tmp_path):
    soup = page(write_logs(tmp_path, mismatch__k3__mean=[2e-4, 3e-3, 4e-4], mismatch__diff__mean=[0.1, -0.2, 0.3]))
    rows = {
        row.td.text: [cell.text for cell in row.find_all("td")][1:] for row in soup.select("#metric-table tbody tr")
    }
    assert rows[K3] == ["≤ 0.001", "2e-4", "4e-4", "0.003", "2", "1 of 3"]
    assert rows["mismatch/diff/mean"] == ["", "0.1", "0.3", "", "", ""]  # no range, no worst


@pytest.mark.parametrize(
    ("key", "values", "worst"),
    [
        (K3, [1e-4, 3e-4, 2e-4], (2, 3e-4)),
        ("mismatch/ess/sequence", [0.9, 0.2, 0.5], (2, 0.2)),
        ("mismatch/ratio/mean", [1.01, 0.97, 1.025], (2, 0.97)),  # .01 below .98, .005 above 1.02
        (K3, [1e-4, math.inf, 2e-4], (2, math.inf)),
    ],
)
def test_worst_is_farthest_out_of_the_healthy_range(key, values, worst):
    assert Curve(key, [1, 2, 3], values).worst == worst


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (0.0, "0"), (1.0, "1"), (0.123456, "0.123"), (0.99934, "0.9993"), (1234.5, "1234"),
        (-0.5, "−0.5"), (1.234e-5, "1.23e-5"), (-2e-7, "−2e-7"), (3e6, "3e6"), (math.inf, "∞"), (NAN, "NaN"),
    ],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_ranges_in_words():
    assert healthy_range((None, 1e-3)) == "≤ 0.001" and healthy_range((0.95, None)) == "≥ 0.95"
    assert healthy_range((0.98, 1.02)) == "0.98 … 1.02" and healthy_range((None, 0.0)) == "0"
    assert healthy_range((None, None)) == ""


# What is drawn


def plot(soup, name):
    return soup.find("svg", id=f"plot-{name}")


def heights(element):
    """The y coordinates along the path of a group."""
    return [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", element.path["d"])]


def test_the_band_ends_at_the_healthy_limit(tmp_path):
    # A curve that stands on the limit, 1e-3, draws where the band ends; above it in the picture is a smaller y.
    soup = page(write_logs(tmp_path, mismatch__k3__mean=[1e-3] * 40))
    name = "curve-mismatch-k3-mean"
    drawing = plot(soup, name)
    (curve,) = set(heights(drawing.find(id=f"{name}--curve")))
    (limit,) = set(heights(drawing.find(id=f"{name}--bound-0.001")))
    assert curve == limit == min(heights(drawing.find(id=f"{name}--healthy")))
    assert drawing.find(id=f"{name}--outside-warning") is None


def test_what_is_outside_is_marked_with_its_severity_and_its_alerts(tmp_path):
    values = [2e-4 + 1e-6 * (step % 3) if step < 40 else 5e-2 if step >= 50 else 5e-3 for step in range(1, 61)]
    run = load_run(write_logs(tmp_path, mismatch__k3__mean=values))
    drawing = plot(BeautifulSoup(render_html(run), "html.parser"), "curve-mismatch-k3-mean")
    ids = {element["id"].partition("--")[2] for element in drawing.find_all(id=True)}
    assert {"curve", "healthy", "outside-warning", "outside-critical"} <= ids
    marks = {f"alert-{event.severity}-{event.step}" for event in run.events}
    assert marks and marks == {name for name in ids if name.startswith("alert-")}


def test_an_infinite_value_is_marked(tmp_path):
    soup = page(write_logs(tmp_path, mismatch__k3__mean=[*HEALTHY, math.inf]))
    assert soup.find(id="curve-mismatch-k3-mean--infinite") and "∞" in soup.find(id="metric-table").text


def test_figures_are_text_in_the_colors_of_the_page_and_share_no_id(tmp_path):
    write_logs(tmp_path, mismatch__k3__mean=HEALTHY, mismatch__abs_diff__mean=[0.01] * 60, reward=[0.5] * 60)
    write_records(tmp_path, record([[0.5, 0.4]], [[0.4, 0.5]], weights=torch.ones(1, 2)))
    soup = page(tmp_path)
    drawings = soup.find_all("svg")
    assert len(drawings) == 3 + 4 + 1  # curves; the four looks into the record; weights
    for drawing in drawings:
        assert "var(--ink)" in str(drawing) or "var(--muted)" in str(drawing)
        assert drawing.find_all("text") and not drawing.find("style") and not re.search(r"#5a00\w\w", str(drawing))
        assert not drawing.find("image")
    ids = [element["id"] for element in soup.find_all(id=True)]
    assert len(ids) == len(set(ids))
    known = {f"#{name}" for name in ids}
    assert {use["href"] for use in soup.find_all("use")} <= known
    assert set(re.findall(r"url\((#[^)]*)\)", str(soup))) <= known


def test_both_themes_define_every_color_that_is_used(tmp_path):
    html = render_html(
        load_run(write_records(write_logs(tmp_path, mismatch__k3__mean=HEALTHY), record([[0.5]], [[0.4]])))
    )
    light, dark = (set(re.findall(r"--([\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", html))
    assert light == dark and set(re.findall(r"var\(--([\w-]+)\)", html)) <= light
    assert "prefers-color-scheme: dark" in html


def test_curves_that_must_be_zero_and_are_have_a_row_but_no_figure(tmp_path):
    write_logs(tmp_path, mismatch__k3__mean=HEALTHY, mismatch__nonfinite_count=[0.0] * 60)
    soup = page(tmp_path)
    assert plot(soup, "curve-mismatch-nonfinite_count") is None
    assert "mismatch/nonfinite_count" in soup.find(id="metric-table").text


def test_many_tokens_become_cells_and_few_stay_points(tmp_path):
    few = record([[0.5] * 10], [[0.4] * 10], step=1)
    many = record([[0.5] * 1000], [[0.4] * 1000], step=2)
    soup = page(write_records(tmp_path, few, many))
    assert soup.find(id="probabilities-1--points") and not soup.find(id="probabilities-1--density-5")
    assert soup.find(id="probabilities-2--density-5") and not soup.find(id="probabilities-2--points")


GEO = {"level": "geometric", "lower": 0.99, "upper": 1.001, "statistic": "ratio"}


@pytest.mark.parametrize(
    ("correction", "bounds"),
    [
        ({"level": "sequence", "action": "mask", "lower": None, "upper": 3.0}, [(3.0, False)]),
        ({"level": "geometric", "action": "mask", "lower": 0.99, "upper": 1.01}, [(0.99, True), (1.01, True)]),
        ({"level": "token", "action": "truncate", "lower": None, "upper": 2.0}, []),
        ({"level": "token", "action": "truncate", "upper": 2.0, "rejections": [GEO]}, [(0.99, True), (1.001, True)]),
        ({"level": "token", "action": "none", "rejections": [{**GEO, "statistic": "k3"}]}, []),
        ({"level": "sequence", "action": "mask", "upper": 3.0, "reject_rate": 0.01}, []),
        (None, []),
    ],
)
def test_bounds_on_whole_completions_are_those_of_the_fingerprint(correction, bounds):
    found, words = sequence_bounds(correction)
    assert [(bound.value, bound.per_token) for bound in found] == bounds and words


def test_a_sequence_bound_is_drawn_where_its_logarithm_is(tmp_path):
    # Ratio of one completion of two tokens: (.6 / .4) * (.8 / .4) = 3, the bound.
    correction = {"preset": "seq_mis", "level": "sequence", "action": "mask", "lower": None, "upper": 3.0}
    soup = page(write_records(tmp_path, record([[0.6, 0.8]], [[0.4, 0.4]], fingerprint={"correction": correction})))
    drawing = plot(soup, "sequences-10")
    (line,) = set(heights(drawing.find(id="sequences-10--bound-3")))
    (point,) = [float(use["y"]) for use in drawing.find(id="sequences-10--points").find_all("use")]
    assert line == pytest.approx(point, abs=0.02)  # two decimals are kept
    assert "sequence mask: 3" in soup.find(id="sequences").text


def test_shares_of_the_correction_are_the_sum_of_both_sides(tmp_path):
    names = {f"correction__masked_fraction__{side}": [share] * 3 for side, share in (("low", 0.01), ("high", 0.02))}
    names |= {f"correction__rejected_fraction__{side}": [0.0] * 3 for side in ("low", "high")}
    run = load_run(write_logs(tmp_path, **names))
    from trl_consistent.report.curve_plots import action_shares

    assert action_shares(run) == {"masked": Curve("correction/masked_fraction", [1, 2, 3], [0.03] * 3)}
    drawing = plot(BeautifulSoup(render_html(run), "html.parser"), "shares")
    assert drawing.find(id="shares--share-masked") and not drawing.find(id="shares--share-rejected")


# Completions


@pytest.fixture
def told(tmp_path, tokenizer):
    """Two completions: `five six seven eight` with every case in it, and one that was rejected."""
    ids = [[7, 8, 9, 10], [5, 6, 0, 0]]
    each = record(
        # d: ln 2 = .693; ln(1/4) = -1.386; unscored; a tool's token
        [[0.5, 0.1, 0.3, 0.9], [0.5, 0.5, 0.0, 0.0]],
        [[0.25, 0.4, NAN, 0.9], [0.5, 0.49, 0.0, 0.0]],
        mask=[[1, 1, 1, 0], [1, 1, 0, 0]],
        ids=ids,
        advantages=torch.tensor([0.5, -1.0]),
        weights=torch.tensor([[2.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]),
        keep_mask=torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool),
        fingerprint={
            "model": "tiny",
            "correction": {"preset": "icepop", "level": "token", "action": "mask", "upper": 5.0},
        },
    )
    return write_records(tmp_path, each, tokenizer=tokenizer)


def test_tokens_carry_their_color_and_their_numbers(told):
    soup = page(told)
    first, second = soup.select("article.completion")
    tokens = first.select(".t")
    assert "".join(token.text for token in tokens) == "five six seven eight"
    # Prompts take positions 0 and 1. Shades begin at .05, .3 and 1.
    assert [token["title"] for token in tokens] == [
        "p trainer 0.5, p engine 0.25, d 0.693, weight 2, position 2",
        "p trainer 0.1, p engine 0.4, d −1.39, weight 0, position 3",
        "p trainer 0.3, unscored by the engine, weight 1, position 4",
        "not written by the model, position 5",
    ]
    assert [token["class"] for token in tokens] == [
        ["t", "d2"],
        ["t", "u3", "stopped"],
        ["t", "unscored"],
        ["t", "outside-mask"],
    ]
    # ln(.5 / .49) = .0202 is below the first shade.
    assert [token["class"] for token in second.select(".t")] == [["t", "stopped"]] * 2
    assert second.select(".t")[1]["title"] == "p trainer 0.5, p engine 0.49, d 0.0202, rejected, position 3"
    assert "rejected as a whole" in second.header.text and "rejected as a whole" not in first.header.text


def test_completions_are_ordered_by_what_they_add_to_k3(told):
    run = load_run(told)
    first, second = worst_completions(run)
    # k3 = exp(d) - 1 - d: 2 - 1 - ln 2 = .3069 and 1/4 - 1 + ln 4 = .6363; the mean of the two scored tokens
    assert (first.row, second.row) == (0, 1) and first.k3 == pytest.approx((0.30685 + 0.63629) / 2, abs=1e-4)
    assert first.sequence_log_ratio == pytest.approx(math.log(2) - math.log(4), abs=1e-6) and first.advantage == 0.5


def test_a_long_completion_is_shown_around_its_worst_token(tmp_path):
    sampling = [0.5] * 1000
    sampling[600] = 0.01
    run = load_run(write_records(tmp_path, record([[0.5] * 1000], [sampling])))
    (shown,) = worst_completions(run, window=100)
    assert (shown.before, len(shown.tokens), shown.after) == (550, 100, 350) and shown.tokens[50].d == pytest.approx(
        math.log(50)
    )
    assert "[350 tokens before]" in page(tmp_path).select(".tokens")[0].text  # 500 are shown


def test_without_a_tokenizer_tokens_are_ids(tmp_path):
    soup = page(write_records(tmp_path, record([[0.5, 0.5]], [[0.4, 0.4]])))
    assert soup.select(".tokens")[0].text == "<5><6>" and "tokens are shown as ids" in soup.find(id="missing").text


def test_a_character_of_several_tokens_stands_at_the_last_of_them(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = bytewise("aé\nb")["input_ids"]
    assert len(ids) == 5  # é takes two
    soup = page(write_records(tmp_path, record([[0.5] * 5], [[0.4] * 5], ids=[ids]), tokenizer=bytewise))
    assert [token.text for token in soup.select(".tokens .t")] == ["a", "·", "é", "⏎\n", "b"]


def test_worst_tokens_are_a_table_with_weight_0_for_rejected_ones(told):
    rows = [[cell.text for cell in row.find_all("td")] for row in page(told).select("#tokens tbody tr")]
    assert rows[0] == ["fivesixseven eight", "0.1", "0.4", "−1.39", "0", "3", "0"]
    assert rows[2][4:] == ["0", "3", "1"]  # of the completion that was rejected


# Whose text it is


def test_other_peoples_text_stays_text(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    evil = "<script>alert(1)</script>", "\"><img src='http://evil.test/x' onerror=alert(1)>", "{{ 7 * 7 }}"
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(("<unk>", *evil))}, unk_token="<unk>"))
    folder = tmp_path / "run<script>alert(2)<"
    mark = {
        "model": evil[0],
        "settings": {evil[1]: evil[0], "list": [evil[1]]},
        "versions": {"torch": evil[1]},
        "correction": {"preset": evil[0], "level": evil[1], "action": evil[0], "rejections": [evil[1]]},
        "audit": [{"code": evil[0], "found": evil[1], "cost": evil[0], "remedy": evil[1], "warns": True}],
        evil[1]: {evil[0]: evil[1]},
    }
    each = record([[0.5, 0.5, 0.5]], [[0.1, 0.1, 0.1]], ids=[[1, 2, 3]], fingerprint=mark, reason=evil[0])
    write_records(folder, each, tokenizer=PreTrainedTokenizerFast(tokenizer_object=core))
    write_logs(folder, **{f"sampling/{evil[0]}": [1.0, 2.0], "mismatch__k3__mean": [1e-4, 1e-4]})
    soup = page(folder)
    assert not soup.find_all(["script", "img", "iframe", "object", "embed", "link", "base", "form"])
    for element in soup.find_all(True):
        assert not [name for name in element.attrs if name.startswith("on")]
    assert [token.text for token in soup.select(".tokens .t")][0] == evil[0]
    assert "{{ 7 * 7 }}" in soup.select(".tokens")[0].text and evil[0] in soup.find(id="settings").text
    assert soup.h1.text == folder.name


def test_the_page_loads_nothing_and_forbids_it(told):
    write_logs(told, mismatch__k3__mean=HEALTHY)
    html = render_html(load_run(told))
    soup = BeautifulSoup(html, "html.parser")
    assert soup.find("meta", {"http-equiv": "Content-Security-Policy"})["content"].startswith("default-src 'none'; ")
    for element in soup.find_all(True):
        for name in ("src", "href", "srcset", "xlink:href", "action", "data", "poster"):
            assert element.get(name, "#").startswith("#")
    assert not re.search(r"https?://|//\w|@import|url\((?!#)", html)


def test_a_live_page_runs_its_own_script_only(told):
    import base64
    import hashlib

    soup = page(told, live=True)
    (script,) = soup.find_all("script")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    policy = soup.find("meta", {"http-equiv": "Content-Security-Policy"})["content"]
    assert f"script-src 'sha256-{digest}'" in policy and "connect-src 'self'" in policy
    assert soup.find(id="live")


def test_a_large_run_makes_a_page_below_3_megabytes(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("trl_consistent.report.run.replay", lambda logs: [])  # tested elsewhere, slow here
    generator = torch.Generator().manual_seed(0)
    values = (1e-3 * torch.rand(4000, generator=generator)).tolist()
    write_state(
        tmp_path,
        [{"step": step, **dict.fromkeys(METRICS, value), "reward": value} for step, value in enumerate(values, 1)],
    )
    for step in (1, 2000, 3000, 4000):
        old = torch.rand(64, 2048, generator=generator).clamp(min=1e-3)
        sampling = (old * (1 + 0.3 * torch.randn(old.shape, generator=generator))).clamp(1e-4, 1)
        each = record(old.tolist(), sampling.tolist(), step=step, weights=sampling / old, metrics={K3: 1 / step})
        each.completion_ids = torch.randint(3, 60, old.shape, generator=generator)
        write_records(tmp_path, each, tokenizer=tokenizer)
    path = write_report(tmp_path)
    assert path.stat().st_size < 3_000_000
    soup = BeautifulSoup(path.read_text(), "html.parser")
    assert len(soup.find(id="curve-mismatch-k3-mean--curve").path["d"]) < 25_000
    assert 1000 < len(soup.select(".tokens .t")) <= 5 * 500


# What is there is shown, what is not is left out


def test_everything_is_there_in_order(told):
    mark = load_run(told).fingerprint | {
        "settings": {"learning_rate": 1e-6},
        "versions": {"trl": "1.16.0"},
        "audit": [
            {
                "code": "A1",
                "found": "heads differ",
                "cost": "noise",
                "remedy": "rollout_fp32_lm_head=True",
                "warns": True,
            }
        ],
    }
    write_records(told, record([[0.5, 0.5]], [[0.4, 0.4]], step=20, weights=torch.ones(1, 2), fingerprint=mark))
    write_logs(told, mismatch__k3__mean=[2e-4 + 1e-6 * (step % 3) if step < 40 else 5e-2 for step in range(60)])
    soup = page(told)
    assert sections(soup) == [
        "verdict", "metrics", "alerts", "probabilities", "confidence", "position", "sequences", "correction",
        "completions", "tokens", "audit", "settings",
    ]  # fmt: skip
    assert [cell.text for cell in soup.select("#audit tbody td")] == [
        "A1",
        "heads differ",
        "noise",
        "rollout_fp32_lm_head=True",
    ]
    settings = {row.th.text: row.td.text for row in soup.select("#settings tr")}
    assert settings["learning_rate"] == "1e-06" and settings["trl"] == "1.16.0" and settings["model"] == "tiny"
    assert "icepop: token mask 0 … 5." in soup.find(id="correction").text


def test_a_stock_run_shows_what_trl_logs_and_says_what_is_missing(tmp_path):
    size, ratio = "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean"
    history = [
        {"step": step, "reward": 0.5, size: 0.01 + 1e-5 * (step % 3) if step < 40 else 0.2, ratio: 1.0}
        for step in range(1, 61)
    ]
    soup = page(write_state(tmp_path, history))
    assert sections(soup) == ["verdict", "missing", "metrics", "alerts"]
    assert "critical" in soup.find(id="verdict")["class"] and size in soup.find(id="verdict").text
    drawing = plot(soup, "curve-sampling-sampling_logp_difference-mean")
    assert drawing.find(id=re.compile("--healthy$")) and drawing.find(id=re.compile("--alert-critical-"))
    assert plot(soup, "curve-sampling-importance_sampling_ratio-mean") and plot(soup, "curve-reward")
    said = soup.find(id="missing").text
    assert "only TRL's own sampling/*" in said and "ConsistentGRPOTrainer" in said and "No records" in said


def test_records_alone_give_curves_of_their_steps(tmp_path):
    one = [[0.5, 0.5]]
    write_records(tmp_path, *(record(one, one, step=step, metrics={K3: 1e-4 * step}) for step in (1, 2, 3)))
    run = load_run(tmp_path)
    assert run.curves[K3].steps == [1, 2, 3] and run.curves[K3].values == pytest.approx([1e-4, 2e-4, 3e-4])
    assert any(sentence.startswith("No logs") for sentence in run.missing)
    assert "probabilities" in sections(page(tmp_path))
    assert load_run(run.records[1].files[0]).curves[K3].steps == [2]  # a file that someone attached


def test_live_logs_alone_give_curves(tmp_path):
    soup = page(write_logs(tmp_path, mismatch__k3__mean=HEALTHY))
    assert sections(soup) == ["verdict", "missing", "metrics"] and "No records" in soup.find(id="missing").text


def test_a_fingerprint_with_nothing_in_it_is_fine(tmp_path):
    soup = page(write_records(tmp_path, record([[0.5, 0.5]], [[0.4, 0.4]], fingerprint={})))
    assert "settings" not in sections(soup) and "No correction was in force" in soup.find(id="sequences").text


@pytest.fixture
def no_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_without_matplotlib_there_are_numbers(told, no_matplotlib):
    write_logs(told, mismatch__k3__mean=HEALTHY)
    soup = page(told)
    assert not soup.find("svg") and "pip install 'trl-consistent[report]'" in soup.find(id="missing").text
    assert soup.find(id="metric-table").find_parent("details").has_attr("open")
    assert {"metrics", "completions", "tokens", "settings"} <= set(sections(soup))
    with pytest.raises(ImportError, match=r"pip install 'trl-consistent\[report\]'"):
        write_report(told, format="png")
    assert not list(told.glob("report.png*"))


# Files


def test_a_report_is_written_beside_the_run_or_where_asked(told, tmp_path):
    assert write_report(told) == told / "report.html"
    elsewhere = tmp_path / "new" / "page.html"
    assert write_report(told, elsewhere) == elsewhere and elsewhere.read_text().startswith("<!doctype html>")
    (file,) = (told / "mismatch" / "records").iterdir()
    assert write_report(file, format="md") == file.parent / "report.md"


def test_json_is_the_data(told):
    write_logs(told, mismatch__k3__mean=[*HEALTHY, math.inf])
    path = write_report(told, format="json")
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["curves"][K3]["values"] == [*HEALTHY, "Infinity"] and data["curves"][K3]["steps"] == list(range(1, 62))
    assert data["verdict"]["level"] == "healthy" and data["fingerprint"]["model"] == "tiny"
    assert data["records"][0]["step"] == 10 and data["records"][0]["tokens"] == 5
    assert data["worst_tokens"][0]["d"] == pytest.approx(-math.log(4)) and data["worst_tokens"][0]["token"] == "six"


def test_md_is_a_summary_that_breaks_no_table(told):
    mark = {"settings": {"a|b": "x|`y`"}, "audit": [{"code": "A1", "found": "a|b <b>", "cost": "", "remedy": "c"}]}
    write_records(told, record([[0.5, 0.5]], [[0.4, 0.4]], step=20, fingerprint=mark))
    write_logs(told, mismatch__k3__mean=HEALTHY)
    text = write_report(told, format="md").read_text()
    assert (
        text.startswith(f"### {told.name}: healthy\n") and f"| `{K3}` | 2e-4 | 2.02e-4 | 2.02e-4 | ≤ 0.001 |" in text
    )
    assert "| A1 | a&#124;b &#60;b> |  | c |" in text and "| settings | `a\\|b` | `` x\\|`y` `` |" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def test_png_is_one_picture(told):
    from PIL import Image

    path = write_report(write_logs(told, mismatch__k3__mean=HEALTHY), format="png")
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width == 1920  # 12 inches at 160 dots each


def test_a_report_is_there_whole_or_as_it_was(told, monkeypatch):
    path = told / "report.html"
    path.write_text("before")

    def full(self, content):
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_report(told)
    assert path.read_text() == "before" and sorted(file.name for file in told.iterdir()) == ["mismatch", "report.html"]


def test_an_unknown_format_is_refused(told):
    with pytest.raises(ValueError, match="`format` is 'pdf'; choose one of html, png, json, md"):
        write_report(told, format="pdf")


def test_the_command_writes_and_says_where(told, capsys):
    assert cli.main(["report", str(told), "--format", "md", "-o", str(told / "summary.md")]) == 0
    assert capsys.readouterr().out.strip() == str(told / "summary.md") and (told / "summary.md").exists()


def test_the_command_refuses_a_bad_path_in_one_line(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-consistent: No run at ") and error.count("\n") == 1


@pytest.mark.parametrize("name", ["template.html", "notice.html", "live.js"])
def test_what_a_page_is_made_of_is_in_the_package(name):
    from importlib.resources import files

    assert files("trl_consistent.report").joinpath(name).is_file()


# The callback


@pytest.mark.parametrize("trainer", [GRPOTrainer, ConsistentGRPOTrainer])
def test_the_callback_keeps_logs_and_writes_the_report_at_the_end(trainer, tiny_model, tmp_path):
    with synthetic_engine():
        trained = build(trainer, tiny_model, tmp_path, callbacks=[MismatchReportCallback()])
        trained.train()
    folder = tmp_path / trainer.__name__
    assert [entry["step"] for entry in read_logs(folder / "mismatch") if "loss" in entry] == [1, 2, 3]
    soup = BeautifulSoup((folder / "report.html").read_text(), "html.parser")
    key = ABS_DIFF if trainer is ConsistentGRPOTrainer else "sampling/sampling_logp_difference/mean"
    assert key in soup.find(id="metric-table").text
    assert ("completions" in sections(soup)) == (trainer is ConsistentGRPOTrainer)


FAILS = """
import sys
from pathlib import Path
from trl import GRPOTrainer
from trl_consistent import MismatchReportCallback
from tests import short_training as training
model, output = sys.argv[1:]
calls = []
def reward(completions, **kwargs):
    calls.append(1)
    if len(calls) == 3:
        raise KeyError("from the reward")
    return [1.0] * len(completions)
training.letters_reward = reward
with training.synthetic_engine():
    training.build(GRPOTrainer, model, Path(output), callbacks=[MismatchReportCallback()]).train()
"""


def test_a_training_that_fails_leaves_its_report_and_its_exception(tiny_model, tmp_path):
    command = [sys.executable, "-c", FAILS, tiny_model, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=fresh_environment())
    assert done.returncode == 1 and "KeyError: 'from the reward'" in done.stderr
    soup = BeautifulSoup((tmp_path / "GRPOTrainer" / "report.html").read_text(), "html.parser")
    assert soup.find("svg") and "sampling/sampling_logp_difference/mean" in soup.find(id="metric-table").text
    assert "Exception ignored" not in done.stderr and "could not be written" not in done.stderr


class _State:
    global_step, epoch, is_world_process_zero = 1, 0.5, True


class _Args:
    def __init__(self, output_dir):
        self.output_dir = str(output_dir)


def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, caplog):
    callback, args, state = MismatchReportCallback(), _Args(tmp_path), _State()
    callback.on_train_begin(args, state, None)
    (tmp_path / "mismatch").write_text("a file in the way")
    for _ in range(3):
        callback.on_log(args, state, None, logs={"loss": 0.1})
    callback.on_train_end(args, state, None)
    assert [message.levelname for message in caplog.records] == ["ERROR"]
    assert "training continues without the report of this run" in caplog.text


def test_a_report_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, caplog):
    callback, args, state = MismatchReportCallback(), _Args(tmp_path), _State()
    callback.on_train_begin(args, state, None)
    callback.on_log(args, state, None, logs={"loss": 0.1})
    (tmp_path / "report.html").mkdir()
    callback.on_train_end(args, state, None)
    callback.on_train_end(args, state, None)
    assert [message.levelname for message in caplog.records] == ["ERROR"] and "could not be written" in caplog.text


def test_the_logs_of_an_earlier_run_are_set_aside(tmp_path):
    write_logs(tmp_path, loss=[9.0] * 5)
    callback, args, state = MismatchReportCallback(), _Args(tmp_path), _State()
    state.global_step = 0
    callback.on_train_begin(args, state, None)
    state.global_step = 1
    callback.on_log(args, state, None, logs={"loss": 0.1})
    callback.on_train_end(args, state, None)
    assert load_run(tmp_path).curves["loss"].values == [0.1] and len(read_logs(tmp_path / "mismatch.old")) == 5


def test_only_the_main_process_writes_and_only_once(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(report_callback.atexit, "register", at_exit.append)
    monkeypatch.setattr(report_callback.atexit, "unregister", lambda call: call in at_exit and at_exit.remove(call))
    callback, args, state = MismatchReportCallback(), _Args(tmp_path), _State()
    state.is_world_process_zero = False
    for event in (callback.on_train_begin, callback.on_log, callback.on_train_end):
        event(args, state, None, logs={"loss": 0.1})
    assert not list(tmp_path.iterdir()) and not at_exit
    state.is_world_process_zero = True
    callback.on_train_begin(args, state, None)
    callback.on_log(args, state, None, logs={"loss": 0.1})
    assert len(at_exit) == 1
    callback.on_train_end(args, state, None)
    assert callback.finish not in at_exit and (tmp_path / "report.html").exists()  # matplotlib may have registered
    (tmp_path / "report.html").unlink()
    callback.on_train_end(args, state, None)
    assert not (tmp_path / "report.html").exists()
    callback.on_train_begin(args, state, None)
    assert callback.write(tmp_path) and callback.finish not in at_exit  # what a trainer calls when training fails


def test_write_gives_the_path_or_none(told, tmp_path, caplog):
    assert MismatchReportCallback().write(told) == told / "report.html"
    assert MismatchReportCallback().write(tmp_path / "nowhere") is None and "No run at" in caplog.text


def test_a_failing_writer_does_not_mask_what_went_wrong(told, monkeypatch, caplog):
    monkeypatch.setitem(write_module.FORMATS, "html", lambda run: 1 / 0)
    assert MismatchReportCallback().write(told) is None and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("steps", [0, 50])
def test_our_trainer_leaves_a_report_when_it_fails_and_each_log_once(tiny_model, tmp_path, steps):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyError("from a callback")

    with synthetic_engine():
        trainer = build(
            ConsistentGRPOTrainer, tiny_model, tmp_path, callbacks=[MismatchReportCallback(), Fails()],
            mismatch_record_steps=steps,
        )  # fmt: skip
        with pytest.raises(KeyError, match="from a callback"):
            trainer.train()
    output = tmp_path / "ConsistentGRPOTrainer"
    soup = BeautifulSoup((output / "report.html").read_text(), "html.parser")
    assert "mismatch/k3/mean" in soup.find(id="metric-table").text
    assert [log["step"] for log in read_logs(output / "mismatch")] == [1, 2]
