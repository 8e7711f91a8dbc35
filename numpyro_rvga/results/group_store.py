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
TABLES = """
CREATE TABLE IF NOT EXISTS vectors (label PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (contents TEXT NOT NULL, arrays BLOB NOT NULL);
"""


class GroupStore:
    """Vectors of one length.

    :param path: of the file; None: all stay in memory, and cannot be saved. :param most: in memory; None: all.
    :param resume: whether the file may be there.
    :raises ValueError: for a file that may not be there, that is no such database, or that another stream has open.
    """

    def __init__(self, path: str | os.PathLike | None, most: int | None, *, resume: bool):
        if path is not None and not resume and Path(path).exists():
            raise ValueError(f"file={str(path)!r} exists: pass resume=True to go on from it, or choose another name.")
        self._path, self._most, self._count = path, most, 0
        self._slots: dict[Any, int] = {}
        self._free: list[int] = []
        self._vectors = np.zeros((0, 0))
        self._used, self._unsaved, self._time = np.zeros(0, np.int64), np.zeros(0, bool), 0
        self._file = None if path is None else _opened(path)
        if self._file is not None:
            self._count = self._file.execute("SELECT count(*) FROM vectors").fetchone()[0]

    def __len__(self) -> int:
        return self._count

    @property
    def has_file(self) -> bool:
        return self._file is not None

    @property
    def labels_in_memory(self) -> list[Any]:
        """Those used last come last."""
        return sorted(self._slots, key=lambda label: self._used[self._slots[label]])

    def read(self, labels: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """The vectors of those labels that have one (m, w), and the places of these (m,)."""
        self._fetch([label for label in labels if label not in self._slots])
        places = np.array([i for i, label in enumerate(labels) if label in self._slots], int)
        return self._vectors[self._slots_of([labels[i] for i in places])], places

    def write(self, labels: Sequence[Any], vectors: np.ndarray) -> None:
        """Those of labels that were read before. New ones are entered."""
        new = [label for label in labels if label not in self._slots]
        self._count += len(new)
        self._enter(new, vectors.shape[1])
        slots = self._slots_of(labels)
        self._vectors[slots], self._unsaved[slots] = vectors, True

    def make_room(self) -> None:
        """Put those to the file that have not been read or written for the longest time, if they are too many."""
        if self._most is None or len(self._slots) <= self._most:
            return
        labels = list(self._slots)
        last = self._used[self._slots_of(labels)]
        count = len(labels) - self._most + int(TO_SPARE * self._most)
        leaving = [labels[i] for i in np.argsort(last, kind="stable")[:count]]
        self._put(leaving)
        self._free += [self._slots.pop(label) for label in leaving]

    def parts(self) -> list[list[Any]]:
        """All labels: those in the file, as many at a time as memory may have, and then those in memory."""
        inside = self.labels_in_memory
        if self._file is None or len(inside) == len(self):
            return [inside]
        known = (label for (label,) in self._file.execute("SELECT label FROM vectors"))
        outside, size = [label for label in known if label not in self._slots], self._most or len(self)
        return [*(outside[start : start + size] for start in range(0, len(outside), size)), inside]

    def pieces(self, size: int) -> Iterator[tuple[list[Any], np.ndarray]]:
        """All labels and vectors, so many at a time, those in memory first. None comes to memory by it."""
        labels = list(self._slots)
        for start in range(0, len(labels), size):
            some = labels[start : start + size]
            yield some, self._vectors[[self._slots[label] for label in some]]
        if self._file is None:
            return
        cursor = self._file.execute("SELECT label, vector FROM vectors")
        while found := cursor.fetchmany(size):
            others = [(label, vector) for label, vector in found if label not in self._slots]
            if others:
                yield self._arrays(others)

    def save(self, state: Mapping[str, Any]) -> None:
        """Everything to the file, with a state of what :func:`files.encode` takes."""
        assert self._file is not None
        self._put([label for label, slot in self._slots.items() if self._unsaved[slot]])
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
            return [label for label, _ in found], np.stack([np.frombuffer(vector) for _, vector in found])
        except (ValueError, TypeError) as error:
            raise self._damaged from error

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
                known, vectors = self._arrays(found)
                self._enter(known, vectors.shape[1])
                slots = [self._slots[label] for label in known]
                self._vectors[slots], self._unsaved[slots] = vectors, False

    def _put(self, labels: list[Any]) -> None:
        """To the file, what it lacks."""
        assert self._file is not None
        unsaved = [label for label in labels if self._unsaved[self._slots[label]]]
        entries = ((label, self._vectors[self._slots[label]].tobytes()) for label in unsaved)
        self._file.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", entries)
        self._unsaved[[self._slots[label] for label in unsaved]] = False

    def _enter(self, labels: list[Any], width: int) -> None:
        """Give them slots."""
        needed = len(self._slots) + len(labels)
        if needed > len(self._vectors):
            before, size = len(self._vectors), power_of_two(max(needed, 2))
            grown = np.zeros((size, width))
            grown[:before] = self._vectors if before else 0
            self._vectors = grown
            self._used = np.concatenate([self._used, np.zeros(size - before, np.int64)])
            self._unsaved = np.concatenate([self._unsaved, np.zeros(size - before, bool)])
            self._free += range(size - 1, before - 1, -1)
        for label in labels:
            self._slots[label] = self._free.pop()

    def _slots_of(self, labels: Sequence[Any]) -> list[int]:
        """Which are then used."""
        slots = [self._slots[label] for label in labels]
        self._time += 1
        self._used[slots] = self._time
        return slots


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
