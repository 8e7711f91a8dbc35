"""The posterior of a model with very many groups: shared sites here, groups given these in files or in a stream."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import Predictive

from ...core.compilation import jit
from ...core.groups.steps import Groups, conditionals, covariances
from ...model import Program
from ...model.data.arguments import split_call
from ...model.data.rows import Data, num_rows
from ...model.members import Members
from ...options import Info, check_count, check_shape, is_count
from ...streams.arrow import pyarrow_at_hand
from ..forward import Unconditioned
from .parts import LocalPlate, numbered, read_rows

MEAN, DEVIATION, SLOPE, ROOT = "{}.mean", "{}.sd", "given_shared.slope", "given_shared.root"


class GroupSource(Protocol):
    """Where the groups of a posterior are stored."""

    def contains(self, wanted: np.ndarray) -> np.ndarray:
        """Which labels (g,) it has groups of, (g,).

        :raises ValueError: for labels of another kind than its own.
        """
        ...

    def read(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means at the mean of the shared sites (g, d), slopes in these (g, d, k), and roots of the covariances given
        these (g, d, d), of labels (g,).

        :raises ValueError: naming a label that is not there, and for labels of another kind than its own.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GroupPosterior:
    """A Gaussian approximation of the posterior of a model with groups, in unconstrained space: of the shared sites as
    arrays, of each group given these where its numbers are.

    Made by :func:`numpyro_rvga.distributed.run_groups`, with groups in Parquet files, and by
    :meth:`~numpyro_rvga.results.groups.stream.GroupStream.posterior`. The files have one row for each group, in
    the order of labels within a file: its label, the mean and the standard deviation of each of its entries in
    unconstrained space (``a.mean``, ``a.sd``; of vectors ``a[0].mean``), and what joint draws take.

    :param program: the model, bound to two groups. :param members: of this program.
    :param mean: of the shared sites, flattened in the order of :attr:`site_names`, ``(k,)``.
    :param scale: a square root of their covariance, ``(k, k)``.
    :param elbo: the bound on log p(data); None where it is not known. :param info: diagnostics of the run.
    :param groups: where the groups are. :param plate: theirs.
    :param num_rows: of all data. :param num_groups: likewise.
    """

    program: Program
    members: Members
    mean: Array
    scale: Array
    elbo: float | None
    info: Info
    groups: GroupSource
    plate: LocalPlate
    num_rows: int
    num_groups: int

    def __repr__(self) -> str:
        sites = ", ".join(self.site_names)
        return (
            f"GroupPosterior(sites=({sites}), num_groups={self.num_groups}, num_rows={self.num_rows}, "
            f"elbo={'None' if self.elbo is None else format(self.elbo, '.6g')})"
        )

    def __getstate__(self) -> dict[str, object]:
        """For other processes.

        :raises PicklingError: if the groups are in a stream, or the model cannot be pickled.
        """
        if not isinstance(self.groups, GroupFiles):
            raise pickle.PicklingError(
                "this posterior reads its groups from a stream, which cannot be pickled: write them to files with "
                "stream.posterior(folder=...), and pickle that posterior."
            )
        return dict(self.__dict__)

    @property
    def site_names(self) -> tuple[str, ...]:
        """The shared latent sites, in the order in which they are flattened."""
        return self.members.of_all.site_names

    @property
    def group_site_names(self) -> tuple[str, ...]:
        """The latent sites of a group."""
        return self.members.of_members.site_names

    @property
    def covariance(self) -> Array:
        """Of the shared sites in unconstrained space, ``(k, k)``."""
        return self.scale @ self.scale.T

    def sample_posterior(
        self,
        rng_key: Array,
        sample_shape: tuple[int, ...] = (),
        groups: Sequence[Any] | np.ndarray | None = None,
        *,
        new_groups: int = 0,
    ) -> dict[str, Array]:
        """Draw from q.

        :param rng_key: random key. :param sample_shape: leading shape of the draws.
        :param groups: labels, as the data have them. Of files, only their rows are read.
        :param new_groups: how many groups of which there are no rows to draw too, from their prior given the shared
            sites.
        :return: the constrained shared sites and the deterministic sites that are functions of these, each of shape
            ``(*sample_shape, *site_shape)``; with ``groups`` or ``new_groups``, also the sites of these groups, drawn
            together with the shared ones, each of shape ``(*sample_shape, len(groups) + new_groups, *site_shape)``.
        :raises ValueError: naming a label that is not there, and of a stream that has taken in rows since.
        :raises ImportError: for groups, without pyarrow.
        """
        check_shape(sample_shape)
        shared_key, key, new_key = jax.random.split(rng_key, 3)
        count, size = int(np.prod(sample_shape, dtype=int)), len(self.members.columns)
        standard = jax.random.normal(shared_key, (count, self.mean.size), self.mean.dtype)
        shift = standard @ self.scale.T
        if groups is None:
            drawn = self._constrained(self.mean + shift, jnp.zeros((count, 1, size), self.mean.dtype))[0]
        else:
            wanted = np.asarray(groups)
            if wanted.ndim != 1 or not wanted.size:
                raise ValueError(f"groups must be a list of labels, or None for none, not of shape {wanted.shape}.")
            mean, slope, root = (jnp.asarray(x, self.mean.dtype) for x in self.groups.read(wanted))
            noise = jax.random.normal(key, (count, len(mean), size), self.mean.dtype)
            own = mean + jnp.einsum("gdk,nk->ngd", slope, shift) + jnp.einsum("gde,nge->ngd", root, noise)
            of_all, of_groups = self._constrained(self.mean + shift, own)
            drawn = of_all | of_groups
        if not is_count(new_groups, 0):
            raise ValueError(f"new_groups must be an integer of at least 0, not {new_groups!r}.")
        if new_groups:
            new = self._new(new_key, {name: drawn[name] for name in self.site_names}, new_groups)
            drawn |= {n: jnp.concatenate([drawn[n], x], axis=1) if n in drawn else x for n, x in new.items()}
        return {name: jnp.reshape(value, (*sample_shape, *value.shape[1:])) for name, value in drawn.items()}

    def predictive(self, rng_key: Array, data: Data | Iterable, num_samples: int = 1000) -> dict[str, Array]:
        """Predict the observed sites of new rows, by runs of the model at draws from q.

        :param rng_key: random key.
        :param data: rows, with or without the outcome, with labels of their groups. Groups of which there were no rows
            are drawn from their prior given the shared sites.
        :param num_samples: the number of draws.
        :return: the observed sites and the deterministic sites inside the row plate, of shape
            ``(num_samples, *site_shape)``.
        :raises ValueError: for unusable data, and as :meth:`sample_posterior` does.
        """
        check_count("num_samples", num_samples)
        program, plate = self.program, self.plate
        rows = read_rows(program.model, data, plate.index, {**program.model_kwargs, plate.size: 1})
        all_labels, rows = numbered(rows, plate.index)
        labels, number = np.asarray(all_labels), rows[plate.index]
        rows = program.rows(rows | {plate.index: np.zeros_like(number)}, predicted=True)
        is_known = self.groups.contains(labels)
        order = np.argsort(~is_known, kind="stable")  # those that are known come first
        draw_key, model_key = jax.random.split(rng_key)
        draws = self.sample_posterior(
            draw_key,
            (num_samples,),
            groups=labels[is_known] if is_known.any() else None,
            new_groups=int((~is_known).sum()),
        )
        sites = {name: draws[name] for name in self.site_names}
        for name in self.group_site_names:
            sites[name] = jnp.moveaxis(draws[name][:, np.argsort(order)], 1, 1 + self.members.axes[name])
        rows = {name: jnp.asarray(array) for name, array in (rows | {plate.index: number}).items()}
        arguments, keywords = split_call(program.model, rows, {**program.model_kwargs, plate.size: len(labels)})
        names = sorted({*program.observed_sites, *program.of_rows})
        model = Unconditioned(program, len(number))
        return Predictive(model, sites, return_sites=names)(model_key, *arguments, **keywords)

    def _new(self, rng_key: Array, shared: dict[str, Array], count: int) -> dict[str, Array]:
        """Sites of so many groups without rows, at constrained shared sites: from runs of the model.

        :param shared: by name, (n, *site_shape).
        """
        rows, axes = self.program.example_rows, self._group_axes
        runs = -(-count // self.members.number)
        arguments, keywords = self.program.call_arguments(rows)

        def one(key: Array, latents: dict[str, Array]) -> dict[str, Array]:
            model = handlers.seed(handlers.substitute(self.program.runner(num_rows(rows)), data=latents), key)
            with handlers.block():
                trace = handlers.trace(model).get_trace(*arguments, **keywords)
            return {name: jnp.moveaxis(trace[name]["value"], axis, 0) for name, axis in axes.items()}

        keys = jax.random.split(rng_key, (len(next(iter(shared.values()))), runs))
        drawn = jit(jax.vmap(jax.vmap(one, (0, None))))(keys, shared)
        return {name: x.reshape(len(x), -1, *x.shape[3:])[:, :count] for name, x in drawn.items()}

    def _constrained(self, shared: Array, own: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Sites at shared (n, k) and groups' (n, g, d) entries: the shared ones and those of groups."""
        names = self._shared_names  # found here, with values, not while JAX traces
        everything = jit(jax.vmap(jax.vmap(self._sites_of_one, (None, 0))))(shared, own)
        of_all = {name: everything[name][:, 0] for name in names}
        return of_all, {name: everything[name] for name in self._group_axes}

    def _sites_of_one(self, shared: Array, own: Array) -> dict[str, Array]:
        """At (k,) and (d,)."""
        theta = self.members.theta(shared, jnp.broadcast_to(own, (self.members.number, *own.shape)))
        axes, values = self._group_axes, self.program.constrain(theta)
        return {name: jnp.take(value, 0, axis=axes[name]) if name in axes else value for name, value in values.items()}

    @functools.cached_property
    def _group_axes(self) -> dict[str, int]:
        """The axis of each site inside the plate along which its members lie."""
        plate = self.plate.name
        sites = {*self.group_site_names, *self.program.deterministic.of_latents}
        return {n: self.program.plates[n].index(plate) for n in sites if plate in self.program.plates.get(n, ())}

    @functools.cached_property
    def _shared_names(self) -> frozenset[str]:
        """Shared sites, and deterministic ones that no group has a say in."""
        shape = (self.members.number, len(self.members.columns))
        places = [self.members.theta(self.mean, jnp.full(shape, x, self.mean.dtype)) for x in (0.3, -0.7)]
        first, second = map(self.program.constrain, places)
        same = {name for name in first if name not in self._group_axes and np.array_equal(first[name], second[name])}
        return frozenset(same)


