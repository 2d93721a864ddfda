# SPDX-License-Identifier: Apache-2.0
"""What we rely on in accelerate beyond its documented API."""

from typing import Any


VERSIONS = {"accelerate": ">=1.15,<1.16"}

NAMES = {
    "accelerate.commands.launch": {
        "launch_command": "starts what the parsed arguments of `accelerate launch` ask for",
        "launch_command_parser": "the parser of these arguments",
    },
    "accelerate:Accelerator": {
        "native_amp": "whether the forward runs under autocast; `mixed_precision` does not say"
    },
}


def mixes_precision(accelerator: Any) -> bool:
    """Whether `accelerator.mixed_precision` takes effect: on a CPU, accelerate ignores float16 without a word."""
    return accelerator.native_amp or accelerator.distributed_type.value == "DEEPSPEED"


def launch(arguments: list[str]) -> None:
    """Does what `accelerate launch` does with these command-line arguments."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))
