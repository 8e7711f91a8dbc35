"""New rows of a model of all data: it is run on these and the rows that it was fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.primitives import Messenger

from ..core.compilation import jit
from ..model import Program
from ..model.data.rows import Arrays, num_rows
from ..model.handlers.tracing import base_distribution, numbers_of
from .forward import Unconditioned


class JoinedRows:
    """A whole program's model on the rows that it was fitted to and new ones together.

    :param rows: new ones, of all or some of the arrays.
    """

    def __init__(self, program: Program, rows: Arrays):
        self._program = program
        self._own = {name: program.example_rows[name] for name in rows}
        self._both = {name: _joined(self._own[name], rows[name]) for name in rows}

    def __call__(self, rng_key: Array, theta: Array, names: set[str]) -> dict[str, Array]:
        """Draws of the sites ``names``, and of latent sites that have grown, in the new rows.

        :param theta: (n, P).
        :raises ValueError: if the new rows change what the model computes of the others.
        """
        program = self._program
        self._check_own_rows(rng_key, theta[0])

        def values_of(key: Array, theta: Array, rows: Arrays) -> tuple[dict[str, Array], set[str]]:
            """The values of the sites, and which of them have grown besides those of ``names``."""
            fitted = program.constrain(theta)
            trace, grown = self._run(key, theta, rows)
            grown = grown | {n for n, value in fitted.items() if n in trace and _grew(trace[n], value)}
            return {name: trace[name]["value"] for name in names | grown}, grown

        def one(key, theta):
            rows = program.example_rows
            before = jax.eval_shape(lambda *at: values_of(*at, rows)[0] | program.constrain(theta), key, theta)
            values, grown = values_of(key, theta, self._both)
            axes = {name: 0 if name in grown else program.row_axis(name) for name in values}
            places = {
                name: np.arange(before[name].shape[axis], values[name].shape[axis]) for name, axis in axes.items()
            }
            return {name: jnp.take(value, places[name], axis=axes[name]) for name, value in values.items()}

        return jit(jax.vmap(one))(jax.random.split(rng_key, len(theta)), theta)

    def _run(
        self, key: Array, theta: Array, rows: Arrays, drawn: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, dict], set[str]]:
        """The model's trace, and the latent sites that have grown: they are completed by draws given those that are in
        the posterior. ``drawn``: what other sites begin with; default: all of them is drawn."""
        program = self._program
        fitted = program.constrain(theta)
        model = Beginning(Unconditioned(program, num_rows(rows)), drawn or {})
        completed = Completion(handlers.seed(model, key), {name: fitted[name] for name in program.layout.site_names})
        arguments, keywords = program.call_arguments(rows)
        with handlers.block(), program.evaluating():
            trace = handlers.trace(completed).get_trace(*arguments, **keywords)
        return trace, completed.grown

    def _check_own_rows(self, key: Array, theta: Array) -> None:
        """:raises ValueError: naming a site whose distribution in the rows that the model was fitted to is another one
        where new rows are beside them."""
        theta_names = set(self._program.layout.site_names)

        def parameters(trace: dict[str, dict], names: set[str]) -> dict[str, list[Array]]:
            sites = {n: site for n, site in trace.items() if site["type"] == "sample" and n in names}
            return {name: numbers_of(site["fn"]) for name, site in sites.items()}

        @jit
        def both(key: Array, theta: Array) -> tuple[dict[str, list[Array]], dict[str, list[Array]]]:
            before, _ = self._run(key, theta, self._own)
            drawn = {n: site["value"] for n, site in before.items() if site["type"] == "sample"}
            after, grown = self._run(key, theta, self._both, drawn)
            names = {*drawn} - theta_names | grown
            return parameters(before, names), parameters(after, names)

        before, after = jax.device_get(both(key, theta))
        for name, numbers in before.items():
            if not all(map(_begins_with, after[name], numbers)):
                raise ValueError(
                    f"new rows change the distribution of site {name!r} in the rows that the posterior was fitted to: "
                    "the model computes numbers of all rows, such as a mean. Compute these before the run, and pass "
                    "them to run as keywords."
                )


def _begins_with(array: np.ndarray, first: np.ndarray) -> bool:
    """Whether the first entries along each axis are these, up to rounding."""
    leading, finite = array[tuple(map(slice, np.shape(first)))], np.abs(first)[np.isfinite(first)]
    tolerance = np.sqrt(np.finfo(jnp.result_type(float)).eps) * np.max(finite, initial=0)
    return np.shape(leading) == np.shape(first) and np.allclose(leading, first, 0, tolerance, equal_nan=True)


def _joined(before: Any, new: ArrayLike) -> Any:
    """NumPy's arrays stay that: the model may read their values."""
    if isinstance(before, np.ndarray):
        return np.concatenate([before, np.asarray(new)])
    with jax.ensure_compile_time_eval():
        return jnp.concatenate([before, jnp.asarray(new)])


def _grew(site: dict, before: Array) -> bool:
    return site["type"] == "deterministic" and jnp.shape(site["value"]) != before.shape


class Beginning(Messenger):
    """Gives the first entries of sites along each axis their values."""

    def __init__(self, fn: Callable, values: Mapping[str, Array]):
        super().__init__(fn)
        self._values = values

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and msg["name"] in self._values:
            first = self._values[msg["name"]]
            msg["value"] = jnp.asarray(msg["value"]).at[tuple(map(slice, first.shape))].set(first)


class Completion(Messenger):
    """Gives latent sites their values; of sites that have grown along their leading axis, the rest is drawn."""

    def __init__(self, fn: Callable, values: Mapping[str, Array]):
        super().__init__(fn)
        self.values, self.grown = values, set()

    def process_message(self, msg: dict) -> None:
        if msg["type"] != "sample" or msg["name"] not in self.values:
            return
        value = self.values[msg["name"]]
        shape = msg["fn"].shape(msg["kwargs"]["sample_shape"])
        if shape != value.shape:
            self.grown.add(msg["name"])
            value = _completed(msg["name"], msg["fn"], shape, value, msg["kwargs"]["rng_key"])
        msg["value"] = value


def _completed(name: str, fn: Any, shape: tuple[int, ...], value: Array, rng_key: Array) -> Array:
    """A draw of shape ``shape`` given its first entries."""
    normal, _ = base_distribution(fn)
    num_given = value.shape[0]
    noise = jax.random.normal(rng_key, shape, value.dtype)
    if isinstance(normal, dist.Normal):
        return jnp.concatenate([value, (normal.loc + normal.scale * noise)[num_given:]])
    if isinstance(normal, dist.MultivariateNormal) and len(shape) == 1:
        loc, lower = jnp.broadcast_to(normal.loc, shape), normal.scale_tril
        whitened = jax.scipy.linalg.solve_triangular(lower[:num_given, :num_given], value - loc[:num_given], lower=True)
        return loc + lower @ jnp.concatenate([whitened, noise[num_given:]])
    raise NotImplementedError(
        f"site {name!r} has a value for each row, and no values for new rows can be drawn given the others: it is "
        f"{type(normal).__name__}, neither Normal nor MultivariateNormal."
    )
