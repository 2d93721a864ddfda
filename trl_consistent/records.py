# SPDX-License-Identifier: Apache-2.0
"""One captured rollout batch and the engine it came from: the cut between training and everything that looks at it later.

The trainer writes records; `compare`, `report` and whatever else runs without a trainer only read them. Each is one
safetensors file, whose header holds a line of JSON with everything that is no tensor. A run keeps its own in
`OUTPUT_DIR/mismatch/`:

    records/step-00000050-rank-00000.safetensors    one rollout batch of one rank
    logs.jsonl                                      what the trainer logged, a line each
    tokenizer/                                      what turns ids into text
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .metrics import finalize, mismatch_metrics
from .ratios import mismatch_log_ratio


logger = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT = 1
FOLDER, RECORDS, LOGS, TOKENIZER = "mismatch", "records", "logs.jsonl", "tokenizer"
STATE = "trainer_state.json"
"""What the trainers of transformers write, with all that was logged."""
_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.safetensors")
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


def record_files(path: str | Path) -> list[Path]:
    """The records at `path`: a run's output folder, a folder of records, or one file; by step, then rank.

    Raises:
        `FileNotFoundError`: there are none; says where it looked.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    for folder in (path / FOLDER / RECORDS, path / RECORDS, path):
        if files := sorted(file for file in folder.glob("step-*.safetensors") if _NAME.fullmatch(file.name)):
            return files
    where = f"in {path}, nor in {Path(FOLDER, RECORDS)} below it" if path.is_dir() else f"at {path}"
    raise FileNotFoundError(
        f"No mismatch records {where}. `ConsistentGRPOTrainer` writes them to its `output_dir` every "
        "`mismatch_record_steps` steps."
    )


def read_records(path: str | Path) -> list[MismatchRecord]:
    """The records at `path` as of [`record_files`], those of the ranks of a step merged into one, by step.

    Raises:
        `FileNotFoundError`: there are none. `ValueError`: one of them cannot be read.
    """
    return [merge_ranks([MismatchRecord.load(file) for file in of_step]) for of_step in _grouped_files(path)]


@dataclass(frozen=True)
class Recorded:
    """One recorded step, from the headers of its files, one of each rank."""

    step: int
    """Of the optimizer."""
    files: list[Path]
    """Those that can be read, by rank."""
    reason: str
    """Why it was written."""
    completions: int
    """Of all ranks."""
    tokens: int
    """In the loss mask, of all ranks."""
    is_cut: bool
    """Whether only the worst completions of the batch are there."""
    metrics: dict[str, float]
    """Of the whole rollout batch."""
    fingerprint: dict[str, Any]
    """What it came from."""


def recorded_steps(*paths: str | Path, problems: list[str] | None = None) -> list[Recorded]:
    """The steps that are recorded at `paths`, each as of [`record_files`], without reading tensors; `problems` as of
    [`readable`].

    Raises:
        `FileNotFoundError`: there are none at one of them.
    """
    steps = []
    for files in _grouped_files(*paths):
        if not (headers := dict(readable(files, read_header, problems))):
            continue
        first, *_ = found = list(headers.values())
        steps.append(
            Recorded(
                step=first["step"],
                files=list(headers),
                reason=_joined(header["reason"] for header in found),
                completions=sum(header["completions"] for header in found),
                tokens=sum(header["tokens"] for header in found),
                is_cut=any(header.get("cut_from") for header in found),
                metrics=first["metrics"],
                fingerprint=first["fingerprint"],
            )
        )
    return steps


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(each for reason in reasons for each in reason.split("; ")))


def _grouped_files(*paths: str | Path) -> list[list[Path]]:
    """The records at `paths`, those of the ranks of a step together."""
    groups: dict[tuple[Path, str], dict[Path, None]] = {}
    for file in (file.resolve() for path in paths for file in record_files(path)):
        name = _NAME.fullmatch(file.name)
        groups.setdefault((file.parent, name.group(1) if name else file.name), {})[file] = None
    return [list(group) for group in groups.values()]


def readable(
    files: Iterable[Path], read: Callable[[Path], T], problems: list[str] | None = None
) -> Iterator[tuple[Path, T]]:
    """Each file with what `read` makes of it. One that cannot be read is left out, with a sentence in `problems` or, without
    it, a warning; one that a run has removed meanwhile, without a word."""
    for file in files:
        try:
            yield file, read(file)
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            _tell(f"{file.name} cannot be read: {error}", problems)


def _tell(problem: str, problems: list[str] | None) -> None:
    logger.warning(problem) if problems is None else problems.append(problem)


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


