"""Rows sharded over the devices of a mesh; XLA adds up their contributions."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..core.pytrees import PyTree

Tree = TypeVar("Tree")  # of arrays


class Devices:
    """Placement of arrays on devices.

    :param mesh: devices of one process or of several. None: the default device.
    :raises ValueError: if ``mesh`` is not a mesh.

    :ivar count: the number of devices that share the rows.
    :ivar everywhere: the sharding of replicated arrays; None without a mesh.
    """

    def __init__(self, mesh: Mesh | None):
        if mesh is not None and not isinstance(mesh, Mesh):
            raise ValueError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh gives, not {type(mesh).__name__}.")
        if mesh is not None:  # XLA is to find out how to share the work
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
        self._mesh = mesh
        self.count = 1 if mesh is None else mesh.size
        self.everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def rounded_up(self, num_rows: int) -> int:
        """The next number of rows that the devices can share equally."""
        return -(-num_rows // self.count) * self.count

    def padded(self, num_rows: int) -> int:
        """An eighth more at most: for programs that are compiled once for all of nearly as many rows."""
        step = 1 << max(num_rows.bit_length() - 4, 0)
        return self.rounded_up(-(-num_rows // step) * step)

    def put_rows(self, tree: PyTree, axis: int = 0) -> PyTree:
        """Arrays with their rows along ``axis``, sharded over the devices."""
        if self._mesh is None:
            return jax.device_put(tree)
        return self._put(tree, NamedSharding(self._mesh, PartitionSpec(*[None] * axis, self._mesh.axis_names)))

    def put(self, tree: Tree) -> Tree:
        """Arrays replicated on each device."""
        return tree if self.everywhere is None else self._put(tree, self.everywhere)

    def fetch(self, tree: Tree) -> Tree:
        """Replicated arrays, on this process's default device."""
        return tree if self._mesh is None else jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)

    @staticmethod
    def _put(tree: Tree, sharding: NamedSharding) -> Tree:
        def placed(array: Any) -> Array:
            array = np.asarray(array)
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        return jax.tree.map(placed, tree)
