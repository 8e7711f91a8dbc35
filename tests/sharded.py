"""Runs on meshes of forced host devices, in processes of their own; saves what they found.

Usage: sharded.py RESULT NUM_DEVICES [PROCESS NUM_PROCESSES PORT]
"""

import os
import sys

if __name__ == "__main__":
    result, num_devices, *process = sys.argv[1:]
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_devices}"
    os.environ["JAX_ENABLE_X64"] = "1"

import jax

if __name__ == "__main__" and process:
    jax.distributed.initialize(f"localhost:{process[2]}", int(process[1]), int(process[0]))

import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_rvga import RVGA, FixedPointVI


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def data(n=1003):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 5))
    return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-X.sum(1)))).astype(float)}


METHODS = {
    "every part of a pass": lambda mesh: RVGA(logistic, first_block=203, memory=40, block_size=64, mesh=mesh),
    "blocks of few rows": lambda mesh: RVGA(logistic, block_size=8, mesh=mesh),
    "batch": lambda mesh: FixedPointVI(logistic, mesh=mesh),
}


def found(name, mesh=None):
    """Mean and covariance."""
    posterior = METHODS[name](mesh).run(data(), progress_bar=False)
    return np.concatenate([posterior.mean[None], posterior.covariance])


def is_shared(mesh):
    """Whether each device works on some of the rows only, and sums are taken over devices."""
    method = METHODS["every part of a pass"](mesh)
    state = method.init(data())
    devices = method._engines.devices
    rows = devices.put_rows({name: array[:1000] for name, array in data().items()})
    compiled = jax.jit(method.update).lower(devices.put(state), rows)
    shapes = {shard.data.shape[0] for shard in rows["y"].addressable_shards}
    return shapes == {1000 // mesh.size} and "all-reduce" in compiled.compile().as_text()


if __name__ == "__main__":
    arrays = {}
    everywhere = [jax.device_count()] * 2
    for name, size in zip(list(METHODS)[:: 2 if process else 1], everywhere if process else [2, 4, 8]):
        mesh = jax.make_mesh((size,), ("rows",), devices=jax.devices()[:size])
        arrays[f"{name}, {size} devices"] = found(name, mesh)
    arrays["is_shared"] = bool(process) or is_shared(mesh)  # the largest
    if not process or process[0] == "0":
        np.savez(result, **arrays)
