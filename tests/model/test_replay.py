"""Runs of a model that are evaluated again, beside the model itself."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from numpyro.infer.util import log_density

from numpyro_rvga import BONG, RVGA, FixedPointVI
from numpyro_rvga.model.bound.model_runs import Replay

DATA = {"x": np.linspace(-1, 1, 40), "y": np.linspace(-1, 2, 40) ** 2}


class Shifted(dist.Distribution):
    """A user's own, whose ``shift`` is no part of it as a pytree."""

    support = constraints.real

    def __init__(self, loc, shift):
        self.loc, self.shift = loc, shift
        super().__init__(batch_shape=jnp.shape(loc))

    def sample(self, key, sample_shape=()):
        return self.loc + self.shift + jax.random.normal(key, sample_shape + self.batch_shape)

    def log_prob(self, value):
        return -0.5 * (value - self.loc - self.shift) ** 2


@pytest.fixture
def count():
    return []


def line(count, outcome):
    def model(x, y=None):
        count.append(1)
        a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", outcome(a + b * x), obs=y)

    return model


@pytest.mark.parametrize("method, most", [(FixedPointVI, 4), (BONG, 4), (RVGA, 5)])
@pytest.mark.parametrize("scale", [1.0, None])
def test_a_fit_runs_the_models_code_a_few_times(count, method, most, scale):
    def hierarchical(x, y=None):  # whose prior's moments are those of draws
        count.append(1)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        a = numpyro.sample("a", dist.Normal(0, scale).expand([2]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(a[0] + a[1] * x, 1.0), obs=y)

    model = hierarchical if scale is None else line(count, lambda mean: dist.Normal(mean, scale))
    method(model).run(DATA, progress_bar=False)
    assert len(count) <= most


def test_a_density_that_the_package_makes_stable_is_no_reason_to_run_the_model_again(count):
    cutpoints = jnp.array([-1.0, 1.0])
    model = line(count, lambda mean: dist.OrderedLogistic(mean, cutpoints))
    RVGA(model).run({"x": DATA["x"], "y": np.arange(40) % 3}, progress_bar=False)
    assert len(count) <= 5


@pytest.mark.parametrize("outcome", [lambda mean: dist.StudentT(4.0, mean, 0.5), lambda mean: Shifted(mean, 0.3)])
def test_densities_are_the_models_own(count, outcome):
    model = line(count, outcome)
    program = RVGA(model).run(DATA, progress_bar=False).program
    for a, b in ((0.0, 0.0), (0.7, -1.3)):
        likelihood = jnp.sum(program.log_likelihood(jnp.array([a, b]), DATA)["y"])
        joint = log_density(model, (), DATA, {"a": a, "b": b})[0]
        np.testing.assert_allclose(likelihood + program.log_prior(jnp.array([a, b])), joint, rtol=1e-5)


def test_a_function_is_run_once_for_each_form_of_its_inputs():
    runs = []

    @Replay
    def function(x, more):
        runs.append(1)
        return {"double": 2 * x, "name": "sum", "total": x + more["y"]}

    for size in (2, 2, 3):
        result = function(jnp.ones(size), {"y": np.arange(size)})
        np.testing.assert_array_equal(result["total"], 1 + np.arange(size))
        assert result["name"] == "sum"
    assert len(runs) == 2


def test_an_entry_is_evaluated_without_the_others():
    """So that a model of many sites is not computed anew for each of them."""

    @Replay
    def function(x):
        return {"chain": jnp.sin(jnp.exp(x)), "site": dist.Normal(2 * x, 3.0), "name": "text"}

    jaxpr = jax.make_jaxpr(lambda x: function(x, entry="site"))(1.5)
    assert [equation.primitive.name for equation in jaxpr.eqns if equation.primitive.name in ("sin", "exp")] == []
    assert (function(1.5, entry="site").loc, function(1.5, entry="site").scale) == (3.0, 3.0)
    assert function(1.5, entry="name") == "text"
    np.testing.assert_allclose(function(1.5, entry="chain"), np.sin(np.exp(1.5)), rtol=1e-6)


def test_distributions_that_keep_numbers_of_the_data_apart_from_their_parameters_run():
    """The counts of a DirichletMultinomial are no leaves of it."""
    counts = np.random.default_rng(0).multinomial(30, [0.2, 0.3, 0.5], size=15)

    def model(counts, total=None):
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
        with numpyro.plate("sites", len(counts)):
            total = counts.sum(-1) if total is None else total
            numpyro.sample("counts", dist.DirichletMultinomial(20.0 * share, total), obs=counts)

    of_data, constant = (RVGA(model).run({"counts": counts}, progress_bar=False, **kw) for kw in ({}, {"total": 30}))
    assert of_data.info["rows"] == "independent"
    np.testing.assert_allclose(of_data.mean, constant.mean, atol=1e-6)
