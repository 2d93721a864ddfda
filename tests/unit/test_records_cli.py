# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import math
import os
import subprocess
import sys
import weakref

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from trl_consistent import cli
from trl_consistent.records.header import read_header
from trl_consistent.records.record import MismatchRecord
from trl_consistent.records.tokens import load_tokenizer
from trl_consistent.tables import Marked, Table, print_tables

from ..recorded import record_of, write


METRICS = {"mismatch/k3/mean": 0.02, "mismatch/abs_diff/mean": 0.01, "mismatch/ess/token": 0.99}
FINGERPRINT = {
    "model": "tiny",
    "engine": {"kind": "vllm", "dtype": "bfloat16"},
    "audit": [{"code": "E7", "found": "half precision", "cost": "noise", "remedy": "set dtype", "warns": True}],
}


def batch(step, rank=0, **fields):
    """Two completions of 2 and 3 tokens, ids 3 4 and 6 7 8; one token unscored, one of ratio 4."""
    return record_of(
        [[1.0, 4.0], [math.nan, 1.0, 0.5]],
        [1.0, -2.0],
        step=step,
        rank=rank,
        fingerprint=FINGERPRINT,
        metrics=METRICS,
        weights=torch.tensor([[1.0, 2.0, 1.0], [1.0, 1.0, 0.5]]),
        keep_mask=torch.tensor([[True, True, False], [True, True, True]]),
        **fields,
    )


@pytest.fixture
def run(tmp_path, tokenizer):
    alert = dataclasses.replace(batch(100), reason="k3 critical")
    return write(tmp_path / "run", batch(50), batch(50, rank=1), alert, tokenizer=tokenizer)


