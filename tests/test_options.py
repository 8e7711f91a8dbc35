"""Choices that users hand in as objects of their own: an expectation, an update rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA, FixedPointVI

RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 2))
DATA = {"x": X, "y": RNG.binomial(1, 1 / (1 + np.exp(-X @ [1.0, -1.0])))}
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)


def logistic(x, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ slopes), obs=y)


def gauss_hermite(log_prob, mean, covariance):
    points = mean + jnp.linalg.cholesky(covariance) @ NODES[None]
    return jax.vmap(log_prob, in_axes=1)(points) @ (WEIGHTS / WEIGHTS.sum())


def at_the_mean(log_prob, mean, covariance):
    return log_prob(mean)


@dataclasses.dataclass(frozen=True)
class Step:
    rate: float

    def __call__(self, prior, q, derivatives):
        return q.natural_step(derivatives, self.rate, "natural", None if q is prior else prior)


def run(method):
    return method.run(DATA, progress_bar=False)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_an_expectation_of_ones_own_finds_what_closed_forms_find(method):
    own, exact = run(method(logistic, expectation=gauss_hermite)), run(method(logistic))
    np.testing.assert_allclose(own.mean, exact.mean, atol=1e-4)
    np.testing.assert_allclose(own.scale_tril, exact.scale_tril, atol=1e-4)
    assert own.elbo == pytest.approx(exact.elbo, abs=1e-3)
    assert own.info["elbo_error"] < 1e-2
    assert own.info["expectation"] == "test_options.gauss_hermite"


def test_the_error_of_an_expectation_of_ones_own_is_what_it_is_from_quadrature():
    with pytest.warns(UserWarning, match="expectations at q have an error of"):
        own = run(FixedPointVI(logistic, expectation=at_the_mean))
    theta = np.asarray(own.mean) + np.random.default_rng(0).normal(size=(20_000, 2)) @ np.asarray(own.scale_tril).T
    signs = 2 * DATA["y"] - 1
    log_liks = lambda theta: -np.logaddexp(0, -signs * (theta @ X.T)).sum(-1)  # noqa: E731
    off = log_liks(np.asarray(own.mean)) - log_liks(theta).mean()
    assert own.info["elbo_error"] == pytest.approx(off, rel=0.1)


def test_bong_takes_an_expectation_of_ones_own_as_its_hessian():
    own, exact = run(BONG(logistic, hessian=gauss_hermite)), run(BONG(logistic, hessian="auto"))
    np.testing.assert_allclose(own.mean, exact.mean, atol=1e-4)


@pytest.mark.parametrize("family", ["full", "diagonal", "low-rank"])
def test_a_rule_of_ones_own_moves_every_family(family):
    own = run(BONG(logistic, rule=Step(0.5), family=family, num_iters=4, rank=1))
    learning_rule = run(BONG(logistic, rule="blr", learning_rate=0.5, family=family, num_iters=4, rank=1))
    np.testing.assert_allclose(own.mean, learning_rule.mean, atol=1e-6)
    assert own.info["rule"] == "Step(rate=0.5)"


def test_a_rule_whose_step_leaves_no_gaussian_is_refused_with_the_last_state_kept():
    def too_far(prior, q, derivatives):
        return dataclasses.replace(q, mean=q.mean + jnp.nan)

    method = BONG(logistic, rule=too_far)
    with pytest.raises(ValueError, match="your rule's step is too long here"):
        run(method)
    assert np.isfinite(method.state.gaussian.mean).all()


def test_a_checkpoint_of_another_rule_is_refused(tmp_path):
    path = tmp_path / "state.npz"
    BONG(logistic, rule=Step(0.5), num_iters=2).run(DATA, checkpoint=path, progress_bar=False)
    with pytest.raises(ValueError, match=r"Step\(rate=0.5\)"):
        BONG(logistic, rule=Step(0.4), num_iters=2).run(DATA, checkpoint=path, resume=True, progress_bar=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expectation": "exactly"}, r"'auto', .*or a hashable function \(log_prob, mean, covariance\)"),
        ({"expectation": []}, "expectation must be one of"),
        ({"expectation": gauss_hermite, "order": 1}, "leave order at 'auto'"),
        ({"rule": "sgd"}, r"'bong', .*or a hashable function \(prior, q, derivatives\)"),
        ({"rule": Step(0.5), "learning_rate": 0.1}, "leave learning_rate at 1"),
        ({"rule": Step(0.5), "parameterization": "moment"}, "leave parameterization at 'natural'"),
    ],
)
def test_what_is_no_choice_and_no_function_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        (BONG if "rule" in options else RVGA)(logistic, **options)


def test_counts_may_be_integers_of_numpy(tmp_path):
    options = {"block_size": np.int64(20), "max_iterations": np.int32(50)}
    plain = {name: int(value) for name, value in options.items()}
    found, expected = (run(RVGA(logistic, certify=False, **own)) for own in (options, plain))
    np.testing.assert_array_equal(found.mean, expected.mean)
    found.save(tmp_path / "posterior.npz")
    checkpoint = {"checkpoint": tmp_path / "checkpoint", "every": np.int64(20)}
    streamed = RVGA(logistic, certify=False, **options).run(DATA, progress_bar=False, **checkpoint)
    again = RVGA(logistic, certify=False, **plain).run(DATA, progress_bar=False, **checkpoint, resume=True)
    np.testing.assert_array_equal(again.mean, streamed.mean)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RVGA(logistic, tolerance="a"), "tolerance must be positive, not 'a'"),
        (lambda: FixedPointVI(logistic, tolerance=[1, 2]), r"tolerance must be positive, not \[1, 2\]"),
        (lambda: RVGA(logistic, certificate_tolerance="a"), "certificate_tolerance must be positive, not 'a'"),
        (lambda: BONG(logistic, rule="blr", learning_rate="a"), "learning_rate must be positive, not 'a'"),
        (lambda: RVGA(logistic, block_size=2.5), "block_size must be 'auto' or an integer of at least 1, not 2.5"),
        (lambda: BONG(logistic).run(DATA, callback=print, callback_every=2.5), "callback_every must be .*, not 2.5"),
        (lambda: RVGA(logistic).run(DATA, rng_key=0), "rng_key must be a key of JAX's, as jax.random.key.*, not 0"),
        (lambda: BONG(logistic).run(DATA, rng_key="key"), "rng_key must be a key of JAX's, .*, not 'key'"),
        (lambda: FixedPointVI(logistic).run(DATA, rng_key=0.5), "rng_key must be a key of JAX's, .*, not 0.5"),
        (lambda: RVGA(logistic).init(DATA, rng_key=0), "rng_key must be a key of JAX's"),
    ],
)
def test_options_of_other_types_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["key", "PRNGKey"])
def test_keys_of_both_of_jaxs_types_are_taken(key):
    assert np.isfinite(RVGA(logistic).run(DATA, rng_key=key, progress_bar=False).elbo)
