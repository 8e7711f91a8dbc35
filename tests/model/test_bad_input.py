"""What cannot be used is refused with the right exception, naming the argument, row or site, and nothing is harmed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from shared_methods import shared

from numpyro_rvga import BONG, RVGA, FixedPointVI, RandomWalk
from numpyro_rvga.model.bound.validation import CHECKED_ROWS

NUM_ROWS = 100
RNG = np.random.default_rng(9)
X = RNG.normal(size=(NUM_ROWS, 2))
Y = RNG.integers(0, 2, size=NUM_ROWS)


def run(model, data, **kwargs):
    options = {name: kwargs.pop(name) for name in ("scheme", "shuffle") if name in kwargs}
    return shared(RVGA, model, **options).run(data, progress_bar=False, **kwargs)


def logistic(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def logistic_with_scale(X, y=None, tau=None):
    b = numpyro.sample("b", dist.Normal(0.0, tau).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def spoilt(array, row, value):
    array = np.array(array, float)
    array[row] = value
    return array


def blocks(data, size):
    length = len(next(iter(data.values())))
    return ({name: array[i : i + size] for name, array in data.items()} for i in range(0, length, size))


# ---------------------------------------------------------------------- arrays
@pytest.mark.parametrize(
    "data, message",
    [
        ({"X": X, "y": Y[:-1]}, r"lengths are X: 100, y: 99"),
        ((X, Y[:-1]), r"lengths are X: 100, y: 99"),
        ({"X": spoilt(X, (41, 1), np.nan), "y": Y}, r"'X' holds NaN in row 41"),
        ({"X": spoilt(X, (17, 0), np.inf), "y": Y}, r"'X' holds an infinite value in row 17"),
        ({"X": spoilt(X, (17, 0), -np.inf), "y": Y}, r"'X' holds an infinite value in row 17"),
        ({"X": X, "y": spoilt(Y, 99, np.nan)}, r"'y' holds NaN in row 99"),
        ({"X": X[:0], "y": Y[:0]}, r"no rows: X, y"),
        ({}, r"needs 'X'"),
        ({"y": Y}, r"needs 'X'"),
        ({"X": None, "y": None}, r"no array"),
        ({"X": X, "y": np.array(["yes"] * NUM_ROWS)}, r"'y' has dtype"),
        ({"X": X, "y": "yes"}, r"'y'"),
        ({"X": X, "y": 1.0}, r"'y' is a scalar"),
        ({"X": X, "y": [1, None] * 50}, r"'y' has dtype object"),
        ({"X": X + 0j, "y": Y}, r"'X' has dtype complex"),
        ({"X": X, "y": Y, "weights": np.ones(NUM_ROWS)}, r"no argument 'weights'.*X, y"),
        ((X, Y, Y), r"takes 2 positional arguments \(X, y\), 3 are given"),
        ("not data", r"mapping.*str"),
        ([X, Y], r"mapping.*ndarray"),
        (X, r"mapping.*ndarray"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unusable_arrays_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        run(logistic, data)


@pytest.mark.parametrize("rows", [[[1.0, 2.0], [3.0]], [[1.0, [2.0, 3.0]], [4.0, 5.0]]], ids=["rows", "entries"])
def test_ragged_lists_are_named(rows):
    with pytest.raises(ValueError, match="'X'"):
        run(logistic, {"X": rows, "y": [0, 1]})


def observing(fn, value, others):
    """A model, and data whose row 73 holds the value."""

    def model(x, count):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("outcome", fn(slope * x), obs=count)

    count = spoilt(np.full(NUM_ROWS, others), 73, value)
    return model, {"x": X[:, 0], "count": count.astype(int) if isinstance(value, int) else count}


@pytest.mark.parametrize(
    "fn, value, support",
    [
        (lambda u: dist.Bernoulli(logits=u), 2, "boolean"),
        (lambda u: dist.Bernoulli(probs=1 / (1 + jnp.exp(-u))), -1, "boolean"),
        (lambda u: dist.Poisson(jnp.exp(u)), -1, "integer"),
        (lambda u: dist.Poisson(jnp.exp(u)), 0.5, "integer"),
        (lambda u: dist.Binomial(total_count=3, logits=u), 4, "integer"),
        (lambda u: dist.Gamma(2.0, jnp.exp(u)), -0.1, "positive"),
        (lambda u: dist.LogNormal(u, 1.0), -1.0, "positive"),
        (lambda u: dist.Beta(jnp.exp(u), 1.0), 1.5, "interval"),
        (lambda u: dist.Categorical(logits=jnp.stack([u, 0 * u], -1)), 2, "integer"),
    ],
)
def test_values_outside_the_support_are_named_with_site_array_and_row(fn, value, support):
    model, data = observing(fn, value, 0.5 if support == "interval" else 1.0)
    with pytest.raises(ValueError, match=rf"(?i)'outcome': row 73 of array 'count' holds {value}.*support.*{support}"):
        run(model, data)


def test_a_list_of_arrays_is_refused_with_the_forms_that_data_take():
    with pytest.raises(ValueError, match="a tuple of arrays in the order of its arguments, or an iterable of such"):
        run(logistic, [X, Y])


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_traced_data_are_named(transform):
    outcomes = jnp.stack([Y, Y])
    with pytest.raises(ValueError, match=r"'y' is traced by jax\.jit, jax\.grad or jax\.vmap"):
        transform(lambda y: run(logistic, {"X": X, "y": y}).mean)(outcomes)


def test_values_outside_the_support_are_named_in_later_blocks_too():
    model, data = observing(lambda u: dist.Poisson(jnp.exp(u)), -1, 1.0)
    with pytest.raises(ValueError, match="'outcome': row 73 of array 'count' holds -1"):
        run(model, blocks(data, 25))


@pytest.mark.parametrize("method", [RVGA, BONG, FixedPointVI])
def test_outcomes_in_a_column_are_refused(method):
    with pytest.raises(ValueError, match=r"'y': the outcomes have shape \(100, 1\).*\(100, 100\).*of shape \(100,\)"):
        method(logistic).run({"X": X, "y": Y[:, None]}, progress_bar=False)


def test_errors_of_the_model_itself_come_with_the_shapes_of_the_data():
    with pytest.raises(TypeError, match="dot_general") as error:
        run(logistic, {"X": np.ones((NUM_ROWS, 4)), "y": Y})
    assert any("data of X float64[100, 4], y int64[100]" in note for note in error.value.__notes__)


def counted(group):
    return jnp.zeros(len(np.unique(group)))[group]


def sized(group):
    return jnp.zeros(int(jnp.max(group)) + 1)[group]


def chosen(group):
    return 1.0 if numpyro.sample("a", dist.Normal(0, 1)) > 0 else -1.0


def that_needs_numbers(mean):
    def model(group, y=None, num_groups=None):
        center = mean(group) + numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(center, 1), obs=y)

    return model


@pytest.mark.parametrize("mean, line", [(counted, "np.unique"), (sized, "jnp.max"), (chosen, "if numpyro.sample")])
@pytest.mark.parametrize("method", [RVGA, BONG])
def test_models_that_need_numbers_of_a_stream_are_told_where_to_put_them(method, mean, line):
    rows = blocks({"group": Y, "y": X[:, 0]}, 25)
    with pytest.raises(ValueError, match=f"{line}.*keyword argument, as in run\\(blocks, num_groups=12") as error:
        method(that_needs_numbers(mean)).run(rows, progress_bar=False)
    assert any("not given and are None: 'num_groups'" in note for note in error.value.__cause__.__notes__)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_a_latent_value_that_python_decides_by_is_named_by_its_line(method):
    with pytest.raises(ValueError, match=r"value of a latent site in line \d+ of test_bad_input.py.*jnp.where"):
        method(that_needs_numbers(chosen)).run({"group": Y, "y": X[:, 0]}, progress_bar=False)


@pytest.mark.parametrize(
    "use",
    [
        lambda posterior, rows: posterior.predictive(jax.random.key(0), rows),
        lambda posterior, rows: posterior.to_arviz(rows | {"y": Y}),
    ],
    ids=["predictive", "to_arviz"],
)
def test_a_posterior_refuses_rows_of_other_columns_by_name(use):
    posterior = run(logistic, {"X": X, "y": Y})
    with pytest.raises(ValueError, match=r"'X' has rows of shape \(4,\).*have \(2,\)"):
        use(posterior, {"X": np.ones((NUM_ROWS, 4))})


def test_rows_of_later_blocks_are_counted_from_the_start():
    with pytest.raises(ValueError, match="'X' holds NaN in row 73"):
        run(logistic, blocks({"X": spoilt(X, (73, 0), np.nan), "y": Y}, 25))


# ---------------------------------------------------------------------- streams
def test_empty_streams_are_refused():
    with pytest.raises(ValueError, match="empty"):
        run(logistic, iter([]))


def test_blocks_that_hold_other_arrays_are_refused_with_their_row():
    with pytest.raises(ValueError, match=r"row 50.*\['X'\].*\['X', 'y'\]"):
        run(logistic, [{"X": X[:50], "y": Y[:50]}, {"X": X[50:]}])


def test_blocks_of_another_width_are_refused_by_name():
    with pytest.raises(ValueError, match="'X'"):
        run(logistic, [{"X": X[:50], "y": Y[:50]}, {"X": X[50:, :1], "y": Y[50:]}])


def test_streams_are_not_shuffled():
    with pytest.raises(ValueError, match="shuffle=True"):
        run(logistic, blocks({"X": X, "y": Y}, 25), shuffle=True)


def test_a_data_frame_is_refused_with_what_to_give_instead():
    frame = pandas.DataFrame({"X": X[:, 0], "y": Y})
    for data in (frame, iter([frame])):
        with pytest.raises(ValueError, match=r"data is a DataFrame: give its columns.*frame\['y'\]"):
            run(logistic, data)


def test_laplace_names_the_scale_if_there_is_no_mode():
    """Of eight effects and their scale, centered."""

    def centered(group, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 8):
            effect = numpyro.sample("effect", dist.Normal(0.0, scale))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)

    rows = {"group": np.arange(200) % 8, "y": np.arange(200) // 8 % 2}
    with pytest.raises(ValueError, match=r"no mode was found.*without bound.*'(scale|effect)'.*location \+ scale"):
        run(centered, rows, scheme="laplace")


def test_laplace_needs_the_rows_in_memory():
    with pytest.raises(ValueError, match="'laplace' needs all rows"):
        run(logistic, blocks({"X": X, "y": Y}, 25), scheme="laplace")


# ---------------------------------------------------------------------- keyword arguments
@pytest.mark.parametrize(
    "data, kwargs, message",
    [
        ({"X": X, "y": Y}, {"y": Y}, r"'y' is given twice"),
        ({"X": X, "y": Y}, {"num_groups": 3}, r"no argument 'num_groups'.*X, y"),
    ],
)
def test_unusable_keyword_arguments_are_named(data, kwargs, message):
    with pytest.raises(ValueError, match=message):
        run(logistic, data, **kwargs)


def test_scalars_of_a_stream_belong_in_keyword_arguments():
    with pytest.raises(ValueError, match=r"'tau' is a scalar.*keyword argument"):
        run(logistic_with_scale, iter([{"X": X, "y": Y, "tau": 2.0}]))


def test_missing_arguments_are_named():
    def model(X, y, num_groups):
        logistic(X, y)

    with pytest.raises(ValueError, match="needs 'num_groups'"):
        run(model, {"X": X, "y": Y})


# ---------------------------------------------------------------------- models
def no_observation(X):
    numpyro.sample("b", dist.Normal(0.0, 1.0))


def outcome_left_out(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(b, 1.0))


@pytest.mark.parametrize("model", [no_observation, outcome_left_out], ids=lambda m: m.__name__)
def test_models_without_observed_rows_are_refused(model):
    with pytest.raises(ValueError, match="no observed site"):
        run(model, {"X": X})


def test_a_missing_outcome_is_named():
    with pytest.raises(ValueError, match=r"no observed site.*the data lack 'y'"):
        run(logistic, {"X": X})


# ---------------------------------------------------------------------- indices
def grouped(group, y=None, num_groups=4):
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)


def groups(bad=None, at=37):
    """60 rows of 4 groups, of which one may be another."""
    rows = {"group": np.arange(60) % 4, "y": np.linspace(-1, 1, 60)}
    if bad is not None:
        rows["group"][at] = bad
    return rows


@pytest.mark.parametrize("bad", [4, 100, -5])
@pytest.mark.parametrize("how", ["array", "blocks", "bong", "fixed point", "update", "predictive"])
def test_an_index_of_nothing_is_refused_with_array_row_and_bound(bad, how):
    message = f"row 37 indexes what is not there: array 'group' holds {bad},.* has 4 entries, 0 to 3"
    actions = {
        "array": lambda rows: run(grouped, rows),
        "blocks": lambda rows: run(grouped, blocks(rows, 25)),
        "bong": lambda rows: shared(BONG, grouped).run(rows, progress_bar=False),
        "fixed point": lambda rows: shared(FixedPointVI, grouped).run(rows, progress_bar=False),
        "update": lambda rows: run(grouped, groups()).update(rows, progress_bar=False),
        "predictive": lambda rows: run(grouped, groups()).predictive(jax.random.key(0), {"group": rows["group"]}),
    }
    with pytest.raises(ValueError, match=message):
        actions[how](groups(bad))


def test_whole_numbers_in_floating_point_predict_as_the_integers_of_the_run():
    def model(group, y=None):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(a[group], 0.5), obs=y)

    group, key = RNG.integers(0, 5, NUM_ROWS), jax.random.key(0)
    posterior = run(model, {"group": group, "y": RNG.normal(size=NUM_ROWS)})
    expected = posterior.predictive(key, {"group": group}, num_samples=5)["y"]
    assert np.array_equal(posterior.predictive(key, {"group": group.astype(float)}, num_samples=5)["y"], expected)


def test_rows_that_index_nothing_can_be_skipped():
    rows = groups(7)
    skipped = RVGA(grouped).run(rows, progress_bar=False, on_bad_row="skip")
    others = run(grouped, {name: np.delete(array, 37, axis=0) for name, array in rows.items()})
    assert skipped.info["skipped_rows"] == [37]
    np.testing.assert_allclose(skipped.mean, others.mean, atol=1e-6)


def test_indices_from_the_end_and_those_with_a_mode_of_their_own_are_taken():
    def with_a_mode(group, y=None):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(jnp.take(effect, group, mode="clip"), 1.0), obs=y)

    last = run(grouped, groups(3))
    np.testing.assert_allclose(run(grouped, groups(-1)).mean, last.mean, atol=1e-6)
    np.testing.assert_allclose(run(with_a_mode, groups(9)).mean, last.mean, atol=1e-6)


def discrete_latent(X, y):
    chosen = numpyro.sample("chosen", dist.Bernoulli(0.5))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(1.0 * chosen, 1.0), obs=y)


def discrete_latent_of_a_row(X, y):
    with numpyro.plate("rows", X.shape[0]):
        chosen = numpyro.sample("chosen", dist.Categorical(probs=jnp.ones(3) / 3))
        numpyro.sample("y", dist.Normal(chosen, 1.0), obs=y)


def latent_of_a_row(X, y):
    with numpyro.plate("rows", X.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def latent_as_long_as_the_data(X, y):
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([X.shape[0]]).to_event(1))
    numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def latent_walk_along_the_rows(X, y):
    effect = numpyro.sample("effect", dist.GaussianRandomWalk(1.0, num_steps=X.shape[0]))
    numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def no_latent(X, y):
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, 0], 1.0), obs=y)


def parameter_alone(X, y):
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(numpyro.param("mean", 0.0), 1.0), obs=y)


@pytest.mark.parametrize(
    "method, model",
    [
        (RVGA, no_latent),
        (FixedPointVI, no_latent),
        (BONG, no_latent),
        (RVGA, parameter_alone),
        (FixedPointVI, parameter_alone),
    ],
)
def test_models_without_latents_are_refused(method, model):
    with pytest.raises(ValueError, match="no latent site"):
        method(model).run({"X": X, "y": X[:, 0]}, progress_bar=False)


@pytest.mark.parametrize(
    "model, site",
    [
        (discrete_latent, "chosen"),
        (discrete_latent_of_a_row, "chosen"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_discrete_latents_are_refused_by_name(model, site):
    with pytest.raises(NotImplementedError, match=f"site '{site}'"):
        run(model, {"X": X, "y": X[:, 0]})


@pytest.mark.parametrize("method", [RVGA, FixedPointVI, BONG])
@pytest.mark.parametrize("model", [discrete_latent, discrete_latent_of_a_row])
def test_models_of_discrete_latents_alone_are_refused(method, model):
    with pytest.raises(NotImplementedError, match=r"all latent sites.*discrete \(site 'chosen'\)"):
        method(model).run({"X": X, "y": X[:, 0]}, progress_bar=False)


@pytest.mark.parametrize(
    "model", [latent_of_a_row, latent_as_long_as_the_data, latent_walk_along_the_rows], ids=lambda model: model.__name__
)
def test_latents_of_single_rows_of_a_stream_are_refused_by_name(model):
    with pytest.raises(NotImplementedError, match="site 'effect'"):
        run(model, blocks({"X": X, "y": X[:, 0]}, 50))


def autoregression_in_a_plate(y):
    rho = numpyro.sample("rho", dist.Normal(0.0, 1.0))
    with numpyro.plate("steps", y.shape[0] - 1):
        numpyro.sample("y", dist.Normal(rho * y[:-1], 1.0), obs=y[1:])


def autoregression_without_a_plate(y):
    rho = numpyro.sample("rho", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(rho * y[:-1], 1.0), obs=y[1:])


def centered_inside(y, x):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * (x - x.mean()), 1.0), obs=y)


def standardized_inside(y, x):
    """One row by itself has no standard deviation."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * (x - x.mean()) / x.std(), 1.0), obs=y)


