"""Rows in any order end at the best Gaussian; what is called a bound is one; and what q is not, is said."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpyro import handlers
from shared_methods import shared

from numpyro_rvga import RVGA, FixedPointVI, ParquetRows, RandomWalk
from numpyro_rvga.engines.certificate import Certificate
from numpyro_rvga.model.own_density import OwnDensity
from numpyro_rvga.streams.model_check import ModelCheck

NUM_ROWS = 6000
SHAPE = 1.5


def regression(distribution):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", distribution(X @ w), obs=y)

    return model


def unknown_scale(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)


LIKELIHOODS = {
    "logistic": lambda line: dist.Bernoulli(logits=line),
    "poisson": lambda line: dist.Poisson(jnp.exp(line)),
    "binomial": lambda line: dist.Binomial(5, logits=line),
    "gamma": lambda line: dist.Gamma(SHAPE, SHAPE / jnp.exp(line)),
}
MODELS = {name: regression(make) for name, make in LIKELIHOODS.items()} | {"normal": unknown_scale}


def made(kind, num_rows=NUM_ROWS, seed=0):
    """Sorted by outcome."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(num_rows), rng.normal(size=(num_rows, 2))])
    line = X @ [0.3, 0.5, -0.4]
    if kind == "normal":
        y = line + 1.5 * rng.normal(size=num_rows)
    else:
        y = np.asarray(LIKELIHOODS[kind](jnp.asarray(line)).sample(jax.random.key(seed)))
    order = np.argsort(y, kind="stable")
    return {"X": X[order], "y": y[order]}


def run(method, rows, **kwargs):
    return method.run(rows, progress_bar=False, **kwargs)


@functools.cache
def best_of(kind, num_rows=NUM_ROWS):
    """Of the rows that are made, whatever their order."""
    return run(shared(FixedPointVI, MODELS[kind]), made(kind, num_rows))


def divergence(p, q):
    """KL(p || q) in nats."""
    delta = np.asarray(p.mean) - np.asarray(q.mean)
    precision = np.linalg.inv(np.asarray(q.covariance, np.float64))
    ratio = precision @ np.asarray(p.covariance, np.float64)
    return 0.5 * (np.trace(ratio) + delta @ precision @ delta - len(delta) - np.linalg.slogdet(ratio)[1])


def in_blocks(rows, size=500):
    return [{name: array[i : i + size] for name, array in rows.items()} for i in range(0, len(rows["y"]), size)]


def in_files(rows, folder):
    columns = {f"x{i}": rows["X"][:, i] for i in range(rows["X"].shape[1])} | {"y": rows["y"]}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=700)
    return ParquetRows(folder / "rows.parquet", {"X": ["x0", "x1", "x2"], "y": "y"})


SOURCES = {"arrays": lambda rows, _: rows, "list": lambda rows, _: in_blocks(rows), "files": in_files}


# ---------------------------------------------------------------------- rows that can be read again
@pytest.mark.parametrize(
    ("kind", "source"), [*((kind, "arrays") for kind in MODELS), ("normal", "list"), ("poisson", "files")]
)
def test_sorted_rows_at_hand_end_at_the_best_gaussian(kind, source, tmp_path):
    rows = made(kind)
    posterior, best = run(shared(RVGA, MODELS[kind]), SOURCES[source](rows, tmp_path)), best_of(kind)
    assert divergence(posterior, best) < 0.001
    assert best.elbo - 0.001 < posterior.elbo < best.elbo + 1e-6
    assert posterior.info["converged"] and 1 <= posterior.info["looks"] <= 3
    assert posterior.info["squared_natural_gradient"] <= 1e-3


@pytest.mark.parametrize("options", [{"shuffle": False}, {"block_size": 1}, {"shuffle": False, "first_block": 500}])
@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_no_order_and_no_option_puts_the_bound_above_the_best(kind, options):
    rows = made(kind, 4500)
    method = RVGA(MODELS[kind], certificate_tolerance=1e6, **options)  # the pass alone, evaluated
    posterior = run(method, rows)
    assert posterior.elbo < best_of(kind, 4500).elbo + 1e-6
    assert posterior.info["looks"] == 1


