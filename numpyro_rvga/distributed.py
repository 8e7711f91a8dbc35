"""Runs on a Dask cluster: parts of the data on its workers, merged. ``pip install 'numpyro_rvga[distributed]'``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .bong import BONG
from .engines.online import OnlineState
from .results.merging import check_disjoint, merged
from .results.posterior import Posterior
from .rvga import RVGA
from .streams.passes import HEAD, PassOptions, open_source

if TYPE_CHECKING:
    from distributed import Client

RETRIES = 3
REFUSALS = (ValueError, NotImplementedError, TypeError)  # of data and models, which are the same the next time


def run(
    method: RVGA | BONG,
    parts: Sequence[Any],
    *,
    client: Client | None = None,
    retries: int = RETRIES,
    rng_key: jax.Array | None = None,
    on_bad_row: str = "raise",
    **model_kwargs: Any,
) -> Posterior:
    """Fit each part of the data on a worker of a Dask cluster, and merge what they have learned.

    Every part starts from the model's prior, which the result counts once; see :meth:`Posterior.merge`. A part is one
    task: if its worker dies, Dask runs it again on another, and it is counted once.

    **Example**

    .. code-block:: python

        from distributed import Client
        from numpyro_rvga import ParquetRows, RVGA, distributed

        rows = ParquetRows("flights/", {"X": ["distance", "hour"], "y": "delay"})
        posterior = distributed.run(RVGA(model), rows.split(32), client=Client("scheduler:8786"))

    :param method: what to run on each part; without dynamics.
    :param parts: data as the method's ``run`` takes them. Those of :meth:`ParquetRows.split` are read by the workers.
    :param client: of the cluster. Default: Dask's current client.
    :param retries: how often a part is tried again whose worker dies, or whose run fails for want of memory or of a
        file. What the data or the model are to blame for is not tried again.
    :param rng_key: as for ``run``; the same for all parts.
    :param on_bad_row: as for ``run``. The numbers of skipped rows count from the beginning of their part.
    :param model_kwargs: go to every call of the model unchanged.
    :return: the posterior. ``info["parts"]`` has what each part's run has to tell.
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
    client = _current_client() if client is None else client
    options = {"rng_key": rng_key, "on_bad_row": on_bad_row, "progress_bar": False, **model_kwargs}
    double = bool(jax.config.jax_enable_x64)
    try:
        _, head, _ = open_source(parts[0], method.model, model_kwargs, PassOptions(on_bad_row="skip"))
    except ValueError as error:
        raise ValueError(f"part 0: {error}") from error
    start = method.init({name: array[:HEAD] for name, array in head.items()}, rng_key=rng_key, **model_kwargs)
    # A task of its own: a worker keeps it, with what it has compiled, for all its parts.
    shared = client.submit(_itself, method, pure=False)
    tasks = [
        client.submit(_run_part, shared, number, part, options, double, pure=False, retries=retries)
        for number, part in enumerate(parts)
    ]
    states, infos, row_sets = zip(*_results(client, tasks))
    check_disjoint(row_sets)
    posterior = method.posterior(merged(start, states))
    info = {**posterior.info, "merged": len(parts), "parts": list(infos)}
    return dataclasses.replace(posterior, info=info, row_sets=tuple(run for part in row_sets for run in part))


def _results(client: Client, tasks: Sequence[Any]) -> list[tuple]:
    """What the tasks return, in their order; the others are given up as soon as one fails for good.

    :raises ValueError, NotImplementedError: if a run cannot succeed.
    :raises RuntimeError: if a run has failed too often.
    """
    from distributed import as_completed

    found = {}
    try:
        for task, result in as_completed(tasks, with_results=True):
            if isinstance(result, REFUSALS):
                raise result
            found[task.key] = result
    except BaseException:
        client.cancel(list(tasks))
        raise
    return [found[task.key] for task in tasks]


def _itself(method: RVGA | BONG) -> RVGA | BONG:
    return method


def _run_part(
    method: RVGA | BONG, number: int, part: Any, options: Mapping[str, Any], double: bool
) -> tuple[Any, dict, tuple] | Exception:
    """A part's state, in NumPy's arrays, what its run has to tell, and which rows it has taken in. An error that would
    come again is returned, not raised: what is raised, Dask tries again."""
    try:
        return _outcome(method, part, options, double)
    except REFUSALS as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        return kind(f"part {number}: {error}")
    except Exception as error:
        raise RuntimeError(f"part {number}: {type(error).__name__}: {error}") from error


def _outcome(method: RVGA | BONG, part: Any, options: Mapping[str, Any], double: bool) -> tuple[Any, dict, tuple]:
    with jax.enable_x64(double):
        posterior = method.run(part, **options)
        state = posterior.state
        if isinstance(state, OnlineState):  # a merged state has a key of its own
            state = state._replace(rng_key=np.zeros(0))
        return jax.tree.map(np.asarray, state), dict(posterior.info), posterior.row_sets


def _current_client() -> Client:
    try:
        from distributed import get_client
    except ImportError as error:
        raise ImportError("Dask clusters need dask: pip install 'numpyro_rvga[distributed]'.") from error
    return get_client()
