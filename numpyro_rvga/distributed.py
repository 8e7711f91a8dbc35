"""Runs on a Dask cluster: parts of the data on its workers, merged. ``pip install 'numpyro_rvga[distributed]'``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .bong import BONG
from .clusters import RETRIES, GroupCluster, RunCluster, current_client
from .engines.expectation_errors import has_finite_bound, warn_of
from .progress import progress
from .results.groups.parts import GroupModel, LocalPlate
from .results.groups.posterior import GroupFiles, GroupPosterior, checked_folder
from .results.groups.rounds import in_group_rounds
from .results.merging.merge import check_disjoint, merged
from .results.merging.rounds import (
    TOLERANCE,
    checked_rounds,
    evaluations_of,
    in_rounds,
    rounds_info,
    warn_of_one_exchange,
)
from .results.posterior import Posterior
from .rvga import RVGA
from .streams.opening import HEAD, PassOptions, open_source
from .user_warnings import warn

if TYPE_CHECKING:
    from distributed import Client


def run(
    method: RVGA | BONG,
    parts: Sequence[Any],
    *,
    rounds: int | str = "auto",
    client: Client | None = None,
    retries: int = RETRIES,
    rng_key: jax.Array | None = None,
    on_bad_row: str = "raise",
    progress_bar: bool = True,
    **model_kwargs: Any,
) -> Posterior:
    """Fit each part of the data on a worker of a Dask cluster, and merge what they have learned.

    Every part starts from the model's prior, which the result counts once; see :meth:`Posterior.merge`. Then all rows
    are evaluated where the result is, which moves, until it is that of one run on all rows. A part's share of a round
    is one task: if its worker dies, Dask runs it again on another, and it is counted once.

    **Example**

    .. code-block:: python

        from distributed import Client
        from numpyro_rvga import ParquetRows, RVGA, distributed

        rows = ParquetRows("flights/", {"X": ["distance", "hour"], "y": "delay"})
        posterior = distributed.run(RVGA(model), rows.split(32), client=Client("scheduler:8786"))

    :param method: what to run on each part; without dynamics.
    :param parts: data as the method's ``run`` takes them. Those of :meth:`ParquetRows.split` are read by the workers.
    :param rounds: how many times all rows are evaluated after the runs. ``"auto"``: until all moves to come would
        together change no mean by more than 0.01 standard deviations, and no standard deviation by more than 1%; at
        most 20. With 1, for rows that are linear and Gaussian, for BONG, and for schemes that do not seek the best
        Gaussian, the runs are merged, and no row is read again.
    :param client: of the cluster. Default: Dask's current client.
    :param retries: how often a part is tried again whose worker dies, or whose run fails for want of memory or of a
        file. What the data or the model are to blame for is not tried again.
    :param rng_key: as for ``run``; the same for all parts.
    :param on_bad_row: as for ``run``. The numbers of skipped rows count from the beginning of their part.
    :param progress_bar: show tasks done.
    :param model_kwargs: go to every call of the model unchanged.
    :return: the posterior. ``info["parts"]`` has what each part's first run has to tell. After several rounds there is
        the bound, and ``info`` holds ``merge_error``, ``merge_errors`` and ``rounds`` as :meth:`Posterior.merge` says.
    :raises ValueError: naming the part, for parts that cannot be merged, and the row, for those that cannot be used.
    :raises NotImplementedError: naming the part, for models that cannot be run.
    :raises RuntimeError: naming the part, if its run fails again and again.
    :raises ImportError: without Dask.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("there are no parts to run.")
    if method.dynamics is not None:
        raise ValueError("parts of a stream with dynamics cannot be merged: their parameters are not the same.")
    limit = checked_rounds(rounds)
    _check_mesh(method)
    takes_rounds = isinstance(method, RVGA) and method.takes_rounds
    if not takes_rounds and limit not in (None, 1):
        raise ValueError("several rounds are for RVGA with the implicit scheme and full Gaussians: leave rounds out.")
    client = current_client() if client is None else client
    options = {"rng_key": rng_key, "on_bad_row": on_bad_row, **model_kwargs}
    try:
        _, head, _ = open_source(parts[0], method.model, model_kwargs, PassOptions(on_bad_row="skip"))
    except ValueError as error:
        raise ValueError(f"part 0: {error}") from error
    start: Any = method.init({name: array[:HEAD] for name, array in head.items()}, rng_key=rng_key, **model_kwargs)
    with progress(progress_bar, None, "distributed", "part") as bar:
        cluster = RunCluster(client, retries, bar, method, parts, options)
        states, infos, row_sets = zip(*cluster.solve())
        check_disjoint(row_sets)
        result = None
        if isinstance(method, RVGA) and takes_rounds and limit != 1:
            engine = method.last_engine
            if limit is not None or not engine.program.is_conjugate:  # else the runs' posteriors merge exactly
                evaluations = evaluations_of(engine, start, cluster.sums, cluster.sample_of)
                result = in_rounds(start, states, evaluations, limit)
    state: Any = merged(start, states) if result is None else result.state
    posterior = method.posterior(state)
    bound, info = posterior.elbo, {**posterior.info, "merged": len(parts), "parts": list(infos)}
    if result is None:
        remedy = "take rounds='auto'" if takes_rounds else "use fewer and larger parts, or RVGA"
        warn_of_one_exchange(posterior.program, [int(state.num_rows) for state in states], remedy)
    else:
        bound, info = result.evaluation.bound, info | rounds_info(result, limit)
    row_sets = tuple(run for part in row_sets for run in part)
    return dataclasses.replace(posterior, elbo=bound, info=info, row_sets=row_sets)


