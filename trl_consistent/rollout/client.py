# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a vLLM server: weights without NCCL, and what to do when the server is not there.

`transfer.py` is how the weights travel, `worker.py` what takes them.
"""

import concurrent.futures
import contextlib
import logging
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import requests
import torch
from accelerate.utils import broadcast_object_list
from requests.adapters import HTTPAdapter
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from .transfer import BACKEND, WeightSender, described


logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 3
"""How often a sync or a generation is tried when the server is lost while it runs, and comes back each time."""

PROGRESS = 30.0
"""Seconds between two messages that a server is being waited for."""


class ServerDownError(ConnectionError):
    """The vLLM server did not come, or not come back, in time."""


class ServerLostError(ConnectionError):
    """The vLLM server went away in the middle of something that can be tried again."""


class WrongServerError(ValueError):
    """The vLLM server cannot be what this trainer samples from."""


def start_command(model: Any, base_url: str) -> str:
    """What starts the server that a trainer without a GPU needs."""
    url = urlsplit(base_url)
    # not `vllm serve`, which the CPU build does not have
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model.name_or_path]
    host = "127.0.0.1" if url.hostname in (None, "0.0.0.0") else url.hostname  # not to all the world: TRL's default
    words += ["--host", host, "--port", str(url.port or 80)]
    words += ["--dtype", str(model.dtype).removeprefix("torch."), "--logprobs-mode", "processed_logprobs"]
    words += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}', "--enforce-eager"]
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"


class Raises:
    """Takes the place of a list that is sent to all ranks, so that reading it raises on each of them."""

    def __init__(self, error: Exception):
        self.error = error

    def __getitem__(self, index: Any) -> NoReturn:
        raise self.error


def for_all_ranks(error: Exception) -> Exception:
    """`error` as it is if it is one of ours, else one that every rank can read."""
    if isinstance(error, ServerDownError | ServerLostError | WrongServerError):
        return error
    readable = RuntimeError(f"{type(error).__name__}: {error}")
    readable.__cause__ = error
    return readable


@contextlib.contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """What rank 0 raises in the block, every rank raises at its end, so that none waits for the others forever."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    [shared] = broadcast_object_list([error and for_all_ranks(error)])
    if error is not None or shared is not None:
        raise error or shared


