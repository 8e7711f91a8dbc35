"""Is this a model whose rows are conditionally independent given global, continuous latents? Say what is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.compilation import at_once, jit_once
from ..data.arguments import absent_arguments
from ..data.arrays import BadData
from ..data.rows import Arrays, Keywords, num_rows
from ..handlers.failures import FORWARD, CoupledRows, LocalLatents, LocalStates, needs_numbers
from ..handlers.tracing import SiteInfo, SiteRecord, run_model, sample_sites
from ..layout import Layout
from ..terms.terms import linearize

CHECKED_ROWS = 8
ROUNDINGS = 1e3  # units in the last place, relative to a term, by which it may differ if taken by itself
MOST_TOGETHER = 2**17  # rows
NO_INTEGER = "Indexer must have integer or boolean type"  # of JAX, for arrays that index
MOST_INTEGRAND_VALUES = 2**24  # in an evaluation of the bound: beyond, latent variables of rows are part of theta


def check_outcomes_shape(observed: Mapping[str, SiteRecord]) -> None:
    """:raises ValueError: naming the site, where each outcome would be taken with the distribution of every other."""
    for name, site in observed.items():
        shape = jnp.shape(site.value)
        shape = shape[: len(shape) - len(site.fn.event_shape)]
        try:
            both = np.broadcast_shapes(shape, site.fn.batch_shape)
        except ValueError:
            continue  # the density fails by itself, or the distribution's own way to take values does not
        if math.prod(both) > max(math.prod(shape), math.prod(site.fn.batch_shape)):
            raise ValueError(
                f"site {name!r}: the outcomes have shape {shape} and their distributions {site.fn.batch_shape}, so "
                f"that their densities would be {both}, those of every outcome under every distribution. Give outcomes "
                f"of shape {site.fn.batch_shape}: one column is y[:, 0]."
            )


def check_has_outcome(observed: Sequence[str], model: Callable, given: Sequence[str]) -> None:
    """:raises ValueError: for no observed sites, naming arguments of the model that are not given."""
    if not observed:
        absent = absent_arguments(model, given)
        advice = f"; the data lack {', '.join(map(repr, absent))}" if absent else ""
        raise ValueError(
            "the model has no observed site that depends on the data: give sample(..., obs=...) one of its arrays"
            f"{advice}."
        )


def check_has_latents(continuous: Collection[str], discrete: Collection[str]) -> None:
    """:raises NotImplementedError: naming the latent sites, if all are discrete.
    :raises ValueError: if there are none."""
    if continuous:
        return
    if not discrete:
        raise ValueError("the model has no latent site: let the unknown ones be sample sites without obs=.")
    names = ", ".join(f"site {name!r}" for name in sorted(discrete))
    raise NotImplementedError(
        f"all latent sites of the model are discrete ({names}): their states can be summed over, but no site is left "
        "to have a Gaussian. Give the unknown numbers of the model priors; states under known ones are found by "
        "numpyro.infer.Predictive(..., infer_discrete=True)."
    )


def describe_few(describe: Callable, rows: Arrays, number: str, observed: Sequence[str]) -> Any:
    """:raises CoupledRows: naming the observed sites, if the model runs on all rows but not on these few."""
    try:
        return describe(rows)
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        raise CoupledRows(_coupled_message(", ".join(observed), f"on {number} the model fails: {error}")) from error


def check_continuous(sites: Mapping[str, SiteInfo], local_names: frozenset[str], *, marginal: bool) -> None:
    """:raises NotImplementedError: for discrete latents that are not summed out inside their row."""
    for name, site in sites.items():
        if not site.is_discrete or site.is_observed:
            continue
        if name in local_names and marginal:
            continue
        if name in local_names:
            are_states = all(sites[of_row].is_discrete for of_row in local_names)
            raise (LocalStates if are_states else LocalLatents)(
                f"site {name!r} is a discrete latent variable of each row. BONG, other families than 'full' and "
                "local='prior' do not sum over states: RVGA(model, local='marginal') does."
            )
        where = f"the plate {site.plates[-1]!r}" if site.plates else "the whole model"
        raise CoupledRows(
            f"site {name!r} is a discrete latent variable of {where}, not of single rows. Where all rows are at hand, "
            "RVGA(model).run(data) sums over its states; in streams it is not summed over. Let each group be a row: "
            "one array of shape (groups, rows of each), and handlers.mask for groups that have fewer; or put the site "
            f"into the plate over the rows, if each row has a value of its own. {FORWARD}"
        )


def local_latents(
    one: Mapping[str, SiteInfo], two: Mapping[str, SiteInfo], row_plates: frozenset[str], *, marginal: bool
) -> frozenset[str]:
    """The latents that belong to single rows.

    :param one: the sites of a run on one row. :param two: those of a run on several.
    :param marginal: whether they are integrated out, and need not be normal.
    :raises NotImplementedError: for local latents that are not normal, otherwise.
    :raises CoupledRows: for latents that grow with the number of rows and are in no row plate.
    """
    names = set()
    for name, site in one.items():
        inside = row_plates & set(site.plates)
        if site.is_observed or (not inside and site.value_shape == two[name].value_shape):
            continue
        if not inside:
            raise CoupledRows(
                f"site {name!r} is a latent variable whose shape grows with the number of rows. FixedPointVI takes "
                "such models; a recursion needs latents that rows share: give it a plate of its own and index into it "
                "(a[group]), or put it into the row plate if it is Normal given the others."
            )
        if not (marginal or site.is_normal or site.is_discrete):
            raise LocalLatents(
                f"site {name!r} is a latent variable inside the row plate {sorted(inside)[0]!r}. BONG, other families "
                "than 'full' and local='prior' take only Normal ones: RVGA(model, local='marginal') integrates others "
                "out."
            )
        names.add(name)
    return frozenset(names)


def check_shared(layout: Layout, local_names: frozenset[str]) -> None:
    """:raises CoupledRows: if rows share no latent."""
    if local_names and not layout.size:
        raise CoupledRows(
            f"site {sorted(local_names)[0]!r} and all other latent variables belong to single rows: a recursion has "
            "nothing to learn from one row for the next."
        )


def check_affordable(program: Any, num_rows: int) -> None:
    """:raises NotImplementedError: naming a site of which integrals over rows' latent variables take longer than one
    solve for all of these."""
    for terms in program.terms:
        size, most = terms.num_predictors, MOST_INTEGRAND_VALUES // max(num_rows * terms.num_elements, 1)
        if terms.num_nodes > 1 and terms.num_nodes * (2 * size**2 + 1) > most:
            raise NotImplementedError(
                f"site {terms.site!r}: integrals over the latent variables of each row would take "
                f"{terms.num_nodes} values of its density at each of the points of {size} predictors. local='marginal' "
                "takes them."
            )


def check_local_terms(program: Any) -> None:
    """:raises CoupledRows: if the rows' own variables are more than known additions to the predictors. With their
    conditional prior as q, the bound would shrink a standard deviation that is to be learned to zero."""
    if not program.local.size:
        return
    theta = jnp.asarray(np.random.default_rng(0).normal(size=program.layout.size), program.dtype)
    rows = {**program.example_rows, **program.shared}

    def alone():
        flags = [linearize(terms, theta, rows)[1:] for terms in program.terms]
        return [jnp.any(local != 0, axis=-1) & jnp.all(jacobian == 0, axis=-1) for jacobian, local in flags]

    for terms, flags in zip(program.terms, at_once(alone)):
        if np.any(flags) or not terms.is_affine:
            names = ", ".join(map(repr, program.local.site_names))
            raise LocalLatents(
                f"site {names}, a latent variable of each row, enters site {terms.site!r} other than as an addition of "
                "known standard deviation, and only such are integrated out with local='prior': use local='marginal'."
            )


def check_has_terms(row_sites: Mapping[str, SiteInfo]) -> None:
    """:raises CoupledRows: if one row by itself is observed at no place."""
    for name, site in row_sites.items():
        if 0 in site.value_shape and not site.is_auxiliary:  # a factor has no value, only a density
            raise CoupledRows(_coupled_message(name, "one row by itself has no term"))


def check_independence(program: Any, rows: Arrays) -> None:
    """The terms of rows must be those that the model has of all rows together.

    :param rows: those at hand: models may treat rows by their positions among all of these. Bad ones do not count.
    """
    some = program.usable(program.several(rows))
    count = num_rows(some)
    if not count:
        return
    tolerance = ROUNDINGS * float(jnp.finfo(program.dtype).eps)

    @jit_once
    def both(theta, some, latents, own):
        together = program.site_elements(theta, some, latents)
        if program.local_names:
            return together, program.elements_of_each(theta, some, own)
        inputs = {**program.inputs(some), **program.shared}
        return together, {terms.site: terms.log_probs(theta, inputs) for terms in program.terms}

    origin = np.zeros(program.layout.size, program.dtype)
    try:
        latents, own = program.row_latents_of(some, np.random.default_rng(0))
        together, alone = jax.eval_shape(both, origin, some, latents, own)
    except (TypeError, ValueError) as error:
        site = program.terms[0].site
        raise CoupledRows(_coupled_message(site, f"on {count} rows the model fails: {error}")) from error
    for name, terms in alone.items():
        size, total = terms.shape[1], together[name].shape[0]
        if terms.size != total and program.plates[name]:
            raise CoupledRows(_coupled_message(name, f"it has {size} terms for one row and {total} for {count}"))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        theta = rng.normal(0.0, 0.5, program.layout.size).astype(program.dtype)
        joint, single = jax.device_get(both(theta, some, *program.row_latents_of(some, rng)))
        for name in single:
            terms, parts = (np.ravel(np.asarray(x[name], np.float64)) for x in (joint, single))
            if np.isfinite(terms).any() and not _are_equal(terms, parts, tolerance):
                raise CoupledRows(
                    _coupled_message(
                        name, f"{count} rows together have log density {terms.sum():.6g}, one by one {parts.sum():.6g}"
                    )
                )


def _are_equal(terms: np.ndarray, parts: np.ndarray, tolerance: float) -> bool:
    """Whether terms are the same in any order; or their sums, where some are sums of others."""
    if terms.size == parts.size:
        return np.allclose(np.sort(terms), np.sort(parts), tolerance, tolerance, equal_nan=True)
    size = max(np.abs(parts).sum(), 1.0)
    return np.allclose(terms.sum(), parts.sum(), 0.0, tolerance * size, equal_nan=True)


def _coupled_message(name: str, why: str) -> str:
    return (
        f"site {name!r}: the rows of the data are not conditionally independent given the latents, or the model does "
        f"not take its rows from the data ({why}). Pass every per-row array in the data (lagged values as columns of "
        "their own), and compute nothing across rows inside the model."
    )


# ---------------------------------------------------------------------- models that fail on their rows
class _MoreDistributions(ValueError):
    """A site has more distributions than outcomes."""

    def __init__(self, site: str, outcomes: tuple[int, ...], distributions: tuple[int, ...]):
        super().__init__(f"site {site!r}: {outcomes} outcomes and {distributions} distributions")
        self.outcomes = outcomes


def explained_error(model: Callable, rows: Arrays, model_kwargs: Keywords, error: Exception) -> BadData | None:
    """An explanation of the error of a model that cannot be run on its rows; None unless other integers or columns mend
    it."""
    forms = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in rows.items()}

    def run(rows: Arrays) -> None:
        for name, site in sample_sites(*run_model(model, rows, model_kwargs)).items():
            outcomes = jnp.shape(site.value)[: jnp.ndim(site.value) - len(site.fn.event_shape)]
            if site.is_observed and np.broadcast_shapes(outcomes, site.fn.batch_shape) != outcomes:
                raise _MoreDistributions(name, outcomes, site.fn.batch_shape)

    def failure(changed: Mapping[str, jax.ShapeDtypeStruct]) -> Exception | None:
        try:
            jax.eval_shape(run, {**forms, **changed})
        except Exception as other:  # a model may fail in any way: this one is asked only whether it still does
            return other
        return None

    if NO_INTEGER in str(error):
        floats = {n: jax.ShapeDtypeStruct(f.shape, np.int32) for n, f in forms.items() if f.dtype.kind == "f"}
        for name in floats:
            others = {n: form for n, form in floats.items() if n != name}
            if NO_INTEGER in str(failure(others)) and NO_INTEGER not in str(failure(floats)):
                return BadData(_no_integers(name, rows[name]))
    why = None if needs_numbers(error) else failure({})
    if why is not None and not needs_numbers(why):
        for name, form in forms.items():
            if isinstance(why, _MoreDistributions) and why.outcomes == form.shape:
                continue  # the outcomes: the model's own error names them
            if form.shape[1:] == (1,) and failure({name: jax.ShapeDtypeStruct(form.shape[:1], form.dtype)}) is None:
                return BadData(
                    f"data array {name!r} has shape {form.shape}, with which the model fails ({why}), and without "
                    f"the second axis it does not: give {{{name!r}: {name}[:, 0]}}."
                )
    return None


def _no_integers(name: str, array: Any) -> str:
    array = np.asarray(array)
    column = "[:, 0]" if array.shape[1:] == (1,) else ""
    message = f"the model indexes by data array {name!r}, which has dtype {array.dtype}, and indices are integers"
    fractional = np.argwhere(array != np.round(array))
    if len(fractional):
        place = tuple(fractional[0])
        return (
            f"{message}: row {place[0]} holds {array[place]}. Number the groups: "
            f"{{{name!r}: np.unique({name}{column}, return_inverse=True)[1]}}."
        )
    return f"{message}: give {{{name!r}: {name}{column}.astype(int)}}."
