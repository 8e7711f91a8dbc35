"""Prior terms of one form are compiled as one: with the same sums."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_rvga.core.updates.factors import evaluate
from numpyro_rvga.engines.engine import Engine
from numpyro_rvga.engines.linearized import factors_of, merged_by_form, prepare, sites_by_form
from numpyro_rvga.model import Program
from numpyro_rvga.options import Options


def model(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    scales = numpyro.sample("scales", dist.HalfNormal(jnp.array([0.5, 1.0, 3.0])).to_event(1))
    share = numpyro.sample("share", dist.Beta(2, 3))
    effects = numpyro.sample("effects", dist.Normal(0, scale).expand([4]).to_event(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, scales).to_event(1))
    for name, freedom, size in (("two", 4.0, 2), ("three", 4.0, 3), ("other", 5.0, 2)):
        numpyro.sample(name, dist.StudentT(freedom, 0.0, 2.0).expand([size]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ slopes + effects.sum() + share, 1), obs=y)


def test_sites_of_one_form_add_up_to_what_each_says_alone():
    rows = {"X": np.ones((3, 3)), "y": np.zeros(3)}
    program = Program(model, rows, {})
    engine = Engine(program, Options("implicit", "auto", "auto", None, 200, 64), jax.random.key(0))
    size, rng = program.layout.size, np.random.default_rng(0)
    theta, root = jnp.asarray(rng.normal(size=size)), jnp.asarray(0.3 * rng.normal(size=(size, size)))
    seen = [(terms, None) for terms in program.prior.terms]

    @jax.jit
    def both(theta, root):
        known = prepare(seen, jnp.zeros(size), {}, jnp.ones(1))
        forms = sites_by_form(seen, {})
        few, kinds = ([every[same[0]] for same in forms] for every in (seen, engine.prior_kinds))
        together = merged_by_form(forms, known)
        assert len(seen) == 8
        alike = [[seen[i][0].site for i in same] for same in forms]
        assert alike == [["effects", "slopes"], ["scale", "scales"], ["share"], ["two", "three"], ["other"]]
        apart = evaluate(engine.prior_kinds, factors_of(seen, known, theta), root)
        return apart, evaluate(kinds, factors_of(few, together, theta), root)

    for expected, found in zip(*both(theta, root)):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
