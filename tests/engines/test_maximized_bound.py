"""The bound, maximized given the hyperparameters: for many rows, few nodes find q and many evaluate the bound there."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import FixedPointVI
from numpyro_rvga.engines.effort import Effort
from numpyro_rvga.engines.maximized_bound import MaximizedBound

NUM_ROWS = 160


def three_choices(group, x, y=None):
    """Two predictors in each row, of which the log-likelihood is no closed form."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    effect = numpyro.sample("effect", dist.Normal(0, scale).expand([8, 2]).to_event(2))
    with numpyro.plate("rows", len(x)):
        logits = jnp.pad(effect[group] + slope * x[:, None], ((0, 0), (1, 0)))
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def data():
    rng = np.random.default_rng(0)
    group, x = np.arange(NUM_ROWS) % 8, rng.normal(size=NUM_ROWS)
    logits = np.c_[np.zeros(NUM_ROWS), rng.normal(size=(8, 2))[group] + np.array([1.0, -0.5]) * x[:, None]]
    y = np.array([rng.choice(3, p=np.exp(v) / np.exp(v).sum()) for v in logits])
    return {"group": group, "x": x, "y": y}


@pytest.fixture(scope="module")
def by_many():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Effort, "many_solves_take_few_nodes", lambda self, num_rows: False)
        return FixedPointVI(three_choices, integrate=["scale"]).run(data(), progress_bar=False)


def solves(monkeypatch, name):
    """Whether a bound was by few nodes, at each call of one of its methods."""
    called, method = [], getattr(MaximizedBound, name)

    def recorded(self, *arguments):
        called.append(self.by_few_nodes)
        return method(self, *arguments)

    monkeypatch.setattr(MaximizedBound, name, recorded)
    return called


def test_few_nodes_find_what_many_find(by_many, monkeypatch):
    checked, evaluated = solves(monkeypatch, "few_nodes_suffice"), solves(monkeypatch, "_by_many_nodes")
    found = FixedPointVI(three_choices, integrate=["scale"]).run(data(), progress_bar=False)
    assert checked == [True] and evaluated[0] is True
    np.testing.assert_allclose(found.elbo, by_many.elbo, atol=2e-3)
    deviation = by_many.gaussian.deviation()
    np.testing.assert_allclose((found.mean - by_many.mean) / deviation, 0, atol=0.03)
    np.testing.assert_allclose(np.log(found.gaussian.deviation() / deviation), 0, atol=0.02)


def test_many_nodes_are_taken_where_few_do_not_suffice(by_many, monkeypatch):
    monkeypatch.setattr(MaximizedBound, "few_nodes_suffice", lambda self, *at: False)
    found = FixedPointVI(three_choices, integrate=["scale"]).run(data(), progress_bar=False)
    np.testing.assert_allclose(found.elbo, by_many.elbo, atol=1e-6)
    np.testing.assert_allclose(found.mean, by_many.mean, atol=1e-5)


def test_what_few_nodes_leave_is_the_natural_gradient_by_better_ones(monkeypatch):
    """Of a density that few nodes see wrongly, as one that oscillates within q, much is left."""

    def oscillating(x, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        a, b = numpyro.sample("a", dist.Normal(0, scale)), numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            u, v = a * x, b + 0.1 * x
            numpyro.factor("y", 0.02 * jnp.sin(4 * u) * jnp.cos(3 * v) - 0.001 * (u - y) ** 2)

    left = []
    original = MaximizedBound.few_nodes_suffice

    def recorded(self, params, chunks, start):
        left.append(float(self._left(params, chunks, start)))
        return original(self, params, chunks, start)

    monkeypatch.setattr(MaximizedBound, "few_nodes_suffice", recorded)
    x = np.random.default_rng(0).normal(size=NUM_ROWS)
    FixedPointVI(oscillating, integrate=["scale"]).run({"x": x, "y": x}, rng_key=jax.random.key(0), progress_bar=False)
    assert len(left) == 1 and left[0] > 1e-2
