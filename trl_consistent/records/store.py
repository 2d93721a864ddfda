# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's records: writing within limits, finding, and reading."""

import contextlib
import dataclasses
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .logs import readable
from .record import FOLDER, LOGS, RECORDS, MismatchRecord, _joined, merge_ranks, read_header


logger = logging.getLogger(__name__)

MAX_RECORDS = 40
"""How many records each rank of a training keeps."""

_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.safetensors")


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


def _grouped_files(*paths: str | Path) -> list[list[Path]]:
    """The records at `paths`, those of the ranks of a step together."""
    groups: dict[tuple[Path, str], dict[Path, None]] = {}
    for file in (file.resolve() for path in paths for file in record_files(path)):
        name = _NAME.fullmatch(file.name)
        groups.setdefault((file.parent, name.group(1) if name else file.name), {})[file] = None
    return [list(group) for group in groups.values()]


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