def lagged_by_roll(y):
    rho = numpyro.sample("rho", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(rho * jnp.roll(y, 1), 1.0), obs=y)


def jointly_normal_rows(y):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    covariance = scale * (0.5 * jnp.eye(y.shape[0]) + 0.5)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(y.shape[0]), covariance), obs=y)


@pytest.mark.parametrize(
    "model",
    [
        autoregression_in_a_plate,
        autoregression_without_a_plate,
        centered_inside,
        standardized_inside,
        lagged_by_roll,
        jointly_normal_rows,
    ],
    ids=lambda model: model.__name__,
)
def test_coupled_rows_of_a_stream_are_refused_by_site_with_the_joint_way(model):
    data = {"y": X[:, 0], "x": X[:, 1] + 3.0} if model in (centered_inside, standardized_inside) else {"y": X[:, 0]}
    message = r"site 'y': the rows of the data are not conditionally independent.*all rows at once.*RVGA\(model\).run"
    with pytest.raises(NotImplementedError, match=message):
        run(model, blocks(data, 50))


def test_a_model_that_fails_on_a_few_rows_of_a_stream_is_refused_by_its_factor():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.factor("distance", -((y - mean @ jnp.ones(3) if y.shape[0] == CHECKED_ROWS else y - mean) ** 2))

    with pytest.raises(NotImplementedError, match=f"site 'distance': .*on {CHECKED_ROWS} rows the model fails"):
        run(model, blocks({"y": X[:5, 0]}, 50))


