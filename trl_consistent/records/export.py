# SPDX-License-Identifier: Apache-2.0
"""Records as JSONL or Parquet, a row for each completion, for other programs. `tables.py` shows them to people."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .logs import readable
from .record import MismatchRecord
from .store import record_files
from .tokens import decode, load_tokenizer


FORMATS = ("jsonl", "parquet")

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

    A row has `step`, `rank`, `reason`, `completion` (row of the record), `prompt` and `text` (null without a tokenizer),
    `prompt_ids`, and lists with an entry for each token of the completion: `completion_ids`, `tokens` (as text),
    `mask`, the three rows of log-probs, `mismatch_log_ratio`, `weights`, `keep_mask` and `advantages` (that of the
    completion, unless tokens have their own). What a record does not have is null. JSON has no NaN and no infinities:
    they are null as well; Parquet keeps them.

    Args:
        path (`str` or `Path`): As of [`record_files`]. A record that cannot be read is left out, with a warning.
        output (`str` or `Path`): The file; replaced if it is there.
        format (`str`, *optional*): One of [`FORMATS`]; by the suffix of `output` if left out.

    Returns:
        How many completions were written.

    Raises:
        `FileNotFoundError`: there are no records, or no folder for the output. `ValueError`: none can be read, or the format is unknown.
    """
    output = Path(output)
    format = output.suffix.removeprefix(".") if format is None else format
    if format not in FORMATS:
        raise ValueError(f"{output} is neither .jsonl nor .parquet: name it so, or say which with --format.")
    if output.is_dir() or not output.parent.is_dir():
        raise FileNotFoundError(
            f"Cannot write {output}: " + ("it is a folder." if output.is_dir() else "no such folder.")
        )
    files = record_files(path)
    if output.resolve() in (file.resolve() for file in files):
        raise ValueError(f"{output} is one of the records: export to another file.")
    partial = output.with_name(f"{output.name}.partial")
    try:
        write = _write_jsonl if format == "jsonl" else _write_parquet
        count = write(partial, _records(files, load_tokenizer(path)))
        if not count:
            raise ValueError(f"No record at {path} can be read.")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _records(files: list[Path], tokenizer: Any) -> Iterator[list[dict[str, Any]]]:
    """The rows of one record after another, with a progress bar where someone watches."""
    from tqdm import tqdm

    texts: dict[int, str] = {}

    def text(token: int) -> str:
        if token not in texts:
            texts[token] = decode(tokenizer, [token])
        return texts[token]

    for _, record in readable(
        tqdm(files, desc="Records", unit="file", leave=False, disable=None), MismatchRecord.load
    ):
        yield list(_rows(record, tokenizer, text))
        del record  # before the next is read


def _rows(record: MismatchRecord, tokenizer: Any, text: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    columns: dict[str, Tensor | None] = {name: getattr(record, name) for name in _PER_TOKEN}
    if record.advantages is not None and record.advantages.dim() == 1:
        columns["advantages"] = record.advantages.unsqueeze(1).expand_as(record.mask)
    for index in range(len(record.mask)):
        inside = record.completion_mask[index].bool()
        prompt = record.prompt_ids[index][record.prompt_mask[index].bool()].tolist()
        ids = record.completion_ids[index][inside].tolist()
        yield {
            "step": record.step,
            "rank": record.rank,
            "reason": record.reason,
            "completion": index,
            "prompt": None if tokenizer is None else decode(tokenizer, prompt),
            "text": None if tokenizer is None else decode(tokenizer, ids),
            "prompt_ids": prompt,
            "completion_ids": ids,
            "tokens": None if tokenizer is None else [text(token) for token in ids],
            **{name: None if x is None else x[index][inside].tolist() for name, x in columns.items()},
        }


def _write_jsonl(path: Path, batches: Iterator[list[dict[str, Any]]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for rows in batches:
            for row in rows:
                known = {
                    name: _known(row[name]) if kind == "float" else row[name] for name, kind in _PER_TOKEN.items()
                }
                file.write(json.dumps({**row, **known}, ensure_ascii=False, allow_nan=False) + "\n")
            count += len(rows)
    return count


def _known(values: list[float] | None) -> list[float | None] | None:
    return None if values is None else [value if math.isfinite(value) else None for value in values]


def _write_parquet(path: Path, batches: Iterator[list[dict[str, Any]]]) -> int:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    types = {"bool": pa.bool_(), "float": pa.float32()}
    ids, text = pa.list_(pa.int32()), pa.string()
    schema = pa.schema(
        {
            **{"step": pa.int64(), "rank": pa.int64(), "reason": text, "completion": pa.int64()},
            **{"prompt": text, "text": text, "prompt_ids": ids, "completion_ids": ids, "tokens": pa.list_(text)},
            **{name: pa.list_(types[kind]) for name, kind in _PER_TOKEN.items()},
        }
    )
    count = 0
    with ParquetWriter(path, schema) as writer:
        for rows in batches:
            writer.write_table(pa.Table.from_pylist(rows, schema))
            count += len(rows)
    return count
