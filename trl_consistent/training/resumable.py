# SPDX-License-Identifier: Apache-2.0
"""A callback whose state goes with the checkpoints."""

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class Resumable(TrainerCallback, ExportableState):
    """A callback that goes on, in a resumed run with the same arguments, from what the checkpoint holds, whatever
    `restore_callback_states_from_checkpoint` says."""

    _args: tuple[str, ...]
    _attributes: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        return {
            "args": {name: getattr(self, name) for name in self._args},
            "attributes": {name: getattr(self, name) for name in self._attributes},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The trainer fails to save when the checkpoint it resumed from does not know this callback.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step and isinstance(saved, dict) and saved["args"] == self.state()["args"]:
            for name, value in saved["attributes"].items():
                setattr(self, name, value)