def run_groups(
    method: RVGA,
    parts: Sequence[Any],
    *,
    plate: str,
    index: str,
    size: str,
    folder: str | os.PathLike,
    rounds: int | str = "auto",
    client: Client | None = None,
    retries: int = RETRIES,
    rng_key: jax.Array | None = None,
    progress_bar: bool = True,
    **model_kwargs: Any,
) -> GroupPosterior:
    """The best Gaussian of a model with very many groups, such as users, each of which has its rows in one part.

    The latent sites of a group never leave the worker that has its part. In each round a worker finds the best Gaussian
    of its groups given the shared sites, and tells the summary of the shared sites alone: the numbers that travel, and
    what is held here, do not depend on how many groups there are. The result is that of :class:`FixedPointVI` on all
    rows. Each worker writes its groups to a file.

    **Example**

    .. code-block:: python

        def model(user, X, num_users, y=None):
            mean = numpyro.sample("mean", dist.Normal(0, 1))
            scale = numpyro.sample("scale", dist.HalfNormal(1))
            with numpyro.plate("users", num_users):
                level = numpyro.sample("level", dist.Normal(mean, scale))
            slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
            with numpyro.plate("rows", len(X)):
                numpyro.sample("y", dist.Bernoulli(logits=level[user] + X @ slopes), obs=y)


        posterior = distributed.run_groups(
            RVGA(model), parts, plate="users", index="user", size="num_users", folder="users/", client=client
        )
        posterior.sample_posterior(jax.random.key(0), (1000,))["slopes"]
        posterior.sample_posterior(jax.random.key(0), (1000,), groups=[1017, 23])["level"]  # shape (1000, 2)

    :param method: with the implicit scheme, full Gaussians and no dynamics. Its options for expectations are used.
    :param parts: data as the method's ``run`` takes them; ``ParquetRows`` are read by the workers. A worker keeps the
        rows of its parts in memory. All rows of a group must be in one part, and no row may depend on two groups.
    :param plate: the name of the groups' plate.
    :param index: the model's argument that has the group of each row. In the data its values are labels of any kind,
        such as users' numbers; the model is given the number of the group within its part, from zero.
    :param size: the model's argument that is the number of groups, the size of the plate. Each part has its own.
    :param folder: where the groups go, on a file system that the workers and this process share. It must not hold
        Parquet files yet. See :class:`~numpyro_rvga.results.groups.GroupPosterior` for what the files hold.
    :param rounds: how many times q of the shared sites is moved. ``"auto"``: until no mean is off by more than 0.01
        standard deviations, and no standard deviation by more than 1%, as the last moves tell; at most 40.
    :param client: of the cluster. Default: Dask's current client.
    :param retries: as for :func:`run`.
    :param rng_key: as for ``run``; the same for all parts.
    :param progress_bar: show tasks done.
    :param model_kwargs: go to every call of the model unchanged.
    :return: the posterior. ``info`` holds ``rounds``, ``error`` and ``errors`` (how far the shared sites may have been
        off after each round, in standard deviations), ``converged``, ``elbo_error`` as in :meth:`RVGA.run`, and
        ``plate``.
    :raises ValueError: naming the part, for unusable data, groups that are in several parts, and models in which a term
        depends on several groups.
    :raises NotImplementedError: naming the part, for models that cannot be run.
    :raises RuntimeError: naming the part, if its run fails again and again.
    :raises ImportError: without Dask or pyarrow.
    """
    parts, limit = list(parts), checked_rounds(rounds)
    if not parts:
        raise ValueError("there are no parts to run.")
    _check_mesh(method)
    of_all = GroupModel.of(method, LocalPlate(plate, index, size), model_kwargs, rng_key)
    client, folder = current_client() if client is None else client, checked_folder(folder)
    with progress(progress_bar, None, "distributed", "part") as bar:
        cluster = GroupCluster(client, retries, bar, of_all, parts)
        start, places, num_groups, num_rows = cluster.begin()
        result = in_group_rounds(start.shared, places, cluster, limit)
        engine, members = of_all.bind(start.head, len(np.unique(start.head[index])))
        cluster.write(result.places, folder, members.of_members.entry_names, result.shared.root)
    error = result.errors[-1]
    if not error < TOLERANCE:
        warn(
            f"the shared sites may still be {error:.2g} standard deviations from the best Gaussian of all rows, after "
            f"{len(result.errors)} rounds" + ("." if rounds == "auto" else ": take more, or rounds='auto'."),
        )
    warn_of(result.expectation_error)
    info = {
        "plate": plate,
        "rounds": len(result.errors),
        "errors": np.array(result.errors),
        "error": error,
        "elbo_error": result.expectation_error,
        "converged": bool(error < TOLERANCE),
    }
    mean, scale = (jnp.asarray(x, engine.program.dtype) for x in (result.shared.mean, result.shared.root))
    seen = (GroupFiles(folder, index, members), of_all.plate, num_rows, num_groups)
    bound = result.bound if has_finite_bound(result.expectation_error) else None
    return GroupPosterior(engine.program, members, mean, scale, bound, info, *seen)


def _check_mesh(method: RVGA | BONG) -> None:
    """:raises ValueError: for a method with a mesh."""
    if isinstance(method, RVGA) and method.mesh is not None:
        raise ValueError(
            "the method's mesh is of devices of this process, and workers have their own: leave mesh out, and start a "
            "worker for each device."
        )
