"""Running a NumPyro model on a few rows at a given theta, and reading what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.core import Tracer
from jax.scipy.special import betaln
from numpyro import distributions, handlers
from numpyro.distributions import Distribution
from numpyro.distributions.transforms import IdentityTransform, Transform, biject_to
from numpyro.primitives import Messenger

from ..data.arguments import absent_arguments, split_call
from ..data.rows import Arrays, Keywords, common_length
from .failures import needs_numbers
from .stable_densities import with_stable_density

REACH = 2.0  # in unconstrained space, of sites that cannot be drawn: as NumPyro starts NUTS


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("fn", "value", "unconstrained", "log_abs_det", "weight"),
    meta_fields=("name", "plates", "is_observed", "is_auxiliary"),
)
@dataclass(frozen=True)
class SiteRecord:
    """One sample site of a run, as a pytree of its numbers.

    :ivar log_abs_det: log Jacobian of the latent's transform, elementwise or per event; None if observed.
    :ivar weight: the user's scale, without the plates' subsampling factor.
    :ivar plates: names of the enclosing plates, outermost first.
    """

    name: str
    fn: Distribution
    value: Array
    unconstrained: Array | None
    log_abs_det: Array | None
    weight: Array | float
    plates: tuple[str, ...]
    is_observed: bool
    is_auxiliary: bool

    @property
    def is_weighted(self) -> bool:
        return not isinstance(self.weight, float) or self.weight != 1

    def weight_of(self, fn: Distribution) -> Array | float:
        """The weight of log densities by ``fn``, the site's distribution without some of its event axes."""
        axes = range(fn.event_dim - self.fn.event_dim, 0)
        return jnp.expand_dims(self.weight, tuple(axes)) if axes and jnp.ndim(self.weight) else self.weight


class SiteInfo(NamedTuple):
    """The static description of a sample site: shapes, plates and kinds, without its values.

    :ivar unconstrained_shape: of a latent; None if observed.
    :ivar is_normal: whether it is a normal distribution with independent elements.
    :ivar is_real: whether it is latent, and its elements are any real numbers.
    """

    value_shape: tuple[int, ...]
    unconstrained_shape: tuple[int, ...] | None
    plates: tuple[str, ...]
    is_observed: bool
    is_auxiliary: bool
    is_discrete: bool
    is_improper: bool
    is_normal: bool
    is_real: bool


