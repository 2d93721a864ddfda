# SPDX-License-Identifier: Apache-2.0
"""Writes records as JSONL or Parquet for other programs, a row for each completion. `listing.py` shows them to people."""

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .folder import readable
from .record import MismatchRecord
from .store import record_files
from .tokens import decode, load_tokenizer


FORMATS = ("jsonl", "parquet")
"""The file formats, by suffix."""

Row = dict[str, Any]

_PER_TOKEN = {
    "mask": "bool",
    "sampling_per_token_logps": "float",
    "old_per_token_logps": "float",
    "ref_per_token_logps": "float",
    "mismatch_log_ratio": "float",
    "weights": "float",
    "keep_mask": "bool",
    "advantages": "float",
}
"""Columns with a value for each token of a completion, and their type."""


def export(path: str | Path, output: str | Path, format: str | None = None) -> int:
    """Writes the records at `path` to a file, one in memory at a time, whole or not at all.

    A row has `step`, `rank`, `reason`, `completion` (its row in the record), `prompt`, `text` and `prompt_ids`, and lists with
    an entry for each token of the completion: `completion_ids`, `tokens` (as text), `mask`, the three kinds of log-probs,
    `mismatch_log_ratio`, `weights`, `keep_mask` and `advantages` (the one of the completion, unless every token has its own).
    Texts are null without a tokenizer, and so is everything that a record does not have. JSON has no NaN and no infinities,
    so they are null there; Parquet keeps them.

    Args:
        path (`str` or `Path`): A run's output folder, a folder of records, or one file. A record that cannot be read is left
            out, with a warning.
        output (`str` or `Path`): The file to write; replaced if it exists.
        format (`str`, *optional*): One of [`FORMATS`]; the suffix of `output` if left out.

    Returns:
        How many completions were written.

    Raises:
        `FileNotFoundError`: There are no records, or the folder of the output does not exist.
        `ValueError`: No record can be read, or the format is unknown.
    """
    output = Path(output)
    format = output.suffix.removeprefix(".") if format is None else format
    if format not in FORMATS:
        raise ValueError(f"{output} is neither .jsonl nor .parquet: name it so, or say which with --format.")
    if output.is_dir():
        raise FileNotFoundError(f"Cannot write {output}: it is a folder.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"Cannot write {output}: there is no such folder.")
    files = record_files(path)
    if output.resolve() in (file.resolve() for file in files):
        raise ValueError(f"{output} is one of the records: export to another file.")
    partial = output.with_name(f"{output.name}.partial")
    try:
        write = _write_jsonl if format == "jsonl" else _write_parquet
        count = write(partial, _rows_by_record(files, load_tokenizer(path)))
        if not count:
            raise ValueError(f"No record at {path} can be read.")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _rows_by_record(files: list[Path], tokenizer: Any) -> Iterator[list[Row]]:
    """The rows of one record after another, with a progress bar where someone watches."""
    from tqdm import tqdm

    @functools.cache
    def text(token: int) -> str:
        return decode(tokenizer, [token])

    shown = tqdm(files, desc="Records", unit="file", leave=False, disable=None)
    for _, record in readable(shown, MismatchRecord.load):
        yield list(_rows(record, tokenizer, text))
        del record  # before the next is read


def _rows(record: MismatchRecord, tokenizer: Any, text: Callable[[int], str]) -> Iterator[Row]:
    """The rows of a record; `text` is the text of a single token."""
    columns: dict[str, Tensor | None] = {name: getattr(record, name) for name in _PER_TOKEN}
    if record.advantages is not None and record.advantages.dim() == 1:
        columns["advantages"] = record.advantages.unsqueeze(1).expand_as(record.mask)
    for index in range(len(record.mask)):
        is_token = record.completion_mask[index].bool()
        prompt_ids = record.prompt_ids[index][record.prompt_mask[index].bool()].tolist()
        ids = record.completion_ids[index][is_token].tolist()
        row = {
            "step": record.step,
            "rank": record.rank,
            "reason": record.reason,
            "completion": index,
            "prompt": None if tokenizer is None else decode(tokenizer, prompt_ids),
            "text": None if tokenizer is None else decode(tokenizer, ids),
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
            "tokens": None if tokenizer is None else [text(token) for token in ids],
        }
        for name, values in columns.items():
            row[name] = None if values is None else values[index][is_token].tolist()
        yield row


def _write_jsonl(path: Path, records: Iterator[list[Row]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for rows in records:
            for row in rows:
                for name, kind in _PER_TOKEN.items():
                    if kind == "float":
                        row[name] = _finite_or_null(row[name])
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            count += len(rows)
    return count


def _finite_or_null(values: list[float] | None) -> list[float | None] | None:
    return None if values is None else [value if math.isfinite(value) else None for value in values]


def _write_parquet(path: Path, records: Iterator[list[Row]]) -> int:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {"bool": pa.bool_(), "float": pa.float32()}
    types = {
        "step": pa.int64(),
        "rank": pa.int64(),
        "reason": pa.string(),
        "completion": pa.int64(),
        "prompt": pa.string(),
        "text": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "tokens": pa.list_(pa.string()),
    }
    types |= {name: pa.list_(kinds[kind]) for name, kind in _PER_TOKEN.items()}
    schema = pa.schema(types)
    count = 0
    with ParquetWriter(path, schema) as writer:
        for rows in records:
            writer.write_table(pa.Table.from_pylist(rows, schema))
            count += len(rows)
    return count
