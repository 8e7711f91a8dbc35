"""When does the covariance's fixed point V <- T(V) converge? Theorem 1 of Sheth and Khardon, checked for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..core.updates.factors import Kind
from ..engines.curvature import (
    MEANS,
    VARIANCES,
    Curvature,
    at_posterior,
    curvature_of,
    distinct_densities,
    over_grid,
    over_scattered_points,
)
from ..engines.engine import Engine
from ..engines.registry import Engines
from ..model.data.arguments import checked_rows
from ..model.data.rows import Data, Keywords, Rows
from ..model.terms.terms import Terms
from ..options import Options
from .fitted import Fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


POSTERIOR_QUANTILES = np.linspace(0.0, 1.0, 11)  # that join the default grid


@dataclass(frozen=True, eq=False, repr=False)
class SiteConditions:
    """The conditions for the densities of one observed site.

    :param num_predictors: C, the numbers through which theta enters a density.
    :param rows: the row of each density that was evaluated over the grid, ``(densities,)``.
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
        plain = [name for name, site in self.sites.items() if site.num_predictors == 1]
        site = plain[0] if site is None and plain else site
        if site not in plain:
            raise ValueError(f"site must be one of {plain}, the sites with one predictor, not {site!r}.")
        return _plot(self.sites[site], site, ax)


def check_conditions(
    model: Callable,
    options: Options,
    data: Data,
    posterior: Fitted | None,
    means: ArrayLike | None,
    variances: ArrayLike | None,
    rng_key: Array,
    model_kwargs: Keywords,
) -> Conditions:
    """The conditions for a model; see :meth:`FixedPointVI.conditions`."""
    means, variances = _checked_axis("means", means), _checked_axis("variances", variances)
    if variances is not None and not np.all(variances > 0):
        raise ValueError("variances must be positive.")
    rows = checked_rows(model, data, model_kwargs)
    # Any scale will do: the conditions concern the likelihood alone.
    engine = Engines(model, options, improper_prior_scale=1.0, batch=True).get(rows, dict(model_kwargs), rng_key, rows)
    engine.program.check_rows(rows)
    rows, shared = engine.program.inputs(rows), engine.program.shared
    if posterior is not None:
        engine.program.check_same_sites(posterior.program)
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
    reasons = [
        f"site {name!r} has {site.num_predictors} predictors" for name, site in sites.items() if site.num_predictors > 1
    ]
    reasons += [f"the predictors of site {t.site!r} are not affine" for t in engine.program.terms if not t.is_affine]
    return [*reasons, "the prior is not Gaussian"] if engine.program.prior.terms else reasons


def _check_site(
    engine: Engine,
    terms: Terms,
    kind: Kind,
    rows: Rows,
    shared: dict[str, Array],
    posterior: Fitted | None,
    means: np.ndarray | None,
    variances: np.ndarray | None,
) -> SiteConditions:
    """Where the conditions hold of a site's densities, over a grid of means and variances."""
    indices, elements, values = distinct_densities(terms, rows, shared)
    evaluate = curvature_of(terms, kind, engine.program.dtype, values)
    q: Any = None if posterior is None else posterior.gaussian
    at = None if q is None else at_posterior(engine, terms, evaluate, rows, shared, q)
    one = terms.num_predictors == 1
    if means is None:
        means = _widened(MEANS, at.means if one and at else None)
    if variances is None:
        variances = _widened(VARIANCES, at.variances if one and at else None)
    dtype = engine.program.dtype
    if one:
        grid = over_grid(evaluate, values, means, variances, dtype)
    else:
        grid = over_scattered_points(evaluate, values, means, variances, terms.num_predictors, dtype)
    return SiteConditions(terms.num_predictors, indices, elements, grid, at)


def _widened(default: np.ndarray, values: np.ndarray | None) -> np.ndarray:
    if values is None:
        return default
    points = np.quantile(values, POSTERIOR_QUANTILES)
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
def _plot(site: SiteConditions, name: str, ax: Axes | None) -> Axes:
    try:
        from matplotlib import colors, patches, pyplot
    except ImportError as error:
        raise ImportError("plot() needs Matplotlib: pip install 'numpyro_rvga[examples]'.") from error
    ax = pyplot.subplots()[1] if ax is None else ax
    rises, falls = ((sign * np.asarray(site.grid.direction) > 0).any(axis=0) for sign in (1, -1))
    kinds = {"constant": "#eeeeee", "increasing": "#e69f00", "decreasing": "#56b4e9", "differs by row": "#999999"}
    means, variances = site.grid.means[:, 0], site.grid.variances
    palette = colors.ListedColormap(list(kinds.values()))
    areas = (rises + 2 * falls).T
    edges = _edges(means), np.exp(_edges(np.log(variances)))
    ax.pcolormesh(*edges, areas, cmap=palette, vmin=-0.5, vmax=3.5, rasterized=True)
    handles: list[Any] = [
        patches.Patch(color=color, label=label) for i, (label, color) in enumerate(kinds.items()) if np.any(areas == i)
    ]
    if site.posterior is not None:
        at = site.posterior
        handles.append(ax.scatter(at.means, at.variances, s=6, c="black", linewidths=0, label="rows under q"))
    ax.set(yscale="log", xlabel="m", ylabel="v", title=f"$\\gamma(m, v)$ of {name}, as v grows")
    ax.legend(handles=handles, loc="upper right", frameon=True, framealpha=1)
    return ax


def _edges(points: np.ndarray) -> np.ndarray:
    """The boundaries of the cells around points."""
    if len(points) == 1:
        return points[0] + np.array([-0.5, 0.5])
    middles = (points[1:] + points[:-1]) / 2
    return np.concatenate([[2 * points[0] - middles[0]], middles, [2 * points[-1] - middles[-1]]])
