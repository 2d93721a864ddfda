# SPDX-License-Identifier: Apache-2.0
"""Training through a real vLLM server on loopback, without a GPU, and what happens when the server is not as it should be.

One server for the module; the tests that kill it come last.
"""

import concurrent.futures
import contextlib
import http.server
import itertools
import json
import logging
import socket
import threading
import time
from importlib.metadata import entry_points

import pytest
import requests
import torch

from trl_consistent import ConsistentGRPOTrainer
from trl_consistent.rollout.client import ServerDownError, SocketVLLMClient, WrongServerError
from trl_consistent.rollout.transfer import BACKEND, WeightSender, described, register
from trl_consistent.rollout.vllm import WeightSyncError
from trl_consistent.upstream.vllm import engine_model

from ..serving import Server, free_port
from ..short_training import Keep, build, synthetic_engine
from .test_launch import launch


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    server = Server(tiny_model, tmp_path_factory.mktemp("server") / "log")
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def options(url, **more):
    return {
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_server_timeout": 20,
        "vllm_group_port": free_port(),
        "correction": "tis",
        **more,
    }


@contextlib.contextmanager
def training(url, model, tmp_path, lora=True, **more):
    keep = Keep()
    keep.trainer = build(ConsistentGRPOTrainer, model, tmp_path, callbacks=[keep], lora=lora, **options(url, **more))
    try:
        yield keep
    finally:
        if hasattr(keep.trainer.vllm_generation, "vllm_client"):
            keep.trainer.vllm_generation.vllm_client.close_communicator()


def assert_agrees(keep, steps=3):
    """Rollouts are in float32 on both sides, so only a sync that did not arrive leaves more than rounding."""
    logs = [log for log in keep.logs if "loss" in log]
    assert len(logs) == steps
    for log in logs:
        assert log["mismatch/abs_diff/mean"] < 1e-4 and log["mismatch/abs_diff/max"] < 2e-3
        assert log["correction/weight/mean"] == pytest.approx(1, abs=1e-3)
    pairs = itertools.pairwise(keep.weights)
    moved = [max((a[n] - b[n]).abs().max().item() for n in a) for a, b in pairs]
    assert min(moved) > 1e-3, "the syncs must have had something to carry"


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_rollouts_agree_to_the_last_digits_after_each_sync(server, tiny_model, tmp_path, lora):
    with training(server.url, tiny_model, tmp_path, lora, learning_rate=1e-2) as keep:
        keep.trainer.train()
        assert_agrees(keep)
        generation = keep.trainer.vllm_generation
        before = generation.probe()
        stale = (before[0] - before[1]).abs().mean().item()
        generation.sync_weights()
        trainer, engine = generation.probe()
        assert (trainer - engine).abs().mean().item() < 2e-5 < 1e-3 < stale, "the last step was not synced yet"


def test_a_sync_that_does_not_arrive_is_stale(server, tiny_model, tmp_path, monkeypatch):
    update, updates = SocketVLLMClient.update_named_params, []

    def skip(self, metadata, named_params):
        updates.append(1)
        if len(updates) == 1:
            return update(self, metadata, named_params)
        for _ in named_params:
            pass

    monkeypatch.setattr(SocketVLLMClient, "update_named_params", skip)
    with training(server.url, tiny_model, tmp_path) as keep, pytest.raises(WeightSyncError, match="stale"):
        keep.trainer.train()
    assert len(updates) == 2


def test_a_server_of_another_model_is_refused(server, moe_model, tmp_path):
    with pytest.raises(
        WrongServerError,
        match=r"which is not the model being trained .*model_type llama instead of qwen3_moe.*\n.*--model .*moe",
    ):
        with training(server.url, moe_model, tmp_path):
            pass


