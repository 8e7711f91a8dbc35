"""How much of a program its outputs share, against counts by hand."""

import jax
import jax.numpy as jnp

from numpyro_rvga.core.jaxprs.primitives import work_of_outputs


def chain(x):
    """10 numbers; 10 more, from these; 10 others."""
    first = jnp.sin(x)
    return first, jnp.cos(first), jnp.exp(x)


def test_work_is_counted_for_each_group_and_for_it_alone():
    jaxpr = jax.make_jaxpr(chain)(jnp.ones(10)).jaxpr
    needed, own = work_of_outputs(jaxpr, [0, 1, 2])
    assert needed.tolist() == [10, 20, 10]
    assert own.tolist() == [0, 10, 10]


def test_outputs_of_one_group_share_nothing_with_others():
    jaxpr = jax.make_jaxpr(chain)(jnp.ones(10)).jaxpr
    needed, own = work_of_outputs(jaxpr, [0, 0, 1])
    assert needed.tolist() == own.tolist() == [20, 10]


def test_what_no_output_needs_does_not_count():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x) * jnp.ones(1), jnp.cos(x))[1:])(jnp.ones(3)).jaxpr
    needed, _ = work_of_outputs(jaxpr, [0])
    assert needed.tolist() == [3]
