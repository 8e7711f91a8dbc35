"""Gaussians over a model's latents, of whatever origin: when they were there, and how good they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import init_to_median
from numpyro.infer.util import initialize_model

from numpyro_rvga import FixedPointVI
from numpyro_rvga.core.matrices.linalg import lower_from_root
from numpyro_rvga.core.updates.joint import bound_at
from numpyro_rvga.engines.joint_solver import JointProblem
from numpyro_rvga.engines.registry import Engines
from numpyro_rvga.engines.row_chunks import chunks_of
from numpyro_rvga.model.data.arguments import checked_rows

Rows = dict[str, np.ndarray]
Bound = Callable[[Array, Array], float]
BOUND_DRAWS = 4_000


class Case(NamedTuple):
    """A model and its data.

    :ivar whitened: the same model for SVI, with standard normal latents, which are ``center + scale_tril z``: in these
        Adam has its best chance. None: the same model.
    """

    name: str
    model: Callable
    rows: Rows
    kwargs: dict[str, Any]
    whitened: Callable | None = None


class Point(NamedTuple):
    """A Gaussian over the unconstrained latents, site after site, and the seconds after which it was there."""

    seconds: float
    mean: np.ndarray
    scale_tril: np.ndarray


def finite(point: Point) -> bool:
    return bool(np.all(np.isfinite(point.mean)) and np.all(np.isfinite(point.scale_tril)))


def exact_bound(case: Case) -> Bound:
    """The bound at a Gaussian over SVI's latents, by our own expectations."""
    rows = checked_rows(case.model, case.rows, case.kwargs)
    engine = Engines(case.model, FixedPointVI(case.model).options, batch=True).get(
        rows, case.kwargs, jax.random.key(0), rows
    )
    state = engine.program.initial_state
    problem = JointProblem(state, chunks_of(engine, rows, engine.numbers_per_row), engine.program.prior_inputs)
    search = engine.search_all(problem)

    @engine.compiled
    def at(problem, mean, root):
        joint = engine.joint_parts(search, problem)
        return bound_at(joint, joint.start().base, mean, root)[0]

    def bound(mean, root):
        if case.whitened is not None:
            scale_tril = jnp.asarray(case.kwargs["scale_tril"])
            mean, root = case.kwargs.get("center", 0.0) + scale_tril @ mean, scale_tril @ root
        whitened = lower_from_root(jnp.linalg.solve(state.root, root))
        return float(at(problem, jnp.linalg.solve(state.root, mean - state.mean), whitened))

    return bound


def sampled_bound(case: Case, density: LogDensity) -> Bound:
    """The bound of the model itself, whatever its form, from the same draws of each Gaussian."""
    half = jax.random.normal(jax.random.key(0), (BOUND_DRAWS // 2, len(density.start)))
    standard = jnp.concatenate([half, -half])
    rows = density.rows(case)

    @jax.jit
    def average(mean, root, rows):
        ratio = lambda z: density(rows, mean + root @ z) + 0.5 * z @ z  # noqa: E731
        return jnp.mean(jax.lax.map(ratio, standard, batch_size=16))

    def bound(mean, root):
        normalizer = np.sum(np.log(np.diag(root))) + 0.5 * len(mean) * np.log(2 * np.pi)
        return float(average(mean, root, rows) + normalizer)

    return bound


class LogDensity:
    """The log density of the model, rows and latents, at flat unconstrained vectors.

    :param site_names: the order of the latents.
    :ivar start: a vector to start from, the prior's median.
    """

    def __init__(self, case: Case, site_names: tuple[str, ...]):
        arguments = case.rows | case.kwargs
        model = initialize_model(
            jax.random.key(0), case.model, init_strategy=init_to_median, dynamic_args=True, model_kwargs=arguments
        )
        start = {name: model.param_info.z[name] for name in site_names}
        self.start, self._unravel = jax.flatten_util.ravel_pytree(list(start.values()))
        self._site_names, self._potential, self._kwargs = site_names, model.potential_fn, case.kwargs

    @staticmethod
    def rows(case: Case) -> dict[str, Array]:
        return {name: jnp.asarray(array) for name, array in case.rows.items()}

    def __call__(self, rows: dict[str, Array], theta: Array) -> Array:
        return -self._potential(**rows, **self._kwargs)(dict(zip(self._site_names, self._unravel(theta))))


def in_order(values: dict[str, Array], site_names: tuple[str, ...]) -> np.ndarray:
    """Sites' values as a flat vector."""
    return np.concatenate([np.asarray(values[name]).reshape(-1) for name in site_names])
