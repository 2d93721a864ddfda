# SPDX-License-Identifier: Apache-2.0
"""What a loss sees of a correction: one path for the trainer, after the rollout or in the loss, and for `compare`.

First [`decide`] on the mismatch, then (only where weights are normalized) a mean over all ranks that the caller has, then
[`loss_weights`]. Trust regions need the current policy, so [`trust_region_passes`] is asked in the loss. The math itself is
in `weights.py`, the bounds of healthy noise are in `calibration.py`.
"""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from .calibration import NoiseEstimate, calibrated_bounds, level_lengths
from .rules import Correction
from .weights import CorrectionResult, correct, normalized, trust_region_mask


def decide(
    d: Float[Tensor, "B T"],
    sampling: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    correction: Correction,
    noise: NoiseEstimate,
) -> CorrectionResult:
    """Weights and keep-mask of a correction, with bounds that follow the measured noise where it asks for such bounds.

    Args:
        d (`torch.Tensor` of shape `(B, T)`): What [`mismatch_log_ratio`] returned, nats.
        sampling (`torch.Tensor` of shape `(B, T)`): Log-probs (nats) that the engine sampled with.
        mask (`torch.Tensor` of shape `(B, T)`): `completion_mask * tool_mask`.
        correction ([`Correction`]): What to do.
        noise ([`NoiseEstimate`]): Noise of the engine so far; read only where `correction.reject_rate` is set.

    Returns:
        [`CorrectionResult`], detached. Masked positions: as of [`correct`].
    """
    bounds = {}
    if correction.reject_rate is not None:
        for level in correction.calibrated_levels:
            lengths = level_lengths(d, mask, level)
            bounds[level] = calibrated_bounds(lengths, noise, correction.reject_rate, level)
    return correct(d, mask, correction, sampling=sampling, bounds=bounds)


def loss_weights(
    result: CorrectionResult,
    *,
    mean_weight: Shaped[Tensor, ""] | None = None,
    passes: Bool[Tensor, "B #T"] | None = None,
    ratio_in_loss: bool = False,
) -> Float[Tensor, "B T"]:
    """What the policy term of the loss is multiplied by, per token.

    Args:
        result ([`CorrectionResult`]): From [`decide`].
        mean_weight (`torch.Tensor`, 0-dimensional, *optional*): Mean weight over all ranks; divides the weights.
        passes (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*): From [`trust_region_passes`].
        ratio_in_loss (`bool`, *optional*, defaults to `False`):
            Whether the loss multiplies by `pi / mu` itself (`old_logprobs="rollout"`), so that of a weight only its being
            0 remains.

    Returns:
        `torch.Tensor` of shape `(B, T)`, detached. Masked positions: 1.
    """
    weights = result.weights
    if mean_weight is not None:
        weights = normalized(weights, result.keep_mask, mean_weight)
    if ratio_in_loss:
        weights = torch.where(weights > 0, 1.0, weights)
    return weights if passes is None else weights * passes


def trust_region_passes(
    correction: Correction,
    per_token_logps: Float[Tensor, "B T"],
    sampling: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B #T"],
    mask: Shaped[Tensor, "B T"],
) -> Bool[Tensor, "B T"] | None:
    """Where all trust regions of a correction let the gradient through; `None` where it has none. Arguments are those of
    [`trust_region_mask`]."""
    if not correction.trust_regions:
        return None
    passes = torch.ones_like(per_token_logps, dtype=torch.bool)
    for region in correction.trust_regions:
        passes = passes & trust_region_mask(per_token_logps, sampling, advantages, mask, region)
    return passes
