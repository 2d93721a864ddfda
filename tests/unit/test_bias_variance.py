# SPDX-License-Identifier: Apache-2.0
"""The enumeration of scripts/bias_variance.py against theory, by backward induction over the prefixes instead.

Under any of the levels the expected gradient at a prefix `s` is `d(s) [c(a|s) Q(s,a) - pi(a|s) sum_b c(b|s) Q(s,b)]`: how
often `s` is reached, how often `a` is chosen there and what follows. A level decides whose each of the three is.
"""

import functools
import math
import sys

import pytest
import torch

from scripts import bias_variance as bv
from trl_consistent import Correction, Rejection


# At 0.1 some of the tail's ratios pass e^40, where `correct` saturates them.
ENGINES = [(kind, k3) for kind in bv.KINDS for k3 in bv.K3 if (kind, k3) != ("tail", 0.1)]
EXACT = [(kind, k3) for kind, k3 in ENGINES if kind != "support"]


@functools.cache
def worlds(kind, k3):
    """Three worlds and their engines."""
    return [(world, world.engine_at(kind, k3)) for world in map(bv.World, range(3))]


def induced(visited, chosen, followed, pi, advantages):
    """The expected gradient from three tables of (sub-)probabilities and the trainer's log-probs."""
    sizes = [4**t for t in range(6)]
    visited, chosen, followed, pi = (table.split(sizes) for table in (visited, chosen, followed, pi))
    values, rows = advantages, []
    q = []
    for t in reversed(range(6)):
        q.insert(0, values.reshape(-1, 4))
        values = (followed[t] * q[0]).sum(dim=1)
    reach = torch.ones(1, dtype=torch.float64)
    for t in range(6):
        total = (chosen[t] * q[t]).sum(dim=1, keepdim=True)
        rows.append(reach[:, None] * (chosen[t] * q[t] - pi[t].exp() * total))
        reach = (reach[:, None] * visited[t]).flatten()
    return torch.cat(rows)


def theory(world, mu, level):
    """What a level expects without bounds. Where the engine never goes (`mu` = 0), it has no say at any level."""
    engine, trainer = mu.exp(), torch.where(mu.isfinite(), world.pi.exp(), 0.0)
    # The baseline is the engine's mean, by induction too.
    mean = world.reward
    for rows in reversed(engine.split([4**t for t in range(6)])):
        mean = (mean.reshape(-1, 4) * rows).sum(dim=1)
    whose = {
        "none": (engine, engine, engine),
        "token IS": (engine, trainer, engine),
        "prefix IS": (trainer, trainer, engine),
        "sequence IS": (trainer, trainer, trainer),
    }[level]
    return induced(*whose, world.pi, world.reward - mean)


def bias_of(gradient, world):
    return ((gradient - world.true_gradient).norm() / world.true_gradient.norm()).item()


def test_the_true_gradient_is_autograd_s():
    for world, _ in worlds("gaussian", 1e-2):
        logits = world.logits.clone().requires_grad_()
        value = world.reward
        for rows in reversed(logits.softmax(dim=1).split([4**t for t in range(6)])):
            value = (value.reshape(-1, 4) * rows).sum(dim=1)
        (expected,) = torch.autograd.grad(value.sum(), logits)
        torch.testing.assert_close(world.true_gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("kind", "k3"), ENGINES)
@pytest.mark.parametrize("level", ["none", "token IS", "prefix IS", "sequence IS"])
def test_each_level_corrects_what_theory_says(kind, k3, level):
    for world, mu in worlds(kind, k3):
        effect, expected = world.effect(mu, bv.CORRECTIONS[level]), theory(world, mu, level)
        # the weights are float32, with log-ratios of a dozen nats
        assert effect.bias == pytest.approx(bias_of(expected, world), rel=1e-5, abs=1e-6)
        cosine = torch.nn.functional.cosine_similarity(expected.flatten(), world.true_gradient.flatten(), dim=0)
        assert effect.cosine == pytest.approx(cosine.item(), abs=1e-6)


@pytest.mark.parametrize(("kind", "k3"), EXACT)
def test_only_the_sequence_ratio_is_exact(kind, k3):
    for world, mu in worlds(kind, k3):
        assert world.effect(mu, bv.CORRECTIONS["sequence IS"]).bias < 1e-6
        # The prefix ratio leaves what follows to the engine: the reward is the whole completion's.
        assert world.effect(mu, bv.CORRECTIONS["prefix IS"]).bias > 1e-3


