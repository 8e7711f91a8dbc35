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
    :param retries: how often a part whose run fails is tried again.
    :param rng_key: as for ``run``; the same for all parts.
    :param on_bad_row: as for ``run``. The numbers of skipped rows count from the beginning of their part.
    :param model_kwargs: go to every call of the model unchanged.
    :return: the posterior. ``info["parts"]`` has what each part's run has to tell.
    :raises ValueError: for parts that cannot be merged, or whose run raises it.
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
    _, head, _ = open_source(parts[0], method.model, model_kwargs, PassOptions(on_bad_row="skip"))
    start = method.init({name: array[:HEAD] for name, array in head.items()}, rng_key=rng_key, **model_kwargs)
    # A task of its own: a worker keeps it, with what it has compiled, for all its parts.
    shared = client.submit(_itself, method, pure=False)
    tasks = [client.submit(_run_part, shared, part, options, double, pure=False, retries=retries) for part in parts]
    states, infos, row_sets = zip(*client.gather(tasks))
    check_disjoint(row_sets)
    posterior = method.posterior(merged(start, states))
    info = {**posterior.info, "merged": len(parts), "parts": list(infos)}
    return dataclasses.replace(posterior, info=info, row_sets=tuple(run for part in row_sets for run in part))


def _itself(method: RVGA | BONG) -> RVGA | BONG:
    return method


def _run_part(method: RVGA | BONG, part: Any, options: Mapping[str, Any], double: bool) -> tuple[Any, dict, tuple]:
    """A part's state, in NumPy's arrays, what its run has to tell, and which rows it has taken in."""
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
