# SPDX-License-Identifier: Apache-2.0
"""What a run leaves in its output folder: names of files and folders, and how to read many files of which some are broken."""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar


logger = logging.getLogger(__name__)

FOLDER = "mismatch"
"""The folder in a run's `output_dir` that everything of ours is in."""
RECORDS = "records"
"""The folder of record files, inside [`FOLDER`]."""
LOGS = "logs.jsonl"
"""The file that gets a line for each log of the run while it trains, inside [`FOLDER`]."""
TOKENIZER = "tokenizer"
"""The folder of the run's tokenizer, inside [`FOLDER`]."""
STATE = "trainer_state.json"
"""The file with all logs that the trainers of transformers write into `output_dir` and into each checkpoint."""

Content = TypeVar("Content")


def readable(
    files: Iterable[Path], read: Callable[[Path], Content], problems: list[str] | None = None
) -> Iterator[tuple[Path, Content]]:
    """Each file that can be read, with what `read` makes of it.

    A file that cannot be read is left out, and [`report_problem`] is told. A file that a run has removed meanwhile is left
    out silently.
    """
    for file in files:
        try:
            yield file, read(file)
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            report_problem(f"{file.name} cannot be read: {error}", problems)


def report_problem(problem: str, problems: list[str] | None) -> None:
    """Adds a sentence to `problems` or, without such a list, logs it as a warning."""
    if problems is None:
        logger.warning(problem)
    else:
        problems.append(problem)


def set_aside(folder: str | Path) -> None:
    """Renames the `mismatch` folder of an earlier run to `mismatch.old`, replacing an older `mismatch.old`.

    A folder without records and logs stays where it is, so that starts that failed do not replace the records of a run.
    """
    folder = Path(folder)
    if (folder / LOGS).exists() or any(folder.glob(f"{RECORDS}/step-*.safetensors")):
        earlier = folder.with_name(f"{folder.name}.old")
        shutil.rmtree(earlier, ignore_errors=True)
        folder.replace(earlier)
        logger.info(f"The records of an earlier run are in {earlier} now.")
