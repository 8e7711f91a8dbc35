"""Correlation matrices and random walks as priors: terms of one or two predictors, whose sum is NumPyro's density."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform, OrderedTransform, StickBreakingTransform
from numpyro.infer.util import potential_energy

from numpyro_rvga.model.program import Program
from numpyro_rvga.results.log_densities import LogDensities

DATA = {"y": np.array([0.3, -0.2, 1.1, 0.4, 0.0], np.float64)}


def correlations(y):
    numpyro.sample("L", dist.LKJCholesky(4, 2.5))
    R = numpyro.sample("R", dist.LKJ(3, 1.0))
    numpyro.sample("y", dist.Normal(R[0, 1], 1.0), obs=y)


def learned_concentration(y):
    eta = numpyro.sample("eta", dist.Exponential(1.0))
    with numpyro.plate("groups", 2):
        L = numpyro.sample("L", dist.LKJCholesky(3, eta))
    numpyro.sample("y", dist.Normal(L[0, 1, 0], 1.0), obs=y)


def walk(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    s = numpyro.sample("s", dist.GaussianRandomWalk(scale, num_steps=6))
    with numpyro.plate("walks", 2):
        numpyro.sample("w", dist.GaussianRandomWalk(0.5, num_steps=3))
    numpyro.sample("y", dist.Normal(s[-1], 1.0), obs=y)


def cutpoints(y):
    normal = dist.Normal(jnp.arange(3.0), 2.0).expand([2, 3]).to_event(1)
    c = numpyro.sample("c", dist.TransformedDistribution(normal, OrderedTransform()))
    center = numpyro.sample("center", dist.Normal(0, 1))
    with numpyro.plate("groups", 2):
        normal = dist.MultivariateNormal(center * jnp.ones(3), 0.5 * jnp.eye(3) + 0.5)
        shares = numpyro.sample("shares", dist.TransformedDistribution(normal, StickBreakingTransform()))
        rate = numpyro.sample("rate", dist.LogNormal(center, 0.7))
        numpyro.sample("bounded", dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(1.0, 2.0)))
    numpyro.sample("y", dist.Normal(c[0, 1] + shares[1, 0] + rate[0], 1.0), obs=y)


def weighted(y):
    with handlers.scale(scale=0.3):
        numpyro.sample("s", dist.GaussianRandomWalk(1.0, num_steps=4))
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


@pytest.mark.parametrize("model", [correlations, learned_concentration, walk, weighted, cutpoints])
def test_the_terms_sum_to_numpyros_density_in_unconstrained_space(model):
    program = Program(model, DATA, {})
    theta = jnp.asarray(np.random.default_rng(0).normal(size=(3, program.layout.size)))
    expected = [-potential_energy(model, (), DATA, program.layout.unravel(at)) for at in theta]
    np.testing.assert_allclose(LogDensities(program).joint(theta, DATA), expected, rtol=2e-5)


@pytest.mark.parametrize(
    "model, shapes",
    [
        (correlations, {"L": (6, 1), "R": (3, 1)}),
        (learned_concentration, {"eta": (1, 1), "L": (6, 2)}),
        (walk, {"scale": (1, 1), "s": (6, 2)}),
        (cutpoints, {}),  # normal, all of it
    ],
)
def test_each_term_has_few_predictors(model, shapes):
    terms = Program(model, DATA, {}).prior.terms
    assert {t.site: (t.num_elements, t.num_predictors) for t in terms} == shapes
