# SPDX-License-Identifier: Apache-2.0
"""Launched on two ranks by test_rollout_server.py: trains through a server that rank 0 alone talks to, then lets rank 0
fail at each place where it does, and writes what each rank saw."""

import json
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.short_training import ConsistentGRPOTrainer, Keep, build
from trl_consistent.rollout.client import SocketVLLMClient


model, output, url, port = sys.argv[1:5]
fail = None


def failing(method):
    """The client's `method`, which fails on rank 0 (the only one that has a client) if it is `fail`."""
    original = getattr(SocketVLLMClient, method)

    def call(self, *args, **kwargs):
        if method == fail:
            raise RuntimeError(f"planted in {method}")
        return original(self, *args, **kwargs)

    setattr(SocketVLLMClient, method, call)


report = {}
for place in (None, "get_server_info", "update_named_params", "_served_version", "get_sequence_logprobs"):
    if place is not None:
        failing(place)
    fail, keep = place, Keep()
    try:
        trainer = build(
            ConsistentGRPOTrainer, model, Path(output), callbacks=[keep], lora=True, max_steps=2, learning_rate=1e-2,
            vllm_mode="server", vllm_server_base_url=url, vllm_server_timeout=30, vllm_group_port=int(port),
            correction="tis",
        )  # fmt: skip
        trainer.train()
        report["world"], rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        report["logs"] = [log["mismatch/abs_diff/max"] for log in keep.logs if "loss" in log]
        report["weights"] = float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters()))
    except Exception as error:
        report[place] = str(error)
    if hasattr(getattr(trainer, "vllm_generation", None), "vllm_client"):
        trainer.vllm_generation.vllm_client.close_communicator()
Path(output, f"rank{rank}.json").write_text(json.dumps(report))
trainer.accelerator.end_training()
