# SPDX-License-Identifier: Apache-2.0
"""What precision costs: `python scripts/dtype_table.py`. Ten minutes on two CPU cores.

SmolLM2-135M-Instruct at temperature 1. Every engine, a real vLLM and `transformers` with a KV cache, samples once; its
completions are scored as TRL's trainer does, by float32 weights under autocast to each dtype. Prints a Markdown table of the
difference in log-probs per token, in nats: mean, maximum, and the k3 estimate of the KL.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
DTYPES = ("float32", "bfloat16", "float16")
ENGINES = (*DTYPES, "bfloat16, fp32 head", "transformers float32", "transformers bfloat16")
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
QUIET |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


def sample_vllm(path: str, dtype: str, prompts, tokens: int, fp32_head: bool):
    """Completions `(B, T)` of the same length, and the engine's log-probs of them."""
    import torch
    from vllm import LLM, SamplingParams

    from trl_consistent.upstream.vllm import plain_cpu_weights

    with plain_cpu_weights():
        engine = LLM(
            path,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=256,
            logprobs_mode="processed_logprobs",
            hf_overrides={"head_dtype": "float32"} if fp32_head else None,
        )
    settings = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, seed=0)
    outputs = engine.generate([{"prompt_token_ids": row} for row in prompts.tolist()], settings, use_tqdm=False)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    logps = [
        [step[token].logprob for token, step in zip(row, output.outputs[0].logprobs, strict=True)]
        for row, output in zip(ids, outputs, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(logps)


def sample_transformers(path: str, dtype: str, prompts, tokens: int):
    """The same from `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from trl_consistent.rollout.transformers import captured

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0, eos_token_id=None, disable_compile=True
    )
    with torch.no_grad(), captured(continuous_batching=False) as engine:
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    ids = output[:, prompts.size(1) :]
    return ids, torch.tensor(engine.collect(ids.tolist()))


def score(path: str, dtype: str, prompts, ids, fp32_head: bool):
    """Log-probs `(B, T)` as TRL's trainer computes them."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    add_fused_lm_head(model, cast_lm_head_to_fp32=fp32_head)
    tokens = torch.cat([prompts, ids], dim=1)
    labels = tokens.clone()
    labels[:, : prompts.size(1)] = -100
    target = getattr(torch, dtype)
    with torch.no_grad(), torch.autocast("cpu", target, enabled=target != torch.float32):
        output = model(tokens, attention_mask=torch.ones_like(tokens), labels=labels, fused_lm_head=True)
    return output.log_probs[:, -ids.size(1) :].float()


def row(path: str, engine: str, arguments: argparse.Namespace) -> str:
    """One line of the table."""
    import torch

    from trl_consistent import finalize, mismatch_metrics

    prompts = torch.randint(1000, 40000, (arguments.batch, 12), generator=torch.Generator().manual_seed(0))
    fp32_head = engine.endswith("head")
    name, _, dtype = engine.removesuffix(", fp32 head").rpartition(" ")
    if name:
        ids, sampling = sample_transformers(path, dtype, prompts, arguments.tokens)
    else:
        ids, sampling = sample_vllm(path, dtype, prompts, arguments.tokens, fp32_head)
    cells = []
    for dtype in DTYPES:
        old = score(path, dtype, prompts, ids, fp32_head)
        values = finalize(mismatch_metrics(old, sampling, torch.ones_like(ids)))
        keys = ("mismatch/abs_diff/mean", "mismatch/abs_diff/max", "mismatch/k3/mean")
        cells.append(" / ".join(f"{values[key]:.1g}" if values[key] < 0.001 else f"{values[key]:.2g}" for key in keys))
    return f"| {name or 'vLLM'} {engine.removeprefix(f'{name} ')} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32, help="completions (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="length of a completion (default: %(default)s)")
    parser.add_argument("--engine", choices=ENGINES, help="only this row")
    arguments = parser.parse_args()
    from scripts.demo import build_smollm2, cached

    path = str(cached("SmolLM2-135M-Instruct", build_smollm2))
    if arguments.engine:
        return print(row(path, arguments.engine, arguments))
    from trl_consistent.rollout.environment import cpu_variables

    print(f"{arguments.batch} x {arguments.tokens} tokens: mean |d| / max |d| / k3\n", file=sys.stderr)
    print(f"| engine | trainer {' | trainer '.join(DTYPES)} |\n|{'---|' * (len(DTYPES) + 1)}", flush=True)
    for engine in ENGINES:
        line = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
        done = subprocess.run(line, env={**cpu_variables(), **QUIET, **os.environ}, stdout=subprocess.PIPE, text=True)
        print(done.stdout.splitlines()[-1] if done.returncode == 0 else f"| {engine} | failed |", flush=True)
    return None


if __name__ == "__main__":
    main()
