"""Is this a model whose rows are conditionally independent given global, continuous latents? Say what is not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.compilation import at_once, jit_once
from ..core.indices import indexings
from ..core.interpret import depends_on
from .arguments import absent_arguments
from .arrays import BadData
from .failures import CoupledRows
from .layout import Layout
from .rows import common_length, num_rows
from .terms import linearise
from .tracing import SiteInfo, SiteRecord, peel, plates_of, run_model, sample_sites

CHECKED_ROWS = 8
SUPPORT_PIECE = 2**16
NUM_STARTS = 4


def find_row_plates(
    model: Callable,
    rows: Mapping[str, Any],
    model_kwargs: Mapping[str, Any],
    *,
    concrete: bool = False,
    evaluates: bool = False,
) -> tuple[frozenset[str], list[str]]:
    """Plates around observed sites whose size is the number of rows, or that subsample them; and these sites.

    :param concrete: whether the model may look at the values of the data. :param evaluates: as for :class:`Program`.
    """
    result: dict[str, Any] = {}

    def abstract(rows):
        trace, runner = run_model(model, rows, model_kwargs)
        observed = {name: site for name, site in sample_sites(trace, runner).items() if site.is_observed}
        check_outcomes_shape(observed)
        result.update(plates=plates_of(trace), observed=list(observed), sizes=runner.plate_size)
        return 0

    if concrete:
        with jax.ensure_compile_time_eval() if evaluates else contextlib.nullcontext():
            jax.eval_shape(lambda: abstract(rows))
    else:
        jax.eval_shape(
            abstract,
            {name: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)) for name, a in rows.items()},
        )
    around, length = {p for n in result["observed"] for p in result["plates"][n]}, common_length(rows)
    return frozenset(p for p in around if result["sizes"][p] == length), result["observed"]


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


def describe_few(describe: Callable, rows: Mapping[str, Any], number: str, observed: Sequence[str]) -> Any:
    """:raises CoupledRows: naming the observed sites, if the model runs on all rows but not on these few."""
    try:
        return describe(rows)
    except (AssertionError, IndexError, TypeError, ValueError) as error:
        raise CoupledRows(_coupled_message(", ".join(observed), f"on {number} the model fails: {error}")) from error


def check_continuous(sites: Mapping[str, SiteInfo], local_names: frozenset[str], local: str) -> None:
    """:raises NotImplementedError: for discrete latents that are not summed out inside their row."""
    for name, site in sites.items():
        if not site.is_discrete or site.is_observed:
            continue
        if name in local_names and local == "marginal":
            continue
        if name in local_names:
            raise NotImplementedError(
                f"site {name!r} is a discrete latent variable of each row, which local='prior' does not take. "
                "RVGA(model, local='marginal') sums over its states."
            )
        if site.plates:
            raise NotImplementedError(
                f"site {name!r} is a discrete latent variable of the plate {site.plates[-1]!r} that is not summed out "
                "inside single rows: with local='marginal' those are that belong to one row each and have finitely "
                "many states (dist.Categorical(logits=dist.Poisson(rate).log_prob(jnp.arange(50))) for counts). Let "
                "each group be a row: one array of shape "
                "(groups, rows of each), and handlers.mask for groups that have fewer. States that follow one another "
                "in time are summed out by the forward algorithm, in the model: alpha = logsumexp(alpha[:, None] + "
                "log_transition, axis=0) + log_emission[t] in a lax.scan over t, and then "
                "numpyro.factor('y', logsumexp(alpha))."
            )
        raise NotImplementedError(
            f"site {name!r} is a discrete latent variable that all rows share, so that the posterior is a mixture of "
            "one Gaussian for each of its values. Fit these: posteriors = [RVGA(numpyro.handlers.condition(model, "
            f"{{{name!r}: value}})).run(data) for value in values]; the probabilities of the values are "
            "jax.nn.softmax(jnp.array([posterior.elbo for posterior in posteriors])). If each row has a value of its "
            "own, put the site into the plate over the rows."
        )


def local_latents(
    one: Mapping[str, SiteInfo], two: Mapping[str, SiteInfo], row_plates: frozenset[str], *, marginal: bool
) -> frozenset[str]:
    """The latents that belong to single rows.

    :param one: the sites of a run on one row. :param two: those of a run on two rows.
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
            raise NotImplementedError(
                f"site {name!r} is a latent variable inside the row plate {sorted(inside)[0]!r}, and local='prior' "
                "takes only Normal ones: RVGA(model, local='marginal') integrates others out."
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


def check_local_terms(program: Any) -> None:
    """:raises CoupledRows: if the rows' own variables are more than known additions to the predictors. With their
    conditional prior as q, the bound would shrink a standard deviation that is to be learned to zero."""
    if not program.local.size:
        return
    theta = jnp.asarray(np.random.default_rng(0).normal(size=program.layout.size), program.dtype)
    rows = {**program.example_rows, **program.shared}

    def alone():
        flags = [linearise(terms, theta, rows)[1:] for terms in program.terms]
        return [jnp.any(local != 0, axis=-1) & jnp.all(jacobian == 0, axis=-1) for jacobian, local in flags]

    for terms, flags in zip(program.terms, at_once(alone)):
        if np.any(flags) or not terms.is_affine:
            names = ", ".join(map(repr, program.local.site_names))
            raise CoupledRows(
                f"site {names}, a latent variable of each row, enters site {terms.site!r} other than as an addition of "
                "known standard deviation, and only such are integrated out with local='prior': use local='marginal'."
            )


def check_has_terms(row_sites: Mapping[str, SiteInfo]) -> None:
    """:raises CoupledRows: if one row by itself is observed at no place."""
    for name, site in row_sites.items():
        if 0 in site.value_shape and not site.is_auxiliary:  # a factor has no value, only a density
            raise CoupledRows(_coupled_message(name, "one row by itself has no term"))


def check_independence(program: Any, rows: Mapping[str, np.ndarray]) -> None:
    """The terms of a few rows must be the same taken together and one by one."""
    count = min(CHECKED_ROWS, num_rows(rows))
    few = {name: np.asarray(array[:count]) for name, array in rows.items()}
    singles = {name: array[:, None] for name, array in few.items()}
    tolerance = 1e3 * float(jnp.finfo(program.dtype).eps)

    @jit_once
    def both(theta, few, singles, latents, own):
        one_by_one = jax.vmap(lambda row, own: program.site_elements(theta, row, own))(singles, own)
        return program.site_elements(theta, few, latents), one_by_one

    origin = np.zeros(program.layout.size, program.dtype)
    try:
        latents, own = program.row_latents_of(few, np.random.default_rng(0))
        together, alone = jax.eval_shape(both, origin, few, singles, latents, own)
    except (TypeError, ValueError) as error:
        site = program.terms[0].site
        raise CoupledRows(_coupled_message(site, f"on {count} rows the model fails: {error}")) from error
    for name, terms in together.items():
        if alone[name].size != terms.size and program.plates[name]:
            size = alone[name].shape[1]
            raise CoupledRows(
                _coupled_message(name, f"it has {size} terms for one row and {terms.shape[0]} for {count}")
            )
    for seed in range(3):
        rng = np.random.default_rng(seed)
        theta = rng.normal(0.0, 0.5, program.layout.size).astype(program.dtype)
        joint, single = jax.device_get(both(theta, few, singles, *program.row_latents_of(few, rng)))
        for name in joint:
            total, parts = np.sum(np.asarray(joint[name], np.float64)), np.asarray(single[name], np.float64)
            if not np.isfinite(total):
                continue
            differ = abs(total - parts.sum()) > tolerance * max(np.abs(parts).sum(), 1.0)
            if differ or not np.isfinite(parts).all():
                raise CoupledRows(
                    _coupled_message(
                        name, f"{count} rows together have log density {total:.6g}, one by one {parts.sum():.6g}"
                    )
                )


class RowCheck:
    """A question about each row, compiled once, for pieces of a few fixed sizes.

    :param question: row -> arrays of bool (any shape), true if all is well.
    """

    def __init__(self, program: Any, question: Callable[[dict], Array]):
        self._arrays = sorted(depends_on(lambda row: {"answer": question(row)}, program.example_row)["answer"])
        example = program.example_row
        self._shape = jax.eval_shape(question, example).shape

        @jax.jit
        def many(arrays):
            return jax.vmap(lambda row: question({**example, **{n: v[None] for n, v in row.items()}}))(arrays)

        self._many = many

    def __call__(self, rows: Mapping[str, np.ndarray], first_row: int) -> None:
        """:raises ValueError: naming array and row, if all is not well."""
        raise NotImplementedError

    def answers(self, rows: Mapping[str, Any]) -> Callable[[], np.ndarray]:
        """Start to look; what is returned waits for the answers, (n, ...)."""
        total = num_rows(rows)
        if not self._arrays:
            return lambda: np.ones((total, *self._shape), bool)
        size = min(SUPPORT_PIECE, 1 << (total - 1).bit_length())
        starts = range(0, total, size)
        taken = [np.minimum(np.arange(start, start + size), total - 1) for start in starts]
        answers = [self._many({name: rows[name][places] for name in self._arrays}) for places in taken]
        return lambda: np.concatenate([np.asarray(x) for x in answers])[:total]

    def begin(self, rows: Mapping[str, Any]) -> Callable[[], np.ndarray]:
        """Start to look; what is returned waits for the answer: with which rows all is well, (n,)."""
        waiting, total = self.answers(rows), num_rows(rows)
        return lambda: waiting().reshape(total, -1).all(axis=1)


class SupportCheck(RowCheck):
    """Are a site's observed values in its distribution's support?"""

    def __init__(self, program: Any, site: str):
        super().__init__(program, lambda row: _in_support(program, site, row))
        self._program, self._site = program, site

    def __call__(self, rows: Mapping[str, np.ndarray], first_row: int) -> None:
        """:raises ValueError: naming site, array and row."""
        inside = self.begin(rows)()
        if not inside.all():
            raise ValueError(_outside_message(self._program, self._site, rows, int(np.argmin(inside)), first_row))


class IndexCheck(RowCheck):
    """Do the rows index what there is?

    :param parameters: row -> what the model makes of a row: a pytree.
    """

    def __init__(self, program: Any, parameters: Callable[[dict], Any]):
        self._sizes: list[int] = []

        def inside(row):
            all_indexings = indexings(parameters, row)
            self._sizes = [indexing.sizes[0] for indexing in all_indexings]
            return jnp.stack([jnp.all(indexing.inside) for indexing in all_indexings])

        super().__init__(program, inside)

    def __call__(self, rows: Mapping[str, np.ndarray], first_row: int) -> None:
        """:raises ValueError: naming array and row."""
        if not rows.keys() >= set(self._arrays):  # rows to predict may lack what the model takes None for
            return
        inside = self.answers(rows)()
        if inside.all():
            return
        row, place = np.argwhere(~inside)[0]
        size = self._sizes[place]
        arrays = [name for name in self._arrays if np.issubdtype(rows[name].dtype, np.integer)]
        held = ", ".join(f"{name!r} holds {rows[name][row]}" for name in arrays) or " and ".join(self._arrays)
        raise ValueError(outside_message(first_row + row, held, size))


def outside_message(row: int, held: str, size: int) -> str:
    return (
        f"row {row} indexes what is not there: array {held}, and what the model indexes has {size} "
        f"entries, 0 to {size - 1}. Count groups from 0, or make the model's plate larger."
    )


class StatesCheck(RowCheck):
    """Are the states of a discrete latent of each row among those that are summed over?

    :param bounds: (site, rows, states of the discrete latents) -> smallest and largest state, (M, 2).
    """

    def __init__(self, program: Any, site: str, bounds: Callable[[str, dict, Mapping[str, Array]], Array]):
        others, states = program.row_latents.states, np.asarray(program.row_latents.states[site])
        self._site, self._last = site, int(states[-1])

        def inside(row):
            bounds_of_row = bounds(site, row, {name: values for name, values in others.items() if name != site})
            return jnp.all((bounds_of_row[:, 0] >= states[0]) & (bounds_of_row[:, 1] <= states[-1]))

        super().__init__(program, inside)

    def __call__(self, rows: Mapping[str, np.ndarray], first_row: int) -> None:
        """:raises ValueError: naming site and row."""
        if not rows.keys() >= set(self._arrays):  # rows to predict may lack what the model takes None for
            return
        inside = self.begin(rows)()
        if not inside.all():
            row = int(np.argmin(inside))
            held = " and ".join(f"{name!r} holds {rows[name][row]}" for name in self._arrays)
            raise ValueError(
                f"site {self._site!r}: in row {first_row + row} ({held}) this discrete latent variable has states "
                f"beyond those of the rows that the model was read with, up to {self._last}. Give all rows at once, as "
                "arrays, or put a row with the most states into the first block."
            )


class QuadraticCheck(RowCheck):
    """Is a log density, of which the first rows say so, quadratic in the latent variables of the row?

    :param site: of which it is. :param question: row, with what rows share -> bool (E,).
    """

    def __init__(self, program: Any, site: str, question: Callable[[dict], Array]):
        super().__init__(program, lambda row: question({**row, **program.shared}))
        self._site = site

    def __call__(self, rows: Mapping[str, np.ndarray], first_row: int) -> None:
        """:raises ValueError: naming site and row."""
        if not rows.keys() >= set(self._arrays):
            return
        inside = self.begin(rows)()
        if not inside.all():
            raise ValueError(
                f"site {self._site!r}: in row {first_row + int(np.argmin(inside))} the log density is not quadratic in "
                "the row's latent variables, and in the rows that the model was read with it was. Give all rows at "
                "once, as arrays, or put such a row into the first block."
            )


class WholeSupportCheck:
    """The same for a model that runs on all rows at once."""

    def __init__(self, program: Any, site: str):
        self._program, self._site, self._axis = program, site, program.row_axis(site)

    def __call__(self, rows: Mapping[str, np.ndarray], first_row: int) -> None:
        """:raises ValueError: naming site, array and row."""
        program = self._program
        if program.is_value_of_latents(self._site):
            return
        inside = np.asarray(jit_once(lambda: _elements_inside(program, self._site, program.example_row))())
        bad = np.argwhere(~inside)
        if len(bad):
            row = int(bad[0][self._axis]) if self._axis < inside.ndim else None
            raise ValueError(_outside_message(self._program, self._site, rows, row, first_row))


def _outside_message(program: Any, site: str, rows: Mapping[str, np.ndarray], row: int | None, first_row: int) -> str:
    """:param row: None for values that are not of rows."""
    outside = f"outside the support ({peel_abstractly(program, site).support}) of its distribution"
    names = sorted(program.outcome_arrays(site))
    if row is None:
        return f"site {site!r}: a value lies {outside}."
    if not names:
        return f"site {site!r}: row {first_row + row} lies {outside}."
    held = " and ".join(f"{name!r} holds {rows[name][row]}" for name in names)
    return f"site {site!r}: row {first_row + row} of array {held}, which lies {outside}."


def check_start(program: Any) -> None:
    """:raises ValueError: naming the site, for data with NaN that the model does not handle."""
    arrays = [np.asarray(array) for array in program.example_row.values()]
    if not any(array.dtype.kind == "f" and not np.isfinite(array).all() for array in arrays):
        return
    inputs = program.inputs(program.example_rows)

    def at(theta):
        terms = program.log_likelihood(theta, inputs)
        return sum(jnp.sum(values) for values in terms.values()), terms

    state = program.initial_state()
    draws = jax.random.normal(jax.random.key(0), (NUM_STARTS, program.layout.size), program.dtype)
    points = state.mean + jnp.concatenate([0 * draws[:1], draws @ state.root.T])
    gradients, terms = at_once(lambda: jax.lax.map(jax.grad(at, has_aux=True), points))
    if np.isnan(gradients).any(axis=1).all():
        bad = {
            name: np.isnan(values.reshape(*values.shape[:2], -1)).any(axis=2).all(axis=0)
            for name, values in terms.items()
        }
        site = next((name for name, rows in bad.items() if rows.any()), next(iter(terms)))
        raise BadData(_not_finite_message(program, site, int(np.argmax(bad[site])) if bad[site].any() else None))


def _not_finite_message(program: Any, site: str, row: int | None) -> str:
    """:param row: where the log-likelihood is NaN; None if only its gradient is known to be."""
    bad: dict[str, np.ndarray] = {}
    for name, values in program.example_row.items():
        array = np.asarray(values)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad[name] = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
    name = next((name for name, rows in bad.items() if row is not None and row < len(rows) and rows[row]), None)
    if name is None:
        name = min(bad, key=lambda name: name not in program.outcome_arrays(site))
        row = int(np.argmax(bad[name]))
    array = np.asarray(program.example_row[name])
    kind = "NaN" if np.isnan(array[row]).any() else "an infinite value"
    finite = f"jnp.isfinite({name})" + {1: "", 2: ".all(axis=1)"}.get(
        array.ndim, f".all(axis={tuple(range(1, array.ndim))})"
    )
    return (
        f"data array {name!r} holds {kind} in row {row}, and the log-likelihood of site {site!r} or its gradient is "
        f"NaN there. Drop such rows (keep = {finite.replace('jnp', 'np')}; {name}[keep], and so the "
        f"others); or, in the model, replace what is missing and mask the rows: finite = {finite}; "
        f"{name} = jnp.where(jnp.isfinite({name}), {name}, 0.0); with numpyro.handlers.mask(mask=finite): "
        f"numpyro.sample({site!r}, ...)."
    )


def describe_bad_rows(
    program: Any, theta: Array, rows: Mapping[str, Any], numbers: Sequence[int] | np.ndarray | None = None
) -> str | None:
    """Which row's likelihood is not finite at theta (P,), if one is not.

    :param numbers: of the rows in the data; default: from 0 on.
    """
    terms = jax.device_get(jit_once(program.log_likelihood)(theta, program.inputs(rows)))
    for name, values in terms.items():
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if bad.any():
            row = int(np.argmax(bad))
            number = row if numbers is None else numbers[row]
            return f"site {name!r} gives row {number} a log-likelihood of {values[row]}"
    return None


def peel_abstractly(program: Any, site: str) -> Any:
    """A site's distribution, for what is static about it."""
    distributions: list = []

    def abstract(row):
        distributions.append(peel(program.site_record(site, row).fn)[0])
        return 0

    program.abstractly(abstract, program.example_row)
    return distributions[0]


def _in_support(program, name, row):
    return jnp.all(_elements_inside(program, name, row))


def _elements_inside(program, name, rows):
    record = program.site_record(name, rows)
    fn, mask = peel(record.fn)
    inside = fn.support(record.value)
    return inside | ~jnp.asarray(mask) if jnp.ndim(inside) >= jnp.ndim(mask) else inside


def _coupled_message(name: str, why: str) -> str:
    return (
        f"site {name!r}: the rows of the data are not conditionally independent given the latents, or the model does "
        f"not take its rows from the data ({why}). Pass every per-row array in the data (lagged values as columns of "
        "their own), and compute nothing across rows inside the model."
    )
