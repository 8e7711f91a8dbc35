"""Searches begin with few nodes, and end there where these suffice: where that is, and what it saves."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import numpy as jnp
from scipy.optimize import curve_fit

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.engines.engine import Engine
from numpyro_rvga.engines.joint_solver import JointSolver
from numpyro_rvga.families import full


def bounded_scale(x, y=None):
    """A scale of uniform prior: no closed form."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.Uniform(0, 10))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + slope * x, scale), obs=y)


def process(x, y=None):
    """One factor of all rows."""
    length = numpyro.sample("length", dist.LogNormal(0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0, 0.5))
    kernel = variance * jnp.exp(-0.5 * (x[:, None] - x) ** 2 / length**2) + 0.1 * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), kernel), obs=y)


def data(count):
    rng = np.random.default_rng(0)
    x = np.linspace(-2, 2, count)
    return {"x": x, "y": np.sin(2 * x) + 0.3 * rng.normal(size=count)}


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("model, count", [(bounded_scale, 300), (process, 6)])
def test_few_steps_are_left_for_many_nodes_and_they_end_where_all_of_them_would(model, count, double, monkeypatch):
    with jax.enable_x64(double):
        made = evaluations(monkeypatch)
        found = FixedPointVI(model).run(data(count), progress_bar=False)
        steps_by_many = len(found.info["bounds"]) if not all(made) else 0
        monkeypatch.setattr(Engine, "_coarse", lambda self, search, problem: (problem, None))
        by_many = FixedPointVI(model).run(data(count), progress_bar=False)
    assert found.info["converged"] and steps_by_many < min(8, len(by_many.info["bounds"]))
    deviation = np.sqrt(np.diagonal(by_many.covariance))
    np.testing.assert_allclose((found.mean - by_many.mean) / deviation, 0, atol=2e-3)
    np.testing.assert_allclose(found.elbo, by_many.elbo, atol=1e-5 if double else 2e-3)
    assert np.all(np.diff(found.info["bounds"]) > -1e-4)


@pytest.mark.parametrize(
    "model, count, is_little", [(bounded_scale, 20, True), (bounded_scale, 200, False), (process, 6, False)]
)
def test_evaluations_that_are_little_work_are_compiled_quickly(model, count, is_little, monkeypatch):
    """And others well: one factor of all rows may be any amount of work."""
    chosen = []

    def steps(self, search, problem, start, coarse=None):
        chosen.append(self._is_little_work(search, problem))
        raise InterruptedError

    monkeypatch.setattr(JointSolver, "_steps", steps)
    with pytest.raises(InterruptedError):
        FixedPointVI(model).run(data(count), progress_bar=False)
    assert chosen == [is_little]


def evaluations(monkeypatch):
    """Filled as they are made: whether by few nodes."""
    made, steps = [], JointSolver._steps

    def seen(self, search, problem, start, coarse=None):
        found = steps(self, search, problem, start, coarse)

        def evaluate(*arguments):
            made.append(coarse is not None)
            return found.evaluate(*arguments)

        return found._replace(evaluate=evaluate)

    monkeypatch.setattr(JointSolver, "_steps", seen)
    return made


def test_where_few_nodes_suffice_no_others_are_compiled(monkeypatch):
    compiled = evaluations(monkeypatch)
    narrow = FixedPointVI(bounded_scale).run(data(400), progress_bar=False)
    assert compiled and all(compiled) and 0 < narrow.info["elbo_error"] < 1e-3


GROUPS = np.repeat(np.arange(12), 25)


def effects(group, y=None):
    """Rows of three predictors, whose values few nodes find less exactly than q."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([12]).to_event(1))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + scale * z[group]), obs=y)


def bound_of_effects(mean, covariance, y):
    """By 30 nodes along each predictor of a group, with theta = (intercept, log scale, z)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    noise = np.stack([x.ravel() for x in np.meshgrid(nodes, nodes, nodes)])
    weights = np.einsum("i,j,k->ijk", weights, weights, weights).ravel() / weights.sum() ** 3
    value = 0.0
    for group in range(12):
        among = [0, 1, 2 + group]
        at = mean[among, None] + np.linalg.cholesky(covariance[np.ix_(among, among)]) @ noise
        logits = at[0] + np.exp(at[1]) * at[2]
        successes, total = y[group == GROUPS].sum(), np.sum(group == GROUPS)
        value += weights @ (successes * logits - total * np.logaddexp(0, logits))
    second = mean**2 + np.diag(covariance)
    prior = -0.5 * second[0] / 4 - np.log(2) - 0.5 * np.log(2 * np.pi)
    prior += 0.5 * np.log(2 / np.pi) + mean[1] - 0.5 * np.exp(2 * mean[1] + 2 * covariance[1, 1])
    prior += -0.5 * second[2:].sum() - 6 * np.log(2 * np.pi)
    entropy = 0.5 * np.linalg.slogdet(covariance)[1] + 7 * (1 + np.log(2 * np.pi))
    return value + prior + entropy


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_where_few_nodes_find_q_the_bound_there_is_by_many(method, monkeypatch):
    rng = np.random.default_rng(0)
    y = rng.binomial(1, 1 / (1 + np.exp(-rng.normal(size=12)[GROUPS])))
    with jax.enable_x64(True):
        made = evaluations(monkeypatch)
        found = method(effects).run({"group": GROUPS, "y": y}, progress_bar=False)
        assert made and all(made) and found.info["converged"] and 0 < found.info["elbo_error"] < 1e-3
        monkeypatch.setattr(Engine, "_coarse", lambda self, search, problem: (problem, None))
        by_many = method(effects).run({"group": GROUPS, "y": y}, progress_bar=False)
    bound, best = (bound_of_effects(q.mean, q.covariance, y) for q in (found, by_many))
    np.testing.assert_allclose(found.elbo, bound, atol=1e-4)
    assert best - 1e-4 < bound < best + 1e-6


