# SPDX-License-Identifier: Apache-2.0
"""What a correction is: a level, an action and bounds on the ratio, plus rejections and trust regions."""

from dataclasses import dataclass, field

from ..ratios import LEVELS


ACTIONS = ("none", "truncate", "mask", "reject")
NORMALIZATIONS = ("none", "token", "sequence")
CALIBRATED_LEVELS = ("sequence", "geometric", "turn")
"""Levels whose healthy spread follows from the number of tokens, see `calibration.py`."""

_LEVELS_OF_OTHERS = ("token", "turn_mean", "turn_max", "sequence_sum", "sequence_mean", "sequence_max")

STATISTICS = {
    "ratio": (*LEVELS, "sequence_min", "sequence_max"),
    **dict.fromkeys(("k1", "k2", "k3", "tv", "binary_kl", "exp_abs"), _LEVELS_OF_OTHERS),
    "m2": ("batch",),
}
"""What a rejection can look at, and at which levels; see [`Rejection`]."""

TRUST_REGIONS = ("tv", "kl", "opsm")
"""What a [`TrustRegion`] can look at."""


def check_bounds(owner: str, lower: float | None, upper: float | None, signed: bool = False) -> None:
    """Refuses bounds that nothing can satisfy: NaN, `lower >= upper`, or, unless `signed`, negative.

    Raises:
        `ValueError`: names `owner`, the bound and the value.
    """
    for name, value in (("lower", lower), ("upper", upper)):
        if value is not None and not (value >= 0 or (signed and value < 0)):  # also catches NaN
            raise ValueError(f"{owner}: the {name} bound is {value}, but what it bounds is never negative or NaN.")
    if lower is not None and upper is not None and lower >= upper:
        raise ValueError(f"{owner}: the lower bound ({lower}) must be less than the upper bound ({upper}).")


@dataclass(frozen=True)
class Rejection:
    """A rule on top of a correction: tokens (turns, completions) whose statistic leaves the bounds leave the loss mask.

    Bounds are on the named statistic itself, inclusive; `None` is open. Statistics of a token, with `d` the mismatch
    log-ratio and `p`, `q` the token's probability under trainer and engine:

    - `ratio`: `exp(d)`;
    - `k1`, `k2`, `k3`: `-d`, `d^2 / 2` and `exp(d) - 1 - d` (see `kl.py`);
    - `tv`: `|p - q|`, the total variation between the two on "this token or another";
    - `binary_kl`: the larger of `KL(p || q)` and `KL(q || p)` on "this token or another", as in KPop;
    - `exp_abs`: `exp(|d|)`, the multiplicative error of NeMo-RL;
    - `m2`: `d^2`, at level `batch` only: tokens with the largest `d^2` leave until the mean of the others is within the
      upper bound (M2PO, https://huggingface.co/papers/2510.01161). The batch is the rollout batch of a rank.

    Example:

    ```python
    >>> Rejection("sequence_mean", upper=0.01, statistic="k3")
    >>> Rejection("sequence_min", lower=1e-4)  # one catastrophic token vetoes its completion
    ```
    """

    level: str
    """For `ratio`: `token`, `sequence`, `geometric`, `prefix`, `turn` as for a correction, or the smallest and largest
    token ratio of a completion, `sequence_min` and `sequence_max`. For the others: `token`, or the mean or maximum over
    a turn, or the sum, mean or maximum over a completion: `turn_mean`, `turn_max`, `sequence_sum`, ..."""
    lower: float | None = None
    """Smallest value that is kept."""
    upper: float | None = None
    """Largest value that is kept."""
    statistic: str = "ratio"
    """One of [`STATISTICS`]."""

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise ValueError(f"Rejection statistic is {self.statistic!r}. Expected one of {', '.join(STATISTICS)}.")
        levels = STATISTICS[self.statistic]
        if self.level not in levels:
            raise ValueError(
                f"Rejection level of {self.statistic} is {self.level!r}. Expected one of {', '.join(levels)}."
            )
        check_bounds(f"Rejection {self.name}", self.lower, self.upper, signed=self.statistic == "k1")
        if self.lower is None and self.upper is None:
            raise ValueError(f"Rejection {self.name} needs a lower or an upper bound, got neither.")
        if self.level == "batch" and (self.upper is None or self.lower is not None):
            raise ValueError(f"Rejection {self.name} takes an upper bound only, got [{self.lower}, {self.upper}].")

    @property
    def name(self) -> str:
        """`<statistic>/<level>`, the key of `correction_rejections`."""
        return f"{self.statistic}/{self.level}"


