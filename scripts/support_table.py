# SPDX-License-Identifier: Apache-2.0
"""Ratios to a real vLLM under truncated sampling, with and without `rollout_support`: `python scripts/support_table.py`.

SmolLM2-135M-Instruct, trainer and engine in float32, temperature 1. Each row is one batch of completions, scored twice by
the trainer: over the whole vocabulary and on the support of the engine. Ten minutes on two CPU cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SETTINGS: list[dict[str, float]] = [
    {"top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2},
]


def measure(arguments: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset

    from scripts.demo import build_smollm2, cached
    from tests import inside
    from trl_consistent import ConsistentGRPOConfig, ConsistentGRPOTrainer
    from trl_consistent.support import Sampling

    questions = [f"Why is {a} plus {b} not {a + b + 1}? Explain." for a in range(10) for b in range(10)]
    with tempfile.TemporaryDirectory() as output:
        trainer = ConsistentGRPOTrainer(
            model=str(cached("SmolLM2-135M-Instruct", build_smollm2)),
            reward_funcs=lambda completions, **_: [float(len(turns[0]["content"])) for turns in completions],
            args=ConsistentGRPOConfig(
                output,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=arguments.completions // 8,
                num_generations=8,
                max_completion_length=arguments.tokens,
                use_vllm=True,
                vllm_max_model_length=256,
                rollout_engine_kwargs={"dtype": arguments.dtype},
                rollout_support=True,
                bf16=False,
                report_to="none",
                activation_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in questions]}),
        )
    trainer.model.train()
    rows = [trainer.train_dataset[index // 8] for index in range(arguments.completions)]
    print("| sampling | log-probs over | tokens | mean ratio | standard error | mean abs d | outside 0.9 … 1.1 |")
    print("|---|---|---|---|---|---|---|")
    for settings in SETTINGS:
        for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
            setattr(trainer.vllm_generation, name, settings.get(name, getattr(Sampling, name)))
        inside.set_sampling(trainer, Sampling(**settings))
        batch = trainer._generate_and_score_completions([dict(row) for row in rows])
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        mask = batch["completion_mask"].bool()
        for where, sampling in (("vocabulary", None), ("support", Sampling(**settings))):
            inside.set_sampling(trainer, sampling)
            with torch.no_grad():
                logps, _, _ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, attended, mask.shape[1], batch_size=8
                )
            d = (logps - batch["sampling_per_token_logps"])[mask].double()
            ratio = d.exp()
            error, outside = ratio.std() / len(d) ** 0.5, ((ratio < 0.9) | (ratio > 1.1)).double().mean()
            print(
                f"| {', '.join(f'{name} {value}' for name, value in settings.items())} | {where} | {len(d)} "
                f"| {ratio.mean():.5f} | {error:.1g} | {d.abs().mean():.2g} | {outside:.1%} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--completions", type=int, default=64, help="per setting, a multiple of 8 (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=32, help="length of a completion (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the engine (default: %(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return measure(arguments)

    from trl_consistent.rollout.environment import cpu_variables

    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    quiet |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    environment = {**cpu_variables(), **quiet, "TRANSFORMERS_VERBOSITY": "error", **os.environ}
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--worker"], env=environment, check=True)


if __name__ == "__main__":
    main()
