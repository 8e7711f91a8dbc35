"""Rows from Arrow record batches and Parquet files. Needs pyarrow: ``pip install 'numpyro_rvga[stream]'``."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

BATCH = 2**16  # rows of a row group that are read at a time
Columns = Mapping[str, str | Sequence[str]]


class RowGroup(NamedTuple):
    """A row group of a Parquet file."""

    path: str
    number: int
    num_rows: int


class ParquetRows:
    """The rows of Parquet files as blocks for ``run``, read row group by row group, each time anew.

    **Example**

    With the model and the data of :class:`RVGA`'s example:

    .. doctest::

        >>> import pyarrow
        >>> import pyarrow.parquet
        >>> from numpyro_rvga import ParquetRows
        >>> table = pyarrow.table({"distance": X[:, 0], "hour": X[:, 1], "late": data["y"]})
        >>> pyarrow.parquet.write_table(table, "flights.parquet", row_group_size=64)
        >>> rows = ParquetRows("flights.parquet", {"X": ["distance", "hour"], "y": "late"})
        >>> rows
        ParquetRows(200 rows in 4 row groups)
        >>> RVGA(model).run(rows, progress_bar=False).num_rows
        200

    ``run`` visits rows in random order. It mixes up to 2^25 numbers at a time, from many row groups or, if the file has
    few, from many places.
    Values that are missing become NaN: pass ``on_bad_row="skip"`` to leave such rows out. The others keep the type of
    their column, so that integers stay integers.

    :param path: a file, a folder of ``.parquet`` files (taken in the order of their names, subfolders too), or several
        of these.
    :param columns: the model's argument names to columns: a name gives an array of shape ``(n,)``, or ``(n, k)`` for a
        column of lists of one length; a list of k names gives one of shape ``(n, k)``.
    :raises FileNotFoundError: if there is no such file, or none in a folder.
    :raises ValueError: naming columns that a file does not have, and the columns that it has; and for no files or no
        columns.
    :raises ImportError: without pyarrow.

    :ivar groups: the row groups that hold them.
    :ivar dtypes: of the arrays, where no values are missing.
    """

    def __init__(self, path: str | os.PathLike | Sequence[str | os.PathLike], columns: Columns):
        several = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        if not several:
            raise ValueError("path must be a file, a folder or several of these: the list of them is empty.")
        files = [file for each in several for file in _files(Path(each))]
        with pyarrow_at_hand().parquet.ParquetFile(files[0]) as first:
            _check_columns(columns, first.schema_arrow.names, str(files[0]))
            self.dtypes = _dtypes(first.schema_arrow, columns)
        self.columns = {name: of if isinstance(of, str) else list(of) for name, of in columns.items()}
        self.groups = tuple(group for file in files for group in _groups(file, columns))

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(group.num_rows for group in self.groups)

    def __repr__(self) -> str:
        return f"ParquetRows({self.num_rows} rows in {len(self.groups)} row groups)"

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.from_row(0)

    def from_row(self, row: int) -> Iterator[dict[str, np.ndarray]]:
        """The blocks from a row on; row groups before it are not read."""
        for group in self.groups:
            if row < group.num_rows:
                yield from self._blocks(group, row)
            row = max(row - group.num_rows, 0)

    def about_row(self, row: int) -> str:
        """A sentence that says where a row lies."""
        for group in self.groups:
            if row < group.num_rows:
                return f"It is row {row} of row group {group.number} of {group.path}."
            row -= group.num_rows
        raise IndexError(f"there are {self.num_rows} rows.")

    @property
    def piece_sizes(self) -> list[int]:
        """Rows of each row group: what is fast to read one after the other."""
        return [group.num_rows for group in self.groups]

    def split(self, count: int) -> list[ParquetRows]:
        """These rows in up to ``count`` parts of whole row groups, neighbors together and about equally many each.

        :raises ValueError: for less than one part.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}.")
        ends = np.cumsum([group.num_rows for group in self.groups])
        part = np.minimum((ends - 1) * count // max(self.num_rows, 1), count - 1)
        parts = []
        for number in np.unique(part):
            parts.append(copy.copy(self))
            parts[-1].groups = tuple(group for group, p in zip(self.groups, part) if p == number)
        return parts

    def _blocks(self, group: RowGroup, skipped: int) -> Iterator[dict[str, np.ndarray]]:
        wanted = [name for of in self.columns.values() for name in _names(of)]
        with pyarrow_at_hand().parquet.ParquetFile(group.path) as file:
            _check_length(file, group)
            batches = file.iter_batches(BATCH, row_groups=[group.number], columns=sorted(set(wanted)))
            where = f"row group {group.number} of {group.path}"
            for block in (_block(batch, self.columns, where) for batch in batches):
                length = len(next(iter(block.values())))
                if skipped < length:
                    yield {name: array[skipped:] for name, array in block.items()}
                skipped = max(skipped - length, 0)


def arrow_blocks(batches: Iterable[Any], columns: Columns) -> Iterator[dict[str, np.ndarray]]:
    """Blocks for ``run`` from an iterable of ``pyarrow.RecordBatch``, such as a Flight reader gives.

    **Example**

    .. doctest::

        >>> import pyarrow
        >>> from numpyro_rvga import arrow_blocks
        >>> table = pyarrow.table({"distance": [3.0, 1.5, 2.0], "hour": [9.0, 7.5, 23.0], "late": [0, 1, 0]})
        >>> blocks = arrow_blocks(table.to_batches(max_chunksize=2), {"X": ["distance", "hour"], "y": "late"})
        >>> [(block["X"].shape, block["y"].tolist()) for block in blocks]
        [((2, 2), [0, 1]), ((1, 2), [0])]

    :param batches: record batches, or tables. Those without rows are passed over.
    :param columns: as for :class:`ParquetRows`.
    :return: an iterator of the blocks.
    :raises ValueError: naming columns that a batch does not have, or whose lists differ in length.
    """
    return _ArrowBlocks(batches, columns)


class _ArrowBlocks(Iterator[dict[str, np.ndarray]]):
    """:ivar dtypes: of the arrays, where no values are missing; known from the first batch on."""

    def __init__(self, batches: Iterable[Any], columns: Columns):
        self._batches, self._columns = iter(batches), columns
        self._number = -1
        self.dtypes: dict[str, np.dtype] = {}

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._batches)
        self._number += 1
        while not batch.num_rows:
            batch = next(self._batches)
            self._number += 1
        block = _block(batch, self._columns, f"record batch {self._number}")
        self.dtypes = self.dtypes or _dtypes(batch.schema, self._columns)
        return block


