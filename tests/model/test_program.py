"""What a program knows of a model's cost."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga.model import Program
from numpyro_rvga.model.layout import Layout


def predictor(name, X, w):
    """Of rows (n, 6, 6), with the numbers in the largest array that depends on a row and on the weights."""
    if name == "linear":
        return X.reshape(len(X), 36) @ w
    if name == "hidden layer of 12":
        return jnp.sum(jnp.tanh(X.reshape(len(X), 36)[:, :3] @ w.reshape(3, 12)), axis=-1)
    if name == "in a function that is compiled":
        return jax.jit(lambda x: jnp.sum(jnp.tanh(x[:, 0, :3] @ w.reshape(3, 12)), axis=-1))(X)
    kernels = w.reshape(4, 1, 3, 3)
    return jnp.sum(jax.lax.conv_general_dilated(X[:, None], kernels, (1, 1), "SAME"), axis=(1, 2, 3))


@pytest.mark.parametrize(
    "name, numbers",
    [("linear", 1), ("hidden layer of 12", 12), ("in a function that is compiled", 12), ("convolution", 4 * 36)],
)
def test_the_largest_array_of_a_row_is_found_whatever_the_row_itself_takes(name, numbers):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([36]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(predictor(name, X, w), 1), obs=y)

    program = Program(model, {"X": np.ones((5, 6, 6)), "y": np.zeros(5)}, {})
    assert program.largest_array == numbers
    assert program.convolves == (name == "convolution")


def test_gradients_of_sites_are_joined_in_one_pass_over_theta():
    """As slices they would be padded with zeros and added up, one pass over theta for each site."""
    layout = Layout({"a": (2, 3), "none": (0,), "b": (), "c": (4,)})
    theta = jnp.arange(11.0)

    def total(theta):
        return sum(jnp.sum((place + 1) * x**2) for place, x in enumerate(layout.unravel(theta).values()))

    np.testing.assert_array_equal(layout.ravel(layout.unravel(theta)), theta)
    weights = np.repeat([1.0, 3.0, 4.0], [6, 1, 4])
    np.testing.assert_allclose(jax.grad(total)(theta), 2 * weights * theta)
    operations = {eqn.primitive.name for eqn in jax.make_jaxpr(jax.grad(total))(theta).eqns}
    assert "concatenate" in operations and "pad" not in operations


def test_indices_are_known_inside_a_traced_function():
    layout = Layout({"a": (2, 3), "b": (), "c": (4,)})
    found = jax.jit(lambda x: x[layout.indices["c"]] + x[layout.indices["b"]])(jnp.arange(11.0))
    np.testing.assert_array_equal(found, [13.0, 14.0, 15.0, 16.0])
