"""The table of a posterior: against SciPy's distributions and draws by formulas of its own."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gaussian_posteriors import MEAN, ROOT, constrained, constrained_posterior, posterior_of
from scipy import stats
from scipy.special import expit

from numpyro_rvga import RVGA, Posterior
from numpyro_rvga.core.gaussians import DiagonalGaussian
from numpyro_rvga.core.gaussians.mixture import GaussianMixture
from numpyro_rvga.model import Program

COVARIANCE = ROOT @ ROOT.T
DATA = {"y": np.array([0.1, 0.4, -0.3])}
DIGITS = 0.00501  # half of the last that is printed


@pytest.fixture(scope="module")
def posterior():
    return constrained_posterior()


def printed(posterior, capsys, **options):
    """The columns by label."""
    posterior.print_summary(**options)
    _, *rows = capsys.readouterr().out.strip("\n").splitlines()
    return {line.split()[0]: np.array(line.split()[1:], float) for line in rows}


def figures(law, prob=0.9):
    """Of a distribution of SciPy's."""
    return [law.mean(), law.std(), law.median(), *law.ppf([(1 - prob) / 2, (1 + prob) / 2])]


def figures_of(draws, prob=0.9):
    return [draws.mean(), draws.std(), np.median(draws), *np.quantile(draws, [(1 - prob) / 2, (1 + prob) / 2])]


def test_summary_names_its_columns_and_the_entries_of_sites(posterior, capsys):
    posterior.print_summary(prob=0.8)
    header, *rows = capsys.readouterr().out.strip("\n").splitlines()
    assert header.split() == ["mean", "std", "median", "10.0%", "90.0%"]
    assert [row.split()[0] for row in rows] == ["shift[0]", "shift[1]", "share", "deviation"]


def test_summary_prints_the_moments_of_constrained_sites(posterior, capsys):
    found = printed(posterior, capsys, prob=0.8)
    sd = np.sqrt(np.diagonal(COVARIANCE))
    expected = {
        "shift[0]": stats.norm(MEAN[0], sd[0]),
        "shift[1]": stats.norm(MEAN[1], sd[1]),
        "deviation": stats.lognorm(sd[3], scale=np.exp(MEAN[3])),
    }
    for name, law in expected.items():
        np.testing.assert_allclose(found[name], figures(law, 0.8), atol=DIGITS, err_msg=name)
    share = expit(MEAN[2] + sd[2] * np.random.default_rng(0).normal(size=400_000))
    np.testing.assert_allclose(found["share"], figures_of(share, 0.8), atol=DIGITS + 0.003)


def test_summary_of_a_long_tail_has_its_moments(capsys):
    """Draws would miss much of the standard deviation: that of the square of a variable of long tails."""
    posterior = posterior_of(constrained, DATA, np.zeros(4), np.diag([1.0, 1.0, 1.0, 2.0]))
    np.testing.assert_allclose(printed(posterior, capsys)["deviation"], figures(stats.lognorm(2.0)), atol=DIGITS)


def test_summary_of_a_mixture_has_the_moments_of_its_components(capsys):
    components = np.array([[0.0, 0.0, -2.0, -1.0], [0.0, 0.0, 1.0, 0.5]])
    mixture = GaussianMixture(*map(jnp.asarray, (np.log([0.3, 0.7]), components, np.stack([0.4 * np.eye(4)] * 2))))
    posterior = Posterior(Program(constrained, DATA, {}), mixture, num_rows=3)
    found, rng = printed(posterior, capsys), np.random.default_rng(0)
    chosen = (rng.uniform(size=400_000) < 0.7).astype(int)
    for name, column, transform in (("share", 2, expit), ("deviation", 3, np.exp)):
        draws = transform(components[chosen, column] + 0.4 * rng.normal(size=len(chosen)))
        np.testing.assert_allclose(found[name], figures_of(draws), atol=DIGITS + 0.006, err_msg=name)


def test_summary_of_a_gamma_site_has_the_moments_of_its_family(capsys):
    def noise(y=None):
        precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(0.0, precision**-0.5), obs=y)

    posterior = RVGA(noise, family={"precision": "gamma"}).run(DATA, progress_bar=False)
    exact = stats.gamma(2 + 1.5, scale=1 / (1 + 0.5 * np.sum(DATA["y"] ** 2)))
    np.testing.assert_allclose(printed(posterior, capsys)["precision"], figures(exact), atol=DIGITS)


def bounded(y=None):
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    level = numpyro.sample("level", dist.Uniform(0.0, 1.0))
    below = numpyro.sample("below", dist.Uniform(0.0, level))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(below + shares[0], 1.0), obs=y)


def test_summary_of_shares_and_of_a_site_below_another_is_that_of_draws(capsys):
    mean, deviation = np.array([0.5, -0.2, 0.3, -0.4]), np.array([0.3, 0.4, 0.9, 1.2])
    found = printed(posterior_of(bounded, DATA, mean, np.diag(deviation)), capsys)
    theta = mean + deviation * np.random.default_rng(0).normal(size=(400_000, 4))
    sticks = expit(theta[:, :2] - np.log([2, 1]))
    shares = np.stack([sticks[:, 0], (1 - sticks[:, 0]) * sticks[:, 1], (1 - sticks).prod(axis=1)], axis=1)
    expected = {f"shares[{i}]": shares[:, i] for i in range(3)} | {"below": expit(theta[:, 2]) * expit(theta[:, 3])}
    for name, draws in expected.items():
        np.testing.assert_allclose(found[name], figures_of(draws), atol=DIGITS + 0.01, err_msg=name)


def test_summary_of_many_weights_is_that_of_their_normal_distributions(capsys):
    def network(X, y=None):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ weights[:2], 1.0), obs=y)

    size, rng = 20_000, np.random.default_rng(0)
    mean, deviation = rng.normal(size=size), rng.uniform(0.1, 2, size)
    program = Program(network, {"X": np.ones((2, 2)), "y": np.zeros(2)}, {})
    posterior = Posterior(program, DiagonalGaussian(mean, deviation**2), num_rows=2)
    found = np.stack(list(printed(posterior, capsys).values()), axis=1)
    ends = stats.norm(mean, deviation).ppf([[0.05], [0.95]])
    np.testing.assert_allclose(found, [mean, deviation, mean, *ends], atol=DIGITS)


def test_summary_is_the_same_every_time(posterior, capsys):
    posterior.print_summary()
    first = capsys.readouterr().out
    posterior.print_summary()
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("prob", [0, 1, 90])
def test_summary_refuses_what_is_no_probability(posterior, prob):
    with pytest.raises(ValueError, match="prob"):
        posterior.print_summary(prob)
