# SPDX-License-Identifier: Apache-2.0
"""Weights over a plain TCP connection: how they go from the trainer to the workers of a vLLM server, without NCCL.

The trainer listens, on the one address that leads to the server; each worker connects to the address and shows the token
that its server was told when the trainer introduced itself. So a server binds nothing and takes weights from nobody else,
and a connection lasts one update: a server that was restarted, or a trainer, just connects again. (gloo needs open
ports on both sides, binds to all interfaces, and a dead peer leaves its group unusable.)

`worker.py` is the server's end inside vLLM, `server.py` the trainer's.
"""

import concurrent.futures
import contextlib
import json
import secrets
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..upstream.vllm import register_weight_transfer


BACKEND = "trl_consistent"
"""Name under which vLLM knows the backend: `--weight-transfer-config '{"backend": "trl_consistent"}'`."""

TIMEOUT = 600.0
"""Seconds without a byte after which the other side is given up: gathering a sharded tensor takes a while."""


def register() -> None:
    """vLLM calls it in each of its processes (entry point `vllm.general_plugins`)."""
    register_weight_transfer(BACKEND, f"{__package__}.worker", "SocketWeightTransferEngine")


def described(config: Any) -> dict[str, Any]:
    """What has to be the same about the model on both sides, of its (text) configuration."""
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    return {name: getattr(config, name, None) for name in names}


class TransferError(RuntimeError):
    """A worker of the server could not take the weights; its message is the worker's."""


class WeightSender:
    """The trainer's end: listens for the workers of one server.

    Args:
        server (`tuple[str, int]`): Where the server's HTTP interface is; the interface that leads there is listened on.
        port (`int`): Port to listen on; 0 for any.

    Raises:
        `OSError`: the port is taken, or the server is not there.
    """

    def __init__(self, server: tuple[str, int], port: int):
        with socket.create_connection(server, timeout=10) as connection:
            family, address = connection.family, connection.getsockname()[0]
        self._listener = socket.create_server((address, port), family=family)
        self._listener.settimeout(0.2)
        self._token = secrets.token_hex(32)

    @property
    def peer(self) -> dict[str, Any]:
        """What the server has to know to connect."""
        host, port, *_ = self._listener.getsockname()
        return {"host": host, "port": port, "token": self._token}

    def send(
        self, named_tensors: Iterable[tuple[str, Tensor]], workers: int, request: concurrent.futures.Future
    ) -> list[dict[str, Any]]:
        """Streams tensors, one at a time, to `workers` workers; returns what each replies.

        A reply has `unused`, the names of tensors it had no place for, and what the worker says of itself.

        Args:
            named_tensors (`Iterable[tuple[str, torch.Tensor]]`): A tensor may be freed once the next one is asked for.
            workers (`int`): Number of workers of the server.
            request (`concurrent.futures.Future`): The request that makes the workers connect.

        Raises:
            `TransferError`: a worker could not load a tensor.
            `OSError`: a worker is gone.
        """
        with contextlib.ExitStack() as stack:
            connections: list[socket.socket] = []
            while len(connections) < workers:
                if request.done():
                    request.result()
                    raise TransferError(f"{len(connections)} of {workers} workers of the server asked for weights.")
                if (connection := self._accept()) is not None:
                    connections.append(stack.enter_context(connection))
            for name, tensor in named_tensors:
                header = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                data = memoryview(_bytes(tensor.detach().cpu()))
                for connection in connections:
                    _send_json(connection, header)
                    connection.sendall(data)
            for connection in connections:
                _send_json(connection, {})
            replies = [_receive_json(connection) for connection in connections]
        for reply in replies:
            if reply["error"] is not None:
                raise TransferError(reply["error"])
        return replies

    def _accept(self) -> socket.socket | None:
        """A connection that shows the token; `None` if none came for a while."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        connection.settimeout(5)
        try:
            shown = bytes(_receive(connection, bytearray(len(self._token))))
        except OSError:
            shown = b""
        if not secrets.compare_digest(shown, self._token.encode()):
            connection.close()
            return None
        connection.settimeout(TIMEOUT)
        return connection

    def close(self) -> None:
        self._listener.close()


def receive(peer: dict[str, Any], load: Callable[[str, Tensor], bool], **about: Any) -> None:
    """The worker's end: connects to `peer` and hands each tensor to `load`, which returns whether there is a place for it.

    The reply to the sender has `about`, too.

    Raises:
        `TransferError`: `load` failed. The sender was told, too.
        `OSError`: the sender is gone.
    """
    with socket.create_connection((peer["host"], peer["port"]), timeout=TIMEOUT) as connection:
        connection.sendall(peer["token"].encode())
        error, unused = None, []
        while header := _receive_json(connection):
            tensor = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"]))
            _receive(connection, _bytes(tensor))
            if error is None:  # else: read on, or the sender would not get as far as the reply
                try:
                    if not load(header["name"], tensor):
                        unused.append(header["name"])
                except Exception as failure:
                    error = f"{header['name']} {header['dtype']}{header['shape']}: {type(failure).__name__}: {failure}"
        _send_json(connection, {"error": error, "unused": unused, **about})
    if error is not None:
        raise TransferError(error)


def _bytes(tensor: Tensor) -> Any:
    """The memory of a CPU tensor, or of a copy if it is not contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _receive(connection: socket.socket, buffer: Any) -> Any:
    view = memoryview(buffer)
    while len(view):
        if not (count := connection.recv_into(view)):
            raise ConnectionResetError("The other side closed the connection in the middle of a weight update.")
        view = view[count:]
    return buffer


def _send_json(connection: socket.socket, value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    connection.sendall(struct.pack("!I", len(text)) + text)


def _receive_json(connection: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!I", _receive(connection, bytearray(4)))
    return json.loads(_receive(connection, bytearray(length)))
