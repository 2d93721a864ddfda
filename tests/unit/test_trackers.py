# SPDX-License-Identifier: Apache-2.0
"""Real event files of TensorBoard, a real local database of trackio; W&B, which is not installed, is a stand-in."""

import json
import logging
import sqlite3
import types

import markdown
import pytest
import torch
from bs4 import BeautifulSoup
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from trl_consistent import ConsistentGRPOTrainer
from trl_consistent.metrics.measure import histograms, mismatch_metrics
from trl_consistent.records.tokens import TokenGap
from trl_consistent.statistics import Histogram, merge
from trl_consistent.training.trackers import log_histograms, log_worst_tokens

from .. import inside
from ..short_training import build, noise, synthetic_engine


# 3 values in the bin around 0, then none, then 5 from 2^-16 to 1.5 * 2^-16 on the other side
COUNTED = Histogram(
    edges=[-2.0, -1.5, -1.0, 1.0, 1.5, 2.0, 3.0],
    counts=[0, 1, 3, 0, 5, 0],
)
GAPS = [
    TokenGap(7, 2, 5, 9, 41, "a | b\n", " <img src=x>", " *c* [d](http://e)", 0.25, 0.5, -0.6931472, 0.5),
    TokenGap(7, 0, 1, 5, 42, "", "\x00é", "", 1.0, 1.0, 0.0, None),
]


