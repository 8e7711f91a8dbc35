"""When does the covariance's fixed point V <- T(V) converge? Theorem 1 of Sheth and Khardon, checked for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .core.factors import Kind
from .engine import Engine, Engines
from .kinds import Options
from .model.arguments import checked_rows, num_rows
from .model.terms import Terms, constants

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .posterior import Posterior

MOST_DENSITIES = 200  # of a site
MEANS = np.linspace(-8.0, 8.0, 41)
VARIANCES = np.geomspace(1e-2, 1e2, 33)
POSTERIOR_QUANTILES = np.linspace(0.0, 1.0, 11)  # that join the default grid
SCATTERED_MEANS = 64  # of several predictors
NODE_ERROR = 0.05  # of an eigenvalue, relative to the largest, where few nodes stand for several predictors
CHUNK_NUMBERS = 2**18  # in the Jacobians of a chunk of the posterior's rows
PROBED_DENSITIES = 16
KINK = 0.01  # disagreement of two ways to differentiate, relative to gamma, that smooth densities do not reach
TOLERANCES = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 1e-5}  # several times the rounding measured

Evaluate = Callable[[Array, Array, Any], tuple[Array, Array | None]]


@dataclass(frozen=True, eq=False, repr=False)
class Curvature:
    """gamma(m, v) = -E[phi''(u)] for u ~ N(m, v), and how it moves with v.

    A site with C > 1 predictors has a matrix -E[hess phi(u)], u ~ N(m, S), instead: ``gamma`` is its smallest
    eigenvalue, and what concerns condition 2 is None.

    :param means: m, of a shape that broadcasts with ``gamma``; with C > 1, and C as a last axis.
    :param variances: v, likewise; with C > 1 the covariances S, and (C, C) as last axes.
    :param gamma: (densities, means, variances) over a grid, with C > 1 (densities, points); (rows, elements) at a
        posterior.
    :param slope: the derivative of ``gamma`` in v.
    :param direction: 1 where ``gamma`` rises with v, -1 where it falls, 0 where it does neither beyond rounding.
    :param positive: condition 1, ``gamma >= 0`` throughout; with C > 1 up to a twentieth of the largest absolute
        eigenvalue, the error of few nodes.
    :param increasing: condition 2a, ``gamma`` nowhere falls as v grows.
    :param decreasing: condition 2b, ``gamma`` nowhere rises as v grows.
    """

    means: np.ndarray
    variances: np.ndarray
    gamma: np.ndarray
    slope: np.ndarray | None
    direction: np.ndarray | None
    positive: bool
    increasing: bool | None
    decreasing: bool | None

    def __repr__(self) -> str:
        return f"Curvature({self}, shape={self.gamma.shape})"

    def __str__(self) -> str:
        judged = {"1": self.positive, "2a": self.increasing, "2b": self.decreasing}
        words = {True: "holds", False: "fails", None: "is not defined"}
        text = ", ".join(f"condition {name} {words[holds]}" for name, holds in judged.items())
        unknown = int(np.sum(~np.isfinite(self.gamma)))
        return f"{text} (gamma is not finite at {unknown} of {self.gamma.size} points, left out)" if unknown else text


@dataclass(frozen=True, eq=False, repr=False)
class SiteConditions:
    """The conditions for the densities of one observed site.

    :param num_predictors: C, the numbers through which theta enters a density.
    :param rows: the row of each density that was looked at over the grid, ``(densities,)``.
    :param elements: its place among the row's elements, ``(densities,)``.
    :param grid: over the grid of (m, v).
    :param posterior: at the (m, v) of all rows under the posterior, if there is one.
    """

    num_predictors: int
    rows: np.ndarray
    elements: np.ndarray
    grid: Curvature
    posterior: Curvature | None

    def __repr__(self) -> str:
        return f"SiteConditions(num_predictors={self.num_predictors}, densities={len(self.rows)}, grid={self.grid!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Conditions:
    """What Theorem 1 of Sheth and Khardon (2016) says about V <- T(V), the covariance's fixed point at a fixed mean.

    Made by :meth:`FixedPointVI.conditions`. Grids show where a condition fails; that it holds everywhere, they only
    suggest.

    :param sites: the findings by observed site.
    :param positive: condition 1 over the grid, all sites taken together.
    :param increasing: condition 2a, likewise. False if it is not defined for a site.
    :param decreasing: condition 2b, likewise.
    :param verdict: what follows, in words.
    """

    sites: Mapping[str, SiteConditions]
    positive: bool
    increasing: bool
    decreasing: bool
    verdict: str

    def __repr__(self) -> str:
        lines = []
        for name, site in self.sites.items():
            predictors = "one predictor" if site.num_predictors == 1 else f"{site.num_predictors} predictors"
            lines += [f"{name}: {predictors}, {len(site.rows)} densities", f"    over the grid: {site.grid}"]
            if site.posterior is not None:
                lines.append(f"    at the posterior: {site.posterior}")
        return "\n".join([*lines, self.verdict])

    def plot(self, ax: Axes | None = None, *, site: str | None = None) -> Axes:
        """Where gamma rises and where it falls with v, over the plane of (m, v), with the posterior's rows as dots.

        :param ax: Matplotlib axes to draw on. Default: those of a new figure.
        :param site: an observed site with one predictor. Default: the first.
        :return: the axes.
        :raises ImportError: if Matplotlib is not installed.
        :raises ValueError: if there is no such site.
        """
        plain = [name for name, found in self.sites.items() if found.num_predictors == 1]
        site = plain[0] if site is None and plain else site
        if site not in plain:
            raise ValueError(f"site must be one of {plain}, the sites with one predictor, not {site!r}.")
        return _plot(self.sites[site], site, ax)


def check_conditions(
    model: Callable,
    options: Options,
    data: Mapping[str, Any] | tuple,
    posterior: Posterior | None,
    means: ArrayLike | None,
    variances: ArrayLike | None,
    rng_key: Array,
    model_kwargs: Mapping[str, Any],
) -> Conditions:
    """The conditions for a model; see :meth:`FixedPointVI.conditions`."""
    means, variances = _checked_axis("means", means), _checked_axis("variances", variances)
    if variances is not None and not np.all(variances > 0):
        raise ValueError("variances must be positive.")
    rows = checked_rows(model, data, 0, model_kwargs)
    # Any scale will do: the conditions concern the likelihood alone.
    engine = Engines(model, options, improper_prior_scale=1.0, batch=True).get(rows, dict(model_kwargs), rng_key)
    engine.program.check_rows(rows)
    rows, shared = engine.program.inputs(rows), engine.program.shared
    if posterior is not None:
        engine.check_start(posterior)
    sites = {
        terms.site: _check_site(engine, terms, kind, rows, shared, posterior, means, variances)
        for terms, kind in zip(engine.program.terms, engine.kinds)
        if terms.num_predictors
    }
    grids = [site.grid for site in sites.values()]
    judged = [all(getattr(g, name) for g in grids) for name in ("positive", "increasing", "decreasing")]
    return Conditions(sites, *judged, _verdict(*judged, _outside_the_theorem(engine, sites)))


def _verdict(positive: bool, increasing: bool, decreasing: bool, outside: list[str]) -> str:
    if outside:
        reason = f"Theorem 1 does not apply: {', '.join(outside)}."
    elif not positive:
        reason = "Condition 1 fails: no guarantee."
    elif decreasing:
        return "Conditions 1 and 2b hold: V <- T(V) converges to the optimum."
    elif increasing:
        return "Conditions 1 and 2a hold: V <- T(V) converges to the optimum or to a cycle of two."
    else:
        reason = "Neither condition 2a nor 2b holds: no guarantee."
    return f"{reason} FixedPointVI shortens steps that would lower the bound, so the bound never falls all the same."


def _outside_the_theorem(engine: Engine, sites: Mapping[str, SiteConditions]) -> list[str]:
    found = [
        f"site {name!r} has {site.num_predictors} predictors" for name, site in sites.items() if site.num_predictors > 1
    ]
    found += [f"the predictors of site {t.site!r} are not affine" for t in engine.program.terms if not t.is_affine]
    return [*found, "the prior is not Gaussian"] if engine.program.prior.terms else found


# ---------------------------------------------------------------------- one site
def _check_site(
    engine: Engine,
    terms: Terms,
    kind: Kind,
    rows: dict[str, np.ndarray],
    shared: dict[str, Array],
    posterior: Posterior | None,
    means: np.ndarray | None,
    variances: np.ndarray | None,
) -> SiteConditions:
    indices, elements, values = _distinct_densities(terms, rows, shared)
    evaluate = _evaluation(terms, kind, engine.program.dtype, values)
    at_posterior = None if posterior is None else _at_posterior(engine, terms, evaluate, rows, shared, posterior)
    one = terms.num_predictors == 1
    if means is None:
        means = _widened(MEANS, at_posterior.means if one and at_posterior else None)
    if variances is None:
        variances = _widened(VARIANCES, at_posterior.variances if one and at_posterior else None)
    dtype = engine.program.dtype
    if one:
        grid = _over_grid(evaluate, values, means, variances, dtype)
    else:
        grid = _over_scattered_points(evaluate, values, means, variances, terms.num_predictors, dtype)
    return SiteConditions(terms.num_predictors, indices, elements, grid, at_posterior)


def _distinct_densities(
    terms: Terms, rows: dict[str, np.ndarray], shared: dict[str, Array]
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Rows, elements and constants (densities, ...) of different densities, spread over the data."""
    chosen = _spread(num_rows(rows), MOST_DENSITIES)
    few = {name: jnp.asarray(array[chosen]) for name, array in rows.items()}
    found = jax.jit(partial(constants, terms))(few | shared)
    values = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), found)
    count = len(chosen) * terms.num_elements
    columns = [np.zeros((count, 1)), *(x.reshape(count, -1) for x in jax.tree.leaves(values))]
    first = np.sort(np.unique(np.concatenate(columns, axis=1), axis=0, return_index=True)[1])
    first = first[_spread(len(first), MOST_DENSITIES)]
    return chosen[first // terms.num_elements], first % terms.num_elements, jax.tree.map(lambda x: x[first], values)


def _over_grid(evaluate: Evaluate, values: Any, means: np.ndarray, variances: np.ndarray, dtype: Any) -> Curvature:
    matrices, slopes = _at_points(evaluate, values, *_product(means, variances, dtype))
    shape = (len(matrices), len(means), len(variances))
    return _judge(means[:, None], variances, matrices.reshape(*shape, 1, 1), slopes.reshape(shape), axis=1)


def _over_scattered_points(
    evaluate: Evaluate, values: Any, means: np.ndarray, variances: np.ndarray, num_predictors: int, dtype: Any
) -> Curvature:
    """Means anywhere in the box that the grid's ends span, each with every variance."""
    rng = np.random.default_rng(0)
    scattered = rng.uniform(np.min(means), np.max(means), (SCATTERED_MEANS, num_predictors))
    points = np.repeat(scattered, len(variances), axis=0)
    covariances = np.tile(variances, SCATTERED_MEANS)[:, None, None] * np.eye(num_predictors)
    matrices, _ = _at_points(evaluate, values, jnp.asarray(points, dtype), jnp.asarray(covariances, dtype))
    return _judge(points, covariances, matrices, None, axis=1)


def _at_points(evaluate: Evaluate, values: Any, means: Array, covariances: Array) -> tuple[np.ndarray, Any]:
    """Every density at every point: (densities, points, ...)."""

    @jax.jit
    def every_density(values):
        at_points = jax.vmap(evaluate, in_axes=(0, 0, None))
        return jax.lax.map(lambda value: at_points(means, covariances, value), values)

    return jax.device_get(every_density(values))


def _at_posterior(
    engine: Engine,
    terms: Terms,
    evaluate: Evaluate,
    rows: dict[str, np.ndarray],
    shared: dict[str, Array],
    posterior: Posterior,
) -> Curvature:
    program = engine.program
    gaussian = jax.tree.map(lambda x: jnp.asarray(x, program.dtype), posterior.gaussian)

    @jax.jit
    def of_chunk(chunk):
        predictors = program.predictors(gaussian, chunk, terms.site)
        return *predictors, *jax.vmap(jax.vmap(evaluate))(*predictors, constants(terms, chunk | shared))

    total, size = program.num_rows(rows), max(1, CHUNK_NUMBERS // engine.numbers_per_row)
    chunks = [
        jax.device_get(of_chunk({name: array[start : start + size] for name, array in rows.items()}))
        for start in range(0, total, size)
    ]
    means, covariances, matrices, slopes = jax.tree.map(lambda *x: np.concatenate(x), *chunks)
    if terms.num_predictors == 1:
        means, covariances, slopes = means[..., 0], covariances[..., 0, 0], slopes[..., 0, 0]
    return _judge(means, covariances, matrices, slopes, axis=None)


def _judge(
    means: np.ndarray, variances: np.ndarray, matrices: np.ndarray, slopes: np.ndarray | None, *, axis: int | None
) -> Curvature:
    """:param axis: of the points whose largest gamma says what a negligible gamma is."""
    tolerance, negligible = TOLERANCES[matrices.dtype], np.finfo(matrices.dtype).eps
    gamma, size = _extreme_eigenvalues(matrices)
    known = np.isfinite(gamma) & (True if slopes is None else np.isfinite(slopes))
    largest = np.max(np.where(known, size, 0.0), axis=axis, keepdims=True)

    def throughout(holds: np.ndarray) -> bool:
        return bool(known.any() and holds[known].all())

    if slopes is None:
        return Curvature(means, variances, gamma, None, None, throughout(gamma >= -NODE_ERROR * size), None, None)
    positive = throughout(gamma >= -tolerance * largest)
    change = variances * np.abs(np.where(known, slopes, 0.0))
    moves = known & (change > tolerance * size) & (size > negligible * largest)
    direction = np.where(moves, np.sign(slopes), 0.0).astype(np.int8)
    return Curvature(
        means, variances, gamma, slopes, direction, positive, throughout(direction >= 0), throughout(direction <= 0)
    )


def _extreme_eigenvalues(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest eigenvalue, and the largest absolute one; NaN for matrices that are not finite."""
    if matrices.shape[-1] == 1:
        gamma = matrices[..., 0, 0]
        return gamma, np.abs(gamma)
    finite = np.isfinite(matrices).all(axis=(-2, -1))
    eigenvalues = np.linalg.eigvalsh(np.where(finite[..., None, None], matrices, 0.0))
    size = np.where(finite, np.max(np.abs(eigenvalues), axis=-1), 0.0)
    return np.where(finite, eigenvalues[..., 0], np.nan), size


# ---------------------------------------------------------------------- gamma and its slope
def _evaluation(terms: Terms, kind: Kind, dtype: Any, values: Any) -> Evaluate:
    """(mean (C,), covariance (C, C), constants) -> -E[hess phi] and, of one predictor, its derivative in v."""

    def gamma(mean, covariance, value):
        nothing = jnp.zeros((terms.num_predictors, 0), mean.dtype)  # v has the variance of the row's own variables
        return -kind.expect(mean, covariance, (1.0, value, nothing))[2]

    if terms.num_predictors > 1:
        return lambda mean, covariance, value: (gamma(mean, covariance, value), None)
    return _differenced(gamma) if _has_kinks(gamma, dtype, values) else _differentiated(gamma)


def _has_kinks(gamma: Callable, dtype: Any, values: Any) -> bool:
    """Whether differentiating the quadrature's sum misses part of the slope: nodes pass kinks of phi as v grows."""
    few = jax.tree.map(lambda x: x[_spread(len(x), PROBED_DENSITIES)], values)
    means, covariances = _product(MEANS[::4], VARIANCES[::4], dtype)
    sizes, by_rule = _at_points(_differentiated(gamma), few, means, covariances)
    by_difference = _at_points(_differenced(gamma), few, means, covariances)[1]
    apart = np.abs(np.asarray(covariances) * (by_rule - by_difference))
    return bool(np.sum(apart) > KINK * np.sum(np.abs(sizes)))


def _differentiated(gamma: Callable) -> Evaluate:
    def evaluate(mean, covariance, value):
        return jax.jvp(lambda s: gamma(mean, s, value), (covariance,), (jnp.ones_like(covariance),))

    return evaluate


def _differenced(gamma: Callable) -> Evaluate:
    """Central differences of fourth order, with the step that balances their error against rounding."""

    def evaluate(mean, covariance, value):
        at = lambda change: gamma(mean, covariance + change, value)  # noqa: E731
        # gamma of an exponential grows as exp(v / 2), whatever v is; others change on the scale of v.
        step = jnp.finfo(mean.dtype).eps ** 0.2 * covariance / (1 + covariance)
        slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        return at(0.0), slope

    return evaluate


# ---------------------------------------------------------------------- grids
def _product(means: np.ndarray, variances: np.ndarray, dtype: Any) -> tuple[Array, Array]:
    """Means (points, 1) and covariances (points, 1, 1) of a grid, variances running fastest."""
    m, v = np.meshgrid(means, variances, indexing="ij")
    return jnp.asarray(m.reshape(-1, 1), dtype), jnp.asarray(v.reshape(-1, 1, 1), dtype)


def _spread(count: int, most: int) -> np.ndarray:
    """At most so many of ``range(count)``, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _widened(default: np.ndarray, at_posterior: np.ndarray | None) -> np.ndarray:
    if at_posterior is None:
        return default
    points = np.quantile(at_posterior, POSTERIOR_QUANTILES)
    return np.union1d(default, points[(points > 0) | (default[0] < 0)])


def _checked_axis(name: str, values: ArrayLike | None) -> np.ndarray | None:
    """:raises ValueError: unless the values are a row of different finite numbers."""
    if values is None:
        return None
    array = np.asarray(values, float)
    if array.ndim != 1 or len(array) == 0 or not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be a one-dimensional array of finite numbers.")
    return np.unique(array)


# ---------------------------------------------------------------------- figure
def _plot(found: SiteConditions, name: str, ax: Axes | None) -> Axes:
    plt, colours, patches = _import_matplotlib()
    ax = plt.subplots()[1] if ax is None else ax
    rises, falls = ((sign * found.grid.direction > 0).any(axis=0) for sign in (1, -1))
    kinds = {"constant": "#eeeeee", "increasing": "#e69f00", "decreasing": "#56b4e9", "differs by row": "#999999"}
    means, variances = found.grid.means[:, 0], found.grid.variances
    palette = colours.ListedColormap(list(kinds.values()))
    areas = (rises + 2 * falls).T
    edges = _edges(means), np.exp(_edges(np.log(variances)))
    ax.pcolormesh(*edges, areas, cmap=palette, vmin=-0.5, vmax=3.5, rasterized=True)
    handles = [
        patches.Patch(color=colour, label=label) for i, (label, colour) in enumerate(kinds.items()) if i in areas
    ]
    if found.posterior is not None:
        at = found.posterior
        handles.append(ax.scatter(at.means, at.variances, s=6, c="black", linewidths=0, label="rows under q"))
    ax.set(yscale="log", xlabel="m", ylabel="v", title=f"$\\gamma(m, v)$ of {name}, as v grows")
    ax.legend(handles=handles, loc="upper right")
    return ax


def _edges(points: np.ndarray) -> np.ndarray:
    """The boundaries of the cells around points."""
    if len(points) == 1:
        return points[0] + np.array([-0.5, 0.5])
    middles = (points[1:] + points[:-1]) / 2
    return np.concatenate([[2 * points[0] - middles[0]], middles, [2 * points[-1] - middles[-1]]])


def _import_matplotlib():
    try:
        from matplotlib import colors, patches, pyplot
    except ImportError as error:
        raise ImportError("plot() needs Matplotlib: pip install 'numpyro_rvga[examples]'.") from error
    return pyplot, colors, patches
