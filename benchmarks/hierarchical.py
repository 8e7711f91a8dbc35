"""Hierarchical models: Gaussians of several methods against long runs of NUTS, and their bounds against time.

python -m benchmarks hierarchical [--data FOLDER] [--cases NAME ...] [--output FOLDER]
python -m benchmarks hierarchical --draw FOLDER/hierarchical.json

Without ``--data`` (a folder with load.py and the data files) there is only the survey that statsmodels ships. Seconds
and learning rates are as in ``accuracy``, and SVI sees all rows. RVGA's Laplace scheme is left out: where groups are
centered, the density grows without bound as a scale goes to nothing, so that NumPyro finds a local mode at best. Of
more than a thousand latents, methods with a full covariance to learn step by step are left out, and Laplace's, whose
Hessian NumPyro takes by all latents at once.

These models' bounds have no closed form: each is an average over the same 4,000 standard normal draws. Errors are the
largest of a mean, in standard deviations of NUTS, and the largest of a standard deviation's logarithm, in unconstrained
space. Hierarchical scales are told apart, and their errors are those of log scales. The reference is four chains of
NUTS, one after the other, of 1,000 + 2,000 iterations, kept in the output folder; the seconds of "NUTS" are a sixth of
theirs, as 1,000 + 1,000 iterations of one chain would take with a sixth of the compilation. Started from RVGA's
posterior, whose seconds are added, it takes 100 + 1,000, extrapolated where these take longer than ``--seconds``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _comparison import Effort, Reference, compare, run_cases
from _data import load_module
from _gaussians import Case, LogDensity, in_order, sampled_bound
from _methods import nuts_seconds
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_rvga import RVGA, FixedPointVI

CHAINS, WARMUP, DRAWS = 4, 1000, 2000
SCALE = "sd_"  # the names of scales begin so


# ---------------------------------------------------------------------- models and data
def effects(name: str, count: int, scale, centered: bool):
    """Effects of groups: of many rows each, or, not centered, of a few, where they are nearer to a Gaussian."""
    if centered:
        return numpyro.sample(name, dist.Normal(0, scale).expand([count]).to_event(1))
    return scale * numpyro.sample(name, dist.Normal(0, 1).expand([count]).to_event(1))


def grouped(X, groups, y=None, sizes=(), names=(), centered=True, normal=False):
    """Linear predictors with effects of crossed groups, ``groups`` has a column for each; logistic or normal rows."""
    predictor = X @ numpyro.sample("slopes", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    for column, (name, size) in enumerate(zip(names, sizes)):
        scale = numpyro.sample(SCALE + name, dist.HalfNormal(1))
        predictor = predictor + effects(name, size, scale, centered)[groups[:, column]]
    noise = numpyro.sample(SCALE + "noise", dist.HalfNormal(1)) if normal else None
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(predictor, noise) if normal else dist.Bernoulli(logits=predictor), obs=y)


def grouped_case(title: str, X, groups: dict[str, np.ndarray], y, **options: Any) -> Case:
    codes = [np.unique(labels, return_inverse=True)[1].ravel() for labels in groups.values()]
    columns = (np.ones(len(y)), *((x - x.mean()) / x.std() for x in np.asarray(X, np.float64).T))
    rows = {"X": np.column_stack(columns), "groups": np.column_stack(codes), "y": np.asarray(y, np.float64)}
    sizes = tuple(int(code.max()) + 1 for code in codes)
    model = functools.partial(grouped, sizes=sizes, names=tuple(groups), **options)
    return Case(f"{title}: {len(y):,} rows, {sum(sizes)} groups", model, rows, {})


def affairs(folder: str | None) -> Case:
    from statsmodels.datasets import fair

    table = fair.load_pandas().data
    cells = np.unique(table[["rate_marriage", "yrs_married"]].to_numpy(), axis=0, return_inverse=True)[1]
    X = table[["age", "children", "religious", "educ"]].to_numpy()
    return grouped_case("logistic, affairs", X, {"cell": cells}, table["affairs"] > 0)


def radon(folder: str) -> Case:
    data = load_module(folder).load("radon_mn")
    return grouped_case("normal, radon", data["X"], {"county": data["county"]}, data["y"], normal=True, centered=False)


def election(folder: str) -> Case:
    data = load_module(folder).load("election88")
    black, female = data["black"].astype(float), data["female"].astype(float)
    X = np.column_stack([black, female, black * female, data["v_prev_full"]])
    groups = {name: data[name] for name in ("state", "age", "edu", "age_edu")} | {"region": data["region_full"]}
    return grouped_case("logistic, election of 1988", X, groups, data["y"])


def evaluations(folder: str) -> Case:
    data = load_module(folder).load("InstEval")
    columns = dict(zip(data["x_names"], data["X"].T))
    X = np.column_stack([columns[name] for name in ("service", "studage", "lectage")])
    groups = {"student": columns["s"], "lecturer": columns["d"], "department": columns["dept"]}
    return grouped_case("normal, lecturers' evaluations", X, groups, data["y"], normal=True)


BUNDLED = {"affairs": affairs}
WITH_DATA = BUNDLED | {"radon": radon, "election": election, "evaluations": evaluations}


# ---------------------------------------------------------------------- NUTS
def long_run(case: Case, density: LogDensity, site_names: tuple[str, ...], path: Path) -> dict[str, Any]:
    """Means and standard deviations of unconstrained latents, and the seconds; read from the file if it is there."""
    if path.exists():
        return json.loads(path.read_text())
    rows = density.rows(case)
    start = density.start + jax.random.uniform(jax.random.key(1), (CHAINS, len(density.start)), minval=-1, maxval=1)
    kernel = NUTS(potential_fn=lambda theta: -density(rows, theta))
    options = {"num_chains": CHAINS, "chain_method": "sequential", "progress_bar": False}
    chains = MCMC(kernel, num_warmup=WARMUP, num_samples=DRAWS, **options)
    began = time.perf_counter()
    chains.run(jax.random.key(0), init_params=start)
    draws = np.asarray(chains.get_samples(group_by_chain=True))
    found = {
        "sites": site_names,
        "mean": draws.mean((0, 1)).tolist(),
        "deviation": draws.std((0, 1)).tolist(),
        "seconds": time.perf_counter() - began,
        "smallest effective sample size": float(np.min(effective_sample_size(draws))),
        "largest R-hat": float(np.max(gelman_rubin(draws))),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    return found


# ---------------------------------------------------------------------- runs
def run_case(case: Case, effort: Effort, kept: Path) -> dict[str, Any]:
    methods = {"RVGA": RVGA(case.model), "FixedPointVI": FixedPointVI(case.model)}
    passes = {name: lambda m=method: m.run(case.rows, progress_bar=False) for name, method in methods.items()}
    reference: dict[str, Any] = {}

    def against(best):
        names = best.site_names
        reference.update(long_run(case, LogDensity(case, names), names, kept))
        sites = best.median()
        scales = in_order({site: jnp.full_like(sites[site], site.startswith(SCALE)) for site in names}, names)
        return Reference(np.array(reference["mean"]), np.array(reference["deviation"]), scales.astype(bool))

    found = compare(case, passes, sampled_bound, effort, against)
    start = found.posteriors["RVGA"]
    warm = nuts_seconds(case, start.nuts(), 1100, effort.seconds, start.init_params(jax.random.key(0)))
    cold = reference["seconds"] * 2000 / (CHAINS * (WARMUP + DRAWS))
    nuts = {"NUTS": cold, "NUTS, warm-started": found.seconds["RVGA"] + warm}
    print("  " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in nuts.items()))
    print(f"  reference: {', '.join(f'{k} {v:.4g}' for k, v in reference.items() if isinstance(v, float))}", flush=True)
    return found.results | {"nuts": nuts, "reference": reference}


if __name__ == "__main__":
    run_cases(__doc__, "hierarchical", BUNDLED, WITH_DATA, run_case, seconds=20.0)
