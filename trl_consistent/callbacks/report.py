# SPDX-License-Identifier: Apache-2.0
"""A callback that writes the report at the end of a training."""

import atexit
import logging
from pathlib import Path
from typing import Any

from ..records.folder import FOLDER, set_aside
from ..records.logs import append_logs
from ..training.hooks import TrainerHooks
from .guarded import GuardedCallback


logger = logging.getLogger(__name__)


class MismatchReportCallback(GuardedCallback, TrainerHooks):
    """
    Writes `report.html` to the `output_dir` when training ends, is stopped, or fails.

    It works with any trainer that logs. With TRL's own `GRPOTrainer` the report shows its `sampling/*`, with
    `ConsistentGRPOTrainer` all metrics and the recorded batches. Every log goes to `output_dir/mismatch/logs.jsonl`, so
    that `trl-consistent report` works at any time, without a checkpoint.

    A training that fails calls no `on_train_end`. `ConsistentGRPOTrainer` has the report written nevertheless; with another
    trainer it is written when the process exits. If the report or a log cannot be written, the callback logs the error once
    and training continues.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[MismatchReportCallback()])
    ```
    """

    purpose = "the report of this run"

    def __init__(self) -> None:
        self._output_dir: str | None = None  # set while a training goes on, on the rank that writes
        self._keeps_logs = True  # unless the trainer keeps them

    def write(self, output_dir: str | Path) -> Path | None:
        """Writes the report of the run in `output_dir` now instead of later, and returns its path.

        Returns `None` if that fails; an error in the log says why.
        """
        self._release()
        try:
            from ..report import write_report

            path = write_report(output_dir)
        except Exception as error:  # this one must not mask the error that ended the training
            logger.error(f"The report of {output_dir} could not be written: {error!r}. The training is not affected.")
            return None
        logger.info(f"The report of this run is in {path}.")
        return path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._output_dir = args.output_dir
        atexit.register(self.finish)
        if state.global_step == 0 and self._keeps_logs:
            set_aside(Path(args.output_dir, FOLDER))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if (
            logs and self._output_dir is not None and self._keeps_logs
        ):  # no output_dir in an evaluation outside training
            append_logs(Path(args.output_dir, FOLDER), {**logs, "step": state.global_step, "epoch": state.epoch})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.finish()

    def attached(self, keeps_records: bool) -> None:
        self._keeps_logs = not keeps_records

    def training_ended(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Writes the report of the training that has begun, unless it is written already."""
        if self._output_dir is not None:
            self.write(self._output_dir)

    def _release(self) -> None:
        self._output_dir = None
        atexit.unregister(self.finish)
