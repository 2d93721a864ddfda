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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..metrics.measure import finalize, mismatch_metrics
from ..ratios import mismatch_log_ratio


FORMAT = 1
FOLDER, RECORDS, LOGS, TOKENIZER = "mismatch", "records", "logs.jsonl", "tokenizer"
STATE = "trainer_state.json"
"""What the trainers of transformers write, with all that was logged."""


_LEFT = ("prompt_ids", "prompt_mask")  # padded on the left, as TRL does


@dataclass
class MismatchRecord:
    """
    A rollout batch as the trainer saw it, or what was kept of it, with where it came from.

    `B` completions, `P` prompt tokens padded on the left, `T` completion tokens padded on the right, as in TRL's batches.

    Example:

    ```python
    >>> record = MismatchRecord.load("output/mismatch/records/step-00000050-rank-00000.safetensors")
    >>> record.mismatch_log_ratio.abs().max()
    ```
    """

    prompt_ids: Tensor
    """`(B, P)` int32, token ids of the prompts."""
    prompt_mask: Tensor
    """`(B, P)` bool, which of them are tokens."""
    completion_ids: Tensor
    """`(B, T)` int32, token ids of the completions; tool results are among them."""
    completion_mask: Tensor
    """`(B, T)` bool, which of them are tokens."""
    mask: Tensor
    """`(B, T)` bool, the loss mask before rejections: tokens that the model wrote."""
    sampling_per_token_logps: Tensor
    """`(B, T)` float32, nats, of the rollout engine; NaN where it has none."""
    old_per_token_logps: Tensor
    """`(B, T)` float32, nats, of the trainer at the weights that sampled."""
    ref_per_token_logps: Tensor | None = None
    """`(B, T)` float32, nats, of the reference, where the loss has one."""
    advantages: Tensor | None = None
    """`(B,)` or `(B, T)` float32, before any correction is folded into them."""
    weights: Tensor | None = None
    """`(B, T)` float32, what the loss multiplies the policy term by; `None` without a correction. Where old log-probs are
    recomputed, trust regions come later and are not in it."""
    keep_mask: Tensor | None = None
    """`(B, T)` bool, `mask` after rejections; `None` without a correction."""
    step: int = 0
    """The optimizer step it was rolled out for, as in the logs: the first is 1."""
    rank: int | None = 0
    """Which process wrote it; `None` once those of all ranks were merged."""
    reason: str = "periodic"
    """Why it was written: `"periodic"`, or the alert."""
    cut_from: int | None = None
    """Of how many completions these are the worst, where the whole batch was too large; `None` if they are all."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the whole rollout batch, all ranks, by key of [`METRICS`]; of these completions if left out."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """What it came from, JSON: `model`, `trainer`, `engine`, `sampling`, `correction`, `versions`, `audit`, `weights` (the
    optimizer step after which the engine got them, and a hash), ..."""

    @property
    def mismatch_log_ratio(self) -> Tensor:
        """`(B, T)`, see [`mismatch_log_ratio`]; 0 outside the mask."""
        return mismatch_log_ratio(self.old_per_token_logps, self.sampling_per_token_logps, self.mask)

    @property
    def position_ids(self) -> Tensor:
        """`(B, T)`, where each completion token stands in its sequence; padding does not count."""
        return self.prompt_mask.sum(1, keepdim=True) + self.completion_mask.long().cumsum(1) - 1

    def own_metrics(self) -> dict[str, float]:
        """The `mismatch/*` metrics of these completions alone, by key of [`METRICS`]."""
        return finalize(mismatch_metrics(self.old_per_token_logps, self.sampling_per_token_logps, self.mask))

    def rows(self, index: Tensor) -> "MismatchRecord":
        """The same with only some of its completions."""
        return self._with({name: tensor[index] for name, tensor in self._tensors().items()})

    def _with(self, changes: dict[str, Any]) -> "MismatchRecord":
        return dataclasses.replace(self, **changes)

    def _tensors(self) -> dict[str, Tensor]:
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _stored(self) -> dict[str, Tensor]:
        """On the CPU, as narrow as it gets, without columns that are padding in every row."""
        used = self.completion_mask.bool().any(0).nonzero()
        width = int(used.max()) + 1 if len(used) else 0
        padding = int((~self.prompt_mask.bool().any(0)).long().cumprod(0).sum())
        stored = {}
        for name, tensor in self._tensors().items():
            if name in _LEFT:
                tensor = tensor[:, padding:]
            elif tensor.dim() == 2:
                tensor = tensor[:, :width]
            dtype = _DTYPES[name]
            # a copy: safetensors refuses fields that are one tensor, such as `mask` and `completion_mask` without tools
            stored[name] = tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        return stored

    @property
    def nbytes(self) -> int:
        """Bytes its tensors take on disk, padding included."""
        return sum(x.numel() * _DTYPES[name].itemsize for name, x in self._tensors().items())

    def save(self, path: str | Path) -> None:
        """Writes the file whole or not at all: under another name first, then renamed."""
        path = Path(path)
        stored = self._stored()
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
            save_file(stored, partial, metadata={"mismatch_record": json.dumps(header, default=str)})
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "MismatchRecord":
        """Reads a file that [`save`] wrote.

        Raises:
            `ValueError`: it is no record, or one of a newer version; names the file.
        """
        header = read_header(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name in _DTYPES}
        needed = {
            each.name
            for each in dataclasses.fields(cls)
            if each.name in _DTYPES and each.default is dataclasses.MISSING
        }
        if missing := needed - tensors.keys():
            raise ValueError(f"{path} is no whole record: it lacks {', '.join(sorted(missing))}.")
        own: dict[str, Any] = {name: header[name] for name in ("step", "rank", "reason", "metrics", "fingerprint")}
        return cls(**{**tensors, **own, "cut_from": header.get("cut_from")})


_DTYPES = {
    **dict.fromkeys(("prompt_ids", "completion_ids"), torch.int32),
    **dict.fromkeys(("prompt_mask", "completion_mask", "mask", "keep_mask"), torch.bool),
    **dict.fromkeys(
        ("sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps", "advantages", "weights"),
        torch.float32,
    ),
}


_HEADER: dict[str, Any] = {
    "step": int,
    "rank": int | None,
    "reason": str,
    "completions": int,
    "tokens": int,
    "metrics": dict,
    "fingerprint": dict,
}


def read_header(path: str | Path) -> dict[str, Any]:
    """The line of JSON in a record's header, without its tensors: `step`, `rank`, `reason`, `completions`, `tokens`,
    `metrics` and `fingerprint`.

    Raises:
        `ValueError`: it is no record, or one of a newer version; names the file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            line = (file.metadata() or {}).get("mismatch_record")
    except SafetensorError as error:
        raise ValueError(f"{path} is no record of a mismatch: {error}.") from None
    if line is None:
        raise ValueError(f"{path} is a safetensors file, but no record of a mismatch.")
    try:
        header = json.loads(line)
        newer = header["format"] > FORMAT
        lacking = _HEADER.keys() - header.keys()
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no record of a mismatch: its header says {line[:80]!r}.") from None
    if newer:
        raise ValueError(
            f"{path} was written by a newer version (format {header['format']}, this one reads up to {FORMAT}): "
            "upgrade trl-consistent."
        )
    if lacking:
        raise ValueError(f"{path} is no whole record: its header lacks {', '.join(sorted(lacking))}.")
    for name, kind in _HEADER.items():
        if not isinstance(header[name], kind) or isinstance(header[name], bool):
            raise ValueError(
                f"{path} is no record of a mismatch: its header has {str(header[name])[:80]!r} as {name}."
            )
    correction, audit = header["fingerprint"].get("correction") or {}, header["fingerprint"].get("audit") or []
    if not isinstance(correction, dict) or not isinstance(audit, list) or not all(isinstance(x, dict) for x in audit):
        raise ValueError(
            f"{path} is no record of a mismatch: its fingerprint has a correction or an audit that is none."
        )
    numbers = {"step": header["step"], "completions": header["completions"], **header["metrics"]}
    if any(not isinstance(value, int | float) for value in numbers.values()) or header["step"] < 0:
        raise ValueError(f"{path} is no record of a mismatch: its header has numbers that are none.")
    return header


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(each for reason in reasons for each in reason.split("; ")))


