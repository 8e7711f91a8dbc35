"""What stands for rows that a Gaussian has taken in, and how far that is from the rows themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.updates.factors import Factors, Kind, without_errors
from numpyro_rvga.core.updates.row_factors import absorbed_moments, row_factors_and_residuals, row_factors_of


def log_bilinear(mean, covariance, constants):
    """phi(u) = a . u - exp(b . u), in closed form."""
    a, b = constants
    rate = jnp.exp(b @ mean + 0.5 * b @ covariance @ b)
    return a @ mean - rate, a - rate * b, -rate * jnp.outer(b, b)


def at_mean(mean, _, constants):
    return log_bilinear(mean, jnp.zeros((2, 2)), constants)


KIND = Kind(without_errors(jax.vmap(log_bilinear)), at_mean, log_bilinear, True)


def setting(n=5, p=4, seed=0):
    rng = np.random.default_rng(seed)
    mean, root = rng.normal(size=p) / 2, np.linalg.cholesky(np.cov(rng.normal(size=(p, 12))))
    designs = rng.normal(size=(n, 2, p)) / 3
    constants = (rng.normal(size=(n, 2)), rng.normal(size=(n, 2)) / 2)
    factors = Factors(jnp.asarray(designs @ mean), jnp.asarray(designs), constants)
    return mean, root, designs, (factors,), (jnp.asarray(designs @ root),)


def made_anew(factors, predictor_scales):
    return row_factors_of((KIND,), factors, absorbed_moments((KIND,), factors, predictor_scales))


def divergence(precision, pull, other_precision, other_pull):
    """KL between Gaussians given by precision and precision times mean."""
    covariance, mean = np.linalg.inv(precision), np.linalg.solve(precision, pull)
    delta = mean - np.linalg.solve(other_precision, other_pull)
    logs = np.linalg.slogdet(precision)[1] - np.linalg.slogdet(other_precision)[1]
    return 0.5 * (np.trace(other_precision @ covariance) - len(mean) + delta @ other_precision @ delta + logs)


def test_a_site_has_the_expected_value_and_derivatives_of_its_factor():
    _, _, _, factors, predictor_scales = setting()
    (sites,) = made_anew(factors, predictor_scales)
    for i in range(5):
        mean, covariance = (
            np.asarray(factors[0].predictors[i]),
            np.asarray(predictor_scales[0][i] @ predictor_scales[0][i].T),
        )
        draws = np.random.default_rng(i).multivariate_normal(mean, covariance, size=400_000)
        a, b = (np.asarray(constant[i]) for constant in factors[0].constants)
        rates = np.exp(draws @ b)
        quadratic = sites.constant[i] + draws @ sites.linear[i]
        quadratic = quadratic - 0.5 * np.einsum("nc,cd,nd->n", draws, np.asarray(sites.precision[i]), draws)
        error = 4 * np.std(rates + quadratic) / np.sqrt(len(draws))
        np.testing.assert_allclose(np.mean(quadratic), np.mean(draws @ a - rates), atol=error)
        slopes = np.mean(a - rates[:, None] * b, axis=0)
        np.testing.assert_allclose(
            sites.linear[i] - sites.precision[i] @ mean, slopes, atol=4 * np.std(rates) * np.abs(b).max() / 600
        )


def test_a_site_made_anew_fits():
    _, _, _, factors, predictor_scales = setting()
    _, residuals = row_factors_and_residuals(
        (KIND,), factors, predictor_scales, absorbed_moments((KIND,), factors, predictor_scales)
    )
    np.testing.assert_allclose(residuals[0], 0.0, atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_a_misfit_is_how_far_q_would_move_towards_a_site_made_anew(seed):
    mean, root, designs, factors, predictor_scales = setting(seed=seed)
    (right,) = made_anew(factors, predictor_scales)
    rng = np.random.default_rng(10 + seed)
    (seen,) = absorbed_moments((KIND,), factors, predictor_scales)
    elsewhere = seen._replace(mean=seen.mean + rng.normal(size=(5, 2)), covariance=0.5 * seen.covariance)
    (wrong,), (found,) = row_factors_and_residuals((KIND,), factors, predictor_scales, (elsewhere,))
    for a, b in zip(wrong, row_factors_of((KIND,), factors, (elsewhere,))[0]):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    precision = np.linalg.inv(root @ root.T)
    step = 1e-4  # of two Gaussians a small step apart, the divergence is half its squared length
    for i in range(5):
        design = designs[i]
        change = design.T @ np.asarray(right.precision[i] - wrong.precision[i]) @ design
        pull = design.T @ np.asarray(right.linear[i] - wrong.linear[i])
        before = (precision, precision @ mean)
        after = (precision + step * change, precision @ mean + step * pull)
        both_ways = divergence(*before, *after) + divergence(*after, *before)
        np.testing.assert_allclose(found[i], np.sqrt(both_ways) / step, rtol=1e-2)
