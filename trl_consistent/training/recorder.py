# SPDX-License-Identifier: Apache-2.0
"""What a trainer writes beside its checkpoints: records of rollout batches, and its logs.

The format of records is in `records/`; here is decided when they are written. If writing fails, that is logged once and
nothing more is written; training continues.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from ..config import option
from ..correction.weights import CorrectionResult
from ..metrics.measure import finalize
from ..records.folder import FOLDER, RECORDS, TOKENIZER, set_aside
from ..records.logs import append_logs
from ..records.record import MismatchRecord, merge_ranks
from ..records.store import MAX_RECORDS, RecordStore, severity
from ..records.tokens import worst_tokens
from ..rollout.checks import Finding
from ..rollout.engine import EngineSettings
from ..statistics import Stat
from ..upstream.trl import text_tokenizer
from .batch import Batch
from .fingerprint import run_fingerprint
from .plan import Plan
from .trackers import log_worst_tokens, tracking


logger = logging.getLogger(__name__)


class Recorder(TrainerCallback):
    """
    Keeps the newest rollout batch at hand, and writes it every so many steps or when asked to.

    If a record cannot be written, that is logged once and nothing more is written; training continues.

    Args:
        fingerprint (`dict[str, Any]`): From [`run_fingerprint`].
        output_dir (`str`): Of the run.
        every (`int`): Optimizer steps from one record to the next.
        most_bytes (`int`): What the records of a rank may take together.
        accelerator (`accelerate.Accelerator`): Says which process this is, and of how many.
        tokenizer (`PreTrainedTokenizerBase`): Is saved beside the records, so that they can be read as text.
        callback_handler (`transformers.CallbackHandler`): Holds the trackers that are sent the worst tokens.
        weights_hash (`Callable`): Returns a hash of the trained tensors that the engine sampled with, or `None`.
    """

    def __init__(
        self,
        fingerprint: dict[str, Any],
        *,
        output_dir: str,
        every: int,
        most_bytes: int,
        accelerator: Any,
        tokenizer: Any,
        callback_handler: Any,
        weights_hash: Callable[[], str | None],
    ):
        self.folder = Path(output_dir, FOLDER)
        self._fingerprint, self._every = fingerprint, every
        self._accelerator = accelerator
        self._tokenizer, self._callback_handler = tokenizer, callback_handler
        self._weights_hash = weights_hash
        self._store = RecordStore(self.folder / RECORDS, MAX_RECORDS, most_bytes, rank=accelerator.process_index)
        self._failed = False
        self._forget()

    def _forget(self) -> None:
        self._parts: list[MismatchRecord] = []
        self._newest: list[MismatchRecord] = []
        self._stats: dict[str, Stat] = {}
        self._reasons: list[str] = []
        self._last_step: int | None = None
        self._unseen: MismatchRecord | None = None
        self._written: tuple[int, dict[str, float]] | None = None  # step and metrics of another batch than the newest
        self._is_fresh = True
        self._is_training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets an earlier training, and keeps its files apart from those of this one, unless it goes on from there."""
        self._forget()
        self._is_training, self._began_at = True, state.global_step
        if not state.is_world_process_zero or self._failed:
            return  # the others write nothing before the ranks have met
        with self._guarded("The folder for records"):
            if state.global_step == 0:
                set_aside(self.folder)
            tokenizer = self.folder / TOKENIZER
            if not tokenizer.exists():
                partial = self.folder / f"{TOKENIZER}.partial"
                self._tokenizer.save_pretrained(partial)
                os.replace(partial, tokenizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Lets go of the last batch."""
        self._forget()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds a line to the run's logs and shows the trackers the worst tokens of a new record, on the main process."""
        if not state.is_world_process_zero or self._failed or not self._is_training:
            return  # an evaluation of its own is no part of the run
        with self._guarded("The log for reports"):
            append_logs(self.folder, state.log_history[-1])
        record, self._unseen = self._unseen, None
        callbacks = self._callback_handler.callbacks
        if record is not None and tracking(callbacks):  # now, because trackers take steps in their order
            try:
                tokens = worst_tokens(record, tokenizer=self._tokenizer)
            except Exception as error:
                logger.warning(f"No table of the worst tokens of step {record.step}: {type(error).__name__}: {error}")
                return
            log_worst_tokens(callbacks, tokens, state.global_step)

    def add(
        self,
        batch: Batch,
        old: Tensor,
        sampling: Tensor,
        mask: Tensor,
        result: CorrectionResult | None,
        step: int,
    ) -> None:
        """Takes in a rollout batch, or a micro-batch of one. No copy leaves the device, and none is made but of masks.

        Args:
            batch (`dict[str, Any]`): Of TRL; in the loss, with `attended`, the mask of the model's attention.
            old, sampling, mask (`torch.Tensor` of shape `(B, T)`): As of [`mismatch_log_ratio`].
            result ([`CorrectionResult`], *optional*): What the correction made of it.
            step (`int`): The optimizer step that the batch is for, from 1.
        """
        if self._failed:
            return
        self._parts.append(
            MismatchRecord(
                prompt_ids=batch["prompt_ids"],
                prompt_mask=batch["prompt_mask"],
                completion_ids=batch["completion_ids"],
                completion_mask=batch["attended" if "attended" in batch else "completion_mask"],
                mask=mask != 0,  # a copy: rejections are about to leave the original
                sampling_per_token_logps=sampling,
                old_per_token_logps=old,
                ref_per_token_logps=batch.get("ref_per_token_logps"),
                advantages=batch.get("advantages"),
                weights=None if result is None else result.weights,
                keep_mask=None if result is None else result.keep_mask,
                step=step,
                rank=self._accelerator.process_index,
            )
        )

    def weigh(self, weights: Tensor) -> None:
        """Says what the loss will multiply what was added last by, where that is more than the correction's weights."""
        if self._parts and self._parts[-1].weights is not None:
            self._parts[-1].weights = weights

    def complete(self, stats: dict[str, Stat]) -> None:
        """Says that what was added is a whole rollout batch, with these statistics of all ranks; writes it if it is time."""
        if not self._parts or self._failed:
            return
        self._newest, self._parts, self._stats, self._reasons = self._parts, [], stats, []
        step = self._newest[0].step
        if self._last_step is None or step // self._every > self._last_step // self._every:
            self._last_step = step
            self.write("periodic")

    def write(self, reason: str) -> None:
        """Writes the newest rollout batch; once more, with one more reason, if it already is. Of several batches of a step,
        the file holds the worst."""
        if not self._newest:
            return
        with self._guarded("The record of a rollout batch"):
            if self._is_fresh:  # of a run that goes on from an earlier step, or had another disk here
                self._store.forget(self._began_at, self._accelerator.num_processes)
                self._is_fresh = False
            step, metrics = self._newest[0].step, finalize(self._stats)
            if not self._reasons and self._written is not None and self._written[0] == step:
                if severity(self._written[1]) > severity(metrics):
                    return
            self._reasons.append(reason)
            record = dataclasses.replace(
                merge_ranks(self._newest),
                rank=self._store.rank,
                reason="; ".join(self._reasons),
                metrics=metrics,
                fingerprint={**self._fingerprint, "weights": {"step": step - 1, "fingerprint": self._weights_hash()}},
            )
            self._store.write(record)
            self._written = step, metrics
            if self._accelerator.is_main_process:
                self._unseen = record

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed, self._parts, self._newest = True, [], []
            logger.warning(
                f"{what} could not be written to {self.folder} ({type(error).__name__}: {error}). This run writes no more "
                "records; training goes on. Make room or set another `output_dir`; `mismatch_record_steps=0` turns "
                "records off."
            )


def recorder_of(trainer: Any, plan: Plan, engine: EngineSettings, findings: list[Finding]) -> Recorder | None:
    """Returns the recorder of a [`ConsistentGRPOTrainer`]; `None` where `mismatch_record_steps` is 0. Arguments are those
    of [`run_fingerprint`]."""
    args = trainer.args
    if not (every := option(args, "mismatch_record_steps")):
        return None
    rollout_engine = trainer.vllm_generation if trainer.use_vllm else None
    return Recorder(
        run_fingerprint(trainer, plan, engine, findings),
        output_dir=args.output_dir,
        every=every,
        most_bytes=option(args, "mismatch_record_bytes"),
        accelerator=trainer.accelerator,
        tokenizer=text_tokenizer(trainer),
        callback_handler=trainer.callback_handler,
        weights_hash=lambda: getattr(rollout_engine, "weight_fingerprint", None),
    )
