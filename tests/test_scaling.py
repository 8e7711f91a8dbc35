"""The benchmark of running times measures what it draws, in each of the types that it is to have."""

import jax
import numpy as np
import pytest

pytest.importorskip("psutil")
pytest.importorskip("matplotlib")


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("scaling")


def test_each_panel_is_of_parts_that_are_measured_and_have_a_color(benchmark):
    for names in benchmark.PANELS.values():
        assert set(names) <= set(benchmark.PARTS) and len(names) <= len(benchmark.COLORS)


@pytest.mark.parametrize("name", ["blr, 10 steps, low-rank", "bbb, 10 steps, full", "BONG, diagonal, lin-hess"])
def test_a_part_is_run_for_each_of_its_types_and_leaves_the_precision_as_it_was(benchmark, name):
    part = benchmark.PARTS[name]._replace(sizes=(20, 40))
    curves = list(benchmark.run(name, part))
    assert [curve["dtype"] for curve in curves] == [np.dtype(dtype).name for dtype in part.dtypes]
    assert all(len(curve["seconds"]) == len(curve["mebibytes"]) == 2 for curve in curves)
    assert jax.config.jax_enable_x64
