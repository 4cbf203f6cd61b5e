"""Look-ups whose answer never changes once it is committed."""

from __future__ import annotations

from typing import Generic, TypeVar

from inturn.state.database import Database

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Forgets everything when a transaction is rolled back: what it learnt may have been part of that."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rollback_count = database.rollback_count
        self._values: dict[Key, Value] = {}

    def get(self, key: Key) -> Value | None:
        """Waits for the transaction of another thread, so that only committed answers are seen."""
        with self._database.lock:
            self._forget_rolled_back()
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Call it in the transaction that read or wrote the value."""
        self._forget_rolled_back()
        self._values[key] = value

    def _forget_rolled_back(self) -> None:
        if self._rollback_count != self._database.rollback_count:
            self._rollback_count = self._database.rollback_count
            self._values.clear()