def test_no_ratio_reaches_what_the_engine_never_samples():
    for world, mu in worlds("support", 1e-2):
        # The sum over all completions is g*; what is missing is the sum over those that the engine cannot sample, and,
        # as the baseline's part no longer cancels, the baseline's.
        log_p, log_q = (table[bv.ROWS, bv.TOKENS].sum(dim=1) for table in (world.pi, mu))
        advantages = world.reward - log_q.exp() @ world.reward
        unreachable = torch.where(log_q == -math.inf, log_p.exp() * advantages, 0.0)
        onehot = torch.nn.functional.one_hot(bv.TOKENS, 4) - world.pi.exp()[bv.ROWS]
        missing = torch.zeros_like(world.pi).index_add(
            0, bv.ROWS.flatten(), (unreachable[:, None, None] * onehot).flatten(0, 1)
        )
        bias = missing.norm() / world.true_gradient.norm()
        assert bias > 0.1
        assert world.effect(mu, bv.CORRECTIONS["sequence IS"]).bias == pytest.approx(bias.item(), rel=1e-5)


def test_the_wider_the_ratio_the_smaller_the_bias_under_gaussian_noise():
    for world, mu in worlds("gaussian", 1e-2):
        none, token, prefix, sequence = (
            world.effect(mu, bv.CORRECTIONS[name]).bias for name in ("none", "token IS", "prefix IS", "sequence IS")
        )
        assert none > token > prefix > sequence


@pytest.mark.parametrize("kind", ["gaussian", "tail", "stale"])
@pytest.mark.parametrize("k3", [1e-3, 1e-2])
def test_a_geometric_filter_alone_removes_no_bias(kind, k3):
    # What it keeps has weight 1 and is still the engine's; what it drops is missing as well.
    for world, mu in worlds(kind, k3):
        naive, filtered = (world.effect(mu, bv.CORRECTIONS[name]) for name in ("none", "geo_mis"))
        assert filtered.bias > naive.bias and filtered.cosine < naive.cosine
        assert filtered.variance < naive.variance, "that is what it is for"


def test_a_rejected_completion_contributes_nothing():
    rule = Correction(rejections=(Rejection("geometric", 0.96, 1.1),))
    for world, mu in worlds("gaussian", 1e-2):
        log_p, log_q = (table[bv.ROWS, bv.TOKENS].sum(dim=1) for table in (world.pi, mu))
        ratio = ((log_p - log_q) / 6).exp()
        kept = (ratio >= 0.96) & (ratio <= 1.1)
        assert 0.1 < kept.double().mean() < 0.9
        advantages = torch.where(kept, world.reward - log_q.exp() @ world.reward, 0.0)
        expected = induced(mu.exp(), mu.exp(), mu.exp(), world.pi, advantages)
        assert world.effect(mu, rule).bias == pytest.approx(bias_of(expected, world), rel=1e-6)


def test_the_variance_is_that_of_the_dense_gradients():
    world, mu = worlds("tail", 1e-2)[0]
    log_p, log_q = (table[bv.ROWS, bv.TOKENS] for table in (world.pi, mu))
    probs = log_q.sum(dim=1).exp()
    advantages = world.reward - probs @ world.reward
    scale = (log_p - log_q).exp() * advantages[:, None]  # token IS
    onehot = torch.nn.functional.one_hot(bv.TOKENS, 4)
    expected, trace = theory(world, mu, "token IS"), 0.0
    for rows in torch.arange(4096).split(512):
        gradients = torch.zeros(len(rows), *world.pi.shape, dtype=torch.float64)
        terms = scale[rows, :, None] * (onehot[rows] - world.pi.exp()[bv.ROWS[rows]])
        gradients[torch.arange(len(rows))[:, None], bv.ROWS[rows]] = terms
        trace += probs[rows] @ (gradients - expected).square().sum(dim=(1, 2))
    variance = trace / 512 / world.true_gradient.square().sum()
    assert world.effect(mu, bv.CORRECTIONS["token IS"]).variance == pytest.approx(variance.item(), rel=1e-5)


