# SPDX-License-Identifier: Apache-2.0
"""Shapes in signatures are enforced while tests run; models are built from a config, tokenizers trained here."""

import gc
import os
import socket


# TRL would take port 29500, and so would the next one who runs tests here. Workers of pytest-xdist inherit the environment of
# the process that starts them, and each needs a port of its own.
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])
# Before torch: a CPU engine in this process must not take its threads (see rollout/environment.py).
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
from trl_consistent.rollout.environment import cpu_variables, cpu_vllm_is_installed, prepare


if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # they share the cores
    os.environ["OMP_NUM_THREADS"] = cpu_variables(int(workers))["OMP_NUM_THREADS"]
prepare()

from jaxtyping import install_import_hook  # noqa: E402


install_import_hook(
    [f"trl_consistent.{name}" for name in ("ratios", "statistics", "support", "correction", "metrics.measure")],
    "beartype.beartype",
)

import pytest  # noqa: E402

from .tiny import build_tokenizer, save_model  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.xdist_group("engine"))  # an engine takes memory: one at a time
            if not cpu_vllm_is_installed():
                item.add_marker(pytest.mark.skip(reason="needs the CPU build of vLLM"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    # Workers send reports in UTF-8, which does not know the lone surrogates that some tests log.
    report.sections = [(name, text.encode(errors="replace").decode()) for name, text in report.sections]
    return report


def pytest_collection_finish():
    # Each training ends with a garbage collection. It need not search what was imported, which takes longer than the training.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, tokenizer):
    """Directory of a dense model with an untied head."""
    return save_model(tmp_path_factory.mktemp("tiny"), tokenizer)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory, tokenizer):
    """The same with the head tied to the embedding."""
    return save_model(tmp_path_factory.mktemp("tied"), tokenizer, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory, tokenizer):
    """Directory of a mixture-of-experts model."""
    return save_model(tmp_path_factory.mktemp("moe"), tokenizer, moe=True)
