import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA
from numpyro_rvga.core import compilation
from numpyro_rvga.core.compilation import (
    LLVM_LEVEL,
    OLDER_EMITTERS,
    Compiled,
    _exist,
    _options,
    single_kernel,
    with_routines,
)
from numpyro_rvga.core.jaxprs.primitives import equations

ROUTINE = "xla_cpu_small_call"


def power(x, *, exponent=2):
    return x**exponent


def test_works_inside_other_transformations():
    function = Compiled(power, ("exponent",))
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.jit(function)(x), np.asarray(x) ** 2)
    np.testing.assert_allclose(jax.vmap(function)(x), np.asarray(x) ** 2)
    np.testing.assert_allclose(jax.grad(lambda u: jnp.sum(function(u)))(x), 2 * np.asarray(x))


def test_options_that_this_version_of_the_compiler_does_not_know_are_left_out():
    assert not _exist({LLVM_LEVEL: 1, "xla_option_of_another_version": True})
    assert _exist({LLVM_LEVEL: 1})


def doublings(x):
    return jax.lax.while_loop(lambda y: y @ y < 100, lambda y: 2 * y + jnp.exp(-y), x)


def many_operations(x):
    for _ in range(3000):
        x = x + 1
    return x


def test_a_function_of_a_few_numbers_is_single_kernel_on_cpus():
    x = jnp.arange(1.0, 4.0)
    wrapped = jax.jit(single_kernel(doublings))
    np.testing.assert_allclose(wrapped(x), doublings(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(wrapped)(x[:, None]), jax.vmap(doublings)(x[:, None]), rtol=1e-6)
    assert (ROUTINE in wrapped.lower(x).as_text()) == (jax.default_backend() == "cpu")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x[0],
        lambda x: x * jnp.sum(jnp.cos(x[0] @ x @ x[1]) * jnp.arange(40_000.0)),
        lambda x: jnp.einsum("ij,ijk->ik", x, jnp.stack([x, x])),
    ],
)
def test_a_product_with_a_vector_and_a_long_sum_have_a_place_in_a_routine(function):
    x = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    compiled = Compiled(lambda x: single_kernel(function)(x), routines=True)
    np.testing.assert_allclose(compiled(x), function(x), rtol=1e-6)
    lowered = jax.jit(single_kernel(function)).lower(x)
    assert (ROUTINE in lowered.as_text()) == (jax.default_backend() == "cpu")


@pytest.mark.parametrize("function", [lambda x: jnp.full(2**17, x[0, 0]), many_operations])
def test_long_arrays_and_many_operations_are_no_routine(function):
    assert ROUTINE not in jax.jit(single_kernel(function)).lower(jnp.ones((2, 2))).as_text()


def test_what_the_compiler_refuses_as_a_routine_is_compiled_by_operations():
    def function(x):
        if with_routines.get():
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: as a routine")
        return single_kernel(doublings)(x)

    x = jnp.arange(1.0, 4.0)
    compiled = Compiled(function, routines=True)
    for _ in range(2):
        np.testing.assert_allclose(compiled(x), doublings(x), rtol=1e-6)
    assert with_routines.get()
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNIMPLEMENTED"):
        Compiled(function)(x)


@pytest.mark.parametrize("function", [jnp.linalg.cholesky, jnp.sort, lambda x: x @ x, lambda x: x.at[:, [0, 1]].add(1)])
def test_what_has_no_place_in_a_routine_is_left_as_it_is(function):
    x = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    wrapped = jax.jit(single_kernel(lambda x: jax.lax.cond(x[0, 0] > 0, function, jnp.negative, x)))
    np.testing.assert_allclose(wrapped(x), function(x), rtol=1e-6)
    assert ROUTINE not in wrapped.lower(x).as_text()


def regression(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ b, scale), obs=y)


def counts(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ b), 2.0), obs=y)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="routines are for CPUs")
@pytest.mark.parametrize("model", [regression, counts])
@pytest.mark.parametrize(
    "method",
    [
        lambda model: RVGA(model, block_size=1, shuffle=False, certify=False),
        lambda model: BONG(model, hessian="lin-hess"),
        lambda model: BONG(model, hessian="lin-hess", family="diagonal"),
    ],
    ids=["RVGA", "BONG", "BONG, diagonal"],
)
def test_the_update_by_a_row_is_one_routine(monkeypatch, model, method):
    routines = []
    as_routine = compilation._as_routine
    monkeypatch.setattr(compilation, "_as_routine", lambda f: routines.append(f.__name__) or as_routine(f))
    X = np.random.default_rng(0).normal(size=(30, 3))
    method(model).run({"X": X, "y": (X[:, 0] > 0).astype(int)}, progress_bar=False)
    assert "body" in routines  # of the loop over rows


def test_what_the_user_has_set_is_left_to_the_user(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert _options(1)[LLVM_LEVEL] == 1
    monkeypatch.setenv("XLA_FLAGS", f"--{LLVM_LEVEL}=0")
    assert LLVM_LEVEL not in _options(1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the library is for CPUs")
@pytest.mark.parametrize("level", [0, 1])
def test_no_sum_calls_the_library_that_has_ended_processes(monkeypatch, level):
    monkeypatch.setenv("XLA_FLAGS", "")
    x = jnp.ones((300, 200))
    options = _options(level)
    program = jax.jit(lambda x: jnp.sum(x * x), compiler_options=options).lower(x).compile().as_text()
    assert "reduce" in program and "ynn_fusion" not in program


def test_functions_of_long_arrays_have_the_compilers_own_emitters(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    name, chosen = OLDER_EMITTERS
    assert _options(1).get(name, chosen) is False
    assert name not in _options(1, long_arrays=True)
    assert Compiled(power, ("exponent",), long_arrays=True)(3.0, exponent=2) == 9.0


def test_the_level_of_optimization_reaches_the_compiler(monkeypatch):
    made = []
    monkeypatch.setattr(jax, "jit", lambda function, **options: made.append(options.get("compiler_options")))
    Compiled(power, ("exponent",), level=0)
    Compiled(power, ("exponent",))
    if LLVM_LEVEL in _options(1):
        assert [options[LLVM_LEVEL] for options in made if options] == [0, 1]


def network(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(X @ w) @ v), obs=y)


@pytest.mark.parametrize(("chosen", "expected"), [(None, "HIGHEST"), ("tensorfloat32", "HIGH")])
@pytest.mark.parametrize("method", [RVGA, BONG])
def test_matrix_products_have_the_precision_of_their_factors_unless_the_user_chooses_another(method, chosen, expected):
    rows = {"X": np.ones((4, 3), np.float32), "y": np.ones(4, int)}
    with jax.default_matmul_precision(chosen):
        fitting = method(network)
        jaxpr = jax.make_jaxpr(fitting.update)(fitting.init(rows), rows)
    assert precisions_in(jaxpr) == {expected}


def test_the_posteriors_own_arrays_have_the_precision_of_their_factors():
    rows = {"X": np.ones((4, 3), np.float32), "y": np.ones(4, int)}
    posterior = BONG(network, family="low-rank", rank=2).run(rows, progress_bar=False)
    draws = functools.partial(posterior.sample_unconstrained, sample_shape=(3,))
    assert precisions_in(jax.make_jaxpr(draws)(jax.random.key(0))) == {"HIGHEST"}
    assert precisions_in(jax.make_jaxpr(posterior.log_prob_unconstrained)(posterior.mean)) == {"HIGHEST"}


def precisions_in(jaxpr):
    products = [e.params["precision"] for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    return {p.name for pair in products for p in pair}
