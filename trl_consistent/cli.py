# SPDX-License-Identifier: Apache-2.0
"""The `trl-consistent` command. Each sub-command parses, calls one function and returns an exit code."""

import argparse
import sys
from typing import Any

from . import __version__, run


def _grpo(argv: list[str]) -> int:
    """`trl grpo` with our classes: the same flags plus ours, launched through accelerate."""
    from importlib.resources import files

    from . import _compat

    with run.swapped():
        launch_arguments, script_arguments = _compat.split_launch_arguments(argv)
    from accelerate.commands.launch import launch_command, launch_command_parser

    script = str(files("trl.scripts") / "grpo.py")
    command = [*launch_arguments, "-m", "trl_consistent.run", script, *script_arguments]
    launch_command(launch_command_parser().parse_args(command))
    return 0


def _report(options: argparse.Namespace) -> int:
    """Writes what a run's logs and records say."""
    from .report import write_report

    try:
        written = write_report(options.run_dir, options.output, options.format)
    except (OSError, ValueError, ImportError) as error:
        print(f"trl-consistent report: {error}", file=sys.stderr)
        return 2
    print(*written, sep="\n")
    return 0


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="what a run's logs and records say, as one HTML page, a picture, data or a summary",
        description="Writes the report of a run of our trainer or of TRL's: is the rollout engine close enough to the "
        "trainer, since when not, and at which tokens.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run's output folder, or one record file")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it; RUN_DIR/report.FORMAT if left out")
    parser.add_argument(
        "--format",
        choices=("html", "png", "json", "md"),
        default="html",
        help="html: one page that needs nothing else (default); png: its figures in one picture; json: its data; "
        "md: a summary to paste into an issue",
    )
    parser.set_defaults(action=_report)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `trl-consistent` command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # What follows a sub-command belongs to the script or to `trl grpo`, `--help` included.
    if argv and argv[0] == "run":
        return run.main(argv[1:])
    if argv and argv[0] == "grpo":
        return _grpo(argv[1:])
    parser = argparse.ArgumentParser(
        prog="trl-consistent", description="Measure and correct training-inference mismatch in TRL's GRPO."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("run", help="run an unmodified TRL script with our trainer and config", add_help=False)
    commands.add_parser("grpo", help="`trl grpo` with our trainer, config and flags", add_help=False)
    _add_report(commands)
    options = parser.parse_args(argv)
    return options.action(options)


if __name__ == "__main__":
    sys.exit(main())