@dataclass(frozen=True)
class TrustRegion:
    """Weight 0 for what the current policy has already moved too far from the engine, in the direction its advantage
    pushes. It needs the current policy, so it acts in the loss; see [`trust_region_mask`].

    Example:

    ```python
    >>> TrustRegion("tv", 0.15)
    ```
    """

    kind: str
    """`tv` (difference of the token's probabilities) or `kl` (KL of "this token or another"), the two masks of DPPO,
    https://huggingface.co/papers/2602.04879, per token; `opsm` (mean k1 over the completion, negative advantages only),
    the off-policy sequence mask of DeepSeek-V3.2, https://huggingface.co/papers/2512.02556."""
    bound: float
    """Largest divergence that is kept."""

    def __post_init__(self) -> None:
        if self.kind not in TRUST_REGIONS:
            raise ValueError(f"Trust region is {self.kind!r}. Expected one of {', '.join(TRUST_REGIONS)}.")
        check_bounds(f"Trust region {self.kind}", None, self.bound)


@dataclass(frozen=True)
class Correction:
    """What to do with the mismatch ratio: level x action x bounds, then rejections, then trust regions.

    Bounds are on the ratio (never on its inverse), inclusive; `None` is open.

    Example:

    ```python
    >>> icepop = Correction(level="token", action="mask", lower=0.5, upper=5.0)
    ```
    """

    level: str = "token"
    """`token` (each token's ratio), `sequence` (their product), `geometric` (its length-normalised form), `prefix` (the
    product up to the token) or `turn` (geometric over a turn)."""
    action: str = "none"
    """`none` (weight 1), `truncate` (clamp), `mask` (weight 0 outside) or `reject` (leaves the loss mask)."""
    lower: float | None = None
    """Smallest ratio inside the bounds."""
    upper: float | None = None
    """Largest ratio inside the bounds."""
    rejections: tuple[Rejection, ...] = ()
    """Further rules; a token stays in the loss only if it passes all of them."""
    trust_regions: tuple[TrustRegion, ...] = ()
    """Masks that look at the current policy and the advantage."""
    normalize: str = "none"
    """`token` or `sequence`: divide the weights by their mean over kept tokens (over completions of their mean weight),
    so that a correction does not change the size of the step. The mean is over all ranks, so the caller divides, see
    [`normalized`]; `none` leaves the weights alone."""
    reject_rate: float | None = None
    """If set, the bounds on the ratio at the levels `sequence`, `geometric` and `turn`, those of rejections included, are
    not the ones above, once the noise is known: they come with each batch, so that this share of healthy completions is
    outside. See [`calibrated_bounds`]."""
    source: str = field(default="", compare=False)
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Correction level is {self.level!r}. Expected one of {', '.join(LEVELS)}.")
        if self.action not in ACTIONS:
            raise ValueError(f"Correction action is {self.action!r}. Expected one of {', '.join(ACTIONS)}.")
        if self.normalize not in NORMALIZATIONS:
            raise ValueError(
                f"Correction normalize is {self.normalize!r}. Expected one of {', '.join(NORMALIZATIONS)}."
            )
        check_bounds(f"Correction {self.level}_{self.action}", self.lower, self.upper)
        if self.reject_rate is not None:
            if not 0 < self.reject_rate < 1:
                raise ValueError(f"Correction reject_rate is {self.reject_rate}. Expected a share, such as 0.01.")
            if not self.calibrated_levels:
                raise ValueError(
                    "Calibrated bounds need a correction or a rejection on the ratio at one of the levels "
                    f"{', '.join(CALIBRATED_LEVELS)}, got {self.level}_{self.action}"
                    f"{''.join(f', {rule.name}' for rule in self.rejections)}."
                )
        if (
            self.action == "truncate"
            and self.level not in self.calibrated_levels
            and self.lower is None
            and self.upper is None
        ):
            raise ValueError(f"Correction {self.level}_truncate needs a lower or an upper bound, got neither.")

    @property
    def rejects(self) -> bool:
        """Whether tokens can leave the loss mask."""
        return self.action == "reject" or bool(self.rejections)

    @property
    def calibrated_levels(self) -> set[str]:
        """Levels whose bounds come with each batch."""
        if self.reject_rate is None:
            return set()
        levels = {rule.level for rule in self.rejections if rule.statistic == "ratio"}
        if self.action != "none":
            levels.add(self.level)
        return levels & set(CALIBRATED_LEVELS)

    @property
    def acts(self) -> bool:
        """Whether it can change a loss."""
        return self.action != "none" or bool(self.rejections) or bool(self.trust_regions)
