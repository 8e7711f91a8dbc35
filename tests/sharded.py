"""Runs on meshes of forced host devices, in processes of their own; saves what they found.

Usage: sharded.py RESULT NUM_DEVICES [PROCESS NUM_PROCESSES PORT]
"""

import functools
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

from numpyro_rvga import RVGA, FixedPointVI, Posterior


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def data(n=1003):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 5))
    return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-X.sum(1)))).astype(float)}


def grouped(user, X, num_users, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("users", num_users):
        level = numpyro.sample("level", dist.Normal(0, scale))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=level[user] + X @ w), obs=y)


@functools.cache
def groups(mesh):
    """A stream of groups."""
    stream = RVGA(grouped, mesh=mesh).stream_groups(plate="users", index="user", size="num_users")
    stream.update({**data(), "user": np.arange(1003) // 5})
    return stream


def halves(mesh):
    """Two parts, merged in rounds."""
    blocks = [{name: x[part] for name, x in data().items()} for part in (slice(500), slice(500, None))]
    method = RVGA(logistic, mesh=mesh)
    return Posterior.merge([method.run(block, progress_bar=False) for block in blocks], data=blocks, rounds=2)


METHODS = {
    "every part of a pass": lambda mesh: RVGA(logistic, first_block=203, memory=40, block_size=64, mesh=mesh),
    "blocks of few rows": lambda mesh: RVGA(logistic, block_size=8, mesh=mesh),
    "batch": lambda mesh: FixedPointVI(logistic, mesh=mesh),
}
POSTERIORS = {
    **{name: lambda mesh, made=made: made(mesh).run(data(), progress_bar=False) for name, made in METHODS.items()},
    "merged parts": halves,
    "groups in a stream": lambda mesh: groups(mesh).posterior(),
}


def found(name, mesh=None):
    """Mean and covariance."""
    posterior = POSTERIORS[name](mesh)
    return np.concatenate([posterior.mean[None], posterior.covariance])


def is_shared(mesh):
    """Whether each device works on some of the rows only, and sums are taken over devices."""
    method = METHODS["every part of a pass"](mesh)
    state = method.init(data())
    devices = method.last_engine.devices
    rows = devices.put_rows({name: array[:1000] for name, array in data().items()})
    compiled = jax.jit(method.update).lower(devices.put(state), rows)
    terms = groups(mesh)._block_model.terms
    user = np.arange(8, dtype=np.int32)
    ((of_groups, *_),) = terms.chunks({"X": np.ones((8, 5)), "y": np.ones(8), "user": user}, user)
    shapes = [{shard.data.shape[0] for shard in array.addressable_shards} for array in (rows["y"], of_groups["y"])]
    return shapes == [{1000 // mesh.size}, {8 // mesh.size}] and "all-reduce" in compiled.compile().as_text()


if __name__ == "__main__":
    arrays = {}
    everywhere = [jax.device_count()] * 2
    for name, size in zip(list(POSTERIORS)[:: 2 if process else 1], everywhere if process else [2, 4, 8, 4, 2]):
        mesh = jax.make_mesh((size,), ("rows",), devices=jax.devices()[:size])
        arrays[f"{name}, {size} devices"] = found(name, mesh)
    arrays["is_shared"] = bool(process) or is_shared(mesh)
    if not process or process[0] == "0":
        np.savez(result, **arrays)
