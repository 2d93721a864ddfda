# SPDX-License-Identifier: Apache-2.0
"""Time and extra memory of metrics and corrections on one CPU thread: `python scripts/bench_corrections.py`.

Each case runs in a process of its own (for its peak memory), cases are interleaved over the rounds, medians are printed.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch

from trl_consistent import Correction, Rejection, correct, correction_metrics, mismatch_log_ratio, mismatch_metrics


# The rejection rules that verl 0.9 has, with bounds nothing leaves.
RULES = tuple(
    Rejection(level, None, 1e6, statistic)
    for level in ("token", "sequence_sum", "sequence_mean", "sequence_max")
    for statistic in ("k1", "k2", "k3")
    if (level, statistic) != ("sequence_max", "k1")
)
CASES = {
    "metrics": None,
    "tis + metrics": Correction("token", "truncate", None, 2.0),
    "seq_tis + metrics": Correction("sequence", "truncate", None, 2.0),
    "tis + 11 rules + metrics": Correction("token", "truncate", None, 2.0, RULES),
}
SHAPES = {"512 x 4096": (512, 4096), "64 x 32768": (64, 32768), "4096 x 512": (4096, 512)}


def measure(case: str, shape: str, dtype: torch.dtype, calls: int = 3) -> tuple[float, float]:
    """Median milliseconds and peak extra MiB of a case."""
    torch.set_num_threads(1)
    rows, tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, tokens, generator=generator) * 3
    sampling = (old + 0.01 * torch.randn(rows, tokens, generator=generator)).to(dtype)
    old = old.to(dtype)
    lengths = torch.randint(int(0.4 * tokens), tokens + 1, (rows, 1), generator=generator)  # 30 % padding
    mask = (torch.arange(tokens) < lengths).long()
    correction = CASES[case]

    def call() -> None:
        stats = mismatch_metrics(old, sampling, mask)
        if correction is not None:
            result = correct(mismatch_log_ratio(old, sampling, mask), mask, correction, sampling=sampling)
            stats |= correction_metrics(mask, result, correction.action)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return statistics.median(times), (peak - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes per case (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="512 x 4096", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(*measure(arguments.case, arguments.shape, getattr(torch, arguments.dtype)))
        return
    results: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    for _ in range(arguments.rounds):
        for case, seen in results.items():
            options = ["--case", case, "--shape", arguments.shape, "--dtype", arguments.dtype]
            done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=True)
            milliseconds, mebibytes = map(float, done.stdout.split())
            seen.append((milliseconds, mebibytes))
    print(f"{arguments.shape}, {arguments.dtype}, one thread, median of {arguments.rounds} processes")
    for case, seen in results.items():
        milliseconds, mebibytes = (statistics.median(column) for column in zip(*seen, strict=True))
        print(f"{case:32} {milliseconds:8.0f} ms {mebibytes:+8.0f} MiB")


if __name__ == "__main__":
    main()
