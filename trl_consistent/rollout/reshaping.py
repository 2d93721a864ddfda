# SPDX-License-Identifier: Apache-2.0
"""Settings by which an engine reshapes the model's distribution before it samples."""

from typing import Any

from ..config import option, setting
from ..support import ORDERS, Sampling


# What each engine reshapes the model's distribution by, besides the temperature, with the neutral values.
_TRUNCATIONS: dict[str, tuple[Any, ...]] = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
_RESHAPING: dict[str, dict[str, tuple[Any, ...]]] = {
    "vllm": {
        **_TRUNCATIONS,
        "repetition_penalty": (None, 1.0),
        "presence_penalty": (None, 0.0),
        "frequency_penalty": (None, 0.0),
        "min_tokens": (None, 0),
        "logit_bias": (None, {}),
        "bad_words": (None, []),
        "allowed_token_ids": (None,),
        "structured_outputs": (None,),
        "vllm_structured_outputs_regex": (None,),
    },
    "transformers": {
        **_TRUNCATIONS,
        "repetition_penalty": (None, 1.0),
        "typical_p": (None, 1.0),
        "epsilon_cutoff": (None, 0.0),
        "eta_cutoff": (None, 0.0),
        "top_h": (None,),
        "min_new_tokens": (None, 0),
        "min_length": (None, 0),
        "no_repeat_ngram_size": (None, 0),
        "suppress_tokens": (None, []),
        "begin_suppress_tokens": (None, []),
        "bad_words_ids": (None, []),
        "sequence_bias": (None, {}),
        "exponential_decay_length_penalty": (None,),
        "guidance_scale": (None, 1.0),
        "watermarking_config": (None,),
    },
}
# transformers drops these processors when it batches continuously
_DROPPED = ("repetition_penalty", "min_length", "min_new_tokens")
_RESHAPING["continuous_batching"] = {k: v for k, v in _RESHAPING["transformers"].items() if k not in _DROPPED}
FOLLOWED = tuple(name for name in Sampling.__dataclass_fields__ if name != "order")
"""What `rollout_support` makes the trainer follow, where the engine has it."""


def engine_of(args: Any) -> str:
    """Which engine a config asks for, a key of `ORDERS`."""
    batches = args.use_transformers_continuous_batching
    return "vllm" if args.use_vllm else "continuous_batching" if batches else "transformers"


def _reshaping(args: Any, engine: str) -> dict[str, Any]:
    asked = {name: (setting(args, name), neutral) for name, neutral in _RESHAPING[engine].items()}
    return {name: value for name, (value, neutral) in asked.items() if value not in neutral}


def sampling_of(args: Any, engine: str) -> Sampling:
    """The settings, beyond the temperature, by which `engine` (a key of `ORDERS`) reshapes the model's distribution."""
    changes = {name: value for name, value in _reshaping(args, engine).items() if name in FOLLOWED}
    return Sampling(**changes, order=ORDERS[engine])


def unfollowed_sampling(args: Any) -> dict[str, Any]:
    """Settings that reshape what the engine samples from, and that the trainer's log-probs do not follow."""
    followed = FOLLOWED if option(args, "rollout_support") else ()
    changes = {name: value for name, value in _reshaping(args, engine_of(args)).items() if name not in followed}
    temperature = setting(args, "temperature")
    return changes if temperature == args.temperature else {"temperature": temperature} | changes
