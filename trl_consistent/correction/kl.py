# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of two divergences: between rollout engine and trainer, and between policy and reference.

`kl_k1`, `kl_k2` and `kl_k3` estimate KL(mu || pi_old), the direction whose samples we have: tokens were drawn from the
engine's mu. They are measured, never trained on. `reference_kl` is the KL(pi || ref) of the training loss.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ..ratios import MAX_LOG_RATIO, check_shapes, scored_tokens


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


REFERENCE_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")
"""Estimators of [`reference_kl`]."""


def reference_kl(
    log_ratio: Float[Tensor, "B T"], estimator: str, weights: Float[Tensor, "B #T"] | None = None
) -> Float[Tensor, "B T"]:
    """Estimator of KL(pi || ref) per token, for a loss: its gradient matters as much as its value.

    With `d = log pi - log ref`, of tokens drawn from `pi`:

    - `k1 = d`: its value is unbiased, its gradient is 0 in expectation (only noise) unless weighted;
    - `k2 = d^2 / 2`: its gradient is that of KL(pi || ref), its value is right to second order;
    - `k3 = exp(-d) - 1 + d` (TRL's): its value is unbiased, its gradient is that of the other direction, KL(ref || pi);
    - `k1+`, `k3+`: the value of the first, the gradient of `k2`.

    With `weights = pi / (the policy that sampled)`, tokens may come from another policy. Weights multiply `k1` and `k3`
    with their gradient, `k2` and the gradients taken from it without: then the gradient of all but `k2`'s value is that
    of KL(pi || ref), exactly. All of this holds for a token given its prefix; what a token does to the KL of later ones
    is not in any per-token term.

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            `per_token_logps - ref_per_token_logps`, nats, with its gradient.
        estimator (`str`):
            One of [`REFERENCE_ESTIMATORS`].
        weights (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*):
            Importance weights with their gradient; 1 if left out.

    Returns:
        `torch.Tensor` of shape `(B, T)`, nats, with gradient.

    Sign: positive on average when the policy has left the reference; `k1` is negative for single tokens.
    Masked positions: as they come, the caller selects.
    Source: http://joschu.net/blog/kl-approx.html; gradients, https://huggingface.co/papers/2506.09477 and
    https://huggingface.co/papers/2510.01555; weighted k3, https://huggingface.co/papers/2512.02556.
    """
    if estimator not in REFERENCE_ESTIMATORS:
        raise ValueError(f"Unknown estimator {estimator!r}. Expected one of {', '.join(REFERENCE_ESTIMATORS)}.")
    live = torch.ones_like(log_ratio[:, :1]) if weights is None else weights
    k2 = 0.5 * log_ratio.square() * live.detach()
    if estimator == "k2":
        return k2
    value = log_ratio if estimator.startswith("k1") else torch.exp(-log_ratio) + log_ratio - 1
    value = value * live
    return k2 + (value - k2).detach() if estimator.endswith("+") else value