def _block(batch: Any, columns: Columns, where: str) -> dict[str, np.ndarray]:
    """A batch as arrays by argument name. ``where``: it lies, for messages."""
    _check_columns(columns, batch.schema.names, where)
    return {
        name: _array(batch, of, where)
        if isinstance(of, str)
        else np.stack([_array(batch, c, where) for c in of], axis=1)
        for name, of in columns.items()
    }


def _names(of: str | Sequence[str]) -> Sequence[str]:
    """The names of one argument's columns."""
    return [of] if isinstance(of, str) else of


def _dtypes(schema: Any, columns: Columns) -> dict[str, np.dtype]:
    """The dtype of each argument's array where no values are missing."""
    empty = schema.empty_table()
    dtypes = {}
    for name, of in columns.items():
        fields = [empty.column(c).combine_chunks() for c in _names(of)]
        values = [field.flatten() if _is_list(field) else field for field in fields]
        dtypes[name] = np.result_type(*[_plain(value).dtype for value in values])
    return dtypes


def _check_length(file: Any, group: RowGroup) -> None:
    """:raises ValueError: for a file that was replaced by another since its rows were counted."""
    number = file.metadata.num_row_groups
    length = file.metadata.row_group(group.number).num_rows if group.number < number else 0
    if length != group.num_rows:
        raise ValueError(
            f"{group.path} has changed since its rows were counted: its row group {group.number} had {group.num_rows} "
            f"rows, and has {length}. Make ParquetRows anew, and begin again."
        )


def _array(batch: Any, name: str, where: str) -> np.ndarray:
    pyarrow = pyarrow_at_hand()
    column = batch.column(name)
    column = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    if _is_list(column):
        lengths = column.value_lengths().unique().to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise ValueError(f"{where}: column {name!r} holds lists of different lengths, or none in some rows.")
        return _plain(column.flatten()).reshape(len(column), lengths[0])
    return _plain(column)


def _is_list(column: Any) -> bool:
    """Whether a column has lists, of any of Arrow's types."""
    return hasattr(column, "value_lengths")


def _plain(column: Any) -> np.ndarray:
    """Missing values are NaN."""
    pyarrow = pyarrow_at_hand()
    if pyarrow.types.is_boolean(column.type):
        column = column.cast(pyarrow.uint8())
    if pyarrow.types.is_decimal(column.type):
        column = column.cast(pyarrow.float64())
    return column.to_numpy(zero_copy_only=False)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    paths = sorted(path.rglob("*.parquet")) if path.is_dir() else []
    if not paths:
        raise FileNotFoundError(f"{path} is neither a file nor a folder that holds .parquet files.")
    return paths


def _groups(file: Path, columns: Columns) -> list[RowGroup]:
    with pyarrow_at_hand().parquet.ParquetFile(file) as opened:
        _check_columns(columns, opened.schema_arrow.names, str(file))
        metadata = opened.metadata
        lengths = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return [RowGroup(str(file), number, length) for number, length in enumerate(lengths) if length]


def _check_columns(columns: Columns, names: Sequence[str], where: str) -> None:
    if not columns:
        raise ValueError("columns is empty: name a column for each argument, as in {'X': ['a', 'b'], 'y': 'c'}.")
    for argument, of in columns.items():
        if not len(of):
            raise ValueError(f"columns has no column for {argument!r}: {where} has {', '.join(names)}.")
        for name in _names(of):
            if name not in names:
                raise ValueError(f"{where} has no column {name!r} for {argument!r}; it has {', '.join(names)}.")


def pyarrow_at_hand() -> ModuleType:
    """:raises ImportError: saying what to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Arrow and Parquet need pyarrow: pip install 'numpyro_rvga[stream]'.") from error
    return pyarrow
