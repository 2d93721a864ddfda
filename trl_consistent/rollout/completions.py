# SPDX-License-Identifier: Apache-2.0
"""Completions that an engine returned, and their log-probs: refused where they do not belong together."""

from typing import Any


def sampled_token_first(
    completion_ids: list[list[int]], logprobs: list[list[list[float | None]]], token_ids: list[list[list[int]]]
) -> list[list[list[float | None]]]:
    """Puts the sampled token's log-prob first at every position.

    vLLM sorts by rank, and TRL takes the first: with `generation_kwargs={"logprobs": 5}` that is the most likely
    token's, not the sampled one's.

    Args:
        completion_ids (`list[list[int]]`): Sampled ids, `(B, T)` ragged.
        logprobs (`list[list[list[float | None]]]`): Log-probs by rank, `(B, T, K)` ragged.
        token_ids (`list[list[list[int]]]`): The ids they belong to, same shape.

    Raises:
        `ValueError`: a sampled token is not among those reported.
    """
    check_completions(completion_ids, logprobs)
    reordered = []
    for row, (ids, row_logprobs, row_ids) in enumerate(zip(completion_ids, logprobs, token_ids, strict=True)):
        new_row = []
        for position, (sampled, values, candidates) in enumerate(zip(ids, row_logprobs, row_ids, strict=True)):
            if sampled not in candidates:
                raise ValueError(
                    f"The rollout engine sampled token {sampled} at position {position} of completion {row}, but "
                    f"reports log-probs of {candidates} only."
                )
            index = candidates.index(sampled)
            new_row.append([values[index], *values[:index], *values[index + 1 :]])
        reordered.append(new_row)
    return reordered


def check_completions(completion_ids: list[list[int]], logprobs: list[list[Any]] | None) -> None:
    """Refuses completions without tokens, or whose log-probs are fewer or more than their tokens: they would belong to
    other tokens.

    Raises:
        `ValueError`: names the completion and both lengths.
    """
    if logprobs is not None and len(logprobs) != len(completion_ids):
        raise ValueError(f"Got {len(completion_ids)} completions but {len(logprobs)} lists of sampling log-probs.")
    for row, ids in enumerate(completion_ids):
        if len(ids) == 0:
            raise ValueError(
                f"Completion {row} is empty, and TRL needs at least one token (an EOS will do). Check the stop "
                "conditions in `generation_kwargs` and what `rollout_func` returns."
            )
        if logprobs is not None and len(logprobs[row]) != len(ids):
            raise ValueError(
                f"Completion {row} has {len(ids)} tokens but {len(logprobs[row])} sampling log-probs. Every generated "
                "token needs exactly one (NaN or None where the engine has none); check what the engine or "
                "`rollout_func` returns, and that completions were not re-tokenised."
            )


def check_logprobs_mode(mode: str | None) -> None:
    """Refuses an engine whose log-probs are not those of the distribution it sampled from.

    Args:
        mode (`str`, *optional*): vLLM's `logprobs_mode`.

    Raises:
        `ValueError`: with the flag to start a server with.
    """
    if mode not in (None, "processed_logprobs"):
        raise ValueError(
            f"The vLLM server runs with `logprobs_mode={mode!r}` (before temperature and penalties), not with the "
            "log-probs of the distribution it samples from, so every mismatch ratio is off. Restart it with "
            "`--logprobs-mode processed_logprobs`."
        )
