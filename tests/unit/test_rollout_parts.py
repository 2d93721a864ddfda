# SPDX-License-Identifier: Apache-2.0
"""The parts of the vLLM backend, each without the backend: arguments, settings, adapters, the probe, staleness."""

import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trl_consistent.rollout.adapters import AdapterSender
from trl_consistent.rollout.engine import EngineSettings
from trl_consistent.rollout.probe import probe_ids, trainer_logps
from trl_consistent.rollout.staleness import SyncedWeights
from trl_consistent.rollout.vllm import warn_of_lost_threads
from trl_consistent.rollout.vllm_settings import colocated_settings, engine_arguments, server_settings


def config(**options):
    defaults = {"rollout_engine_kwargs": None, "rollout_precision": "engine", "rollout_fp32_lm_head": False}
    return SimpleNamespace(**{**defaults, **options})


def arguments(on_cpu=False, unties_head=False, **options):
    return engine_arguments(config(**options), torch.bfloat16, on_cpu=on_cpu, unties_head=unties_head)


def test_an_engine_gets_no_argument_that_nothing_asks_for():
    assert arguments() == {}
    assert engine_arguments(None, torch.bfloat16, on_cpu=False, unties_head=False) == {}
    assert arguments(on_cpu=True) == {"enforce_eager": True}


def test_what_the_user_gives_an_engine_goes_before_defaults_and_precision_before_both():
    given = {"enforce_eager": False, "max_num_seqs": 3}
    assert arguments(on_cpu=True, rollout_engine_kwargs=given) == given
    asked = arguments(rollout_engine_kwargs={"dtype": "float16"}, rollout_precision="match")
    assert asked == {"dtype": "bfloat16"}


def test_overrides_of_the_model_s_config_add_up():
    given = {"hf_overrides": {"rope_theta": 3.0}}
    asked = arguments(unties_head=True, rollout_fp32_lm_head=True, rollout_engine_kwargs=given)
    assert asked == {
        "hf_overrides": {"rope_theta": 3.0, "head_dtype": "float32", "tie_word_embeddings": False},
        "load_format": "dummy",
    }
    assert given == {"hf_overrides": {"rope_theta": 3.0}}, "the user's dict stays as it is"
    loads = {"load_format": "safetensors"}
    assert arguments(unties_head=True, rollout_engine_kwargs=loads)["load_format"] == "safetensors"


@pytest.mark.parametrize(
    ("quantization", "cache", "said"),
    [
        (None, "auto", None),
        (None, "fp8_e5m2", "a KV cache in fp8_e5m2"),
        ("awq", "fp8", "awq"),
        (None, torch.bfloat16, None),
    ],
)
def test_settings_of_an_engine_in_this_process(quantization, cache, said):
    model_config = SimpleNamespace(
        dtype=torch.bfloat16, head_dtype=torch.float32, logprobs_mode="raw_logprobs", quantization=quantization
    )
    runner = SimpleNamespace(model=torch.nn.Linear(1, 1))
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model_config, cache_config=SimpleNamespace(cache_dtype=cache)),
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
    )
    assert colocated_settings(SimpleNamespace(llm_engine=engine)) == EngineSettings(
        dtype=torch.bfloat16,
        head_dtype=torch.float32,
        logprobs_mode="raw_logprobs",
        quantization=said,
        model_class="Linear",
    )


def test_settings_of_a_server():
    says = {"dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs"}
    expected = {"dtype": torch.bfloat16, "logprobs_mode": "processed_logprobs"}
    assert server_settings({"model_config": says}) == EngineSettings(**expected), "nothing is said of the head"
    plain = {**says, "hf_overrides": {}, "quantization": "fp8"}
    head = {"head_dtype": torch.bfloat16, "quantization": "fp8"}
    assert server_settings({"model_config": plain}) == EngineSettings(**expected, **head)
    widened = {**says, "hf_overrides": {"head_dtype": "float32"}}
    assert server_settings({"model_config": widened}) == EngineSettings(**expected, head_dtype=torch.float32)


def test_the_probe_is_spread_over_the_vocabulary_and_fits_the_engine():
    # twelve ids, a thirteenth of 130 apart
    assert probe_ids(130, 64) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120]
    assert probe_ids(100, 4) == [25, 50, 75], "one token of four is sampled"


class Two(torch.nn.Module):
    """Gives token 1 three times the odds of token 0, whatever came before."""

    def __init__(self):
        super().__init__()
        self.odds = torch.nn.Parameter(torch.tensor([1.0, 3.0]))

    def forward(self, input_ids, attention_mask):
        assert not self.training and attention_mask.all()
        return SimpleNamespace(logits=self.odds.log().expand(*input_ids.shape, 2))


def test_the_trainer_scores_the_tokens_after_the_first():
    model = Two()
    accelerator = SimpleNamespace(autocast=lambda: torch.autocast("cpu", enabled=False))
    logps = trainer_logps(model, accelerator, [0, 1, 0])
    assert logps.exp().tolist() == pytest.approx([3 / 4, 1 / 4]) and not logps.requires_grad
    assert model.training, "as it was before"


def test_weights_that_changed_after_a_sync_are_counted_and_named():
    model, synced = torch.nn.Linear(2, 2), SyncedWeights()
    assert not synced and synced.hash is None
    model.bias.requires_grad_(False)
    synced.remember(model)
    before = synced.hash
    assert synced and len(before) == 16 and synced.changes(model) is None
    with torch.no_grad():
        model.bias += 1  # which is not trained
        assert synced.changes(model) is None
        model.weight += 1
    assert synced.changes(model).startswith("1 of 1 trained tensors ('weight') changed after the last sync")
    synced.remember(model)
    assert synced.changes(model) is None and synced.hash != before


class Requests:
    """An engine that keeps what it was told, and the adapter's file while it is there."""

    def __init__(self):
        self.llm_engine = self
        self.told, self.held = [], None

    def add_lora(self, request):
        self.held = load_file(f"{request.lora_path}/adapter_model.safetensors")
        self.told.append(("add", request.lora_int_id))

    def remove_lora(self, number):
        self.told.append(("remove", number))

    def reset_prefix_cache(self):
        self.told.append("reset")

    def generate(self, prompts, lora_request=None):
        return lora_request


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["default", "policy"])
def test_an_adapter_replaces_the_one_that_was_sent_before(tiny_model, name):
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name=name)
    sender, llm = AdapterSender(), Requests()
    with sender.generating(llm):
        assert llm.generate([]) is None
    sender.send(model, llm)
    assert len(llm.held) == 4, "A and B of two layers"
    sender.send(model, llm)
    assert llm.told == [("add", 1), "reset", ("remove", 1), ("add", 2), "reset"]
    with sender.generating(llm):
        assert llm.generate([]).lora_int_id == 2
    assert llm.generate([]) is None


def test_threads_that_vllm_took_are_reported_with_the_remedy(caplog):
    now = torch.get_num_threads()
    with caplog.at_level(logging.WARNING):
        warn_of_lost_threads(now, 1)
        assert not caplog.text
        warn_of_lost_threads(now + 3, 1)
    assert f"from {now + 3} threads to {now}" in caplog.text and "VLLM_CPU_OMP_THREADS_BIND=nobind" in caplog.text
