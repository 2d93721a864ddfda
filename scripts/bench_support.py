# SPDX-License-Identifier: Apache-2.0
"""What it costs to restrict log-probs to the engine's support: `python scripts/bench_support.py`. Two minutes on two cores.

The LM head of SmolLM2-135M (576 x 49152, float32) on 2048 scored positions, forward and backward to the hidden states as
under LoRA: TRL's own function, the restricted one with several settings, and whole logits for comparison. Each case runs in
a process of its own (for its peak memory), cases are interleaved over the rounds, medians are printed.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
CASES: dict[str, dict | None] = {
    "whole logits": None,
    "trl": None,
    "top_p .8": {"top_p": 0.8},
    "top_k 20": {"top_k": 20},
    "min_p .1": {"min_p": 0.1},
    "repetition 1.2": {"repetition_penalty": 1.2},
    "all four": {"top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2},
}


def measure(
    case: str, rows: int = 8, tokens: int = 256, width: int = 576, vocabulary: int = 49152
) -> tuple[float, ...]:
    """Median seconds of forward and of backward, and peak extra MiB."""
    from trl.kernels import ChunkedLogProbFunction

    from trl_consistent.support import RestrictedHead, Sampling

    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (rows, tokens + 1))
    hidden = torch.randn(rows * tokens, width, requires_grad=True)
    weight = 0.25 * torch.randn(vocabulary, width)  # a few likely tokens, as in a language model
    targets, outputs = ids[:, 1:].flatten(), ("log_probs", "entropy")

    def forward() -> torch.Tensor:
        if case == "whole logits":
            logps = (hidden @ weight.T).log_softmax(-1)
            return logps.gather(-1, targets.unsqueeze(-1)).sum()
        settings = CASES[case]
        head = ChunkedLogProbFunction
        if settings is not None:
            head = RestrictedHead(Sampling(**settings), ids, torch.ones_like(ids), tokens)
        return head.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, outputs)[0].sum()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(2):
        began = time.perf_counter()
        loss = forward()
        middle = time.perf_counter()
        loss.backward()
        times.append((middle - began, time.perf_counter() - middle))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return *(min(column) for column in zip(*times, strict=True)), (peak - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes per case (default: %(default)s)")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(*measure(arguments.case))
        return
    results: dict[str, list[tuple[float, ...]]] = {case: [] for case in CASES}
    for _ in range(arguments.rounds):
        for case, seen in results.items():
            done = subprocess.run(
                [sys.executable, __file__, "--case", case], capture_output=True, text=True, check=True
            )
            seen.append(tuple(map(float, done.stdout.split())))
    print(f"2048 positions, 49152 tokens, {torch.get_num_threads()} threads, median of {arguments.rounds} processes")
    for case, seen in results.items():
        forward, backward, mebibytes = (statistics.median(column) for column in zip(*seen, strict=True))
        print(f"{case:16} {forward:6.2f} s forward {backward:6.2f} s backward {mebibytes:+8.0f} MiB")


if __name__ == "__main__":
    main()
