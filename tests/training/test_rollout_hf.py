# SPDX-License-Identifier: Apache-2.0
"""Log-probs captured while transformers generates."""

import copy
import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl.trainer import grpo_trainer

from trl_consistent import ConsistentGRPOTrainer
from trl_consistent.rollout.transformers import BatchedLogprobs, SampledLogprobs, captured

from ..short_training import GRPOTrainer, assert_same_training, build, train


# The cache takes what memory there is, unless told.
SMALL_CACHE = {"transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64}}
BATCHING = {"use_vllm": False, "use_transformers_continuous_batching": True, **SMALL_CACHE}
ENGINES = pytest.mark.parametrize(
    "engine",
    [{"use_vllm": False}, BATCHING],
    ids=["generate", "continuous_batching"],
)
EOS = list(range(1, 12))
PROMPTS = torch.tensor([[0, 0, 3], [5, 6, 7], [0, 4, 8], [9, 10, 3]])
ATTENDED = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]])


def sampled(model, **settings):
    """Completions cut after eos, the log-probs captured, and those transformers computes from all its scores."""
    config = GenerationConfig(
        **{"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": EOS, "top_k": 0} | settings
    )
    torch.manual_seed(1)
    with captured(continuous_batching=False) as engine:
        output = model.generate(
            input_ids=PROMPTS,
            attention_mask=ATTENDED,
            generation_config=config,
            output_scores=True,
            return_dict_in_generate=True,
        )
    completions = output.sequences[:, 3:].tolist()
    ids = [row[: len(list(itertools.takewhile(lambda i: i not in EOS, row))) + 1] for row in completions]
    scores = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    return ids, engine.collect(ids), [row[: len(i)].tolist() for row, i in zip(scores, ids, strict=True)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.5},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 20},
        {"temperature": 2.0, "min_p": 0.02},
        {"repetition_penalty": 1.3},
        {"temperature": 2.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_captured_log_probs_are_those_of_the_distribution_that_was_sampled_from(tiny_model, settings):
    ids, captured_logps, expected = sampled(AutoModelForCausalLM.from_pretrained(tiny_model), **settings)
    assert len(set(map(len, ids))) > 1, "some completions end early"
    for ours, theirs in zip(captured_logps, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_captured_log_probs_are_those_of_a_full_forward(tiny_model):
    # decoding with a KV cache, next to one forward over prompt and completion
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids, captured_logps, _ = sampled(model, temperature=0.7)
    for prompt, attended, completion, logps in zip(PROMPTS, ATTENDED, ids, captured_logps, strict=True):
        prompt = prompt[attended.bool()].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1)[range(len(completion)), completion]
        assert (torch.tensor(logps) - expected).abs().max() < 1e-4


def test_one_position_of_scores_is_held_at_a_time(tiny_model, monkeypatch):
    model, held = AutoModelForCausalLM.from_pretrained(tiny_model), []

    call = SampledLogprobs.__call__

    def counted(self, input_ids, scores):
        result = call(self, input_ids, scores)
        tensors = [*self._columns, self._scores]
        held.append([tuple(tensor.shape) for tensor in tensors if tensor.dim() == 2])
        return result

    monkeypatch.setattr(SampledLogprobs, "__call__", counted)
    with captured(continuous_batching=False):
        model.generate(input_ids=PROMPTS, do_sample=True, max_new_tokens=5, pad_token_id=0, eos_token_id=None, top_k=0)
    assert held == [[(4, 64)]] * 5


def test_generation_is_as_it_was_afterwards(tiny_model):
    from transformers import GenerationMixin
    from transformers.generation.continuous_batching import ContinuousMixin

    before = GenerationMixin._get_logits_processor, ContinuousMixin.generate_batch
    for batched in (False, True):
        with pytest.raises(ZeroDivisionError), captured(batched):
            1 / 0  # noqa: B018
    assert before == (GenerationMixin._get_logits_processor, ContinuousMixin.generate_batch)


@ENGINES
@pytest.mark.parametrize(
    "options", [{}, {"off_policy_mask_threshold": 1e-7, "gradient_accumulation_steps": 1}], ids=str
)
def test_unset_training_is_that_of_trl_bit_for_bit(tiny_model, tmp_path, engine, options):
    theirs, ours = (
        train(cls, tiny_model, tmp_path, **engine, **options) for cls in (GRPOTrainer, ConsistentGRPOTrainer)
    )
    assert_same_training(theirs, ours)
    for log in ours.logs[:3]:
        assert 0 < log["mismatch/abs_diff/max"] < 1e-4


@ENGINES
@pytest.mark.parametrize("old_logprobs", ["recompute", "reuse", "rollout"])
def test_three_steps_of_lora_with_a_correction(tiny_model, tmp_path, engine, old_logprobs):
    options = {"correction": "tis_two_sided", "old_logprobs": old_logprobs, "temperature": 0.8}
    keep = train(ConsistentGRPOTrainer, tiny_model, tmp_path, lora=True, **engine, **options)
    assert len(keep.weights) == 3 and any((g != 0).any() for g in keep.gradients[0].values())
    for log in keep.logs[:3]:
        assert 0 < log["mismatch/abs_diff/max"] < 1e-4
        assert log["correction/weight/mean"] == pytest.approx(1, abs=1e-4)


@ENGINES
def test_a_gap_is_corrected(tiny_model, tmp_path, engine, monkeypatch):
    # the engine's log-probs are off by log 4 for every third completion: TIS at 2 weighs those tokens 2, not 4
    for kind in (SampledLogprobs, BatchedLogprobs):

        def planted(self, ids, collect=kind.collect):
            rows = collect(self, ids)
            return [[lp - math.log(4) for lp in row] if index % 3 == 0 else row for index, row in enumerate(rows)]

        monkeypatch.setattr(kind, "collect", planted)
    keep = train(ConsistentGRPOTrainer, tiny_model, tmp_path, max_steps=1, correction="tis", **engine)
    log = keep.logs[0]
    assert log["mismatch/ratio/max"] == pytest.approx(4, rel=1e-4)
    assert log["correction/weight/max"] == 2
    assert 0.2 < log["correction/truncated_fraction/high"] < 0.6


def test_bfloat16_shows_a_gap(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    log = train(ConsistentGRPOTrainer, model, tmp_path, max_steps=1, use_vllm=False).logs[0]
    assert 1e-4 < log["mismatch/abs_diff/mean"] < 0.5


def test_a_rollout_func_is_left_to_report_its_own(tiny_model, tmp_path):
    def rollout(prompts, trainer):
        inner = [[5, 6]] * len(prompts)
        return {"prompt_ids": [[3]] * len(prompts), "completion_ids": inner, "logprobs": [[-1.0, -2.0]] * len(prompts)}

    keep = train(
        ConsistentGRPOTrainer,
        tiny_model,
        tmp_path,
        max_steps=1,
        use_vllm=False,
        rollout_func=rollout,
        correction="tis",
    )
    assert keep.logs[0]["mismatch/log_ppl/sampling"] == pytest.approx(1.5)


@pytest.mark.parametrize("decoding", [{"do_sample": False}, {"num_beams": 2}], ids=str)
def test_log_probs_of_what_was_not_sampled_are_not_made_up(tiny_model, tmp_path, decoding):
    options = {"use_vllm": False, "generation_kwargs": decoding, "max_steps": 1}
    log = train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options).logs[0]
    assert not any(key.startswith("mismatch/") for key in log)
    for reliance in ({"correction": "tis"}, {"old_logprobs": "rollout"}):
        with pytest.raises(
            ValueError, match=r"need the log-probs of sampled tokens.*decodes by '(beam_sample|greedy_search)"
        ):
            train(ConsistentGRPOTrainer, tiny_model, tmp_path, **options, **reliance)


CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %} {{ call.function.name }} "
    "{{ call.function.arguments }}{% endfor %} <eos> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


