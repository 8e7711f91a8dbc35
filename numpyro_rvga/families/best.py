"""RVGA with sites of their own family where that gives the higher bound: both are tried."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..core.gaussians.mean_field import MeanField
from ..model.data.rows import Data
from ..model.site_families import own_families
from ..results.posterior import Posterior
from .by_site import SiteFamilies
from .full import FullFamily

Families = dict[str, str]


class BestFamily:
    """:class:`RVGA` with ``family="auto"``: it has the same methods.

    :param full: what it does with one Gaussian. :param by_site: families by site -> what it does with these.
    """

    def __init__(self, full: FullFamily, by_site: Callable[[Families], SiteFamilies]):
        self._full, self._by_site = full, by_site
        self._made: dict[tuple, SiteFamilies] = {}
        self._last: FullFamily | SiteFamilies = full

    def __getstate__(self) -> dict[str, object]:
        """For other processes."""
        return self.__dict__ | {"_made": {}, "_last": self._full}

    @property
    def state(self) -> Any:
        """The state of the last run."""
        return self._last.state

    def run(
        self, data: Data | Iterable, *, init: Any, checkpoint: str | os.PathLike | None, **passed: Any
    ) -> Posterior:
        """As :meth:`RVGA.run`. After a posterior, with its families.

        :raises ValueError: for a stream without such a posterior: it has no bounds to compare.
        """
        passed["checkpoint"] = checkpoint
        if isinstance(init, Posterior):
            of_init = init.info["families"] if isinstance(init.gaussian, MeanField) else {}
            self._last = self._of(of_init)
            return self._last.run(data, init=init, **passed)
        if init is not None or checkpoint is not None or not isinstance(data, (Mapping, tuple)):
            self._refuse()
        return self._best(lambda families: self._of(families).run(data, init=None, **passed))

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        """:raises ValueError: with advice."""
        raise ValueError(
            "family='auto' compares bounds, which a stream does not have: pass all rows as arrays to run, or name the "
            "families, as in family={'rate': 'gamma'}."
        )

    init = update = posterior = _refuse

    # ------------------------------------------------------------------ inside
    def _of(self, families: Families) -> FullFamily | SiteFamilies:
        """The method with these families, and one Gaussian of all other sites."""
        key = tuple(families.items())
        if families and key not in self._made:
            self._made[key] = self._by_site(families)
        return self._made[key] if families else self._full

    def _best(self, run: Callable[[Families], Posterior]) -> Posterior:
        """The posterior with the highest bound: with one Gaussian, or with all sites that have a family in theirs; if
        that bound is no higher, with one of them in its own."""
        best = gaussian = _Attempt.of({}, run)
        bounds, enough = {"full": gaussian.bound}, gaussian.bound + gaussian.posterior.info.get("elbo_error", 0.0)
        own = own_families(gaussian.posterior.program) if np.isfinite(enough) else {}
        alone = [{name: family} for name, family in own.items()] if len(own) > 1 else []
        for tried in ([own] if own else [], alone):
            attempts = [attempt for families in tried if (attempt := self._attempt(families, run)) is not None]
            bounds |= {attempt.name: attempt.bound for attempt in attempts}
            best = max(attempts, key=lambda attempt: attempt.bound, default=gaussian)
            if best.bound > enough:
                break
            best = gaussian
        self._last = self._of(best.families)
        for warning in best.warnings:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        info = {"families": best.families, **best.posterior.info, "family_bounds": bounds}
        return dataclasses.replace(best.posterior, info=info)

    def _attempt(self, families: Families, run: Callable[[Families], Posterior]) -> _Attempt | None:
        """None if the model has no such posterior, or its bound is not exact: that of random nodes."""
        try:
            attempt = _Attempt.of(families, run)
        except (ValueError, NotImplementedError):  # of the families: with one Gaussian there was none
            return None
        method = self._of(families)
        is_exact = isinstance(method, SiteFamilies) and method.has_exact_bound and attempt.posterior.info["converged"]
        return attempt if is_exact else None


class _Attempt(NamedTuple):
    """A run with some families, and its warnings."""

    families: Families
    posterior: Posterior
    warnings: list[warnings.WarningMessage]

    @classmethod
    def of(cls, families: Families, run: Callable[[Families], Posterior]) -> _Attempt:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            return cls(families, run(families), heard)

    @property
    def bound(self) -> float:
        """NaN if there is none."""
        return np.nan if self.posterior.elbo is None else self.posterior.elbo

    @property
    def name(self) -> str:
        return ", ".join(f"{name}: {family}" for name, family in self.families.items())
