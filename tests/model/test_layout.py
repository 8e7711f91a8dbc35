from __future__ import annotations

import jax
import numpy as np
import pytest

from numpyro_rvga.model.layout import Layout


@pytest.mark.parametrize("shapes", [{}, {"a": ()}, {"b": (2, 3), "a": (), "c": (0,)}])
@pytest.mark.parametrize("batch", [(), (4,)])
def test_theta_is_taken_apart_and_put_together(shapes, batch):
    layout = Layout(shapes)
    theta = np.arange(np.prod(batch, dtype=int) * layout.size, dtype=np.float32).reshape(*batch, layout.size)
    sites = jax.jit(layout.unravel)(theta)
    assert {name: value.shape for name, value in sites.items()} == {n: (*batch, *s) for n, s in shapes.items()}
    if shapes:
        np.testing.assert_array_equal(layout.ravel(sites), theta)
