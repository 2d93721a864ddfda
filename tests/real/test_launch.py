# SPDX-License-Identifier: Apache-2.0
"""Real `accelerate launch`: TRL's own script with our classes, and two ranks with a vLLM each."""

import json
import math
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from trl_consistent.records.logs import read_logs
from trl_consistent.records.store import read_records, record_files
from trl_consistent.rollout.environment import cpu_variables

from ..processes import fresh_environment
from ..short_training import LOSS_TYPES


pytestmark = [pytest.mark.vllm, pytest.mark.launch]

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "accelerate_configs"


def launch(config, *arguments):
    environment = fresh_environment()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / config]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=800, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def write_dataset(directory) -> str:
    directory.mkdir()
    rows = [{"prompt": prompt, "solution": "one"} for prompt in ("one two", "three", "four five", "six")] * 4
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(directory)


def test_trl_s_script_trains_under_accelerate_with_our_correction(tiny_model, tmp_path):
    output = tmp_path / "out"
    launch(
        "cpu.yaml", "-m", "trl_consistent.run", str(files("trl.scripts") / "grpo.py"),
        "--model_name_or_path", tiny_model, "--dataset_name", write_dataset(tmp_path / "data"), "--reward_funcs",
        "tests.tiny.letters_reward", "--output_dir", str(output), "--correction", "icepop", "--use_vllm", "--max_steps", "2",
        "--rollout_engine_kwargs", '{"dtype": "bfloat16"}', "--vllm_max_model_length", "64", "--logging_steps", "1",
        "--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "6", "--bf16", "False",
        "--report_to", "tensorboard", "--use_peft", "--vllm_gpu_memory_utilization", "0.1", "--save_steps", "2",
        "--learning_rate", "1e-2",
    )  # fmt: skip
    state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
    steps = [log for log in state["log_history"] if "loss" in log]
    assert len(steps) == 2
    for log in steps:
        assert 0 < log["mismatch/abs_diff/mean"] < 0.5 and "correction/masked_fraction/high" in log
    assert (output / "adapter_model.safetensors").exists()