def crossed(row, column, y=None):
    """Rows of five predictors."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
    a = numpyro.sample("a", dist.Normal(0, 1).expand([10]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([15]).to_event(1))
    with numpyro.plate("rows", len(row)):
        rate = jnp.exp(intercept + scales[0] * a[row] + scales[1] * b[column])
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.parametrize("count", [200, 1500])
def test_where_few_nodes_of_many_predictors_find_q_no_others_are_compiled(count, monkeypatch):
    """The bound's error is estimated from all of so many rows, or from some of them."""
    rng = np.random.default_rng(0)
    row, column = rng.integers(0, 10, count), rng.integers(0, 15, count)
    y = rng.poisson(np.exp(0.5 * rng.normal(size=10)[row] + 0.3 * rng.normal(size=15)[column]))
    known = {"row": row, "column": column, "y": y}
    made = evaluations(monkeypatch)
    found = FixedPointVI(crossed).run(known, progress_bar=False)
    assert made and all(made) and found.info["converged"]
    monkeypatch.setattr(Engine, "_coarse", lambda self, search, problem: (problem, None))
    by_many = FixedPointVI(crossed, num_samples=2048).run(known, progress_bar=False)
    deviation = np.sqrt(np.diagonal(by_many.covariance))
    np.testing.assert_allclose((found.mean - by_many.mean) / deviation, 0, atol=0.02)
    np.testing.assert_allclose(np.sqrt(np.diagonal(found.covariance)), deviation, rtol=0.02)
    np.testing.assert_allclose(found.elbo, by_many.elbo, atol=found.info["elbo_error"] + by_many.info["elbo_error"])


def test_where_few_nodes_are_off_by_more_than_hardly_many_go_on(monkeypatch):
    """Two outcomes for each of twelve groups: z and the scale stay wide."""
    made = evaluations(monkeypatch)
    y = np.random.default_rng(0).binomial(1, 0.5 + 0.45 * np.resize([1, -1], 12)[GROUPS])
    few = np.arange(len(y)) % 25 < 2
    FixedPointVI(effects).run({"group": np.tile(GROUPS[few], 9), "y": np.tile(y[few], 9)}, progress_bar=False)
    assert made[0] and not made[-1]


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_so_few_rows_that_many_nodes_are_little_work_take_these_alone(method, monkeypatch):
    compiled = evaluations(monkeypatch)
    wide = method(bounded_scale).run(data(4), progress_bar=False)
    assert compiled and not any(compiled) and wide.info["elbo_error"] < 1e-3


def decay(x, y=None):
    """Four predictors, without a closed form."""
    amplitude = numpyro.sample("amplitude", dist.Normal(0, 10))
    rate = numpyro.sample("rate", dist.LogNormal(0, 2))
    offset = numpyro.sample("offset", dist.Normal(0, 10))
    scale = numpyro.sample("scale", dist.LogNormal(0, 2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(amplitude * jnp.exp(-rate * x) + offset, scale), obs=y)


def test_many_rows_of_four_predictors_are_one_solve_with_the_moments_of_nonlinear_least_squares():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 5, 6000)
    y = 5 * np.exp(-x) + 1 + 0.5 * rng.normal(size=len(x))
    posterior = RVGA(decay).run({"x": x, "y": y}, progress_bar=False)
    assert posterior.info["converged"] and posterior.info["looks"] == 0
    expected, covariance = curve_fit(lambda x, a, r, b: a * np.exp(-r * x) + b, x, y, (1.0, 1.0, 0.0))
    draws = posterior.sample_posterior(jax.random.key(0), (20_000,))
    deviations = np.sqrt(np.diagonal(covariance))
    for name, mean, deviation in zip(("amplitude", "rate", "offset"), expected, deviations):
        assert abs(np.mean(draws[name]) - mean) < 0.05 * deviation
        assert abs(np.log(np.std(draws[name]) / deviation)) < 0.05


