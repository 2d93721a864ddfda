# SPDX-License-Identifier: Apache-2.0
"""The restricted distribution: what is kept, its log-probs, entropy and gradients, in tiles."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trl_consistent import support
from trl_consistent.metrics.measure import finalize, support_metrics
from trl_consistent.support import NOTHING, ORDERS, RestrictedHead, Sampling, penalized, restricted, support_floor


NEUTRAL = torch.tensor([[]], dtype=torch.long)
COMBINED = {"top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}


def kept(probabilities, **settings):
    logits = torch.tensor([probabilities]).log()
    return (logits >= support_floor(logits, Sampling(**settings))).nonzero()[:, 1].tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_p": 0.75}, [0, 1]),  # reached exactly: the mass before the third is .75, not below it
        ({"top_p": 0.76}, [0, 1, 2]),  # the token that crosses stays
        ({"top_p": 1e-9}, [0]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [0, 1]),  # inclusive: .25 is half of .5
        ({"min_p": 0.51}, [0]),
        ({"min_p": 1.0}, [0]),
        # top-p of what top-k leaves: 2/3 and 1/3
        ({"top_k": 2, "top_p": 0.6}, [0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 1]),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_kept(settings, expected, order):
    assert kept([0.5, 0.25, 0.15625, 0.09375], **settings, order=ORDERS[order]) == expected


def test_tokens_that_tie_with_the_last_one_are_kept():
    assert kept([0.5, 0.1875, 0.1875, 0.125], top_k=2) == [0, 1, 2]
    assert kept([0.5, 0.1875, 0.1875, 0.125], top_p=0.6) == [0, 1, 2]
    # the ties count in the mass that top-p looks at: 4/7 < .6 of three tokens, though 8/11 of the first two
    assert kept([0.5, 0.1875, 0.1875, 0.125], top_k=2, top_p=0.6) == [0, 1, 2]
    assert kept([0.5, 0.1875, 0.1875, 0.125], top_k=2, top_p=0.5) == [0]


def test_the_order_of_the_engines_differs_where_top_p_sees_what_min_p_left():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    # min-p .3 drops what is below .12; of the rest, the first two hold 7/9 >= .75, of all of them .7 < .75
    assert kept(probabilities, top_p=0.75, min_p=0.3, order=ORDERS["vllm"]) == [0, 1]
    assert kept(probabilities, top_p=0.75, min_p=0.3, order=ORDERS["transformers"]) == [0, 1, 2]


def test_restricted_log_probs_and_entropy_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.15625, 0.09375]]).log()
    floor = support_floor(logits, Sampling(top_p=0.75))
    logp, entropy = restricted(logits, floor, torch.tensor([1]))
    assert logp.item() == pytest.approx(math.log(1 / 3), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(3) - 2 / 3 * math.log(2), abs=1e-6)  # of 2/3 and 1/3
    # a sampled token that the trainer would have dropped is kept besides: 5/32 of 29/32
    logp, entropy = restricted(logits, floor, torch.tensor([2]))
    assert logp.item() == pytest.approx(math.log(5 / 29), abs=1e-6)
    expected = -sum(p * math.log(p) for p in (16 / 29, 8 / 29, 5 / 29))
    assert entropy.item() == pytest.approx(expected, abs=1e-6)


def test_the_mean_ratio_is_the_kept_mass_without_and_one_with_the_restriction():
    probabilities = torch.tensor([0.5, 0.25, 0.15625, 0.09375])
    logits = probabilities.log().expand(3, 4)
    sampled, engine = torch.tensor([0, 1, 2]), torch.tensor([16, 8, 5]) / 29  # what top-p .8 leaves
    floor = support_floor(logits, Sampling(top_p=0.8))
    logps, _ = restricted(logits, floor, sampled)
    # E_mu[pi / mu] by enumeration
    assert (engine * probabilities[sampled] / engine).sum().item() == pytest.approx(29 / 32)
    assert (engine * logps.exp() / engine).sum().item() == pytest.approx(1, abs=1e-6)


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    prompt, output = torch.tensor([[0, NOTHING]]), torch.tensor([[1, 1, 3]])
    # tokens 0, 1 and 3 were seen: halved where positive, doubled where negative
    result = penalized(logits, prompt, output, Sampling(repetition_penalty=2.0))
    assert result.tolist() == [[1.0, -4.0, 1.0, 0.25]]
    # token 1 was generated twice, token 3 once; the prompt does not count
    result = penalized(logits, prompt, output, Sampling(frequency_penalty=0.25, presence_penalty=0.5))
    assert result.tolist() == [[2.0, -3.0, 1.0, -0.25]]
    # repetition first: -4 - 2 * .25 - .5
    both = Sampling(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    assert penalized(logits, prompt, output, both).tolist() == [[1.0, -5.0, 1.0, -0.5]]


def transformers_logits(logits, ids, temperature, order, **settings):
    """The processors of transformers, put into an order."""
    steps = {
        "top_p": lambda: TopPLogitsWarper(settings["top_p"]),
        "top_k": lambda: TopKLogitsWarper(settings["top_k"]),
        "min_p": lambda: MinPLogitsWarper(settings["min_p"]),
    }
    processors = LogitsProcessorList()
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    processors.append(TemperatureLogitsWarper(temperature))
    processors.extend(steps[name]() for name in order if name in settings)
    return processors(ids, logits.clone())


SETTINGS = [
    {"top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 20},
    {"top_p": 0.9, "min_p": 0.02},
    COMBINED,
]


@pytest.mark.parametrize("vocabulary", [64, 3000])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings))
def test_it_keeps_what_the_processors_of_transformers_keep(settings, order, vocabulary):
    torch.manual_seed(0)
    logits, ids = 2 * torch.randn(200, vocabulary), torch.randint(vocabulary, (200, 9))
    expected = transformers_logits(logits, ids, 0.7, ORDERS[order], **settings)
    sampling = Sampling(**settings, order=ORDERS[order])
    ours = penalized(logits, ids, NEUTRAL.expand(200, 0), sampling) / 0.7
    assert torch.equal(ours >= support_floor(ours, sampling).unsqueeze(1), expected > -math.inf)
    torch.testing.assert_close(ours[expected > -math.inf], expected[expected > -math.inf])


@pytest.mark.vllm
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings))
def test_it_keeps_what_vllm_keeps(settings):
    from vllm.model_executor.layers.utils import apply_penalties
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    torch.manual_seed(0)
    logits, prompt, output = 2 * torch.randn(200, 300), torch.randint(300, (200, 9)), torch.randint(300, (200, 5))
    sampling = Sampling(**settings, frequency_penalty=0.3, presence_penalty=0.2)
    each = {
        name: torch.full((200,), getattr(sampling, name)) for name in Sampling.__dataclass_fields__ if name != "order"
    }
    penalties = [each[f"{name}_penalty"] for name in ("presence", "frequency", "repetition")]
    expected = apply_penalties(logits.clone(), prompt, output, *penalties) / 0.7
    probabilities = expected.softmax(-1)
    expected = expected.masked_fill(probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True), -math.inf)
    k = each["top_k"] if sampling.top_k else None
    expected = apply_top_k_top_p_pytorch(expected, k, each["top_p"] if sampling.top_p < 1 else None)
    ours = penalized(logits, prompt, output, sampling) / 0.7
    assert torch.equal(ours >= support_floor(ours, sampling).unsqueeze(1), expected > -math.inf)
    torch.testing.assert_close(ours[expected > -math.inf], expected[expected > -math.inf])


B, L, T, H, V = 3, 12, 7, 8, 50


def batch(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    ids, mask = torch.randint(V, (B, L)), torch.ones(B, L, dtype=torch.long)
    mask[0, :2] = 0  # a shorter prompt
    mask[1, -3:] = 0  # a shorter completion
    hidden, weight = torch.randn(B, L - 1, H), 0.3 * torch.randn(V, H)
    hidden[..., 0], weight[ids.unique(), 0] = 1.0, 1.0  # what is "sampled" is likelier than the rest
    leaves = [hidden, weight, *([0.5 * torch.randn(V)] if bias else [])]
    return ids, mask, *(leaf.to(dtype).requires_grad_() for leaf in leaves), *([] if bias else [None])


def head_outputs(sampling, ids, mask, hidden, weight, bias, compact=False, batch_size=None, softcap=5.0):
    """Log-probs and entropies (B, T) from the stand-in, called as TRL calls its function; the stand-in too."""
    head, results = RestrictedHead(sampling, ids, mask, T, batch_size), []
    rows = batch_size or B
    for start in range(0, B, rows):
        part = slice(start, start + rows)
        labels = ids[part].masked_fill(mask[part] == 0, -100)[:, 1:]
        labels[:, : L - T - 1] = -100
        scored = labels != -100
        states = hidden[part][scored] if compact else hidden[part].reshape(-1, H)
        targets = labels[scored] if compact else labels.clamp(min=0).flatten()
        logps, entropy, *rest = head.apply(
            states, weight, bias, targets, 0.7, 16, softcap, 1.5, ("log_probs", "entropy")
        )
        assert rest == [None] * 3
        spread = [
            torch.zeros(scored.shape).masked_scatter(scored, x) if compact else x.view(scored.shape) * scored
            for x in (logps, entropy)
        ]
        results.append([x[:, -T:] for x in spread])
    return (*map(torch.cat, zip(*results, strict=True)), head)


def dense_outputs(settings, order, ids, mask, hidden, weight, bias):
    """The same from whole logits and the processors of transformers, position by position."""
    logits = 1.5 * (hidden @ weight.T + (0 if bias is None else bias)).float()
    logits = 5.0 * torch.tanh(logits / 5.0)
    logps, entropies = torch.zeros(B, T), torch.zeros(B, T)
    outside = torch.zeros(B, T, dtype=torch.bool)
    for row in range(B):
        for step in range(T):
            position = L - T + step
            if not mask[row, position]:
                continue
            seen = ids[row, :position][mask[row, :position].bool()].unique().unsqueeze(0)  # autograd counts twins
            shaped = transformers_logits(logits[row, position - 1].unsqueeze(0), seen, 0.7, order, **settings)[0]
            token = ids[row, position]
            outside[row, step] = shaped[token] == -math.inf
            untruncated = {k: v for k, v in settings.items() if k == "repetition_penalty"}
            full = transformers_logits(logits[row, position - 1].unsqueeze(0), seen, 0.7, order, **untruncated)[0]
            keep = (shaped > -math.inf) | (torch.arange(V) == token)
            logp = full[keep].log_softmax(-1)
            logps[row, step] = logp[keep[:token].sum()]
            entropies[row, step] = -(logp.exp() * logp).sum()
    return logps, entropies, outside


@pytest.mark.parametrize("case", ["everywhere", "compact", "chunks", "no bias"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings))
def test_tiles_equal_the_dense_computation_and_its_gradients(settings, order, case, monkeypatch):
    monkeypatch.setattr(support, "_LOGITS_AT_ONCE", {"cpu": 3 * V})  # tiles of three positions
    monkeypatch.setattr(support, "_LIKELIEST", 8)  # sometimes enough, sometimes not
    ids, mask, *leaves = batch(bias=case != "no bias")
    sampling = Sampling(**settings, order=ORDERS[order])
    options = {"compact": case == "compact", "batch_size": 2 if case == "chunks" else None}
    logps, entropies, head = head_outputs(sampling, ids, mask, *leaves, **options)
    expected = dense_outputs(settings, ORDERS[order], ids, mask, *leaves)
    assert 0 < expected[2].sum() < mask[:, -T:].sum(), "random ids must be in and out of the support"
    assert torch.equal(head.outside, expected[2])
    torch.testing.assert_close(logps, expected[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropies, expected[1], atol=1e-5, rtol=1e-6)
    leaves = [leaf for leaf in leaves if leaf is not None]
    weights, others = torch.randn(2, B, T)
    for ours, theirs in (
        ((logps * weights).sum(), (expected[0] * weights).sum()),
        ((entropies * others).sum(), (expected[1] * others).sum()),
        ((logps * weights + entropies * others).sum(), (expected[0] * weights + expected[1] * others).sum()),
    ):
        for got, want in zip(
            torch.autograd.grad(ours, leaves, retain_graph=True),
            torch.autograd.grad(theirs, leaves, retain_graph=True),
            strict=True,
        ):
            assert want.abs().max() > 0.1
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_without_settings_it_is_trl_s_own_function():
    from trl.kernels import ChunkedLogProbFunction

    ids, mask, *leaves = batch()
    logps, entropies, _ = head_outputs(Sampling(), ids, mask, *leaves)
    flat = leaves[0].reshape(-1, H), *leaves[1:], ids[:, 1:].flatten(), 0.7, 16, 5.0, 1.5, ("log_probs", "entropy")
    theirs = [x.view(B, L - 1)[:, -T:] * mask[:, -T:] for x in ChunkedLogProbFunction.apply(*flat)[:2]]
    torch.testing.assert_close([logps, entropies], theirs, atol=1e-5, rtol=1e-6)


def test_an_output_penalty_starts_where_the_prompt_ends():
    ids, mask, hidden, weight, bias = batch()
    sampling = Sampling(frequency_penalty=0.7, presence_penalty=0.4)
    logps, _, _ = head_outputs(sampling, ids, mask, hidden, weight, bias)
    logits = 5.0 * torch.tanh(1.5 * (hidden @ weight.T + bias) / 5.0)
    for step in range(T):
        row, position = 2, L - T + step
        count = torch.bincount(ids[row, L - T : position], minlength=V)
        shaped = (logits[row, position - 1] - 0.7 * count - 0.4 * (count > 0)) / 0.7
        assert logps[row, step].item() == pytest.approx(shaped.log_softmax(-1)[ids[row, position]].item(), abs=1e-5)


@pytest.mark.parametrize("amp", [False, True], ids=["bf16 weights", "autocast"])
def test_half_precision_rounds_the_logits_as_an_engine_does(amp):
    ids, mask, hidden, weight, bias = batch(torch.float32 if amp else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        logps, entropies, _ = head_outputs(Sampling(top_p=0.8), ids, mask, hidden, weight, bias, softcap=None)
    assert logps.dtype == entropies.dtype == torch.float32
    rounded = (hidden.bfloat16() @ weight.bfloat16().T + bias.bfloat16()).float() * 1.5 / 0.7
    row, position = 2, L - 1
    logits = rounded[row, position - 1].unsqueeze(0)
    expected, _ = restricted(logits, support_floor(logits, Sampling(top_p=0.8)), ids[row, position:])
    assert logps[row, -1].item() == pytest.approx(expected.item(), abs=1e-5)
    logps.sum().backward()
    assert hidden.grad.dtype == hidden.dtype and weight.grad.isfinite().all() and weight.grad.abs().sum() > 0


def test_a_batch_without_scored_tokens_is_a_differentiable_zero():
    ids, mask, hidden, weight, bias = batch()
    mask[:, -T:] = 0
    logps, entropies, head = head_outputs(Sampling(**COMBINED), ids, mask, hidden, weight, bias)
    assert not logps.any() and not entropies.any() and not head.outside.any()
    logps.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


def test_no_more_logits_exist_than_one_tile(monkeypatch):
    monkeypatch.setattr(support, "_LOGITS_AT_ONCE", {"cpu": 4096})
    rows, length, vocabulary = 4, 33, 1000
    ids = torch.randint(vocabulary, (rows, length))
    hidden, weight = torch.randn(rows * (length - 1), 2, requires_grad=True), torch.randn(vocabulary, 2)
    with Largest() as largest:
        head = RestrictedHead(Sampling(**COMBINED, presence_penalty=0.1), ids, torch.ones_like(ids), length - 1)
        outputs = head.apply(hidden, weight, None, ids[:, 1:].flatten(), 1.0, 0, None, 1.0, ("log_probs", "entropy"))
        (outputs[0] + outputs[1]).sum().backward()
    assert 4000 <= largest.elements <= 4 * 1001  # four positions, and a slot for `NOTHING`; all of them were 128,000


def test_a_forward_that_does_not_come_through_the_head_is_an_error():
    ids, mask, *_ = batch()
    with pytest.raises(RuntimeError, match="rollout_support=False"):
        _ = RestrictedHead(Sampling(top_p=0.8), ids, mask, T).outside


def test_more_hidden_states_than_tokens_are_an_error():
    ids, mask, hidden, weight, bias = batch()
    head = RestrictedHead(Sampling(top_p=0.8), ids, mask, T)
    with pytest.raises(ValueError, match="virtual tokens"):
        head.apply(hidden.reshape(-1, H)[:5], weight, bias, ids[0, :5], 1.0, 16, None, 1.0, ("log_probs",))


def test_tokens_outside_the_support_are_counted_in_the_mask_only():
    outside = torch.tensor([[True, False, True], [True, True, False]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert finalize(support_metrics(outside, mask))["mismatch/outside_support_fraction"] == pytest.approx(3 / 4)