def test_the_grpo_command_trains_from_a_yaml_file(tiny_model, tmp_path):
    config = tmp_path / "grpo.yaml"
    options = {
        "model_name_or_path": tiny_model, "dataset_name": write_dataset(tmp_path / "data"), "correction": "geo_mis",
        "reward_funcs": ["tests.tiny.letters_reward"], "output_dir": str(tmp_path / "out"), "use_vllm": True,
        "max_steps": 1, "rollout_engine_kwargs": {"dtype": "float32"}, "vllm_max_model_length": 64, "logging_steps": 1,
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "bf16": False,
        "report_to": "none", "save_steps": 1, "vllm_gpu_memory_utilization": 0.1,
    }  # fmt: skip
    config.write_text(json.dumps(options))  # JSON is YAML
    done = subprocess.run(
        [sys.executable, "-m", "trl_consistent.cli", "grpo", "--config", config, "--num_processes", "1"],
        capture_output=True, text=True, timeout=800, env=fresh_environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert "correction/masked_fraction/high" in state["log_history"][0]


def test_two_ranks_reduce_sums_and_counts_in_one_collective(tiny_model, tmp_path):
    launch("cpu_2.yaml", "-m", "trl_consistent.run", "tests/two_ranks.py", tiny_model, str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank["world"] for rank in ranks] == [2, 2]
    assert ranks[0]["weights"] == ranks[1]["weights"], "both ranks hold the same model"
    share = cpu_variables(2)["OMP_NUM_THREADS"]
    assert [(rank["omp"], str(rank["threads"])) for rank in ranks] == [(share, share)] * 2
    steps = [log for log in ranks[0]["logs"] if "loss" in log]
    assert [len(rank["seen"]) for rank in ranks] == [3, 3] and len(steps) == 3, "both stop after the third step"
    for log, first, second in zip(steps[:2], *(rank["seen"][:2] for rank in ranks), strict=True):
        assert first["collectives"] == second["collectives"] == 1
        assert first["merged"] == second["merged"]
        a, b = first["local"], second["local"]
        assert a["tokens"][0] > 1.5 * b["tokens"][0], "the ranks must hold different numbers of tokens"
        tokens = a["scored"][0] + b["scored"][0]
        assert log["mismatch/abs_diff/mean"] == pytest.approx((a["abs_diff"][0] + b["abs_diff"][0]) / tokens, rel=1e-5)
        assert log["mismatch/abs_diff/max"] == pytest.approx(max(a["abs_diff_max"][0], b["abs_diff_max"][0]), rel=1e-5)
        assert log["correction/weight/mean"] == pytest.approx((a["weight"][0] + b["weight"][0]) / tokens, rel=1e-5)
        kept = first["kept"] + second["kept"]
        assert first["weights"] + second["weights"] == pytest.approx(kept, rel=1e-5), "normalized over both ranks"
        assert first["weights"] != pytest.approx(first["kept"], rel=1e-5), "and not over each"
        of_means = (first["local_metrics"]["mismatch/k3/mean"] + second["local_metrics"]["mismatch/k3/mean"]) / 2
        assert log["mismatch/k3/mean"] != pytest.approx(of_means, rel=1e-3)
    names = [file.name for file in record_files(tmp_path)]
    assert names == [f"step-{step:08}-rank-{rank:05}.safetensors" for step in (1, 2, 3) for rank in (0, 1)]
    *periodic, alerted = read_records(tmp_path)
    assert "critical mismatch/nonfinite_count" in alerted.reason
    assert alerted.mismatch_log_ratio.isinf().nonzero().tolist() == [[4, 0]], "the first completion of rank 1"
    for record, log in zip(periodic, steps[:2], strict=True):
        assert len(record.mask) == 8 and record.own_metrics()["mismatch/k3/mean"] == pytest.approx(
            log["mismatch/k3/mean"], rel=1e-4
        )
    assert read_logs(tmp_path / "mismatch") == ranks[0]["logs"]


def test_reuse_is_recompute_on_two_ranks(tiny_model, tmp_path):
    launch("cpu_2.yaml", "-m", "trl_consistent.run", "tests/two_ranks_reuse.py", tiny_model, str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank["world"] for rank in ranks] == [2, 2]
    for loss_type in LOSS_TYPES:  # LoRA in every second, a KL term in every other pair
        recomputed, reused = (ranks[0][f"{loss_type}/{source}"] for source in ("recompute", "reuse"))
        assert ranks[1][f"{loss_type}/reuse"]["gradients"] == reused["gradients"], "both ranks make the same step"
        for name, expected in recomputed["gradients"].items():
            scale = max(1.0, *map(abs, expected))
            assert reused["gradients"][name] == pytest.approx(expected, abs=1e-6 * scale), name
        log = recomputed["log"]
        assert reused["log"] == pytest.approx(log, rel=1e-4, abs=1e-5)
        assert any(any(gradient) for gradient in recomputed["gradients"].values())
        # a fourth of one rank and half of the other
        assert log["correction/rejected_fraction/high"] == pytest.approx(0.375, abs=0.05) and log["loss"] != 0


def test_tensorboard_holds_the_metrics(tiny_model, tmp_path):
    """Reads back the event files of a run: TRL's own logging carries our metrics."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from trl_consistent import METRICS

    from ..short_training import ConsistentGRPOTrainer, Keep, build
    from .test_integration import ENGINE

    keep = Keep()
    trainer = build(
        ConsistentGRPOTrainer, tiny_model, tmp_path, callbacks=[keep], **ENGINE, max_steps=2, correction="dppo_tv",
        report_to="tensorboard", beta=0.1, top_p=0.9, rollout_support=True,
    )  # fmt: skip
    trainer.train()
    events = [path.parent for path in tmp_path.rglob("events.out.tfevents.*")]
    assert events
    accumulator = EventAccumulator(str(events[0])).Reload()
    tags = set(accumulator.Tags()["scalars"])
    for key in METRICS:
        assert f"train/{key}" in tags, key
    values = [event.value for event in accumulator.Scalars("train/mismatch/k3/mean")]
    logged = [log["mismatch/k3/mean"] for log in keep.logs if "loss" in log]
    assert values == pytest.approx(logged, rel=1e-5) and all(map(math.isfinite, values))
