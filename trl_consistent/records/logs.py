# SPDX-License-Identifier: Apache-2.0
"""The logs of a run: written line by line, and read from there or from the trainer's state."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from .record import FOLDER, LOGS, STATE


logger = logging.getLogger(__name__)

T = TypeVar("T")


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
