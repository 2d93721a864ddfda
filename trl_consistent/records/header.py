# SPDX-License-Identifier: Apache-2.0
"""The header of a record file: one line of JSON that says what is in the file, so that tensors are read only when needed."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


FORMAT = 1
"""Version of the file format. Files of a newer version are refused."""
HEADER_KEY = "mismatch_record"
"""Under which key of the metadata of a safetensors file the header is."""

_TYPES: dict[str, Any] = {
    "step": int,
    "rank": int | None,
    "reason": str,
    "completions": int,
    "tokens": int,
    "metrics": dict,
    "fingerprint": dict,
}


def read_header(path: str | Path) -> dict[str, Any]:
    """Reads the header of a record file: `step`, `rank`, `reason`, `completions`, `tokens`, `metrics`, `fingerprint`, and
    `cut_from` where a version of ours wrote it.

    Raises:
        `ValueError`: The file is not a record, is incomplete, or was written by a newer version; names the file.
    """
    line = _header_line(path)
    try:
        header = json.loads(line)
        is_newer = header["format"] > FORMAT
        missing = _TYPES.keys() - header.keys()
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a mismatch record: its header is {line[:80]!r}.") from None
    if is_newer:
        raise ValueError(
            f"{path} was written by a newer version (format {header['format']}, this one reads up to {FORMAT}): "
            "upgrade trl-consistent."
        )
    if missing:
        raise ValueError(f"{path} is not a complete record: its header lacks {', '.join(sorted(missing))}.")
    if problem := _problem(header):
        raise ValueError(f"{path} is not a mismatch record: {problem}.")
    return header


def _header_line(path: str | Path) -> str:
    try:
        with safe_open(path, framework="pt") as file:
            line = (file.metadata() or {}).get(HEADER_KEY)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a mismatch record: {error}.") from None
    if line is None:
        raise ValueError(f"{path} is a safetensors file, but not a mismatch record.")
    return str(line)


def _problem(header: dict[str, Any]) -> str | None:
    """What is wrong with the values of a header that has all its keys; `None` if nothing is."""
    for name, kind in _TYPES.items():
        value = header[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"its header has {str(value)[:80]!r} as {name}"
    if header["step"] < 0:
        return f"its header has {header['step']} as step"
    if not all(isinstance(value, int | float) for value in header["metrics"].values()):
        return "the metrics in its header are not all numbers"
    if not isinstance(header["fingerprint"].get("correction") or {}, dict):
        return "the correction in its fingerprint is not a mapping"
    audit = header["fingerprint"].get("audit") or []
    if not isinstance(audit, list) or not all(isinstance(finding, dict) for finding in audit):
        return "the audit in its fingerprint is not a list of findings"
    return None
