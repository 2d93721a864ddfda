# SPDX-License-Identifier: Apache-2.0
"""What a sync streams from a model with adapters, and the ledger of what arrived. No engine."""

import copy
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from trl_consistent.rollout.ledger import SyncLedger, WeightSyncError, checksum, checksums, weights_hash
from trl_consistent.rollout.vllm import ConsistentVLLMGeneration
from trl_consistent.rollout.weights import can_merge_aside, left_out, merged_parameters, splits_tied_weights
from trl_consistent.upstream.substitution import substituted


def lora(*targets, **options):
    return LoraConfig(r=4, lora_alpha=8, target_modules=list(targets) or "all-linear", **options)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "lora": ("tiny", lora()),
    "rslora": ("tiny", lora(use_rslora=True)),
    "dora": ("tiny", lora(use_dora=True)),
    "dora-embedding": ("tiny", lora("q_proj", "embed_tokens", use_dora=True)),
    "embedding-and-head": ("tiny", lora("embed_tokens", "lm_head")),
    "modules-to-save": ("tiny", lora("q_proj", modules_to_save=["lm_head", "embed_tokens"])),
    "tied": ("tied", lora()),
    "tied-adapters": ("tied", lora("q_proj", "embed_tokens", ensure_weight_tying=True)),
    "tied-modules-to-save": ("tied", lora("q_proj", modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "tied-head-to-save": ("tied", lora("q_proj", modules_to_save=["lm_head"])),
    "tied-embedding": ("tied", lora("q_proj", "embed_tokens")),
    "tied-head": ("tied", lora("q_proj", "lm_head")),
    "tokens": ("tiny", lora("q_proj", trainable_token_indices=[1, 5])),
    "experts": ("moe", lora("q_proj", target_parameters=EXPERTS)),
    "conv1d-bias": ("gpt2", lora("c_attn", "c_proj", fan_in_fan_out=True, lora_bias=True)),
    "ia3": ("tiny", IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": ("tiny", LoHaConfig(r=4, target_modules=["q_proj", "down_proj"])),
    "adalora": ("tiny", AdaLoraConfig(init_r=4, target_modules=["q_proj", "down_proj"], total_step=10)),
}
SPLIT = ("tied-head-to-save", "tied-embedding", "tied-head")
# TRL merges into a shared weight here (once, or twice), takes a buffer for a weight, or does not know the names.
NOT_LIKE_TRL = ("tied-adapters", "tied-embedding", "tied-head", "adalora", "tokens")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from ..tiny import build_tokenizer, save_model

    tokenizer, paths = build_tokenizer(), {}

    def load(name, dtype):
        if name == "gpt2":
            torch.manual_seed(0)
            config = GPT2Config(
                n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=1
            )
            return GPT2LMHeadModel(config).to(dtype)
        if name not in paths:
            paths[name] = save_model(
                tmp_path_factory.mktemp(name), tokenizer, moe=name == "moe", tie_word_embeddings=name == "tied"
            )
        return AutoModelForCausalLM.from_pretrained(paths[name], dtype=dtype)

    return load


def adapted(base, kind, dtype, seed=1):
    """A peft model of this kind whose adapters are some way from where they began."""
    name, config = KINDS[kind]
    torch.manual_seed(seed)
    model = with_adapter(base(name, dtype), config)
    move(model, seed)
    return model


def with_adapter(model, config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, about tied weights and unusual layers
        return get_peft_model(model, copy.deepcopy(config))


@torch.no_grad()
def move(model, seed, scale=0.05):
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight += scale * torch.randn(weight.shape, generator=generator).to(weight.dtype)


def bits(model):
    """Every tensor of a model, with where it lives."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in tensors.items()}


def assert_untouched(before, model):
    after = bits(model)
    assert list(before) == list(after)
    for name, (pointer, tensor) in before.items():
        assert after[name][0] == pointer and torch.equal(after[name][1], tensor), name


def backend(cls, model):
    """A backend of TRL's or ours with a model and nothing else."""
    generation = object.__new__(cls)
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    generation.model, generation._dist = model, DistributedBackend(SimpleNamespace(state=state))
    return generation


@torch.no_grad()
def trl_stream(model):
    """What TRL streams, by its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = backend(VLLMGeneration, model)._iter_named_params()
        return {name: tensor.clone() for name, tensor in stream}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_syncs_change_no_bit_of_the_model(base, kind, dtype):
    model = adapted(base, kind, dtype)
    assert can_merge_aside(model) and not left_out(model)
    first = dict(merged_parameters(model))
    for round_ in range(200):
        if round_ % 20 == 0:
            move(model, round_)
            before = bits(model)
        for name, tensor in merged_parameters(model):
            assert tensor.dtype == first[name].dtype
    assert_untouched(before, model)
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())
    assert not any(getattr(module, "_caches", None) for module in model.modules())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_LIKE_TRL])
def test_names_order_and_float32_values_are_trl_s(base, kind):
    model = adapted(base, kind, torch.float32)
    ours, theirs = dict(merged_parameters(model)), trl_stream(model)
    assert list(ours) == list(theirs)
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


def test_a_bfloat16_weight_is_the_float32_sum_rounded_once(base):
    """All-linear LoRA, computed here from A and B in float64, which has bits to spare for the sum of the products."""
    model = adapted(base, "lora", torch.bfloat16)
    modules = dict(model.get_base_model().named_modules())
    streamed, checked = dict(merged_parameters(model)), 0
    for name, tensor in streamed.items():
        layer = modules[name.removesuffix(".weight")]
        if not hasattr(layer, "lora_A"):
            assert torch.equal(tensor, layer.weight)
            continue
        a, b = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        exact = layer.base_layer.weight.double() + 8 / 4 * (b.double() @ a.double())
        half_step = tensor.double().abs() * 2**-8  # of bfloat16, 8 bits of significand
        assert ((tensor.double() - exact).abs() <= half_step + 1e-7).all()
        once = (layer.base_layer.weight.float() + (b @ a) * 2.0).to(torch.bfloat16)
        assert torch.equal(tensor, once)
        checked += 1
    assert checked == 14, "seven linear layers in each of two blocks"


def test_dora_streams_what_its_forward_computes(base):
    """m * (W + sBA) / ||W + sBA||, row by row."""
    model = adapted(base, "dora", torch.float32)
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    direction = layer.base_layer.weight.double() + 2 * b @ a
    magnitude = layer.lora_magnitude_vector["default"].weight.double()
    expected = magnitude[:, None] * direction / direction.norm(dim=1, keepdim=True)
    got = dict(merged_parameters(model))["model.layers.1.mlp.down_proj.weight"]
    assert (got.double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_model_with_streamed_weights_computes_what_the_trainer_computes(base, kind):
    name, _ = KINDS[kind]
    model, plain = adapted(base, kind, torch.float32).eval(), base(name, torch.float32).eval()
    if kind in SPLIT:
        assert splits_tied_weights(model)
        plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.clone())  # an engine told not to tie
    else:
        assert not splits_tied_weights(model)
    before = plain(torch.arange(10)[None]).logits
    missing, unexpected = plain.load_state_dict(dict(merged_parameters(model)), strict=False)
    assert not unexpected and all("lm_head" in key for key in missing)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        wanted, got = model(ids).logits, plain(ids).logits
    assert (got - before).abs().max() > 1e-2
    assert (got - wanted).abs().max() < 1e-4


def test_only_active_adapters_count_and_any_name_will_do(base):
    config = lora("q_proj", modules_to_save=["lm_head"])
    model = PeftModel(base("tiny", torch.float32), config, adapter_name="policy")
    move(model, 1)
    alone = dict(merged_parameters(model))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= alone.keys() and not any("policy" in n for n in alone)
    assert torch.equal(alone["lm_head.weight"], model.get_base_model().lm_head.modules_to_save["policy"].weight)
    model.add_adapter("ref", lora("q_proj", modules_to_save=["lm_head"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ref" in name.split("."):
                weight += 1
    with_reference = dict(merged_parameters(model))
    assert list(alone) == list(with_reference) and all(torch.equal(alone[n], with_reference[n]) for n in alone)
    model.set_adapter("ref")
    switched = dict(merged_parameters(model))
    assert list(alone) == list(switched) and not torch.equal(alone["lm_head.weight"], switched["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_active_adapters_add_up_before_the_sum_is_rounded(base, dtype):
    model = adapted(base, "lora", dtype)
    model.add_adapter("other", lora("q_proj"))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    model.base_model.set_adapter(["default", "other"])
    torch.nn.init.normal_(layer.lora_B["other"].weight)
    deltas = [2 * layer.lora_B[n].weight.float() @ layer.lora_A[n].weight.float() for n in ("default", "other")]
    got = dict(merged_parameters(model))["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(got, (layer.base_layer.weight.float() + deltas[0] + deltas[1]).to(dtype))


def test_experts_are_summed_in_float32_too(base):
    """W[e] + s * B_e @ A_e, where peft stacks the ranks of all experts in A by expert, in B by rank."""
    model = adapted(base, "experts", torch.bfloat16)
    wrapper = model.get_base_model().model.layers[0].mlp.experts
    wrapper = wrapper if wrapper.parameter_name == "gate_up_proj" else wrapper.base_layer
    a, b = wrapper.lora_A["default"].weight.float(), wrapper.lora_B["default"].weight.float()
    weight = wrapper.get_base_layer().gate_up_proj
    got = dict(merged_parameters(model))["model.layers.0.mlp.experts.gate_up_proj"]
    for expert in range(4):
        delta = b.view(128, 4, 4)[:, :, expert] @ a.view(4, 4, 64)[expert]
        exact = weight[expert].double() + 2 * delta.double()
        assert ((got[expert].double() - exact).abs() <= got[expert].double().abs() * 2**-8 + 1e-6).all()
        assert not torch.equal(got[expert], weight[expert])


def test_an_adapter_that_is_merged_already_is_not_merged_twice(base):
    model = adapted(base, "lora", torch.float32)
    expected = dict(merged_parameters(model))
    model.merge_adapter()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged_parameters(model))


def test_a_sync_that_stops_half_way_leaves_nothing_behind(base):
    model = adapted(base, "dora", torch.bfloat16)
    before = bits(model)
    stream = merged_parameters(model)
    for _ in range(5):
        next(stream)
        assert_untouched(before, model)
    stream.close()
    assert_untouched(before, model)


def test_a_merge_that_fails_leaves_nothing_behind(base):
    model = adapted(base, "lora", torch.bfloat16)
    before = bits(model)
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    with substituted(layer, merge=lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        list(merged_parameters(model))
    assert_untouched(before, model)
    assert not layer.merged


def test_what_peft_s_own_cycle_does_to_bfloat16_base_weights(base):
    """The drift that merging aside avoids; scripts/bench_sync.py measures it on a real model."""
    model = adapted(base, "lora", torch.bfloat16)
    weight = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    before, drift = weight.detach().clone(), []
    for _ in range(100):
        model.merge_adapter()
        model.unmerge_adapter()
        drift.append((weight - before).float().abs().max().item())
    assert (weight != before).float().mean() > 0.05
    assert drift[-1] > drift[0] > 0


def test_kinds_that_merge_otherwise_are_left_to_trl(base):
    model = with_adapter(base("tiny", torch.float32), LNTuningConfig(target_modules=["input_layernorm"]))
    assert not can_merge_aside(model)  # swaps modules
    model = adapted(base, "lora", torch.float32)
    layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    assert not can_merge_aside(model)  # a quantised base
    layer.weight = torch.nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    assert not can_merge_aside(model)  # offloaded


def test_what_no_merge_takes_in_is_named(base):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = with_adapter(base("tiny", torch.float32), config)
    assert left_out(model) == ["prompt_encoder.default.embedding.weight"]
    model = adapted(base, "lora", torch.float32)
    model.add_adapter("ref", lora())
    for name, weight in model.named_parameters():
        weight.requires_grad_("ref" in name)
    assert len(left_out(model)) == 28 and all(".ref." in name for name in left_out(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_exact(dtype):
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = tensor.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    assert checksum(tensor).item() == sum(integers.flatten().tolist())
    assert checksum(tensor.T) == checksum(tensor)
    assert checksum(torch.cat([tensor, tensor[:2]])) == checksum(tensor) + checksum(tensor[:2])
    assert checksum(torch.zeros(7)) == 0
    nudged = tensor.clone()
    nudged[2, 4] = nudged[2, 4].nextafter(torch.tensor(9.0, dtype=dtype))
    assert abs(checksum(nudged) - checksum(tensor)) == 1
    big = torch.full((1 << 20,), -1.0)  # 0xbf800000 each, far beyond 32 bits in sum
    assert checksum(big).item() == (0xBF800000 - 2**32) << 20


def test_a_hash_belongs_to_the_weights(base):
    def of(model):
        return weights_hash(checksums(model.named_parameters()))

    model = adapted(base, "lora", torch.bfloat16)
    assert of(model) == of(adapted(base, "lora", torch.bfloat16)) != of(adapted(base, "lora", torch.bfloat16, seed=2))
    assert len(of(model)) == 16 and weights_hash({"a": 1, "b": 2}) == weights_hash({"b": 2, "a": 1})


class Engine(torch.nn.Module):
    """Loads like a vLLM model: q and k are fused, the head is tied, experts are reported without their inner module."""

    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16), requires_grad=False)
        self.embed = torch.nn.Parameter(torch.zeros(5, 3), requires_grad=False)
        self.mlp = torch.nn.Module()
        self.mlp.inner = torch.nn.Module()
        self.mlp.inner.w2 = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if name in ("q", "k"):
                self.qk[: 2 if name == "q" else None][-2:] = tensor
                loaded.add("qk")
            elif name == "embed":
                self.embed.copy_(tensor)
                loaded.add("embed")
            elif name == "w2":
                self.mlp.inner.w2.copy_(tensor.T)
                loaded.add("mlp.w2")
            elif name == "stacked":  # whose parts nobody can tell
                self.embed.copy_(tensor[:5])
                self.mlp.inner.w2.copy_(tensor[5:7].T)
                loaded |= {"embed", "mlp.w2"}
        return loaded


def streamed(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (2, 3), "k": (2, 3), "embed": (5, 3), "w2": (2, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def sync(ledger, engine, tensors, after=lambda: None):
    with ledger.recording(engine):
        for name, tensor in tensors.items():
            engine.load_weights([(name, tensor)])
    after()
    return ledger.check(engine, plain=True)


def test_fused_transposed_and_rounded_tensors_are_found_in_the_engine(caplog):
    engine, ledger = Engine(), SyncLedger()
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            assert sync(ledger, engine, streamed(seed))
    assert not caplog.text and ledger.engine.keys() == {"qk", "embed", "mlp.inner.w2"}
    assert not ledger.overwritten(engine)
    engine.mlp.inner.w2[0, 0] += 1
    assert ledger.overwritten(engine) == {"mlp.inner.w2"}


def test_a_sync_that_streams_nothing_or_less_is_noticed():
    with pytest.raises(WeightSyncError, match="stale: the weight sync did not stream any weight"):
        sync(SyncLedger(), Engine(), {})
    engine, ledger, tensors = Engine(), SyncLedger(), streamed()
    sync(ledger, engine, tensors)
    with pytest.raises(WeightSyncError, match="did not stream 'k' into"):
        sync(ledger, engine, {name: tensor for name, tensor in tensors.items() if name != "k"})


def test_a_tensor_the_engine_ignores_is_named():
    with pytest.raises(WeightSyncError, match=r"loaded nothing from 'lm_head.weight'.*tied"):
        sync(SyncLedger(), Engine(), {**streamed(), "lm_head.weight": torch.zeros(5, 3)})


def test_a_tensor_that_arrived_in_part_is_named():
    engine, ledger = Engine(), SyncLedger()
    sync(ledger, engine, streamed(0))
    with pytest.raises(WeightSyncError, match="'qk' of the rollout engine does not hold what was streamed"):
        sync(ledger, engine, streamed(1), after=lambda: engine.qk[0, 0].add_(1))


def test_a_tensor_that_goes_to_several_places_is_left_to_the_probe(caplog):
    engine, ledger = Engine(), SyncLedger()
    tensors = {name: tensor for name, tensor in streamed().items() if name in "qk"}
    for _ in range(2):
        assert not sync(ledger, engine, {**tensors, "stacked": torch.ones(7, 3)})
    assert ledger.engine.keys() == {"qk"} and not caplog.text


def test_what_the_engine_transforms_or_the_trainer_lacks_is_said_once(caplog):
    engine, ledger = Engine(), SyncLedger()
    engine.bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            assert not sync(ledger, engine, streamed(seed), after=lambda: engine.embed.add_(1))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Weight syncs do not write to 'bias' of the rollout engine, which the trainer does not have",
        "The rollout engine changes 'embed' as it loads them",
    ]
    assert ledger.engine.keys() == {"qk", "mlp.inner.w2"}


def test_a_model_that_does_not_say_what_it_loads_is_not_judged():
    engine, ledger = Engine(), SyncLedger()
    load = engine.load_weights
    engine.load_weights = lambda weights: load(weights) and None
    assert not sync(ledger, engine, streamed()) and not ledger.engine


def test_what_cannot_be_merged_aside_is_streamed_as_trl_does_and_said_once(base, caplog):
    model = with_adapter(base("tiny", torch.float32), LNTuningConfig(target_modules=["input_layernorm"]))
    move(model, 1)
    generation = backend(ConsistentVLLMGeneration, model)
    generation._told_to_merge_in_place = False
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ours = {name: tensor.clone() for name, tensor in generation._iter_named_params()}
    theirs = trl_stream(model)
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [record.message[:51] for record in caplog.records] == [
        "Weight syncs merge the adapters into the base weigh"
    ]


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), True),
        (VeraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), False),
    ],
    ids=["lora", "vera"],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:.*ensure_weight_tying")
def test_an_engine_is_untied_only_where_the_stream_fills_both(config, splits, tied_model):
    # what cannot be merged aside goes TRL's way, which streams a tied weight once
    generation = object.__new__(ConsistentVLLMGeneration)
    generation.model = get_peft_model(AutoModelForCausalLM.from_pretrained(tied_model), config)
    generation._dist = SimpleNamespace(is_fsdp=False, is_zero3=False)
    assert generation._splits_tied_weights is splits
