# SPDX-License-Identifier: Apache-2.0
"""Writes the logs of a run line by line while it trains, and reads them from there and from the trainer's state."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import FOLDER, LOGS, STATE, report_problem


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
    """Reads the lines of a run's logs; `folder` is its `mismatch` folder.

    A line that a killed run left half written is left out. Without logs, the list is empty.
    """
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
    """Everything that a run has logged, one entry a step, ascending; empty if there are no logs.

    The logs that we write while a run trains come first. For the steps before them, and for runs of TRL's trainer, there is
    `trainer_state.json`, of the run or of a checkpoint, whichever got farthest.

    Args:
        run (`str` or `Path`): The output folder of a run of our trainer or of TRL's.
        problems (`list[str]`, *optional*): Gets a sentence for each file that cannot be read. Without it, each is a warning.
    """
    run = Path(run)
    states = _states(run, problems)
    live = _by_step(read_logs(run / FOLDER))
    if live:  # an earlier run may have left its states here
        states = [state for state in states if _agree(state.logs, live)]
    found: dict[int, dict[str, Any]] = {}
    if states:
        farthest = max(states, key=lambda state: state.step)
        found = {step: logs for step, logs in farthest.logs.items() if not live or step < min(live)}
    found |= live
    return [found[step] for step in sorted(found)]


@dataclass(frozen=True)
class _State:
    """A `trainer_state.json`."""

    step: int
    """The optimizer step that it was saved after."""
    logs: dict[int, dict[str, Any]]
    """What had been logged, by step."""


def _states(run: Path, problems: list[str] | None) -> list[_State]:
    """The states of a run and of its checkpoints that can be read."""
    states = []
    for file in [run / STATE, *run.glob(f"checkpoint-*/{STATE}")]:
        if not file.is_file():
            continue
        try:
            state = json.loads(file.read_text())
            states.append(_State(state.get("global_step", 0), _by_step(list(state["log_history"]))))
        except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
            problem = f"{file.relative_to(run)} cannot be read: {type(error).__name__}: {error}."
            report_problem(problem, problems)
    return states


def _agree(saved: dict[int, dict[str, Any]], live: dict[int, dict[str, Any]]) -> bool:
    """Whether two logs are of the same run: they have a step in common, and every common step has the same values."""
    common = saved.keys() & live.keys()
    return bool(common) and all(live[step].get(key) == value for step in common for key, value in saved[step].items())


def _by_step(entries: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """One entry a step. Where the steps go back, the run was resumed, and what it had logged beyond is dropped."""
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