def persistently(act: Callable[[], T], again: Callable[[], None] = lambda: None) -> T:
    """`act()`, and if the server is lost meanwhile, `again()` and `act()` once more, a few times."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return act()
        except ServerLostError as error:
            if attempt == ATTEMPTS:
                raise ServerDownError(f"Given up after {ATTEMPTS} attempts. {error}") from error
            logger.warning(f"{error} Trying again ({attempt} of {ATTEMPTS - 1}).")
            again()
    raise AssertionError


class SocketVLLMClient(VLLMClient):
    """[`~trl.generation.vllm_client.VLLMClient`] that needs no NCCL, and copes with a server that goes away.

    Weights travel as `transfer.py` says. Every sync begins by making sure that the server is there, waiting for it if it
    must, and ends by telling it a version, which every generation checks: a server that was restarted has the weights of
    its checkpoint, and what it generated is not used.

    Args:
        model: The trained model, to tell which server is wanted.
        base_url, group_port, connection_timeout: As of `VLLMClient`.
    """

    communicator: WeightSender | None

    def __init__(self, *args: Any, model: Any, connection_timeout: float = 0.0, **kwargs: Any):
        self._trained = model
        self._timeout = connection_timeout
        super().__init__(*args, connection_timeout=connection_timeout, **kwargs)
        for scheme in ("http://", "https://"):  # TRL's retries would not notice a server that was restarted
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=64))

    @property
    def _start(self) -> str:
        return f"Start it with:\n  {start_command(self._trained, self.base_url)}"

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Waits until the server answers, asking ever less often, and says so now and then."""
        started, said = time.monotonic(), 0.0
        while (reason := self._trouble()) is not None:
            waited = time.monotonic() - started
            where = f"The vLLM server at {self.base_url} does not answer ({reason})"
            if waited + retry_interval > total_timeout:
                raise ServerDownError(f"{where} after {waited:.0f} s (`vllm_server_timeout`). {self._start}")
            if waited >= said:
                logger.warning(f"{where}: waiting for it, {waited:.0f} of {total_timeout:.0f} s. {self._start}")
                said = waited + PROGRESS
            time.sleep(retry_interval)
            retry_interval = min(1.5 * retry_interval, 5.0)

    def _trouble(self) -> str | None:
        """Why the server does not answer; `None` if it does."""
        try:
            status = requests.get(f"{self.base_url}/health", timeout=10).status_code
        except requests.RequestException as error:
            return type(error).__name__
        return None if status == 200 else f"status {status}"

    def _get(self, url: str, **kwargs: Any) -> dict:
        return self._or_lost(super()._get, url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict:
        return self._or_lost(super()._post, url, **kwargs)

    def get_server_info(self) -> dict:
        return self._or_lost(super().get_server_info)

    def _or_lost(self, request: Callable[..., dict], *args: Any, **kwargs: Any) -> dict:
        try:
            return request(*args, **kwargs)
        except Exception as error:  # TRL raises just that for a status other than 200
            # An engine that died is reported by a server that still answers, for a moment.
            if isinstance(error, requests.RequestException) or self._trouble() is not None:
                raise ServerLostError(f"The vLLM server at {self.base_url} was lost ({error}).") from error
            raise

    def init_communicator(self, device: torch.device | str | int = "cpu") -> None:
        """Introduces this trainer to the server's workers, and makes sure that they hold the same kind of model."""
        try:
            transfer = self.get_server_info()["weight_transfer_config"]
        except RuntimeError as error:  # no development endpoints
            raise WrongServerError(f"{error} {self._start}") from error
        if transfer is None or transfer["backend"] != BACKEND:
            got = None if transfer is None else transfer["backend"]
            raise WrongServerError(
                f"The vLLM server at {self.base_url} takes weights by {got!r}, and a trainer on {device} sends them by "
                f'{BACKEND!r}: it lacks `--weight-transfer-config \'{{"backend": "{BACKEND}"}}\'`. {self._start}'
            )
        if self.communicator is None:
            url = urlsplit(self.base_url)
            server = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
            try:
                self.communicator = WeightSender(server, self.group_port)
            except OSError as error:
                raise OSError(
                    f"Cannot listen on port {self.group_port} for the vLLM server at {self.base_url} ({error}): set "
                    "`vllm_group_port` to one that is free."
                ) from error
        self._workers = self.get_world_size()
        peer = self.communicator.peer
        try:
            for reply in self._send([], "init_weight_transfer_engine", init_info=peer):
                self._check_model(reply["model"])
        except Exception:
            self.close_communicator()
            raise
        self._version = self._new_version()
        self._post(f"{self.base_url}/update_weight_version", json={"new_version": self._version})

    def _check_model(self, served: dict[str, Any]) -> None:
        wanted = described(self._trained.config.get_text_config())
        different = [
            name for name in wanted if wanted[name] != served[name] and None not in (wanted[name], served[name])
        ]
        if different:
            differences = ", ".join(f"{name} {served[name]} instead of {wanted[name]}" for name in different)
            raise WrongServerError(
                f"The vLLM server at {self.base_url} serves {self.model!r}, which is not the model being trained "
                f"({self._trained.name_or_path!r}): {differences}. {self._start}"
            )

    def _send(self, named_params: Iterable[tuple[str, Tensor]], endpoint: str, **payload: Any) -> list[dict[str, Any]]:
        """Sends tensors to the workers, which connect while they handle the request; returns what they reply."""
        assert self.communicator is not None
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
            request = executor.submit(self._post, f"{self.base_url}/{endpoint}", json=payload)
            try:
                replies = self.communicator.send(named_params, self._workers, request)
            except OSError as error:
                raise ServerLostError(f"The vLLM server at {self.base_url} was lost in a sync ({error}).") from error
            request.result()
        return replies

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Streams `named_params` to the server; each tensor says itself what it is, `metadata` is not needed.

        Reads `named_params` to its end whatever happens: other ranks take part in it, and it unmerges adapters there.
        """
        try:
            self.check_server(self._timeout)
            if self._served_version() != self._version:
                self.init_communicator()  # to a server that was restarted
            self._start_weight_update()
            replies = self._send(named_params, "update_weights", update_info={})
            self._version = self._new_version()
            self._finish_weight_update()
        finally:
            for _ in named_params:
                pass
        if unused := [name for name in replies[0]["unused"] if all(name in reply["unused"] for reply in replies)]:
            raise RuntimeError(
                f"The vLLM server has no place for {len(unused)} of the weights that were sent, the first is "
                f"{unused[0]!r}: the trained parameters have other names in vLLM."
            )

    def _start_weight_update(self) -> None:
        try:
            super()._start_weight_update()
        except ServerLostError:
            raise
        except Exception:  # a trainer that died in a sync has left it open
            super()._finish_weight_update()
            super()._start_weight_update()

    def _finish_weight_update(self) -> None:
        self._post(f"{self.base_url}/finish_weight_update", json={"weight_version": self._version})

    @staticmethod
    def _new_version() -> str:
        return str(uuid.uuid4())

    def _served_version(self) -> str:
        return self._get(f"{self.base_url}/weight_info")["weight_version"]

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `VLLMClient.generate`; an error comes in the place of completions, so that all ranks get it."""
        try:
            output = super().generate(*args, **kwargs)
            if (served := self._served_version()) != self._version:
                raise ServerLostError(
                    f"The vLLM server at {self.base_url} holds weights {served!r}, not those of the last sync "
                    f"({self._version!r}): it was restarted, or another trainer writes to it."
                )
        except Exception as error:
            return {"prompt_ids": [], "completion_ids": Raises(for_all_ranks(error)), "logprobs": None}
        return output

    def close_communicator(self) -> None:
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None
