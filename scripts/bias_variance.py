# SPDX-License-Identifier: Apache-2.0
"""What each correction does to the policy gradient, exactly: `python scripts/bias_variance.py -o docs/bias_variance.png`.

Nothing is sampled. A tabular policy over 4 tokens and 6 positions has a logit vector for each prefix and 4096 completions,
so every expectation is a sum over all of them. The engine that samples (`mu`) is the trainer's policy (`pi`) plus:

- `gaussian`: normal noise on all logits;
- `tail`: the same, 40 times as large on a tenth of the prefixes;
- `stale`: one exact gradient step subtracted, to first order the policy before the trainer's last step;
- `support`: a top-p cut, so that the engine never samples what the trainer still finds possible;

each as strong as gives the k3 asked for: `rho - 1 - log rho`, expected over the tokens the engine visits. `support` comes in
steps, a token of a prefix at a time, and takes the nearest.

With `A` the reward (a fixed function of the completion: scores for its tokens and its pairs of neighbors) less its mean over
the engine's completions, as the mean of a large group would be, a completion contributes

    g = sum_t keep_t w_t A grad log pi(x_t | x_<t)

where `w` and `keep` are those of `trl_consistent.correct`; a trust region gives weight 0 as in the first step of an update,
where the current policy is the trainer's, and `m2/batch` looks at an infinite batch. The denominator is fixed: a rejected token contributes nothing
and is still counted, and `correction_normalize` is left out: both scale the step, which the cosine does not see. With `g*`
the gradient of the expected reward under `pi`, a cell of the table has three numbers:

- bias: `|E g - g*| / |g*|`, what no number of samples removes;
- variance: trace of the covariance of the mean of 512 completions, over `|g*|^2`;
- cosine between `E g` and `g*`, of the seeds that keep a completion, a dash where none does.

Median over 11 seeds of policy, reward and noise. Takes a quarter of a minute on one core; the figure needs matplotlib.
"""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trl_consistent import PRESETS, Correction, correct, mismatch_log_ratio, trust_region_mask
from trl_consistent.ratios import LEVELS


V, T = 4, 6
BATCH = 512
SEEDS = 11
KINDS = ("gaussian", "tail", "stale", "support")
K3 = (1e-4, 1e-3, 1e-2, 1e-1)

