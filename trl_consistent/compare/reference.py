# SPDX-License-Identifier: Apache-2.0
"""What the bias of a correction is measured against: a ratio that nothing truncates, if it is fit to judge by."""

from dataclasses import dataclass

from ..correction.rules import Correction
from ..metrics.catalogue import METRICS
from .outcome import CompletionSums, effective_sample_size


MIN_REFERENCE_ESS = METRICS["mismatch/ess/sequence"].critical[0] or 0.0
"""Smallest effective sample size of an untruncated ratio that is to judge others."""


# Without an upper bound, a weight saturates at e^40, and an infinite ratio is 0.
CANDIDATES = {
    "sequence": Correction("sequence", "truncate", lower=0.0),
    "token": Correction("token", "truncate", lower=0.0),
}
"""The untruncated ratios, as corrections. That of the sequence is exact."""


@dataclass(frozen=True)
class Reference:
    """What biases are measured against, and what to say about it."""

    name: str | None
    """`sequence`, `token`, or `None` where no ratio is fit to judge by."""
    sums: CompletionSums | None
    """The sums of all completions under it."""
    note: str
    """Says which ratio it is, or why there is none."""


def choose_reference(candidates: dict[str, CompletionSums]) -> Reference:
    """The first of [`CANDIDATES`] whose effective sample size is at least [`MIN_REFERENCE_ESS`].

    Args:
        candidates (`dict[str, CompletionSums]`): The sums of all completions under each of [`CANDIDATES`].
    """
    sequence = candidates["sequence"]
    ratios = sequence.weight / sequence.tokens  # all tokens of a completion have its ratio as their weight
    exact = effective_sample_size(ratios, ratios.square(), len(ratios)) or 0.0
    if exact >= MIN_REFERENCE_ESS:
        note = (
            f"Bias is against the untruncated sequence ratio, which is exact (its ESS: {exact:.3g} of {len(ratios)})."
        )
        return Reference("sequence", sequence, note)
    short = f"ESS of the untruncated sequence ratio: {exact:.2g} of {len(ratios)} completions, too few to judge by"
    token = candidates["token"]
    coarse = effective_sample_size(token.weight, token.weight_squared, token.kept.sum()) or 0.0
    if coarse >= MIN_REFERENCE_ESS:
        note = (
            f"{short}. Bias is against the untruncated token ratio (its ESS: {coarse:.3g}), which ignores how likely the "
            "text before a token is."
        )
        return Reference("token", token, note)
    note = f"{short}; of the token ratio: {coarse:.2g} of the tokens, also too few. There is no bias to show."
    return Reference(None, None, note)
