"""What a program says of itself: which inputs enter, and what can be computed before all inputs are known."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_rvga.core.jaxprs.interpret import depends_on, partial_evaluation


def test_depends_on_names_exactly_the_inputs_that_enter():
    inputs = {"x": jnp.ones(3), "y": jnp.ones(3), "g": jnp.arange(3), "unused": jnp.ones(2)}

    def function(arrays):
        return {
            "both": arrays["x"].sum() + arrays["y"],
            "itself": arrays["y"],
            "index": jnp.ones(5)[arrays["g"]],
            "nothing": jnp.zeros_like(arrays["x"]),
            "pair": (arrays["x"], jnp.sin(arrays["g"] * 1.0)),
        }

    found = depends_on(function, inputs)
    assert found == {
        "both": {"x", "y"},
        "itself": {"y"},
        "index": {"g"},
        "nothing": set(),
        "pair": {"x", "g"},
    }


def test_depends_on_goes_by_the_program_not_by_its_values():
    found = depends_on(lambda a: {"zero": 0.0 * a["x"], "branch": jnp.where(a["g"] > 0, a["x"], 1.0)},
                       {"x": jnp.ones(2), "g": jnp.ones(2)})  # fmt: skip
    assert found == {"zero": {"x"}, "branch": {"x", "g"}}


def test_depends_on_looks_into_control_flow_and_jitted_functions():
    def function(a):
        scanned = jax.lax.scan(lambda carry, v: (carry + v, None), 0.0, a["x"])[0]
        return {"scan": scanned, "jit": jax.jit(lambda v: v + 1.0)(a["y"])}

    assert depends_on(function, {"x": jnp.ones(4), "y": jnp.ones(4)}) == {"scan": {"x"}, "jit": {"y"}}


def test_outputs_of_one_jitted_function_depend_on_their_own_inputs():
    swap = jax.jit(lambda x, y: (y + 1.0, 2.0 * x))
    found = depends_on(lambda a: dict(zip(["first", "second"], swap(a["x"], a["y"]))), {"x": 1.0, "y": 2.0})
    assert found == {"first": {"y"}, "second": {"x"}}


# ---------------------------------------------------------------------- two stages
DATA = {"x": np.array([1.0, 2.0, 6.0]), "unused": np.ones(3)}
THETA = np.array([0.3, -0.7])


def scaled(data, theta):
    """Reads the mean and the standard deviation of x, and the whole of x where nothing uses it."""
    dead = data["x"] * theta[0]
    location = jax.jit(jnp.mean)(data["x"])
    value = theta * jnp.std(data["x"]) + location
    return {"value": value, "constant": jnp.zeros(2), "data": location, "dead": dead[:0]}


def test_stages_together_are_the_function():
    parts = partial_evaluation(scaled, DATA, THETA)
    residuals = jax.jit(parts.residuals)(DATA)
    found, expected = jax.jit(parts.finish)(residuals, THETA), scaled(DATA, THETA)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12)


def test_residuals_are_what_the_data_alone_determine_and_the_rest_needs():
    parts = partial_evaluation(lambda data, t: scaled(data, t)["value"], DATA, THETA)
    assert [shape.shape for shape in parts.shapes] == [(), ()]
    np.testing.assert_allclose(sorted(parts.residuals(DATA)), [np.std(DATA["x"]), 3.0])


def test_a_function_that_reads_no_data_has_no_residuals():
    parts = partial_evaluation(lambda data, t: jnp.exp(t), DATA, THETA)
    assert parts.shapes == () and parts.residuals(DATA) == ()
    np.testing.assert_allclose(parts.finish((), THETA), np.exp(THETA))


def test_control_flow_that_mixes_data_and_parameters_takes_the_data_it_needs():
    def function(data, t):
        return jax.lax.scan(lambda total, x: (total + x * t[0], None), 0.0, 2.0 * data["x"])[0]

    parts = partial_evaluation(function, DATA, THETA)
    assert [shape.shape for shape in parts.shapes] == [(3,)]
    np.testing.assert_allclose(parts.finish(parts.residuals(DATA), THETA), 18 * 0.3, rtol=1e-12)


def test_programs_are_the_same_if_only_the_data_differ():
    def shrunk(data, t):
        return t / np.sqrt(len(data["x"])) + data["x"].mean()

    longer = {"x": np.ones(5)}
    plain = lambda data, t: t + data["x"].mean()  # noqa: E731
    of = lambda function, data: partial_evaluation(function, {"x": data["x"]}, THETA)  # noqa: E731
    assert of(plain, DATA).is_same(of(plain, longer))
    assert not of(shrunk, DATA).is_same(of(shrunk, longer))
    table = lambda numbers: lambda data, t: t * numbers + data["x"].mean()  # noqa: E731
    assert not of(table(np.array([1.0, 2.0])), DATA).is_same(of(table(np.array([1.0, 3.0])), DATA))