class RowRunner(Messenger):
    """Gives row plates the number of rows at hand, and latent sites their values from unconstrained space.

    :param local: latent sites with one normal variable a row: their values are loc + scale times what
        ``unconstrained`` gives, zero if nothing.
    :param params: values of ``numpyro.param`` sites.
    :param rng_key: latent sites without values are drawn with it, whatever seeds or values the model itself has for
        them; None: they are as the model has them.
    :param states: values of discrete latent sites; those outside a distribution's support have density zero.
    :ivar plate_sizes: of each plate of the model, its size and how many of its indices are taken.
    :ivar scanned: names of the sites in NumPyro's scan and cond.
    """

    def __init__(
        self,
        fn: Callable,
        row_plates: frozenset[str] = frozenset(),
        num_rows: int | None = None,
        unconstrained: Mapping[str, Array] | None = None,
        local: frozenset[str] = frozenset(),
        params: Mapping[str, Array] | None = None,
        rng_key: Array | None = None,
        states: Mapping[str, Array] | None = None,
    ):
        super().__init__(fn)
        self._rng_key = rng_key
        self.row_plates, self.num_rows, self.unconstrained = row_plates, num_rows, unconstrained or {}
        self.local, self.params, self.states = local, params or {}, states or {}
        self.plate_ratio: dict[str, float] = {}
        self.plate_sizes: dict[str, tuple[int, int]] = {}
        self.log_abs_det: dict[str, Array] = {}
        self.scanned: set[str] = set()

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "control_flow":
            msg["kwargs"]["substitute_stack"].append(("substitute", self._value_in_control_flow))
        elif msg["type"] == "plate":
            size, subsample_size = msg["args"]
            self.plate_sizes[msg["name"]] = size, subsample_size or size
            if msg["name"] in self.row_plates:
                msg["args"] = (size, self.num_rows)
                msg["value"] = jnp.arange(self.num_rows)
                subsample_size = self.num_rows
            self.plate_ratio[msg["name"]] = size / (subsample_size or size)
        elif msg["type"] == "subsample" and self.row_plates:
            msg["kwargs"]["event_dim"] = None  # the rows at hand are the subsample
        elif msg["type"] == "param" and msg["name"] in self.params:
            msg["value"] = self.params[msg["name"]]
        elif msg["type"] == "sample" and not msg["is_observed"]:
            self._give_value(msg)

    def _give_value(self, msg: dict) -> None:
        """Of a latent site: the one that is given, or one where the site itself has none."""
        name, fn, sample_shape = msg["name"], msg["fn"], msg["kwargs"]["sample_shape"]
        if self._rng_key is not None:
            self._rng_key, msg["kwargs"]["rng_key"] = jax.random.split(self._rng_key)
            msg["value"] = None if name not in self.scanned else msg["value"]
        if name in self.local:
            normal, shape = base_distribution(fn)[0], fn.shape(sample_shape)
            msg["value"] = normal.loc + normal.scale * jnp.reshape(
                self.unconstrained.get(name, jnp.zeros(shape)), shape
            )
        elif name in self.states:
            value = jnp.broadcast_to(self.states[name], fn.shape(sample_shape))
            support = _elementwise_support(fn)
            inside = support(value)
            low = getattr(support, "lower_bound", 0)  # a value at which the density has derivatives
            msg["value"] = jnp.where(inside, value, jnp.asarray(low, value.dtype))
            self.log_abs_det[name] = jnp.where(inside, 0.0, -jnp.inf)
        elif name in self.unconstrained:
            transform, z = site_transform(fn), self.unconstrained[name]
            msg["value"] = transform(z)
            self.log_abs_det[name] = transform.log_abs_det_jacobian(z, msg["value"])
        elif msg["value"] is None and _is_improper(fn):  # such a prior cannot be drawn from
            transform = site_transform(fn)
            msg["value"] = transform(jnp.zeros(transform.inverse_shape(fn.shape(sample_shape))))
        elif msg["value"] is None and not can_be_drawn(fn, sample_shape):
            transform, key = site_transform(fn), numpyro.prng_key()
            assert key is not None
            shape = transform.inverse_shape(fn.shape(sample_shape))
            msg["value"] = transform(jax.random.uniform(key, shape, minval=-REACH, maxval=REACH))

    def _value_in_control_flow(self, site: dict) -> Array | None:
        """Of a latent site in a step of NumPyro's scan, or in a branch of its cond; outside, it comes once more, with
        its values of all steps."""
        if site["type"] != "sample":
            return None
        name, step = site["name"], site["infer"].get("_scan_current_index")
        self.scanned.add(name)
        if name in self.states:
            value, shape = jnp.asarray(self.states[name]), site["fn"].shape()
            return jnp.broadcast_to(value[step] if value.ndim > len(shape) else value, shape)
        if name not in self.unconstrained:
            return None
        z = self.unconstrained[name]
        return site_transform(site["fn"])(z if step is None else z[step])


def can_be_drawn(fn: dist.Distribution, shape: tuple[int, ...]) -> bool:
    """Whether the distribution has a sampler: truncated ones of no known quantile function have none."""
    try:
        jax.eval_shape(lambda key: fn(rng_key=key, sample_shape=shape), jax.random.key(0))
    except (ImportError, NotImplementedError):
        return False
    return True


def run_model(
    model: Callable,
    rows: Arrays,
    model_kwargs: Keywords,
    *,
    rng_key: Array | None = None,
    **given: Any,
) -> tuple[dict, RowRunner]:
    """The trace of the model on ``rows``. ``given``: see :class:`RowRunner`; latents without values are drawn."""
    runner = RowRunner(model, num_rows=common_length(rows), rng_key=rng_key, **given)
    seeded = handlers.seed(runner, jax.random.key(0) if rng_key is None else rng_key)
    args, kwargs = split_call(model, rows, model_kwargs)
    try:
        with handlers.block():
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    except Exception as error:
        for note in _advice(error, model, rows, model_kwargs):
            error.add_note(note)
        raise
    return trace, runner


def _advice(error: Exception, model: Callable, rows: Arrays, model_kwargs: Keywords) -> Iterator[str]:
    """Advice to the author of a model that failed."""
    given = ", ".join(f"{name} {jnp.result_type(array)}{list(jnp.shape(array))}" for name, array in rows.items())
    yield f"The model failed on data of {given}."
    absent = absent_arguments(model, [*rows, *model_kwargs])
    if absent:
        yield f"These of its arguments were not given and are None: {', '.join(map(repr, absent))}."
    if needs_numbers(error):
        yield (
            "Data and latent values have no numbers yet when a model is read, as under jax.jit. What it computes of "
            "data in Python or NumPy, such as the number of groups, belongs into keyword arguments of run(): "
            "num_groups=int(group.max()) + 1. Choose by jnp.where, not by if."
        )


