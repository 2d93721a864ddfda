# SPDX-License-Identifier: Apache-2.0
"""The `trl-consistent` command. Each sub-command parses, calls one function and returns an exit code."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from . import __version__, run


def _grpo(argv: list[str]) -> int:
    """`trl grpo` with our classes: the same flags plus ours, launched through accelerate."""
    from importlib.resources import files

    from .upstream.trl import split_launch_arguments

    with run.swapped():
        launch_arguments, script_arguments = split_launch_arguments(argv)
    from accelerate.commands.launch import launch_command, launch_command_parser

    script = str(files("trl.scripts") / "grpo.py")
    command = [*launch_arguments, "-m", "trl_consistent.run", script, *script_arguments]
    launch_command(launch_command_parser().parse_args(command))
    return 0


def _report(arguments: argparse.Namespace) -> None:
    from .report import write_report

    print(write_report(arguments.run_dir, arguments.output, arguments.format))


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
        help="html: one page that needs nothing else; png: its figures in one picture; json: its data; "
        "md: a summary to paste into an issue. What the suffix of FILE says, else html",
    )
    parser.set_defaults(function=_report)


def _records_list(arguments: argparse.Namespace) -> None:
    from .records.listing import listing
    from .tables import print_tables

    print_tables([listing(arguments.path)])


def _records_show(arguments: argparse.Namespace) -> None:
    from .records.listing import details
    from .tables import print_tables

    print_tables(details(arguments.path, arguments.step, arguments.tokens))


def _records_export(arguments: argparse.Namespace) -> None:
    from .records.export import export

    count = export(arguments.path, arguments.output, arguments.format)
    print(f"Wrote {count} completions to {arguments.output}.")


def _add_records(commands: Any) -> None:
    records = commands.add_parser("records", help="list, show or export the records of a run")
    actions = records.add_subparsers(dest="action", metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("path", metavar="PATH", help="a run's output folder, a folder of records, or a record")
    listing = actions.add_parser("list", parents=[where], help="a row for each step, without reading tensors")
    listing.set_defaults(function=_records_list)
    show = actions.add_parser("show", parents=[where], help="where a record is from, its metrics, its worst tokens")
    show.add_argument("--step", type=int, help="which record; the newest if left out")
    show.add_argument("--tokens", type=_count, default=20, help="how many tokens with the largest gap (default: 20)")
    show.set_defaults(function=_records_show)
    export = actions.add_parser("export", parents=[where], help="a row for each completion, as JSONL or Parquet")
    export.add_argument("-o", "--output", required=True, metavar="FILE", help="replaced if it is there")
    export.add_argument("--format", choices=("jsonl", "parquet"), help="if the suffix of FILE does not say it")
    export.set_defaults(function=_records_export)


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _compare(arguments: argparse.Namespace) -> None:
    from .compare.replay import replay
    from .compare.runs import compare_runs, is_run
    from .tables import print_json, print_tables

    paths, names = arguments.paths, arguments.correction
    if names is None and len(paths) == 2 and all(map(is_run, paths)):
        found: Any = compare_runs(*paths)
    else:
        found = replay(paths, names or ())
    if arguments.format == "json":
        print_json(found)
    else:
        print_tables(found.tables(), arguments.format)


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="replay corrections over records, or put two runs side by side",
        description="Replays corrections over recorded batches, without training: what each makes of the weights and the "
        "gradient, and which one to take. With exactly two output folders of runs and no --correction: the two runs side "
        "by side.",
    )
    compare.add_argument(
        "paths", nargs="+", metavar="RECORDS", help="runs' output folders, folders of records, records"
    )
    compare.add_argument(
        "--correction",
        nargs="+",
        metavar="NAME",
        help="presets, or level, action and bounds such as token_truncate:0.5,2 (default: none, tis, icepop, seq_tis, "
        "seq_mis, geo_mis, prefix_tis and what the run had)",
    )
    compare.add_argument("--format", choices=("table", "json", "md"), default="table")
    compare.set_defaults(function=_compare)


def _answer(function: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """Runs a sub-command; its exit code. What the user can mend is a line on stderr, a reader that has left is none."""
    try:
        function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor when the interpreter flushes at its end
        return 141
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"trl-consistent: {error}", file=sys.stderr)
        return 2
    return 0


def _watch(arguments: argparse.Namespace) -> None:
    from .report.watch import watch

    watch(arguments.run_dir, arguments.host, arguments.port)


def _add_watch(commands: Any) -> None:
    parser = commands.add_parser(
        "watch",
        help="the report of a run that is going on, as a page that renews itself",
        description="Serves the report of a run on this machine and renews it as logs and records arrive, until Ctrl-C.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's output folder; it may not be there yet")
    parser.add_argument("--port", type=int, default=8642, help="0 is any that is free (default: %(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.set_defaults(function=_watch)


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
    _add_records(commands)
    _add_compare(commands)
    _add_watch(commands)
    arguments = parser.parse_args(argv)
    return _answer(arguments.function, arguments)


if __name__ == "__main__":
    sys.exit(main())