def bent(x, y=None):
    """Kinks along a line between two predictors: the error that is known is above what the bound may be off by."""
    location = numpyro.sample("location", dist.Normal(0, 5))
    log_scale = numpyro.sample("log_scale", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("y", -jnp.abs(y - location) * jnp.exp(-log_scale) - log_scale)


def test_finer_rules_go_on_from_what_the_others_have_found(monkeypatch):
    starts = []
    solve_all = Engine.solve_all

    def seen(engine, problem, *arguments, **options):
        starts.append((engine.effort.level, problem.init is not None))
        return solve_all(engine, problem, *arguments, **options)

    monkeypatch.setattr(Engine, "solve_all", seen)
    known = {"x": np.zeros(5), "y": np.array([-1.0, 0.0, 0.3, 0.5, 4.0])}
    posterior = FixedPointVI(bent).run(known, progress_bar=False)
    assert starts == [("usual", False), ("thorough", True)] and posterior.info["converged"]
    rng = np.random.default_rng(0)
    draws = posterior.mean + rng.normal(size=(200_000, 2)) @ posterior.scale.T
    terms = -np.abs(known["y"] - draws[:, :1]) * np.exp(-draws[:, 1:]) - draws[:, 1:]
    value = terms.sum(axis=1) - 0.5 * (draws[:, 0] / 5) ** 2 - np.log(5) - 0.5 * draws[:, 1] ** 2 - np.log(2 * np.pi)
    entropy = 0.5 * np.linalg.slogdet(posterior.covariance)[1] + 1 + np.log(2 * np.pi)
    np.testing.assert_allclose(posterior.elbo, value.mean() + entropy, atol=4 * value.std() / np.sqrt(len(value)))


def test_thorough_searches_from_afar_begin_with_few_nodes(monkeypatch):
    """Where q is wide, the finest rules take longest."""
    monkeypatch.setattr(full, "NEARBY", -np.inf)  # as where the usual rules have led nowhere
    method, known = RVGA(bent), {"x": np.zeros(5), "y": np.array([-1.0, 0.0, 0.3, 0.5, 4.0])}
    made = evaluations(monkeypatch)
    first = method.run(known, progress_bar=False)
    assert method.last_engine.effort.is_thorough
    made.clear()
    again = method.run(known, progress_bar=False)
    assert made[0] and not made[-1]
    np.testing.assert_allclose(again.elbo, first.elbo, atol=1e-6)


def test_a_second_run_by_finer_rules_compiles_nothing_of_the_model(count_compilations):
    method, known = RVGA(bent), {"x": np.zeros(5), "y": np.array([-1.0, 0.0, 0.3, 0.5, 4.0])}
    compiled, first = count_compilations(lambda: method.run(known, progress_bar=False))
    assert method.last_engine.effort.is_thorough and "jit(evaluate)" in compiled
    compiled, again = count_compilations(lambda: method.run(known, progress_bar=False))
    assert "jit(evaluate)" not in compiled and again.elbo == first.elbo


@jax.tree_util.register_pytree_node_class
class Nothing:
    """A keyword that equals nothing, not even itself after jax.tree.map."""

    def tree_flatten(self):
        return (), object()

    @classmethod
    def tree_unflatten(cls, auxiliary, children):
        return cls()


def test_finer_rules_are_taken_whatever_keywords_are():
    def model(x, y, keyword):
        return bent(x, y)

    method, known = RVGA(model), {"x": np.zeros(5), "y": np.array([-1.0, 0.0, 0.3, 0.5, 4.0])}
    posterior = method.run(known, keyword=Nothing(), progress_bar=False)
    assert method.last_engine.effort.is_thorough and posterior.info["converged"]


def counts(x, y=None):
    """Rows of two predictors and no closed form."""
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    concentration = numpyro.sample("concentration", dist.Exponential(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(1 + slope * x), concentration), obs=y)


def test_errors_of_rounding_call_for_no_finer_rules():
    rng = np.random.default_rng(0)
    x = rng.normal(size=8000)
    rows = {"x": x, "y": rng.negative_binomial(2, 2 / (2 + np.exp(1 + 0.5 * x)))}
    double = RVGA(counts).run(rows, progress_bar=False)
    with jax.enable_x64(False):
        fit = RVGA(counts)
        single = fit.run(rows, progress_bar=False)
    assert double.info["elbo_error"] < 1e-5 < 1e-3 < single.info["elbo_error"]
    assert not fit.last_engine.effort.is_thorough
    deviation = np.sqrt(np.diagonal(double.covariance))
    np.testing.assert_allclose((single.mean - double.mean) / deviation, 0, atol=5e-3)
    np.testing.assert_allclose(single.elbo, double.elbo, rtol=8 * np.finfo(np.float32).eps)


def mixed(x, y, z):
    """Rows of one predictor, whose rules can be finer, and of five, whose errors are the larger ones."""
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    numpyro.sample("y", dist.StudentT(3, a, 1), obs=y)
    numpyro.sample("z", dist.StudentT(3, a + b[0] * x + jnp.tanh(b[1]) * jnp.exp(b[2]), scale), obs=z)


def test_what_finer_rules_cannot_mend_does_not_call_for_them():
    rng, method = np.random.default_rng(0), RVGA(mixed)
    x, y, z = rng.normal(size=(3, 20))
    posterior = method.run({"x": x, "y": y, "z": z}, progress_bar=False)
    assert posterior.info["elbo_error"] > 2e-3 and not method.last_engine.effort.is_thorough
    assert method.last_engine.effort.can_be_thorough