def test_weights_of_another_trainer_are_not_sampled_from(server, tiny_model, tmp_path, monkeypatch, caplog):
    """As after a restart, the server has another version of the weights: what it generated is thrown away."""
    generate, calls = SocketVLLMClient.generate, []

    def disturbed(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            requests.post(f"{server.url}/update_weight_version", json={"new_version": "theirs"}, timeout=10)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(SocketVLLMClient, "generate", disturbed)
    with training(server.url, tiny_model, tmp_path) as keep, caplog.at_level(logging.WARNING):
        keep.trainer.train()
        assert_agrees(keep)
    assert len(calls) == 4 and "holds weights 'theirs', not those of the last sync" in caplog.text


def test_a_sync_that_a_dead_trainer_left_open_is_no_obstacle(server, tiny_model, tmp_path):
    requests.post(f"{server.url}/start_weight_update", json={}, timeout=10).raise_for_status()
    with training(server.url, tiny_model, tmp_path, max_steps=1) as keep:
        keep.trainer.train()


def test_a_tensor_that_the_server_cannot_load_is_named(server, tiny_model, tmp_path):
    with training(server.url, tiny_model, tmp_path) as keep:
        keep.trainer.vllm_generation.sync_weights()
        client = keep.trainer.vllm_generation.vllm_client
        with pytest.raises(RuntimeError, match=r"model\.norm\.weight float32\[3\].*torch\.Size\(\[64\]\)"):
            client.update_named_params([], iter([("model.norm.weight", torch.zeros(3))]))
        keep.trainer.vllm_generation.sync_weights()  # and the server is as good as ever


@contextlib.contextmanager
def engine_in_this_process(model, **options):
    """The same engine that a server holds, without the server's start."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "gpu_memory_utilization": 0.1}
    try:
        yield LLM(model, **settings, **options)
    finally:
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("fixture", ["tied_model", "moe_model"])
def test_weights_that_a_cpu_engine_repacks_arrive_exactly(fixture, request):
    """A tied head, which the engine would pack, and experts, which it does."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    path, ids = request.getfixturevalue(fixture), list(range(3, 15))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    gaps = []
    with engine_in_this_process(path, weight_transfer_config={"backend": BACKEND}) as llm:
        with socket.create_server(("127.0.0.1", 0)) as somebody:
            sender = WeightSender(somebody.getsockname(), 0)
        pool = concurrent.futures.ThreadPoolExecutor(1)

        def send(weights, method, **request):
            sending = pool.submit(sender.send, weights, 1, concurrent.futures.Future())
            method(request)
            return sending.result(30)

        [reply] = send([], llm.init_weight_transfer_engine, init_info=sender.peer)
        assert reply["model"] == described(model.config)
        for _ in range(3):
            parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
            [output] = llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
            engine = [reported[i].logprob for i, reported in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            trainer = logps.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            gaps.append((trainer - torch.tensor(engine)).abs().mean().item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
            llm.start_weight_update()
            [reply] = send(model.named_parameters(), llm.update_weights, update_info={})
            assert reply["unused"] == []
            llm.finish_weight_update()
            llm.reset_prefix_cache()
        sender.close()
        pool.shutdown()
    assert max(gaps) < 2e-5


def test_only_an_engine_that_takes_our_weights_loads_in_plain_layout(tiny_model):
    """The plugin is loaded everywhere, and changes nothing where it is not asked for."""
    for options, packed in (({}, True), ({"weight_transfer_config": {"backend": BACKEND}}, False)):
        with engine_in_this_process(tiny_model, **options) as llm:
            weight = engine_model(llm).model.layers[0].mlp.down_proj.weight
            assert (weight.numel() == 0) == packed


def test_the_plugin_is_installed():
    """Else run scripts/test: its installation is what makes the server see it."""
    [plugin] = entry_points(group="vllm.general_plugins", name="trl_consistent")
    assert plugin.load() is register


# What a server says that was started in another way: an HTTP server that answers as vLLM 0.30 does in that case.


@contextlib.contextmanager
def stub(answers):
    """An HTTP server with the given answers to GET, and 404 to all else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path.split("?")[0], (404, {"detail": "Not Found"}))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


UP = {"/health": (200, ""), "/v1/models": (200, {"data": [{"id": "m"}]})}


def info(**config):
    return {"/server_info": (200, {"vllm_config": config})}


COMMAND = r"Start it with:\s+VLLM_SERVER_DEV_MODE=1 python -m vllm\.entrypoints\.openai\.api_server --model {model} "


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (UP, r"development endpoints.*VLLM_SERVER_DEV_MODE=1"),
        (UP | info(weight_transfer_config=None), r"takes weights by None.*--weight-transfer-config"),
        (UP | info(weight_transfer_config={"backend": "nccl"}), r"takes weights by 'nccl'.*--weight-transfer-config"),
    ],
    ids=["no dev mode", "no backend", "nccl"],
)
def test_a_server_that_cannot_take_weights_is_refused_with_the_flag(answers, message, tiny_model, tmp_path):
    with stub(answers) as url, pytest.raises(WrongServerError, match=message) as refusal:
        with training(url, tiny_model, tmp_path):
            pass
    refusal.match(COMMAND.format(model=tiny_model))


@pytest.mark.parametrize("busy", [False, True], ids=["nobody there", "status 503"])
def test_a_server_that_is_not_up_is_waited_for_then_an_error_says_how_to_start_it(busy, tiny_model, tmp_path, caplog):
    with stub({"/health": (503, "")} if busy else {}) as url:
        url = url if busy else f"http://127.0.0.1:{free_port()}"
        started = time.monotonic()
        with pytest.raises(ServerDownError, match=r"after [12] s \(`vllm_server_timeout`\)") as down:
            with training(url, tiny_model, tmp_path, vllm_server_timeout=2):
                pass
    assert time.monotonic() - started < 30
    down.match(COMMAND.format(model=tiny_model) + rf".*--port {url.rpartition(':')[2]} ")
    assert "waiting for it, 0 of 2 s" in caplog.text


def test_a_server_that_comes_late_is_found(tiny_model, tmp_path):
    answers = {}
    threading.Timer(1.5, answers.update, [UP]).start()
    with stub(answers) as url, pytest.raises(WrongServerError, match="development endpoints"):  # found, and asked
        with training(url, tiny_model, tmp_path):
            pass


def test_a_taken_port_names_the_option(server, tiny_model, tmp_path):
    with training(server.url, tiny_model, tmp_path) as keep:
        taken = keep.trainer.args.vllm_group_port
        with pytest.raises(OSError, match=f"port {taken}.*vllm_group_port"):
            with training(server.url, tiny_model, tmp_path, vllm_group_port=taken):
                pass


@pytest.mark.launch
def test_on_two_ranks_training_agrees_and_an_error_of_rank_0_reaches_both(server, tiny_model, tmp_path):
    launch("cpu_2.yaml", "tests/two_ranks_server.py", tiny_model, str(tmp_path), server.url, str(free_port()))
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank["world"] for rank in ranks] == [2, 2] and ranks[0]["weights"] == ranks[1]["weights"]
    assert len(ranks[0]["logs"]) == 2 and max(ranks[0]["logs"]) < 2e-3
    for place in ("get_server_info", "update_named_params", "_served_version", "get_sequence_logprobs"):
        for rank in ranks:
            assert f"planted in {place}" in rank[place], place


# From here on, the server dies.


def test_a_server_that_is_killed_and_comes_back_gets_its_weights_again(
    server, tiny_model, tmp_path, monkeypatch, caplog
):
    generate, calls = SocketVLLMClient.generate, []

    def disturbed(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            server.kill()
            server.start()
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(SocketVLLMClient, "generate", disturbed)
    with training(server.url, tiny_model, tmp_path, vllm_server_timeout=240) as keep, caplog.at_level(logging.WARNING):
        keep.trainer.train()
        assert_agrees(keep)
    assert len(calls) == 4 and "was lost" in caplog.text and "waiting for it" in caplog.text


def test_a_server_that_stays_away_ends_training_with_a_whole_checkpoint(server, tiny_model, tmp_path, monkeypatch):
    send, updates = WeightSender.send, []

    def disturbed(self, named_tensors, workers, request):
        def streamed():
            for index, pair in enumerate(named_tensors):
                if index == 3 and len(updates) == 4:  # after the introduction and two syncs, in the third
                    server.kill()
                    while True:  # more than fits into the buffers of a connection
                        yield pair
                yield pair

        updates.append(1)
        return send(self, streamed(), workers, request)

    monkeypatch.setattr(WeightSender, "send", disturbed)
    saving = {"save_strategy": "steps", "save_steps": 10}
    with training(server.url, tiny_model, tmp_path, **saving, vllm_server_timeout=2) as keep:
        with pytest.raises(ServerDownError) as down:
            keep.trainer.train()
    checkpoint = tmp_path / "ConsistentGRPOTrainer" / "checkpoint-2"
    notes = "\n".join(down.value.__notes__)
    assert f"Step 2 is saved in {checkpoint}" in notes and "resume_from_checkpoint=True" in notes
    assert not any(module.merged for module in keep.trainer.model.modules() if hasattr(module, "merged_adapters"))
    # It goes on where it stopped, with weights and optimizer (here with another engine, to spare the server's start).
    resumed = Keep()
    with synthetic_engine():
        resumed.trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, lora=True, callbacks=[resumed], **saving)
        seen = []
        resumed.on_train_begin = lambda args, state, control, model=None, optimizer=None, **_: seen.append(
            ({n: p.detach().clone() for n, p in model.named_parameters()}, len(optimizer.state))
        )
        resumed.trainer.train(resume_from_checkpoint=True)
    [(weights, moments)] = seen
    trained = [name for name in weights if "lora_" in name]  # merging has rounded the others in the live model
    assert trained and all(torch.equal(weights[name], keep.weights[1][name]) for name in trained) and moments > 0
    assert resumed.trainer.state.global_step == 3 and len(resumed.weights) == 1
