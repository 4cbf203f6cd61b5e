"""The outbox of a producer: what it could not send is kept here, and a scanner in the same process sends it later."""

from __future__ import annotations

from collections.abc import Sequence

from inturn.model.clock import Clock
from inturn.model.commands import Node
from inturn.outbox.row import json_text
from inturn.outbox.scanner import Scanner
from inturn.outbox.settings import OutboxSettings
from inturn.outbox.store import OutboxStore
from inturn.producer.keeping import KeptRow


class LocalOutbox:
    """A `Keeper`. Its scanner takes part in the one lease of the outbox, so several producers may share one."""

    def __init__(self, store: OutboxStore, node: Node, clock: Clock, settings: OutboxSettings) -> None:
        store.create()
        self._store = store
        self._scanner = Scanner(store, node, settings, clock)
        self._scanner.start()

    def waiting(self) -> list[tuple[str, bytes, int]]:
        return self._store.waiting_keys()

    def keep(self, rows: Sequence[KeptRow]) -> list[int]:
        ids = self._store.add([_values(row) for row in rows])
        self._scanner.wake()
        return ids

    def gone(self, row_ids: Sequence[int]) -> set[int]:
        return self._store.gone(row_ids)

    def close(self) -> None:
        self._scanner.stop()
        self._store.close()


def _values(row: KeptRow) -> dict[str, object]:
    message = row.message
    return {
        "subject": row.subject,
        "key": message.key,
        "body": message.body,
        "tags": json_text(message.tags),
        "properties": json_text(message.properties),
        "message_id": message.message_id,
        "partition": row.partition,
        "created_at_ms": message.born_at_ms,
    }
