"""The solver: monotone, stationary at its solution, and robust where undamped iterations diverge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.expectations import by_nodes as ex
from numpyro_rvga.core.expectations import closed_forms as cf
from numpyro_rvga.core.matrices.precisions import Dense
from numpyro_rvga.core.updates.drivers import StepParts, Steps, solve, solve_traced
from numpyro_rvga.core.updates.factors import Factors, Kind, without_errors
from numpyro_rvga.core.updates.maximize import init, solution
from numpyro_rvga.core.updates.objective import Coordinates, FactorSet, Objective
from numpyro_rvga.core.updates.search import Search, Settings, standard_base


def closed_kind(form):
    density = cf.DENSITIES[form]
    plugin = lambda m, s, c: ex.linearized(lambda u: density(u, c), m, s)  # noqa: E731
    return Kind(without_errors(jax.vmap(cf.EXACT[form])), plugin, cf.EXACT[form], form is not cf.GaussianLogScale)


def student_kind():
    density = lambda u, y: -2.0 * jnp.log1p((y - u[0]) ** 2 / 3)  # noqa: E731

    def expect(m, s, y):
        return ex.from_nodes(lambda u: density(u, y), m, s, *ex.hermite_rule(1, 80), 2)

    return Kind(
        without_errors(jax.vmap(expect)), lambda m, s, y: ex.linearized(lambda u: density(u, y), m, s), expect, False
    )


def problem(name, n=40, r=3, scale=2.0, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(n, r)) * scale)
    if name == "logistic":
        y = jnp.asarray(rng.integers(0, 2, n).astype(float))
        return closed_kind(cf.Logistic), x[:, None, :], cf.Logistic(y, jnp.ones(n), jnp.zeros(n), jnp.ones(n))
    if name == "separated logistic":
        y = jnp.asarray((np.asarray(x[:, 0]) > 0).astype(float))
        return closed_kind(cf.Logistic), 30 * x[:, None, :], cf.Logistic(y, jnp.ones(n), jnp.zeros(n), jnp.ones(n))
    if name == "poisson":
        y = jnp.asarray(rng.poisson(2.0, n).astype(float))
        return closed_kind(cf.Exponential), x[:, None, :], cf.Exponential(y, jnp.ones(n), jnp.zeros(n), jnp.ones(n))
    if name == "normal, unknown scale":
        design = jnp.zeros((n, 2, r)).at[:, 0, : r - 1].set(x[:, : r - 1]).at[:, 1, r - 1].set(3.0)
        y = 50 + x[:, 0] + jnp.asarray(rng.normal(size=n))
        return (
            closed_kind(cf.GaussianLogScale),
            design.at[:, 0, 0].set(100.0),
            cf.GaussianLogScale(y, jnp.zeros(n), jnp.ones(n)),
        )
    y = 3 * x[:, 0] + jnp.asarray(rng.standard_t(2, n))
    return student_kind(), x[:, None, :], y


NAMES = ["logistic", "separated logistic", "poisson", "normal, unknown scale", "student"]


FORM = Dense(None)


def objective_of(kind, design, constants, made_by=Objective):
    """The objective of factors that are affine in e."""
    rows = FactorSet((kind,), lambda _, e: (Factors(design @ e, design, constants),))
    return made_by((rows,), Coordinates(), staged=True)


def solved(objective, search, size, driver="host", precision=None):
    """By one of the two drivers, from the standard normal, or from another precision."""
    base, state = standard_base(jnp.float64), init(search, FORM, jnp.zeros(size), precision)
    if driver == "traced":
        return jax.jit(lambda: solve_traced(search, objective, base, FORM, state))()
    parts = StepParts(lambda search, problem: objective)
    steps = Steps(
        FORM,
        jax.jit(lambda state: parts.propose((), FORM, state, search=search)),
        jax.jit(lambda at, mean: parts.evaluate((), base, FORM, at, mean, search=search)),
        jax.jit(lambda at, found: parts.update((), FORM, at, found, search=search)),
    )
    return solution(search, FORM, solve(search, steps, state))


@functools.cache
def solution_of(name, max_iterations=200, driver="host", staged=True):
    """From the base, or (where that is hopelessly wide) from its mean."""
    kind, design, constants = problem(name)
    objective = objective_of(kind, design, constants)
    settings = Settings(1e-11, max_iterations)
    search = Search(settings, kind.concave, seek_scale=name != "logistic", staged=staged)
    return kind, design, constants, solved(objective, search, design.shape[-1], driver)


def bound_of(kind, design, constants, mean, root):
    """sum E[phi] - KL(N(mean, root root^T) || N(0, I)), written out densely."""
    spread = design @ root
    (values, _, _), _ = kind.expect(design @ mean, spread @ jnp.swapaxes(spread, 1, 2), constants)
    covariance = root @ root.T
    divergence = 0.5 * (jnp.trace(covariance) + mean @ mean - mean.size - jnp.linalg.slogdet(covariance)[1])
    return jnp.sum(values) - divergence


@pytest.mark.parametrize("driver", ["host", "traced"])
@pytest.mark.parametrize("name", NAMES)
def test_the_bounds_gradient_vanishes_at_the_solution(name, driver):
    kind, design, constants, found = solution_of(name, driver=driver)
    root = jnp.linalg.inv(found.root).T
    bound = jax.jit(jax.value_and_grad(lambda m, s: bound_of(kind, design, constants, m, s), (0, 1)))
    value, gradients = bound(found.mean, root)
    assert found.converged
    np.testing.assert_allclose(found.bound, value, rtol=1e-9)
    in_deviations = (root.T @ gradients[0], root.T @ gradients[1])
    assert max(float(jnp.max(jnp.abs(g))) for g in in_deviations) < 2e-4


@pytest.mark.parametrize("name", NAMES)
def test_more_iterations_never_lower_the_bound(name):
    bounds = np.array([float(solution_of(name, k)[3].bound) for k in (0, 1, 4)])
    assert np.all(np.diff(bounds) >= -1e-9 * np.abs(bounds[1:]))
    assert bounds[-1] > bounds[0]


@pytest.mark.parametrize("name", NAMES)
def test_no_gaussian_nearby_has_a_higher_bound(name):
    kind, design, constants, found = solution_of(name)
    root = jnp.linalg.inv(found.root).T
    rng = np.random.default_rng(1)
    bound = jax.jit(lambda m, s: bound_of(kind, design, constants, m, s))
    for _ in range(10):
        step = jnp.asarray(rng.normal(size=found.mean.shape) * 0.05)
        stretch = jnp.eye(root.shape[0]) + 0.05 * jnp.asarray(rng.normal(size=root.shape))
        assert bound(found.mean + root @ step, root @ stretch) < found.bound


def test_solving_for_the_mean_after_each_covariance_saves_iterations():
    both_at_once, in_turn = (solution_of("separated logistic", staged=staged)[3] for staged in (False, True))
    np.testing.assert_allclose(in_turn.bound, both_at_once.bound, rtol=1e-9)
    assert int(in_turn.iterations) <= 0.5 * int(both_at_once.iterations)


@pytest.mark.parametrize(
    "design", [[[10.0, 0.0]], [[9.0, 8.0], [1.0, -1.0]]], ids=["one row", "a precision that is singular in doubles"]
)
@pytest.mark.parametrize("seek_scale", [False, True], ids=["the base", "its mean"])
@pytest.mark.parametrize("driver", ["host", "traced"])
def test_far_too_wide_starts_are_left_in_a_few_steps(design, seek_scale, driver):
    """E[exp] and its curvature are e^50 and e^72 there."""
    design, n = jnp.asarray(design)[:, None], len(design)
    constants = cf.Exponential(jnp.zeros(n), jnp.ones(n), jnp.zeros(n), jnp.ones(n))
    objective = objective_of(closed_kind(cf.Exponential), design, constants)
    found = solved(objective, Search(Settings(1e-11, 100), True, seek_scale=seek_scale, staged=True), 2, driver)
    assert found.converged and int(found.iterations) < 40


def test_gaussian_factors_are_solved_exactly():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)), rng.normal(size=20)
    constants = cf.Gaussian(jnp.asarray(y), jnp.full(20, 0.7), jnp.zeros(20), jnp.ones(20))
    design = jnp.asarray(x)[:, None, :]
    kind = closed_kind(cf.Gaussian)
    objective = objective_of(kind, design, constants)
    found = solved(objective, Search(Settings(1e-12, 50), True, staged=True), 4)
    precision = np.eye(4) + x.T @ x / 0.49
    np.testing.assert_allclose(found.root @ found.root.T, precision, rtol=1e-12)
    np.testing.assert_allclose(found.mean, np.linalg.solve(precision, x.T @ y / 0.49), rtol=1e-11)
    evidence = -0.5 * (
        y @ np.linalg.solve(0.49 * np.eye(20) + x @ x.T, y) + np.linalg.slogdet(0.49 * np.eye(20) + x @ x.T)[1]
    )
    np.testing.assert_allclose(found.bound, evidence - 10 * np.log(2 * np.pi), rtol=1e-12)
    assert int(found.iterations) <= 2  # one for the covariance, one for the mean


@pytest.mark.parametrize("driver", ["host", "traced"])
def test_a_start_with_the_right_covariance_needs_no_step(driver):
    """The mean is solved for there. How near the start is says nothing of the tolerance."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)), rng.normal(size=20)
    constants = cf.Gaussian(jnp.asarray(y), jnp.full(20, 0.7), jnp.zeros(20), jnp.ones(20))
    design = jnp.asarray(x)[:, None, :]
    objective = objective_of(closed_kind(cf.Gaussian), design, constants)
    precision = np.eye(4) + x.T @ x / 0.49
    search = Search(Settings(1e-12, 50, rtol=None), True, staged=True)
    found = solved(objective, search, 4, driver, jnp.asarray(precision))
    assert found.converged and int(found.iterations) == 0
    np.testing.assert_allclose(found.mean, np.linalg.solve(precision, x.T @ y / 0.49), rtol=1e-11)


