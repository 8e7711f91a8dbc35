"""The result: a Gaussian over a model's latent sites in unconstrained space, and everything that is read off it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoContinuous

from ..core.gaussians import Family
from ..core.gaussians.arrow_roots import ArrowRoots
from ..core.gaussians.mixture import GaussianMixture
from ..model.row_set import RowSet
from ..options import check_choice
from . import arviz, integration, merging, prediction, resampling, storage, warmstart
from .khat import Khat, khat

if TYPE_CHECKING:
    from ..model import Program

SUMMARY_PAIRS = 5_000
DRAWN_NUMBERS = 2**22  # in the arrays of all rows, for draws that are looked at together


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """A Gaussian approximation of a model's posterior in unconstrained space, or a mixture of Gaussians where
    hyperparameters are integrated out (see :meth:`integrate`).

    The sites are flattened in the order of :attr:`site_names`. Posteriors are made by ``RVGA(model).run(data)`` and its
    relatives, seldom by hand.

    **Example**

    With the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> posterior
        Posterior(sites=(slopes), size=2, num_rows=200, elbo=-91.2...)
        >>> posterior.site_names, posterior.mean.shape, posterior.covariance.shape
        (('slopes',), (2,), (2, 2))

    :param program: the compiled model.
    :param gaussian: q, of any family, or a mixture: its arrays have P entries along their last axis.
    :param elbo: the bound on log p(data), where the method has it.
    :param info: what the run has to tell besides: plain scalars, strings, arrays, and lists or dicts of these.
    :param continuation: the object whose ``update(posterior, data, **kwargs)`` absorbs further rows.
    :param state: what that method goes on from, and parts are merged by.
    :param num_rows: the number of rows absorbed so far.
    :param row_sets: of each run that led here, which rows it has taken in, so that none are merged twice; empty if that
        is not known.
    :raises ValueError: if the shapes of the Gaussian's arrays do not fit the program's layout.
    """

    program: Program
    gaussian: Family | GaussianMixture
    elbo: float | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    continuation: Any = None
    state: Any = None
    num_rows: int = dataclasses.field(kw_only=True)
    row_sets: tuple[RowSet, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        size = self.program.layout.size
        gaussian = jax.tree.map(jnp.asarray, self.gaussian)
        for field in dataclasses.fields(gaussian):
            value = getattr(gaussian, field.name)
            if isinstance(value, tuple | ArrowRoots) or (
                isinstance(gaussian, GaussianMixture) and field.name == "log_weights"
            ):
                continue
            shape = value.shape
            if shape[-1:] != (size,) or (field.name == "root" and shape != (size, size)):
                raise ValueError(f"{field.name} must have {size} entries along every axis for this model, not {shape}.")
        object.__setattr__(self, "gaussian", gaussian)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is compiled, for other processes.

        :raises PicklingError: from pickle, if the model cannot be pickled: a function within another.
        """
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __repr__(self) -> str:
        sites = ", ".join(self.site_names)
        bound = "" if self.elbo is None else f", elbo={self.elbo:.6g}"
        return f"Posterior(sites=({sites}), size={self.mean.size}, num_rows={self.num_rows}{bound})"

    @property
    def site_names(self) -> tuple[str, ...]:
        """The latent sites, in the order in which they are flattened."""
        return tuple(self.program.layout.site_names)

    @property
    def mean(self) -> Array:
        """The mean of q in unconstrained space, shape ``(P,)``."""
        return self.gaussian.mean

    @property
    def scale(self) -> Array:
        """A square root of the covariance, shape ``(P, P)``: ``covariance = scale @ scale.T``."""
        return self.gaussian.as_full().root

    @property
    def params(self) -> dict[str, Array]:
        """The values of the model's ``numpyro.param`` sites, which :class:`FixedPointVI` learns."""
        return self.program.params.constrained(self.program.params.values)

    @functools.cached_property
    def covariance(self) -> Array:
        """The covariance of q in unconstrained space, shape ``(P, P)``."""
        return self.gaussian.covariance()

    @functools.cached_property
    def scale_tril(self) -> Array:
        """The Cholesky factor of the covariance: lower triangular with a positive diagonal, shape ``(P, P)``."""
        return self.gaussian.scale_tril()

    def sample_posterior(
        self,
        rng_key: Array,
        sample_shape: tuple[int, ...] = (),
        data: Mapping[str, ArrayLike] | tuple | None = None,
    ) -> dict[str, Array]:
        """Draw from q.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> import jax
            >>> posterior.sample_posterior(jax.random.key(0), (500,))["slopes"].shape
            (500, 2)

        :param rng_key: random key.
        :param sample_shape: leading shape of the draws.
        :param data: rows whose own latent variables are to be drawn too: with ``local="prior"`` they follow their
            conditional prior under q, with ``"marginal"`` their conditional distribution given theta and the row.
            Deterministic sites that read all rows, such as a mean over them, are those of ``data``; without it those of
            the rows that the posterior was fitted to. After :meth:`load`, :meth:`update` or a stream, which leave these
            not at hand, such sites come with ``data`` only.
        :return: the constrained latent sites and the deterministic sites that have no value for each row, each of
            shape ``(*sample_shape, *site_shape)``.
        """
        _check_shape(sample_shape)
        theta_key, local_key = (rng_key, None) if data is None else jax.random.split(rng_key)
        theta = self.sample_unconstrained(theta_key, sample_shape)
        rows = None if data is None else self.program.rows(data, predicted=True)
        sites = self.constrain(theta, rows)
        if rows is not None and local_key is not None:
            flat = jnp.reshape(theta, (-1, theta.shape[-1]))
            local = prediction.local_latents(self, local_key, rows, flat)
            sites |= {name: jnp.reshape(value, (*sample_shape, *value.shape[1:])) for name, value in local.items()}
        return sites

    def sample_unconstrained(self, rng_key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw flat unconstrained vectors theta from q.

        :param rng_key: random key.
        :param sample_shape: leading shape of the draws.
        :return: shape ``(*sample_shape, P)``.
        """
        _check_shape(sample_shape)
        standard = jax.random.normal(rng_key, (*sample_shape, self.gaussian.noise_size), self.mean.dtype)
        return self.gaussian.transform(standard)

    def constrain(self, theta: Array, rows: Mapping[str, ArrayLike] | None = None) -> dict[str, Array]:
        """The model's sites at flat unconstrained vectors.

        :param theta: shape ``(..., P)``.
        :param rows: arrays by argument name, as for ``data`` of :meth:`sample_posterior`.
        :return: the sites that :meth:`sample_posterior` returns, each of shape ``(..., *site_shape)``.
        """
        batch_shape, flat = theta.shape[:-1], jnp.reshape(theta, (-1, theta.shape[-1]))
        sites, rows = self.constrain_latents(flat), self.program.data_rows if rows is None else rows
        if self.program.deterministic.of_data and rows is not None:
            sites |= self._deterministic_of_data(flat, dict(rows))
        return {name: jnp.reshape(value, (*batch_shape, *value.shape[1:])) for name, value in sites.items()}

    @functools.cached_property
    def constrain_latents(self) -> Callable[[Array], dict[str, Array]]:
        """theta (n, P) -> the constrained latent sites, and deterministic sites that are functions of them alone."""
        return jax.jit(jax.vmap(self.program.constrain))

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
        return self.constrain(self._marginal_quantiles(jnp.full((1,), 0.5, self.mean.dtype)))

    def quantiles(self, quantiles: ArrayLike | Sequence[float]) -> dict[str, Array]:
        """Quantiles of q's marginals, as :meth:`~numpyro.infer.autoguide.AutoMultivariateNormal.quantiles` has them.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> low, high = posterior.quantiles([0.05, 0.95])["slopes"]
            >>> print(np.asarray(high - low).round(1))
            [0.8 1. ]

        :param quantiles: one probability or an array of them.
        :return: dict of sites of shape ``(*quantiles.shape, *site_shape)``: the marginal quantiles in unconstrained
            space, pushed through the model's transforms. The caveat of :meth:`median` holds.
        """
        probabilities = jnp.asarray(quantiles, self.mean.dtype)[..., None]
        return self.constrain(self._marginal_quantiles(probabilities))

    def _marginal_quantiles(self, probabilities: Array) -> Array:
        """In unconstrained space, (..., P), at (..., 1)."""
        if isinstance(self.gaussian, GaussianMixture):
            return self.gaussian.marginal_quantiles(probabilities)
        return dist.Normal(self.mean, self.gaussian.deviation()).icdf(probabilities)

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
        batch = {name: jnp.reshape(value, (-1, *value.shape[len(batch_shape) :])) for name, value in values.items()}
        theta = self._unconstrain(batch)
        return self.log_prob_unconstrained(jnp.reshape(theta, (*batch_shape, self.mean.size)))

    def log_prob_unconstrained(self, theta: Array) -> Array:
        """The log density of q at flat unconstrained vectors.

        :param theta: shape ``(..., P)``.
        :return: shape ``(...)``.
        """
        return self.gaussian.log_prob(theta)

    def print_summary(self, prob: float = 0.9) -> None:
        """Print mean, standard deviation, median and central interval of every scalar of the latent sites under q.

        The figures are those of constrained values. They come from a fixed set of mirrored draws, so they are the same
        at every call; for sites on the real line the mean and the median are exact.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> posterior.print_summary()
            <BLANKLINE>
                            mean       std    median      5.0%     95.0%
             slopes[0]      1.28 ...
             slopes[1]     -2.03 ...
            <BLANKLINE>

        :param prob: the probability of the interval.
        :raises ValueError: if ``prob`` is not between 0 and 1.
        """
        if not 0 < prob < 1:
            raise ValueError(f"prob must lie between 0 and 1, not {prob}.")
        shape = (SUMMARY_PAIRS, self.gaussian.noise_size)
        standard = jax.random.normal(jax.random.key(0), shape, self.mean.dtype)
        theta = self.gaussian.transform(jnp.concatenate([standard, -standard]))
        draws = jax.device_get(self.constrain_latents(theta))
        print(_summary_table({name: draws[name].astype(np.float64) for name in self.site_names}, prob))

    def predictive(
        self,
        rng_key: Array | None,
        data: Mapping[str, ArrayLike] | tuple,
        num_samples: int = 1000,
        method: str = "monte_carlo",
    ) -> dict[str, Any]:
        """Predict the observed sites of new rows.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> import jax
            >>> new = {"X": np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])}
            >>> posterior.predictive(jax.random.key(0), new, num_samples=500)["y"].shape
            (500, 3)
            >>> print(np.asarray(posterior.predictive(None, new, method="closed_form")["y"]["mean"]).round(1))
            [0.8 0.1 0.5]

        :param rng_key: random key; ``closed_form`` needs none.
        :param data: rows as :meth:`RVGA.run` takes them, with or without the outcome. They may be new even where the
            model has a latent value for each row, as in Gaussian processes: those of new rows are drawn given the rest.
        :param num_samples: the number of draws.
        :param method: ``"monte_carlo"`` draws parameters from q and runs the model forward with every observed site
            drawn anew. ``"linearized"`` does so with the observed distributions' parameters linearised at the mean of
            q, which for networks is closer to the data; ``"plugin"`` with theta at the mean. ``"closed_form"`` is the
            R-VGA paper's approximate probability of a logistic site and its variance under q (equations 62 and 63),
            with no sampling.
        :return: for draws the observed sites and the deterministic sites inside the row plate, of shape
            ``(num_samples, *site_shape)``; for ``closed_form`` a dict ``{"mean": ..., "variance": ...}`` of arrays of
            shape ``(num_rows, *element_shape)`` for each observed site.
        :raises ValueError: if ``method`` is unknown or needs ``rng_key``, or ``data`` are invalid.
        :raises NotImplementedError: if ``method`` is ``"closed_form"`` and an observed site is not logistic.
        """
        check_choice("method", method, (*prediction.DRAWN, "closed_form"))
        if method == "closed_form":
            return prediction.closed_form(self, data)
        if rng_key is None:
            raise ValueError(f"method={method!r} draws: pass rng_key=jax.random.key(0).")
        return prediction.DRAWN[method](self, rng_key, data, num_samples)

    def to_arviz(
        self,
        data: Mapping[str, ArrayLike] | tuple | None = None,
        *,
        rng_key: Array | None = None,
        num_samples: int = 1000,
        coords: Mapping[str, Any] | None = None,
        dims: Mapping[str, list[str]] | None = None,
    ) -> Any:
        """Convert to an ``arviz.InferenceData`` (ArviZ 0.x) or an ``xarray.DataTree`` (ArviZ 1.x).

        Draws from q are independent, so there is one chain: every variable has the leading shape ``(1, num_samples)``.
        The groups are ``posterior`` (latent sites and deterministic sites outside the row plate) and ``sample_stats``
        with ``log_q``, the log density of q in unconstrained space. With ``data`` also ``log_p`` in ``sample_stats``
        (the log joint in unconstrained space, so that ``arviz.loo_approximate_posterior`` can be called with the two),
        ``log_likelihood``, ``posterior_predictive``, ``observed_data`` and ``constant_data``. Dimensions are named
        after the model's plates.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> result = posterior.to_arviz(data, num_samples=500)
            >>> dict(result["posterior"]["slopes"].sizes)
            {'chain': 1, 'draw': 500, 'slopes_dim_0': 2}
            >>> sorted(result["sample_stats"].data_vars)
            ['log_p', 'log_q']

        :param data: rows with their outcome, as :meth:`RVGA.run` takes them.
        :param rng_key: random key; ``jax.random.key(0)`` by default.
        :param num_samples: the number of draws.
        :param coords: coordinate values by dimension name.
        :param dims: dimension names by variable; these win over the names of the plates.
        :raises ImportError: if ArviZ is not installed.
        :raises ValueError: if ``data`` lack the outcome, and for names of ``coords`` and ``dims`` that do not exist.
        """
        return arviz.to_arviz(self, data, rng_key, num_samples, coords, dims)

    def khat(
        self, data: Mapping[str, ArrayLike] | tuple, *, rng_key: Array | None = None, num_samples: int = 10_000
    ) -> Khat:
        """Judge q by the posterior's density at draws.

        The Pareto k is the shape of the tail of the importance ratios p/q at draws from q (Vehtari et al. 2024; Yao et
        al. 2018). A third as many draws are wider, along one parameter each. Reweighted by the posterior, all draws
        tell by how much q's means and standard deviations are off: the verdict names the sites that move most. It is
        ``"good"`` only if no move is above 0.1. Modes that are far from q stay unseen.

        The log joint is summed over chunks of rows, so memory does not grow with the number of rows.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> print(posterior.khat(data).verdict)
            good. The importance weights are nearly equal: q is almost the posterior.

        :param data: all rows that the posterior has absorbed, with their outcome.
        :param rng_key: random key; ``jax.random.key(0)`` by default.
        :param num_samples: the number of draws from q; fewer than that for more than 6,700 parameters.
        :return: the Pareto k, a verdict, and how far each site moves. Ratios that do not vary at all, as for an exact
            posterior, give a k of 0.
        :raises NotImplementedError: after a run with dynamics.
        :raises ValueError: if ``data`` lack the outcome, and for fewer than 100 draws, too few to fit a tail to.
        """
        return khat(self, data, rng_key, num_samples)

    def resample(
        self,
        data: Mapping[str, ArrayLike] | tuple,
        num_samples: int = 1000,
        *,
        rng_key: Array | None = None,
        coords: Mapping[str, Any] | None = None,
        dims: Mapping[str, list[str]] | None = None,
    ) -> Any:
        """Draws of the model's posterior, where q is near it: Pareto-smoothed importance resampling (Vehtari et al.
        2024) of four draws from q for each that is kept.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> dict(posterior.resample(data, 500)["posterior"]["slopes"].sizes)
            {'chain': 1, 'draw': 500, 'slopes_dim_0': 2}

        :param data: all rows that the posterior has absorbed, with their outcome.
        :param num_samples: the number of draws. Some may be the same.
        :param rng_key: random key; ``jax.random.key(0)`` by default.
        :param coords: coordinate values by dimension name.
        :param dims: dimension names by variable.
        :return: what :meth:`to_arviz` returns with ``data``.
        :raises ValueError: if the Pareto k is above 0.7 and the weights are far from equal, and if ``data`` lack the
            outcome.
        :raises NotImplementedError: after a run with dynamics.
        """
        return resampling.resample(self, data, rng_key, num_samples, coords, dims)

    def nuts(self, **nuts_kwargs: Any) -> NUTS:
        """A NUTS kernel for the posterior's model, with q's covariance as its inverse mass matrix.

        Give it a short warm-up and dispersed starts::

            mcmc = MCMC(posterior.nuts(), num_warmup=200, num_samples=1000, num_chains=4, chain_method="vectorized")
            mcmc.run(rng_key, X, y, init_params=posterior.init_params(rng_key, 4))

        The mass matrix stays as it is (``adapt_mass_matrix=False``) and the step size, which starts at ``P ** -0.25``,
        is adapted. Measured on logistic regressions with 30 coefficients, 5,000 rows and posterior covariances of
        condition number 1e3 (correlated coefficients) and 7e5 (raw scales of independent covariates), four vectorised
        chains: 200 + 1,000 iterations of 7 leapfrog steps gave minimal effective sample sizes of 7,400 and 7,200,
        default NUTS with 1,000 + 1,000 iterations 1,700 (of 79 steps) and 5,700 (of 7, after a costly warm-up). Per CPU
        second that is 22 and 3.5 times as much, the recursion included and compilation left out; R-hat was at most
        1.001. Letting NUTS adapt the mass matrix in warm-ups of up to 200 halved the effective sample size and made
        trajectories 2 to 10 times as long. A warm-up of 20 ended with step sizes that reject nearly every proposal, one
        of 50 with uneven ones, since NumPyro restarts the step size's adaptation for the last tenth of the warm-up: use
        100 or more.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> import jax
            >>> from numpyro.infer import MCMC
            >>> mcmc = MCMC(posterior.nuts(), num_warmup=100, num_samples=100, progress_bar=False)
            >>> mcmc.run(jax.random.key(0), **data, init_params=posterior.init_params(jax.random.key(1)))
            >>> mcmc.get_samples()["slopes"].shape
            (100, 2)

        :param nuts_kwargs: keywords of :class:`~numpyro.infer.hmc.NUTS`; they win over the ones chosen here.
            ``dense_mass`` may be True, False (only the variances of q are used: the default for a diagonal q, and for
            more than 1,000 parameters, where each leapfrog step would mostly be a product with the whole matrix), or a
            list of tuples of site names, the blocks of a block-diagonal mass matrix.
        :return: a kernel for one :class:`~numpyro.infer.mcmc.MCMC` run, whose data are given to ``MCMC.run`` as usual.
        """
        return warmstart.nuts(self, **nuts_kwargs)

    def init_params(self, rng_key: Array, num_chains: int = 1) -> dict[str, Array]:
        """Initial values for ``MCMC.run(..., init_params=...)``: draws from q, spread out 1.5 times as far.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> import jax
            >>> posterior.init_params(jax.random.key(0), num_chains=4)["slopes"].shape
            (4, 2)

        :param rng_key: random key.
        :param num_chains: the number of chains.
        :return: unconstrained values by site, with a leading axis of length ``num_chains`` if that is above one.
        """
        return warmstart.init_params(self, rng_key, num_chains)

    def as_guide(self) -> tuple[AutoContinuous, dict[str, Array]]:
        """The same Gaussian as a guide: ``AutoDiagonalNormal`` for a diagonal q, else ``AutoMultivariateNormal``; for a
        mixture the Gaussian with its mean and covariance.

        Guide and parameters serve ``Predictive(model, guide=guide, params=params, num_samples=...)``,
        ``NeuTraReparam(guide, params)``, ``SVI`` (as ``init_params``) and the guide's own methods. The guide has seen
        the model on a few rows only: its own methods return deterministic sites inside the row plate for those rows.

        :return: the guide and its parameters, ``auto_loc`` and ``auto_scale_tril`` (or ``auto_scale``), in the guide's
            own flat order.
        """
        return warmstart.as_guide(self)

    def save(self, path: str | os.PathLike) -> None:
        """Write to one file, atomically: an interrupted or failed call leaves what was at ``path`` as it was.

        The file holds plain arrays and a JSON text, and nothing executable. A model keyword whose value is not plain
        (an array, None, bool, number, string, or a list, tuple or dict of these) is stored by name alone, and
        :meth:`load` will ask for it. The method that made the posterior is not stored.

        **Example**

        With the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> from pathlib import Path
            >>> posterior.save("posterior.npz")
            >>> Path("posterior.npz").exists()
            True

        :param path: the file to write, under exactly this name.
        :raises ValueError: if ``posterior.info`` holds a value that is not plain.
        """
        storage.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike, model: Callable, **model_kwargs: Any) -> Posterior:
        """Read what :meth:`save` wrote.

        **Example**

        With the model and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> from numpyro_rvga import Posterior
            >>> posterior.save("posterior.npz")
            >>> again = Posterior.load("posterior.npz", model)
            >>> bool((again.mean == posterior.mean).all()), again.num_rows
            (True, 200)

        :param path: the file.
        :param model: the model that the posterior was made for.
        :param model_kwargs: model keywords that the file could not hold; others replace those in the file.
        :return: the posterior, which takes in more rows as the ``init`` of a method's ``run``.
        :raises FileNotFoundError: if there is no such file.
        :raises ValueError: if the file is damaged, no posterior of this package, written by a newer version, lacks a
            model keyword, or belongs to another model: with other arguments, latent sites, priors or likelihoods.
        """
        return cls(**storage.load(path, model, **model_kwargs))

    @classmethod
    def merge(
        cls, parts: Sequence[Posterior], data: Sequence[Any] | None = None, rounds: int | str = "auto"
    ) -> Posterior:
        """What runs on different rows have learned together, with the prior counted once.

        The parts are posteriors of the same model given different rows, each made from the model's prior. They may have
        been made anywhere, and come from files. The result is that of all rows where these are linear and Gaussian.
        Elsewhere a part's summary is as good as its own run, and a warning says so. With ``data`` the result is that of
        all rows everywhere: they are evaluated at the merged Gaussian, and it moves, until it does not any more.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> from numpyro_rvga import Posterior
            >>> rows = [{n: a[half] for n, a in data.items()} for half in (slice(0, 100), slice(100, 200))]
            >>> parts = [RVGA(model).run(half, progress_bar=False) for half in rows]
            >>> whole = Posterior.merge(parts, data=rows)
            >>> whole.info["merge_error"] < 0.01, bool(np.allclose(whole.mean, posterior.mean, atol=0.01))
            (True, True)

        :param parts: posteriors of one method and family. For priors that are not Gaussian, one more solve follows.
        :param data: the rows of each part, in the order of ``parts``, as their runs took them; for posteriors of RVGA.
        :param rounds: with ``data``: how many times all rows are evaluated, the first time where ``parts`` are merged.
            ``"auto"``: until all moves to come would together change no mean by more than 0.01 standard deviations,
            and no standard deviation by more than 1%; at most 20.
        :return: a posterior that takes in more rows with :meth:`update` if the first part does. With ``data`` it has
            the bound, and ``info`` holds ``merge_error``, by how many standard deviations it may still be off, which
            that was after each round (``merge_errors``), and ``rounds``. A warning says so if that is above 0.01.
        :raises ValueError: naming the part: if its model, with its keyword arguments and learned parameters, or its
            family is not that of the others, if it has taken in rows that another part has, or cannot be merged.
        """
        return cls(**merging.merge(parts, data, rounds))

    def update(self, data: Any, **kwargs: Any) -> Posterior:
        """Absorb further rows.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> later = posterior.update(data, progress_bar=False)  # as if these were new rows
            >>> posterior.num_rows, later.num_rows
            (200, 400)

        :param data: rows as :meth:`RVGA.run` takes them.
        :param kwargs: passed on to the method that made this posterior.
        :return: a new posterior; this one stays as it is.
        :raises ValueError: if this posterior has no method to go on with, as after :meth:`load`, and for arrays with
            other columns.
        """
        if self.continuation is None and self.program.whole:
            raise ValueError(
                "The rows of this posterior are one joint solve: run the model on old and new rows together."
            )
        if self.continuation is None:
            raise ValueError(
                "This posterior holds no method to go on with. Choose one: RVGA(model).run(data, init=posterior)."
            )
        return self.continuation.update(self, data, **kwargs)

    def integrate(
        self,
        data: Mapping[str, ArrayLike] | tuple,
        *,
        sites: str | Sequence[str] = "auto",
        marginal: str = "bound",
        rng_key: Array | None = None,
        progress_bar: bool = True,
    ) -> Posterior:
        """Integrate hyperparameters out: the same as ``FixedPointVI(model, integrate=sites).run(data)``, which tells
        more, begun where this posterior is.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example, which has no hyperparameters:

        .. doctest::

            >>> posterior.integrate(data, progress_bar=False).info["not_integrated"]
            'the model is a latent Gaussian model as it is'

        :param data: all rows that the posterior has absorbed, with their outcome.
        :param sites: names of latent sites, or ``"auto"``.
        :param marginal: ``"bound"`` or ``"importance"``; see :class:`FixedPointVI`.
        :param rng_key: for Monte Carlo expectations. Default: ``jax.random.key(0)``.
        :param progress_bar: show how often the bound has been maximized.
        :return: a mixture of Gaussians; this posterior with ``info["not_integrated"]``, if there is nothing to
            integrate.
        :raises ValueError: for unusable data, and sites that the model does not have.
        """
        fields = integration.integrate(self, data, sites, rng_key, progress_bar, marginal)
        return dataclasses.replace(self, **fields)

    @functools.cached_property
    def _deterministic_of_data(self) -> Callable[[Array, dict[str, ArrayLike]], dict[str, Array]]:
        """Of theta (n, P) and rows, as many draws at a time as memory has room for."""

        @jax.jit
        def of_draws(theta: Array, rows: dict[str, Array]) -> dict[str, Array]:
            numbers = sum(array.size for array in rows.values())
            at = lambda one: self.program.deterministic_of_data(one, rows)  # noqa: E731
            return jax.lax.map(at, theta, batch_size=max(1, min(len(theta), DRAWN_NUMBERS // numbers)))

        return of_draws

    @functools.cached_property
    def _unconstrain(self) -> Callable[[dict[str, Array]], Array]:
        return jax.jit(jax.vmap(self.program.unconstrain))

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


def _summary_table(samples: Mapping[str, np.ndarray], prob: float) -> str:
    """The table of :func:`numpyro.diagnostics.print_summary` without the columns that concern Markov chains."""
    tails = [(1 - prob) / 2, (1 + prob) / 2]
    header = ["mean", "std", "median", *(f"{100 * tail:.1f}%" for tail in tails)]
    rows = []
    for name, draws in samples.items():
        columns = [draws.mean(0), draws.std(0), np.median(draws, 0), *np.quantile(draws, tails, axis=0)]
        for index in np.ndindex(draws.shape[1:]):
            label = f"{name}[{','.join(map(str, index))}]" if index else name
            rows.append((label, [column[index] for column in columns]))
    width = max(10, *(len(label) for label, _ in rows))
    lines = [" " * width + "".join(f" {title:>9}" for title in header)]
    lines += [f"{label:>{width}}" + "".join(f" {value:>9.2f}" for value in values) for label, values in rows]
    return "\n" + "\n".join(lines) + "\n"


def _check_shape(sample_shape: Any) -> None:
    """:raises ValueError: for a number in place of a shape."""
    if not isinstance(sample_shape, (tuple, list)):
        raise ValueError(f"sample_shape must be a tuple, not {sample_shape!r}: for one axis, ({sample_shape},).")