class RecordStore:
    """
    The records of one rank in a folder, within limits: the newest half is kept, and of the older ones those with the
    largest [`severity`].

    Args:
        folder (`str` or `Path`): Made when the first record is written.
        max_count (`int`): How many records, at least 1.
        max_bytes (`int`): How much they take together. A record that takes more by itself is cut to its worst completions.
        rank (`int`, *optional*, defaults to `0`): Of this process.
    """

    def __init__(self, folder: str | Path, max_count: int, max_bytes: int, rank: int = 0):
        self.folder, self.max_count, self.max_bytes, self.rank = Path(folder), max_count, max_bytes, rank

    def write(self, record: MismatchRecord) -> Path:
        """Writes `record`, whole or not at all, then removes what is beyond the limits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = dataclasses.replace(self._cut(record), rank=self.rank)
        path = self.folder / f"step-{record.step:08}-rank-{self.rank:05}.safetensors"
        record.save(path)
        self._evict(keep=path)
        return path

    def forget(self, after: int, ranks: int) -> None:
        """Removes the records of this rank beyond step `after`, of a run that goes on from there or begins anew, and those of
        ranks that there are no more. Rank 0 does the latter."""
        for file in self.folder.glob("step-*-rank-*.safetensors"):
            if (name := _NAME.fullmatch(file.name)) is None:
                continue
            step, rank = map(int, name.groups())
            if step > after and (rank == self.rank or (self.rank == 0 and rank >= ranks)):
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"step-*-rank-{self.rank:05}.safetensors"))

    def _cut(self, record: MismatchRecord) -> MismatchRecord:
        if record.nbytes <= self.max_bytes:
            return record
        worst = record.mismatch_log_ratio.abs().nan_to_num(0.0).sum(1) / record.mask.sum(1).clamp(min=1)
        number = max(1, len(worst) * self.max_bytes // record.nbytes)
        return record.rows(worst.topk(number).indices.sort().values)._with({"cut_from": len(worst)})

    def _evict(self, keep: Path) -> None:
        """Removes the least bad of the older half until both limits hold, and what killed runs left half written."""
        for partial in self.folder.glob(f"step-*-rank-{self.rank:05}.safetensors.partial"):
            partial.unlink(missing_ok=True)
        files = self._files()
        sizes = {file: file.stat().st_size for file in files}
        while len(files) > 1 and (len(files) > self.max_count or sum(sizes[file] for file in files) > self.max_bytes):
            older = files[: len(files) - len(files) // 2]
            least = min((file for file in older if file != keep), key=_severity_of)
            least.unlink(missing_ok=True)
            files.remove(least)


def severity(metrics: dict[str, float]) -> tuple[float, float]:
    """What makes a rollout batch worse than another: infinite ratios, then k3."""
    return metrics.get("mismatch/nonfinite_count", 0.0), metrics.get("mismatch/k3/mean", 0.0)


def _severity_of(file: Path) -> tuple[float, float]:
    with contextlib.suppress(ValueError, FileNotFoundError):
        return severity(read_header(file)["metrics"])
    return 0.0, 0.0


def set_aside(folder: str | Path) -> None:
    """Renames the `mismatch` folder of an earlier run to `mismatch.old`, and removes what was there before it. A run that
    left neither records nor logs is not worth it."""
    folder = Path(folder)
    if (folder / LOGS).exists() or any(folder.glob(f"{RECORDS}/step-*.safetensors")):
        earlier = folder.with_name(f"{folder.name}.old")
        shutil.rmtree(earlier, ignore_errors=True)
        folder.replace(earlier)
        logger.info(f"The records of an earlier run are in {earlier} now.")


def append_logs(folder: str | Path, logs: dict[str, Any]) -> None:
    """Adds a line to the logs of a run; `folder` is its `mismatch` folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(logs, default=float) + "\n"
    with (folder / LOGS).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a killed run left half a line
                line = "\n" + line
        file.write(line.encode())