class Told(TrainerCallback):
    """Sends the table when a step was logged, as for a record."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            log_worst_tokens(self.trainer.callback_handler.callbacks, GAPS, state.global_step)


def trained(model, tmp_path, **options):
    """Three steps, with the statistics that each log is made of."""
    told = Told()
    with synthetic_engine(noise(0.05)):
        trainer = build(
            ConsistentGRPOTrainer, model, tmp_path, callbacks=[told], mismatch_record_steps=0, **options
        )  # so that the only table is ours
        told.trainer, windows, log = trainer, [], trainer.log

        def seen(logs, start_time=None):
            windows.append(inside.window(trainer))
            log(logs, start_time)

        trainer.log = seen
        trainer.train()
    return trainer, [window for window in windows if window]


def events(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"histograms": 0, "tensors": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture
def board(tmp_path):
    """A callback of TensorBoard with a writer, and what it wrote."""
    callback = TensorBoardCallback(SummaryWriter(str(tmp_path / "board")))
    yield callback, lambda: events(tmp_path / "board")
    callback.tb_writer.close()


def test_tensorboard_gets_numbers_histograms_and_a_table_at_the_same_steps(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    _, windows = trained(tiny_model, tmp_path, report_to=["tensorboard"])
    read = events(tmp_path / "board")
    means = {event.step: event.value for event in read.Scalars("train/mismatch/diff/mean")}
    assert sorted(means) == [1, 2, 3] and len(windows) == 3
    written = {event.step: event.histogram_value for event in read.Histograms("train/mismatch/diff")}
    assert sorted(written) == [1, 2, 3]
    for step, window in enumerate(windows, 1):
        value = written[step]
        assert value.num == sum(value.bucket) == window["scored"].value.item() > 0
        # the mean of the bins' middles: off by half the widest bin that holds noise of .05, which ends at .25
        assert value.sum / value.num == pytest.approx(means[step], abs=0.0625 / 2)
        assert value.bucket[0] > 0 and value.bucket[-1] > 0 and value.max < 1
    completions = [event.histogram_value.num for event in read.Histograms("train/mismatch/log_sequence_ratio")]
    assert completions == [8, 8, 8]  # 4 per device, 2 micro-batches
    [text] = read.Tensors("train/mismatch/worst_tokens/text_summary")
    assert text.step == 2


def test_without_a_tracker_no_histogram_and_no_table_is_made(tiny_model, tmp_path, monkeypatch):
    def made(*args, **kwargs):
        raise AssertionError("for nobody")

    for place in ("trainer.histograms", "recorder.worst_tokens"):
        monkeypatch.setattr(f"trl_consistent.training.{place}", made)
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=1)
        trainer.train()
    assert len(trainer.state.log_history) == 2
    with synthetic_engine(), pytest.raises(AssertionError, match="for nobody"):
        build(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=1, report_to="tensorboard").train()


def test_a_tracker_that_changed_inside_stops_nothing(tiny_model, tmp_path, monkeypatch, caplog):
    def changed(callback):
        raise AttributeError("_next_step")

    monkeypatch.setattr("trl_consistent.training.trackers.tracker_of", changed)
    trainer, _ = trained(tiny_model, tmp_path)
    assert trainer.state.global_step == 3 and "training continues" in caplog.text


def test_an_evaluation_has_its_own_histograms(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    rows = [{"prompt": "one two"}] * 8
    inputs = {"eval_dataset": Dataset.from_list(rows)}
    trained(
        tiny_model, tmp_path, report_to=["tensorboard"], inputs=inputs, eval_strategy="steps", eval_steps=3,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    read = events(tmp_path / "board")
    [evaluated] = read.Histograms("eval/mismatch/diff")
    assert evaluated.step == 3 == read.Scalars("eval/mismatch/diff/mean")[0].step
    assert [event.step for event in read.Histograms("train/mismatch/diff")] == [1, 2, 3]


def test_a_histogram_arrives_as_it_was_counted(board):
    callback, read = board
    log_histograms([callback], {"mismatch/diff": COUNTED}, 4)
    [event] = read().Histograms("train/mismatch/diff")
    value = event.histogram_value
    # without the empty ends: -1.5 to 2; middles -1.25, 0, 1.25, 1.75
    assert (event.step, value.min, value.max, value.num) == (4, -1.5, 2.0, 9)
    assert (value.bucket_limit, value.bucket) == ([-1.0, 1.0, 1.5, 2.0], [1, 3, 0, 5])
    assert (value.sum, value.sum_squares) == (-1.25 + 5 * 1.75, 1.25**2 + 5 * 1.75**2)


def test_the_table_shows_the_token_in_its_context_and_lets_no_markup_through(board):
    callback, read = board
    log_worst_tokens([callback], GAPS, 7)
    [event] = read().Tensors("train/mismatch/worst_tokens/text_summary")
    # as TensorBoard makes HTML of it, before it removes what it deems unsafe
    html = markdown.markdown(event.tensor_proto.string_val[0].decode(), extensions=["tables", "fenced_code"])
    page = BeautifulSoup(html, "html.parser")
    rows = [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in page.find_all("tr")]
    assert rows == [
        ["step", "completion", "index", "context", "p_train", "p_rollout", "d", "weight"],
        ["7", "2", "5", "a | b\\n⟦ <img src=x>⟧ *c* [d](http://e)", "0.25", "0.5", "-0.6931", "0.5"],
        ["7", "0", "1", "⟦\\x00é⟧", "1", "1", "0", ""],
    ]
    assert not page.find_all(["img", "a", "em"])


def test_trackio_gets_numbers_histograms_and_a_table_in_its_own_database(tiny_model, tmp_path, monkeypatch):
    import trackio.sqlite_storage

    # the environment is read at import, and TRL imports it
    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    _, windows = trained(
        tiny_model,
        tmp_path,
        report_to=["trackio"],
        project="ours",
        trackio_space_id=None,
        trackio_static_space_id=False,
    )
    with sqlite3.connect(tmp_path / "trackio" / "ours.db") as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
    database.close()
    scalars = [(step, row) for step, row in rows if "train/mismatch/diff/mean" in row]
    counted = [(step, row) for step, row in rows if "train/mismatch/diff" in row]
    assert [step for step, _ in scalars] == [step for step, _ in counted] == [1, 2, 3]
    for (_, scalar), (_, row), window in zip(scalars, counted, windows, strict=True):
        assert row["train/global_step"] == scalar["train/global_step"]
        value = row["train/mismatch/diff"]
        assert value["_type"] == "trackio.histogram" and len(value["bins"]) == len(value["values"]) + 1
        assert sum(value["values"]) == window["scored"].value.item()
    [(step, table)] = [(step, row) for step, row in rows if "train/mismatch/worst_tokens" in row]
    assert (step, table["train/global_step"]) == (1, 2)  # told before the numbers of step 2, which it must not shift
    first, second = table["train/mismatch/worst_tokens"]["_value"]
    assert first == {
        "step": 7, "completion": 2, "index": 5, "context": "a | b\\n⟦ <img src=x>⟧ *c* [d](http://e)",
        "p_train": 0.25, "p_rollout": 0.5, "d": -0.6931472, "weight": 0.5,
    }  # fmt: skip
    assert second["weight"] is None


def wandb_callback(run=True):
    """W&B as transformers holds it, and what was logged."""
    logged = []
    module = types.SimpleNamespace(
        run=run or None,
        Histogram=lambda np_histogram: ("histogram", np_histogram),
        Table=lambda columns, data: ("table", columns, data),
        log=lambda values, step: logged.append((values, step)),
    )
    callback = WandbCallback.__new__(WandbCallback)
    callback._wandb = module
    return callback, logged


def test_wandb_gets_a_row_with_the_step_that_its_charts_are_over():
    callback, logged = wandb_callback()
    log_histograms([callback], {"mismatch/diff": COUNTED}, 4)
    log_worst_tokens([callback], GAPS[1:], 4)
    histogram = ("histogram", ([1, 3, 0, 5], [-1.5, -1.0, 1.0, 1.5, 2.0]))
    columns = ["step", "completion", "index", "context", "p_train", "p_rollout", "d", "weight"]
    table = ("table", columns, [[7, 0, 1, "⟦\\x00é⟧", 1.0, 1.0, 0.0, None]])
    assert logged == [
        ({"train/mismatch/diff": histogram, "train/global_step": 4}, None),
        ({"train/mismatch/worst_tokens": table, "train/global_step": 4}, None),
    ]


def test_trackers_that_have_not_started_and_others_are_left_alone(caplog):
    without_run, logged = wandb_callback(run=False)
    callbacks = [without_run, TensorBoardCallback(), TrackioCallback(), TrainerCallback()]
    log_histograms(callbacks, {"mismatch/diff": COUNTED}, 1)
    log_worst_tokens(callbacks, GAPS, 1)
    assert logged == [] and not caplog.records


def test_nothing_counted_is_not_sent(board):
    callback, logged = wandb_callback()
    log_histograms([callback, board[0]], {}, 1)
    log_worst_tokens([callback, board[0]], [], 1)
    assert logged == [] and not board[1]().Tags()["histograms"]


def test_a_tracker_that_raises_is_reported_once_and_training_goes_on(tiny_model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    calls = []

    def full(*args):
        calls.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_histogram_raw", full)
    with caplog.at_level(logging.WARNING, "trl_consistent.training.trackers"):
        trainer, windows = trained(tiny_model, tmp_path, report_to=["tensorboard"])
    assert trainer.state.global_step == 3 and len(windows) == 3 and len(calls) == 1
    [record] = [each for each in caplog.records if each.name == "trl_consistent.training.trackers"]
    assert "TensorBoardCallback failed to take train/mismatch/diff" in record.getMessage()
    assert "at step 1 (OSError(28, 'No space left on device'))" in record.getMessage()
    read = events(tmp_path / "board")
    assert len(read.Scalars("train/mismatch/diff/mean")) == 3
    assert "train/mismatch/worst_tokens/text_summary" not in read.Tags()["tensors"]
    # the tracker of another run is asked again
    log_histograms([TensorBoardCallback(SummaryWriter(str(tmp_path / "next")))], {"mismatch/diff": COUNTED}, 1)
    assert len(calls) == 2


def test_a_tracker_that_raises_does_not_take_another_with_it():
    broken, _ = wandb_callback()
    broken._wandb.log = None
    callback, logged = wandb_callback()
    for step in (1, 2):
        log_histograms([broken, callback], {"mismatch/diff": COUNTED}, step)
    assert [values["train/global_step"] for values, _ in logged] == [1, 2]


def test_two_ranks_arrive_as_one_histogram(board):
    # d: rank 0 has .2 and -.2, rank 1 has .2 and 1.2; a completion each, sums 0 (of floats: about 1e-8) and 1.4
    callback, read = board
    ranks = [torch.tensor([[0.2, -0.2]]), torch.tensor([[0.2, 1.2]])]
    merged = merge(mismatch_metrics(d - 1, torch.full_like(d, -1.0), torch.ones_like(d)) for d in ranks)
    log_histograms([callback], histograms(merged), 1)
    [tokens], [completions] = (read().Histograms(f"train/mismatch/{key}") for key in ("diff", "log_sequence_ratio"))
    value = tokens.histogram_value
    filled = {limit: n for limit, n in zip(value.bucket_limit, value.bucket, strict=True) if n}
    assert filled == {-0.1875: 1, 0.25: 2, 1.5: 1} and value.num == 4
    value = completions.histogram_value
    assert {limit: n for limit, n in zip(value.bucket_limit, value.bucket, strict=True) if n} == {2.0**-16: 1, 1.5: 1}
