"""A million rows in single precision, ill-conditioned: is q positive definite, and how far from double precision?

python -m benchmarks float32 [--rows N] [--parameters P] [--condition NUMBER]
"""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import RVGA


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def make_rows(n: int, p: int, condition: float) -> dict[str, np.ndarray]:
    """Covariates whose second-moment matrix has the given condition number."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(p, p)))[0]
    X = (rng.normal(size=(n, p)) * np.geomspace(1, condition**-0.5, p)) @ basis
    X = X.astype(np.float32)
    return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-X @ rng.normal(size=p)))).astype(np.float32)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--parameters", type=int, default=50)
    options.add_argument("--condition", type=float, default=1e4)
    args = options.parse_args()
    rows = make_rows(args.rows, args.parameters, args.condition)
    found, report = {}, Report(args.output / "float32.json")
    for name, options in {"default": {}, "block_size=1": {"block_size": 1}}.items():
        for double in (False, True):
            with jax.enable_x64(double):
                data = {k: v.astype(np.float64) for k, v in rows.items()} if double else rows
                posterior = RVGA(model, **options).run(data, progress_bar=False)
                found[double] = np.asarray(posterior.mean, np.float64), np.asarray(posterior.covariance, np.float64)
        smallest = float(np.linalg.eigvalsh(found[False][1])[0])
        deviation = np.sqrt(np.diag(found[True][1]))
        means = float(np.max(np.abs(found[False][0] - found[True][0]) / deviation))
        spread = float(np.max(np.abs(np.sqrt(np.diag(found[False][1])) / deviation - 1)))
        report(method=name, smallest_eigenvalue=smallest, error_of_means_in_sds=means, relative_error_of_sds=spread)


if __name__ == "__main__":
    main()
