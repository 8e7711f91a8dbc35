"""The result: a Gaussian over a model's latent sites in unconstrained space, and everything that is read off it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.gaussians.mixture import GaussianMixture
from ..model.data.rows import Data
from . import arviz, integration, prediction, resampling, storage, summary, warmstart
from .fitted import Fitted
from .khat import khat
from .merging import merge as merging


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Posterior(Fitted):
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
    :param info: diagnostics of the run: plain scalars, strings, arrays, and lists or dicts of these.
    :param continuation: the method whose ``run(data, init=posterior, **model_kwargs)`` absorbs further rows.
    :param state: what that method goes on from, and parts are merged by.
    :param num_rows: the number of rows absorbed so far.
    :param row_sets: of each run that led here, which rows it has taken in, so that none are merged twice; empty if that
        is not recorded.
    :raises ValueError: if the shapes of the Gaussian's arrays do not fit the program's layout.
    """

    def __repr__(self) -> str:
        sites = ", ".join(self.site_names)
        bound = "" if self.elbo is None else f", elbo={self.elbo:.6g}"
        return f"Posterior(sites=({sites}), size={self.mean.size}, num_rows={self.num_rows}{bound})"

    def sample_posterior(
        self,
        rng_key: Array,
        sample_shape: tuple[int, ...] = (),
        data: Data | None = None,
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
        :return: the constrained latent sites and the deterministic arrays that have no value for each row, each of
            shape ``(*sample_shape, *site_shape)``.
        """
        theta_key, local_key = (rng_key, None) if data is None else jax.random.split(rng_key)
        theta = self.sample_unconstrained(theta_key, sample_shape)
        rows = None if data is None else self.program.rows(data, predicted=True)
        sites = self.constrain(theta, rows)
        if rows is not None and local_key is not None:
            flat = jnp.reshape(theta, (-1, theta.shape[-1]))
            local = prediction.given_local_latents(self, local_key, rows, flat, self.program.of_rows)
            sites |= {name: jnp.reshape(value, (*sample_shape, *value.shape[1:])) for name, value in local.items()}
        return sites

    # ------------------------------------------------------------------ methods that have files of their own
    print_summary = summary.print_summary
    predictive = prediction.predictive
    to_arviz = arviz.to_arviz
    khat = khat
    resample = resampling.resample
    nuts = warmstart.nuts
    init_params = warmstart.init_params
    as_guide = warmstart.as_guide
    save = storage.save
    load = classmethod(storage.load)
    merge = classmethod(merging.merge)

    def update(self, data: Data | Iterable, **kwargs: Any) -> Posterior:
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
        :raises ValueError: if this posterior has no method to go on with, as after :meth:`load`, or is a mixture, and
            for arrays with other columns.
        """
        if self.continuation is None and self.program.whole:
            raise ValueError(
                "The rows of this posterior are one joint solve: run the model on old and new rows together."
            )
        if isinstance(self.gaussian, GaussianMixture):
            raise ValueError(
                "This posterior is a mixture, which takes in no rows: integrate old and new ones together, "
                "FixedPointVI(model, integrate=...).run(data). RVGA(model).run(data, init=posterior) goes on from one "
                "Gaussian of its mean and covariance, without the skewness of what was integrated out."
            )
        if self.continuation is None:
            raise ValueError(
                "This posterior holds no method to go on with. Choose one: RVGA(model).run(data, init=posterior)."
            )
        return self.continuation.run(data, init=self, **{**self.program.model_kwargs, **kwargs})

    def integrate(
        self,
        data: Data,
        *,
        sites: str | Sequence[str] = "auto",
        marginal: str = "bound",
        rng_key: Array | None = None,
        progress_bar: bool = True,
    ) -> Posterior:
        """Integrate hyperparameters out: the same as ``FixedPointVI(model, integrate=sites).run(data)``, which tells
        more, begun where this posterior is.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example, which has two parameters alone:

        .. doctest::

            >>> posterior.integrate(data, progress_bar=False).info["integrated"]
            ['slopes']

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
