"""The examples in docstrings run, and everything that a newcomer calls first has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import numpyro_rvga
from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior, metrics

# Besides all that the package exports, and all metrics.
METHODS = {
    RVGA: "run init update posterior stream_groups",
    BONG: "run preset with_learning_rate",
    FixedPointVI: "run conditions",
    Posterior: """sample_posterior median quantiles log_prob print_summary predictive to_arviz khat nuts init_params
        save load merge update integrate resample""",
}
NEEDED = {"ParquetRows": "pyarrow", "arrow_blocks": "pyarrow", "init_to_module": "flax"}


def objects():
    yield from (getattr(numpyro_rvga, name) for name in numpyro_rvga.__all__)
    public = [x for name, x in vars(metrics).items() if inspect.isfunction(x) and not name.startswith("_")]
    yield from (x for x in public if x.__module__ == metrics.__name__)
    yield from (getattr(kind, name) for kind, names in METHODS.items() for name in names.split())


def name_of(item):
    return f"{item.__module__}.{item.__qualname__}"


EXPLAINED = {name_of(item): item for item in objects()}


def examples_of(item, names):
    finder = doctest.DocTestFinder(recurse=False)
    found = finder.find(item, name_of(item), module=inspect.getmodule(item), globs=names)
    assert found and found[0].examples, f"the docstring of {name_of(item)} has no example"
    return found[0]


def run(item, names):
    """Run an object's example; the names that are known after it."""
    report = []
    examples, runner = examples_of(item, names), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(examples, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)
    return {name: value for name, value in examples.globs.items() if name != "__builtins__"}


@pytest.fixture(scope="module")
def names_of_rvga():
    """The model, the data and the posterior that other examples go on with, as a reader of RVGA's has them."""
    return run(RVGA, {})


@pytest.mark.parametrize("name", sorted(EXPLAINED))
def test_example(name, names_of_rvga, tmp_path, monkeypatch):
    item = EXPLAINED[name]
    if item.__name__ in NEEDED:
        pytest.importorskip(NEEDED[item.__name__])
    monkeypatch.chdir(tmp_path)  # for those that write files
    run(item, names_of_rvga)


def test_no_example_is_left_out():
    found = set()
    for module in pkgutil.walk_packages(numpyro_rvga.__path__, f"{numpyro_rvga.__name__}."):
        tests = doctest.DocTestFinder().find(importlib.import_module(module.name))
        found |= {test.name for test in tests if test.examples}
    assert found == set(EXPLAINED)