def site_transform(fn: Distribution) -> Any:
    """The map from unconstrained space to the support, elementwise where the event is only a reinterpretation."""
    return biject_to(_elementwise_support(fn))


def _elementwise_support(fn: Distribution) -> Any:
    support: Any = fn.support
    while hasattr(support, "reinterpreted_batch_ndims"):
        support = support.base_constraint
    return support


def scale_of_plates(site: Mapping[str, Any], ratios: Mapping[str, float]) -> float:
    """By how much NumPyro scales a site up for the plates around it that subsample. ``ratios``: of each plate's size to
    the number of its indices that are taken."""
    return math.prod(ratios.get(plate.name, 1.0) for plate in site["cond_indep_stack"])


def sample_sites(trace: dict, runner: RowRunner) -> dict[str, SiteRecord]:
    """The sample sites of a run, in order."""
    records = {}
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        plates = _plates_around(site)
        weight = (1.0 if site["scale"] is None else site["scale"]) / scale_of_plates(site, runner.plate_ratio)
        records[name] = SiteRecord(
            name,
            with_stable_density(site["fn"]),
            site["value"],
            runner.unconstrained.get(name),
            runner.log_abs_det.get(name),
            weight,
            plates,
            site["is_observed"],
            bool(site["infer"].get("is_auxiliary", False)),
        )
    return records


def site_info(record: SiteRecord) -> SiteInfo:
    latent = not (record.is_observed or record.fn.is_discrete)
    shape = jnp.shape(site_transform(record.fn).inv(record.value)) if latent else None
    base = base_distribution(record.fn)[0]
    is_normal = isinstance(base, dist.Normal)
    is_real = latent and not base.event_shape and isinstance(site_transform(record.fn), IdentityTransform)
    flags = record.is_observed, record.is_auxiliary, record.fn.is_discrete, _is_improper(record.fn), is_normal, is_real
    own = () if record.is_observed else record.fn.shape()  # of a value that is given, also where it is broadcast
    return SiteInfo(np.broadcast_shapes(jnp.shape(record.value), own), shape, record.plates, *flags)


def log_prob_shape(record: SiteRecord) -> tuple[int, ...]:
    """The shape of the site's log density, times its weight."""
    of_value = jnp.shape(record.value)[: jnp.ndim(record.value) - record.fn.event_dim]
    return np.broadcast_shapes(of_value, record.fn.batch_shape, jnp.shape(record.weight))


def _is_improper(fn: Distribution) -> bool:
    return any(isinstance(part, dist.ImproperUniform) for part in nested(fn))


def nested(fn: Any) -> Iterator[Distribution]:
    """A distribution, and those inside of it."""
    while isinstance(fn, Distribution):
        yield fn
        fn = getattr(fn, "base_dist", None)


def numbers_of(fn: Any) -> list[Array]:
    """The leaves of a distribution, or of its parts. Transforms that are no pytrees, as users write them, have none."""
    return [x for x in jax.tree.leaves(fn, is_leaf=_is_opaque) if not _is_opaque(x)]


def _is_opaque(part: Any) -> bool:
    own, inherited = (getattr(kind, "tree_flatten", None) for kind in (type(part), Transform))  # NumPyro 0.21 has none
    return isinstance(part, Transform) and own is inherited


def is_numpyros(fn: Distribution) -> bool:
    """Whether a distribution, and those that it is made of, are NumPyro's own, and pytrees in every part: all that a
    run of the model has computed is among their leaves."""
    parts = jax.tree.leaves(vars(fn), is_leaf=lambda x: isinstance(x, dist.Distribution) or _is_opaque(x))
    inner = [part for part in parts if isinstance(part, dist.Distribution)]
    if any(map(_is_opaque, parts)):
        return False
    static = [getattr(fn, name, None) for name in type(fn).gather_pytree_aux_fields()]
    if any(isinstance(leaf, Tracer) or callable(leaf) for leaf in jax.tree.leaves(static)):
        return False  # as the counts of a DirichletMultinomial, and what the function of an EulerMaruyama may hold
    return type(fn).__module__.startswith(("numpyro.", "numpyro_rvga.")) and all(map(is_numpyros, inner))


