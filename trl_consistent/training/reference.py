# SPDX-License-Identifier: Apache-2.0
"""The policy as its own reference every so many steps."""

from typing import Any

from ..callbacks.guarded import _Resumable


class ReferenceResetCallback(_Resumable):
    """Notes, every so many optimizer steps, that the reference is due to be reset; `ref_reset_steps` adds it."""

    _args, _attributes = ("steps",), ("is_due",)

    def __init__(self, steps: int):
        self.steps, self.is_due = steps, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_due = self.is_due or state.global_step % self.steps == 0
