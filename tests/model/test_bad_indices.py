"""Group codes that are no indices are named, with what to do; arrays that only look so are left alone."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_methods import shared

from numpyro_rvga import BONG, RVGA, FixedPointVI

RNG = np.random.default_rng(4)
CODES = RNG.integers(0, 4, 40)
Y = RNG.normal(size=40)


def grouped(g, y=None):
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", g.shape[0]):
        numpyro.sample("y", dist.Normal(a[g], 1.0), obs=y)


def grouped_around_their_mean(g, y):
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", g.shape[0]):
        numpyro.sample("y", dist.Normal(a[g], 1.0), obs=y - jnp.mean(y))


def with_covariates(x, g, y):
    """Whole numbers as floats and a column, which are no indices here."""
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(a[g] + x @ b, 1.0), obs=y)


def run(method, model, data):
    return shared(method, model).run(data, progress_bar=False)


@pytest.mark.parametrize("model", [grouped, grouped_around_their_mean])
@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize(
    "codes, message, remedy",
    [
        (CODES.astype(float), r"by data array 'g', which has dtype float.*g\.astype\(int\)", lambda g: g.astype(int)),
        (CODES + 0.5, r"'g'.*row 0 holds \d\.5.*np\.unique", lambda g: np.unique(g, return_inverse=True)[1]),
        (CODES[:, None], r"'g' has shape \(40, 1\).*'y'.*g\[:, 0\]", lambda g: g[:, 0]),
        (CODES[:, None] * 1.0, r"'g'.*dtype float.*g\[:, 0\]\.astype\(int\)", lambda g: g[:, 0].astype(int)),
    ],
)
def test_codes_that_are_no_indices_are_named_with_a_remedy_that_works(method, model, codes, message, remedy):
    with pytest.raises(ValueError, match=message):
        run(method, model, {"g": codes, "y": Y})
    fitted, expected = (run(method, model, {"g": g, "y": Y}) for g in (remedy(codes), CODES))
    np.testing.assert_allclose(fitted.mean, expected.mean, atol=1e-5)


@pytest.mark.parametrize("codes", [CODES.astype(float), CODES[:, None]])
def test_streams_name_them_too(codes):
    with pytest.raises(ValueError, match="data array 'g'"):
        run(RVGA, grouped, ({"g": codes[i : i + 20], "y": Y[i : i + 20]} for i in (0, 20)))
    with pytest.raises(ValueError, match="data array 'g'"):
        run(BONG, grouped, {"g": codes, "y": Y})


def test_the_array_that_is_the_index_is_named_and_not_a_covariate():
    x = np.arange(40.0)[:, None] % 3
    with pytest.raises(ValueError, match="by data array 'g'"):
        run(RVGA, with_covariates, {"x": x, "g": CODES.astype(float), "y": Y})
    with pytest.raises(ValueError, match="data array 'g' has shape"):
        run(RVGA, with_covariates, {"x": x, "g": CODES[:, None], "y": Y})
    assert run(RVGA, with_covariates, {"x": x, "g": CODES, "y": Y}).num_rows == 40


@pytest.mark.parametrize("model", [grouped, grouped_around_their_mean])
@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize("code", [4, -5])
def test_indices_of_nothing_are_named_with_array_and_row(method, model, code):
    codes = np.where(np.arange(40) == 7, code, CODES)
    with pytest.raises(ValueError, match=f"row 7 .*'g' holds {code}.* has 4 entries, 0 to 3"):
        run(method, model, {"g": codes, "y": Y})


def test_large_numbers_that_index_nothing_are_left_alone():
    def counts(g, y):
        rates = numpyro.sample("rates", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        numpyro.deterministic("mean", jnp.mean(y))
        with numpyro.plate("rows", g.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(rates[g] + jnp.log(jnp.mean(y)))), obs=y)

    posterior = run(RVGA, counts, {"g": CODES, "y": RNG.poisson(9.0, 40)})
    assert posterior.info["rows"] == "joint"
