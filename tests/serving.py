# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server in processes of its own, started as docs/engines.md says."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import requests
import torch

from trl_consistent.rollout.client import start_command

from .processes import fresh_environment


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    def __init__(self, model: str, log):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.model, self.log, self.process = model, log, None

    def start(self) -> None:
        """Starts it with the command that the error messages give, and does not wait."""
        # That command is for a shell; here, the same interpreter, and its process group to kill it by.
        command = start_command(SimpleNamespace(name_or_path=self.model, dtype=torch.float32), self.url)
        setting, _, *words = shlex.split(command)
        environment = fresh_environment(**dict([setting.split("=")]), OMP_NUM_THREADS="1")
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words, "--max-model-len", "64"], env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise AssertionError(f"The server did not start:\n{self.log.read_text()[-6000:]}")

    def kill(self) -> None:
        """kill -9, all of it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
