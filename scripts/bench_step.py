# SPDX-License-Identifier: Apache-2.0
"""A training step of ours against TRL's `GRPOTrainer`: `python scripts/bench_step.py`. Ten minutes on two CPU cores.

SmolLM2-135M-Instruct in float32, LoRA on all linear layers. TRL truncates token ratios at 2, ours has `correction="tis"` and
reuses the training forward for the old log-probs. They take turns in one process, a step each; ratios are of neighboring
steps, the median is printed. `with generation`, both share one real vLLM engine, so that weight syncs and generation are the
same; `without`, random completions stand in for it. `our math` is the share of a step that metrics and weights take, and
peak memory that of a process per trainer, both without generation.
"""

import argparse
import copy
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SIDES = {
    "trl": {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
    "ours": {"correction": "tis"},
}


def build(kind: str, arguments: argparse.Namespace, output: str, generation=None, callbacks=None, **options):
    """A trainer of either kind; its engine is made by `generation(model=..., ...)`, else it is a real one."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from scripts.demo import build_smollm2, cached
    from trl_consistent import ConsistentGRPOConfig, ConsistentGRPOTrainer
    from trl_consistent.rollout.engine import engine_replaced
    from trl_consistent.rollout.vllm import ConsistentVLLMGeneration

    config, trainer = (GRPOConfig, GRPOTrainer) if kind == "trl" else (ConsistentGRPOConfig, ConsistentGRPOTrainer)
    defaults = {
        "max_steps": 1,
        "per_device_train_batch_size": arguments.batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "num_generations": arguments.batch,
        "max_completion_length": arguments.tokens,
        "use_vllm": True,
        "vllm_max_model_length": 256,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "activation_checkpointing": False,
    }
    args = config(output, **{**defaults, **SIDES[kind], **options})

    if generation is None:
        exact = ConsistentGRPOConfig(output, rollout_precision="fp32", rollout_verify_sync="off")
        generation = functools.partial(ConsistentVLLMGeneration, config=exact)
    questions = [f"What is {a} plus {b}? Explain." for a in range(10) for b in range(10)]
    with engine_replaced(generation):
        return trainer(
            model=str(cached("SmolLM2-135M-Instruct", build_smollm2)),
            reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": questions}),
            peft_config=LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0),
            callbacks=callbacks,
        )


class Clock:
    """Seconds of each step, and those of them in our math."""

    def __init__(self, trainer):
        from transformers import TrainerCallback

        from tests import inside
        from trl_consistent import ConsistentGRPOTrainer

        self.steps, self.math, began = [], 0.0, 0.0
        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *_, **__):
                nonlocal began
                began, clock.math = time.perf_counter(), 0.0

            def on_step_end(self, *_, **__):
                clock.steps.append((time.perf_counter() - began, clock.math))

        trainer.add_callback(Callback())
        if isinstance(trainer, ConsistentGRPOTrainer):
            inside.wrap_work_in_loss(trainer, self.timed)

    def timed(self, function):
        def call(*args, **kwargs):
            began = time.perf_counter()
            output = function(*args, **kwargs)
            self.math += time.perf_counter() - began
            return output

        return call


def random_generation(tokens: int) -> type:
    """Stands in for the engine."""
    import torch

    class Random:
        def __init__(self, *_, **__):
            self.generator = torch.Generator().manual_seed(0)

        def sync_weights(self):
            pass

        def generate(self, prompts, *_, **__):
            ids = torch.randint(1000, 40000, (len(prompts), tokens), generator=self.generator).tolist()
            return prompts, ids, [[[-9.0]] * tokens for _ in prompts], [[[token] for token in row] for row in ids]

    return Random


def measure_time(arguments: argparse.Namespace, with_generation: bool) -> None:
    """Takes turns and prints the median ratio."""
    engines, trainers = [], []

    def shared(model, *_, **__):
        engine = copy.copy(engines[0])
        engine.model = model
        return engine

    with tempfile.TemporaryDirectory() as output:
        for kind in SIDES:
            generation = (shared if engines else None) if with_generation else random_generation(arguments.tokens)
            trainer = build(kind, arguments, output, generation)
            engines.append(trainer.vllm_generation)
            trainers.append((trainer, Clock(trainer)))
        for turn in range(arguments.rounds + 1):  # the first one warms up
            for trainer, _ in trainers[:: 1 if turn % 2 else -1]:
                trainer.train()
            last = ", ".join(f"{clock.steps[-1][0]:.2f} s" for _, clock in trainers)
            print(f"round {turn} of {arguments.rounds}: {last}", file=sys.stderr)
    trl, ours = (clock.steps[1:] for _, clock in trainers)
    ratios = sorted(a[0] / b[0] for a, b in zip(ours, trl, strict=True))
    seconds = [statistics.median(step[0] for step in steps) for steps in (trl, ours)]
    quarter = len(ratios) // 4
    print(
        f"{'with' if with_generation else 'without'} generation: ours / TRL {statistics.median(ratios):.3f} (middle half "
        f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}), {seconds[0]:.2f} s and {seconds[1]:.2f} s; our math "
        f"{statistics.median(step[1] / step[0] for step in ours):.2%} of a step"
    )


def measure_memory(arguments: argparse.Namespace, kind: str) -> None:
    """Prints the peak memory of one trainer over three steps, MiB."""
    with tempfile.TemporaryDirectory() as output:
        trainer = build(kind, arguments, output, random_generation(arguments.tokens))
        for _ in range(3):
            trainer.train()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def step_parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """What a step is made of."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="steps of each kind (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="completions in a micro-batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="length of a completion (default: %(default)s)")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches in a step (default: %(default)s)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="TRL's default; costs another forward")
    return parser


def main() -> None:
    parser = step_parser(__doc__, rounds=12)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker in SIDES:
        return measure_memory(arguments, arguments.worker)
    if arguments.worker:
        return measure_time(arguments, arguments.worker == "with")

    from trl_consistent.rollout.environment import cpu_variables

    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    quiet |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    environment = {**cpu_variables(), **quiet, "TRANSFORMERS_VERBOSITY": "error", **os.environ}

    def worker(name: str) -> str:
        line = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()[-1]

    print(
        f"{arguments.accumulation} x {arguments.batch} completions of {arguments.tokens} tokens, gradient checkpointing "
        f"{'on' if arguments.gradient_checkpointing else 'off'}, {arguments.rounds} rounds",
        flush=True,
    )
    for name in ("without", "with"):
        print(worker(name), flush=True)
    trl, ours = (float(worker(kind)) for kind in SIDES)
    print(f"peak memory: ours / TRL {ours / trl:.3f}, {trl:.0f} MiB and {ours:.0f} MiB")


if __name__ == "__main__":
    main()
