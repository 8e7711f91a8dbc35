"""The bound, maximized given the hyperparameters: for many rows, few nodes find q and many evaluate the bound there."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_rvga import FixedPointVI
from numpyro_rvga.engines import effort
from numpyro_rvga.engines.effort import Effort
from numpyro_rvga.engines.maximized_bound import MaximizedBound, SparseMaximizedBound
from numpyro_rvga.model.terms import sparsity

NUM_ROWS, NUM_GROUPS = 160, 32


def three_choices(group, x, y=None):
    """Two predictors in each row, of which the log-likelihood is no closed form."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    effect = numpyro.sample("effect", dist.Normal(0, scale).expand([NUM_GROUPS, 2]).to_event(2))
    with numpyro.plate("rows", len(x)):
        logits = jnp.pad(effect[group] + slope * x[:, None], ((0, 0), (1, 0)))
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def data():
    rng = np.random.default_rng(0)
    group, x = np.arange(NUM_ROWS) % NUM_GROUPS, rng.normal(size=NUM_ROWS)
    logits = np.c_[np.zeros(NUM_ROWS), rng.normal(size=(NUM_GROUPS, 2))[group] + np.array([1.0, -0.5]) * x[:, None]]
    y = np.array([rng.choice(3, p=np.exp(v) / np.exp(v).sum()) for v in logits])
    return {"group": group, "x": x, "y": y}


@pytest.fixture(scope="module")
def by_many():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Effort, "nodes_of_many_solves", lambda self, num_rows: "usual")
        return FixedPointVI(three_choices, integrate=["scale"]).run(data(), progress_bar=False)


@pytest.fixture
def made(monkeypatch):
    """The bounds that were made, of one kind or the other."""
    bounds = []
    for kind in (MaximizedBound, SparseMaximizedBound):
        begin = kind.__init__

        def recorded(self, *arguments, begin=begin):
            begin(self, *arguments)
            bounds.append(self)

        monkeypatch.setattr(kind, "__init__", recorded)
    return bounds


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("called_for", ["few", "corrected", "usual"])
def test_any_nodes_find_the_same(by_many, monkeypatch, made, called_for, is_packed):
    """The nodes that what few of them have left calls for, whichever these are."""
    for name in ("FEWEST_PARAMETERS", "FEWEST_IN_GROUPS", "FEWEST_IN_CHAIN") if is_packed else ():
        monkeypatch.setattr(sparsity, name, 1)
    tolerances = {"few": (np.inf, np.inf), "corrected": (-1.0, np.inf), "usual": (-1.0, -1.0)}[called_for]
    monkeypatch.setattr(effort, "RULES_TOLERANCE", tolerances[0])
    monkeypatch.setattr(effort, "CORRECTED_TOLERANCE", tolerances[1])
    monkeypatch.setattr(effort, "CORRECTED_SHARE", np.inf)
    found = FixedPointVI(three_choices, integrate=["scale"]).run(data(), progress_bar=False)
    assert [bound.nodes for bound in made] == ["few", called_for][: 1 + (called_for != "few")]
    assert {type(bound) for bound in made} == {SparseMaximizedBound if is_packed else MaximizedBound}
    np.testing.assert_allclose(found.elbo, by_many.elbo, atol=2e-3)
    deviation = by_many.gaussian.deviation()
    atol = 0.03 if called_for == "few" else 5e-3
    np.testing.assert_allclose((found.mean - by_many.mean) / deviation, 0, atol=atol)
    np.testing.assert_allclose(np.log(found.gaussian.deviation() / deviation), 0, atol=atol)


@pytest.mark.parametrize("is_packed", [True, False])
def test_impossible_states_of_equal_rows_leave_slopes_finite(monkeypatch, made, is_packed):
    """Their log probabilities are clamped, with a slope that the rows' weight must not make infinite."""
    for name in ("FEWEST_PARAMETERS", "FEWEST_IN_GROUPS", "FEWEST_IN_CHAIN") if is_packed else ():
        monkeypatch.setattr(sparsity, name, 1)

    def detections(site, y):
        p = numpyro.sample("p", dist.Uniform(0, 1))
        logit = numpyro.sample("logit", dist.Normal(0, 0.5).expand([6]).to_event(1))
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(logits=logit[site]), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Binomial(3, z * p), obs=y)

    counts = np.random.default_rng(0).multinomial(20, [0.6, 0.2, 0.12, 0.08], size=6)  # (site, y)
    data = {"site": np.repeat(np.arange(6), 20), "y": np.concatenate([np.repeat(np.arange(4), n) for n in counts])}
    found = FixedPointVI(detections, local="marginal", integrate=["p"]).run(data, progress_bar=False)
    assert {type(bound) for bound in made} == {SparseMaximizedBound if is_packed else MaximizedBound}

    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    share, p = special.expit(0.5 * nodes)[:, None, None], (np.arange(1000)[:, None] + 0.5) / 1000
    likelihood = share * stats.binom.pmf(np.arange(4), 3, p) + (1 - share) * (np.arange(4) == 0)  # (node, p, y)
    of_sites = np.einsum("n,npi->pi", weights / weights.sum(), np.exp(np.log(likelihood) @ counts.T))
    density = np.exp(np.log(of_sites).sum(1))
    density /= density.sum()
    mean = density @ p[:, 0]
    deviation = np.sqrt(density @ (p[:, 0] - mean) ** 2)
    draws = found.sample_posterior(jax.random.key(0), (20_000,))["p"]
    assert abs(np.mean(draws) - mean) < 0.05 * deviation
    assert abs(np.log(np.std(draws) / deviation)) < 0.05


def test_what_few_nodes_leave_is_the_natural_gradient_by_better_ones(monkeypatch):
    """Of a density that few nodes see wrongly, as one that oscillates within q, much is left."""

    def oscillating(x, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        a, b = numpyro.sample("a", dist.Normal(0, scale)), numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            u, v = a * x, b + 0.1 * x
            numpyro.factor("y", 0.02 * jnp.sin(4 * u) * jnp.cos(3 * v) - 0.001 * (u - y) ** 2)

    left, nodes_called_for = [], Effort.nodes_called_for

    def recorded(self, of_few, size):
        left.append(of_few)
        return nodes_called_for(self, of_few, size)

    monkeypatch.setattr(Effort, "nodes_called_for", recorded)
    x = np.random.default_rng(0).normal(size=NUM_ROWS)
    FixedPointVI(oscillating, integrate=["scale"]).run({"x": x, "y": x}, rng_key=jax.random.key(0), progress_bar=False)
    assert len(left) == 1 and left[0] > 1e-2