@ENGINES
def test_the_tool_loop_of_trl_keeps_working(tiny_model, tmp_path, engine, monkeypatch):
    def double(number: int) -> int:
        """
        Doubles a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        return 2 * number

    calls = itertools.count()
    call = {"type": "function", "function": {"name": "double", "arguments": {"number": 2}}}

    def parse(tokenizer, ids, prefix=None, tools=None):
        """A random model calls no tools: every other completion of the first turn is taken for a call."""
        turn = {"role": "assistant", "content": tokenizer.decode(ids)}
        return turn | ({"tool_calls": [copy.deepcopy(call)]} if next(calls) in range(0, 8, 2) else {})

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template, tokenizer.response_template = CHAT, {}
    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    seen = []

    class Seen(ConsistentGRPOTrainer):
        def _generate(self, prompts):
            seen.append(output := super()._generate(prompts))
            return output

    keep = train(
        Seen,
        tiny_model,
        tmp_path,
        max_steps=1,
        max_completion_length=48,
        generation_kwargs={"max_new_tokens": 6},  # of one turn
        correction="tis",
        inputs={"tools": [double], "processing_class": tokenizer},
        rows=[{"prompt": [{"role": "user", "content": "one two"}]}] * 8,
        **engine,
    )
    _, ids, tool_mask, _, logps, *_ = seen[0]
    assert [len(row) for row in ids] == [len(row) for row in logps] == [len(row) for row in tool_mask]
    assert sum(0 in mask for mask in tool_mask) == 4
    assert all(
        lp < 0 for row, mask in zip(logps, tool_mask, strict=True) for lp, m in zip(row, mask, strict=True) if m
    )
    assert keep.logs[0]["mismatch/abs_diff/max"] < 1e-4


def test_an_evaluation_stays_one_after_continuous_batching(tiny_model, tmp_path):
    # TRL's branch ends in `train()`, and what is computed in the loss would take the next batch for a training one
    trainer = build(ConsistentGRPOTrainer, tiny_model, tmp_path, correction="tis", **BATCHING)
    trainer.model.eval()
    trainer._generate_single_turn([[3, 4]] * 4, None, {}, 4)
    assert not trainer.model.training


def test_continuous_batching_drops_these_processors():
    from transformers.generation import logits_process

    for name in ("RepetitionPenalty", "MinLength", "MinNewTokensLength"):
        assert getattr(logits_process, f"{name}LogitsProcessor").supports_continuous_batching is False
    for name in ("TopP", "TopK"):
        assert getattr(logits_process, f"{name}LogitsWarper").supports_continuous_batching
