# SPDX-License-Identifier: Apache-2.0
"""What it costs to capture log-probs while transformers generates: `python scripts/bench_generate.py`. Two minutes.

SmolLM2-135M-Instruct in float32. Plain generation, generation with our capture, and with `output_scores`, which keeps the
scores of every position, take turns in one process; ratios are of neighboring turns, the median is printed. Peak memory is
that of a process for each.
"""

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
KINDS = ("plain", "captured", "output_scores")


def generator(arguments: argparse.Namespace):
    """A function that generates once, in one of the ways of `KINDS`, and returns the seconds it took."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from scripts.demo import build_smollm2, cached
    from trl_consistent.rollout.transformers import captured

    model = AutoModelForCausalLM.from_pretrained(cached("SmolLM2-135M-Instruct", build_smollm2), dtype=torch.float32)
    prompts = torch.randint(1000, 40000, (arguments.batch, 16), generator=torch.Generator().manual_seed(0))
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=arguments.tokens,
        pad_token_id=0,
        eos_token_id=None,
        disable_compile=True,
    )

    def generate(kind: str) -> float:
        torch.manual_seed(0)
        scores = {"output_scores": True, "return_dict_in_generate": True} if kind == "output_scores" else {}
        capture = captured(continuous_batching=False) if kind == "captured" else contextlib.nullcontext()
        began = time.perf_counter()
        with torch.no_grad(), capture as engine:
            output = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=config, **scores
            )
        if engine is not None:
            engine.collect(output[:, 16:].tolist())
        return time.perf_counter() - began

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="generations of each kind (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="completions (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="length of a completion (default: %(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker in KINDS:
        generator(arguments)(arguments.worker)
        return print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if arguments.worker:
        generate = generator(arguments)
        turns = [[generate(kind) for kind in KINDS] for _ in range(arguments.rounds + 1)][1:]
        for index, kind in enumerate(KINDS[1:], 1):
            ratio = statistics.median(turn[index] / turn[0] for turn in turns)
            print(f"time: {kind} / plain {ratio:.3f} ({statistics.median(turn[index] for turn in turns):.2f} s)")
        return None

    def worker(name: str) -> str:
        line = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", **os.environ}
        return subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    print(f"{arguments.batch} completions of {arguments.tokens} tokens, {arguments.rounds} rounds", flush=True)
    print(worker("time"), flush=True)
    plain, *others = (float(worker(kind)) for kind in KINDS)
    for kind, peak in zip(KINDS[1:], others, strict=True):
        print(f"peak memory: {kind} / plain {peak / plain:.3f}, {peak - plain:+.0f} MiB on {plain:.0f} MiB")
    return None


if __name__ == "__main__":
    main()
