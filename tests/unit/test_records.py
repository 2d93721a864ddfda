# SPDX-License-Identifier: Apache-2.0
"""Records: what a trainer writes, that a file is whole or not there, and what is read back."""

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trl import GRPOTrainer

from trl_consistent import ConsistentGRPOTrainer, MismatchAlertCallback, MismatchReportCallback
from trl_consistent.compare.replay import replay
from trl_consistent.records.folder import readable, set_aside
from trl_consistent.records.header import read_header
from trl_consistent.records.logs import append_logs, read_logs, run_logs
from trl_consistent.records.record import MismatchRecord, merge_ranks
from trl_consistent.records.store import RecordStore, read_records, record_files
from trl_consistent.records.tokens import load_tokenizer, worst_tokens

from ..processes import fresh_environment
from ..recorded import record
from ..short_training import assert_same_training, build, noise, synthetic_engine, train


ROOT = Path(__file__).parents[2]


# --- one file --------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_read(tmp_path):
    sampling = torch.tensor([[-1.5, float("nan"), -0.25], [-2.0, -3.0, 0.0]])
    saved = record(
        step=7,
        sampling_per_token_logps=sampling,
        advantages=torch.tensor([0.5, -0.5]),
        weights=torch.tensor([[1.0, 2.0, 1.0], [0.5, 1.0, 1.0]]),
        keep_mask=torch.tensor([[True, False, True], [True, True, False]]),
        reason="periodic; alert",
    )
    saved.save(tmp_path / "a.safetensors")
    loaded = MismatchRecord.load(tmp_path / "a.safetensors")
    assert (loaded.step, loaded.rank, loaded.reason, loaded.fingerprint) == (
        7,
        0,
        "periodic; alert",
        {"model": "tiny"},
    )
    assert loaded.ref_per_token_logps is None
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "mask", "advantages", "weights", "keep_mask"):
        assert torch.equal(getattr(loaded, name), getattr(saved, name).to(getattr(loaded, name).dtype)), name
    assert torch.equal(loaded.sampling_per_token_logps.nan_to_num(9.0), sampling.nan_to_num(9.0))


def test_columns_that_are_padding_in_every_row_are_not_stored(tmp_path):
    wide = record()
    for name in ("completion_ids", "completion_mask", "mask", "sampling_per_token_logps", "old_per_token_logps"):
        setattr(wide, name, torch.nn.functional.pad(getattr(wide, name), (0, 5)))
    for name in ("prompt_ids", "prompt_mask"):
        setattr(wide, name, torch.nn.functional.pad(getattr(wide, name), (4, 0)))
    wide.save(tmp_path / "a.safetensors")
    loaded = MismatchRecord.load(tmp_path / "a.safetensors")
    assert loaded.completion_ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded.prompt_ids.tolist() == [[0, 7], [5, 6]]


