"""Vectors of numbers by key: in memory, and in a file those that have not been asked for for the longest time.

The file is an SQLite database. What is written to it becomes part of it when it is saved, with the state of the stream,
as one transaction: a process that is killed leaves what was saved last.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import weakref
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ... import files
from ...options import Info

AT_ONCE = 500  # keys of a query
TO_SPARE = 0.25  # of the vectors in memory, which leave it together
TABLES = """
CREATE TABLE IF NOT EXISTS vectors (label PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (contents TEXT NOT NULL, arrays BLOB NOT NULL);
"""


class GroupStore:
    """Vectors of numbers, of which zeros at the end are left out. They come back as long as the longest of them.

    :param path: of the file; None: all stay in memory, and cannot be saved. :param most: in memory; None: all.
    :param resume: whether the file may be there.
    :raises ValueError: for a file that may not be there, that is no such database, or that another stream has open.
    """

    def __init__(self, path: str | os.PathLike | None, most: int | None, *, resume: bool):
        if path is not None and not resume and Path(path).exists():
            raise ValueError(f"file={str(path)!r} exists: pass resume=True to go on from it, or choose another name.")
        self._path, self._most, self._count = path, most, 0
        self._vectors: dict[Hashable, bytes] = {}  # those used last come last
        self._unsaved: set[Hashable] = set()  # labels whose vector the file lacks
        self._file = None if path is None else _opened(path)
        if self._file is not None:
            weakref.finalize(self, self._file.close)  # others may open the file of a stream that nobody has any more
            self._count = self._file.execute("SELECT count(*) FROM vectors").fetchone()[0]

    def __len__(self) -> int:
        return self._count

    @property
    def has_file(self) -> bool:
        return self._file is not None

    @property
    def num_bytes(self) -> int:
        """The size of the vectors in memory."""
        return sum(map(len, self._vectors.values()))

    @property
    def labels_in_memory(self) -> list[Hashable]:
        """Labels of the vectors in memory, those used last at the end."""
        return list(self._vectors)

    def read(self, labels: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
        """The vectors of those labels that have one (m, w), and the places of these (m,)."""
        self._fetch([label for label in labels if label not in self._vectors])
        places = [i for i, label in enumerate(labels) if label in self._vectors]
        present = [labels[i] for i in places]
        for label in present:
            self._vectors[label] = self._vectors.pop(label)
        return _padded([self._vectors[label] for label in present]), np.array(places, int)

    def write(self, labels: Sequence[Hashable], vectors: np.ndarray) -> None:
        """Write the vectors of labels that were read before, or are new."""
        self._count += sum(label not in self._vectors for label in labels)
        for label, vector in zip(labels, _without_last_zeros(vectors)):
            self._vectors.pop(label, None)
            self._vectors[label] = vector
        if self._file is not None:
            self._unsaved.update(labels)

    def make_room(self) -> None:
        """Put those to the file that have not been read or written for the longest time, if they are too many."""
        if self._most is None or len(self._vectors) <= self._most:
            return
        leaving = self.labels_in_memory[: len(self._vectors) - self._most + int(TO_SPARE * self._most)]
        self._put(leaving)
        for label in leaving:
            del self._vectors[label]

    def parts(self) -> list[list[Hashable]]:
        """All labels: those in the file, as many at a time as memory may have, and then those in memory."""
        inside = self.labels_in_memory
        if self._file is None or len(inside) == len(self):
            return [inside]
        stored = (label for (label,) in self._file.execute("SELECT label FROM vectors"))
        outside, size = [label for label in stored if label not in self._vectors], self._most or len(self)
        return [*(outside[start : start + size] for start in range(0, len(outside), size)), inside]

    def pieces(self, size: int) -> Iterator[tuple[list[Hashable], np.ndarray]]:
        """All labels and vectors, so many at a time, those in memory first. None comes to memory by it."""
        labels = self.labels_in_memory
        for start in range(0, len(labels), size):
            some = labels[start : start + size]
            yield some, _padded([self._vectors[label] for label in some])
        if self._file is None:
            return
        cursor = self._file.execute("SELECT label, vector FROM vectors")
        while fetched := cursor.fetchmany(size):
            others = {label: self._checked(vector) for label, vector in fetched if label not in self._vectors}
            if others:
                yield list(others), _padded(list(others.values()))

    def save(self, state: Info) -> None:
        """Everything to the file, with a state of what :func:`files.encode` takes."""
        assert self._file is not None
        self._put(list(self._unsaved))
        arrays: dict[str, np.ndarray] = {}
        text, stored = json.dumps(files.encode(dict(state), "state", arrays)), io.BytesIO()
        numbered: dict[str, Any] = {f"a{i}": array for i, array in enumerate(arrays.values())}
        np.savez(stored, **numbered)
        self._file.execute("DELETE FROM state")
        names = json.dumps([text, list(arrays)])
        self._file.execute("INSERT INTO state VALUES (?, ?)", (names, stored.getvalue()))
        self._file.execute("COMMIT")
        self._file.execute("BEGIN IMMEDIATE")

    def saved_state(self) -> Info | None:
        """None if nothing was saved."""
        row = None if self._file is None else self._file.execute("SELECT contents, arrays FROM state").fetchone()
        if row is None:
            return None
        try:
            text, names = json.loads(row[0])
            with np.load(io.BytesIO(row[1]), allow_pickle=False) as archive:
                arrays = {name: archive[f"a{i}"] for i, name in enumerate(names)}
            return files.decode(json.loads(text), arrays)
        except Exception as error:  # a damaged archive can raise nearly anything
            raise self._damaged from error

    @property
    def _damaged(self) -> ValueError:
        return ValueError(f"{self._path} is damaged: begin a new stream with another file.")

    def _checked(self, vector: Any) -> bytes:
        """A vector as the file has it."""
        if not isinstance(vector, bytes) or len(vector) % 8:
            raise self._damaged
        return vector

    def close(self) -> None:
        """Leave the file as it was saved last."""
        if self._file is not None:
            self._file.close()

    def _fetch(self, labels: list[Hashable]) -> None:
        """Read vectors from the file to memory."""
        if self._file is None:
            return
        for start in range(0, len(labels), AT_ONCE):
            some = labels[start : start + AT_ONCE]
            query = f"SELECT label, vector FROM vectors WHERE label IN ({','.join('?' * len(some))})"
            fetched = self._file.execute(query, some).fetchall()
            self._vectors.update((label, self._checked(vector)) for label, vector in fetched)

    def _put(self, labels: list[Hashable]) -> None:
        """Write to the file those of the vectors that it lacks."""
        assert self._file is not None
        unsaved = self._unsaved.intersection(labels)
        entries = ((label, self._vectors[label]) for label in unsaved)
        self._file.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", entries)
        self._unsaved -= unsaved


def _without_last_zeros(vectors: np.ndarray) -> list[bytes]:
    """The numbers of each vector (n, w) up to the last whose bits are not zero: large integers may look like zeros."""
    is_set = np.ascontiguousarray(vectors).view(np.int64) != 0
    lengths = np.max(is_set * np.arange(1, vectors.shape[1] + 1), axis=1, initial=0)
    return [vector[:length].tobytes() for vector, length in zip(vectors, lengths)]


def _padded(vectors: Sequence[bytes]) -> np.ndarray:
    """As an array (n, w), w the length of the longest of them."""
    lengths = np.array([len(vector) // 8 for vector in vectors], int)
    padded = np.zeros((len(vectors), lengths.max(initial=0)))
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(vectors))
    return padded


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