def bound_of(mean, covariance, rows):
    """By quadrature over each row's predictor, as a function that JAX differentiates."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    X, y = rows["X"], rows["y"]
    spread = jnp.sqrt(jnp.einsum("np,pq,nq->n", X, covariance, X))
    line = (X @ mean)[:, None] + spread[:, None] * nodes
    expected = jnp.sum(dist.Bernoulli(logits=line).log_prob(y[:, None]) @ (weights / weights.sum()))
    kl = 0.5 * ((jnp.trace(covariance) + mean @ mean) / 4 - len(mean) + len(mean) * jnp.log(4.0))
    return expected - kl + 0.5 * jnp.linalg.slogdet(covariance)[1]


def test_the_bound_and_its_natural_gradient_are_those_of_quadrature():
    rows = made("logistic", 4500)
    posterior = run(RVGA(MODELS["logistic"], shuffle=False, block_size=1, certificate_tolerance=1e6), rows)
    mean, covariance = np.asarray(posterior.mean), np.asarray(posterior.covariance)
    bound, (slope, turn) = jax.value_and_grad(bound_of, (0, 1))(mean, covariance, rows)
    root = np.linalg.cholesky(covariance)
    squared = slope @ covariance @ slope + 0.5 * np.sum((2 * root.T @ (0.5 * (turn + turn.T)) @ root) ** 2)
    np.testing.assert_allclose(posterior.elbo, bound, atol=1e-6)
    np.testing.assert_allclose(posterior.info["squared_natural_gradient"], squared, rtol=1e-5)
    assert squared > 0.01  # rows that are sorted


NUM_OF_FEW = 4500
LOG_DENSITIES = {
    "student": lambda y, line: dist.StudentT(4.0, line).log_prob(y),
    "kinked": lambda y, line: -4 * jnp.abs(y - line),
}


@pytest.mark.parametrize(("kind", "suffice"), [("student", True), ("kinked", False)])
def test_few_nodes_are_taken_for_the_bound_where_these_suffice(kind, suffice, monkeypatch):
    """Against a grid of 20,001 points, which kinks need."""
    log_density, rows = LOG_DENSITIES[kind], made("normal", NUM_OF_FEW)

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.factor("y", log_density(y, X @ w))

    found, suffices = [], Certificate._few_nodes_suffice

    def seen(*arguments):
        found.append(suffices(*arguments))
        return found[-1]

    monkeypatch.setattr(Certificate, "_few_nodes_suffice", seen)
    posterior = run(RVGA(model, shuffle=False, block_size=1, certificate_tolerance=1e6), rows)
    assert found and all(found) == suffice
    mean, covariance, X = np.asarray(posterior.mean), np.asarray(posterior.covariance), rows["X"]
    grid = np.linspace(-8, 8, 20_001)
    weights = np.exp(-0.5 * grid**2) / np.exp(-0.5 * grid**2).sum()
    line, deviation = X @ mean, np.sqrt(np.einsum("np,pq,nq->n", X, covariance, X))
    expected = sum(
        float(np.sum(log_density(rows["y"][part, None], line[part, None] + deviation[part, None] * grid) @ weights))
        for part in np.array_split(np.arange(NUM_OF_FEW), 45)
    )
    kl = 0.5 * ((np.trace(covariance) + mean @ mean) / 4 - 3 + 3 * np.log(4.0) - np.linalg.slogdet(covariance)[1])
    np.testing.assert_allclose(posterior.elbo, expected - kl, atol=2e-3)


def test_rows_that_were_left_out_are_left_out_again():
    rows = made("poisson")
    bad = [3, 4, 2500, NUM_ROWS - 1]
    spoilt = {"X": rows["X"].copy(), "y": rows["y"].astype(float)}
    spoilt["X"][bad[:2]], spoilt["y"][bad[2:]] = np.nan, -1.0
    posterior = run(shared(RVGA, MODELS["poisson"]), spoilt, on_bad_row="skip")
    assert posterior.info["skipped_rows"].tolist() == bad
    best = run(shared(FixedPointVI, MODELS["poisson"]), {n: np.delete(a, bad, axis=0) for n, a in rows.items()})
    assert divergence(posterior, best) < 0.001
    np.testing.assert_allclose(posterior.elbo, best.elbo, atol=0.001)


def test_a_q_that_is_not_the_best_gaussian_is_told_and_more_looks_mend_it():
    rows, options = made("normal", 4500), {"shuffle": False, "block_size": 1}
    with pytest.warns(UserWarning, match="q is not the best Gaussian: after 3 looks"):
        posterior = run(RVGA(unknown_scale, **options), rows)
    assert not posterior.info["converged"] and posterior.info["squared_natural_gradient"] > 1
    best = best_of("normal", 4500)
    mended = run(RVGA(unknown_scale, max_looks=60, **options), rows)
    assert mended.info["converged"] and 3 < mended.info["looks"] < 60
    assert divergence(mended, best) < 0.001


def test_steps_never_lower_the_bound():
    rows = made("poisson", 4500)
    posterior = run(RVGA(MODELS["poisson"], shuffle=False, block_size=1, max_looks=5), rows)
    assert posterior.info["bound_after"] > posterior.info["bound_before"] + 1
    assert posterior.elbo == posterior.info["bound_after"]


def test_other_schemes_are_looked_at_and_left_as_they_are():
    rows, options = made("logistic", 4500), {"scheme": "explicit", "shuffle": False}
    plain = run(RVGA(MODELS["logistic"], certify=False, **options), rows)
    looked_at = run(RVGA(MODELS["logistic"], **options), rows)
    np.testing.assert_array_equal(looked_at.mean, plain.mean)
    assert looked_at.info["looks"] == 1 and not looked_at.info["converged"]
    assert looked_at.elbo < best_of("logistic", 4500).elbo


def test_single_precision_is_certified():
    with jax.enable_x64(False):
        rows = {name: array.astype(np.float32) for name, array in made("normal", 20_000).items()}
        posterior = run(RVGA(unknown_scale), rows)
        assert posterior.mean.dtype == jnp.float32 and posterior.info["converged"]
    best = best_of("normal", 20_000)
    assert divergence(posterior, best) < 0.001
    np.testing.assert_allclose(posterior.elbo, best.elbo, atol=0.02)


def test_the_state_stands_for_the_certified_posterior():
    rows, more = made("normal"), made("normal", seed=1)
    method = shared(RVGA, unknown_scale)
    posterior = run(method, rows)
    again = method.posterior(posterior.state)  # with the prior's true terms in place of what stands for them
    np.testing.assert_allclose(again.mean, posterior.mean, atol=1e-5)
    both = {name: np.concatenate([rows[name], more[name]]) for name in rows}
    best = run(shared(FixedPointVI, unknown_scale), both)
    assert divergence(posterior.update(more, progress_bar=False), best) < 0.05


# ---------------------------------------------------------------------- what is no bound is not called one
def test_what_is_no_bound_is_not_called_one():
    rows = made("logistic")
    method = shared(RVGA, MODELS["logistic"])
    certified = run(method, rows)
    others = {
        "a stream": run(RVGA(MODELS["logistic"], block_size=500), in_stream(rows)),
        "an update": certified.update(in_blocks(rows)[0], progress_bar=False),
        "a functional update": method.posterior(method.update(method.init(rows), rows)),
        "no certificate": run(RVGA(MODELS["logistic"], certify=False), rows),
        "Laplace": run(RVGA(MODELS["logistic"], scheme="laplace"), rows),
        "a drift": run(RVGA(MODELS["logistic"], dynamics=RandomWalk(0.01)), in_blocks(rows)[0]),
    }
    for case, posterior in others.items():
        assert posterior.elbo is None, case
        assert np.isfinite(posterior.info["log_evidence_estimate"]), case


def test_rows_that_are_solved_for_together_need_no_look():
    rows = {name: array[::20] for name, array in made("logistic").items()}
    posterior = run(shared(RVGA, MODELS["logistic"]), rows)
    assert posterior.info["looks"] == 0 and posterior.info["converged"]
    np.testing.assert_allclose(posterior.elbo, run(shared(FixedPointVI, MODELS["logistic"]), rows).elbo, atol=1e-6)
    streamed = run(shared(RVGA, MODELS["logistic"]), iter(in_blocks(rows, 70)))
    np.testing.assert_allclose(streamed.elbo, posterior.elbo, atol=1e-9)


# ---------------------------------------------------------------------- the model itself is asked
def network(x, y=None):
    inner = numpyro.sample("inner", dist.Normal(0, 1).expand([60]).to_event(1))
    outer = numpyro.sample("outer", dist.Normal(0, 1).expand([60]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(jnp.tanh(x[:, None] * inner) @ outer, 0.3), obs=y)


def test_an_expectation_that_is_off_is_told():
    """A few rows leave the weights nearly as wide as their prior, where a network is not its tangent."""
    x = np.linspace(-1, 1, 30)
    with warnings.catch_warnings(record=True) as caught:  # of the search too, which may end before its best q
        warnings.simplefilter("always")
        posterior = run(RVGA(network), {"x": x, "y": np.sin(3 * x)})
    told = " ".join(str(warning.message) for warning in caught)
    assert re.search("site 'y': .* expectation is approximate here, so there is no bound", told)
    assert re.search("q is at one of . modes, which searches from other starts found", told)
    assert posterior.elbo is None and np.isfinite(posterior.info["log_evidence_estimate"])


@pytest.mark.parametrize("num_rows", [300, 12_000])
def test_a_site_that_is_read_wrongly_is_an_error_that_names_it(num_rows, monkeypatch):
    own = OwnDensity.__call__

    def twice(self, rows, points):
        by_site, joint = own(self, rows, points)
        return {"y": 2 * by_site["y"]}, joint + by_site["y"]

    method = RVGA(MODELS["poisson"])
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="site 'y' was read wrongly"):
        patch.setattr(OwnDensity, "__call__", twice)
        run(method, made("poisson", num_rows))
    assert run(method, made("poisson", num_rows)).elbo is not None


def overdispersed(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Exponential(0.1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ w), concentration), obs=y)


def scaled_prior(X, y=None):
    with handlers.scale(scale=0.05):
        scale = numpyro.sample("scale", dist.Exponential(1.0))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(0, scale), obs=y)


@pytest.mark.parametrize(
    ("model", "kind", "num_rows"), [(overdispersed, "poisson", 20_000), (scaled_prior, "normal", 400)]
)
def test_draws_confirm_the_bound_of_one_solve_and_nothing_else_is_asked(model, kind, num_rows, monkeypatch):
    confirmed, confirms = [], ModelCheck.confirms

    def seen(*arguments):
        confirmed.append(confirms(*arguments))
        return confirmed[-1]

    monkeypatch.setattr(ModelCheck, "confirms", seen)
    rows = made(kind, num_rows)  # so many parameters that all rows are one solve
    rows["X"] = np.column_stack([rows["X"], np.random.default_rng(1).normal(size=(num_rows, 8))])
    posterior = run(RVGA(model), rows)
    assert confirmed == [True] and posterior.elbo is not None


def test_a_scaled_prior_is_scaled_in_the_sites_own_space():
    rows = made("normal", 5)
    posterior = run(FixedPointVI(scaled_prior), rows)
    scales = np.exp(np.linspace(-4, 6, 20_001))
    log_density = dist.Normal(0, scales[:, None]).log_prob(rows["y"]).sum(axis=1) - 0.05 * scales
    log_density = np.asarray(log_density) + np.log(scales)  # over the logarithm of the scale
    evidence = np.log(np.sum(np.exp(log_density - log_density.max())) * 10 / 20_000) + log_density.max()
    assert evidence - 0.05 < posterior.elbo < evidence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"certify": "yes"}, "certify must be one of True, False"),
        ({"max_looks": 0}, "max_looks must be a positive integer"),
        ({"certificate_tolerance": 0.0}, "certificate_tolerance must be positive"),
        ({"shuffle": "always"}, "shuffle must be one of 'auto', True, False"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RVGA(MODELS["logistic"], **options)


# ---------------------------------------------------------------------- rows that can be read once
def in_stream(rows):
    return iter(in_blocks(rows))


@pytest.fixture
def few_are_kept(monkeypatch):
    """A sample of 1,200 rows, and 300 of those that a pass does worst by."""
    monkeypatch.setattr("numpyro_rvga.families.full.SAMPLE_NUMBERS", 1200 * 7)
    monkeypatch.setattr("numpyro_rvga.streams.block_plan.MEMORY_ROWS_PER_PARAMETER", 100)


def shuffled(rows, seed=0):
    order = np.random.default_rng(seed).permutation(len(rows["y"]))
    return {name: array[order] for name, array in rows.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_a_stream_of_which_every_row_is_kept_is_certified(kind):
    posterior, best = run(shared(RVGA, MODELS[kind]), in_stream(shuffled(made(kind)))), best_of(kind)
    assert divergence(posterior, best) < 0.001 and posterior.info["converged"]
    assert best.elbo - 0.001 < posterior.elbo < best.elbo + 1e-6


@pytest.mark.parametrize("kind", ["logistic", "poisson", "gamma"])
def test_a_sample_tells_what_a_pass_in_random_order_lacks(kind, few_are_kept):
    rows = shuffled(made(kind, 20_000))
    plain = run(RVGA(MODELS[kind], certify=False), in_stream(rows))
    posterior = run(RVGA(MODELS[kind]), in_stream(rows))  # without a warning
    best = best_of(kind, 20_000)
    assert posterior.elbo is None and posterior.info["converged"]
    assert divergence(posterior, best) < 0.3 * divergence(plain, best)
    assert abs(posterior.info["bound_estimate"] - best.elbo) < 5 * posterior.info["bound_error"] + 0.01
    assert posterior.info["log_evidence_estimate"] == pytest.approx(posterior.info["bound_estimate"])


@pytest.mark.parametrize("memory", ["auto", 0])
def test_a_sample_moves_q_before_long_rows_are_read_again(memory, few_are_kept, monkeypatch):
    monkeypatch.setattr("numpyro_rvga.families.full.FEW_NUMBERS", 1200 * 7)
    rows, best = shuffled(made("poisson", 20_000)), best_of("poisson", 20_000)
    posterior = run(RVGA(MODELS["poisson"], memory=memory), in_blocks(rows))
    assert best.elbo - 0.001 < posterior.elbo < best.elbo + 1e-6 and posterior.info["converged"]


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_an_order_that_does_harm_is_told_and_mended_as_far_as_a_sample_can(kind, few_are_kept):
    rows = made(kind, 20_000)
    plain = run(RVGA(MODELS[kind], certify=False), in_stream(rows))
    best = best_of(kind, 20_000)
    with pytest.warns(UserWarning, match=r"cannot undo: .* q was off by \d.* Read the rows again .* or use dynamics"):
        posterior = run(RVGA(MODELS[kind]), in_stream(rows))
    assert not posterior.info["converged"] and posterior.elbo is None
    assert divergence(posterior, best) < 0.1 * divergence(plain, best)


def test_rows_in_random_order_raise_no_alarm(few_are_kept):
    """Warnings are errors here."""
    method, rows = RVGA(MODELS["poisson"]), made("poisson", 8000)
    for seed in range(20):
        run(method, in_stream(shuffled(rows, seed)))


def test_a_stopped_stream_goes_on_with_its_sample_to_the_bit(few_are_kept, tmp_path):
    rows, method = shuffled(made("poisson", 12_000)), RVGA(MODELS["poisson"])

    def stopping():
        yield from in_blocks({name: array[:7000] for name, array in rows.items()})
        raise KeyboardInterrupt

    options = {"checkpoint": tmp_path / "run", "every": 2000}
    with pytest.raises(KeyboardInterrupt):
        run(method, stopping(), **options)
    again = run(method, in_stream(rows), resume=True, **options)
    whole = run(method, in_stream(rows), checkpoint=tmp_path / "other", every=2000)
    np.testing.assert_array_equal(again.mean, whole.mean)
    assert again.info["bound_estimate"] == whole.info["bound_estimate"]
