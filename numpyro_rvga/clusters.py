"""Tasks on a Dask cluster: what of them may fail, what comes back, and what is asked of parts of the data there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .bong import BONG
from .core.groups.steps import Message
from .core.pytrees import summed
from .core.updates.state import State
from .engines.certificate import SiteSums
from .engines.online import OnlineState
from .model.data.row_set import RowSet
from .model.data.rows import Data, Rows
from .progress import Bar
from .results.groups.parts import (
    EvaluatedGroups,
    GroupModel,
    GroupPart,
    GroupStart,
    advanced,
    check_apart,
    initial_groups,
    message_of,
    start_from,
)
from .results.groups.posterior import write_groups
from .results.groups.rounds import Shared
from .rvga import RVGA
from .user_warnings import warn

if TYPE_CHECKING:
    from distributed import Client, Future

RETRIES = 3
PATIENCE = 60  # seconds without a result, after which the number of workers is checked
REFUSALS = (ValueError, NotImplementedError, TypeError)  # of data and models, which are the same the next time


def current_client() -> Client:
    """Dask's."""
    try:
        from distributed import get_client
    except ImportError as error:
        raise ImportError("Dask clusters need dask: pip install 'numpyro_rvga[distributed]'.") from error
    return get_client()


def itself(thing: Any) -> Any:
    """As a task, what a worker keeps."""
    return thing


def guarded(number: int | None, double: bool, task: Callable, *arguments: Any) -> Any:
    """What a task makes of a part. An error that would come again is returned, not raised: what is raised, Dask tries
    again. So is one that another task has returned.

    :param number: the part's, for messages; None: the task is of several parts.
    """
    failed = [argument for argument in arguments if isinstance(argument, REFUSALS)]
    if failed:
        return failed[0]
    which = "" if number is None else f"part {number}: "
    try:
        with jax.enable_x64(double):
            return task(*arguments)
    except REFUSALS as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        return kind(f"{which}{error}")
    except Exception as error:
        raise RuntimeError(f"{which}{type(error).__name__}: {error}") from error


class Cluster:
    """Tasks of parts of the data, on the workers of a cluster. What tasks return stays there until it is asked for, and
    Dask computes it again where a worker has died."""

    def __init__(self, client: Client, retries: int, bar: Bar):
        self._client, self._bar = client, bar
        self._how: dict[str, Any] = {"pure": False, "retries": retries}
        self._double = jnp.result_type(float) == jnp.float64

    def _kept(self, thing: object) -> Future:
        """As a task of its own: a worker keeps it, with what it has compiled, for all tasks that take it."""
        return self._client.submit(itself, thing, pure=False)

    def _submit(self, number: int | None, task: Callable, *arguments: Any) -> Future:
        """See :func:`guarded`."""
        return self._client.submit(guarded, number, self._double, task, *arguments, **self._how)

    def _submit_each(self, task: Callable, *of_each: Iterable) -> list[Future]:
        """A task for each part. ``of_each``: the values of each argument, by part."""
        return [self._submit(number, task, *arguments) for number, arguments in enumerate(zip(*of_each))]

    def results_of(self, tasks: list[Future]) -> list[Any]:
        """The tasks' results, in their order. As soon as one fails for good, the others are canceled.

        :raises ValueError, NotImplementedError: if a run cannot succeed.
        :raises RuntimeError: if a run has failed too often.
        """
        from distributed import as_completed

        results: dict[Any, Any] = {}
        try:
            while len(results) < len(tasks):
                left, before = [task for task in tasks if task.key not in results], len(results)
                try:
                    for task, result in as_completed(left, with_results=True, timeout=PATIENCE):
                        if isinstance(result, REFUSALS):
                            raise result
                        if task.key not in results:  # what comes twice counts once
                            self._bar.update()
                        results[task.key] = result
                except TimeoutError:
                    if len(results) == before and not self._client.scheduler_info()["workers"]:
                        warn("the cluster has no workers left: the run waits for new ones.")
        except BaseException:
            self._client.cancel(tasks)
            raise
        return [results[task.key] for task in tasks]


