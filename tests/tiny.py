# SPDX-License-Identifier: Apache-2.0
"""Models of a few thousand parameters, and a dataset and a reward to train them with."""

import torch
from datasets import Dataset


PROMPTS = ["one two", "three", "four five six", "seven eight"]


def build_tokenizer():
    """A word-level tokenizer over a small vocabulary, trained on nothing but the list below."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"one two three four five six seven eight nine ten".split()]
    words += [f"w{index}" for index in range(64 - len(words))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def save_model(directory, tokenizer, moe=False, tie_word_embeddings=False) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.3,  # peaked enough that a wrong weight shows
        "tie_word_embeddings": tie_word_embeddings,
    }
    if moe:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shared,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                intermediate_size=64,
                decoder_sparse_step=1,
            )
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**shared, intermediate_size=64))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def dataset() -> Dataset:
    return Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * 8)


def letters_reward(completions, **kwargs) -> list[float]:
    """Anything that differs between completions."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]
