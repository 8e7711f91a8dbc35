"""Streams of rows of a model with very many groups."""

from __future__ import annotations

import os
from typing import Any

from jax import Array

from .options import is_count
from .results.groups.parts import GroupModel, LocalPlate
from .results.groups.store import GroupStore
from .results.groups.stream import GroupStream


def stream_groups(
    method: Any,
    *,
    plate: str,
    index: str,
    size: str,
    rows_kept: int = 16,
    block_size: int = 4096,
    file: str | os.PathLike | None = None,
    groups_in_memory: int | None = None,
    resume: bool = False,
    rng_key: Array | None = None,
    **model_kwargs: Any,
) -> GroupStream:
    """A stream of rows of a model with very many groups, such as users, of which new ones may come at any time.

    The sites of a group are in q from its first row on, given the shared sites. Only the groups of a block are
    solved for with it.

    **Example**

    .. doctest::

        >>> import jax
        >>> import numpy as np
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_rvga import RVGA
        >>> def model(user, num_users, y=None):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 2))
        ...     with numpyro.plate("users", num_users):
        ...         level = numpyro.sample("level", dist.Normal(mean, 1))
        ...     with numpyro.plate("rows", len(user)):
        ...         numpyro.sample("y", dist.Normal(level[user], 0.5), obs=y)
        >>> stream = RVGA(model).stream_groups(plate="users", index="user", size="num_users")
        >>> stream.update({"user": np.array(["ann", "bob", "ann"]), "y": np.array([1.2, -0.4, 0.9])})
        >>> stream.update({"user": np.array(["eve", "ann"]), "y": np.array([0.3, 1.1])})
        >>> stream
        GroupStream(num_rows=5, num_groups=3)
        >>> draws = stream.posterior().sample_posterior(jax.random.key(0), (100,), groups=["ann", "eve"])
        >>> draws["mean"].shape, draws["level"].shape
        ((100,), (100, 2))

    :param plate: the name of the groups' plate.
    :param index: the model's argument that has the group of each row. In the data its values are labels, integers
        or strings; the model is given the number of the group within its block, from zero.
    :param size: the model's argument that is the number of groups, the size of the plate.
    :param rows_kept: of each group, at most, chosen at random. These are evaluated again when more rows of the
        group come, and whenever the stream has grown by half. Of groups with more rows, the change for those kept is
        taken for that of the others too. A warning says so where that may leave the shared sites
        off by 0.1 standard deviations. None are kept where rows are linear and Gaussian.
    :param block_size: rows that are solved for together.
    :param file: for :meth:`GroupStream.save`, and for groups that are not in memory. An SQLite database.
    :param groups_in_memory: at most, after each block. The others, of which rows came longest ago, are in the file,
        and come back with their rows. Default: all.
    :param resume: whether to go on from the file, if there is one.
    :param rng_key: as for :meth:`RVGA.run`.
    :param model_kwargs: go to every call of the model unchanged.
    :return: a :class:`~numpyro_rvga.results.groups.stream.GroupStream` without rows, or that of the file.
    :raises ValueError: for arguments that the model does not take, for a method that does not seek the best full
        Gaussian or that has dynamics, for a file that is there without ``resume``, and for one of another model.
    """
    common = GroupModel.of(method, LocalPlate(plate, index, size), model_kwargs, rng_key)
    for what, value in (("rows_kept", rows_kept), ("block_size", block_size), ("groups_in_memory", groups_in_memory)):
        if value is not None and not is_count(value, 1):
            raise ValueError(f"{what} must be an integer of at least 1, not {value!r}.")
    if file is None and (groups_in_memory is not None or resume):
        raise ValueError("groups_in_memory and resume need a file: pass file='users.db'.")
    return GroupStream(common, GroupStore(file, groups_in_memory, resume=resume), block_size, rows_kept)
