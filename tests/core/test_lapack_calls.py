"""Programs with several calls of LAPACK for batches of matrices: these are made one after the other."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_rvga.core.compilation import jit
from numpyro_rvga.core.jaxprs.lapack_calls import in_turn, may_wait_for_ever

SIZE = 5


def matrices(count, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, SIZE, SIZE))
    return jnp.asarray(x @ np.swapaxes(x, 1, 2) + np.eye(SIZE))


def two_roots(x, y):
    return jnp.sum(jnp.linalg.cholesky(x)) + jnp.sum(jnp.linalg.cholesky(y))


def batches_and_the_rest(x, y):
    return lax.map(jnp.linalg.cholesky, x, batch_size=4), y


def in_a_scan(x, y):
    def step(total, scale):
        return total + two_roots(scale * x, y), jnp.linalg.eigvalsh(x)

    return lax.scan(step, 0.0, jnp.arange(1.0, 4.0))


def in_a_while_loop(x, y):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + two_roots(x, y)), (0, 0.0))


def in_a_choice(x, y):
    return lax.cond(x[0, 0, 0] > 0, two_roots, lambda x, y: 0.0, x, y) + two_roots(y, x)


def in_a_gradient(x, y):
    return jax.grad(two_roots, (0, 1))(x, y)


def in_functions(x, y):
    return jax.jit(two_roots)(x, y), jnp.linalg.solve(x, jnp.ones((SIZE, 1))), jax.checkpoint(two_roots)(y, x)


PROGRAMS = [two_roots, batches_and_the_rest, in_a_scan, in_a_while_loop, in_a_choice, in_a_gradient, in_functions]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_results_are_those_of_the_program(program):
    x, y = matrices(7), matrices(4, seed=1)
    closed = jax.make_jaxpr(program)(x, y)
    assert may_wait_for_ever(closed.jaxpr)
    expected = jax.tree.leaves(program(x, y))
    for results in (in_turn(closed)(x, y), jax.tree.leaves(jit(program)(x, y=y))):
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_result_that_is_not_finite_spoils_no_other():
    x, y = -matrices(3), matrices(4)
    bad, good = jit(lambda x, y: (jnp.linalg.cholesky(x), jnp.linalg.cholesky(y)))(x, y)
    assert np.isnan(bad[:, 0, 0]).all()
    np.testing.assert_array_equal(good, jnp.linalg.cholesky(y))


@pytest.mark.parametrize("counts", [(1, 1), (1, 7)])
def test_programs_with_one_call_for_a_batch_stay_as_they_are(counts):
    x, y = (matrices(count) for count in counts)
    assert not may_wait_for_ever(jax.make_jaxpr(two_roots)(x, y).jaxpr)


HANGS = """
import os
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
import jax, jax.numpy as jnp, numpy as np
from numpyro_rvga.core.compilation import jit

def roots(x, y):  # of arrays that several threads have computed, which then make the calls
    return sum(jnp.sum(jnp.linalg.cholesky(jnp.exp(0.0 * a) * a)) for a in (x, y))

x = jnp.asarray(np.broadcast_to(np.eye(18) + 0.01, (2000, 18, 18)))
compiled = jit(roots)
for _ in range(200):
    compiled(x, x[:1700]).block_until_ready()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_calls_do_not_wait_for_each_other_on_two_cores():
    settings = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", HANGS], env=settings, check=True, timeout=120)
