# SPDX-License-Identifier: Apache-2.0
"""The `trl-consistent` command. Each sub-command parses its arguments, calls one function and prints what it returns.

What a sub-command needs is imported when it runs, so that `--help` answers at once.
"""

import argparse
import os
import sys
from typing import Any

from . import __version__, run


def main(argv: list[str] | None = None) -> int:
    """Runs the `trl-consistent` command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # What follows these two belongs to the script or to `trl grpo`, `--help` included.
    if argv and argv[0] == "run":
        return run.main(argv[1:])
    if argv and argv[0] == "grpo":
        return _grpo(argv[1:])
    return _answer(build_parser().parse_args(argv))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line; `run` and `grpo` take their arguments from [`main`]."""
    parser = argparse.ArgumentParser(
        prog="trl-consistent",
        description="Measures, corrects and explains the mismatch between trainer and rollout engine in TRL's GRPO.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("run", help="run an unmodified TRL script with our trainer and config", add_help=False)
    commands.add_parser("grpo", help="run `trl grpo` with our trainer, config and flags", add_help=False)
    _add_report(commands)
    _add_records(commands)
    _add_compare(commands)
    _add_watch(commands)
    return parser


def _answer(arguments: argparse.Namespace) -> int:
    """Runs a sub-command; returns the exit code. Errors that the user can fix are one line on stderr."""
    try:
        arguments.function(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # such as of `| head`: not an error, and the interpreter must not flush again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"trl-consistent: {error}", file=sys.stderr)
        return 2
    return 0


def _grpo(argv: list[str]) -> int:
    """Runs `trl grpo` with our classes: the same flags and ours, launched by accelerate."""
    from importlib.resources import files

    from .upstream.trl import split_launch_arguments

    with run.swapped():
        launch_arguments, script_arguments = split_launch_arguments(argv)
    from .upstream.accelerate import launch

    script = str(files("trl.scripts") / "grpo.py")
    command = [*launch_arguments, "-m", "trl_consistent.run", script, *script_arguments]
    launch(command)
    return 0


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write a report of a run as a web page, an image, data or a summary",
        description="Writes a report of a run of our trainer or of TRL's. It says whether the rollout engine is close enough to "
        "the trainer and, if not, since which step and at which tokens.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the output folder of a run, or one record file")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: report.FORMAT in RUN_DIR)")
    parser.add_argument(
        "--format",
        choices=("html", "png", "json", "md"),
        help="html is one page that needs no other file, png an image of its figures, json its data, and md a summary to paste "
        "into an issue (default: the suffix of FILE, or html)",
    )
    parser.set_defaults(function=_report)


def _report(arguments: argparse.Namespace) -> None:
    from .report import write_report

    print(write_report(arguments.run_dir, arguments.output, arguments.format))


def _add_records(commands: Any) -> None:
    records = commands.add_parser(
        "records",
        help="list, show or export the records of a run",
        description="Shows the rollout batches that a run recorded, or exports them for other programs.",
    )
    actions = records.add_subparsers(dest="action", metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "path", metavar="PATH", help="the output folder of a run, a folder of records, or one record file"
    )

    listing = actions.add_parser(
        "list",
        parents=[where],
        help="list the recorded steps",
        description="Prints a row for each recorded step: size, most important metrics, and metrics outside their healthy range.",
    )
    listing.set_defaults(function=_records_list)

    show = actions.add_parser(
        "show",
        parents=[where],
        help="show one record",
        description="Prints where a record is from, its metrics, what the audit found, and the tokens with the largest gap.",
    )
    show.add_argument("--step", type=int, help="the step whose record to show (default: the newest)")
    show.add_argument("--tokens", type=_count, default=20, help="how many tokens to show (default: %(default)s)")
    show.set_defaults(function=_records_show)

    export = actions.add_parser(
        "export",
        parents=[where],
        help="write the records as JSONL or Parquet",
        description="Writes the records to a JSONL or Parquet file, a row for each completion.",
    )
    export.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the file to write; replaced if it exists"
    )
    export.add_argument(
        "--format", choices=("jsonl", "parquet"), help="the format of the file (default: the suffix of FILE)"
    )
    export.set_defaults(function=_records_export)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


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


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare corrections on recorded batches, or two runs",
        description="Applies corrections to recorded batches, without training. Prints what each makes of the weights and the "
        "gradient, and which one to use. If RECORDS are exactly two output folders of runs and --correction is left out, the two "
        "runs are compared instead.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="RECORDS",
        help="output folders of runs, folders of records, or record files",
    )
    parser.add_argument(
        "--correction",
        nargs="+",
        metavar="NAME",
        help="presets, or level, action and bounds such as token_truncate:0.5,2 (default: none, tis, icepop, seq_tis, "
        "seq_mis, geo_mis, prefix_tis and the correction that the run had)",
    )
    parser.add_argument(
        "--format",
        choices=("table", "json", "md"),
        default="table",
        help="tables for a terminal, JSON, or tables in Markdown (default: %(default)s)",
    )
    parser.set_defaults(function=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    from .compare.replay import replay
    from .compare.runs import compare_runs, is_run
    from .tables import print_json, print_tables

    paths = arguments.paths
    if arguments.correction is None and len(paths) == 2 and all(map(is_run, paths)):
        found: Any = compare_runs(*paths)
    else:
        found = replay(paths, arguments.correction or ())
    if arguments.format == "json":
        print_json(found)
    else:
        print_tables(found.tables(), arguments.format)


def _add_watch(commands: Any) -> None:
    parser = commands.add_parser(
        "watch",
        help="show the report of a running training, live",
        description="Serves the report of a run as a web page on this machine, and updates it whenever logs or records arrive. "
        "Ctrl-C ends it.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the output folder of the run; it does not have to exist yet"
    )
    parser.add_argument(
        "--port", type=int, default=8642, help="the port to listen on; 0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: %(default)s, which only this machine can reach)",
    )
    parser.set_defaults(function=_watch)


def _watch(arguments: argparse.Namespace) -> None:
    from .report.watch import watch

    watch(arguments.run_dir, arguments.host, arguments.port)


if __name__ == "__main__":
    sys.exit(main())
