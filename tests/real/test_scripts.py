# SPDX-License-Identifier: Apache-2.0
"""What a user runs: an unmodified script, the example, the demo."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import demo
from trl_consistent import METRICS, run

from ..processes import fresh_environment
from ..short_training import synthetic_engine


ROOT = Path(__file__).parents[2]
SHORT = [
    "--max_steps", "2", "--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "6",
    "--use_vllm", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "--bf16", "False", "--save_strategy", "no",
    "--use_peft", "--learning_rate", "1e-2",
]  # fmt: skip


def steps_of(directory):
    history = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    return [log for log in history if "loss" in log]


@pytest.mark.vllm
def test_a_script_in_the_style_of_trl_s_examples_trains_unmodified(tiny_model, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in ("one two", "three") * 8))
    script = ROOT / "tests" / "data" / "gspo_style.py"
    options = ["--model_name_or_path", tiny_model, "--dataset_name", str(data), "--output_dir", str(tmp_path / "out")]
    options += ["--importance_sampling_level", "sequence", "--loss_type", "grpo", "--correction", "geo_mis"]
    options += ["--rollout_engine_kwargs", '{"dtype": "float32"}', "--vllm_max_model_length", "64"]
    run.run(str(script), [*options, "--vllm_gpu_memory_utilization", "0.1", *SHORT])
    steps = steps_of(tmp_path / "out")
    assert len(steps) == 2 and all("mismatch/k3/mean" in log for log in steps)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_the_example_trains_on_the_synthetic_engine(tiny_model, tmp_path, monkeypatch):
    options = ["--model_name_or_path", tiny_model, "--output_dir", str(tmp_path), "--correction", "tis"]
    options += ["--conversational", "False", "--prompt", "one two three"]
    monkeypatch.setattr(sys, "argv", ["grpo_lora.py", *options, *SHORT])
    with synthetic_engine():
        runpy.run_path(str(ROOT / "examples" / "grpo_lora.py"), run_name="__main__")
    assert len(steps_of(tmp_path)) == 2


def test_the_example_s_rewards():
    example = runpy.run_path(str(ROOT / "examples" / "grpo_lora.py"))
    chats = [[{"content": " 12 "}], [{"content": "it is 7"}], [{"content": ""}]]
    assert example["digits_reward"](chats) == [1.0, 1 / 7, 0.0]
    assert example["correct_reward"](chats, answer=["12", "7", "0"]) == [1.0, 0.0, 0.0]
    rows = example["additions"](example["ExampleArguments"](), count=5)
    a, b = (int(word) for word in rows[0]["prompt"][1]["content"].removeprefix("What is ").rstrip("?").split(" + "))
    assert rows[0]["answer"] == str(a + b) and rows[0]["prompt"][0]["role"] == "system"


# --- the demo --------------------------------------------------------------------------------------------------------


def test_demo_help_needs_no_environment():
    done = subprocess.run([ROOT / "scripts" / "demo", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--correction" in done.stdout and "--tiny" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--correction", "magic"], "invalid choice: 'magic'"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--steps", "many"], "invalid int value"),
    ],
)
def test_demo_refuses_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.parse_arguments(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_demo_offers_every_preset():
    from trl_consistent import PRESETS

    assert tuple(PRESETS) == demo.PRESETS


def test_a_model_is_cached_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CACHE", tmp_path)

    def interrupted(directory):
        directory.mkdir()
        (directory / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.cached("model", interrupted)
    assert list(tmp_path.iterdir()) == []
    assert demo.cached("model", lambda directory: directory.mkdir()).is_dir()
    assert demo.cached("model", interrupted).is_dir(), "not built again"


def test_a_model_file_with_the_wrong_checksum_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="expected 0000"):
        demo.build_smollm2(tmp_path / "model")


def test_the_summary_says_what_was_unhealthy_and_what_the_correction_did(tmp_path, capsys):
    def log(reward, gap, share, ratio=1.0):
        return {
            "loss": 0.1,
            "reward": reward,
            "mismatch/abs_diff/mean": gap,
            "mismatch/ratio/mean": ratio,
            "correction/masked_fraction/high": share,
        }

    state = {"log_history": [log(0.1, 0.001, 0.0), log(0.2, 0.001, 0.0), log(0.3, 0.5, 0.02), {"train_runtime": 1.0}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    demo.summary(tmp_path / "trainer_state.json", tmp_path, "icepop", 12.0)
    output = capsys.readouterr().out
    assert "3 steps, correction icepop" in output
    row = next(line for line in output.splitlines() if "mismatch/abs_diff/mean" in line)
    assert "0.5" in row and "≤ 0.02" in row
    assert "masked high 0.67 % of the tokens" in output and "tensorboard" in output
    assert "disagree more than is healthy" in output
    # a ratio below its range is as bad as one above
    state = {"log_history": [log(0.1, 0.001, 0.0), log(0.1, 0.001, 0.0, ratio=0.5), log(0.1, 0.001, 0.0)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    demo.summary(tmp_path / "trainer_state.json", tmp_path, "icepop", 12.0)
    output = capsys.readouterr().out
    row = next(line for line in output.splitlines() if "mismatch/ratio/mean" in line)
    assert "0.5 " in row and "disagree more than is healthy" in output
    # and a healthy run is called one
    state = {"log_history": [log(0.1, 0.001, 0.0)] * 3}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    demo.summary(tmp_path / "trainer_state.json", tmp_path, "icepop", 12.0)
    assert "agree within the healthy ranges" in capsys.readouterr().out


@pytest.mark.vllm
@pytest.mark.launch
@pytest.mark.parametrize("model", ["--tiny", ""], ids=["tiny", "smollm2"])
def test_the_demo_trains_and_reports(tmp_path, model, monkeypatch):
    environment = fresh_environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    if model:  # a model trained for less long is enough here
        monkeypatch.setattr(demo, "CACHE", tmp_path / "cache" / "trl-consistent")
        demo.cached("tiny-addition", lambda directory: demo.build_tiny(directory, steps=20))
    command = [ROOT / "scripts" / "demo", "--steps", "1", "--output", "out", "--correction", "icepop"]
    done = subprocess.run(
        [*command, *model.split()], capture_output=True, text=True, timeout=800, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "1 steps, correction icepop" in done.stdout and "mismatch/k3/mean" in done.stdout
    assert "1/1" in done.stderr, "TRL's progress bar"
    (step,) = steps_of(tmp_path / "out")
    without_their_option = {
        key for key in METRICS if key.startswith("kl") or "trust_region" in key or "support" in key
    }
    assert set(METRICS) - set(step) <= {"mismatch/z_ratio", *without_their_option}
    # The model is a language model: its own completions are likely under it, and trainer and engine agree on that.
    assert step["mismatch/log_ppl/old"] < 3
    assert step["mismatch/abs_diff/mean"] < (0.02 if model else 1e-4)
    assert list((tmp_path / "out" / "tensorboard").rglob("events.out.tfevents.*"))
    assert "{'loss'" in (tmp_path / "out" / "train.log").read_text()
