# SPDX-License-Identifier: Apache-2.0
"""What corrections would have made of recorded batches, without training."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..correction.apply import decide, loss_weights, trust_region_passes
from ..correction.calibration import NoiseEstimate, noise_statistics
from ..correction.loss import ROW_COUNT_LOSSES, TOKEN_COUNT_LOSSES, aggregated, rejection_scale
from ..correction.presets import PRESETS
from ..correction.rules import Correction, Rejection, TrustRegion
from ..correction.weights import CorrectionResult
from ..metrics.catalogue import METRICS
from ..metrics.measure import correction_metrics, finalize, mean_weight, mismatch_metrics
from ..records.folder import readable
from ..records.record import MismatchRecord, merge_ranks
from ..records.store import Recorded, recorded_steps
from ..statistics import Stat, merge
from ..tables import MARK, Table, judged
from .outcome import CompletionSums, Outcome, groups_of, outcome, sums_of
from .recommend import recommend
from .reference import CANDIDATES, Reference, choose_reference


logger = logging.getLogger(__name__)

DEFAULT = ("none", "tis", "icepop", "seq_tis", "seq_mis", "geo_mis", "prefix_tis")
"""The corrections that are replayed if none is named, next to the one that the run had."""


@dataclass(frozen=True)
class Replay:
    """What [`replay`] found."""

    recommended: str | None
    """Which correction to use, if the records can tell."""
    reason: str
    """Why, in one to three sentences."""
    in_force: str | None
    """Name of the correction that the run had."""
    reference: str | None
    """What biases are measured against: `sequence`, `token` or nothing."""
    notes: tuple[str, ...]
    """What was left out, and what a bias means."""
    metrics: dict[str, float]
    """`mismatch/*` of all the completions together."""
    outcomes: tuple[Outcome, ...]
    """What each correction makes of each group; the group of all completions comes first."""

    def tables(self) -> list[Table]:
        """Two tables for people: all completions together, and by group."""
        whole = [each for each in self.outcomes if each.group == "all"]
        groups = [each for each in self.outcomes if each.group != "all"]
        has_cosine = any(each.cosine is not None for each in self.outcomes)
        columns = tuple(self._row(whole[0]))
        brief = tuple(name for name in columns if name not in _LEFT_OUT_OF_GROUPS)
        title = f"Corrections replayed on {whole[0].completions} completions, {whole[0].tokens} tokens"
        rows = [tuple(self._row(each).values()) for each in whole]
        by_group = []
        for each in groups:
            row = self._row(each)
            by_group.append((each.group, each.completions, each.tokens, *(row[name] for name in brief)))
        advice = f"Recommended: {self.recommended or 'nothing'}. {self.reason}"
        return [
            Table(title, columns, rows, (MARK, *self.notes)),
            Table(
                "By length of the completion" + " and sign of its advantage" * has_cosine,
                ("group", "completions", "tokens", *brief),
                by_group,
                (advice,),
            ),
        ]

    def _row(self, outcome: Outcome) -> dict[str, Any]:
        """The cells of an outcome by column; bias and cosine only if any outcome has them."""
        is_in_force = outcome.correction == self.in_force
        has_weights = outcome.weight_min is not None
        row = {
            "correction": f"{outcome.correction} (in force)" if is_in_force else outcome.correction,
            "ESS": judged("correction/ess", outcome.ess),
            "kept": _percent(outcome.kept),
            "truncated": _percent(outcome.truncated),
            "masked": _percent(outcome.masked),
            "rejected": _percent(outcome.rejected),
            "weights": f"{outcome.weight_min:.3g} … {outcome.weight_max:.3g}" if has_weights else None,
            "mean": outcome.weight_mean,
        }
        if any(each.bias is not None for each in self.outcomes):
            error = "" if outcome.bias_error is None else f" ± {outcome.bias_error:.2g}"
            row["bias"] = None if outcome.bias is None else f"{outcome.bias:+.3f}{error}"
            row["signs apart"] = outcome.bias_apart
        if any(each.cosine is not None for each in self.outcomes):
            row["cosine"] = outcome.cosine
        return row


_LEFT_OUT_OF_GROUPS = ("truncated", "masked", "rejected", "mean", "signs apart")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def correction_from(text: str) -> Correction:
    """Reads a correction from the name of a preset, or from level, action and bounds such as `token_truncate:0.5,2`.

    A bound that is left empty, as in `sequence_mask:,3`, is open.

    Raises:
        `ValueError`: The text is neither; lists the presets.
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
            f"{text!r} is not a correction: {error}. Expected a preset ({', '.join(PRESETS)}), or level, action and bounds such "
            "as token_truncate:0.5,2 or sequence_mask:,3. Records come before --correction."
        ) from None


