"""Scales whose prior is on the whole line, against the same models with priors on the positive half."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_rvga import RVGA, FixedPointVI, Posterior
from numpyro_rvga.model.half_lines import PositiveHalf

GROUPS = 3


def data_of(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    group = rng.integers(GROUPS, size=90)
    return {"group": group, "y": 0.5 + np.array([0.4, 1.0, 2.0])[group] * rng.normal(size=90)}


def of_rows(prior):
    def model(group, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        scale = numpyro.sample("scale", prior(1).expand([GROUPS]).to_event(1))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(mean, scale[group]), obs=y)

    return model


def coupled(prior):
    def model(group, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        with numpyro.plate("groups", GROUPS):
            scale = numpyro.sample("scale", prior(1))
        centered = y - y.mean()
        numpyro.sample("y", dist.Normal(mean, scale[group]).to_event(1), obs=centered)

    return model


def whole_line(scale):
    return dist.Normal(0, scale)


@pytest.mark.parametrize("method, form", [(RVGA, of_rows), (FixedPointVI, coupled)])
def test_scale_on_the_whole_line_is_taken_as_positive(method, form):
    expected = method(form(dist.HalfNormal)).run(data_of(), progress_bar=False)
    fit = method(form(whole_line))
    with pytest.warns(UserWarning, match="'scale' is negative"):
        found = fit.run(data_of(), progress_bar=False)
    np.testing.assert_allclose(found.mean, expected.mean, atol=2e-3)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-3)
    # Normal(0, 1) has half the density of HalfNormal(1)
    assert found.elbo == pytest.approx(expected.elbo - GROUPS * np.log(2), abs=2e-2)
    assert np.min(found.sample_posterior(jax.random.key(0), (50,))["scale"]) > 0
    again = fit.run(data_of(1), progress_bar=False)
    assert np.isfinite(again.elbo)


def test_it_is_integrated_out_as_one_with_a_prior_on_the_positive_half():
    def model(prior):
        def effects(group, y=None):
            scale = numpyro.sample("scale", prior(1))
            with numpyro.plate("groups", GROUPS):
                level = numpyro.sample("level", dist.Normal(0, scale))
            with numpyro.plate("rows", len(group)):
                numpyro.sample("y", dist.Normal(level[group], 1.0), obs=y)

        return effects

    expected = FixedPointVI(model(dist.HalfNormal), integrate="auto").run(data_of(), progress_bar=False)
    with pytest.warns(UserWarning, match="'scale' is negative"):
        found = FixedPointVI(model(whole_line), integrate="auto").run(data_of(), progress_bar=False)
    assert found.info["integrated"] == expected.info["integrated"]
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-2)


def test_a_stream_takes_it_as_positive_from_its_first_block_on():
    blocks = [data_of(seed) for seed in range(3)]
    expected = RVGA(of_rows(dist.HalfNormal)).run(iter(blocks), progress_bar=False)
    with pytest.warns(UserWarning, match="'scale' is negative"):
        found = RVGA(of_rows(whole_line)).run(iter(blocks), progress_bar=False)
    assert found.info["num_rows"] == 270
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-2)
    np.testing.assert_allclose(found.scale, expected.scale, atol=1e-2)


@pytest.mark.parametrize("form", [of_rows, coupled])
def test_a_stored_posterior_is_read_with_the_model_as_it_was_written(form, tmp_path):
    with pytest.warns(UserWarning, match="'scale' is negative"):
        posterior = FixedPointVI(form(whole_line)).run(data_of(), progress_bar=False)
    posterior.save(tmp_path / "posterior.npz")
    again = Posterior.load(tmp_path / "posterior.npz", form(whole_line))
    np.testing.assert_array_equal(again.median()["scale"], posterior.median()["scale"])


def test_a_density_that_has_no_value_on_either_half_is_refused():
    def model(group, y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(level, jnp.sqrt(-1 - level**2)), obs=y)

    with pytest.raises(ValueError, match="site 'y' gives row 0 a log-likelihood of nan"):
        FixedPointVI(model).run(data_of(), progress_bar=False)


def test_draws_are_those_of_the_truncated_distribution():
    draws = PositiveHalf(dist.Normal(jnp.array([0.0, -1.0]), 2.0)).sample(jax.random.key(0), (2000,))
    for column, mean in zip(np.asarray(draws).T, (0.0, -1.0)):
        truncated = stats.truncnorm(-mean / 2, np.inf, mean, 2)
        assert stats.kstest(column, truncated.cdf).pvalue > 1e-3
