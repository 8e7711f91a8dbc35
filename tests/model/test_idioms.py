"""The many ways to write one model: equal posteriors, and the mode and curvature of NumPyro's own log joint density."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
from references import assert_is_laplace, assert_moments_match, importance_moments
from scipy import special

from numpyro_rvga import RVGA
from numpyro_rvga.core.expectations.closed_forms import Logistic

NUM_ROWS = 60
RNG = np.random.default_rng(4)
X = RNG.normal(size=(NUM_ROWS, 2))
Y = (special.expit(X @ np.array([1.0, -0.5])) > RNG.uniform(size=NUM_ROWS)).astype(int)
DATA = {"X": X, "y": Y}


def laplace(model, data, **kwargs):
    """The cheapest posterior that sees every term of the log joint density: its mode and curvature there."""
    return second_run(RVGA(model, scheme="laplace", tolerance=1e-13), data, **kwargs)


def implicit(model, data, **kwargs):
    return second_run(RVGA(model, tolerance=1e-13), data, **kwargs)


def second_run(method, data, **kwargs):
    """Of an object that has run on other data of the same form, of which nothing must be left."""

    def other(array):
        turned = np.roll(np.asarray(array), 7, axis=0)[::-1]
        return 0.9 * turned if turned.dtype.kind == "f" else turned

    if isinstance(data, tuple):
        before = tuple(map(other, data))
    else:
        before = {name: array if array is None else other(array) for name, array in data.items()}
    method.run(before, progress_bar=False, **kwargs)
    return method.run(data, progress_bar=False, **kwargs)


def assert_same(one, other):
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-6)
    np.testing.assert_allclose(one.covariance, other.covariance, atol=1e-6)


# ---------------------------------------------------------------------- one logistic regression, many spellings
def coefficients(scale=2.0):
    return numpyro.sample("b", dist.Normal(0.0, scale).expand([2]).to_event(1))


def row_plate(X, y=None):
    line = X @ coefficients()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=line), obs=y)


def plate_by_len(X, y=None):
    b = coefficients()
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def plate_by_len_of_the_outcome(X, y):
    b = coefficients()
    with numpyro.plate("rows", len(y), dim=-1):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.dot(X, b)), obs=y)


def no_plate(X, y=None):
    numpyro.sample("y", dist.Bernoulli(logits=X @ coefficients()), obs=y)


def vector_event(X, y=None):
    numpyro.sample("y", dist.Bernoulli(logits=X @ coefficients()).to_event(1), obs=y)


def plate_of_latents(X, y=None):
    with numpyro.plate("features", 2):
        b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def subsampled_plate(X, y):
    b = coefficients()
    with numpyro.plate("rows", X.shape[0], subsample_size=min(16, X.shape[0])) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=X[idx] @ b), obs=y[idx])


def subsample_statement(X, y):
    b = coefficients()
    with numpyro.plate("rows", X.shape[0], subsample_size=min(16, X.shape[0])):
        batch_X = numpyro.subsample(X, event_dim=1)
        batch_y = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=batch_X @ b), obs=batch_y)


def deterministic_line(X, y=None):
    b = coefficients()
    numpyro.deterministic("difference", b[0] - b[1])
    with numpyro.plate("rows", X.shape[0]):
        line = numpyro.deterministic("line", X @ b)
        numpyro.sample("y", dist.Bernoulli(logits=line), obs=y)


def factor_in_the_plate(X, y):
    b = coefficients()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("y", y * (X @ b) - jax.nn.softplus(X @ b))


def factor_without_plate(X, y):
    line = X @ coefficients()
    numpyro.factor("y", jnp.sum(y * line - jax.nn.softplus(line)))


def trivially_handled(X, y=None):
    b = coefficients()
    with numpyro.plate("rows", X.shape[0]), handlers.mask(mask=jnp.ones(X.shape[0], bool)), handlers.scale(scale=1.0):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def two_sites_per_row(X, y):
    b = coefficients()
    with numpyro.plate("rows", X.shape[0]):
        with handlers.scale(scale=0.25):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)
        with handlers.scale(scale=0.75):
            numpyro.sample("again", dist.Bernoulli(probs=jax.nn.sigmoid(X @ b)), obs=y)


def constant_size(X, y, num_rows):
    b = coefficients()
    with numpyro.plate("rows", num_rows, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def constant_size_indexed(X, y, num_rows):
    b = coefficients()
    with numpyro.plate("rows", num_rows, subsample_size=16) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=X[idx] @ b), obs=y[idx])


@pytest.fixture(scope="module")
def plain():
    return laplace(row_plate, DATA)


def test_row_plate_gives_the_mode_and_curvature_of_the_joint_density(plain):
    assert_is_laplace(plain, row_plate, **DATA)


@pytest.mark.parametrize(
    "model",
    [
        plate_by_len,
        plate_by_len_of_the_outcome,
        no_plate,
        vector_event,
        plate_of_latents,
        subsampled_plate,
        subsample_statement,
        deterministic_line,
        factor_in_the_plate,
        factor_without_plate,
        trivially_handled,
        two_sites_per_row,
    ],
    ids=lambda model: model.__name__,
)
def test_spellings_of_one_model_agree(plain, model):
    assert_same(laplace(model, DATA), plain)


@pytest.mark.parametrize("model", [constant_size, constant_size_indexed], ids=lambda model: model.__name__)
def test_number_of_rows_as_a_model_keyword(plain, model):
    assert_same(laplace(model, DATA, num_rows=NUM_ROWS), plain)


def test_tuple_and_named_data_agree(plain):
    assert_same(laplace(row_plate, (X, Y)), plain)


@pytest.mark.parametrize(
    "model, data",
    [
        (lambda *arrays: row_plate(*arrays), (X, Y)),
        (lambda X, *outcomes: row_plate(X, outcomes[0]), (X, Y)),
        (lambda X, y, /: row_plate(X, y), (X, Y)),
        (lambda X, y, /: row_plate(X, y), DATA),
    ],
    ids=["all", "after a name", "by position", "by position, from names"],
)
def test_models_take_arguments_by_position(plain, model, data):
    assert_same(laplace(model, data), plain)


def test_more_than_ten_arrays_by_position_keep_their_order():
    def model(*arrays):
        mean = numpyro.sample("mean", dist.Normal(0.0, 100.0))
        with numpyro.plate("rows", len(arrays[0])):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=arrays[11])

    posterior = RVGA(model).run(tuple(np.full(200, float(i)) for i in range(12)), progress_bar=False)
    np.testing.assert_allclose(posterior.mean, 11.0, atol=1e-3)


def test_lists_and_jax_arrays_are_data(plain):
    assert_same(laplace(row_plate, {"X": X.tolist(), "y": jnp.asarray(Y)}), plain)


def test_none_as_a_data_entry_is_left_out(plain):
    def model(X, y=None, weights=None):
        row_plate(X, y)
        assert weights is None

    assert_same(laplace(model, {**DATA, "weights": None}), plain)


def test_implicit_scheme_agrees_on_spellings_with_and_without_a_subsampled_plate():
    full, subsampled = implicit(no_plate, DATA), implicit(subsampled_plate, DATA)
    assert_same(full, subsampled)
    np.testing.assert_allclose(full.elbo, subsampled.elbo, atol=1e-6)
    assert [t.closed_form for t in subsampled.program.terms] == [Logistic]


def test_global_deterministic_sites_come_with_the_draws_and_those_of_rows_do_not():
    draws = laplace(deterministic_line, DATA).sample_posterior(jax.random.key(0), (5,))
    assert set(draws) == {"b", "difference"}
    np.testing.assert_allclose(draws["difference"], draws["b"][:, 0] - draws["b"][:, 1])


# ---------------------------------------------------------------------- handlers
KEEP = np.arange(NUM_ROWS) % 3 != 0
REPEATS = np.arange(NUM_ROWS) % 3


def masked_by_handler(X, y, keep):
    b = coefficients()
    with numpyro.plate("rows", X.shape[0]), handlers.mask(mask=keep):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def masked_distribution(X, y, keep):
    b = coefficients()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b).mask(keep), obs=y)


def masked_observations(X, y, keep):
    line = X @ coefficients()
    with numpyro.plate("rows", X.shape[0]), handlers.mask(mask=keep):
        numpyro.sample("y", dist.BinomialLogits(line, total_count=1), obs=y)


@pytest.mark.parametrize(
    "model", [masked_by_handler, masked_distribution, masked_observations], ids=lambda model: model.__name__
)
def test_masked_rows_are_dropped_rows(model):
    kept = {name: array[KEEP] for name, array in DATA.items()}
    assert_same(laplace(model, {**DATA, "keep": KEEP}), laplace(row_plate, kept))


def test_masked_rows_may_lie_outside_the_support():
    y = np.where(KEEP, Y, -7)
    kept = {name: array[KEEP] for name, array in DATA.items()}
    assert_same(laplace(masked_by_handler, {"X": X, "y": y, "keep": KEEP}), laplace(row_plate, kept))


def test_scale_of_two_is_every_row_twice():
    def model(X, y):
        b = coefficients()
        with handlers.scale(scale=2.0), numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    twice = {name: np.repeat(array, 2, axis=0) for name, array in DATA.items()}
    assert_same(laplace(model, DATA), laplace(row_plate, twice))


def test_scale_by_row_is_rows_repeated():
    def model(X, y, weight):
        b = coefficients()
        with numpyro.plate("rows", X.shape[0]), handlers.scale(scale=weight):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    repeated = {name: np.repeat(array, REPEATS, axis=0) for name, array in DATA.items()}
    assert_same(laplace(model, {**DATA, "weight": REPEATS + 1e-12}), laplace(row_plate, repeated))


@pytest.mark.parametrize("num_outcomes", [3, NUM_ROWS])
@pytest.mark.parametrize("is_coupled", [False, True])
def test_weights_of_rows_count_for_each_of_their_outcomes(num_outcomes, is_coupled):
    """Beside weighted least squares, which is exact."""
    rng, x, weight = np.random.default_rng(1), X[:, 0], np.linspace(0.5, 4.0, NUM_ROWS)
    y = rng.normal(size=(NUM_ROWS, num_outcomes))

    def model(x, weight, y):
        slopes = numpyro.sample("slopes", dist.Normal(0.0, 10.0).expand([num_outcomes]).to_event(1))
        mean = (x - jnp.mean(x) if is_coupled else x)[:, None] * slopes
        with numpyro.plate("rows", len(x)), handlers.scale(scale=weight):
            numpyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    posterior = RVGA(model).run({"x": x, "weight": weight, "y": y}, progress_bar=False)
    x = x - x.mean() if is_coupled else x
    precision = 0.01 + weight @ x**2
    np.testing.assert_allclose(posterior.mean, (weight * x) @ y / precision, atol=1e-8)
    np.testing.assert_allclose(posterior.covariance, np.eye(num_outcomes) / precision, atol=1e-8)


def with_intercept(X, y=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(a, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + X @ b), obs=y)


def with_fixed_intercept(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.7, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=0.7 + X @ b), obs=y)


def test_conditioned_latents_are_constants():
    conditioned = laplace(handlers.condition(with_intercept, {"a": 0.7}), DATA)
    assert conditioned.site_names == ("b",)
    assert_same(conditioned, laplace(with_fixed_intercept, DATA))


def test_conditioning_on_the_outcome_is_observing_it(plain):
    def model(X):
        row_plate(X)

    def observed(X, y):
        handlers.condition(model, {"y": y})(X)

    assert_same(laplace(observed, DATA), plain)


def test_data_level_factor_outside_the_plate_belongs_to_the_prior():
    def model(X, y):
        b = coefficients()
        numpyro.factor("sum_to_one", -0.5 * ((b.sum() - 1.0) / 0.3) ** 2)
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    posterior = laplace(model, DATA)
    assert posterior.program.prior.terms == ()
    assert_is_laplace(posterior, model, **DATA)


def test_transform_reparameterization():
    def model(X, y=None):
        base = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        b = numpyro.sample("b", dist.TransformedDistribution(base, dist.transforms.AffineTransform(0.0, 2.0)))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    reparameterized = handlers.reparam(model, {"b": TransformReparam()})
    posterior, plain = laplace(reparameterized, DATA), laplace(row_plate, DATA)
    assert posterior.site_names == ("b_base",)
    assert_is_laplace(posterior, reparameterized, **DATA)
    np.testing.assert_allclose(2 * posterior.mean, plain.mean, atol=1e-6)
    np.testing.assert_allclose(4 * posterior.covariance, plain.covariance, atol=1e-6)


# ---------------------------------------------------------------------- groups
NUM_GROUPS = 4
GROUP = np.arange(160) % NUM_GROUPS
SLOPE_DATA = RNG.normal(size=160)
EFFECTS = np.array([-1.0, 0.2, 0.6, 1.4])
GROUPED = {"x": SLOPE_DATA, "g": GROUP, "y": EFFECTS[GROUP] + 0.5 * SLOPE_DATA + 0.8 * RNG.normal(size=160)}


def grouped_rows(x, g, y, effects):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(effects[g] + slope * x, 0.8), obs=y)


def group_scale():
    return numpyro.sample("m", dist.Normal(0.0, 1.0)), numpyro.sample("tau", dist.LogNormal(0.0, 0.5))


def centered(x, g, y=None):
    m, tau = group_scale()
    with numpyro.plate("groups", NUM_GROUPS):
        effects = numpyro.sample("a", dist.Normal(m, tau))
    grouped_rows(x, g, y, effects)


def non_centered(x, g, y=None):
    m, tau = group_scale()
    with numpyro.plate("groups", NUM_GROUPS):
        standard = numpyro.sample("a_decentered", dist.Normal(0.0, 1.0))
    effects = numpyro.deterministic("a", m + tau * standard)
    grouped_rows(x, g, y, effects)


@pytest.mark.parametrize(
    "model, num_predictors, num_rows",
    [(centered, 1, 160), (non_centered, 3, 12)],  # either where it is close to Gaussian
    ids=["centered", "non_centered"],
)
def test_group_effects_match_importance_sampling(model, num_predictors, num_rows):
    rows = {name: array[:num_rows] for name, array in GROUPED.items()}
    posterior = RVGA(model).run(rows, progress_bar=False)
    assert posterior.program.terms[0].num_predictors == num_predictors
    reference = importance_moments(model, posterior.site_names, num_draws=40_000, **rows)
    assert_moments_match(posterior, reference, 0.3, 0.3)


def test_loc_scale_reparameterization_is_the_non_centered_model():
    reparameterized = laplace(handlers.reparam(centered, {"a": LocScaleReparam(0.0)}), GROUPED)
    by_hand = laplace(non_centered, GROUPED)
    assert reparameterized.site_names == by_hand.site_names
    assert_same(reparameterized, by_hand)
    assert_is_laplace(by_hand, non_centered, **GROUPED)


def test_number_of_groups_as_a_model_keyword():
    def model(x, g, y=None, num_groups=None):
        with numpyro.plate("groups", num_groups):
            effects = numpyro.sample("a", dist.Normal(0.0, 1.0))
        grouped_rows(x, g, y, effects)

    posterior = laplace(model, GROUPED, num_groups=NUM_GROUPS)
    design = np.column_stack([np.eye(NUM_GROUPS)[GROUP], SLOPE_DATA])
    covariance = np.linalg.inv(np.eye(NUM_GROUPS + 1) + design.T @ design / 0.64)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-9)
    np.testing.assert_allclose(posterior.mean, covariance @ design.T @ GROUPED["y"] / 0.64, atol=1e-9)


def test_as_many_groups_as_rows_are_no_row_plate():
    rows = {name: array[:NUM_GROUPS] for name, array in GROUPED.items()}
    posterior = laplace(non_centered, rows)
    assert "a_decentered" in posterior.site_names
    assert_is_laplace(posterior, non_centered, **rows)


# ---------------------------------------------------------------------- a neural network
INPUT = np.linspace(-2.0, 2.0, 40)[:, None]
CURVE = np.sin(2.0 * INPUT[:, 0])
NETWORK_DATA = {"x": INPUT, "y": CURVE + 0.2 * RNG.normal(size=40)}
HIDDEN = 8  # more affine predictors than the split takes: the network is linearized


def network_model(x, y=None):
    linen = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(jnp.tanh(linen.Dense(HIDDEN)(x)))[..., 0]

    network = random_flax_module("network", Network(), prior=dist.Normal(0.0, 1.0), input_shape=(1, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(network(x), 0.2), obs=y)


def network_output(theta, site_names):
    # Flax numbers layers as they are made: the outer one first.
    shapes = {"Dense_1.kernel": (HIDDEN,), "Dense_1.bias": (HIDDEN,), "Dense_0.kernel": (HIDDEN,), "Dense_0.bias": ()}
    parts, start = {}, 0
    for name in site_names:
        shape = shapes[name.removeprefix("network/")]
        stop = start + int(np.prod(shape))
        parts[name.removeprefix("network/")] = jnp.reshape(theta[start:stop], shape)
        start = stop
    hidden = jnp.tanh(INPUT * parts["Dense_1.kernel"] + parts["Dense_1.bias"])
    return hidden @ parts["Dense_0.kernel"] + parts["Dense_0.bias"]


def test_flax_network_is_linearized_in_its_output_and_its_laplace_covariance_is_gauss_newton():
    key = jax.random.key(1)  # the network is computed in single precision: not all searches end below the tolerance
    posterior = RVGA(network_model, scheme="laplace").run(NETWORK_DATA, rng_key=key, progress_bar=False)
    (terms,) = posterior.program.terms
    assert (terms.num_predictors, terms.is_affine) == (1, False)

    def output(theta):
        return network_output(theta, posterior.site_names)

    value, jacobian = np.asarray(output(posterior.mean)), np.asarray(jax.jacobian(output)(posterior.mean))
    precision = np.eye(len(posterior.mean)) + jacobian.T @ jacobian / 0.04
    slope = jacobian.T @ (NETWORK_DATA["y"] - value) / 0.04 - np.asarray(posterior.mean)
    assert slope @ np.linalg.solve(precision, slope) < 1e-6
    np.testing.assert_allclose(posterior.covariance @ precision, np.eye(len(precision)), atol=1e-3)


def test_flax_network_learns_the_curve():
    with pytest.warns(UserWarning, match="q is not the best Gaussian: .* no step raised the bound"):
        posterior = RVGA(network_model, max_iterations=20).run(NETWORK_DATA, progress_bar=False)
    fitted = network_output(posterior.mean, posterior.site_names)
    assert np.sqrt(np.mean((fitted - CURVE) ** 2)) < 0.2 * CURVE.std()


def rows_outside_a_plate(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("line", X @ b)
    numpyro.deterministic("odds", jnp.exp(b[:1]))
    numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def test_values_of_rows_are_no_part_of_the_posterior_with_or_without_a_plate():
    rng = np.random.default_rng(0)
    data = {"X": rng.normal(size=(30, 2)), "y": rng.normal(size=30)}
    posterior = RVGA(rows_outside_a_plate).run(data, progress_bar=False)
    draws = posterior.sample_posterior(jax.random.key(0), (5,))
    assert {name: value.shape for name, value in draws.items()} == {"b": (5, 2), "odds": (5, 1)}


def one_outcome_in_an_axis_of_its_own(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0], dim=-2), numpyro.plate("outcomes", 1):
        numpyro.sample("y", dist.Normal((X @ b)[:, None], 1.0), obs=y)


def test_a_genuine_axis_of_length_one_is_kept_in_the_log_likelihood():
    rng = np.random.default_rng(0)
    data = {"X": rng.normal(size=(30, 2)), "y": rng.normal(size=(30, 1))}
    posterior = RVGA(one_outcome_in_an_axis_of_its_own).run(data, progress_bar=False)
    terms = posterior.program.log_likelihood(posterior.mean, data)["y"]
    assert terms.shape == (30, 1)
    np.testing.assert_allclose(terms, dist.Normal(data["X"] @ posterior.mean, 1.0).log_prob(data["y"][:, 0])[:, None])