TOKENS = torch.cartesian_prod(*[torch.arange(V)] * T)
# Which row of the table each token of each completion is drawn from: prefixes in order of length, then as base-V numbers.
ROWS = torch.stack([(V**t - 1) // (V - 1) + torch.arange(V**T) // V ** (T - t) for t in range(T)], dim=1)
PREFIXES = (V**T - 1) // (V - 1)

CORRECTIONS = {
    **PRESETS,
    "token IS": Correction("token", "mask"),  # no bounds, so nothing is masked
    "prefix IS": Correction("prefix", "mask"),
    "sequence IS": Correction("sequence", "mask"),
}

# Without the bundles, which combine others: for the figure and the short table.
SINGLE = [name for name, correction in CORRECTIONS.items() if not correction.source.startswith("bundle")]


@dataclass(frozen=True)
class Effect:
    """What a correction makes of the gradient; see the module's docstring."""

    bias: float
    variance: float
    cosine: float


def completion_probs(table: Tensor) -> Tensor:
    """Probability of each completion under a table of log-probs."""
    return table[ROWS, TOKENS].sum(dim=1).exp()


def gradient(table: Tensor, coefficients: Tensor) -> Tensor:
    """`sum_x sum_t coefficients[x, t] grad log pi(x_t | x_<t)` with respect to the logits."""
    # d log pi(a | s) / d logits[s, b] = [a = b] - pi(b | s)
    visits = torch.zeros_like(table).index_put((ROWS, TOKENS), coefficients, accumulate=True)
    return visits - visits.sum(dim=1, keepdim=True) * table.exp()


def kept_of_infinite_batch(d: Tensor, probs: Tensor, bound: float) -> Tensor:
    """What the rule `m2/batch` keeps of infinitely many completions, drawn with `probs`."""
    squares, order = torch.where(probs[:, None] > 0, d.double().square(), math.inf).flatten().sort()
    shares = probs[:, None].expand(-1, T).flatten()[order]
    means = (shares * torch.where(shares > 0, squares, 0.0)).cumsum(0) / shares.cumsum(0)
    return d.square() < torch.where(means > bound, squares, math.inf).amin()


class World:
    """A trainer's policy, a reward, and engines that differ from it; a seed decides all."""

    def __init__(self, seed: int) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        generator = torch.Generator().manual_seed(seed)
        self.logits = normal(PREFIXES, V)
        self.pi = self.logits.log_softmax(dim=1)
        single, pair = normal(T, V), normal(V, V)
        self.reward = single[torch.arange(T), TOKENS].sum(dim=1) + pair[TOKENS[:, :-1], TOKENS[:, 1:]].sum(dim=1)
        probs = completion_probs(self.pi)
        advantages = self.reward - probs @ self.reward
        self.true_gradient = gradient(self.pi, (probs * advantages)[:, None].expand(-1, T))
        noise, outlier = normal(PREFIXES, V), torch.rand(PREFIXES, 1, generator=generator) < 0.1
        self.directions = {
            "gaussian": noise,
            "tail": torch.where(outlier, 4.0, 0.1) * noise,
            "stale": -self.true_gradient,
        }

    def engine(self, kind: str, strength: float) -> Tensor:
        """The engine's table of log-probs, -inf for what it never samples."""
        if kind != "support":
            return (self.logits + strength * self.directions[kind]).log_softmax(dim=1)
        likely, order = self.pi.sort(dim=1, descending=True)
        before = likely.exp().cumsum(dim=1) - likely.exp()
        cut = (before > 1 - strength) & (torch.arange(V) > 0)  # the likeliest token stays
        dropped = torch.zeros_like(cut).scatter(1, order, cut)
        return self.logits.masked_fill(dropped, -torch.inf).log_softmax(dim=1)

    def mean_k3(self, mu: Tensor) -> float:
        probs = completion_probs(mu)
        d = (self.pi - mu)[ROWS, TOKENS]
        # k3 = rho - 1 - log rho
        return (probs @ torch.where(probs[:, None] > 0, d.expm1() - d, 0.0)).mean().item()

    def engine_at(self, kind: str, k3: float) -> Tensor:
        """The engine whose k3 is the one given, by bisection of the logarithm of its strength."""
        low, high = -12.0, 6.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean_k3(self.engine(kind, 10**middle)) < k3 else (low, middle)
        return min((self.engine(kind, 10**x) for x in (low, high)), key=lambda mu: abs(self.mean_k3(mu) - k3))

    def effect(self, mu: Tensor, correction: Correction) -> Effect:
        """Bias, variance and direction of the corrected gradient when `mu` samples."""
        mask = torch.ones_like(TOKENS)
        sampling = mu[ROWS, TOKENS]
        d = mismatch_log_ratio(self.pi[ROWS, TOKENS], sampling, mask)
        probs = completion_probs(mu)
        advantages = (self.reward - probs @ self.reward)[:, None]
        by_row = tuple(rule for rule in correction.rejections if rule.level != "batch")
        result = correct(d, mask, replace(correction, rejections=by_row), sampling=sampling)
        keep = result.keep_mask
        for rule in set(correction.rejections) - set(by_row):
            keep = keep & kept_of_infinite_batch(d, probs, rule.upper)
        for region in correction.trust_regions:
            keep = keep & trust_region_mask(d + sampling, sampling, advantages, mask, region)
        coefficients = torch.where(keep, result.weights.double(), 0.0) * advantages
        expected = gradient(self.pi, probs[:, None] * coefficients)
        # |grad log pi(a | s)|^2 = 1 - 2 pi(a | s) + sum_b pi(b | s)^2, and the tokens of a completion share no logits
        squares = (1 - 2 * self.pi.exp() + self.pi.exp().square().sum(dim=1, keepdim=True))[ROWS, TOKENS]
        second_moment = probs @ (coefficients.square() * squares).sum(dim=1)
        true, size = self.true_gradient, self.true_gradient.norm()
        return Effect(
            bias=((expected - true).norm() / size).item(),
            variance=((second_moment - expected.square().sum()) / (BATCH * size**2)).item(),
            cosine=((expected * true).sum() / (expected.norm() * size)).item(),
        )


def effects(kind: str, k3: float) -> dict[str, Effect]:
    """Each correction's effect, the median over the seeds."""
    worlds = [World(seed) for seed in range(SEEDS)]
    engines = [world.engine_at(kind, k3) for world in worlds]

    def median(correction: Correction) -> Effect:
        seen = [world.effect(mu, correction) for world, mu in zip(worlds, engines, strict=True)]
        values = torch.tensor([[effect.bias, effect.variance, effect.cosine] for effect in seen])
        return Effect(*values.nanmedian(dim=0).values.tolist())

    return {name: median(correction) for name, correction in CORRECTIONS.items()}


def cell(effect: Effect) -> str:
    bias = "0" if effect.bias < 1e-6 else f"{effect.bias:.2g}"  # correct() works in float32
    cosine = "–" if math.isnan(effect.cosine) else f"{effect.cosine:.3f}"
    return f"{bias} / {effect.variance:.2g} / {cosine}"


def table(results: dict[tuple[str, float], dict[str, Effect]], k3: float, names: Iterable[str] = SINGLE) -> str:
    rows = [f"| k3 = {k3:g} | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for name in names:
        label = f"`{name}`" if name in PRESETS else name
        rows.append(f"| {label} | {' | '.join(cell(results[kind, k3][name]) for kind in KINDS)} |")
    return "\n".join(rows)


def draw(results: dict[tuple[str, float], dict[str, Effect]], path: Path) -> None:
    """Bias against k3 above, variance against bias at the largest k3 below, without the bundles; a color is a level, a
    dotted line unbounded."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("The figure needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"token": "tab:blue", "sequence": "tab:red", "geometric": "tab:green", "prefix": "tab:orange"}
    floor, ceiling = 3e-3, 10.0  # what is beyond them, exact ones among them, sits on the edge
    figure, axes = plt.subplots(2, len(KINDS), figsize=(13, 6.6), sharey="row", layout="constrained")
    for (above, below), kind in zip(axes.T, KINDS, strict=True):
        markers = {level: iter("os^vDP*X<>hdp") for level in LEVELS}
        for name in SINGLE:
            correction = CORRECTIONS[name]
            style = {
                "color": "black" if correction.action == "none" else colors.get(correction.level, "tab:purple"),
                "marker": next(markers[correction.level]),
                "markerfacecolor": "none",
                "linestyle": "-" if name in PRESETS else ":",
                "linewidth": 1.2,
                "label": name,
                "clip_on": False,
                "zorder": 3,
            }
            effect = results[kind, K3[-1]][name]
            above.loglog(K3, [max(results[kind, k3][name].bias, floor) for k3 in K3], **style)
            below.semilogy(effect.bias, min(max(effect.variance, floor), ceiling), **style)
            if effect.variance > ceiling:
                power = f"$10^{{{math.floor(math.log10(effect.variance))}}}$"
                place = {"xytext": (0, -8), "textcoords": "offset points", "rotation": 90, "ha": "center", "va": "top"}
                below.annotate(power, (effect.bias, ceiling), fontsize="small", **place)
        above.set(title=kind, xlabel="k3 per token", ylim=(floor, 2))
        below.set(xlabel=f"bias at k3 = {K3[-1]:g}", xlim=(0, 2), ylim=(floor, ceiling))
        for axis in (above, below):
            axis.grid(alpha=0.25)
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].text(K3[0], 1.2 * floor, "exact", color=colors["sequence"])
    axes[0, 0].set_ylabel("bias / true gradient")
    axes[1, 0].set_ylabel(f"variance of {BATCH} completions")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].partition(":")[0])
    parser.add_argument("--full", action="store_true", help="a table for each k3, not only for 0.01, and the bundles")
    parser.add_argument("-o", "--output", type=Path, metavar="PNG", help="draw the figure, too (needs matplotlib)")
    arguments = parser.parse_args(argv)
    results = {(kind, k3): effects(kind, k3) for kind in KINDS for k3 in K3}
    print(f"bias / variance of the mean of {BATCH} completions / cosine\n")
    if arguments.full:
        print("\n\n".join(table(results, k3, CORRECTIONS) for k3 in K3))
    else:
        print(table(results, 1e-2))
    if arguments.output:
        draw(results, arguments.output)


if __name__ == "__main__":
    main()
