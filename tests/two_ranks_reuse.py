# SPDX-License-Identifier: Apache-2.0
"""Launched on two ranks by test_launch.py: one step from recomputed and from reused old log-probs, on ranks that hold and
reject different numbers of tokens."""

import json
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.short_training import LOSS_TYPES, ConsistentGRPOTrainer, train


model, output = sys.argv[1:3]
report = {}
for number, loss_type in enumerate(LOSS_TYPES):
    for source in ("recompute", "reuse"):
        seen = []

        def plant(ids, logps, seen=seen):
            """Rank 1 rejects every other completion, rank 0 every fourth; the rest is off by a third of a nat."""
            import torch.distributed as dist

            seen.append(None)
            rejected = len(seen) % (2 if dist.get_rank() else 4) == 0
            return [lp - (3.0 if rejected else 0.3 * (-1) ** i) for i, lp in enumerate(logps)]

        options = {"correction": "tis", "correction_rejections": {"k2/sequence_mean": [None, 1.0]}}
        options |= {"lora": number % 2 == 1, "beta": 0.1 * (number % 4 < 2)}
        kept = train(
            ConsistentGRPOTrainer, model, Path(output), plant=plant, loss_type=loss_type, old_logprobs=source,
            max_steps=1, max_grad_norm=1e9, learning_rate=1e-3, gradient_accumulation_steps=4, **options,
        )  # fmt: skip
        log = {k: v for k, v in kept.logs[0].items() if k == "loss" or k.startswith(("mismatch/", "correction/"))}
        gradients = {name: value.flatten()[:50].tolist() for name, value in kept.gradients[0].items()}
        report[f"{loss_type}/{source}"] = {"log": log, "gradients": gradients}
rank = kept.trainer.accelerator.process_index
report["world"] = kept.trainer.accelerator.num_processes
Path(output, f"rank{rank}.json").write_text(json.dumps(report))
kept.trainer.accelerator.end_training()