def test_the_header_is_one_line_of_json_with_the_metrics(tmp_path):
    record(step=3, gap=0.5).save(tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    assert (header["step"], header["completions"], header["tokens"]) == (3, 2, 5)
    # two of the five tokens are off by 0.5
    assert header["metrics"]["mismatch/abs_diff/mean"] == pytest.approx(0.2)
    assert "\n" not in json.dumps(header)


def test_positions_count_tokens_only():
    # row 0: one prompt token, so that the completion begins at 1; row 1: two
    tool_gap = torch.tensor([[1, 1, 1], [1, 0, 1]])
    assert record(completion_mask=tool_gap).position_ids.tolist() == [[1, 2, 3], [2, 2, 3]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no tensors here", "is not a mismatch record"),
        (b"", "is not a mismatch record"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path, content, message):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"a.safetensors {message}"):
        MismatchRecord.load(tmp_path / "a.safetensors")


def test_safetensors_of_another_kind_newer_formats_and_missing_tensors_are_named(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="is a safetensors file, but not a mismatch record"):
        MismatchRecord.load(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"mismatch_record": json.dumps({"format": 99})})
    with pytest.raises(ValueError, match="newer version .format 99.*upgrade"):
        MismatchRecord.load(path)
    save_file({"mask": torch.zeros(2)}, path, metadata={"mismatch_record": json.dumps({"format": 1})})
    with pytest.raises(ValueError, match="its header lacks completions, fingerprint, metrics"):
        MismatchRecord.load(path)
    header = dict.fromkeys(("step", "rank", "completions", "tokens"), 1) | {
        "metrics": {},
        "fingerprint": {},
        "reason": "",
    }
    save_file({"mask": torch.zeros(2)}, path, metadata={"mismatch_record": json.dumps({"format": 1, **header})})
    with pytest.raises(ValueError, match="lacks completion_ids, completion_mask, old_per_token_logps, prompt_ids"):
        MismatchRecord.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", '"><a href="http://e">x</a>'), ("step", -1), ("step", True), ("rank", "0"), ("reason", 3), ("metrics", []),
        ("metrics", {"mismatch/k3/mean": "high"}), ("fingerprint", "x"), ("completions", 0.5), ("fingerprint", {"audit": ["x"]}),
        ("fingerprint", {"correction": "tis"}),
    ],
)  # fmt: skip
def test_a_header_that_holds_something_else_is_refused(tmp_path, name, value):
    path = tmp_path / "a.safetensors"
    record().save(path)
    header = {**read_header(path), name: value}
    save_file(load_file(path), path, {"mismatch_record": json.dumps(header)})
    with pytest.raises(ValueError, match=f"a.safetensors is not a mismatch record.*{name}"):
        read_header(path)


def test_tensors_of_a_later_version_are_left_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    record().save(path)
    header = read_header(path)
    save_file({**load_file(path), "topk_ids_BTLK": torch.zeros(1)}, path, {"mismatch_record": json.dumps(header)})
    assert MismatchRecord.load(path).step == 1


# --- whole or not there ----------------------------------------------------------------------------------------------


WRITER = """
import sys
from tests.recorded import record
from trl_consistent.records.store import RecordStore
store = RecordStore(sys.argv[1], 1000, 10**9)
print("ready", flush=True)
for step in range(1, 100000):
    store.write(record(step, rows=200, width=100))
"""


