"""What an installed package must do. Run as ``python -I .ci/smoke.py TREE`` in an environment that has it, where TREE
is the folder of its sources: -I keeps the tree itself from being imported."""

import importlib
import sys
import tempfile
from pathlib import Path

OPTIONAL = ("arviz", "arviz_base", "arviz_plots", "arviz_stats", "matplotlib")
for name in OPTIONAL:
    sys.modules[name] = None  # importing it raises ImportError

import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402

import numpyro_rvga  # noqa: E402
from numpyro_rvga import RVGA, Posterior  # noqa: E402


def model(X, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ slopes), obs=y)


def package_files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".py", ".typed")}


installed, sources = Path(numpyro_rvga.__file__).parent, Path(sys.argv[1]) / "numpyro_rvga"
assert Path(sys.prefix) in installed.parents, f"{installed} is not of this environment"
different = package_files(installed) ^ package_files(sources)
assert not different and (installed / "py.typed").is_file(), f"only in one of package and sources: {different}"
for path in sorted(package_files(sources)):
    if path.endswith(".py"):
        importlib.import_module(".".join(["numpyro_rvga", *Path(path).with_suffix("").parts]).removesuffix(".__init__"))

rng = np.random.default_rng(0)
X = rng.normal(size=(100, 2))
data = {"X": X, "y": (X[:, 0] > rng.logistic(size=100)).astype(int)}
posterior = RVGA(model).run(data, progress_bar=False)
posterior.print_summary()
with tempfile.TemporaryDirectory() as folder:
    posterior.save(f"{folder}/posterior.npz")
    again = Posterior.load(f"{folder}/posterior.npz", model)
np.testing.assert_array_equal(again.mean, posterior.mean)
try:
    posterior.to_arviz(data)
except ImportError as error:
    assert "pip install arviz" in str(error), error
else:
    raise AssertionError("to_arviz did without ArviZ")

for name in OPTIONAL:
    del sys.modules[name]
assert posterior.to_arviz(data, num_samples=100)["posterior"]["slopes"].shape == (1, 100, 2)
print(f"numpyro_rvga {numpyro_rvga.__version__} works as installed in {installed}")
