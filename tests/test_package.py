"""Which part of the package may import which, and what importing it costs."""

import ast
import inspect
import subprocess
import sys
import traceback
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_rvga
from numpyro_rvga import RVGA, FixedPointVI, distributed, metrics
from numpyro_rvga.core.expectations import closed_forms

PACKAGE = Path(numpyro_rvga.__file__).parent
# By folder, from the bottom up: a room imports only from itself and from rooms below it.
FLOORS = {
    ".": """core model options files progress user_warnings dynamics initialization engines streams results presets bong
        families group_streams rvga fixed_point metrics clusters distributed""".split(),
    "core": """pytrees special matrices jaxprs compilation exponential expectations gaussians updates
        groups""".split(),
    "model": """layout data handlers terms bound identity program own_density bad_rows half_lines
        hyperparameters members predictive site_families""".split(),
}
HEAVY = ["arviz", "dask", "distributed", "matplotlib", "pyarrow", "scipy.stats", "tqdm.auto"]


def imported_modules(path):
    """Absolute names of the modules that a file imports, at its top or inside functions, but not for types alone."""
    package = [PACKAGE.name, *path.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ([module] if node.module else [f"{module}.{alias.name}" for alias in node.names])


def files_of(folder, room):
    return sorted((folder / room).rglob("*.py")) or [folder / f"{room}.py"]


def test_core_knows_neither_numpyro_nor_arviz_nor_the_rest():
    for path in files_of(PACKAGE, "core"):
        for module in imported_modules(path):
            assert module.split(".")[0] not in ("numpyro", "arviz", "tqdm", "matplotlib"), (path.name, module)
            assert not module.startswith(PACKAGE.name) or module.startswith(f"{PACKAGE.name}.core"), (path.name, module)


@pytest.mark.parametrize("folder", FLOORS)
def test_every_room_has_its_floor(folder):
    rooms = {
        path.stem for path in (PACKAGE / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert sorted(rooms - {"__init__"}) == sorted(FLOORS[folder])


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_run_downward(folder):
    prefix = ".".join([PACKAGE.name, *Path(folder).parts]) + "."
    for height, room in enumerate(FLOORS[folder]):
        above = FLOORS[folder][height + 1 :]
        for path in files_of(PACKAGE / folder, room):
            for module in imported_modules(path):
                inside = module.startswith(prefix)
                assert not (inside and module.removeprefix(prefix).split(".")[0] in above), (path.name, module)


def test_no_module_imports_itself_by_way_of_others():
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set(imported_modules(path)) & set(modules) for name, path in modules.items()}
    assert graph["numpyro_rvga.bong"] >= {"numpyro_rvga.presets", "numpyro_rvga.engines.online"}
    TopologicalSorter(graph).prepare()  # which refuses circles


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {str(path) for path, length in lengths.items() if length > 400}


def test_no_file_imports_another_for_its_types_alone():
    """As files do that need each other: what both need belongs below them."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.If) and any(isinstance(x, ast.ImportFrom) and x.level for x in node.body):
                found.add(path.name)
    assert not found


def test_few_calls_lead_from_run_to_the_mathematics(monkeypatch):
    depths = []

    def logistic(mean, covariance, coefficients):
        depths[-1].append(sum(str(PACKAGE) in frame.filename for frame in traceback.extract_stack()))
        return closed_forms.logistic_mixture(mean, covariance, coefficients)

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

    monkeypatch.setitem(closed_forms.EXACT, closed_forms.Logistic, logistic)
    data = {"x": np.linspace(-1, 1, 30), "y": np.arange(30) % 3 > 0}
    for method in (RVGA(model), FixedPointVI(model)):
        depths.append([])
        method.run(data, progress_bar=False)
    assert max(depths[0]) <= 16 and max(depths[1]) <= 13, depths  # two of them compile


def test_heavy_modules_are_imported_when_needed():
    # NumPyro imports tqdm by itself.
    code = (
        "import sys, numpyro.infer, numpyro.infer.autoguide; before = set(sys.modules); import numpyro_rvga; "
        f"print([name for name in {HEAVY!r} if name in set(sys.modules) - before])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def public_functions():
    """Names and functions: what the package exports, the methods of its classes, and its two public modules."""
    for name in numpyro_rvga.__all__:
        item = getattr(numpyro_rvga, name)
        members = inspect.getmembers(item, callable) if inspect.isclass(item) else []
        yield from ((f"{name}.{n}", member) for n, member in members if n == "__init__" or not n.startswith("_"))
        if not inspect.isclass(item):
            yield name, item
    for module in (metrics, distributed):
        for name, item in vars(module).items():
            if inspect.isfunction(item) and item.__module__ == module.__name__ and not name.startswith("_"):
                yield name, item


def test_public_functions_are_typed():
    functions = dict(public_functions())
    assert {"RVGA.__init__", "Posterior.merge", "arrow_blocks", "nlpd", "run"} <= set(functions)
    for name, function in functions.items():
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            assert parameter.name == "self" or parameter.annotation is not inspect.Parameter.empty, (name, parameter)
        assert name.endswith("__init__") or signature.return_annotation is not inspect.Signature.empty, name
