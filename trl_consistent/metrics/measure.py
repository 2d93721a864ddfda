# SPDX-License-Identifier: Apache-2.0
"""Statistics of a batch (no transfer to the host), and the numbers that are logged of them."""

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ..correction.kl import reference_kl
from ..correction.weights import CorrectionResult
from ..ratios import MAX_LOG_RATIO, check_shapes, row_blocks, wide_dtype
from ..statistics import (
    BinCounter,
    Histogram,
    Reduction,
    Stat,
    Totals,
    merge,
    on_host,
    readable_histogram,
    scalar,
    wide,
)
from .catalogue import METRICS


def mismatch_metrics(
    old: Float[Tensor, "B T"], sampling: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> dict[str, Stat]:
    """Statistics of the gap between trainer and engine log-probs, before any correction acts.

    Args: as of [`mismatch_log_ratio`].

    Returns:
        `dict` of [`Stat`], on the device of the input, without a host sync. Give it (merged) to [`finalize`].

    Sign: `d` is positive when the trainer finds the token likelier.
    Masked positions: ignored, whatever they hold. Unscored and infinite tokens are counted and enter nothing else; a
    completion with an infinite token enters no sequence statistic. Rows without tokens enter nothing.
    """
    check_shapes(old=old, sampling=sampling, mask=mask)
    counters = {name: BinCounter(old.device) for name in ("diff", "log_sequence")}
    stats = merge(_mismatch_rows(old[rows], sampling[rows], mask[rows], counters) for rows in row_blocks(old))
    return stats | {f"{name}_histogram": Stat(count.sides().flatten(), "sum") for name, count in counters.items()}


def _mismatch_rows(
    old: Float[Tensor, "B T"],
    sampling: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    counters: dict[str, BinCounter],
) -> dict[str, Stat]:
    """[`mismatch_metrics`] of a few rows, without the histograms, which are added to `counters`. Each pass over memory
    counts, so what is selected is selected once."""
    old, sampling = old.detach().float(), sampling.detach().float()
    inside = mask.bool()
    # What `mismatch_log_ratio` calls unscored is NaN here, what it calls infinite is infinite or NaN.
    d = old - sampling
    scored = inside & (d - d == 0)  # finite, in fewer passes than `isfinite`
    tokens, number, unscored = (x.count_nonzero(dim=-1) for x in (inside, scored, inside & torch.isnan(sampling)))
    infinite = tokens - number - unscored
    d, old, sampling = (torch.where(scored, x, 0.0) for x in (d, old, sampling))
    sum_dtype = wide_dtype(d)

    def total(x: Tensor, at_rest: float = 0.0) -> Stat:
        """The sum over scored tokens of `x`, which is `at_rest` at all others."""
        return scalar(x.sum(dim=-1).sum(dtype=sum_dtype) - at_rest * (x.numel() - number.sum()))

    def extreme(x: Tensor, where: Tensor, reduction: Reduction) -> Stat:
        filled = torch.where(where, x, -math.inf if reduction == "max" else math.inf)
        return scalar(filled.amax() if reduction == "max" else filled.amin(), reduction)

    abs_diff = d.abs()
    bounded = d.clamp(max=MAX_LOG_RATIO)
    excess = torch.expm1(bounded)  # ratio - 1, exact near d = 0
    p_old, p_sampling = old.exp(), sampling.exp()
    prob_diff = (p_old - p_sampling).abs_()
    counters["diff"].add(d)
    counters["diff"].remove_zeros(d.numel() - number.sum())  # of tokens that are not scored
    stats = {
        "tokens": scalar(tokens.sum()),
        "scored": scalar(number.sum()),
        "nonfinite": scalar(infinite.sum()),
        "unscored": scalar(unscored.sum()),
        "diff": total(d),
        "abs_diff": total(abs_diff),
        "abs_diff_min": extreme(abs_diff, scored, "min"),
        "abs_diff_max": scalar(abs_diff.amax(), "max"),
        "k3": total(excess - d),  # `kl_k3`
        "excess": total(excess),
        "excess_squared": total(excess.square()),
        "log_ratio_min": extreme(bounded, scored, "min"),
        "log_ratio_max": extreme(bounded, scored, "max"),
        "prob_diff": total(prob_diff),
        "prob_diff_max": scalar(prob_diff.amax(), "max"),
        "p_old": total(p_old, 1.0),
        "p_sampling": total(p_sampling, 1.0),
        "p_product": total(p_old * p_sampling, 1.0),
        "p_old_squared": total(p_old.square_(), 1.0),
        "p_sampling_squared": total(p_sampling.square_(), 1.0),
    }

    # Sequence ratios are summed as logs: a product over a long completion overflows any float.
    whole = (number > 0) & (infinite == 0)
    lengths = number.clamp(min=1)
    log_sequence = wide(d.sum(dim=-1))
    log_geometric = log_sequence / lengths
    counters["log_sequence"].add(log_sequence.float(), whole)

    def logsumexp(x: Tensor) -> Stat:
        return Stat(torch.logsumexp(torch.where(whole, x, -math.inf), dim=0, keepdim=True), "logsumexp")

    def minus_mean(x: Tensor) -> Stat:
        return scalar(-torch.where(whole, x.sum(dim=-1) / lengths, 0.0).sum(dtype=sum_dtype))

    stats |= {
        "sequences": scalar(whole.sum()),
        "log_sequence": logsumexp(log_sequence),
        "log_sequence_doubled": logsumexp(2 * log_sequence),
        "log_sequence_min": extreme(log_sequence, whole, "min"),
        "log_sequence_max": extreme(log_sequence, whole, "max"),
        "log_geometric": logsumexp(log_geometric),
        "log_geometric_min": extreme(log_geometric, whole, "min"),
        "log_geometric_max": extreme(log_geometric, whole, "max"),
        "log_ppl_old": minus_mean(old),
        "log_ppl_sampling": minus_mean(sampling),
    }
    return stats


def correction_metrics(mask: Shaped[Tensor, "B T"], result: CorrectionResult, action: str) -> dict[str, Stat]:
    """Statistics of what a correction did to the tokens of `mask`, the mask before rejections.

    Returns:
        `dict` of [`Stat`] that can be joined with those of [`mismatch_metrics`]; no host sync.

    Masked positions: ignored. Weights are counted over the kept tokens only.
    """
    check_shapes(mask=mask, weights=result.weights)
    return merge(
        _correction_rows(mask[rows].bool(), CorrectionResult(*(x[rows] for x in vars(result).values())), action)
        for rows in row_blocks(mask)
    )


def _correction_rows(inside: Bool[Tensor, "B T"], result: CorrectionResult, action: str) -> dict[str, Stat]:
    """[`correction_metrics`] of a few rows."""
    kept = result.keep_mask
    weights, row_kept = result.weights, kept.sum(dim=-1)
    excess = torch.where(kept, weights - 1, 0.0)  # exact near 1
    sum_dtype = wide_dtype(weights)
    none = torch.zeros((), device=weights.device)
    row_weights = row_kept + excess.sum(dim=-1, dtype=sum_dtype)
    emptied = inside.any(dim=-1) & (row_kept == 0)
    verb = {"none": "", "truncate": "truncated", "mask": "masked", "reject": ""}[action]
    stats = {
        "correction_tokens": scalar(inside.sum()),
        "kept": scalar(row_kept.sum()),
        "rows": scalar(row_kept.new_full((), len(inside))),
        "rejected_rows": scalar(emptied.sum()),
        "outside_rows": scalar((result.low | result.high).any(dim=-1).sum()),
        "weight": scalar(row_weights.sum()),
        "weight_excess_squared": scalar(excess.square().sum(dtype=sum_dtype)),
        "kept_sequences": scalar((row_kept > 0).sum()),
        "sequence_weight": scalar((row_weights / row_kept.clamp(min=1)).sum()),
        "weight_min": scalar(torch.where(kept, weights, math.inf).amin(), "min"),
        "weight_max": scalar(torch.where(kept, weights, -math.inf).amax(), "max"),
        "rejected_low": scalar(result.rejected_low.sum()),
        "rejected_high": scalar(result.rejected_high.sum()),
    }
    for name in ("truncated", "masked"):
        stats[f"{name}_low"] = scalar(result.low.sum() if name == verb else none)
        stats[f"{name}_high"] = scalar(result.high.sum() if name == verb else none)
    return stats


# Statistics whose quotient is the mean weight, by `Correction.normalize`.
_MEANS = {"token": ("weight", "kept"), "sequence": ("sequence_weight", "kept_sequences")}


def mean_weight(stats: dict[str, Stat], normalize: str) -> Shaped[Tensor, ""]:
    """What `normalize`, `token` or `sequence`, divides the weights by, see [`normalized`].

    Args: `stats` are those of [`correction_metrics`], of the whole rollout batch.
    """
    total, count = _MEANS[normalize]
    mean: Tensor = stats[total].value[0] / stats[count].value[0].clamp(min=1)
    return mean


def trust_region_metrics(mask: Shaped[Tensor, "B T"], passes: Bool[Tensor, "B T"]) -> dict[str, Stat]:
    """Statistics of what trust regions stopped among the tokens of `mask`. Masked positions: ignored."""
    return {"region_tokens": scalar(mask.bool().sum()), "region_stopped": scalar((mask.bool() & ~passes).sum())}


def reference_metrics(
    per_token_logps: Float[Tensor, "B T"], reference: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> dict[str, Stat]:
    """Statistics of the gap between policy and reference among the tokens of `mask`.

    Args: log-probs in nats; `mask` as of [`mismatch_log_ratio`]. Sign: as of [`reference_kl`]. Masked positions: ignored.
    """
    d = torch.where(mask.bool(), per_token_logps.detach().float() - reference.detach().float(), 0.0)
    stats = {"reference_tokens": scalar(mask.bool().sum())}
    for name in ("k1", "k2", "k3"):
        stats[f"reference_{name}"] = scalar(reference_kl(d, name).sum(dtype=wide_dtype(d)))
    return stats


def support_metrics(outside: Bool[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> dict[str, Stat]:
    """Statistics of the tokens that the trainer's own support lacks, see [`RestrictedHead`]; no host sync."""
    check_shapes(outside=outside, mask=mask)
    inside = mask.bool()
    return {"support_tokens": scalar(inside.sum()), "outside_support": scalar((outside & inside).sum())}


def counted_as_batch(stats: dict[str, Stat]) -> dict[str, Stat]:
    """The statistics of one whole rollout batch (all ranks, all micro-batches), with whether all of it was rejected."""
    if "kept" not in stats:
        return stats
    rejected = (stats["correction_tokens"].value > 0) & (stats["kept"].value == 0)
    return {**stats, "rejected_batches": Stat(rejected.to(stats["kept"].value.dtype), "sum")}


def histograms(stats: dict[str, Stat]) -> dict[str, Histogram]:
    """Histograms of (merged) statistics of [`mismatch_metrics`], on 97 bins that are log-spaced on both sides of 0.

    `mismatch/diff` counts `d` of the scored tokens, `mismatch/log_sequence_ratio` its sum over each completion without an
    infinite token. One that would be empty is left out. One transfer to the host, none after [`on_host`].

    Sign: as of [`mismatch_log_ratio`].
    """
    names = {"mismatch/diff": "diff_histogram", "mismatch/log_sequence_ratio": "log_sequence_histogram"}
    found = on_host({key: stats[name] for key, name in names.items() if name in stats})
    shown = {key: readable_histogram(stat.value) for key, stat in found.items()}
    return {key: histogram for key, histogram in shown.items() if histogram is not None}


def finalize(stats: dict[str, Stat]) -> dict[str, float]:
    """The numbers to log, by key of [`METRICS`] and in its order, from (merged) statistics.

    One transfer to the host. A metric that is undefined (no scored token, no spread) or was not measured is left out.

    Args:
        stats (`dict[str, Stat]`):
            From [`mismatch_metrics`], with or without those of [`correction_metrics`] and the other functions here.
    """
    totals = Totals(stats)
    values = {metric.key: metric.formula(totals) for metric in METRICS.values()}
    return {key: value for key, value in values.items() if value is not None}