# ---------------------------------------------------------------------- rows without a finite likelihood
def truncated(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("window", jnp.where(x > 9.0, -jnp.inf, -0.5 * (y - slope * x) ** 2))


def test_a_row_of_likelihood_zero_is_named_and_the_init_posterior_stays_as_it_was():
    good = {"x": X[:40, 0], "y": X[:40, 1]}
    bad = {"x": spoilt(X[40:60, 0], 3, 10.0), "y": X[40:60, 1]}
    before = run(truncated, good)
    mean, covariance = np.array(before.mean), np.array(before.covariance)
    for attempt in (before.update, lambda data: run(truncated, data, init=before)):
        with pytest.raises(ValueError, match=r"'window' gives row 3 a log-likelihood of -inf.*init is unchanged"):
            attempt(bad)
    np.testing.assert_array_equal(before.mean, mean)
    np.testing.assert_array_equal(before.covariance, covariance)
    after = before.update({"x": X[40:60, 0], "y": X[40:60, 1]})
    x, y = X[:60, 0], X[:60, 1]
    np.testing.assert_allclose(after.mean, [x @ y / (1 + x @ x)], atol=1e-6)
    np.testing.assert_allclose(after.covariance, [[1 / (1 + x @ x)]], atol=1e-6)


@pytest.mark.parametrize("method", [RVGA, BONG, FixedPointVI])
def test_an_init_that_is_no_posterior_is_refused_with_its_type(method):
    with pytest.raises(ValueError, match=r"init must be a posterior.*of type dict.*give the model's another one"):
        method(logistic).run({"X": X, "y": Y}, init={"b": np.zeros(2)}, progress_bar=False)


def test_times_are_to_be_numbers():
    def drifting(X, time, y=None):
        logistic(X, y)

    time = np.array(["2024-01-01", "2024-01-02"], "datetime64[D]")
    with pytest.raises(ValueError, match=r"'time' has dtype datetime64.*Convert times to numbers.*from a near origin"):
        RVGA(drifting, dynamics=RandomWalk(0.1, time="time")).run({"time": time, "X": X[:2], "y": Y[:2]})


def test_init_posteriors_of_another_model_are_refused():
    other = run(truncated, {"x": X[:, 0], "y": X[:, 1]})
    with pytest.raises(ValueError, match=r"slope\(\), the model b\(2,\)"):
        run(logistic, {"X": X, "y": Y}, init=other)


# ---------------------------------------------------------------------- options and order of calls
@pytest.mark.parametrize(
    "options, message",
    [
        ({"scheme": "newton"}, r"scheme must be one of .*'implicit'.*not 'newton'"),
        ({"expectation": "magic"}, r"expectation must be one of .*'quadrature'.*not 'magic'"),
        ({"order": 3}, r"order must be one of .*not 3"),
        ({"order": "second"}, r"order must be one of .*not 'second'"),
        ({"family": "banded"}, r"family must be one of 'full', .*not 'banded'"),
        ({"block_size": 0}, r"block_size must be 'auto' or an integer of at least 1, not 0"),
        ({"block_size": 2.5}, r"block_size .*not 2.5"),
        ({"block_size": True}, r"block_size .*not True"),
        ({"block_size": "large"}, r"block_size .*not 'large'"),
        ({"first_block": -1}, r"first_block .*at least 0, not -1"),
        ({"max_iterations": 0}, r"max_iterations must be a positive integer, not 0"),
        ({"max_iterations": True}, r"max_iterations must be a positive integer, not True"),
        ({"num_samples": 1.5}, r"num_samples must be a positive integer, not 1.5"),
        ({"tolerance": 0.0}, r"tolerance must be positive, not 0.0"),
        ({"tolerance": float("nan")}, r"tolerance must be positive, not nan"),
        ({"improper_prior_scale": -1.0}, r"improper_prior_scale must be positive, not -1.0"),
        ({"scheme": "explicit", "block_size": 16}, r"scheme='explicit'.*block_size"),
        ({"scheme": "ekf", "first_block": 16}, r"scheme='ekf'.*first_block"),
        ({"scheme": "qkf", "expectation": "exact"}, r"scheme='qkf'.*expectation"),
        ({"expectation": "probit", "order": 1}, r"expectation='probit'.*order"),
    ],
    ids=str,
)
def test_unknown_options_are_named_with_their_choices(options, message):
    with pytest.raises(ValueError, match=message):
        RVGA(logistic, **options)


def counts(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("visits", dist.NegativeBinomial2(jnp.exp(slope * x), 2.0), obs=y)


@pytest.mark.parametrize("options", [{"scheme": "qkf"}, {"expectation": "probit"}, {"expectation": "exact"}], ids=str)
def test_expectations_that_a_site_does_not_have_are_refused_by_its_name(options):
    with pytest.raises(ValueError, match="site 'visits'"):
        RVGA(counts, **options).run({"x": X[:, 0], "y": Y}, progress_bar=False)


def test_functional_form_needs_init_first():
    rvga = RVGA(logistic)
    with pytest.raises(RuntimeError, match=r"call init\(data\) first"):
        rvga.update(None, {"X": X, "y": Y})
    with pytest.raises(RuntimeError, match=r"call init\(data\) first"):
        rvga.posterior(None)


@pytest.mark.parametrize("method", [RVGA, BONG])
def test_updates_with_other_columns_name_the_array_and_both_shapes(method):
    def linear(X, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    posterior = method(linear).run({"X": X, "y": X[:, 0]}, progress_bar=False)
    with pytest.raises(ValueError, match=r"'X' has rows of shape \(3,\), and those .* absorbed have \(2,\)"):
        posterior.update({"X": np.ones((5, 3)), "y": np.ones(5)}, progress_bar=False)


@pytest.mark.parametrize("method", [RVGA, BONG])
def test_updates_with_an_array_that_the_model_was_not_read_with_are_refused_by_name(method):
    def levels(x, y=None, zone=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b + x[:, None], 1.0).to_event(1), obs=y)

    data = {"x": X[:, 0], "y": np.stack([Y, Y, Y], axis=1) + 0.0}
    inference = method(levels)
    state = inference.init(data)
    with pytest.raises(ValueError, match="fitted without data array 'zone'"):
        inference.update(state, data | {"zone": np.zeros(NUM_ROWS, np.int32)})


@pytest.mark.parametrize("options", [{"local": "prior"}, {"family": "diagonal"}, {"method": BONG}], ids=str)
@pytest.mark.parametrize("kind", ["discrete", "positive"])
def test_methods_that_do_not_integrate_latents_of_rows_say_so(options, kind):
    def model(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.5) if kind == "discrete" else dist.Gamma(2.0, 2.0))
            numpyro.sample("y", dist.Normal(a + z, 1.0), obs=y)

    what = "do not sum over states" if kind == "discrete" else "take only Normal ones"
    others = {name: value for name, value in options.items() if name != "method"}
    with pytest.raises(NotImplementedError, match=rf"site 'z' is a .*BONG, other families .* {what}") as raised:
        options.get("method", RVGA)(model, **others).run(iter([{"y": X[:, 0]}]), progress_bar=False)
    assert "all rows at once" not in str(raised.value)