def read_logs(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's logs, without one that a killed run left half written; none if there are none."""
    try:
        lines = (Path(folder) / LOGS).read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return list(_parsed(lines))


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def run_logs(run: str | Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """What the run in this output folder has logged, an entry a step: `trainer_state.json`, its own or that of a checkpoint,
    whichever got farthest, and the live logs; empty if there are none.

    Args:
        run (`str` or `Path`): Of our trainer or of TRL's.
        problems (`list[str]`, *optional*): Gets a sentence for each file that cannot be read; they are warnings without it.
    """
    run = Path(run)
    states: list[tuple[int, dict[int, dict[str, Any]]]] = []
    for file in [run / STATE, *run.glob(f"checkpoint-*/{STATE}")]:
        if not file.is_file():
            continue
        try:
            state = json.loads(file.read_text())
            states.append((state.get("global_step", 0), _by_step(list(state["log_history"]))))
        except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
            _tell(f"{file.relative_to(run)} cannot be read: {type(error).__name__}: {error}.", problems)
    live = _by_step(read_logs(run / FOLDER))
    if live:  # an earlier run may have left states here: only what came before, of one that agrees, is of this run
        states = [
            (step, {at: saved[at] for at in saved if at < min(live)}) for step, saved in states if _agree(saved, live)
        ]
    saved = max(states, key=lambda state: state[0])[1] if states else {}
    found = {**saved, **live}
    return [found[step] for step in sorted(found)]


def _agree(saved: dict[int, dict[str, Any]], live: dict[int, dict[str, Any]]) -> bool:
    """Whether two logs are of one run: they have a step in common, and say the same of it."""
    common = saved.keys() & live.keys()
    return bool(common) and all(live[step].get(key) == value for step in common for key, value in saved[step].items())


def _by_step(entries: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """One entry a step. Where the steps go back, the run was resumed: what it had logged beyond is no longer so."""
    found: dict[int, dict[str, Any]] = {}
    newest = -1
    for entry in entries:
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int):
            continue
        if step < newest:
            found = {old: kept for old, kept in found.items() if old < step}
        newest = step
        found[step] = {**found.get(step, {}), **entry}
    return found


@dataclass(frozen=True)
class TokenGap:
    """One token on which trainer and engine disagree."""

    step: int
    """Of the record."""
    completion: int
    """Row of the record."""
    index: int
    """Which token of the completion, from 0."""
    position: int
    """Where it stands in the sequence, from 0, prompt included."""
    token_id: int
    """In the vocabulary."""
    before: str
    """The text before it, as much as was asked for."""
    token: str
    """The token as text; its id where there is no tokenizer."""
    after: str
    """The text after it."""
    p_train: float
    """Its probability in the trainer, `pi_old`."""
    p_rollout: float
    """Its probability in the rollout engine, `mu`."""
    d: float
    """`log p_train - log p_rollout`, nats."""
    weight: float | None
    """What the correction made of it, 0 if it rejected the token; `None` without a correction."""


def worst_tokens(record: MismatchRecord, count: int = 20, tokenizer: Any = None, context: int = 8) -> list[TokenGap]:
    """The tokens with the largest `|d|`, worst first; those that cannot be scored are not among them.

    Args:
        record ([`MismatchRecord`]): From any rank, or merged.
        count (`int`, *optional*, defaults to `20`): How many at most.
        tokenizer (*optional*): From [`load_tokenizer`]; without one, texts are ids.
        context (`int`, *optional*, defaults to `8`): Tokens of text before and after.
    """
    d, mask = record.mismatch_log_ratio, record.mask.bool()
    size = torch.where(mask & ~torch.isnan(d), d.abs(), -1.0).flatten()
    values, places = size.topk(min(count, len(size)))
    positions, weights = record.position_ids, record.weights
    if weights is not None and record.keep_mask is not None:
        weights = torch.where(record.keep_mask.bool(), weights, 0.0)

    def text(row: int, start: int, end: int) -> str:
        ids = record.completion_ids[row, max(start, 0) : end][record.completion_mask[row, max(start, 0) : end].bool()]
        return decode(tokenizer, ids.tolist())

    found = []
    for place in places[values >= 0].tolist():
        row, index = divmod(place, d.shape[1])
        old, sampling = (x[row, index].double() for x in (record.old_per_token_logps, record.sampling_per_token_logps))
        found.append(
            TokenGap(
                step=record.step,
                completion=row,
                index=index,
                position=int(positions[row, index]),
                token_id=int(record.completion_ids[row, index]),
                before=text(row, index - context, index),
                token=text(row, index, index + 1),
                after=text(row, index + 1, index + 1 + context),
                p_train=old.exp().item(),
                p_rollout=sampling.exp().item(),
                d=d[row, index].item(),
                weight=None if weights is None else weights[row, index].item(),
            )
        )
    return found


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Ids as text, special tokens included; without a tokenizer, the ids themselves."""
    if tokenizer is None:
        return " ".join(f"<{token}>" for token in ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer beside the records at `path` (as of [`record_files`]); `None`, with a warning, if there is none that
    loads. Code that comes with it is not run: records travel."""
    records = record_files(path)[0].parent
    folder = records.parent / TOKENIZER
    if records.name != RECORDS or not folder.is_dir():
        logger.warning(f"No tokenizer in {folder}: tokens are shown as ids.")
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library under it raises nothing narrower
        logger.warning(f"The tokenizer in {folder} does not load, tokens are shown as ids: {error}")
        return None