def test_kill_9_while_records_are_written_loses_nothing_that_was_whole(tmp_path):
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE, env=fresh_environment(), cwd=ROOT
        )
        assert writer.stdout.readline() == b"ready\n"
        while not folder.exists() or len(list(folder.glob("*.safetensors"))) < 5:
            time.sleep(0.01)
        time.sleep(0.007 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        steps = [MismatchRecord.load(file).step for file in record_files(folder)]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 5


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_a_run_killed_within_a_write_leaves_the_earlier_records_and_the_next_run_cleans_up(tmp_path, moment):
    """At a moment chosen by the test: after half the bytes, and after all of them but before they have their name."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.recorded import record\n"
        "from trl_consistent.records import record as records\n"
        "from trl_consistent.records.store import RecordStore\n"
        "store = RecordStore(sys.argv[1], 10, 10**9)\n"
        "store.write(record(1, gap=0.5))\n"
        "def die(*a, **k): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def half(tensors, path, **k):\n"
        "    Path(path).write_bytes(b'half'); die()\n"
        "if sys.argv[2] == 'write': records.save_file = half\n"
        "else: Path.replace = die\n"
        "store.write(record(1, gap=0.25))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path, moment], env=fresh_environment(), cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.partial"))) == 1
    (file,) = record_files(tmp_path)
    assert MismatchRecord.load(file).mismatch_log_ratio[0, 0] == 0.5
    RecordStore(tmp_path, 10, 10**9).write(record(2))
    assert not list(tmp_path.glob("*.partial")) and len(record_files(tmp_path)) == 2


def test_a_write_that_fails_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch):
    store = RecordStore(tmp_path, 10, 10**9)
    store.write(record(1, gap=0.5))

    def full(tensors, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trl_consistent.records.record.save_file", full)
    with pytest.raises(OSError, match="No space"):
        store.write(record(1))
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000001-rank-00000.safetensors"]
    assert read_records(tmp_path)[0].mismatch_log_ratio[0, 0] == 0.5


# --- the limits ------------------------------------------------------------------------------------------------------


def steps_in(folder):
    return [MismatchRecord.load(file).step for file in record_files(folder)]


def test_the_newest_half_is_kept_and_the_worst_of_the_older_ones(tmp_path):
    store = RecordStore(tmp_path, 4, 10**9)
    for step, gap in enumerate([0.1, 2.0, 0.2, 1.0, 0.3, 0.0, 0.0, 0.0], start=1):
        store.write(record(step, gap))
    # 2 and 4 are the worst, 7 and 8 the newest
    assert steps_in(tmp_path) == [2, 4, 7, 8]


def test_what_was_just_written_is_not_what_is_removed(tmp_path):
    store = RecordStore(tmp_path, 2, 10**9)
    for step, gap in ((50, 1.0), (60, 2.0), (10, 0.0)):  # a run that went back
        store.write(record(step, gap))
    assert steps_in(tmp_path) == [10, 60]


def test_records_beyond_the_step_a_run_goes_on_from_are_forgotten(tmp_path):
    for rank in (0, 1, 2):
        for step in (1, 5, 9):
            RecordStore(tmp_path, 9, 10**9, rank).write(record(step, rank=rank))
    RecordStore(tmp_path, 9, 10**9, 0).forget(after=5, ranks=2)
    left = [file.name.removesuffix(".safetensors") for file in record_files(tmp_path)]
    # rank 0 removes its own, and those of the third rank, which is no more; not those of rank 1
    assert left == [f"step-{step:08}-rank-{rank:05}" for step, rank in (
        (1, 0), (1, 1), (1, 2), (5, 0), (5, 1), (5, 2), (9, 1),
    )]  # fmt: skip


def test_an_infinite_ratio_is_worse_than_any_k3(tmp_path):
    store = RecordStore(tmp_path, 2, 10**9)
    for step, metrics in enumerate([{"mismatch/nonfinite_count": 1.0}, {"mismatch/k3/mean": 9.0}, {}, {}], start=1):
        store.write(record(step, metrics={"mismatch/k3/mean": 0.1, **metrics}))
    assert steps_in(tmp_path) == [1, 4]


def test_the_newest_alone_is_kept_with_a_limit_of_one(tmp_path):
    store = RecordStore(tmp_path, 1, 10**9)
    for step, gap in ((1, 2.0), (2, 0.0)):
        store.write(record(step, gap))
    assert steps_in(tmp_path) == [2]


def test_bytes_are_limited_too_and_ranks_do_not_count_each_other(tmp_path):
    other = RecordStore(tmp_path, 100, 10**9, rank=1)
    other.write(record(1, rank=1))
    size = record_files(tmp_path)[0].stat().st_size
    store = RecordStore(tmp_path, 100, int(3.5 * size))
    for step in range(1, 10):
        store.write(record(step))
    assert len(list(tmp_path.glob("*rank-00000*"))) == 3
    assert len(list(tmp_path.glob("*rank-00001*"))) == 1


def test_a_batch_larger_than_the_limit_is_cut_to_its_worst_completions(tmp_path):
    batch = record(rows=8)
    batch.sampling_per_token_logps[5, 0] -= 3.0
    batch.sampling_per_token_logps[2, 0] -= 2.0
    RecordStore(tmp_path, 10, batch.nbytes // 4).write(batch)
    (kept,) = read_records(tmp_path)
    # of 8 equal rows, two fit into a quarter
    assert kept.mismatch_log_ratio[:, 0].tolist() == [2.0, 3.0] and kept.cut_from == 8
    RecordStore(tmp_path, 10, 10**9, rank=1).write(record(rows=3, rank=1))
    (both,) = read_records(tmp_path)
    assert len(both.mask) == 5 and both.cut_from == 11
    (note,) = [note for note in replay([tmp_path], ["none"]).notes if "only the worst" in note]
    assert note.startswith("Of 1 steps (the first: 1)")


def test_ranks_are_evicted_by_the_metrics_of_the_whole_batch(tmp_path):
    """Else each would keep other steps than the others."""
    for rank, gaps in enumerate(([0.1, 2.0, 0.0, 0.0], [2.0, 0.1, 0.0, 0.0])):
        store = RecordStore(tmp_path, 3, 10**9, rank)
        for step, gap in enumerate(gaps, start=1):
            whole = {"mismatch/k3/mean": 0.5 if step == 1 else 0.1}
            store.write(record(step, gap, metrics=whole))
    assert steps_in(tmp_path) == [1, 1, 3, 3, 4, 4]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_ranks_of_a_step_are_merged_and_padded(tmp_path):
    RecordStore(tmp_path, 9, 10**9, 0).write(record(5, gap=0.5, reason="periodic"))
    wider = record(5, rank=1, width=4, reason="periodic; k3", prompt_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]),
                   prompt_mask=torch.ones(2, 3), completion_mask=torch.ones(2, 4))  # fmt: skip
    RecordStore(tmp_path, 9, 10**9, 1).write(wider)
    (merged,) = read_records(tmp_path)
    assert (merged.step, merged.rank, merged.reason) == (5, None, "periodic; k3")
    assert merged.prompt_ids.tolist() == [[0, 0, 7], [0, 5, 6], [1, 2, 3], [4, 5, 6]]
    assert merged.prompt_mask.tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert merged.mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert merged.mismatch_log_ratio[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0]


def test_what_only_one_rank_has_is_left_out_of_the_whole():
    merged = merge_ranks([record(weights=torch.ones(2, 3)), record(rank=1)])
    assert merged.weights is None and len(merged.mask) == 4


def test_records_are_found_from_the_run_the_folder_and_the_file(tmp_path):
    RecordStore(tmp_path / "mismatch" / "records", 9, 10**9).write(record(5))
    for place in (
        tmp_path,
        tmp_path / "mismatch",
        tmp_path / "mismatch" / "records",
        record_files(tmp_path)[0],
    ):
        assert [r.step for r in read_records(place)] == [5]
    with pytest.raises(FileNotFoundError, match="No mismatch records in .*nothing.*mismatch_record_steps"):
        (tmp_path / "nothing").mkdir()
        record_files(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="No mismatch records at .*gone"):
        record_files(tmp_path / "gone")


def state_of(folder, *logs, step=None):
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"global_step": step or logs[-1]["step"], "log_history": logs})
    (folder / "trainer_state.json").write_text(text)


def test_states_that_an_earlier_run_left_are_not_those_of_this_one(tmp_path):
    state_of(tmp_path / "checkpoint-500", *({"step": step, "loss": 9.0} for step in range(1, 501)))
    for step in (1, 2):
        append_logs(tmp_path / "mismatch", {"step": step, "loss": 0.5})
    assert run_logs(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]


def test_what_came_before_the_live_logs_is_in_the_state_that_agrees_with_them(tmp_path):
    state_of(tmp_path / "checkpoint-9", {"step": 1, "loss": 9.0}, {"step": 2, "loss": 9.0}, step=9)  # of another run
    state_of(tmp_path / "checkpoint-2", {"step": 1, "loss": 0.75}, {"step": 2, "loss": 0.5})
    for step in (2, 3):
        append_logs(tmp_path / "mismatch", {"step": step, "loss": 0.5})
    assert [log["loss"] for log in run_logs(tmp_path)] == [0.75, 0.5, 0.5]


def test_a_log_after_half_a_line_is_not_lost(tmp_path):
    append_logs(tmp_path, {"step": 1})
    with (tmp_path / "logs.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    append_logs(tmp_path, {"step": 2})
    append_logs(tmp_path, {"step": 3})
    assert [log["step"] for log in read_logs(tmp_path)] == [1, 2, 3]


def test_starts_that_failed_leave_the_records_of_the_run_before_them(tmp_path):
    folder = tmp_path / "mismatch"
    RecordStore(folder / "records", 9, 10**9).write(record(5))
    for _ in range(3):
        set_aside(folder)
        (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    assert [r.step for r in read_records(tmp_path / "mismatch.old")] == [5]


def test_a_half_written_line_of_the_logs_is_left_out(tmp_path):
    append_logs(tmp_path, {"step": 1, "loss": 0.5})
    append_logs(tmp_path, {"step": 2, "loss": torch.tensor(0.25)})
    with (tmp_path / "logs.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert read_logs(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert read_logs(tmp_path / "gone") == []


def test_the_worst_tokens_come_in_context_with_both_probabilities(tokenizer):
    ids = torch.tensor([tokenizer("one two three")["input_ids"][:3], [4, 5, 6]])
    sampling = torch.tensor([[-1.0, -3.0, float("nan")], [-1.5, -1.0, -9.0]])  # old is -1; the last is masked
    worst = worst_tokens(
        record(completion_ids=ids, sampling_per_token_logps=sampling, weights=torch.full((2, 3), 0.5), step=4),
        count=2,
        tokenizer=tokenizer,
    )
    assert [(w.step, w.completion, w.index, w.position) for w in worst] == [(4, 0, 1, 2), (4, 1, 0, 2)]
    # exp(-1), exp(-3), d = -1 - -3
    assert worst[0].p_train == pytest.approx(0.36788, rel=1e-4) and worst[0].p_rollout == pytest.approx(
        0.04979, rel=1e-3
    )
    assert (worst[0].d, worst[1].d, worst[0].weight) == (2.0, 0.5, 0.5)
    assert (worst[0].before, worst[0].token, worst[0].after) == tuple(tokenizer.decode([i]) for i in ids[0])


def test_a_token_that_was_rejected_has_weight_0():
    keep = torch.tensor([[True, True, True], [False, False, False]])
    sampling = torch.tensor([[-1.5, -1.0, -1.0], [-2.0, -1.0, -1.0]])
    worst = worst_tokens(record(sampling_per_token_logps=sampling, weights=torch.ones(2, 3), keep_mask=keep), count=2)
    assert [(w.completion, w.weight) for w in worst] == [(1, 0.0), (0, 1.0)]


def test_a_record_that_a_run_removes_while_it_is_looked_at_is_no_problem(tmp_path, caplog):
    store = RecordStore(tmp_path, 9, 10**9)
    paths = [store.write(record(step)) for step in (1, 2)]

    def read(path):
        paths[0].unlink(missing_ok=True)
        return read_header(path)

    assert [header["step"] for _, header in readable(paths, read)] == [2] and not caplog.records


def test_unscored_tokens_are_not_the_worst_and_infinite_ones_are():
    sampling = torch.tensor([[float("nan"), float("-inf"), -1.25], [float("nan")] * 3])
    worst = worst_tokens(record(sampling_per_token_logps=sampling))
    assert [(w.completion, w.index) for w in worst] == [(0, 1), (0, 2)]
    assert worst[0].d == float("inf") and worst[0].token == "<1>"


# --- what the trainer writes -----------------------------------------------------------------------------------------


def shifted(ids, logps):
    """The engine finds each token a quarter of a nat likelier, and the third two nats."""
    return [lp + (2.0 if index == 2 else 0.25) for index, lp in enumerate(logps)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vllm_importance_sampling_correction": False},
        {"correction": "tis"},
        {"correction": "tis", "old_logprobs": "recompute"},
        {"correction": "geo_mis", "old_logprobs": "rollout"},
        {"correction": "tis_geo_rs"},
        {"use_vllm": False, "correction": "icepop", "beta": 0.1},
    ],
    ids=str,
)
def test_every_mode_records_the_whole_batch_as_the_trainer_saw_it(tiny_model, tmp_path, options):
    keep = train(
        ConsistentGRPOTrainer, tiny_model, tmp_path, plant=shifted, mismatch_record_steps=2, **options
    )  # fmt: skip
    output = tmp_path / "ConsistentGRPOTrainer"
    records = read_records(output)
    assert [r.step for r in records] == [1, 2] and all(r.reason == "periodic" for r in records)
    logged = {log["step"]: log for log in keep.trainer.state.log_history}
    assert read_logs(output / "mismatch") == keep.trainer.state.log_history
    for each in records:
        # 4 completions on a device, 2 micro-batches a step
        assert len(each.mask) == 8 and each.advantages.shape == (8,) and each.advantages.abs().sum() > 0
        assert each.mask.any(1).all() and not (each.mask & ~each.completion_mask).any()
        if options.get("use_vllm", True):
            d, mask = each.mismatch_log_ratio, each.mask
            expected = torch.tensor([-0.25, -0.25, -2.0, -0.25, -0.25, -0.25])[: d.shape[1]].expand_as(d)
            assert torch.allclose(d[mask], expected[mask], atol=1e-5)
        else:
            assert each.ref_per_token_logps is not None
        for key, value in each.metrics.items():
            assert logged[each.step][key] == pytest.approx(value, rel=1e-5), key
        own = each.own_metrics()
        assert {key: own[key] for key in own} == pytest.approx(
            {key: each.metrics[key] for key in own}, rel=1e-3, abs=1e-6
        )
        if options == {"vllm_importance_sampling_correction": False}:
            assert each.weights is None
        elif options.get("correction") == "tis":
            assert each.weights[each.mask].max() < 1  # exp(-0.25)
            assert each.weights[each.mask].min() == pytest.approx(0.1353, rel=1e-3)  # exp(-2)
        if options.get("correction") == "tis_geo_rs":  # all are far outside 0.99
            assert not each.keep_mask.any() and each.mask.any()
    assert load_tokenizer(output).decode([5]) == keep.trainer.processing_class.decode([5])


def test_the_fingerprint_says_what_the_run_is_made_of(tiny_model, tmp_path):
    train(ConsistentGRPOTrainer, tiny_model, tmp_path, lora=True, correction="seq_mis", top_p=0.9, temperature=0.7)
    (found,) = read_records(tmp_path / "ConsistentGRPOTrainer")
    made_of = found.fingerprint
    assert made_of["model"] == Path(tiny_model).name and made_of["processes"] == 1
    assert made_of["trainer"] == {"class": "ConsistentGRPOTrainer", "dtype": "float32", "adapter": "LORA r=4"}
    assert made_of["engine"]["kind"] == "vllm colocate"
    assert made_of["sampling"]["temperature"] == 0.7 and made_of["sampling"]["top_p"] == 0.9
    correction = made_of["correction"]
    assert (correction["preset"], correction["level"], correction["upper"]) == ("seq_mis", "sequence", 3.0)
    assert made_of["old_logprobs"] == "reuse" and made_of["settings"]["learning_rate"] == 0.01
    assert made_of["weights"] == {"step": 0, "fingerprint": None}, "the synthetic engine has no weights of its own"
    assert made_of["versions"]["torch"] == torch.__version__
    assert "reshaped-sampling" in [finding["code"] for finding in made_of["audit"]]


@pytest.mark.parametrize(
    "options",
    [
        {"correction": "tis"},
        {"correction": "tis", "correction_normalize": "token"},
        {"correction": "tis", "old_logprobs": "rollout"},
        {"correction": "dppo_tv"},
        {"correction": "seq_mis"},
        {"vllm_importance_sampling_mode": "token_truncate"},
    ],
    ids=str,
)
def test_weights_are_those_that_the_loss_sees(tiny_model, tmp_path, monkeypatch, options):
    seen = []
    loss = GRPOTrainer._compute_loss

    def see(self, model, inputs):
        value = loss(self, model, inputs)
        seen.append((inputs["completion_ids"], inputs["importance_sampling_ratio"].clone()))
        return value

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", see)
    train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=noise(1.0), max_steps=1, **options)
    (found,) = read_records(tmp_path / "ConsistentGRPOTrainer")
    rows = {tuple(ids): ratio for many, ratios in seen for ids, ratio in zip(many.tolist(), ratios, strict=True)}
    for ids, mask, weights in zip(found.completion_ids.tolist(), found.mask, found.weights, strict=True):
        (ratio,) = [ratio for row, ratio in rows.items() if list(row[: len(ids)]) == ids]
        assert torch.allclose(ratio[: len(ids)].expand_as(weights)[mask], weights[mask], atol=1e-5)


def test_of_several_batches_of_a_step_the_worst_is_kept(tiny_model, tmp_path):
    calls = iter(range(1000))

    def impossible(ids, logps):
        """A token of the first of two batches of the first step."""
        return [-math.inf, *logps[1:]] if next(calls) == 1 else logps

    with synthetic_engine(impossible):
        trainer = build(
            ConsistentGRPOTrainer, tiny_model, tmp_path, callbacks=[MismatchAlertCallback(actions="record")], max_steps=1,
            correction="tis", old_logprobs="recompute", steps_per_generation=1,
        )  # fmt: skip
        trainer.train()
    (found,) = read_records(tmp_path / "ConsistentGRPOTrainer")
    assert torch.isinf(found.mismatch_log_ratio).sum() == 1 and found.reason == "periodic"


def test_an_evaluation_of_its_own_is_no_part_of_the_run(tiny_model, tmp_path):
    from datasets import Dataset

    train(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=2)
    rows = Dataset.from_list([{"prompt": "one two"}] * 4)
    with synthetic_engine():
        trainer = build(
            ConsistentGRPOTrainer, tiny_model, tmp_path, inputs={"eval_dataset": rows}, callbacks=[MismatchReportCallback()],
            per_device_eval_batch_size=4,
        )  # fmt: skip
        trainer.evaluate()
    assert [log["step"] for log in run_logs(tmp_path / "ConsistentGRPOTrainer")] == [1, 2]


def test_alerts_that_are_to_record_say_so_where_nothing_is(tiny_model, tmp_path, caplog):
    with synthetic_engine():
        build(
            ConsistentGRPOTrainer, tiny_model, tmp_path, callbacks=[MismatchAlertCallback()], max_steps=1,
            mismatch_record_steps=0,
        ).train()  # fmt: skip
    assert "With `mismatch_record_steps=0`, alerts record nothing" in caplog.text


def test_an_alert_writes_the_batch_that_set_it_off(tiny_model, tmp_path):
    calls = iter(range(1000))

    def impossible(ids, logps):
        """Of the 8 completions of a step, the last one of the second step has a token that the engine never samples."""
        return [-math.inf, *logps[1:]] if next(calls) == 15 else logps

    train(ConsistentGRPOTrainer, tiny_model, tmp_path, plant=impossible, max_steps=4, correction="tis")
    assert [r.step for r in read_records(tmp_path / "ConsistentGRPOTrainer")] == [1], "without the callback"
    calls = iter(range(1000))
    with synthetic_engine(impossible):
        callbacks = [MismatchAlertCallback(actions="record")]
        trainer = build(
            ConsistentGRPOTrainer, tiny_model, tmp_path, callbacks=callbacks, max_steps=4, correction="tis",
            report_to="tensorboard",
        )  # fmt: skip
        trainer.train()
    first, second = read_records(tmp_path / "ConsistentGRPOTrainer")
    assert (first.step, first.reason) == (1, "periodic")
    assert second.step == 2 and "mismatch/nonfinite_count" in second.reason
    assert torch.isinf(second.mismatch_log_ratio).sum() == 1
    assert callbacks[0].record_requests == []
    (events,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    found = EventAccumulator(str(events)).Reload().Tensors("train/mismatch/worst_tokens/text_summary")
    # of the first record with the first log; of the second with the first log after its alert
    assert [event.step for event in found] == [1, 3]
    table = found[1].tensor_proto.string_val[0].decode()
    assert table.splitlines()[2].split(" | ")[6] == "inf"


def test_zero_steps_record_nothing(tiny_model, tmp_path):
    train(ConsistentGRPOTrainer, tiny_model, tmp_path, mismatch_record_steps=0)
    assert not (tmp_path / "ConsistentGRPOTrainer" / "mismatch").exists()


def test_a_new_run_does_not_mix_its_records_with_those_of_an_earlier_one(tiny_model, tmp_path):
    output = tmp_path / "ConsistentGRPOTrainer"
    for _ in range(2):
        train(ConsistentGRPOTrainer, tiny_model, tmp_path, mismatch_record_steps=1, max_steps=2)
    RecordStore(output / "mismatch" / "records", 99, 10**9).write(record(77))
    keep = train(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=1)
    assert [r.step for r in read_records(output)] == [1]
    assert [r.step for r in read_records(output / "mismatch.old")] == [1, 2, 77]
    assert read_logs(output / "mismatch") == keep.trainer.state.log_history


def test_a_resumed_run_goes_on_in_the_same_folder(tiny_model, tmp_path):
    options = {"mismatch_record_steps": 1, "save_strategy": "steps", "save_steps": 1}
    train(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=2, **options)
    with synthetic_engine():
        trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=4, **options)
        trainer.train(resume_from_checkpoint=True)
    output = tmp_path / "ConsistentGRPOTrainer"
    assert [r.step for r in read_records(output)] == [1, 2, 3, 4]
    assert {log["step"] for log in read_logs(output / "mismatch")} == {1, 2, 3, 4}


@pytest.mark.parametrize("fault", ["a full disk", "a file in the way"])
def test_records_that_cannot_be_written_are_said_once_and_training_goes_on(
    tiny_model, tmp_path, monkeypatch, caplog, fault
):
    output = tmp_path / "ConsistentGRPOTrainer"
    if fault == "a full disk":

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("trl_consistent.records.record.save_file", full)
    else:
        output.mkdir()
        (output / "mismatch").write_text("somebody's file")
    with caplog.at_level(logging.WARNING, logger="trl_consistent.training.recorder"):
        keep = train(ConsistentGRPOTrainer, tiny_model, tmp_path, mismatch_record_steps=1)
    assert len(keep.weights) == 3
    (said,) = [r.getMessage() for r in caplog.records if r.name == "trl_consistent.training.recorder"]
    assert "could not be written" in said and "mismatch_record_steps=0" in said and str(output) in said
    if fault == "a file in the way":
        assert (output / "mismatch").read_text() == "somebody's file"


def test_recording_changes_no_bit_of_the_training(tiny_model, tmp_path):
    runs = [
        train(
            ConsistentGRPOTrainer, tiny_model, tmp_path / str(steps), plant=noise(0.3), correction="tis_geo_rs",
            mismatch_record_steps=steps,
        )
        for steps in (0, 1)
    ]  # fmt: skip
    assert_same_training(*runs)
    assert os.listdir(tmp_path / "1" / "ConsistentGRPOTrainer" / "mismatch" / "records")
