# SPDX-License-Identifier: Apache-2.0
"""Writes records within limits, finds them, and says which steps were recorded. The file format is in `record.py`."""

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import FOLDER, RECORDS, readable
from .header import read_header
from .record import MismatchRecord, join_reasons, merge_ranks


MAX_RECORDS = 40
"""How many records each rank of a training keeps."""

_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.safetensors")


def record_files(path: str | Path) -> list[Path]:
    """Finds the record files at `path`, which is a run's output folder, a folder of records, or one file.

    Returns:
        The files, by step, then by rank.

    Raises:
        `FileNotFoundError`: There are no records; says where it looked.
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
    """Reads the records at `path`, by step; the records that the ranks wrote of a step are merged into one.

    Args:
        path (`str` or `Path`): A run's output folder, a folder of records, or one file.

    Raises:
        `FileNotFoundError`: There are no records.
        `ValueError`: One of the records cannot be read.
    """
    return [merge_ranks([MismatchRecord.load(file) for file in files]) for files in _files_by_step(path)]


@dataclass(frozen=True)
class Recorded:
    """One recorded step, from the headers of its files; every rank wrote a file."""

    step: int
    """Optimizer step."""
    files: list[Path]
    """The files that can be read, by rank."""
    reason: str
    """Why the step was recorded."""
    completions: int
    """Number of completions, all ranks."""
    tokens: int
    """Number of tokens in the loss mask, all ranks."""
    is_cut: bool
    """Whether only the worst completions of the batch were recorded."""
    metrics: dict[str, float]
    """Metrics of the whole rollout batch."""
    fingerprint: dict[str, Any]
    """What the run is made of, see [`MismatchRecord`]."""


def recorded_steps(*paths: str | Path, problems: list[str] | None = None) -> list[Recorded]:
    """The steps that are recorded at `paths`, from the headers of the files alone.

    Args:
        paths (`str` or `Path`): Output folders of runs, folders of records, or files.
        problems (`list[str]`, *optional*): Gets a sentence for each file that cannot be read. Without it, each is a warning.

    Raises:
        `FileNotFoundError`: One of the paths has no records.
    """
    steps = []
    for files in _files_by_step(*paths):
        by_file = dict(readable(files, read_header, problems))
        headers = list(by_file.values())
        if not headers:
            continue
        first = headers[0]
        steps.append(
            Recorded(
                step=first["step"],
                files=list(by_file),
                reason=join_reasons(header["reason"] for header in headers),
                completions=sum(header["completions"] for header in headers),
                tokens=sum(header["tokens"] for header in headers),
                is_cut=any(header.get("cut_from") for header in headers),
                metrics=first["metrics"],
                fingerprint=first["fingerprint"],
            )
        )
    return steps


def _files_by_step(*paths: str | Path) -> list[list[Path]]:
    """The record files at `paths`, each once, those of a step of a folder together."""
    files = dict.fromkeys(file.resolve() for path in paths for file in record_files(path))
    groups: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        name = _NAME.fullmatch(file.name)
        step = name.group(1) if name else file.name
        groups.setdefault((file.parent, step), []).append(file)
    return list(groups.values())


class RecordStore:
    """
    Keeps the records of one rank in a folder, within limits. Of more records than fit, the newest half is kept, and of the
    older half those with the largest [`severity`].

    Args:
        folder (`str` or `Path`): The folder, which is made when the first record is written.
        max_count (`int`): How many records to keep, at least 1.
        max_bytes (`int`): How many bytes they may take together. A record that takes more by itself is cut to its worst
            completions.
        rank (`int`, *optional*, defaults to `0`): Rank of this process.
    """

    def __init__(self, folder: str | Path, max_count: int, max_bytes: int, rank: int = 0):
        self.folder = Path(folder)
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.rank = rank

    def write(self, record: MismatchRecord) -> Path:
        """Writes a record, whole or not at all, then removes records beyond the limits. Returns the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = dataclasses.replace(self._cut(record), rank=self.rank)
        path = self.folder / f"step-{record.step:08}-rank-{self.rank:05}.safetensors"
        record.save(path)
        self._evict(keep=path)
        return path

    def forget(self, after: int, ranks: int) -> None:
        """Removes the records of this rank of steps beyond `after`, before a run goes on from that step.

        Rank 0 also removes those of ranks that the run does not have any more; it has `ranks` of them.
        """
        for file in self.folder.glob("step-*-rank-*.safetensors"):
            if (name := _NAME.fullmatch(file.name)) is None:
                continue
            step, rank = map(int, name.groups())
            is_ours = rank == self.rank or (self.rank == 0 and rank >= ranks)
            if step > after and is_ours:
                file.unlink(missing_ok=True)

    def _cut(self, record: MismatchRecord) -> MismatchRecord:
        """The record or, if it is too large, its completions with the largest mean |d|, as many as fit."""
        if record.nbytes <= self.max_bytes:
            return record
        gaps = record.mismatch_log_ratio.abs().nan_to_num(0.0).sum(1) / record.mask.sum(1).clamp(min=1)
        number = max(1, len(gaps) * self.max_bytes // record.nbytes)
        worst = gaps.topk(number).indices.sort().values
        return dataclasses.replace(record.rows(worst), cut_from=len(gaps))

    def _evict(self, keep: Path) -> None:
        """Removes the least bad of the older half until both limits hold, and files that killed runs left half written."""
        for partial in self.folder.glob(f"step-*-rank-{self.rank:05}.safetensors.partial"):
            partial.unlink(missing_ok=True)
        files = sorted(self.folder.glob(f"step-*-rank-{self.rank:05}.safetensors"))
        sizes = {file: file.stat().st_size for file in files}
        while len(files) > 1 and (len(files) > self.max_count or sum(sizes[file] for file in files) > self.max_bytes):
            older = files[: len(files) - len(files) // 2]
            least = min((file for file in older if file != keep), key=_severity_of)
            least.unlink(missing_ok=True)
            files.remove(least)


def severity(metrics: dict[str, float]) -> tuple[float, float]:
    """How bad a rollout batch is, by its metrics: first the number of infinite ratios, then k3."""
    return metrics.get("mismatch/nonfinite_count", 0.0), metrics.get("mismatch/k3/mean", 0.0)


def _severity_of(file: Path) -> tuple[float, float]:
    with contextlib.suppress(ValueError, FileNotFoundError):
        return severity(read_header(file)["metrics"])
    return 0.0, 0.0
