"""A board in a store: values of any size under a name, put once and read by every rank."""

from __future__ import annotations

import pickle
from typing import Any

PIECE = 4 << 20  # bytes; torch's TCPStore closes the connection on a value of more than 8 MiB


class Board:
    """One connection to the board; a thread needs its own."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._put: list[str] = []
        self._old: list[str] = []

    def put(self, name: str, value: Any) -> None:
        """Readable once all its pieces are there."""
        data = pickle.dumps(value)
        pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{name}.{number}", piece)
        self._put += [name, *(f"{name}.{number}" for number in range(len(pieces)))]
        self._store.set(name, str(len(pieces)))

    def has(self, name: str) -> bool:
        return bool(self._store.check([name]))

    def get(self, name: str) -> Any:
        """The value; waits for it as long as the store does."""
        pieces = range(int(self._store.get(name)))
        return pickle.loads(b"".join(self._store.get(f"{name}.{number}") for number in pieces))

    def turn(self) -> None:
        """Everybody has come to a common point: remove what was put before the last one."""
        for name in self._old:
            self._store.delete_key(name)
        self._put, self._old = [], self._put
