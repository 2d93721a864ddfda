# /// script
# dependencies = [
#     "trl-consistent[peft,report,vllm]",
#     "tensorboard",
# ]
# ///
# SPDX-License-Identifier: Apache-2.0
"""
LoRA fine-tuning with GRPO on single-digit addition, training-inference mismatch measured and corrected.

On a GPU:

accelerate launch examples/grpo_lora.py \
    --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct --output_dir grpo-lora \
    --use_peft --lora_r 8 --lora_alpha 32 --learning_rate 1e-3 --max_steps 20 \
    --per_device_train_batch_size 16 --num_generations 8 --max_completion_length 16 \
    --use_vllm --correction tis --logging_steps 1 --report_to tensorboard

On a CPU, `scripts/demo` fills in the rest. What happened is in grpo-lora/report.html afterwards, and while it runs on the
page of `trl-consistent watch grpo-lora`.

1. The reward is mostly about the format (answer in digits), which a 135M model learns within minutes; adding right is
   worth half as much.
2. `--prompt` and `--no_conversational` make the same script train a model without a chat template.
"""

import random
from dataclasses import dataclass, field

from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config

from trl_consistent import ConsistentGRPOConfig as GRPOConfig
from trl_consistent import ConsistentGRPOTrainer as GRPOTrainer
from trl_consistent import MismatchAlertCallback, MismatchPanelCallback, MismatchReportCallback


@dataclass
class ExampleArguments:
    prompt: str = field(default="What is {a} + {b}?", metadata={"help": "Prompt; {a} and {b} are the digits."})
    system: str = field(default="Be brief.", metadata={"help": "System message."})
    conversational: bool = field(default=True, metadata={"help": "Whether to apply the model's chat template."})


def text_of(completion) -> str:
    return (completion if isinstance(completion, str) else completion[0]["content"]).strip()


def digits_reward(completions, **kwargs) -> list[float]:
    """Share of the answer's characters that are digits."""
    texts = [text_of(completion) for completion in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def correct_reward(completions, answer, **kwargs) -> list[float]:
    """1 if the answer is the sum and nothing else."""
    return [float(text_of(completion) == truth) for completion, truth in zip(completions, answer, strict=True)]


def additions(arguments: ExampleArguments, count: int = 512, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randrange(10), rng.randrange(10)
        prompt = arguments.prompt.format(a=a, b=b)
        chat = [{"role": "system", "content": arguments.system}, {"role": "user", "content": prompt}]
        rows.append({"prompt": chat if arguments.conversational else prompt, "answer": str(a + b)})
    return Dataset.from_list(rows)


def main() -> None:
    parser = TrlParser((ExampleArguments, GRPOConfig, ModelConfig))
    arguments, training_args, model_args = parser.parse_args_and_config()
    training_args.reward_weights = training_args.reward_weights or [1.0, 0.5]
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[digits_reward, correct_reward],
        args=training_args,
        train_dataset=additions(arguments),
        peft_config=get_peft_config(model_args),
        callbacks=[MismatchAlertCallback(), MismatchPanelCallback(), MismatchReportCallback()],
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