class RunCluster(Cluster):
    """Parts that a method runs on, and whose rows are evaluated.

    :param options: of each part's run.
    """

    def __init__(
        self,
        client: Client,
        retries: int,
        bar: Bar,
        method: RVGA | BONG,
        parts: Sequence[Any],
        options: Mapping[str, Any],
    ):
        super().__init__(client, retries, bar)
        self._method, self._parts, self._options = self._kept(method), [self._kept(part) for part in parts], options

    def solve(self) -> list[tuple]:
        """Each part's state after a run from the prior, what that has to tell, and which rows it has taken in."""
        return self._asked(_solved)

    def sums(self, state: State) -> SiteSums:
        """Sums over the rows of all parts, at one state."""
        return summed(self._asked(_sums, repeat(jax.tree.map(np.asarray, state))))

    def sample_of(self, totals: Sequence[int], counts: Sequence[int]) -> list[Rows]:
        """A random sample of the rows of each part. ``totals``: how many there are."""
        return self._asked(_sample, totals, counts)

    def _asked(self, task: Callable, *of_each: Iterable) -> list[Any]:
        """The result of a task for each part."""
        return self.results_of(
            self._submit_each(task, repeat(self._method), self._parts, repeat(self._options), *of_each)
        )


class GroupCluster(Cluster):
    """Parts with groups of their own, as the :class:`Parts` of rounds: rows, groups and sums stay on the workers."""

    def __init__(self, client: Client, retries: int, bar: Bar, model: GroupModel, parts: Sequence[Any]):
        super().__init__(client, retries, bar)
        self._plate, self._model, data = model.plate, self._kept(model), [self._kept(part) for part in parts]
        self._parts = self._submit_each(_group_part, repeat(self._model), data, (n == 0 for n in range(len(data))))

    def begin(self) -> tuple[GroupStart, list[Future], int, int]:
        """Where the rounds begin, also as groups of each part, and how many groups and rows there are."""
        counts = self.results_of(self._submit_each(GroupPart.counts, self._parts))
        samples = self._submit_each(GroupPart.sample, self._parts, repeat(len(self._parts)))
        labels = self._submit_each(attrgetter("labels"), self._parts)
        apart = self._submit(None, check_apart, self._plate.name, *labels)
        start = self._submit(None, start_from, self._model, *samples)
        results = self.results_of([apart, start])[1]
        places = self._submit_each(initial_groups, (count for count, _ in counts), repeat(start))
        num_groups, num_rows = (sum(numbers) for numbers in zip(*counts))
        return results, places, num_groups, num_rows

    def write(self, places: list[Future], folder: str, names: list[str], root: np.ndarray) -> None:
        """Each part's groups to a file."""
        same = repeat(folder), repeat(names), repeat(root)
        self.results_of(self._submit_each(_write, range(len(places)), self._parts, places, *same))

    def advanced(self, places: list[Future], step: float, shift: np.ndarray, shared: Shared) -> list[Future]:
        return self._submit_each(advanced, self._parts, places, repeat(step), repeat(shift), repeat(shared))

    def messages(self, places: list[Future], step: float) -> list[Message]:
        return self.results_of(self._submit_each(message_of, places, repeat(step)))


def _group_part(model: GroupModel, data: Data | Iterable, is_first: bool) -> GroupPart:
    part = GroupPart(model, data, with_shared_prior=is_first)
    _ = part.evaluations  # which says what the model cannot do
    return part


def _write(
    number: int, part: GroupPart, place: EvaluatedGroups, folder: str, names: list[str], root: np.ndarray
) -> None:
    write_groups(folder, number, part.model.plate.index, part.labels, names, place.groups, root)


def _solved(method: RVGA | BONG, part: Any, options: Mapping[str, Any]) -> tuple[Any, dict, tuple[RowSet, ...]]:
    """The state, in NumPy's arrays, what the run has to tell, and which rows it has taken in."""
    posterior = method.run(part, progress_bar=False, **options)
    state = posterior.state
    if isinstance(state, OnlineState):  # a merged state has a key of its own
        state = state._replace(rng_key=jnp.zeros(0))
    return jax.tree.map(np.asarray, state), dict(posterior.info), posterior.row_sets


def _sums(method: RVGA, part: Any, options: Mapping[str, Any], state: State) -> SiteSums:
    """Sums over the part's rows."""
    return method.sums_at(state, part, **options)[0]


def _sample(method: RVGA, part: Any, options: Mapping[str, Any], total: int, count: int) -> Rows:
    """A random sample of the part's rows."""
    return method.sample_of(part, total, count, **options)
