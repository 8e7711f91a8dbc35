import jax
import jax.numpy as jnp
import numpy as np

from numpyro_rvga.core.compilation import LLVM_LEVEL, Compiled, _exists


def power(x, *, exponent=2):
    return x**exponent


def test_works_inside_other_transformations():
    function = Compiled(power, ("exponent",))
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.jit(function)(x), np.asarray(x) ** 2)
    np.testing.assert_allclose(jax.vmap(function)(x), np.asarray(x) ** 2)
    np.testing.assert_allclose(jax.grad(lambda u: jnp.sum(function(u)))(x), 2 * np.asarray(x))


def test_options_that_this_version_of_the_compiler_does_not_know_are_left_out():
    assert not _exists("xla_option_of_another_version", True)
    assert _exists(LLVM_LEVEL, 1)
