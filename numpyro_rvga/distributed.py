"""Runs on a Dask cluster: parts of the data on its workers, merged. ``pip install 'numpyro_rvga[distributed]'``."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from .bong import BONG
from .core.recursion import State
from .engines.certificate import Sums
from .engines.online import OnlineState
from .model.row_set import RowSet
from .progress import progress
from .results.merging import check_disjoint, defined, merged
from .results.posterior import Posterior
from .results.rounds import checked_rounds, evaluations_of, facts_of, in_rounds, total_of, warn_of_one_exchange
from .rvga import RVGA
from .streams.passes import HEAD, PassOptions, open_source

if TYPE_CHECKING:
    from distributed import Client

RETRIES = 3
PATIENCE = 60  # seconds without a result, after which it is looked whether there are workers at all
REFUSALS = (ValueError, NotImplementedError, TypeError)  # of data and models, which are the same the next time


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
    takes_rounds = isinstance(method, RVGA) and method.takes_rounds
    if not takes_rounds and limit not in (None, 1):
        raise ValueError("several rounds are for RVGA with the implicit scheme and full Gaussians: leave rounds out.")
    client = _current_client() if client is None else client
    options = {"rng_key": rng_key, "on_bad_row": on_bad_row, **model_kwargs}
    try:
        _, head, _ = open_source(parts[0], method.model, model_kwargs, PassOptions(on_bad_row="skip"))
    except ValueError as error:
        raise ValueError(f"part 0: {error}") from error
    start = method.init({name: array[:HEAD] for name, array in head.items()}, rng_key=rng_key, **model_kwargs)
    with progress(progress_bar, None, "distributed", "part") as bar:
        cluster = _Cluster(client, retries, bar, options, *_held(client, method, parts))
        states, infos, row_sets = zip(*cluster.solve())
        check_disjoint(row_sets)
        result = None
        if isinstance(method, RVGA) and takes_rounds and limit != 1 and not (limit is None and _is_exact(method)):
            evaluations = evaluations_of(method.last_engine, start, lambda state: total_of(cluster.sums(state)))
            result = defined(in_rounds(start, states, evaluations, limit))
    info: dict[str, Any] = {"merged": len(parts), "parts": list(infos)}
    runs = tuple(run for part in row_sets for run in part)
    if result is None:
        remedy = "take rounds='auto'" if takes_rounds else "use fewer and larger parts, or RVGA"
        posterior = method.posterior(merged(start, states))
        warn_of_one_exchange(posterior.program, [int(state.num_rows) for state in states], remedy, 3)
        return dataclasses.replace(posterior, info={**posterior.info, **info}, row_sets=runs)
    posterior, info = method.posterior(result.state), info | facts_of(result, limit, stacklevel=3)
    return dataclasses.replace(posterior, elbo=result.look.bound, info={**posterior.info, **info}, row_sets=runs)


def _is_exact(method: RVGA) -> bool:
    """Whether summaries of rows of the last data are exact."""
    return method.last_engine.program.is_conjugate


def _held(client: Client, method: RVGA | BONG, parts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The method and the parts as tasks of their own: a worker keeps the method, with what it has compiled, for all its
    parts, and its parts for all rounds."""
    return client.submit(_itself, method, pure=False), [client.submit(_itself, part, pure=False) for part in parts]


class _Cluster(NamedTuple):
    """Parts on the workers of a cluster.

    :ivar options: of each part's run. :ivar method: and ``parts``: tasks that return them.
    """

    client: Client
    retries: int
    bar: Any
    options: dict[str, Any]
    method: Any
    parts: list[Any]

    def solve(self) -> list[tuple]:
        """Each part's state after a run from the prior, what that has to tell, and which rows it has taken in."""
        return self._asked(_solved)

    def sums(self, state: State) -> list[Sums]:
        """Over the rows of each part, at one state."""
        return self._asked(_sums, jax.tree.map(np.asarray, state))

    def _asked(self, task: Callable, *arguments: Any) -> list[Any]:
        """What a task makes of each part."""
        double, submit = bool(jax.config.jax_enable_x64), self.client.submit
        how: dict[str, Any] = {"pure": False, "retries": self.retries}
        tasks = [
            submit(_run_part, task, self.method, number, part, self.options, double, *arguments, **how)
            for number, part in enumerate(self.parts)
        ]
        return _results(self.client, tasks, self.bar)


def _results(client: Client, tasks: Sequence[Any], bar: Any) -> list[Any]:
    """What the tasks return, in their order; the others are given up as soon as one fails for good.

    :raises ValueError, NotImplementedError: if a run cannot succeed.
    :raises RuntimeError: if a run has failed too often.
    """
    from distributed import as_completed

    found: dict[str, Any] = {}
    try:
        while len(found) < len(tasks):
            left = [task for task in tasks if task.key not in found]
            try:
                for task, result in as_completed(left, with_results=True, timeout=PATIENCE):
                    if isinstance(result, REFUSALS):
                        raise result
                    found[task.key] = result
                    bar.update()
            except TimeoutError:
                if not client.scheduler_info()["workers"]:
                    warnings.warn("the cluster has no workers left: the run waits for new ones.", stacklevel=6)
    except BaseException:
        client.cancel(list(tasks))
        raise
    return [found[task.key] for task in tasks]


def _itself(method: RVGA | BONG) -> RVGA | BONG:
    return method


def _run_part(
    task: Callable,
    method: RVGA | BONG,
    number: int,
    part: Any,
    options: Mapping[str, Any],
    double: bool,
    *arguments: Any,
) -> Any:
    """What a task makes of a part. An error that would come again is returned, not raised: what is raised, Dask tries
    again."""
    try:
        with jax.enable_x64(double):
            return task(method, part, options, *arguments)
    except REFUSALS as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        return kind(f"part {number}: {error}")
    except Exception as error:
        raise RuntimeError(f"part {number}: {type(error).__name__}: {error}") from error


def _solved(method: RVGA | BONG, part: Any, options: Mapping[str, Any]) -> tuple[Any, dict, tuple[RowSet, ...]]:
    """The state, in NumPy's arrays, what the run has to tell, and which rows it has taken in."""
    posterior = method.run(part, progress_bar=False, **options)
    state = posterior.state
    if isinstance(state, OnlineState):  # a merged state has a key of its own
        state = state._replace(rng_key=np.zeros(0))
    return jax.tree.map(np.asarray, state), dict(posterior.info), posterior.row_sets


def _sums(method: RVGA, part: Any, options: Mapping[str, Any], state: State) -> Sums:
    """Over the part's rows."""
    return method.sums_at(state, part, **options)[0]


def _current_client() -> Client:
    try:
        from distributed import get_client
    except ImportError as error:
        raise ImportError("Dask clusters need dask: pip install 'numpyro_rvga[distributed]'.") from error
    return get_client()