def deterministic_sites(trace: dict) -> dict[str, Array]:
    return {name: site["value"] for name, site in trace.items() if site["type"] == "deterministic"}


def plates_of(trace: dict) -> dict[str, tuple[str, ...]]:
    """Enclosing plates of every sample and deterministic site, outermost first."""
    return {name: _plates_around(site) for name, site in trace.items() if site["type"] in ("sample", "deterministic")}


def _plates_around(site: dict) -> tuple[str, ...]:
    return tuple(f.name for f in sorted(site["cond_indep_stack"], key=lambda f: f.dim))


def base_distribution(fn: Distribution) -> tuple[Any, Array | bool]:
    """A distribution without expansion, masks and event reinterpretation: its elements are the independent terms.

    :return: the base distribution and the product of the masks.
    """
    mask: Array | bool = True
    distributions = numpyro.distributions
    while True:
        if isinstance(fn, distributions.MaskedDistribution) and not fn.event_shape:
            mask, fn = mask & jnp.asarray(fn._mask), fn.base_dist
        elif isinstance(fn, (distributions.Independent, distributions.ExpandedDistribution)):
            fn = fn.base_dist
        else:
            return fn, mask


def elements(record: SiteRecord) -> Array:
    """Log density terms of a site in unconstrained space, one per independent element, flattened."""
    fn = record.fn
    if record.unconstrained is not None and not record.is_weighted:
        terms = separate_terms(fn, record.value, record.unconstrained)
        if terms is not None:
            return jnp.ravel(terms)
    if isinstance(fn, numpyro.distributions.Independent) and (
        record.log_abs_det is None or jnp.shape(record.log_abs_det) == jnp.shape(record.value)
    ):
        fn = fn.base_dist  # the terms one by one, not their sum over the event
    with numpyro.validation_enabled(False):  # values are checked, and named, elsewhere
        terms = fn.log_prob(record.value) * record.weight_of(fn)
    if record.log_abs_det is not None:
        terms += record.log_abs_det.sum(axis=tuple(range(jnp.ndim(terms) - jnp.ndim(record.log_abs_det), 0)))
    return jnp.ravel(terms)


def separate_terms(fn: distributions.Distribution, value: Array, unconstrained: Array) -> Array | None:
    """The log density of a latent in unconstrained space, one term for each factor, (..., K); None if it has no such
    form.

    :param fn: the distribution of ``value``, which ``unconstrained`` was mapped to.
    """
    while isinstance(fn, distributions.ExpandedDistribution):
        fn = fn.base_dist
    if isinstance(fn, (distributions.LKJ, distributions.LKJCholesky)):
        return _partial_correlations(fn, unconstrained)
    if isinstance(fn, distributions.GaussianRandomWalk):
        steps = jnp.diff(value, axis=-1, prepend=0.0)
        return distributions.Normal(0.0, jnp.expand_dims(fn.scale, -1)).log_prob(steps)
    if isinstance(fn, distributions.TransformedDistribution) and _is_mapped_as_its_support_is(fn):
        base, mask = base_distribution(fn.base_dist)
        return base.log_prob(unconstrained) if mask is True else None
    return None


def _is_mapped_as_its_support_is(fn: distributions.TransformedDistribution) -> bool:
    """Whether a distribution is another one, mapped as unconstrained space is mapped to its support, as those of
    ordered cutpoints are: there it is the other one, and the transform's Jacobians cancel."""
    if type(fn).log_prob is not distributions.TransformedDistribution.log_prob or len(fn.transforms) != 1:
        return False
    transform = site_transform(fn)
    return type(transform) is type(fn.transforms[0]) and bool(transform == fn.transforms[0])


def _partial_correlations(fn: Any, x: Array) -> Array:
    """Canonical partial correlations tanh(x) are independent: (1 + tanh(x_ij)) / 2 ~ Beta(b_j, b_j), with b_j =
    eta + (D - 2 - j) / 2, j from 0 (Lewandowski, Kurowicka and Joe, 2009)."""
    column = np.tril_indices(fn.dimension, -1)[1]
    b = jnp.expand_dims(fn.concentration, -1) + 0.5 * (fn.dimension - 2 - column)
    return b * (jax.nn.log_sigmoid(2 * x) + jax.nn.log_sigmoid(-2 * x)) + jnp.log(2.0) - betaln(b, b)
