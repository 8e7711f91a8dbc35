"""Real posteriors with gold-standard draws: RVGA's means and standard deviations against them.

python benchmarks/posteriordb.py --data FOLDER [--tag glm]      FOLDER holds models.py, data/ and reference/
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
import time

import jax
import numpy as np
import numpyro

from numpyro_rvga import RVGA


def load_models(folder: str):
    spec = importlib.util.spec_from_file_location("posteriordb_models", pathlib.Path(folder) / "models.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.POSTERIORS


def errors(entry, posterior, num_samples: int) -> tuple[float, float]:
    """Largest |mean - reference| / sd and |log(sd / reference sd)| over the parameters."""
    draws = posterior.sample_posterior(jax.random.key(0), (num_samples,))
    reference, means, deviations = entry.reference(), [], []
    for i, (name, site, index) in enumerate(entry.params()):
        values = np.asarray(draws[site])[(slice(None), *index)]
        values = np.log(values) if name.startswith("log ") else values
        means.append(abs(values.mean() - reference["mean"][i]) / reference["sd"][i])
        deviations.append(abs(np.log(values.std() / reference["sd"][i])))
    return max(means), max(deviations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tag", default="glm")
    parser.add_argument("--samples", type=int, default=100_000)
    args = parser.parse_args()
    numpyro.enable_x64()
    passed = total = 0
    for name, entry in load_models(args.data).items():
        if entry.tag != args.tag:
            continue
        arguments = entry.kwargs()
        rows = {k: np.asarray(v) for k, v in arguments.items() if k in entry.rows}
        others = {k: v for k, v in arguments.items() if k not in entry.rows}
        start = time.perf_counter()
        posterior = RVGA(entry.model).run(rows, progress_bar=False, **others)
        spent = time.perf_counter() - start
        mean_error, deviation_error = errors(entry, posterior, args.samples)
        good = mean_error < 0.1 and deviation_error < 0.1
        passed, total = passed + good, total + 1
        print(
            f"{name:46s} {mean_error:7.3f} sd {deviation_error:7.3f}  {spent:6.1f} s  {'' if good else 'outside'}",
            flush=True,
        )
    print(f"{passed} of {total} within 0.1 sd and 10%")


if __name__ == "__main__":
    main()
