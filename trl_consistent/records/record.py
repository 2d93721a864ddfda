# SPDX-License-Identifier: Apache-2.0
"""One recorded rollout batch and its file format."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..metrics.measure import finalize, mismatch_metrics
from ..ratios import mismatch_log_ratio
from .header import FORMAT, HEADER_KEY, read_header


# How each tensor is stored.
_DTYPES = {
    **dict.fromkeys(("prompt_ids", "completion_ids"), torch.int32),
    **dict.fromkeys(("prompt_mask", "completion_mask", "mask", "keep_mask"), torch.bool),
    **dict.fromkeys(
        ("sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps", "advantages", "weights"),
        torch.float32,
    ),
}

_PADDED_ON_THE_LEFT = ("prompt_ids", "prompt_mask")  # as in TRL's batches


@dataclass
class MismatchRecord:
    """
    A rollout batch as the trainer saw it, or the worst part of it, with where it came from.

    It has `B` completions, `P` prompt tokens padded on the left and `T` completion tokens padded on the right, as TRL's
    batches have.

    Example:

    ```python
    >>> record = MismatchRecord.load("output/mismatch/records/step-00000050-rank-00000.safetensors")
    >>> record.mismatch_log_ratio.abs().max()
    ```
    """

    prompt_ids: Tensor
    """Token ids of the prompts, `(B, P)` int32."""
    prompt_mask: Tensor
    """Which columns of a prompt are tokens and not padding, `(B, P)` bool."""
    completion_ids: Tensor
    """Token ids of the completions, tool results included, `(B, T)` int32."""
    completion_mask: Tensor
    """Which columns of a completion are tokens and not padding, `(B, T)` bool."""
    mask: Tensor
    """Loss mask before rejections, the tokens that the model wrote, `(B, T)` bool."""
    sampling_per_token_logps: Tensor
    """Log-probs of the rollout engine, `(B, T)` float32, nats; NaN where the engine reported none."""
    old_per_token_logps: Tensor
    """Log-probs of the trainer at the weights that sampled, `(B, T)` float32, nats."""
    ref_per_token_logps: Tensor | None = None
    """Log-probs of the reference model, where the loss has one, `(B, T)` float32, nats."""
    advantages: Tensor | None = None
    """Advantages before any correction, `(B,)` or `(B, T)` float32."""
    weights: Tensor | None = None
    """What the loss multiplies the policy term by, `(B, T)` float32; `None` without a correction. Where old log-probs are
    recomputed, trust regions act later and are not in it."""
    keep_mask: Tensor | None = None
    """`mask` after rejections, `(B, T)` bool; `None` without a correction."""
    step: int = 0
    """The optimizer step that the batch was sampled for, as in the logs: the first is 1."""
    rank: int | None = 0
    """Rank of the process that wrote the record; `None` if the records of all ranks were merged."""
    reason: str = "periodic"
    """Why the record was written: `"periodic"`, or the alert."""
    cut_from: int | None = None
    """Number of completions in the batch, if it was too large and only the worst ones were kept; else `None`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the whole rollout batch, all ranks, by key of [`METRICS`]; those of these completions if left out."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """What the run is made of, as JSON: `model`, `trainer`, `engine`, `sampling`, `correction`, `versions`, `audit`, `weights`
    (the optimizer step after which the engine got them, and a hash), ..."""

    @property
    def mismatch_log_ratio(self) -> Tensor:
        """Mismatch log-ratio of each token, `(B, T)`, nats; 0 outside the mask."""
        return mismatch_log_ratio(self.old_per_token_logps, self.sampling_per_token_logps, self.mask)

    @property
    def position_ids(self) -> Tensor:
        """Position of each completion token in its sequence, `(B, T)`; padding does not count."""
        return self.prompt_mask.sum(1, keepdim=True) + self.completion_mask.long().cumsum(1) - 1

    def own_metrics(self) -> dict[str, float]:
        """The `mismatch/*` metrics of these completions alone, by key of [`METRICS`]."""
        return finalize(mismatch_metrics(self.old_per_token_logps, self.sampling_per_token_logps, self.mask))

    def rows(self, index: Tensor) -> "MismatchRecord":
        """The same record with only some of its completions."""
        changes: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that this record has, by field."""
        found = {name: getattr(self, name) for name in _DTYPES}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors take on disk, with all their padding."""
        return sum(tensor.numel() * _DTYPES[name].itemsize for name, tensor in self.tensors().items())

    def save(self, path: str | Path) -> None:
        """Writes the record to a file, whole or not at all: under another name first, which is then replaced."""
        path = Path(path)
        stored = self._stored_tensors()
        header = {
            "format": FORMAT,
            "step": self.step,
            "rank": self.rank,
            "reason": self.reason,
            "cut_from": self.cut_from,
            "completions": len(stored["mask"]),
            "tokens": int(stored["mask"].sum()),
            "metrics": self.metrics or self.own_metrics(),
            "fingerprint": self.fingerprint,
        }
        partial = path.with_name(f"{path.name}.partial")
        try:
            save_file(stored, partial, metadata={HEADER_KEY: json.dumps(header, default=str)})
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "MismatchRecord":
        """Reads a file that [`save`] wrote.

        Raises:
            `ValueError`: The file is not a record, is incomplete, or was written by a newer version; names the file.
        """
        header = read_header(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name in _DTYPES}
        fields = dataclasses.fields(cls)
        required = {each.name for each in fields if each.name in _DTYPES and each.default is dataclasses.MISSING}
        if missing := required - tensors.keys():
            raise ValueError(f"{path} is not a complete record: it lacks {', '.join(sorted(missing))}.")
        values: dict[str, Any] = {name: header[name] for name in ("step", "rank", "reason", "metrics", "fingerprint")}
        return cls(**tensors, **values, cut_from=header.get("cut_from"))

    def _stored_tensors(self) -> dict[str, Tensor]:
        """Copies on the CPU, each in its type on disk, without columns that are padding in every row."""
        used = self.completion_mask.bool().any(0).nonzero()
        width = int(used.max()) + 1 if len(used) else 0
        padding = int((~self.prompt_mask.bool().any(0)).long().cumprod(0).sum())
        stored = {}
        for name, tensor in self.tensors().items():
            if name in _PADDED_ON_THE_LEFT:
                tensor = tensor[:, padding:]
            elif tensor.dim() == 2:
                tensor = tensor[:, :width]
            # a copy: safetensors refuses fields that are one tensor, such as `mask` and `completion_mask` without tools
            stored[name] = tensor.detach().to("cpu", _DTYPES[name], copy=True, memory_format=torch.contiguous_format)
        return stored


def merge_ranks(records: list[MismatchRecord]) -> MismatchRecord:
    """One record with the completions of several, padded to the longest.

    A tensor that not all of them have is left out. Step, metrics and fingerprint are those of the first.
    """
    if len(records) == 1:
        return records[0]
    tensors: dict[str, list[Tensor]] = {}
    for record in records:
        for name, tensor in record.tensors().items():
            tensors.setdefault(name, []).append(tensor)
    changes: dict[str, Any] = {}
    for name, parts in tensors.items():
        is_whole = len(parts) == len(records)
        changes[name] = torch.cat(_padded(parts, left=name in _PADDED_ON_THE_LEFT)) if is_whole else None
    is_cut = any(record.cut_from for record in records)
    return dataclasses.replace(
        records[0],
        rank=None,
        reason=join_reasons(record.reason for record in records),
        cut_from=sum(record.cut_from or len(record.mask) for record in records) if is_cut else None,
        **changes,
    )


def join_reasons(reasons: Iterable[str]) -> str:
    """The reasons that the ranks of a step had to write a record, each once, joined by `; `."""
    return "; ".join(dict.fromkeys(each for reason in reasons for each in reason.split("; ")))


def _padded(tensors: list[Tensor], left: bool) -> list[Tensor]:
    """The tensors, padded to the width of the widest; those of one dimension as they are."""
    if tensors[0].dim() == 1:
        return tensors
    width = max(tensor.shape[1] for tensor in tensors)
    padded = []
    for tensor in tensors:
        missing = width - tensor.shape[1]
        padded.append(torch.nn.functional.pad(tensor, (missing, 0) if left else (0, missing)))
    return padded
