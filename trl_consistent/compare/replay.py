# SPDX-License-Identifier: Apache-2.0
"""What other corrections would have made of recorded batches, without training."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..correction.calibration import NoiseEstimate, calibrated_bounds, level_lengths, noise_statistics
from ..correction.loss import ROW_COUNT_LOSSES, TOKEN_COUNT_LOSSES, aggregated, rejection_scale
from ..correction.presets import PRESETS
from ..correction.rules import Correction, Rejection, TrustRegion
from ..correction.weights import CorrectionResult, correct, normalized, trust_region_mask
from ..metrics.catalogue import METRICS
from ..metrics.measure import correction_metrics, finalize, mean_weight, mismatch_metrics
from ..records.logs import readable
from ..records.record import MismatchRecord, merge_ranks
from ..records.store import Recorded, recorded_steps
from ..statistics import merge
from ..tables import MARK, Table, judged
from .recommend import Outcome, _kept, _recommend


logger = logging.getLogger(__name__)

DEFAULT = ("none", "tis", "icepop", "seq_tis", "seq_mis", "geo_mis", "prefix_tis")
"""What is replayed if nothing is named, next to the correction the run had."""


MIN_REFERENCE_ESS = METRICS["mismatch/ess/sequence"].critical[0] or 0.0
"""Of an untruncated ratio that is to judge others."""


BINS = 4
"""Quantiles of the length."""


# The untruncated ratios that a bias is measured against, the exact one first. Without an upper bound, a weight saturates
# at e^40, and an infinite ratio is 0.
_REFERENCES = {
    "sequence": Correction("sequence", "truncate", lower=0.0),
    "token": Correction("token", "truncate", lower=0.0),
}
# What is summed for each completion. The gradient weight of a token is what its grad log-prob is multiplied by: weight
# times advantage over the loss's denominator; `plain` is that without a correction, `size` its size.
_SUMS = (
    *("tokens", "kept", "positive", "truncated", "weight", "squared", "gradient", "plain", "size", "product"),
    *("gradient_squared", "plain_squared", "low", "high"),
)


@dataclass(frozen=True)
class Replay:
    """What [`replay`] found."""

    recommended: str | None
    """Which correction, if the records can tell."""
    reason: str
    """Why, in a sentence or two."""
    in_force: str | None
    """The correction the run had."""
    reference: str | None
    """What biases are measured against: `sequence`, `token` or nothing."""
    notes: tuple[str, ...]
    """What was left out, and what a bias means."""
    metrics: dict[str, float]
    """`mismatch/*` of all the completions together."""
    outcomes: tuple[Outcome, ...]
    """Of each correction, all completions first."""

    def tables(self) -> list[Table]:
        """For people."""
        has_bias = any(outcome.bias is not None for outcome in self.outcomes)
        has_cosine = any(outcome.cosine is not None for outcome in self.outcomes)

        def row(outcome: Outcome) -> dict[str, Any]:
            error = "" if outcome.bias_error is None else f" ± {outcome.bias_error:.2g}"
            cells = {
                "correction": outcome.correction + " (in force)" * (outcome.correction == self.in_force),
                "ESS": judged("correction/ess", outcome.ess),
                "kept": _percent(_kept(outcome)),
                "truncated": _percent(outcome.truncated),
                "masked": _percent(outcome.masked),
                "rejected": _percent(outcome.rejected),
                "weights": None
                if outcome.weight_min is None
                else f"{outcome.weight_min:.3g} … {outcome.weight_max:.3g}",
                "mean": outcome.weight_mean,
            }
            if has_bias:
                cells["bias"] = None if outcome.bias is None else f"{outcome.bias:+.3f}{error}"
                cells["signs apart"] = outcome.bias_apart
            if has_cosine:
                cells["cosine"] = outcome.cosine
            return cells

        whole = [outcome for outcome in self.outcomes if outcome.group == "all"]
        parts = [outcome for outcome in self.outcomes if outcome.group != "all"]
        columns = tuple(row(whole[0]))
        brief = [name for name in columns if name not in ("truncated", "masked", "rejected", "mean", "signs apart")]
        title = f"Corrections replayed on {whole[0].completions} completions, {whole[0].tokens} tokens"
        by_group = [
            (each.group, each.completions, each.tokens, *(row(each)[name] for name in brief)) for each in parts
        ]
        advice = f"Recommended: {self.recommended or 'nothing'}. {self.reason}"
        return [
            Table(title, columns, [tuple(row(each).values()) for each in whole], (MARK, *self.notes)),
            Table(
                "By length of the completion" + " and sign of its advantage" * has_cosine,
                ("group", "completions", "tokens", *brief),
                by_group,
                (advice,),
            ),
        ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def named(text: str) -> Correction:
    """A correction by preset name, or as `<level>_<action>:<lower>,<upper>` such as `token_truncate:0.5,2`; a bound that is
    left empty is open.

    Raises:
        `ValueError`: it is neither; lists the presets.
    """
    if text in PRESETS:
        return PRESETS[text]
    mode, _, bounds = text.partition(":")
    level, _, action = mode.partition("_")
    lower, comma, upper = bounds.partition(",")
    try:
        if not comma:
            raise ValueError("no such preset")
        return Correction(level, action, float(lower) if lower else None, float(upper) if upper else None)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no correction: {error}. Expected a preset ({', '.join(PRESETS)}), or level, action and bounds such "
            "as token_truncate:0.5,2 or sequence_mask:,3. Records come before --correction."
        ) from None


def in_force(fingerprint: dict[str, Any]) -> tuple[str, Correction] | None:
    """The correction of the run a record is from, and its name: that of the preset it is, or `level_action`; `None` if it
    had none, or one that this version does not know."""
    stored = fingerprint.get("correction")
    if not stored:
        return None
    try:
        own = {each.name: stored[each.name] for each in dataclasses.fields(Correction) if each.name in stored}
        own["rejections"] = tuple(Rejection(**rule) for rule in own.get("rejections", ()))
        own["trust_regions"] = tuple(TrustRegion(**region) for region in own.get("trust_regions", ()))
        correction = Correction(**own)
    except (TypeError, ValueError) as error:
        logger.warning(f"The correction of the run is not replayed, its record says {stored}: {error}")
        return None
    for preset in (str(stored.get("preset")), *PRESETS):
        if PRESETS.get(preset) == correction:
            return preset, correction
    return f"{correction.level}_{correction.action}, as set", correction


def replay(paths: Iterable[str | Path], corrections: Iterable[str] = ()) -> Replay:
    """What corrections would have made of the recorded batches.

    The policy is the one that was about to be updated (old = current, so that PPO's ratio is 1), batches are those of the
    rank for `m2` and of all ranks for `normalize`, calibrated bounds come from the noise of all the records, and denominators
    are those of the run's `loss_type`.

    The bias is against the untruncated sequence ratio, the exact importance weight of a completion, if its effective
    sample size over completions is at least [`MIN_REFERENCE_ESS`]; else against the untruncated token ratio, which
    ignores how likely the text before the token was, under the same condition; else there is none.

    The recommendation:

    1. none on fewer than [`MIN_TOKENS`] tokens;
    2. `none`, if the metrics in [`GAP`] are in their healthy ranges;
    3. else, of the corrections that act and keep an ESS of [`MIN_ESS`] and a share of [`MIN_KEPT`] of the tokens, those
       whose bias, signs apart, exceeds the smallest by at most two of its standard errors, and of them the simplest: fewest
       parts (action, rejections, trust regions, normalization), then token level, then fewest bounds, then the one named
       first. Where there is no bias to go by, the simplest of those that keep enough.

    Args:
        paths (`list` of `str` or `Path`): Runs, folders of records or records; unreadable ones are left out, with a warning.
        corrections (`list` of `str`, *optional*): As of [`named`]; [`DEFAULT`] and the one in force if left out.

    Raises:
        `FileNotFoundError`: there are no records. `ValueError`: none can be read, or a correction is unknown.
    """
    steps = recorded_steps(*paths)
    chosen = {text: named(text) for text in corrections or DEFAULT}
    force = in_force(steps[-1].fingerprint) if steps else None
    if force is not None and not corrections:
        chosen.setdefault(*force)
    noise = NoiseEstimate()
    if any(correction.reject_rate is not None for correction in chosen.values()):
        for batch in _batches(steps):
            noise = noise.update(noise_statistics(batch.d, batch.mask))

    names = list(chosen)
    rows: list[list[Tensor]] = [[] for _ in range(len(names) + len(_REFERENCES))]
    stats, has_advantages = [], True
    for batch in _batches(steps):
        stats.append(mismatch_metrics(batch.old, batch.sampling, batch.mask))
        has_advantages &= batch.advantages is not None
        for found, correction in zip(rows, (*chosen.values(), *_REFERENCES.values()), strict=True):
            found.append(_summed(batch, correction, noise))
    if not stats:
        raise ValueError(f"No record with tokens at {', '.join(map(str, paths))} can be read.")
    sums = [_Rows(torch.cat(found)) for found in rows]
    replayed = dict(zip(names, sums, strict=False))

    notes = []
    if cut := [each.step for each in steps if each.is_cut]:
        notes.append(
            f"Of {len(cut)} steps (the first: {cut[0]}) only the worst completions were recorded: what is said here is of them. "
            "A larger `mismatch_record_bytes` keeps whole batches."
        )
    if not has_advantages:
        left_out = [name for name in names if chosen[name].trust_regions]
        replayed = {name: found for name, found in replayed.items() if name not in left_out}
        notes.append(
            "There are records without advantages: no bias, no cosine, no split by their sign"
            + (f", and no {', '.join(left_out)}, whose trust regions need them." if left_out else ".")
        )
        if not replayed:
            raise ValueError(f"Nothing to replay: {', '.join(left_out)} need advantages, and the records have none.")
    if any(correction.reject_rate is not None for correction in chosen.values()) and not bool(noise.ready):
        notes.append("Too few completions to calibrate bounds with: the fixed ones were used.")
    reference, judge, note = _reference(dict(zip(_REFERENCES, sums[len(names) :], strict=True)), has_advantages)
    metrics = finalize(merge(stats))
    if METRICS["mismatch/pearson"].outside(correlation := metrics.get("mismatch/pearson", 1.0)):
        notes.append(
            f"mismatch/pearson is {correlation:.3g}, healthy is {METRICS['mismatch/pearson'].healthy_text}: log-probs may "
            "belong to other tokens. Find the cause first; no correction repairs it."
        )
    groupings = _groups(sums[0], has_advantages)
    outcomes = tuple(
        _outcome(name, group, found.pick(index), None if judge is None else judge.pick(index))
        for group, index in groupings.items()
        for name, found in replayed.items()
    )
    whole = [outcome for outcome in outcomes if outcome.group == "all"]
    recommended, reason = _recommend(whole, chosen, metrics)
    return Replay(
        recommended,
        reason,
        None if force is None else force[0],
        reference,
        (*notes, *note),
        metrics,
        outcomes,
    )


@dataclass(frozen=True)
class _Batch:
    """A rollout batch, the completions of all ranks below each other."""

    d: Tensor
    mask: Tensor
    old: Tensor
    sampling: Tensor
    advantages: Tensor | None
    sizes: list[int]
    loss_type: str
    longest: int


def _batches(steps: list[Recorded]) -> Iterator[_Batch]:
    """One rollout batch in memory after the other; those without a token left out."""
    for step in steps:
        ranks = [record for _, record in readable(step.files, MismatchRecord.load)]
        if not any(record.mask.any() for record in ranks):
            continue
        record, sizes = merge_ranks(ranks), [len(record.mask) for record in ranks]
        advantages = record.advantages
        if advantages is not None and advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).expand_as(record.mask)
        settings = record.fingerprint.get("settings") or {}
        loss_type = settings.get("loss_type", "dapo")  # TRL's default
        longest = settings.get("max_completion_length") or record.mask.shape[1]
        yield _Batch(
            record.mismatch_log_ratio,
            record.mask.bool(),
            record.old_per_token_logps,
            record.sampling_per_token_logps,
            advantages,
            sizes,
            loss_type,
            longest,
        )


class _Rows:
    """[`_SUMS`] of completions, and the extremes of their weights."""

    def __init__(self, values: Tensor):
        self.values = values

    def __getattr__(self, name: str) -> Tensor:
        return self.values[:, _SUMS.index(name)]

    def pick(self, index: Tensor) -> "_Rows":
        return _Rows(self.values[index])


def _summed(batch: _Batch, correction: Correction, noise: NoiseEstimate) -> Tensor:
    """[`_SUMS`] for each completion with tokens, and the smallest and largest weight."""
    mask, advantages, parts = batch.mask, batch.advantages, []
    for d, inside, sampling in zip(*(x.split(batch.sizes) for x in (batch.d, mask, batch.sampling)), strict=True):
        bounds = {
            level: calibrated_bounds(level_lengths(d, inside, level), noise, correction.reject_rate, level)
            for level in correction.calibrated_levels
            if correction.reject_rate is not None
        }
        parts.append(correct(d, inside, correction, sampling=sampling, bounds=bounds))
    result = CorrectionResult(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))
    stats = correction_metrics(mask, result, correction.action)
    weights, keep = result.weights, result.keep_mask
    if correction.normalize != "none":
        weights = normalized(weights, keep, mean_weight(stats, correction.normalize))
    if advantages is not None:
        for region in correction.trust_regions:
            weights = weights * trust_region_mask(batch.old, batch.sampling, advantages, mask, region)
    weights = torch.where(keep, weights, 0.0).double()
    truncated = (result.low | result.high) & keep & (weights > 0) & (correction.action == "truncate")

    known = torch.full_like(weights, math.nan) if advantages is None else advantages.double()
    plain = torch.where(mask, known, 0.0) * _per_token(mask, batch.loss_type, batch.longest)
    scale = _per_token(keep, batch.loss_type, batch.longest)
    if batch.loss_type in TOKEN_COUNT_LOSSES + ROW_COUNT_LOSSES:
        scale = scale * rejection_scale(stats, keep.sum(), batch.loss_type).double()
    gradient = weights * torch.where(keep, known, 0.0) * scale
    columns = {
        "tokens": mask,
        "kept": keep,
        "positive": weights > 0,
        "truncated": truncated,
        "weight": weights,
        "squared": weights.square(),
        "gradient": gradient,
        "plain": plain,
        "size": plain.abs(),
        "product": gradient * plain,
        "gradient_squared": gradient.square(),
        "plain_squared": plain.square(),
    }
    sums = [columns[name].sum(1, dtype=torch.float64) for name in _SUMS[:-2]]
    extremes = torch.where(keep, weights, math.inf).amin(1), torch.where(keep, weights, -math.inf).amax(1)
    return torch.stack([*sums, *extremes], dim=1)[mask.any(1)]


def _per_token(mask: Tensor, loss_type: str, longest: int) -> Tensor:
    """What the loss multiplies the term of each token by: 1 over its denominator, 0 outside the mask."""
    term = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    loss = aggregated(term, mask, loss_type, items=mask.sum(), longest=longest, steps=1.0)
    return torch.autograd.grad(loss, term)[0]


def _ess(weight: Tensor, squared: Tensor, count: Tensor | int) -> float | None:
    return (weight.sum() ** 2 / (count * squared.sum())).item() if squared.sum() > 0 else None


def _reference(found: dict[str, _Rows], has_advantages: bool) -> tuple[str | None, _Rows | None, tuple[str, ...]]:
    """Which of the untruncated ratios is fit to judge by, and what to say of it."""
    if not has_advantages:
        return None, None, ()
    ratios = found["sequence"].weight / found["sequence"].tokens
    exact = _ess(ratios, ratios.square(), len(ratios)) or 0.0
    if exact >= MIN_REFERENCE_ESS:
        note = (
            f"Bias is against the untruncated sequence ratio, which is exact (its ESS: {exact:.3g} of {len(ratios)})."
        )
        return "sequence", found["sequence"], (note,)
    token = found["token"]
    coarse = _ess(token.weight, token.squared, token.kept.sum()) or 0.0
    short = f"ESS of the untruncated sequence ratio: {exact:.2g} of {len(ratios)} completions, too few to judge by"
    if coarse >= MIN_REFERENCE_ESS:
        note = (
            f"{short}. Bias is against the untruncated token ratio (its ESS: {coarse:.3g}), blind to what came before."
        )
        return "token", token, (note,)
    return (
        None,
        None,
        (f"{short}; of the token ratio: {coarse:.2g} of the tokens, also too few. There is no bias to show.",),
    )


def _groups(rows: _Rows, has_advantages: bool) -> dict[str, Tensor]:
    """All completions; those of similar length; those of one sign of the advantage."""
    lengths = rows.tokens.contiguous()
    groups = {"all": torch.ones_like(lengths, dtype=torch.bool)}
    edges = lengths.quantile(torch.linspace(0, 1, BINS + 1, dtype=lengths.dtype)[1:-1])
    bins = torch.bucketize(lengths, edges)
    if len(present := bins.unique()) > 1:
        for each in present:
            inside = lengths[bins == each]
            low, high = int(inside.min()), int(inside.max())
            groups[f"length {low}" + f" … {high}" * (low < high)] = bins == each
    if has_advantages:
        signs = {"A > 0": rows.plain > 0, "A < 0": rows.plain < 0}
        groups |= {name: index for name, index in signs.items() if index.any()}
    return groups


def _outcome(name: str, group: str, rows: _Rows, judge: _Rows | None) -> Outcome:
    tokens, kept, positive = (x.sum().item() for x in (rows.tokens, rows.kept, rows.positive))
    weight = rows.weight.sum().item()
    bias = error = apart = None
    size = rows.size.sum().item()
    if judge is not None and size > 0:
        # (sum_i b_i) / sum |A|, with b_i what a completion adds to the difference
        each = rows.gradient - judge.gradient
        bias = each.sum().item() / size
        apart = sum(each[side].sum().abs().item() for side in (rows.plain > 0, rows.plain < 0)) / size
        error = math.sqrt(len(each)) * each.std().item() / size if len(each) > 1 else None
    squares = (rows.gradient_squared.sum() * rows.plain_squared.sum()).sqrt().item()
    return Outcome(
        correction=name,
        group=group,
        completions=len(rows.tokens),
        tokens=int(tokens),
        ess=_ess(rows.weight, rows.squared, rows.kept.sum()),
        truncated=rows.truncated.sum().item() / tokens,
        masked=(kept - positive) / tokens,
        rejected=(tokens - kept) / tokens,
        weight_min=rows.low.min().item() if kept else None,
        weight_mean=weight / kept if kept else None,
        weight_max=rows.high.max().item() if kept else None,
        bias=bias,
        bias_error=error,
        bias_apart=apart,
        cosine=rows.product.sum().item() / squares if squares > 0 else None,
    )
