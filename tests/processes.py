# SPDX-License-Identifier: Apache-2.0
"""The environment of a process that a user would start: without what engines in the test process left behind."""

import os


def fresh_environment(**extra: str) -> dict[str, str]:
    left = ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {**{k: v for k, v in os.environ.items() if k not in left}, **extra}
