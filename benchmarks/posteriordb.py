"""Real posteriors with gold-standard draws: means and standard deviations against them, and seconds against NUTS.

python -m benchmarks posteriordb --data FOLDER [--method fixed_point] [--tag glm] [--only NAME ...] [--nuts]

FOLDER holds models.py, data/ and reference/, and README.md with the errors of the best Gaussian. Seconds include
compilation. ``--method integrated`` is FixedPointVI with hyperparameters integrated out.
"""

from __future__ import annotations

import pathlib
import time

import jax
import numpy as np
import numpyro
from _data import load_module
from _results import Report, parser
from numpyro.infer import MCMC, NUTS

from numpyro_rvga import RVGA, FixedPointVI

METHODS = {
    "rvga": RVGA,
    "fixed_point": FixedPointVI,
    "integrated": lambda model: FixedPointVI(model, integrate="auto"),
}


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


def best_gaussian(folder: str) -> dict[str, tuple[float, float]]:
    """The last column of the folder's table: errors of the Gaussian with the least KL divergence, by posterior."""
    found = {}
    for line in (pathlib.Path(folder) / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and "/" in cells[4]:
            found[cells[0]] = tuple(float(part) for part in cells[4].split("/"))
    return found


def seconds_of_nuts(entry, num_chains: int) -> float:
    start = time.perf_counter()
    options = {"num_warmup": 1000, "num_samples": 1000, "num_chains": num_chains, "chain_method": "sequential"}
    mcmc = MCMC(NUTS(entry.model), progress_bar=False, **options)
    mcmc.run(jax.random.key(0), **entry.kwargs())
    jax.block_until_ready(mcmc.get_samples())
    return time.perf_counter() - start


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", required=True)
    options.add_argument("--method", choices=METHODS, default="rvga")
    options.add_argument("--tag", help="glm, for instance; default: all posteriors")
    options.add_argument("--only", nargs="+", help="these posteriors")
    options.add_argument("--khat", action="store_true", help="the Pareto k of importance weights too")
    options.add_argument("--nuts", action="store_true", help="time NUTS too, 1,000 + 1,000 iterations a chain")
    options.add_argument("--chains", type=int, default=4, help="of NUTS, one after the other: R-hat needs several")
    options.add_argument("--samples", type=int, default=400_000)
    args = options.parse_args()
    numpyro.enable_x64()
    report = Report(args.output / "posteriordb.json")
    best, close, passed, quicker, total = best_gaussian(args.data), 0, 0, 0, 0
    for name, entry in load_module(args.data, "models").POSTERIORS.items():
        if args.tag not in (None, entry.tag) or name not in (args.only or [name]):
            continue
        arguments = entry.kwargs()
        rows = {k: np.asarray(v) for k, v in arguments.items() if k in entry.rows}
        others = {k: v for k, v in arguments.items() if k not in entry.rows}
        start, began = time.perf_counter(), time.process_time()
        posterior = METHODS[args.method](entry.model).run(rows, progress_bar=False, **others)
        jax.block_until_ready(posterior.mean)
        spent, work = time.perf_counter() - start, time.process_time() - began
        found = errors(entry, posterior, args.samples)
        slow = seconds_of_nuts(entry, args.chains) if args.nuts else None
        passed, total, quicker = passed + (max(found) < 0.1), total + 1, quicker + (slow is not None and spent < slow)
        close += all(abs(error - least) < 0.02 for error, least in zip(found, best[name]))
        report(
            posterior=name,
            error_of_means_in_sds=found[0],
            log_error_of_sds=found[1],
            of_best_gaussian=best[name],
            seconds=spent,
            processor_seconds=work,
            integrated=posterior.info.get("integrated"),
            khat=posterior.khat(rows).khat if args.khat else None,
            nuts_seconds=slow,
            converged=bool(posterior.info["converged"]),
        )
    print(f"of {total}: {passed} within 0.1 sd and 10%, {close} within 0.02 of the best Gaussian, {quicker} sooner")


if __name__ == "__main__":
    main()
