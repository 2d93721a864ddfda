# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of the divergence between rollout engine and trainer.

All three estimate KL(mu || pi_old), the direction whose samples we have: tokens were drawn from the engine's mu. Not to
be confused with the reference-policy KL of the training loss.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from .ratios import MAX_LOG_RATIO, check_shapes, scored_tokens


def kl_k1(mismatch_log_ratio: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """k1 = -d, the plain estimator of KL(mu || pi_old) per token.

    Unbiased, high variance, negative for single tokens. Blind to permuted or shifted log-probs, whose mean is right:
    read k3 next to it.

    Returns:
        `torch.Tensor` of shape `(B, T)`, nats, float32.

    Sign: positive on average when the engine is the more confident of the two.
    Masked positions: 0, as are unscored tokens.
    Source: http://joschu.net/blog/kl-approx.html.
    """
    check_shapes(mismatch_log_ratio=mismatch_log_ratio, mask=mask)
    return torch.where(scored_tokens(mismatch_log_ratio, mask), -mismatch_log_ratio, 0.0)


def kl_k2(mismatch_log_ratio: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """k2 = d^2 / 2, a biased, low-variance estimator of KL(mu || pi_old) per token.

    Right to second order in `d`; for large `d` it understates heavy right tails that k3 shows.

    Returns:
        `torch.Tensor` of shape `(B, T)`, nats, float32.

    Sign: never negative.
    Masked positions: 0, as are unscored tokens.
    Source: http://joschu.net/blog/kl-approx.html.
    """
    check_shapes(mismatch_log_ratio=mismatch_log_ratio, mask=mask)
    return torch.where(scored_tokens(mismatch_log_ratio, mask), 0.5 * mismatch_log_ratio.square(), 0.0)


def kl_k3(mismatch_log_ratio: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """k3 = exp(d) - 1 - d, the unbiased, never negative estimator of KL(mu || pi_old) per token.

    The number to watch. Its expectation is the KL only if tokens were really drawn from the reported mu; k1 and k3
    that disagree say they were not (see `mismatch/z_ratio`). The exponential saturates at e^40.

    Returns:
        `torch.Tensor` of shape `(B, T)`, nats, float32.

    Sign: never negative.
    Masked positions: 0, as are unscored tokens.
    Source: http://joschu.net/blog/kl-approx.html.
    """
    check_shapes(mismatch_log_ratio=mismatch_log_ratio, mask=mask)
    # expm1 keeps the digits that exp(d) - 1 loses near d = 0; the exponent saturates, -d does not.
    k3 = torch.expm1(mismatch_log_ratio.clamp(max=MAX_LOG_RATIO)) - mismatch_log_ratio
    return torch.where(scored_tokens(mismatch_log_ratio, mask), k3, 0.0)
