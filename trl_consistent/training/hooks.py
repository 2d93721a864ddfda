# SPDX-License-Identifier: Apache-2.0
"""What [`ConsistentGRPOTrainer`] tells callbacks beyond the events of transformers, and asks of them."""

from typing import Any

from transformers import TrainerCallback


class TrainerHooks(TrainerCallback):
    """A callback that also takes part in what only our trainer has. All methods do nothing unless overridden; with another
    trainer nobody calls them."""

    def attached(self, keeps_records: bool) -> None:
        """Is called when training begins, before `on_train_begin`.

        Args:
            keeps_records (`bool`): Whether the trainer writes records and logs to `output_dir/mismatch/`.
        """

    def edit_logs(self, logs: dict[str, Any]) -> None:
        """Is called with what is about to be logged, which it may add to, before any tracker sees it."""

    def reasons_to_record(self) -> list[str]:
        """Returns, once each, why the newest rollout batch should be recorded; asked after each log."""
        return []

    def training_ended(self) -> None:
        """Is called when `train` is left, by whatever way; after a failure there is no `on_train_end`."""
