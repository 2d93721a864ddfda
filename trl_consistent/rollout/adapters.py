# SPDX-License-Identifier: Apache-2.0
"""Adapters that a colocated vLLM gets as they are, with `rollout_engine_kwargs={"enable_lora": True}`.

`weights.py` is the other way: it merges adapters into the base weights, and the engine never sees them.
"""

import contextlib
import functools
import os
import tempfile
from typing import Any

from ..upstream.substitution import substituted
from ..upstream.vllm import exchange_adapter


class AdapterSender:
    """Hands the active adapter of a model to a colocated engine, and has the engine generate with it."""

    def __init__(self) -> None:
        self._request: Any = None  # vLLM's request for the adapter that the engine holds

    def send(self, model: Any, llm: Any) -> None:
        """Makes the engine hold the active adapter of `model` in place of the one it got before.

        vLLM refuses what it does not support (DoRA, `modules_to_save`).

        Args:
            model (`peft.PeftModel`): The trained model, with one active adapter.
            llm (`vllm.LLM`): The engine.
        """
        (name,) = model.active_adapters
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
            path = folder if name == "default" else os.path.join(folder, name)
            self._request = exchange_adapter(llm, path, self._request)
        llm.reset_prefix_cache()

    def generating(self, llm: Any) -> contextlib.AbstractContextManager[None]:
        """Within the block, the engine generates with the adapter that it holds, if any."""
        if self._request is None:
            return contextlib.nullcontext()
        return substituted(llm, generate=functools.partial(llm.generate, lora_request=self._request))
