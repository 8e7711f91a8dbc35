"""FixedPointVI.conditions: gamma and its slope against closed forms and brute force, the verdicts, the figure."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import FixedPointVI
from numpyro_rvga.engines import curvature

MEANS, VARIANCES = np.linspace(-3.0, 3.0, 7), np.geomspace(0.05, 10.0, 6)
M, V = np.meshgrid(MEANS, VARIANCES, indexing="ij")
LIKELIHOODS = {
    "poisson": lambda u: dist.Poisson(jnp.exp(u)),
    "exponential": lambda u: dist.Exponential(jnp.exp(u)),
    "volatility": lambda u: dist.Normal(0.0, jnp.exp(u / 2)),
    "gaussian": lambda u: dist.Normal(u, 0.7),
    "logistic": lambda u: dist.Bernoulli(logits=u),
    "laplace": lambda u: dist.Laplace(u, 0.5),
    "asymmetric laplace": lambda u: dist.AsymmetricLaplace(u, 2.0, 1.0),
    "student": lambda u: dist.StudentT(4.0, u, 1.0),
}
OUTCOMES = {"logistic": [0, 1], "poisson": [0, 1, 4], "exponential": [0.2, 1.5]}


def model_of(kind):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[kind](X @ w), obs=y)

    return model


def data(kind, n=40):
    rng = np.random.default_rng(2)
    y = np.resize(OUTCOMES.get(kind, [-0.6, 0.3, 2.0]), n)
    return {"X": rng.normal(size=(n, 2)), "y": y}


def check(kind, **options):
    return FixedPointVI.conditions(model_of(kind), data(kind), means=MEANS, variances=VARIANCES, **options)


@pytest.fixture(scope="module")
def posterior():
    return FixedPointVI(model_of("logistic")).run(data("logistic"), progress_bar=False)


def outcomes(found, kind):
    """Of the densities looked at, as a column for grids."""
    return data(kind)["y"][found.rows][:, None, None]


def tilted(a, b):
    """E[exp(a + b u)] for u ~ N(m, v), and its derivative in v."""
    value = np.exp(a + b * M + b * b * V / 2)
    return value, b * b / 2 * value


def exponential_family(kind, y):
    """-phi'' is a multiple of exp(b u): 1, y and y for rates exp(u), and y^2 / 2 exp(-u) for a variance exp(u)."""
    b = -1.0 if kind == "volatility" else 1.0
    factor = {"poisson": np.ones_like(y), "volatility": y * y / 2}.get(kind, y)
    return tuple(factor * x for x in tilted(0.0, b))


@pytest.mark.parametrize("kind", ["poisson", "exponential", "volatility"])
def test_exponential_curvatures_have_closed_forms_and_increase(kind):
    result = check(kind)
    found = result.sites["y"]
    gamma, slope = exponential_family(kind, outcomes(found, kind))
    accuracy = 5e-6 if kind == "volatility" else 1e-10  # quadrature, or the closed form
    np.testing.assert_allclose(found.grid.gamma, np.broadcast_to(gamma, found.grid.gamma.shape), rtol=accuracy)
    np.testing.assert_allclose(found.grid.slope, np.broadcast_to(slope, found.grid.slope.shape), rtol=50 * accuracy)
    assert len(found.rows) == len(set(data(kind)["y"].tolist()))
    assert (result.positive, result.increasing, result.decreasing) == (True, True, False)
    assert "cycle of two" in result.verdict


@pytest.mark.parametrize("options", [{}, {"expectation": "quadrature"}, {"expectation": "sigma_points", "order": 1}])
def test_a_gaussian_curvature_is_constant(options):
    result = check("gaussian", **options)
    np.testing.assert_allclose(result.sites["y"].grid.gamma, 1 / 0.7**2, rtol=1e-6)
    assert result.positive and result.increasing and result.decreasing
    assert "2b hold" in result.verdict and "converges to the optimum." in result.verdict


def brute_force(negative_curvature, means, variances):
    """gamma and its slope in v by the trapezoidal rule; the slope by the score of N(m, v) in v."""
    z = np.linspace(-12.0, 12.0, 40_001)
    weights = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    values = negative_curvature(means[..., None] + np.sqrt(variances)[..., None] * z)
    return values @ weights, values @ (weights * (z * z - 1)) / (2 * variances)


def logistic_curvature(u):
    return 1 / (4 * np.cosh(u / 2) ** 2)


@pytest.mark.parametrize("expectation", ["exact", "quadrature"])
def test_a_logistic_curvature_rises_and_falls_where_brute_force_says(expectation):
    result = check("logistic", expectation=expectation)
    grid = result.sites["y"].grid
    gamma, slope = brute_force(logistic_curvature, M, V)
    np.testing.assert_allclose(grid.gamma, np.stack([gamma, gamma]), rtol=1e-5)
    np.testing.assert_array_equal(grid.direction, np.sign(np.stack([slope, slope])))
    assert {-1, 1} == set(grid.direction.ravel().tolist())
    assert (result.positive, result.increasing, result.decreasing) == (True, False, False)
    assert "no guarantee" in result.verdict and "never falls" in result.verdict


def test_near_the_center_a_logistic_curvature_falls():
    model, rows = model_of("logistic"), data("logistic")
    result = FixedPointVI.conditions(model, rows, means=[-1.0, 0.0, 1.0], variances=[0.1, 1.0])
    assert (result.positive, result.increasing, result.decreasing) == (True, False, True)
    assert "converges to the optimum." in result.verdict


@pytest.mark.parametrize("kind, height", [("laplace", 2 / 0.5), ("asymmetric laplace", 0.5 + 0.5)])
def test_a_kink_is_a_spike_of_curvature(kind, height):
    """phi'' is -height times a point mass at y, so gamma is height N(y; m, v), of which phi'' at nodes sees nothing."""
    result = check(kind)
    grid = result.sites["y"].grid
    residual_is_the_predictor = kind == "laplace"
    distance = M if residual_is_the_predictor else M - outcomes(result.sites["y"], kind)
    gamma = height * np.exp(-(distance**2) / (2 * V)) / np.sqrt(2 * np.pi * V)
    within_reach = np.broadcast_to(distance**2 < 6 * V, grid.gamma.shape)
    expected = np.broadcast_to(gamma, grid.gamma.shape)
    np.testing.assert_allclose(grid.gamma[within_reach], expected[within_reach], rtol=0.01)
    rises = distance**2 / V - 1
    clear = within_reach & (np.abs(rises) > 0.05)
    np.testing.assert_array_equal(grid.direction[clear], np.broadcast_to(np.sign(rises), clear.shape)[clear])
    assert result.positive and not result.increasing and not result.decreasing


def test_students_t_is_not_concave():
    result = check("student")
    grid, y = result.sites["y"].grid, outcomes(result.sites["y"], "student")

    def negative_curvature(u):
        r = (y[..., None] - u) ** 2
        return 5 * (4 - r) / (4 + r) ** 2

    np.testing.assert_allclose(grid.gamma, brute_force(negative_curvature, M, V)[0], atol=2e-5)
    assert not result.positive and "Condition 1 fails" in result.verdict


@pytest.mark.parametrize("chunk", [2**18, 2 * 7])
def test_rows_are_looked_at_where_the_posterior_puts_them(chunk, posterior, monkeypatch):
    monkeypatch.setattr(curvature, "CHUNK_NUMBERS", chunk)
    rows = data("logistic")
    at = check("logistic", posterior=posterior).sites["y"].posterior
    X, covariance = rows["X"], np.asarray(posterior.covariance)
    variances = np.einsum("np,pq,nq->n", X, covariance, X)
    np.testing.assert_allclose(at.means[:, 0], X @ np.asarray(posterior.mean), rtol=1e-10)
    np.testing.assert_allclose(at.variances[:, 0], variances, rtol=1e-10)
    gamma, slope = brute_force(logistic_curvature, at.means, at.variances)
    np.testing.assert_allclose(at.gamma, gamma, rtol=1e-6)
    np.testing.assert_array_equal(at.direction, np.sign(slope))


@pytest.mark.parametrize("kind, expected", [("poisson", (True, False)), ("gaussian", (True, True))])
def test_single_precision_makes_no_false_violations(kind, expected):
    with jax.enable_x64(False):
        found = FixedPointVI.conditions(model_of(kind), data(kind), expectation="quadrature")
        assert found.sites["y"].grid.gamma.dtype == np.float32
    assert found.positive and (found.increasing, found.decreasing) == expected


def test_points_at_which_gamma_overflows_are_left_out_and_counted():
    result = FixedPointVI.conditions(model_of("poisson"), data("poisson"), means=[0.0, 1.0], variances=[1.0, 2000.0])
    assert result.increasing and "not finite at 6 of 12 points" in str(result)


def softmax(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1], 3]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ w), obs=y)


def unknown_scale(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)


@pytest.mark.parametrize("model, y, concave", [(softmax, [0, 1, 2], True), (unknown_scale, [0.1, 1.0], False)])
def test_of_several_predictors_only_condition_1_is_judged(model, y, concave):
    rows = {"X": np.random.default_rng(0).normal(size=(6, 2)), "y": np.resize(y, 6)}
    result = FixedPointVI.conditions(model, rows, means=[-2.0, 2.0], variances=[0.1, 1.0])
    (found,) = result.sites.values()
    assert found.num_predictors > 1 and found.grid.positive == result.positive == concave
    assert found.grid.slope is None and found.grid.increasing is None and not result.increasing
    assert "Theorem 1 does not apply: site 'y' has" in result.verdict
    assert "condition 2a is not defined" in str(result)


def test_the_theorem_needs_a_gaussian_prior():
    def model(X, y=None):
        w = numpyro.sample("w", dist.StudentT(3.0, 0.0, 1.0))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(X[:, 0] * w)), obs=y)

    result = FixedPointVI.conditions(model, data("poisson"), means=MEANS, variances=VARIANCES)
    assert result.positive and result.increasing and "the prior is not Gaussian" in result.verdict


@pytest.mark.parametrize(
    "options, message",
    [
        ({"variances": [0.0, 1.0]}, "variances must be positive"),
        ({"means": [np.nan]}, "means must be"),
        ({"expectation": "hermite"}, "expectation must be one of"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FixedPointVI.conditions(model_of("poisson"), data("poisson"), **options)


def test_a_posterior_of_other_sites_is_refused(posterior):
    rows = {"X": np.ones((3, 2)), "y": np.arange(3)}
    with pytest.raises(ValueError, match="latent sites"):
        FixedPointVI.conditions(softmax, rows, posterior=posterior)


def test_the_map_shows_each_direction_and_each_row(posterior):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    result = check("logistic", posterior=posterior)
    ax = result.plot()
    mesh, dots = ax.collections
    areas = np.where(result.sites["y"].grid.direction[0].T > 0, 1, 2)
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(areas.shape), areas)
    assert len(dots.get_offsets()) == len(data("logistic")["y"])
    ax.figure.canvas.draw()
    assert result.plot(ax, site="y") is ax
    with pytest.raises(ValueError, match="site must be one of"):
        result.plot(site="z")
    plt.close(ax.figure)
