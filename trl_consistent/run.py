# SPDX-License-Identifier: Apache-2.0
"""Runs an unmodified TRL script with our trainer and config in place of `trl.GRPOTrainer` and `trl.GRPOConfig`.

    trl-consistent run path/to/script.py <its arguments>
    accelerate launch -m trl_consistent.run path/to/script.py <its arguments>

Our options are added to the flags of the script. When the script ends, TRL's names stand for TRL's classes again.
"""

import contextlib
import importlib
import os
import runpy
import sys
from collections.abc import Iterator

from .rollout.environment import prepare


USAGE = "usage: trl-consistent run SCRIPT.py [ARGUMENTS OF THE SCRIPT ...]"
"""The first line of `--help`, also shown when the script is missing."""


@contextlib.contextmanager
def swapped() -> Iterator[None]:
    """Makes `GRPOTrainer` and `GRPOConfig` that are imported from TRL our classes while the block runs."""
    from .config import ConsistentGRPOConfig
    from .training.trainer import ConsistentGRPOTrainer
    from .upstream.substitution import substituted
    from .upstream.trl import GRPO_MODULES

    ours = {"GRPOTrainer": ConsistentGRPOTrainer, "GRPOConfig": ConsistentGRPOConfig}
    with contextlib.ExitStack() as stack:
        for name in GRPO_MODULES:
            module = importlib.import_module(name)
            present = {key: value for key, value in ours.items() if hasattr(module, key)}
            stack.enter_context(substituted(module, **present))
        yield


def run(script: str, arguments: list[str]) -> None:
    """Runs a script as `__main__` with these arguments and with our classes in place of TRL's.

    Raises:
        `FileNotFoundError`: There is no such script.
    """
    if not os.path.isfile(script):
        raise FileNotFoundError(f"No script at {script!r}. {USAGE}")
    argv = sys.argv
    path = list(sys.path)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        with swapped():
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = argv
        sys.path[:] = path


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m trl_consistent.run`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}")
        return 0 if argv else 2
    prepare()
    try:
        run(argv[0], argv[1:])
    except FileNotFoundError as error:
        if error.filename is not None:  # an error of the script, which opened another file
            raise
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