def in_force(fingerprint: dict[str, Any]) -> tuple[str, Correction] | None:
    """Reads the correction that a run had from the fingerprint of its records.

    Returns:
        Its name, which is that of the preset it equals or `<level>_<action>, as set`, and the correction. `None` if the run had
        no correction, or one that this version does not know.
    """
    stored = fingerprint.get("correction")
    if not stored:
        return None
    try:
        own = {each.name: stored[each.name] for each in dataclasses.fields(Correction) if each.name in stored}
        own["rejections"] = tuple(Rejection(**rule) for rule in own.get("rejections", ()))
        own["trust_regions"] = tuple(TrustRegion(**region) for region in own.get("trust_regions", ()))
        correction = Correction(**own)
    except (TypeError, ValueError) as error:
        logger.warning(f"The correction of the run is not replayed because its record says {stored}: {error}")
        return None
    for preset in (str(stored.get("preset")), *PRESETS):
        if PRESETS.get(preset) == correction:
            return preset, correction
    return f"{correction.level}_{correction.action}, as set", correction


def replay(paths: Iterable[str | Path], corrections: Iterable[str] = ()) -> Replay:
    """Computes what corrections would have made of the recorded batches.

    The policy is the one that was about to be updated, so that PPO's ratio is 1. An `m2` rejection sees the batch of a rank,
    `normalize` that of all ranks. Calibrated bounds come from the noise of all the records, and the denominators are those
    of the run's `loss_type`.

    The bias is measured against the untruncated sequence ratio, the exact importance weight of a completion, if its
    effective sample size over completions is at least [`MIN_REFERENCE_ESS`]. Otherwise it is measured against the untruncated
    token ratio, which ignores how likely the text before a token is, on the same condition. Otherwise there is no bias.

    The recommendation is found in three steps:

    1. Fewer than [`MIN_TOKENS`] tokens get no recommendation.
    2. If the metrics in [`GAP`] are in their healthy ranges, the recommendation is `none`.
    3. Otherwise the candidates are the corrections that act and keep an ESS of [`MIN_ESS`] and a share of [`MIN_KEPT`] of the
       tokens. Those whose bias, signs apart, exceeds the smallest one by at most [`TIED`] of its standard errors are treated
       as equal, and the simplest of them is recommended: the one with the fewest parts (action, rejections, trust regions,
       normalization), then one at token level, then the one with the fewest bounds, then the one named first. Where there
       is no bias, the simplest candidate is recommended.

    Args:
        paths (`list` of `str` or `Path`): Output folders of runs, folders of records, or record files.
            A record that cannot be read is left out, with a warning.
        corrections (`list` of `str`, *optional*): In the form that [`correction_from`] reads; [`DEFAULT`] and the correction that the
            run had if left out.

    Raises:
        `FileNotFoundError`: There are no records.
        `ValueError`: No record can be read, or a correction is unknown.
    """
    paths = list(paths)
    corrections = list(corrections)
    steps = recorded_steps(*paths)
    chosen = {text: correction_from(text) for text in corrections or DEFAULT}
    force = in_force(steps[-1].fingerprint) if steps else None
    if force is not None and not corrections:
        chosen.setdefault(*force)
    needs_noise = any(correction.reject_rate is not None for correction in chosen.values())
    noise = _noise(steps) if needs_noise else NoiseEstimate()
    replayed = _replayed(steps, chosen, noise)
    if replayed is None:
        raise ValueError(f"No record with tokens at {', '.join(map(str, paths))} can be read.")

    left_out: list[str] = []
    if replayed.has_advantages:
        reference = choose_reference(replayed.candidates)
    else:
        left_out = [name for name, correction in chosen.items() if correction.trust_regions]
        reference = Reference(None, None, _without_advantages(left_out))
    if len(left_out) == len(chosen):
        raise ValueError(f"Nothing to replay: {', '.join(left_out)} need advantages, and the records have none.")
    outcomes = []
    for group, index in groups_of(replayed.candidates["token"], replayed.has_advantages).items():
        judge = None if reference.sums is None else reference.sums.pick(index)
        for name, sums in replayed.sums.items():
            if name not in left_out:
                outcomes.append(outcome(name, group, sums.pick(index), judge))
    advice = recommend([each for each in outcomes if each.group == "all"], chosen, replayed.metrics)
    notes = _notes(steps, replayed.metrics, is_uncalibrated=needs_noise and not bool(noise.ready))
    return Replay(
        recommended=advice.correction,
        reason=advice.reason,
        in_force=None if force is None else force[0],
        reference=reference.name,
        notes=(*notes, reference.note),
        metrics=replayed.metrics,
        outcomes=tuple(outcomes),
    )