@pytest.mark.parametrize("driver", ["host", "traced"])
def test_a_search_ends_where_errors_of_the_expectations_hide_what_a_step_would_gain(driver):
    """Otherwise steps are halved until they are none, and begin again."""
    kind, design, constants, exact = solution_of("student")

    class Noisy(Objective):
        def expect(self, mean, covariances):
            expected = super().expect(mean, covariances)
            return expected._replace(value=expected.value + 1e-9 * jnp.sin(1e12 * jnp.sum(mean)))

    objective = objective_of(kind, design, constants, Noisy)
    search = Search(Settings(1e-25, 200), False, seek_scale=True, staged=True)
    found = solved(objective, search, design.shape[-1], driver)
    assert int(found.iterations) < 100
    np.testing.assert_allclose(found.bound, exact.bound, rtol=1e-9)


@pytest.mark.parametrize("driver", ["host", "traced"])
def test_the_mean_is_solved_for_where_rounding_of_the_bound_hides_its_steps(driver):
    """Otherwise a Newton step that the bound does not show is shortened until it is none, at an evaluation each."""
    kind, design, constants, exact = solution_of("logistic")
    search = Search(Settings(1e-12, 200, rtol=None), True, staged=True)

    def count(constant):
        evaluations = []

        class Shifted(Objective):
            def expect(self, mean, covariances):
                jax.debug.callback(lambda: evaluations.append(1))
                expected = super().expect(mean, covariances)
                return expected._replace(value=expected.value + constant)

        objective = objective_of(kind, design, constants, Shifted)
        found = solved(objective, search, design.shape[-1], driver)
        jax.effects_barrier()
        np.testing.assert_allclose(found.mean, exact.mean, rtol=1e-6)
        return len(evaluations)

    assert count(1e10) <= count(0.0)  # its last digit is 2e-6 nats