class GroupFiles(NamedTuple):
    """Groups in Parquet files.

    :ivar folder: of the files. :ivar index: the column of labels. :ivar members: of a program of the model.
    """

    folder: str
    index: str
    members: Members

    def contains(self, wanted: np.ndarray) -> np.ndarray:
        """See :class:`GroupSource`."""
        column = pyarrow_at_hand().parquet.read_table(self.folder, columns=[self.index])[self.index]
        self._check(wanted, column.type)
        return np.isin(wanted, column.to_numpy())

    def read(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See :class:`GroupSource`."""
        parquet = pyarrow_at_hand().parquet
        self._check(wanted, parquet.ParquetDataset(self.folder).schema.field(self.index).type)
        table = parquet.read_table(self.folder, filters=[(self.index, "in", np.unique(wanted).tolist())])
        labels = table[self.index].to_numpy(zero_copy_only=False)
        order = np.argsort(labels)
        missing = wanted[~np.isin(wanted, labels)]
        if missing.size:
            raise ValueError(f"{self.folder} has no group {missing[0]}.")
        at, size = order[np.searchsorted(labels[order], wanted)], len(self.members.columns)
        means = [table[MEAN.format(name)].to_numpy() for name in self.members.of_members.entry_names]
        slope, root = (np.stack(table[name].to_numpy(zero_copy_only=False)) for name in (SLOPE, ROOT))
        return (
            np.stack(means, axis=1)[at],
            slope.reshape(len(table), size, -1)[at],
            root.reshape(len(table), size, size)[at],
        )

    def _check(self, labels: np.ndarray, kind: Any) -> None:
        """:raises ValueError: for labels of another kind than the column's, which is a type of Arrow's."""
        import pyarrow as pa

        check_kind(labels, pa.types.is_string(kind) or pa.types.is_large_string(kind), f"{kind} in {self.folder}")


def check_kind(labels: np.ndarray, are_text: bool, stored: str) -> None:
    """:raises ValueError: for labels that are text where those of the groups are not, or the other way round.

    :param stored: which kind those of the groups are, and where they are.
    """
    if (labels.dtype.kind == "U") != are_text:
        raise ValueError(f"labels of groups are {stored}, and {labels.dtype} here: convert them.")


def write_groups(
    folder: str, number: int, index: str, labels: np.ndarray, names: Sequence[str], groups: Groups, root: np.ndarray
) -> None:
    """A part's groups as a file that is there as a whole or not at all. ``root``: of the covariance of shared sites."""
    import pyarrow as pa

    given = conditionals(groups)
    deviation = np.sqrt(np.diagonal(covariances(groups, root)[0], axis1=1, axis2=2))
    columns: dict[str, Any] = {index: pa.array(labels)}
    for i, name in enumerate(names):
        columns |= {MEAN.format(name): groups.mean[:, i], DEVIATION.format(name): deviation[:, i]}
    for name, blocks in ((SLOPE, given.slope), (ROOT, given.root)):
        flat = blocks.reshape(len(labels), -1)
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
    table = pa.table(columns).replace_schema_metadata({"numpyro_rvga": json.dumps({"entries": list(names)})})
    path = Path(folder) / f"part-{number:05d}.parquet"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    pyarrow_at_hand().parquet.write_table(table, temporary)
    os.replace(temporary, path)


def checked_folder(folder: str | os.PathLike) -> str:
    """A folder for groups, made if it is not there.

    :raises ValueError: if it holds groups already.
    :raises ImportError: without pyarrow.
    """
    pyarrow_at_hand()
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.glob("*.parquet")):
        raise ValueError(f"{folder} holds Parquet files already: groups are written to a folder of their own.")
    return str(path)