def _notes(steps: list[Recorded], metrics: dict[str, float], is_uncalibrated: bool) -> list[str]:
    """What a reader must know of the records before trusting the numbers, a note each."""
    notes = []
    if cut := [each.step for each in steps if each.is_cut]:
        notes.append(
            f"Of {len(cut)} steps (the first: {cut[0]}) only the worst completions were recorded, so the numbers are about "
            "these completions. A larger `mismatch_record_bytes` keeps whole batches."
        )
    if is_uncalibrated:
        notes.append("Too few completions to calibrate bounds with: the fixed ones were used.")
    pearson = METRICS["mismatch/pearson"]
    if pearson.outside(correlation := metrics.get("mismatch/pearson", 1.0)):
        notes.append(
            f"mismatch/pearson is {correlation:.3g}, healthy is {pearson.healthy_text}: log-probs may belong to other tokens. "
            "Find the cause first; no correction repairs it."
        )
    return notes


def _without_advantages(left_out: list[str]) -> str:
    note = "There are records without advantages, so there is no bias, no cosine and no split by sign."
    if left_out:
        note += f" Not replayed because their trust regions need advantages: {', '.join(left_out)}."
    return note


@dataclass(frozen=True)
class _Batch:
    """A rollout batch, the completions of all ranks below each other."""

    d: Tensor
    """`(B, T)`, the mismatch log-ratio."""
    mask: Tensor
    """`(B, T)` bool, the loss mask before rejections."""
    old: Tensor
    """`(B, T)`, log-probs of the trainer."""
    sampling: Tensor
    """`(B, T)`, log-probs of the rollout engine."""
    advantages: Tensor | None
    """`(B, T)`, if they were recorded."""
    sizes: list[int]
    """Number of completions of each rank."""
    loss_type: str
    """Which loss the run had."""
    longest: int
    """The run's `max_completion_length`."""

    def ranks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """`d`, `mask` and `sampling` of one rank after the other."""
        return zip(*(tensor.split(self.sizes) for tensor in (self.d, self.mask, self.sampling)), strict=True)


def _batches(steps: list[Recorded]) -> Iterator[_Batch]:
    """Reads one rollout batch after the other; leaves out those without a token in the loss mask."""
    for step in steps:
        ranks = [record for _, record in readable(step.files, MismatchRecord.load)]
        if not any(record.mask.any() for record in ranks):
            continue
        record = merge_ranks(ranks)
        advantages = record.advantages
        if advantages is not None and advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).expand_as(record.mask)
        settings = record.fingerprint.get("settings") or {}
        yield _Batch(
            d=record.mismatch_log_ratio,
            mask=record.mask.bool(),
            old=record.old_per_token_logps,
            sampling=record.sampling_per_token_logps,
            advantages=advantages,
            sizes=[len(each.mask) for each in ranks],
            loss_type=settings.get("loss_type", "dapo"),  # TRL's default
            longest=settings.get("max_completion_length") or record.mask.shape[1],
        )


def _noise(steps: list[Recorded]) -> NoiseEstimate:
    """The noise of all the records together."""
    noise = NoiseEstimate()
    for batch in _batches(steps):
        noise = noise.update(noise_statistics(batch.d, batch.mask))
    return noise