@pytest.mark.parametrize("k3", bv.K3)
def test_engines_have_the_k3_they_were_asked_for(k3):
    for kind in bv.KINDS:
        for world, mu in worlds(kind, k3):
            p, q = (table[bv.ROWS, bv.TOKENS].sum(dim=1) for table in (world.pi, mu))
            # The expectation of -log rho over a completion is KL(mu || pi), and that of rho - 1 at a prefix is the mass
            # that the engine's tokens have under the trainer, less 1.
            kl = torch.where(q > -math.inf, q.exp() * (q - p), 0.0).sum()
            lost = torch.where(mu.isfinite(), 0.0, world.pi.exp()).sum(dim=1)[bv.ROWS].sum(dim=1)
            exact = (kl - q.exp() @ lost).item() / 6
            assert world.mean_k3(mu) == pytest.approx(exact, rel=1e-8, abs=1e-12)
            assert exact == pytest.approx(k3, rel=0.2 if kind == "support" else 1e-4), kind


def test_the_table_has_a_row_for_each_correction(capsys, monkeypatch):
    monkeypatch.setattr(bv, "SEEDS", 1)
    monkeypatch.setattr(bv, "K3", (1e-2,))
    bv.main([])
    header, _, *rows = capsys.readouterr().out.splitlines()[2:]
    assert header == "| k3 = 0.01 | gaussian | tail | stale | support |"
    assert [row.split(" | ")[0].strip("| `") for row in rows] == bv.SINGLE
    assert set(bv.CORRECTIONS) - set(bv.SINGLE) == {"dense", "moe", "fp8", "long_cot", "async"}
    assert set(bv.PRESETS) < set(bv.CORRECTIONS)
    assert rows[-1].split(" | ")[1].startswith("0 / ") and rows[-1].split(" | ")[1].endswith(" / 1.000")
    naive, geometric = (next(row for row in rows if row.startswith(f"| `{name}`")) for name in ("none", "geo_mis"))
    assert "–" not in naive and geometric.endswith("1 / 0 / – |"), "nothing kept has no direction"


def test_an_infinite_batch_keeps_what_a_large_one_keeps():
    # two completions with .9 and .1: squares .04 and 1 at all tokens; means .04, then .136
    d = torch.tensor([[0.2] * 6, [-1.0] * 6])
    probs = torch.tensor([0.9, 0.1], dtype=torch.float64)
    assert bv.kept_of_infinite_batch(d, probs, 0.13).tolist() == [[True] * 6, [False] * 6]
    assert bv.kept_of_infinite_batch(d, probs, 0.14).all()
    rare = torch.cat([d[:1].expand(9, -1), d[1:]])
    drawn = bv.correct(rare, torch.ones(10, 6), Correction(rejections=(Rejection("batch", None, 0.13, "m2"),)))
    assert drawn.keep_mask[:, 0].tolist() == [True] * 9 + [False]


def test_trust_regions_act_in_the_direction_of_the_advantage():
    world, mu = worlds("gaussian", 1e-1)[0]
    tv = next(region for region in bv.PRESETS["dppo_tv"].trust_regions)
    sampling, current = (table[bv.ROWS, bv.TOKENS].exp() for table in (mu, world.pi))
    advantages = (world.reward - bv.completion_probs(mu) @ world.reward)[:, None]
    stopped = ((current - sampling) * advantages.sign() > tv.bound).double()
    assert 0.005 < (bv.completion_probs(mu) @ stopped).mean() < 0.2
    # without what is stopped, by hand
    weights = torch.where(stopped > 0, 0.0, (current / sampling).clamp(max=20)) * advantages
    expected = bv.gradient(world.pi, bv.completion_probs(mu)[:, None] * weights)
    assert world.effect(mu, bv.PRESETS["dppo_tv"]).bias == pytest.approx(bias_of(expected, world), rel=1e-4)


def test_the_docs_have_the_table(capsys):
    bv.main([])
    table = "\n".join(capsys.readouterr().out.splitlines()[2:])
    page = bv.Path(bv.__file__).parent.parent / "docs" / "which-correction.md"
    assert table in page.read_text(), "run the script and paste"


def test_the_figure_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        bv.draw({}, tmp_path / "figure.png")


def test_the_figure_is_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(bv, "SEEDS", 1)
    monkeypatch.setattr(bv, "K3", (1e-2,))
    bv.main(["-o", str(tmp_path / "docs" / "figure.png")])
    assert (tmp_path / "docs" / "figure.png").stat().st_size > 10_000
