# SPDX-License-Identifier: Apache-2.0
"""The report at the end of a training."""

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

    Works with any trainer that logs: with TRL's own `GRPOTrainer` the report shows its `sampling/*`, with
    `ConsistentGRPOTrainer` all metrics and the recorded batches. Every log goes to `output_dir/mismatch/logs.jsonl`, so
    that `trl-consistent report` can be asked at any time, without a checkpoint.

    A training that fails ends without a word to callbacks: `ConsistentGRPOTrainer` has the report written then, with
    another trainer it is written as the process exits. What cannot be written is said once and stops nothing.

    Example:

    ```python
    trainer = GRPOTrainer(..., callbacks=[MismatchReportCallback()])
    ```
    """

    purpose = "the report of this run"

    def __init__(self) -> None:
        self._output_dir: str | None = None  # of a training that has not ended, on the rank that writes
        self._keeps_logs = True  # not where the trainer does

    def write(self, output_dir: str | Path) -> Path | None:
        """Writes the report of the run in `output_dir`, now instead of later; `None`, with a log, if that fails."""
        self._release()
        try:
            from ..report import write_report

            path = write_report(output_dir)
        except Exception as error:  # whatever it is, it must not mask what ended the training
            logger.error(f"The report of {output_dir} could not be written: {error!r}. Training is not affected.")
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
        if logs and self._output_dir is not None and self._keeps_logs:  # not an evaluation of its own
            append_logs(Path(args.output_dir, FOLDER), {**logs, "step": state.global_step, "epoch": state.epoch})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.finish()

    def attached(self, keeps_records: bool) -> None:
        self._keeps_logs = not keeps_records

    def training_ended(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Writes the report of the training that has begun, once; does nothing if it has been."""
        if self._output_dir is not None:
            self.write(self._output_dir)

    def _release(self) -> None:
        self._output_dir = None
        atexit.unregister(self.finish)
