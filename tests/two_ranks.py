# SPDX-License-Identifier: Apache-2.0
"""Launched on two ranks by test_launch.py: trains with a real vLLM per rank and writes what each rank saw. In the third of
four steps the engine of rank 1 calls a token impossible, which ends the training of both."""

import json
import os
import sys
from pathlib import Path

import torch
from trl import GRPOConfig, GRPOTrainer  # ours, swapped in by trl_consistent.run

from trl_consistent import MismatchAlertCallback, finalize


sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import inside
from tests.tiny import dataset, letters_reward


model, output = sys.argv[1:3]
assert GRPOTrainer.__name__ == "ConsistentGRPOTrainer"
args = GRPOConfig(
    output, max_steps=4, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, learning_rate=1e-2,
    logging_steps=1, use_vllm=True, vllm_max_model_length=64, vllm_gpu_memory_utilization=0.1, bf16=False,
    report_to="tensorboard", save_strategy="no", correction="tis_two_sided", correction_normalize="token",
    rollout_engine_kwargs={"dtype": "bfloat16"}, activation_checkpointing=False,
    mismatch_record_steps=2,
)  # fmt: skip


class Watched(GRPOTrainer):
    """Keeps the weights of what each rank's loss counts."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        keep = inside.loss_mask(batch).bool()
        weights = batch["importance_sampling_ratio"][keep]
        self.seen[-1] |= {"weights": weights.sum().item(), "kept": keep.sum().item()}
        return batch


def watched(merge):
    """Keeps each rank's own statistics, and counts collectives, around the merge."""

    def call(stats):
        trainer.seen.append(
            {"local": {k: v.value.tolist() for k, v in stats.items()}, "local_metrics": finalize(stats)}
        )
        gather, calls = trainer.accelerator.gather, []
        trainer.accelerator.gather = lambda x: calls.append(1) or gather(x)
        merged = merge(stats)
        trainer.accelerator.gather = gather
        trainer.seen[-1] |= {"merged": {k: v.value.tolist() for k, v in merged.items()}, "collectives": len(calls)}
        return merged

    return call


trainer = Watched(model=model, reward_funcs=letters_reward, args=args, train_dataset=dataset())
trainer.seen = []
inside.wrap_merge(trainer, watched)
rank = trainer.accelerator.process_index
generate = trainer.vllm_generation.generate


def uneven(*a, **k):
    """Rank 1 gets completions of one to four tokens, so that a mean of means would be wrong."""
    prompts, completions, logprobs, ids = generate(*a, **k)
    if rank == 1:
        cut = [1 + row % 4 for row in range(len(completions))]
        completions = [c[:n] for c, n in zip(completions, cut, strict=True)]
        logprobs = [c[:n] for c, n in zip(logprobs, cut, strict=True)]
        if trainer.state.global_step == 2:
            logprobs[0][0] = [float("-inf")]
    return prompts, completions, logprobs, ids


trainer.vllm_generation.generate = uneven
trainer.add_callback(MismatchAlertCallback(["record", "stop"]))
trainer.train()
report = {
    "world": trainer.accelerator.num_processes,
    "seen": trainer.seen,
    "logs": trainer.state.log_history,
    "weights": float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters())),
    "threads": torch.get_num_threads(),
    "omp": os.environ["OMP_NUM_THREADS"],
}
Path(output, f"rank{rank}.json").write_text(json.dumps(report))
trainer.save_state()
trainer.accelerator.end_training()
