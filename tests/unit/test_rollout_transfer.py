# SPDX-License-Identifier: Apache-2.0
"""Weights over loopback, between two threads; no vLLM."""

import concurrent.futures
import socket
from types import SimpleNamespace

import pytest
import torch

from trl_consistent.rollout import transfer
from trl_consistent.rollout.transfer import TransferError, WeightSender, receive


@pytest.fixture
def sender():
    with socket.create_server(("127.0.0.1", 0)) as server:  # stands for the HTTP interface of a vLLM server
        sender = WeightSender(server.getsockname(), 0)
    yield sender
    sender.close()


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


WEIGHTS = {
    "float32": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "bfloat16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "float8": torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "scalar": torch.tensor(3.25),
    "empty": torch.zeros(0, 4),
    "large": torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)),
}


def test_every_worker_gets_every_tensor_bit_for_bit(sender, pool):
    got = [{}, {}]
    workers = [pool.submit(receive, sender.peer, lambda n, t, i=i: got[i].update({n: t}) is None) for i in (0, 1)]
    replies = sender.send(WEIGHTS.items(), 2, concurrent.futures.Future())
    [worker.result() for worker in workers]
    assert replies == [{"error": None, "unused": []}] * 2
    for received in got:
        assert list(received) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
            assert torch.equal(received[name].view(bits), tensor.contiguous().view(bits)), name


def test_one_tensor_is_in_flight_at_a_time(sender, pool):
    """A tensor that is overwritten as soon as the next one is asked for has been sent by then."""

    def streamed():
        tensor = torch.empty(1000)
        for value in range(50):
            yield f"w{value}", tensor.fill_(value)
            tensor.fill_(-1)

    got = {}
    worker = pool.submit(receive, sender.peer, lambda name, tensor: got.update({name: tensor}) is None)
    sender.send(streamed(), 1, concurrent.futures.Future())
    worker.result()
    assert all(torch.equal(got[f"w{value}"], torch.full((1000,), float(value))) for value in range(50))


def test_who_does_not_show_the_token_gets_nothing(sender, pool):
    peer = sender.peer
    with socket.create_connection((peer["host"], peer["port"]), timeout=10) as stranger:
        stranger.sendall(b"0" * len(peer["token"]))
        sending = pool.submit(sender.send, WEIGHTS.items(), 1, concurrent.futures.Future())
        assert stranger.recv(1) == b"", "closed without a byte"
        worker = pool.submit(receive, peer, lambda name, tensor: True)
        assert sending.result(10)[0]["error"] is None and worker.result(10) is None


def test_a_trainer_listens_on_the_address_that_leads_to_the_server_only(sender):
    assert sender.peer["host"] == "127.0.0.1"


def test_a_tensor_that_does_not_fit_is_named_on_both_sides(sender, pool):
    loaded = []

    def load(name, tensor):
        loaded.append(name)
        if name == "bfloat16":
            raise ValueError("no room")
        return True

    worker = pool.submit(receive, sender.peer, load)
    with pytest.raises(TransferError, match=r"^bfloat16 bfloat16\[1, 2\]: ValueError: no room$"):
        sender.send(WEIGHTS.items(), 1, concurrent.futures.Future())
    with pytest.raises(TransferError, match="no room"):
        worker.result(10)
    assert loaded == ["float32", "transposed", "bfloat16"], "the rest is read, but not loaded"


def test_tensors_without_a_place_are_reported(sender, pool):
    pool.submit(receive, sender.peer, lambda name, tensor: name != "int8", model={"vocab_size": 5})
    [reply] = sender.send(WEIGHTS.items(), 1, concurrent.futures.Future())
    assert reply == {"error": None, "unused": ["int8"], "model": {"vocab_size": 5}}


def test_a_worker_that_dies_is_an_error(sender, pool):
    def die(name, tensor):
        raise SystemExit

    pool.submit(receive, sender.peer, die)
    with pytest.raises(OSError):
        sender.send(((f"w{i}", WEIGHTS["large"]) for i in range(20)), 1, concurrent.futures.Future())


def test_a_trainer_that_dies_is_an_error(sender, pool):
    def dying():
        yield "float32", WEIGHTS["float32"]
        raise KeyError("died")

    worker = pool.submit(receive, sender.peer, lambda name, tensor: True)
    with pytest.raises(KeyError):
        sender.send(dying(), 1, concurrent.futures.Future())
    with pytest.raises(ConnectionResetError, match="in the middle of a weight update"):
        worker.result(10)


def test_workers_that_do_not_come_are_not_waited_for_once_the_request_is_over(sender):
    request = concurrent.futures.Future()
    request.set_exception(RuntimeError("status 500"))
    with pytest.raises(RuntimeError, match="status 500"):
        sender.send([], 1, request)
    request = concurrent.futures.Future()
    request.set_result({})
    with pytest.raises(TransferError, match="0 of 1 workers"):
        sender.send([], 1, request)


def test_importing_the_plugin_imports_no_vllm():
    """vLLM imports it in each of its processes, also where nobody uses it."""
    import subprocess
    import sys

    code = f"import sys, {transfer.__name__}; print([n for n in ('vllm', 'trl', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"


def test_the_command_for_a_server_does_not_open_it_to_the_world():
    from trl_consistent.rollout.client import start_command

    model = SimpleNamespace(name_or_path="a/model", dtype=torch.bfloat16)
    assert "--host 127.0.0.1 --port 8000 --dtype bfloat16" in start_command(
        model, "http://0.0.0.0:8000"
    )  # TRL's default
    assert "--host 10.0.0.7 --port 80 " in start_command(model, "http://10.0.0.7")
