"""Vectors of numbers by key: in memory, and in a file those that have not been asked for for the longest time.

The file is an SQLite database. What is written to it becomes part of it when it is saved, with the state of the stream,
as one transaction: a process that is killed leaves what was saved last.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..core.expectations import power_of_two

AT_ONCE = 500  # keys of a query
TO_SPARE = 0.25  # of the vectors in memory, which leave it together
LENGTHS = np.unique([x * 2**i // 8 for i in range(25) for x in range(8, 16)])  # of vectors: steps of an eighth or less
TABLES = """
CREATE TABLE IF NOT EXISTS vectors (label PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (contents TEXT NOT NULL, arrays BLOB NOT NULL);
"""


class _Slab:
    """Vectors of one length, in slots.

    :ivar used: when each was read or written last. :ivar unsaved: whether the file lacks it.
    """

    def __init__(self, length: int):
        self.vectors = np.zeros((0, length))
        self.used, self.unsaved = np.zeros(0, np.int64), np.zeros(0, bool)
        self.free: list[int] = []

    def taken(self, count: int) -> np.ndarray:
        """Slots for so many more."""
        before, missing = len(self.used), count - len(self.free)
        if missing > 0:
            size = power_of_two(max(before + missing, 2))
            grown = np.zeros((size, self.vectors.shape[1]))  # pages of it without vectors take no memory
            grown[:before] = self.vectors
            self.vectors = grown
            self.used = np.concatenate([self.used, np.zeros(size - before, np.int64)])
            self.unsaved = np.concatenate([self.unsaved, np.zeros(size - before, bool)])
            self.free += range(size - 1, before - 1, -1)
        return np.array([self.free.pop() for _ in range(count)], int)


class GroupStore:
    """Vectors of numbers, of which zeros at the end are left out. They come back as long as the longest of them.

    :param path: of the file; None: all stay in memory, and cannot be saved. :param most: in memory; None: all.
    :param resume: whether the file may be there.
    :raises ValueError: for a file that may not be there, that is no such database, or that another stream has open.
    """

    def __init__(self, path: str | os.PathLike | None, most: int | None, *, resume: bool):
        if path is not None and not resume and Path(path).exists():
            raise ValueError(f"file={str(path)!r} exists: pass resume=True to go on from it, or choose another name.")
        self._path, self._most, self._count, self._time = path, most, 0, 0
        self._places: dict[Any, int] = {}  # slot * len(LENGTHS) + number of the slab
        self._slabs = [_Slab(length) for length in LENGTHS]
        self._file = None if path is None else _opened(path)
        if self._file is not None:
            self._count = self._file.execute("SELECT count(*) FROM vectors").fetchone()[0]

    def __len__(self) -> int:
        return self._count

    @property
    def has_file(self) -> bool:
        return self._file is not None

    @property
    def num_bytes(self) -> int:
        """Of the vectors in memory."""
        numbers = np.fromiter(self._places.values(), np.int64, len(self._places)) % len(LENGTHS)
        return 8 * int(LENGTHS[numbers].sum())

    @property
    def labels_in_memory(self) -> list[Any]:
        """Those used last come last."""
        labels = list(self._places)
        return [labels[i] for i in np.argsort(self._last_used(labels), kind="stable")]

    def read(self, labels: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """The vectors of those labels that have one (m, w), and the places of these (m,)."""
        self._fetch([label for label in labels if label not in self._places])
        places = np.array([i for i, label in enumerate(labels) if label in self._places], int)
        known = [labels[i] for i in places]
        self._time += 1
        for slab, slots, _ in self._by_slab(known):
            slab.used[slots] = self._time
        return self._vectors(known), places

    def write(self, labels: Sequence[Any], vectors: np.ndarray) -> None:
        """Those of labels that were read before. New ones are entered."""
        self._count += sum(label not in self._places for label in labels)
        self._enter(labels, vectors, unsaved=True)

    def make_room(self) -> None:
        """Put those to the file that have not been read or written for the longest time, if they are too many."""
        if self._most is None or len(self._places) <= self._most:
            return
        labels = self.labels_in_memory
        leaving = labels[: len(labels) - self._most + int(TO_SPARE * self._most)]
        self._put(leaving)
        self._leave(leaving)

    def parts(self) -> list[list[Any]]:
        """All labels: those in the file, as many at a time as memory may have, and then those in memory."""
        inside = self.labels_in_memory
        if self._file is None or len(inside) == len(self):
            return [inside]
        known = (label for (label,) in self._file.execute("SELECT label FROM vectors"))
        outside, size = [label for label in known if label not in self._places], self._most or len(self)
        return [*(outside[start : start + size] for start in range(0, len(outside), size)), inside]

    def pieces(self, size: int) -> Iterator[tuple[list[Any], np.ndarray]]:
        """All labels and vectors, so many at a time, those in memory first. None comes to memory by it."""
        labels = list(self._places)
        for start in range(0, len(labels), size):
            some = labels[start : start + size]
            yield some, self._vectors(some)
        if self._file is None:
            return
        cursor = self._file.execute("SELECT label, vector FROM vectors")
        while found := cursor.fetchmany(size):
            others = [(label, vector) for label, vector in found if label not in self._places]
            if others:
                yield self._arrays(others)

    def save(self, state: Mapping[str, Any]) -> None:
        """Everything to the file, with a state of what :func:`files.encode` takes."""
        assert self._file is not None
        self._put(list(self._places))
        arrays: dict[str, np.ndarray] = {}
        text, stored = json.dumps(files.encode(dict(state), "state", arrays)), io.BytesIO()
        numbered: dict[str, Any] = {f"a{i}": array for i, array in enumerate(arrays.values())}
        np.savez(stored, **numbered)
        self._file.execute("DELETE FROM state")
        names = json.dumps([text, list(arrays)])
        self._file.execute("INSERT INTO state VALUES (?, ?)", (names, stored.getvalue()))
        self._file.execute("COMMIT")
        self._file.execute("BEGIN IMMEDIATE")

    def saved_state(self) -> dict[str, Any] | None:
        """None if nothing was saved."""
        found = None if self._file is None else self._file.execute("SELECT contents, arrays FROM state").fetchone()
        if found is None:
            return None
        try:
            text, names = json.loads(found[0])
            with np.load(io.BytesIO(found[1]), allow_pickle=False) as archive:
                arrays = {name: archive[f"a{i}"] for i, name in enumerate(names)}
            return files.decode(json.loads(text), arrays)
        except Exception as error:  # a damaged archive can raise nearly anything
            raise self._damaged from error

    @property
    def _damaged(self) -> ValueError:
        return ValueError(f"{self._path} is damaged: begin a new stream with another file.")

    def _arrays(self, found: list[tuple[Any, bytes]]) -> tuple[list[Any], np.ndarray]:
        """Labels and vectors."""
        try:
            vectors = [np.frombuffer(vector) for _, vector in found]
            padded = np.zeros((len(found), max(map(len, vectors))))
            for row, vector in zip(padded, vectors):
                row[: len(vector)] = vector
        except (ValueError, TypeError) as error:
            raise self._damaged from error
        return [label for label, _ in found], padded

    def close(self) -> None:
        """Leave the file as it was saved last."""
        if self._file is not None:
            self._file.close()

    def _fetch(self, labels: list[Any]) -> None:
        """To memory, from the file."""
        if self._file is None:
            return
        for start in range(0, len(labels), AT_ONCE):
            some = labels[start : start + AT_ONCE]
            query = f"SELECT label, vector FROM vectors WHERE label IN ({','.join('?' * len(some))})"
            found = self._file.execute(query, some).fetchall()
            if found:
                self._enter(*self._arrays(found), unsaved=False)

    def _put(self, labels: list[Any]) -> None:
        """To the file, what it lacks."""
        assert self._file is not None
        for slab, slots, places in self._by_slab(labels):
            wanted = slab.unsaved[slots]
            entries = ((labels[i], slab.vectors[slot].tobytes()) for i, slot in zip(places[wanted], slots[wanted]))
            self._file.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", entries)
            slab.unsaved[slots] = False

    def _enter(self, labels: Sequence[Any], vectors: np.ndarray, *, unsaved: bool) -> None:
        """Each to the slab of the least length that it fits in."""
        is_set = np.ascontiguousarray(vectors).view(np.int64) != 0  # bits: large integers may look like zeros
        numbers = np.searchsorted(LENGTHS, vectors.shape[1] - np.argmax(is_set[:, ::-1], axis=1))
        before = np.array([self._places.get(label, -1) for label in labels])
        self._leave([labels[i] for i in np.flatnonzero((before >= 0) & (before % len(LENGTHS) != numbers))])
        self._time += 1
        for number in np.unique(numbers):
            slab, at = self._slabs[number], np.flatnonzero(numbers == number)
            new = [labels[i] for i in at if labels[i] not in self._places]
            self._places.update(zip(new, (slab.taken(len(new)) * len(LENGTHS) + number).tolist()))
            slots = np.array([self._places[labels[i]] for i in at]) // len(LENGTHS)
            length = min(slab.vectors.shape[1], vectors.shape[1])
            slab.vectors[slots, :length], slab.vectors[slots, length:] = vectors[at, :length], 0
            slab.used[slots], slab.unsaved[slots] = self._time, unsaved

    def _leave(self, labels: list[Any]) -> None:
        """Their slots are for others."""
        for slab, slots, _ in self._by_slab(labels):
            slab.free += slots.tolist()
        for label in labels:
            del self._places[label]

    def _vectors(self, labels: Sequence[Any]) -> np.ndarray:
        found = [(slab.vectors[slots], places) for slab, slots, places in self._by_slab(labels)]
        vectors = np.zeros((len(labels), max((some.shape[1] for some, _ in found), default=0)))
        for some, places in found:
            vectors[places, : some.shape[1]] = some
        return vectors

    def _last_used(self, labels: Sequence[Any]) -> np.ndarray:
        last = np.zeros(len(labels), np.int64)
        for slab, slots, places in self._by_slab(labels):
            last[places] = slab.used[slots]
        return last

    def _by_slab(self, labels: Sequence[Any]) -> list[tuple[_Slab, np.ndarray, np.ndarray]]:
        """Slabs, with slots, and the places of these among the labels."""
        codes = np.array([self._places[label] for label in labels], int)
        slots, numbers = np.divmod(codes, len(LENGTHS))
        of_each = [(number, np.flatnonzero(numbers == number)) for number in np.unique(numbers)]
        return [(self._slabs[number], slots[places], places) for number, places in of_each]


def _opened(path: str | os.PathLike) -> sqlite3.Connection:
    file = sqlite3.connect(Path(path), isolation_level=None, timeout=1.0, check_same_thread=False)
    try:
        file.executescript(TABLES)
        file.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        file.close()
        raise ValueError(
            f"{path} cannot be opened ({error}): is it open in another stream? Close that first."
        ) from error
    except sqlite3.DatabaseError as error:
        file.close()
        raise ValueError(f"{path} is no file of a stream of groups ({error}): choose another name.") from error
    return file
