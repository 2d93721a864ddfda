# SPDX-License-Identifier: Apache-2.0
"""What we rely on in the tracker callbacks of transformers and in the trackers behind them."""

from typing import Any, NamedTuple


VERSIONS = {"transformers": ">=5.17,<5.25", "trackio": ">=0.40,<0.44"}

NAMES = {
    "transformers.integrations:TensorBoardCallback": {"tb_writer": "the writer, `None` until training begins"},
    "transformers.integrations:WandbCallback": {"_wandb": "the module, whose `run` is `None` until training begins"},
    "transformers.integrations:TrackioCallback": {"_trackio": "the module"},
    "transformers.integrations": {"rewrite_logs": "puts `train/` or `eval/` before names as the callbacks do"},
    "trackio.context_vars": {"current_run": "the run that `trackio.log` writes to"},
    "trackio.run:Run": {"_next_step": "the step that the next call of `log` without a `step` gets"},
}


class Tracker(NamedTuple):
    """What a callback of transformers sends logs to: a TensorBoard `writer`, or else a `module` like W&B's."""

    writer: Any = None
    module: Any = None
    row: int | None = None
    """The `step` for `module.log` that leaves those of the calls after it as they are; `None` is a new one."""


def tracker_of(callback: Any) -> Tracker | None:
    """The tracker that a callback of TensorBoard, W&B or trackio has started; `None` before, or of other callbacks."""
    from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

    if isinstance(callback, TensorBoardCallback):
        return None if callback.tb_writer is None else Tracker(writer=callback.tb_writer)
    if isinstance(callback, WandbCallback):
        wandb = callback._wandb
        return None if wandb is None or wandb.run is None else Tracker(module=wandb)
    if isinstance(callback, TrackioCallback):
        run = callback._trackio.context_vars.current_run.get()
        # TRL and transformers let trackio count; a step above its count would shift all that follow.
        return None if run is None else Tracker(module=callback._trackio, row=max(run._next_step - 1, 0))
    return None


def as_transformers_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """The same under the names that the callbacks of transformers give them: `train/...`, `eval/...`."""
    from transformers.integrations import rewrite_logs

    return rewrite_logs(logs)