def cells(output, start):
    """The cells of the line of a table whose first cell is `start`."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines()]
    return next(row for row in rows if row[0] == start)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_list_has_a_row_for_each_step_from_headers_alone(run, capsys, monkeypatch):
    monkeypatch.setattr(MismatchRecord, "load", None)
    assert cli.main(["records", "list", str(run)]) == 0
    output = capsys.readouterr().out
    size = sum(os.path.getsize(file) for file in (run / "mismatch/records").glob("step-00000050-*")) / 1e6
    # k3 is above 1e-3, and marked; the others are inside
    both = ["50", "2", "periodic", "4", "10", "0.02 !", "0.01", "0.99", f"{size:.2f} MB", "k3/mean"]
    assert cells(output, "50") == both
    assert cells(output, "100")[1:5] == ["1", "k3 critical", "2", "5"]


def test_show_has_origin_metrics_audit_and_the_worst_tokens(run, capsys):
    assert cli.main(["records", "show", str(run), "--tokens", "2"]) == 0
    output = capsys.readouterr().out
    assert "Step 100, k3 critical: 2 completions, 5 tokens" in output  # the newest
    assert cells(output, "engine.dtype") == ["engine.dtype", "bfloat16"]
    assert cells(output, "mismatch/k3/mean")[:3] == ["mismatch/k3/mean", "0.02 !", "≤ 0.001"]
    assert cells(output, "E7") == ["E7", "half precision", "noise", "set dtype"]
    # e^-1.5 = .223; log 4 = 1.39, log .5 = -.693. Ids 3 4 are "one two", 6 7 8 "four five six"
    assert cells(output, "0") == ["0", "1", "one[two]", "0.893", "0.223", "1.39", "2"]
    assert cells(output, "1") == ["1", "2", "four five[six]", "0.112", "0.223", "-0.693", "0.5"]


def test_show_takes_a_step_and_joins_its_ranks(run, capsys):
    assert cli.main(["records", "show", str(run), "--step", "50"]) == 0
    assert "Step 50, periodic: 4 completions, 10 tokens" in capsys.readouterr().out
    assert cli.main(["records", "show", str(run), "--step", "7"]) == 2
    error = capsys.readouterr().err
    assert "No record of step 7" in error and str(run) in error and "50, 100" in error
    with pytest.raises(SystemExit):
        cli.main(["records", "show", str(run), "--tokens", "-1"])


def test_an_exported_row_is_a_completion_without_its_padding(run, tmp_path):
    output = tmp_path / "rows.jsonl"
    assert cli.main(["records", "export", str(run), "-o", str(output)]) == 0
    rows = rows_of(output)
    assert [(row["step"], row["rank"], row["completion"]) for row in rows] == [
        (50, 0, 0), (50, 0, 1), (50, 1, 0), (50, 1, 1), (100, 0, 0), (100, 0, 1)
    ]  # fmt: skip
    first, second = rows[:2]
    assert first["prompt_ids"] == [3, 4] and first["prompt"] == "one two" and first["reason"] == "periodic"
    assert first["completion_ids"] == [3, 4] and first["text"] == "one two" and first["tokens"] == ["one", "two"]
    assert second["completion_ids"] == [6, 7, 8] and second["tokens"] == ["four", "five", "six"]
    assert second["mask"] == second["keep_mask"] == [True] * 3 and second["advantages"] == [-2.0] * 3
    assert first["weights"] == [1.0, 2.0] and first["ref_per_token_logps"] is None
    assert first["mismatch_log_ratio"] == pytest.approx([0.0, math.log(4)])
    assert second["sampling_per_token_logps"] == [None, -1.5, -1.5]  # unscored: JSON has no NaN
    assert second["mismatch_log_ratio"] == [None, 0.0, pytest.approx(math.log(0.5))]


def test_parquet_has_the_tensors_as_they_are(run, tmp_path):
    impossible = batch(150)
    impossible.old_per_token_logps[0, 1] = -math.inf
    write(run, dataclasses.replace(impossible, advantages=None, weights=None, keep_mask=None))
    output = tmp_path / "rows.parquet"
    assert cli.main(["records", "export", str(run), "-o", str(output)]) == 0
    file = pq.ParquetFile(output)
    assert file.num_row_groups == 4  # one for each record: none was held back
    rows = file.read().to_pylist()
    assert len(rows) == 8
    whole = MismatchRecord.load(run / "mismatch/records/step-00000050-rank-00000.safetensors")
    for name in ("sampling_per_token_logps", "old_per_token_logps", "weights", "keep_mask", "mask", "completion_ids"):
        expected = getattr(whole, name)[1]
        torch.testing.assert_close(
            torch.tensor(rows[1][name]).to(expected.dtype), expected, rtol=0, atol=0, equal_nan=True
        )
    assert rows[1]["tokens"] == ["four", "five", "six"] and rows[1]["advantages"] == [-2.0] * 3
    assert rows[6]["old_per_token_logps"][1] == -math.inf and rows[6]["advantages"] is rows[6]["weights"] is None


def test_advantages_of_tokens_are_exported_as_they_are(tmp_path, tokenizer):
    own = dataclasses.replace(batch(1), advantages=torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]]))
    write(tmp_path, own, tokenizer=tokenizer)
    assert cli.main(["records", "export", str(tmp_path), "-o", str(tmp_path / "rows.jsonl")]) == 0
    assert [row["advantages"] for row in rows_of(tmp_path / "rows.jsonl")] == [[1.0, 2.0], [3.0, 4.0, 5.0]]


def test_without_a_tokenizer_there_are_ids(tmp_path, capsys, caplog):
    run = write(tmp_path, batch(50))
    assert cli.main(["records", "show", str(run), "--tokens", "1"]) == 0
    assert cells(capsys.readouterr().out, "0")[2] == "<3>[<4>]"
    assert "No tokenizer in" in caplog.text
    assert cli.main(["records", "export", str(run), "-o", str(tmp_path / "rows"), "--format", "jsonl"]) == 0
    row = rows_of(tmp_path / "rows")[0]
    assert row["text"] is row["tokens"] is row["prompt"] is None and row["completion_ids"] == [3, 4]


def test_a_tokenizer_that_does_not_load_is_none(run, caplog):
    (run / "mismatch/tokenizer/tokenizer.json").write_text("{")
    assert load_tokenizer(run) is None
    assert "does not load" in caplog.text


def test_code_that_comes_with_a_tokenizer_is_not_run(run, tmp_path):
    folder = run / "mismatch/tokenizer"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "theirs.Theirs"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    marker = tmp_path / "was run"
    (folder / "theirs.py").write_text(f"open({str(marker)!r}, 'w')\nclass Theirs: from_pretrained = None\n")
    load_tokenizer(run)
    assert not marker.exists()


def test_export_holds_one_record_at_a_time(run, tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), []
    load = MismatchRecord.load
    # a dataclass that compares by value has no hash of its own
    monkeypatch.setattr(MismatchRecord, "__hash__", object.__hash__)

    def counted(path):
        most.append(len(alive))
        found = load(path)
        alive.add(found)
        return found

    monkeypatch.setattr(MismatchRecord, "load", counted)
    assert cli.main(["records", "export", str(run), "-o", str(tmp_path / "rows.parquet")]) == 0
    assert most == [0, 0, 0]  # others, when one is read


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_interrupted_export_leaves_what_was_there(run, tmp_path, monkeypatch, capsys, name):
    output = tmp_path / name
    output.write_text("of yesterday")
    load = MismatchRecord.load

    def interrupted(path):
        if "step-00000100" in path.name:
            raise KeyboardInterrupt
        return load(path)

    monkeypatch.setattr(MismatchRecord, "load", interrupted)
    assert cli.main(["records", "export", str(run), "-o", str(output)]) == 130
    assert output.read_text() == "of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "run"]
    assert "Traceback" not in capsys.readouterr().err


def test_broken_files_among_good_ones_are_left_out_with_a_warning(run, tmp_path, capsys, caplog):
    folder = run / "mismatch/records"
    half = (folder / "step-00000050-rank-00001.safetensors").read_bytes()[:400]
    (folder / "step-00000050-rank-00001.safetensors").write_bytes(half)
    tensors = {"mask": torch.ones(2, 2, dtype=torch.bool)}
    header = {"format": 1, "step": 60, "rank": 0, "reason": "", "completions": 2, "tokens": 4, "metrics": {}}
    for step, line in (
        (60, json.dumps({**header, "fingerprint": {}})),
        (70, "{"),
        (80, "[]"),
        (90, json.dumps(header)),
    ):
        save_file(tensors, folder / f"step-{step:08}-rank-00000.safetensors", {"mismatch_record": line})
    assert cli.main(["records", "list", str(run)]) == 0
    output = capsys.readouterr().out
    assert cells(output, "50")[1] == "1" and cells(output, "100")
    assert all(f"step-{step:08}" in caplog.text for step in (50, 70, 80, 90))
    caplog.clear()
    assert cli.main(["records", "export", str(run), "-o", str(tmp_path / "rows.jsonl")]) == 0
    assert {row["step"] for row in rows_of(tmp_path / "rows.jsonl")} == {50, 100}
    assert "step-00000060" in caplog.text and "it lacks" in caplog.text and "sampling_per_token_logps" in caplog.text


def test_nothing_but_broken_files_is_an_error(tmp_path, capsys):
    folder = tmp_path / "mismatch/records"
    folder.mkdir(parents=True)
    (folder / "step-00000001-rank-00000.safetensors").write_bytes(b"x")
    for command in (["list"], ["show"], ["export", "-o", str(tmp_path / "rows.jsonl")]):
        assert cli.main(["records", command[0], str(tmp_path), *command[1:]]) == 2
        assert f"No record at {tmp_path} can be read" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_wrong_paths_are_named_with_what_would_be_right(run, tmp_path, capsys):
    def error(*arguments):
        assert cli.main(["records", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    found = error("list", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in found and "`mismatch_record_steps`" in found
    (tmp_path / "empty").mkdir()
    assert "nor in mismatch/records below it" in error("show", tmp_path / "empty")
    assert "neither .jsonl nor .parquet" in error("export", run, "-o", tmp_path / "rows.csv")
    assert "there is no such folder" in error("export", run, "-o", tmp_path / "nowhere" / "rows.jsonl")
    (tmp_path / "rows.jsonl").mkdir()
    assert "it is a folder" in error("export", run, "-o", tmp_path / "rows.jsonl")
    one = run / "mismatch/records/step-00000100-rank-00000.safetensors"
    assert "is one of the records" in error("export", one, "-o", one, "--format", "jsonl")
    assert read_header(one)["step"] == 100


@pytest.mark.parametrize(
    "arguments",
    [["records", "list"], ["records", "export", "-o", "rows.jsonl"], ["compare", "--format", "json"]],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_error(run, tmp_path, arguments):
    command = [sys.executable, "-m", "trl_consistent.cli", *arguments, str(run)]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is left is written at the end
    with subprocess.Popen(
        command, cwd=tmp_path, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()  # as `| head` does
        error = process.stderr.read()
    assert error == "" and process.returncode in (1, 141)  # as rich ends, and as a killed writer does


def test_help_does_not_load_torch():
    code = (
        "import sys; from trl_consistent import cli\n"
        "for arguments in (['--help'], ['records', '--help'], ['records', 'export', '--help'], ['compare', '--help']):\n"
        "    try: cli.main(arguments)\n"
        "    except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False" and "compare" in output and "export" in output


def test_without_rich_tables_are_markdown_and_it_says_so(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["records", "list", str(run)]) == 0
    output, error = capsys.readouterr()
    assert "| 100 | 1 | k3 critical | 2 | 5 | 0.02 ! |" in output and "pip install rich" in error


@pytest.mark.parametrize("format", ["table", "md"])
def test_text_of_a_model_stays_in_its_cell(capsys, format):
    hostile = "[red]a|b\n\x1b[2J\u202ec"
    print_tables([Table("t", ("token", "next"), [(hostile, Marked(0.5)), (None, 1)])], format)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "red" in line]
    assert ("&#91;red&#93;a&#124;b" if format == "md" else "[red]a|b") in line
    assert (
        ("\\n\\x1b&#91;2J\\u202ec" if format == "md" else "\\n\\x1b[2J\\u202ec") in line
        and "0.5 !" in line
        and "\x1b[2J" not in line
    )


def test_a_record_whose_masks_are_one_tensor_is_saved(tmp_path):
    one = batch(1)
    one.keep_mask = one.completion_mask  # and `mask` is as well
    write(tmp_path, one)
    assert torch.equal(MismatchRecord.load(next(tmp_path.rglob("*.safetensors"))).keep_mask, one.mask)