def merge_ranks(records: list[MismatchRecord]) -> MismatchRecord:
    """One record with the completions of all, padded to the longest; everything else is the first one's."""
    if len(records) == 1:
        return records[0]
    tensors: dict[str, list[Tensor]] = {}
    for record in records:
        for name, tensor in record._tensors().items():
            tensors.setdefault(name, []).append(tensor)
    whole = {name: each for name, each in tensors.items() if len(each) == len(records)}
    merged = {name: torch.cat(_padded(each, left=name in _LEFT)) for name, each in whole.items()}
    missing = dict.fromkeys(tensors.keys() - whole.keys())
    reason = _joined(record.reason for record in records)
    cut = sum(record.cut_from or len(record.mask) for record in records)
    cut_from = cut if any(record.cut_from for record in records) else None
    return records[0]._with({**merged, **missing, "rank": None, "reason": reason, "cut_from": cut_from})


def _padded(tensors: list[Tensor], left: bool) -> list[Tensor]:
    if tensors[0].dim() == 1:
        return tensors
    width = max(tensor.shape[1] for tensor in tensors)
    sides = [(width - tensor.shape[1], 0) if left else (0, width - tensor.shape[1]) for tensor in tensors]
    return [torch.nn.functional.pad(tensor, side) for tensor, side in zip(tensors, sides, strict=True)]