@dataclass(frozen=True)
class _Replayed:
    """What is kept of all the batches."""

    sums: dict[str, CompletionSums]
    """The sums under each correction, by name."""
    candidates: dict[str, CompletionSums]
    """The sums under each of [`CANDIDATES`]."""
    metrics: dict[str, float]
    """`mismatch/*` of all the completions."""
    has_advantages: bool
    """Whether every batch has advantages."""


def _replayed(steps: list[Recorded], corrections: dict[str, Correction], noise: NoiseEstimate) -> _Replayed | None:
    """Replays the corrections on one batch after the other; `None` if there is no batch."""
    parts: dict[str, list[CompletionSums]] = {name: [] for name in corrections}
    candidates: dict[str, list[CompletionSums]] = {name: [] for name in CANDIDATES}
    stats: list[dict[str, Stat]] = []
    has_advantages = True
    for batch in _batches(steps):
        stats.append(mismatch_metrics(batch.old, batch.sampling, batch.mask))
        has_advantages &= batch.advantages is not None
        for name, correction in corrections.items():
            parts[name].append(_sums(batch, correction, noise))
        for name, correction in CANDIDATES.items():
            candidates[name].append(_sums(batch, correction, noise))
    if not stats:
        return None
    return _Replayed(
        sums={name: CompletionSums.joined(found) for name, found in parts.items()},
        candidates={name: CompletionSums.joined(found) for name, found in candidates.items()},
        metrics=finalize(merge(stats)),
        has_advantages=has_advantages,
    )


def _sums(batch: _Batch, correction: Correction, noise: NoiseEstimate) -> CompletionSums:
    """What is kept of a batch under a correction."""
    weighed = _weighed(batch, correction, noise)
    keep_mask = weighed.result.keep_mask
    weights = torch.where(keep_mask, weighed.weights, 0.0).double()
    is_outside = weighed.result.low | weighed.result.high
    truncated = is_outside & keep_mask & (weights > 0) & (correction.action == "truncate")
    advantages = torch.full_like(weights, math.nan) if batch.advantages is None else batch.advantages.double()
    factors = token_factors(keep_mask, batch.loss_type, batch.longest)
    if batch.loss_type in TOKEN_COUNT_LOSSES + ROW_COUNT_LOSSES:
        factors = factors * rejection_scale(weighed.stats, keep_mask.sum(), batch.loss_type).double()
    plain_factors = token_factors(batch.mask, batch.loss_type, batch.longest)
    return sums_of(
        batch.mask,
        keep_mask,
        weights,
        truncated,
        gradient=weights * torch.where(keep_mask, advantages, 0.0) * factors,
        plain=torch.where(batch.mask, advantages, 0.0) * plain_factors,
    )


@dataclass(frozen=True)
class _Weighed:
    """What the loss would have seen of a batch under a correction."""

    result: CorrectionResult
    """What the correction decided."""
    stats: dict[str, Stat]
    """Statistics of that, see [`correction_metrics`]."""
    weights: Tensor
    """`(B, T)`, what the policy term of the loss is multiplied by."""


def _weighed(batch: _Batch, correction: Correction, noise: NoiseEstimate) -> _Weighed:
    """Corrects rank by rank, as a training does, then normalizes over all ranks and applies the trust regions."""
    parts = [vars(decide(d, sampling, mask, correction, noise)).values() for d, mask, sampling in batch.ranks()]
    result = CorrectionResult(*map(torch.cat, zip(*parts, strict=True)))
    stats = correction_metrics(batch.mask, result, correction.action)
    mean = None if correction.normalize == "none" else mean_weight(stats, correction.normalize)
    passes = None
    if batch.advantages is not None:
        passes = trust_region_passes(correction, batch.old, batch.sampling, batch.advantages, batch.mask)
    return _Weighed(result, stats, loss_weights(result, mean_weight=mean, passes=passes))


def token_factors(mask: Tensor, loss_type: str, longest: int) -> Tensor:
    """What a loss multiplies the term of each token by: 1 over its denominator, and 0 outside the mask.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`): The loss mask.
        loss_type (`str`): TRL's `loss_type`.
        longest (`int`): `max_completion_length`.

    Returns:
        `torch.Tensor` of shape `(B, T)`, float64.
    """
    term = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    loss = aggregated(term, mask, loss_type, items=mask.sum(), longest=longest, steps=1.0)
    return torch.autograd.grad(loss, term)[0]
