# SPDX-License-Identifier: Apache-2.0
"""`ConsistentGRPOTrainer`: TRL's trainer, with what it returned edited. The math is in `corrections.py` and
`metrics.py`, the engine in `rollout/vllm.py`."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from . import _compat
from .config import ConsistentGRPOConfig, correction_of
from .corrections import Correction, correct, normalized
from .metrics import Stat, correction_metrics, finalize, merge, mismatch_metrics
from .ratios import mismatch_log_ratio
from .rollout.vllm import INSTALL, check_completions, check_server, consistent_generation


logger = logging.getLogger(__name__)


# Statistics whose quotient is the mean weight, by `Correction.normalize`.
_MEANS = {"token": ("weight", "kept"), "sequence": ("sequence_weight", "kept_sequences")}


def _option(args: GRPOConfig | None, name: str) -> Any:
    """One of our fields; its default where `args` is a plain `GRPOConfig`."""
    return getattr(args, name, ConsistentGRPOConfig.__dataclass_fields__[name].default)


def _checked(rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(rollout_func)
    def checked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        output = rollout_func(*args, **kwargs)
        if "completion_ids" in output:  # if not, TRL says which keys it wants
            check_completions(output["completion_ids"], output.get("logprobs"))
        return output

    return checked


class ConsistentGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that measures and corrects training-inference mismatch.

    Everything is inherited; with our options unset, loss, gradients and weights are those of `GRPOTrainer`, bit for bit.
    Added are the metrics of [`METRICS`] on every step with sampling log-probs, the corrections of [`PRESETS`], and a
    rollout engine whose weight syncs are checked.

    Example:

    ```python
    >>> from trl_consistent import ConsistentGRPOConfig as GRPOConfig, ConsistentGRPOTrainer as GRPOTrainer
    ```

    Args:
        model, reward_funcs, args, ...:
            As of `GRPOTrainer`, in the same order. `args` may be a plain `GRPOConfig`.
    """

    _tag_names = [*GRPOTrainer._tag_names, "trl-consistent"]

    # Class-level, because TRL's tests build trainers without `__init__`; rebound, never changed in place.
    _correction: Correction | None = None
    _replaces_ratio = False
    _training_logps: Tensor | None = None
    _micro_batches: tuple[dict[str, Stat], ...] = ()
    _window: dict[str, dict[str, Stat]] = {}
    rollout_func: Callable[..., dict[str, Any]] | None

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: GRPOConfig | None = None, *others: Any, **kwargs: Any
    ):
        if args is not None and args.use_vllm and not _compat.vllm_is_available():
            raise ImportError(f"`use_vllm=True`, but vLLM is not installed: {INSTALL}.")
        with consistent_generation(_option(args, "rollout_engine_kwargs") or {}, _option(args, "rollout_verify_sync")):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        if self.rollout_func is not None:
            self.rollout_func = _checked(self.rollout_func)
        self._correction = correction_of(self.args)
        preset, mode = _option(self.args, "correction"), self.args.vllm_importance_sampling_mode
        known_to_trl = mode in _compat.TRL_MODES
        self._replaces_ratio = self._correction is not None and (
            preset not in (None, "none")
            or not known_to_trl
            or bool(self._correction.rejections)
            or self._correction.normalize != "none"
        )
        if self.use_vllm and self.vllm_mode == "server" and self.accelerator.is_main_process:
            if self._replaces_ratio or not self.vllm_importance_sampling_correction:  # else TRL warns
                info = self.vllm_generation.vllm_client.get_server_info()
                check_server(info, correcting=self._replaces_ratio)
        if not known_to_trl:  # TRL computes (and logs as sampling/*) the raw token ratio, we replace it
            self.vllm_importance_sampling_mode = _compat.PASS_THROUGH_MODE
            self.vllm_importance_sampling_clip_min = self.vllm_importance_sampling_clip_max = None

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        check_completions(completion_ids, logprobs)
        return completion_ids, logprobs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        sampling, old = output.get("sampling_per_token_logps"), output.get("old_per_token_logps")
        if sampling is None or old is None:
            return output  # nothing to compare, or compared in the training forward, see `_compute_loss`
        mask = self._loss_mask(output)
        stats = mismatch_metrics(old, sampling, mask)
        correction = self._correction
        if correction is None or "importance_sampling_ratio" not in output:
            self._record(stats)
            return output
        result = correct(mismatch_log_ratio(old, sampling, mask), mask, correction, sampling=sampling)
        if not self._replaces_ratio:  # what counts is the ratio TRL will use
            weights = output["importance_sampling_ratio"].expand_as(result.weights)
            result = replace(result, weights=torch.where(result.keep_mask, weights, 1.0))
        stats = self._record(stats | correction_metrics(mask, result, correction.action))
        if self._replaces_ratio:
            weights = result.weights
            if correction.normalize != "none":
                total, count = _MEANS[correction.normalize]
                mean = stats[total].value[0] / stats[count].value[0].clamp(min=1)
                weights = normalized(weights, result.keep_mask, mean)
            output["importance_sampling_ratio"] = weights
            if correction.rejects:
                # TRL's loss mask is completion_mask * tool_mask; only the former also is an attention mask.
                output["tool_mask"] = result.keep_mask.to(output["completion_mask"].dtype)
                kept = stats["kept"].value[0]
                output["num_items_in_batch"] = kept.to(output["num_items_in_batch"].dtype)
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._training_logps = output[0].detach()
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        sampling, logps = inputs.get("sampling_per_token_logps"), self._training_logps
        self._training_logps = None
        if sampling is not None and inputs.get("old_per_token_logps") is None and logps is not None:
            # TRL leaves the old log-probs out exactly when they equal those of this forward.
            self._micro_batches += (mismatch_metrics(logps, sampling, self._loss_mask(inputs)),)
            if self.accelerator.sync_gradients or not self.model.training:
                self._record(merge(self._micro_batches))
                self._micro_batches = ()
        return loss

    @staticmethod
    def _loss_mask(batch: dict[str, Any]) -> Tensor:
        mask = batch["completion_mask"]
        return mask * batch["tool_mask"] if "tool_mask" in batch else mask

    def _record(self, stats: dict[str, Stat]) -> dict[str, Stat]:
        """Merges statistics over the ranks, in one collective, and adds them to the logging window."""
        if self.accelerator.num_processes > 1:
            sizes = [stat.value.numel() for stat in stats.values()]
            flat = torch.cat([stat.value for stat in stats.values()])
            ranks = self.accelerator.gather(flat.unsqueeze(0)).split(sizes, dim=1)
            stats = merge(
                {
                    key: Stat(values[rank], stat.reduction)
                    for (key, stat), values in zip(stats.items(), ranks, strict=True)
                }
                for rank in range(self.accelerator.num_processes)
            )
        mode = "train" if self.model.training else "eval"
        before = self._window.get(mode)
        self._window = {**self._window, mode: stats if before is None else merge([before, stats])}
        return stats

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if mode in self._window:
            values = finalize(self._window[mode])
            self._window = {other: stats for other, stats in self._window.items() if other != mode}
            for key, value in values.items():
                self._metrics[mode][key].append(value)
            if (batches := int(values.get("correction/rejected_batches", 0))) and self.accelerator.is_main_process:
                logger.warning(
                    f"The correction rejected every token of {batches} rollout batch(es) of a rank since the last log: "
                    "they contributed nothing to the update. See `correction/rejected_fraction/*`; widen the bounds "
                    "or find the cause of the mismatch."
                )
        super().log(logs, start_time)
