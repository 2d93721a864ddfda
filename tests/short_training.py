# SPDX-License-Identifier: Apache-2.0
"""Runs short trainings on the synthetic engine and keeps what the optimizer saw."""

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_consistent import ConsistentGRPOConfig, ConsistentGRPOTrainer
from trl_consistent.rollout.synthetic import gaussian_noise as noise
from trl_consistent.rollout.synthetic import synthetic_engine

from .tiny import dataset, letters_reward


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class Keep(TrainerCallback):
    """Gradients before each optimizer step, weights after it, and every log."""

    def __init__(self):
        self.gradients, self.weights, self.logs = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def build(cls, model, tmp_path, lora=False, callbacks=(), rollout_func=None, rows=None, inputs=None, **options):
    config = GRPOConfig if cls is GRPOTrainer else ConsistentGRPOConfig
    defaults = {
        "output_dir": str(tmp_path / cls.__name__),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "use_vllm": True,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "activation_checkpointing": False,
    }
    rest = {"peft_config": LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear")} if lora else {}
    rest |= inputs or {}
    args = options.pop("args", None) or config(**{**defaults, **options})
    return cls(
        model=model,
        reward_funcs=letters_reward,
        args=args,
        train_dataset=dataset() if rows is None else Dataset.from_list(rows),
        callbacks=list(callbacks),
        rollout_func=rollout_func,
        **rest,
    )


def train(cls, model, tmp_path, plant=None, **options):
    """Trains and returns what was kept, with the trainer as `.trainer`."""
    keep = Keep()
    with synthetic_engine(plant):
        keep.trainer = build(cls, model, tmp_path, callbacks=[keep], **options)
        keep.trainer.train()
    return keep


def assert_same_training(a, b):
    assert len(a.weights) == len(b.weights) == 3
    for kept in ("gradients", "weights"):
        for step, (x, y) in enumerate(zip(getattr(a, kept), getattr(b, kept), strict=True)):
            assert x.keys() == y.keys()
            for name in x:
                assert torch.equal(x[name], y[name]), f"{kept} of step {step + 1}: {name}"
    losses = [[log["loss"] for log in keep.logs if "loss" in log] for keep in (a, b)]
    assert losses[0] == losses[1]


__all__ = [
    "LOSS_TYPES",
    "ConsistentGRPOTrainer",
    "GRPOTrainer",
    "Keep",
    "assert_same_training",
    "build",
    "noise",
    "synthetic_engine",
    "train",
]
