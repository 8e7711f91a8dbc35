"""A Gaussian over a model's latent sites, or a mixture: moments, draws and densities."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from ..core.compilation import full_precision, jit
from ..core.gaussians import Family
from ..core.gaussians.mean_field import MeanField
from ..core.gaussians.mixture import GaussianMixture
from ..core.gaussians.packed_roots import PackedRoots
from ..core.updates.state import State
from ..engines.mean_field import MeanFieldState
from ..engines.online import OnlineState
from ..model import Program
from ..model.data.row_set import RowSet
from ..model.site_families import sites_by_entry
from ..options import Info, check_shape
from ..user_warnings import warn
from .derived import judged_sites
from .forward import ForwardRuns
from .log_densities import LogDensities

DRAWS_OF_QUANTILES, SURE = 10_000, 5.0  # draws, and standard errors of the share of them below a number
DRAWN_NUMBERS = 2**22  # in the arrays of all rows, for draws that are computed together


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Fitted:
    """q over a model's latent sites, with its moments, draws and density: the base of :class:`~.posterior.Posterior`.
    Parameters are as there."""

    program: Program
    gaussian: Family | GaussianMixture | MeanField
    elbo: float | None = None
    info: Info = dataclasses.field(default_factory=dict)
    continuation: Any = None
    state: State | OnlineState | MeanFieldState | None = None
    num_rows: int = dataclasses.field(kw_only=True)
    row_sets: tuple[RowSet, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        size = self.program.layout.size
        gaussian = jax.tree.map(jnp.asarray, self.gaussian)
        for field in dataclasses.fields(gaussian) if not isinstance(gaussian, MeanField) else ():
            value = getattr(gaussian, field.name)
            if isinstance(value, tuple | PackedRoots) or (
                isinstance(gaussian, GaussianMixture) and field.name == "log_weights"
            ):
                continue
            shape = value.shape
            if shape[-1:] != (size,) or (field.name == "root" and shape != (size, size)):
                raise ValueError(f"{field.name} must have {size} entries along every axis for this model, not {shape}.")
        object.__setattr__(self, "gaussian", gaussian)

    def __getstate__(self) -> Info:
        """Without what is compiled, for other processes.

        :raises PicklingError: from pickle, if the model cannot be pickled: a function within another.
        """
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def site_names(self) -> tuple[str, ...]:
        """The latent sites, in the order in which they are flattened."""
        return tuple(self.program.layout.site_names)

    @property
    def mean(self) -> Array:
        """The mean of q in unconstrained space, shape ``(P,)``."""
        return self.gaussian.mean

    @property
    @full_precision()
    def scale(self) -> Array:
        """A square root of the covariance, shape ``(P, P)``: ``covariance = scale @ scale.T``."""
        return self.gaussian.as_full().root

    @property
    def params(self) -> dict[str, Array]:
        """The values of the model's ``numpyro.param`` sites, which :class:`FixedPointVI` learns."""
        return self.program.params.constrained(self.program.params.values)

    @functools.cached_property
    @full_precision()
    def covariance(self) -> Array:
        """The covariance of q in unconstrained space, shape ``(P, P)``."""
        return self.gaussian.covariance()

    @functools.cached_property
    @full_precision()
    def scale_tril(self) -> Array:
        """The Cholesky factor of the covariance: lower triangular with a positive diagonal, shape ``(P, P)``."""
        return self.gaussian.scale_tril()

    def sample_unconstrained(self, rng_key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw flat unconstrained vectors theta from q.

        :param rng_key: random key.
        :param sample_shape: leading shape of the draws.
        :return: shape ``(*sample_shape, P)``.
        :raises ValueError: for a number in place of a shape.
        """
        check_shape(sample_shape)
        return _drawn(self.gaussian, rng_key, shape=tuple(sample_shape))

    def constrain(self, theta: Array, rows: Mapping[str, ArrayLike] | None = None) -> dict[str, Array]:
        """The model's sites at flat unconstrained vectors.

        :param theta: shape ``(..., P)``.
        :param rows: arrays by argument name, as for ``data`` of :meth:`sample_posterior`.
        :return: the sites that :meth:`sample_posterior` returns, each of shape ``(..., *site_shape)``.
        """
        batch_shape, flat = theta.shape[:-1], theta if theta.ndim == 2 else jnp.reshape(theta, (-1, theta.shape[-1]))
        sites, rows = self.constrain_latents(flat), self.program.data_rows if rows is None else rows
        if self.program.deterministic.of_data and rows is not None:
            sites |= self._deterministic_of_data(flat, dict(rows))
        if len(batch_shape) == 1:
            return sites
        return {name: jnp.reshape(value, (*batch_shape, *value.shape[1:])) for name, value in sites.items()}

    @functools.cached_property
    def constrain_latents(self) -> Callable[[Array], dict[str, Array]]:
        """theta (n, P) -> the constrained latent sites, and deterministic sites that are functions of them alone."""
        return jit(jax.vmap(self.program.constrain))

    @functools.cached_property
    def judged_sites(self) -> Callable[[Array], tuple[dict[str, Array], dict[str, Array]]]:
        """theta (n, P) -> sites that are judged besides theta, see :func:`~.derived.judged_sites`."""
        return judged_sites(self.program)

    @functools.cached_property
    def log_densities(self) -> LogDensities:
        """The model's log densities at theta (n, P)."""
        return LogDensities(self.program)

    @functools.cached_property
    def forward_runs(self) -> ForwardRuns:
        """The model's observed and other sites, given its latent ones."""
        return ForwardRuns(self.program)

    def median(self) -> dict[str, Array]:
        """The median of q's marginals, as :meth:`~numpyro.infer.autoguide.AutoMultivariateNormal.median` has it.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> print(np.asarray(posterior.median()["slopes"]).round(1))
            [ 1.3 -2. ]

        :return: the constrained latent sites, and the deterministic sites that :meth:`sample_posterior` has, at the
            medians of q's marginals, which are a Gaussian's mean. This is the marginal median wherever the site's
            transform acts elementwise (not for a simplex, say), and for a deterministic site only where it is a
            monotone function of one latent value.
        """
        return self.constrain(_marginal_quantiles(self.gaussian, np.full(1, 0.5, self.mean.dtype)))

    def quantiles(self, quantiles: ArrayLike | Sequence[float]) -> dict[str, Array]:
        """Quantiles of q's marginals, as :meth:`~numpyro.infer.autoguide.AutoMultivariateNormal.quantiles` has them.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> low, high = posterior.quantiles([0.05, 0.95])["slopes"]
            >>> print(np.asarray(high - low).round(1))
            [0.8 1. ]

        :param quantiles: one probability or an array of them.
        :return: dict of sites of shape ``(*quantiles.shape, *site_shape)``: the quantiles of each entry's marginal.
            They are exact where the site's transform acts on each entry by itself. Of a simplex, an ordered vector, a
            Cholesky factor, a site whose bound is another site and of deterministic sites, they are those of 10,000
            draws, unless a monotone function of one latent entry explains these.
        :raises ValueError: for what is no probability.
        """
        levels = np.asarray(quantiles, self.mean.dtype)
        if not np.all((levels >= 0) & (levels <= 1)):
            raise ValueError(f"quantiles must be probabilities, from 0 to 1, not {quantiles!r}.")
        pushed = self.pushed_quantiles(levels)
        drawn = self.drawn_sites([name for name in pushed if name not in self.transformed_by_entry])
        pushed |= {name: _explained(pushed[name], draws, levels) for name, draws in drawn.items()}
        return {name: jnp.asarray(values) for name, values in pushed.items()}

    def pushed_quantiles(self, levels: np.ndarray) -> dict[str, np.ndarray]:
        """The sites at quantiles of q's marginals in unconstrained space, in order: ``(*levels.shape, *site_shape)``.
        These are a site's quantiles if each of its numbers is a monotone function of one entry of theta."""
        levels = levels.astype(self.mean.dtype)
        sides = _marginal_quantiles(self.gaussian, np.stack([levels, 1 - levels])[..., None])
        return {name: _in_order(levels, *both) for name, both in jax.device_get(self.constrain(sides)).items()}

    def drawn_sites(self, names: Collection[str], *, mirrored: bool = False) -> dict[str, np.ndarray]:
        """Some sites at 10,000 draws or a few more, the same at every call, as many at a time as memory has room for.

        :param mirrored: in pairs, so that the mean of what is linear in theta is exact.
        """
        if not names:
            return {}
        parts, pieces = -(-DRAWS_OF_QUANTILES * self.numbers_per_draw // DRAWN_NUMBERS), []
        count = -(-DRAWS_OF_QUANTILES // (2 * parts if mirrored else parts))
        for part in range(parts):
            theta = _drawn(self.gaussian, jax.random.key(part), shape=(count,), mirrored=mirrored)
            sites = self.constrain(theta)
            pieces.append(jax.device_get({name: sites[name] for name in names}))
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in names}

    @functools.cached_property
    def numbers_per_draw(self) -> int:
        """How many numbers the sites have."""
        shapes = jax.eval_shape(self.program.constrain, self.mean)
        return max(1, sum(shape.size for shape in jax.tree.leaves(shapes)))

    def log_prob(self, sites: Mapping[str, ArrayLike]) -> Array:
        """The log density log q(theta) of the unconstrained vector theta that belongs to ``sites``.

        This is a density in unconstrained space: the log-determinants of the transforms are not added. It is what
        the model's log joint in unconstrained space (NumPyro's negative potential energy) compares with.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> densities = posterior.log_prob({"slopes": np.array([[1.0, -2.0], [0.0, 0.0]])})
            >>> densities.shape, bool(densities[0] > densities[1])
            ((2,), True)

        :param sites: constrained values of every latent site, with any common leading shape. Other entries, such as
            deterministic sites, are ignored.
        :return: log densities of that leading shape.
        :raises ValueError: if a latent site is missing or has the wrong shape.
        """
        values, batch_shape = self._checked_latents(sites)
        lead, count = len(batch_shape), math.prod(batch_shape)
        batch = {name: jnp.reshape(value, (count, *value.shape[lead:])) for name, value in values.items()}
        theta = self._unconstrain(batch)
        return self.log_prob_unconstrained(jnp.reshape(theta, (*batch_shape, self.mean.size)))

    def log_prob_unconstrained(self, theta: Array) -> Array:
        """The log density of q at flat unconstrained vectors.

        :param theta: shape ``(..., P)``.
        :return: shape ``(...)``.
        """
        return _log_density(self.gaussian, theta)

    @functools.cached_property
    def transformed_by_entry(self) -> frozenset[str]:
        """Latent sites of which each number is a function of one entry of theta."""
        return sites_by_entry(self.program)

    @functools.cached_property
    def _deterministic_of_data(self) -> Callable[[Array, dict[str, ArrayLike]], dict[str, Array]]:
        """Deterministic sites that read the data, at theta (n, P), as many draws at a time as memory has room for."""

        @jit
        def of_draws(theta: Array, rows: dict[str, Array]) -> dict[str, Array]:
            numbers = sum(array.size for array in rows.values())
            at = lambda one: self.program.deterministic_of_data(one, rows)  # noqa: E731
            return jax.lax.map(at, theta, batch_size=max(1, min(len(theta), DRAWN_NUMBERS // numbers)))

        return of_draws

    @functools.cached_property
    def _unconstrain(self) -> Callable[[dict[str, Array]], Array]:
        return jit(jax.vmap(self.program.unconstrain))

    def _checked_latents(self, sites: Mapping[str, ArrayLike]) -> tuple[dict[str, Array], tuple[int, ...]]:
        """The latent sites as arrays, and the leading shape that they share."""
        missing = [name for name in self.site_names if name not in sites]
        if missing:
            raise ValueError(f"log_prob needs the latent sites {missing} too.")
        values = {name: jnp.asarray(sites[name]) for name in self.site_names}
        shapes = {name: value.shape for name, value in jax.eval_shape(self.program.constrain, self.mean).items()}
        first = self.site_names[0]
        batch_shape = values[first].shape[: max(values[first].ndim - len(shapes[first]), 0)]
        for name, value in values.items():
            expected = (*batch_shape, *shapes[name])
            if value.shape != expected:
                raise ValueError(f"site '{name}' must have shape {expected}, not {value.shape}.")
        return values, batch_shape


def check_init(init: object, *, goes_on: bool) -> None:
    """Warns of a mixture that is to take in rows, of which one Gaussian is left.

    :param goes_on: whether the method goes on from there, as it does from states; else it begins there.
    :raises ValueError: for what is neither a posterior nor, if the method goes on, a state.
    """
    states = (State, OnlineState, MeanFieldState) if goes_on else ()
    if init is not None and not isinstance(init, (Fitted, *states)):
        raise ValueError(
            f"init must be a posterior{' or a state' if goes_on else ''}, and is of type {type(init).__name__}. (If it "
            "is meant for the model: run has an argument of this name itself, so give the model's another one.)"
        )
    if goes_on and isinstance(init, Fitted) and isinstance(init.gaussian, GaussianMixture):
        warn(
            "init is a mixture, and the run goes on from one Gaussian of its mean and covariance: the skewness of what "
            "was integrated out is lost. Integrate old and new rows together to keep it."
        )


@functools.partial(jit, static_argnames=("shape", "mirrored"))
def _drawn(
    gaussian: Family | GaussianMixture | MeanField, rng_key: Array, *, shape: tuple[int, ...], mirrored: bool = False
) -> Array:
    """Of this shape, and as many again if ``mirrored``."""
    standard = jax.random.normal(rng_key, (*shape, gaussian.noise_size), gaussian.mean.dtype)
    return gaussian.transform(jnp.concatenate([standard, -standard]) if mirrored else standard)


@jit
def _log_density(gaussian: Family | GaussianMixture | MeanField, theta: Array) -> Array:
    return gaussian.log_prob(theta)


@jit
def _marginal_quantiles(gaussian: Family | GaussianMixture | MeanField, probabilities: Array) -> Array:
    """In unconstrained space, (..., P), at (..., 1)."""
    if isinstance(gaussian, GaussianMixture | MeanField):
        return gaussian.marginal_quantiles(probabilities)
    return dist.Normal(gaussian.mean, gaussian.deviation()).icdf(probabilities)


def _in_order(levels: np.ndarray, values: np.ndarray, mirrored: np.ndarray) -> np.ndarray:
    """Quantiles under a transform that may turn the order around. ``mirrored``: the values at one minus the levels."""
    lower = np.reshape(levels <= 0.5, (*levels.shape, *[1] * (values.ndim - levels.ndim)))
    return np.where(lower, np.minimum(values, mirrored), np.maximum(values, mirrored))


def _explained(quantiles: np.ndarray, draws: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Quantiles (*levels.shape, ...) if as many of the draws (n, ...) are below as should be, else the draws' own."""
    below = np.array([np.mean(draws <= q, axis=0) for q in np.reshape(quantiles, (levels.size, *draws.shape[1:]))])
    expected = np.reshape(levels, (-1, *[1] * (draws.ndim - 1)))
    if np.all(np.abs(below - expected) <= SURE * np.sqrt(expected * (1 - expected) / len(draws))):
        return quantiles
    if quantiles.dtype.kind == "f":
        return np.quantile(draws.astype(quantiles.dtype), levels, axis=0)
    # There are no values between those of booleans and integers.
    return np.quantile(draws.astype(float), levels, axis=0, method="inverted_cdf").astype(quantiles.dtype)
