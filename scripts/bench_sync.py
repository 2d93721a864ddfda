# SPDX-License-Identifier: Apache-2.0
"""A weight sync of ours against TRL's, and what checking it costs: `python scripts/bench_sync.py`. Three minutes on two
CPU cores.

SmolLM2-135M-Instruct with LoRA (r=8) on all linear layers. First the stream alone, no engine: seconds and the largest
memory above the model, ours (merged aside) over TRL's (merged in place and subtracted again), and what syncs leave of
the base weights. Then with a real colocated engine: seconds of a sync unverified and of each check.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def build(dtype: str):
    """The model with adapters some way from where they began."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from scripts.demo import build_smollm2, cached

    path = str(cached("SmolLM2-135M-Instruct", build_smollm2))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    move(model)
    return model


def move(model) -> None:
    """Changes the adapters, as steps of training do."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.01 * torch.randn_like(weight)


def in_place(model):
    """What TRL streams."""
    model.merge_adapter()
    for name, weight in model.named_parameters():
        if model.prefix not in name:
            yield name, weight.data
    model.unmerge_adapter()


def peak(call) -> float:
    """The most memory, in MiB, that tensors took while `call` ran, above what they took before."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    taken = most = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        taken += change
        most = max(most, taken)
    return most / 2**20


def measure_stream(dtype: str, rounds: int) -> None:
    """Prints time, memory and drift of both ways."""
    import torch

    from trl_consistent.rollout.weights import merged_parameters

    model = build(dtype)
    base = {name: weight for name, weight in model.named_parameters() if "base_layer" in name}
    before = {name: weight.detach().clone() for name, weight in base.items()}
    engine = {name: weight.detach().clone() for name, weight in model.get_base_model().named_parameters()}
    buffers = {weight.shape: weight for weight in engine.values()}  # stands in for an engine: one copy of each tensor
    del engine
    streams = (("ours", merged_parameters), ("TRL", in_place))
    seconds = {"ours": [], "TRL": []}
    with torch.no_grad():
        for turn in range(rounds + 1):  # the first one warms up
            move(model)
            for side, stream in streams:
                began = time.perf_counter()
                for _, tensor in stream(model):
                    buffers[tensor.shape].copy_(tensor)
                if turn:
                    seconds[side].append(time.perf_counter() - began)
                if turn == 0 and side == "ours":
                    touched = sum(not torch.equal(base[name], before[name]) for name in base)
                    print(f"{dtype}: base tensors changed by a sync of ours: {touched} of {len(base)}")
                if turn == 0 and side == "TRL":
                    report_drift(base, before, "a sync of TRL's")
        report_drift(base, before, f"{rounds + 1} of TRL's")
        memory = {side: peak(lambda stream=stream: [None for _ in stream(model)]) for side, stream in streams}
    ours, trl = (statistics.median(seconds[side]) for side in ("ours", "TRL"))
    print(
        f"{dtype}: stream {ours / trl:.2f} of TRL's time ({ours:.2f} s, {trl:.2f} s); memory on top of the model "
        f"{memory['ours']:.1f} MiB, TRL's {memory['TRL']:.1f} MiB"
    )


def report_drift(base, before, what: str) -> None:
    changed = sum((base[name] != before[name]).sum().item() for name in base)
    most = max((base[name].float() - before[name].float()).abs().max().item() for name in base)
    share = changed / sum(weight.numel() for weight in before.values())
    print(f"  after {what}: {share:.1%} of the base weights differ, by {most:.1e} at most", flush=True)


def measure_checks(rounds: int) -> None:
    """Prints what a sync into a real engine costs, and each check."""
    from scripts.bench_step import build as build_trainer
    from trl_consistent.rollout.ledger import SyncLedger, checksums

    arguments = argparse.Namespace(batch=4, accumulation=1, tokens=16, gradient_checkpointing=False)
    generation = build_trainer("ours", arguments, "/tmp/bench_sync").vllm_generation
    engine = generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    verified = copy.copy(generation)
    verified._syncs_to_verify, verified._ledger = float("inf"), SyncLedger()
    parts = {
        "sync, unverified": generation.sync_weights,
        "sync, verified": verified.sync_weights,
        "of it, the probe": verified.probe,
        "of it, checksums of what is trained": lambda: checksums(verified._trained()),
        "check before a generate": verified._staleness,
        "of it, checksums of the engine": lambda: verified._ledger.overwritten(engine),
    }
    for name, call in parts.items():
        seconds = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        print(f"{name}: {statistics.median(seconds[1:]):.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="syncs of each side (default: %(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker == "checks":
        return measure_checks(arguments.rounds)
    if arguments.worker:
        return measure_stream(arguments.worker, arguments.rounds)

    from trl_consistent.rollout.environment import cpu_variables

    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    quiet |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    environment = {**cpu_variables(), **quiet, "TRANSFORMERS_VERBOSITY": "error", **os.environ}
    for name in ("bfloat16", "float32", "checks"):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--worker", name], env=environment, check=True)


if __name__ == "__main__":
    main()
