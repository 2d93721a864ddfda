# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine says of itself."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EngineSettings:
    """What an engine says of itself; `None` where it does not.

    Args:
        dtype (`torch.dtype`, *optional*): In which it multiplies matrices.
        head_dtype (`torch.dtype`, *optional*): In which it computes logits.
        logprobs_mode (`str`, *optional*): Of vLLM.
        quantization (`str`, *optional*): Of the weights or of the KV cache.
        model_class (`str`, *optional*): The class that runs the model.
    """

    dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    logprobs_mode: str | None = None
    quantization: str | None = None
    model_class: str | None = None
