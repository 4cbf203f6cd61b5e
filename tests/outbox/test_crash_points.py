"""P8: a scanner dies before or after every visible step. Every row is still stored once, and in order."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from inturn import Connection, Outbox, OutboxSettings
from inturn.errors import Closed, InturnError
from inturn.model.time import SystemClock
from inturn.outbox import scan_session as shift_module
from inturn.outbox.scan_core import Hold
from inturn.outbox.scan_session import Counts, ScanSession
from inturn.outbox.store import OutboxStore
from inturn.protocol.commands import Append, Command, Reply
from tests.outbox.shop import check_once_and_in_order, made, opened, stored

ROWS = 12
SETTINGS = OutboxSettings(poll_s=0.001, batch=4, in_flight=8, lane=4)


class Death:
    """Counts the steps of a scanner. At the given step the scanner dies, before or after the step."""

    def __init__(self, step: int, is_done: bool) -> None:
        self._left = step
        self._is_done = is_done

    @property
    def has_come(self) -> bool:
        return self._left <= 0

    def may_do(self) -> bool:
        """Whether the scanner lives for this step."""
        self._left -= 1
        return self._left > 0 or (self._left == 0 and self._is_done)


class DyingNode:
    """After death no append is answered, and all other commands fail with Closed."""

    def __init__(self, mq: Connection, death: Death) -> None:
        self._node = mq.node
        self._death = death

    def submit(self, command: Command, reply: Reply) -> None:
        def tell(answer: Any) -> None:
            if not self._death.has_come:
                reply(answer)
            elif not isinstance(command, Append):
                reply(Closed("dead"))

        if self._death.may_do():
            self._node.submit(command, tell)
        else:
            tell(None)


class DyingStore:
    """Every call that changes the store is a step."""

    def __init__(self, store: OutboxStore, death: Death) -> None:
        self._store = store
        self._death = death

    def settle(self, *arguments: Any) -> None:
        if self._death.may_do():
            self._store.settle(*arguments)
        if self._death.has_come:
            raise Closed("dead")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def scan(mq: Connection, store: OutboxStore, death: Death | None = None) -> Counts:
    """Scan until no row is left to send, or until the scanner dies."""
    seen = store.read_lease("points")
    epoch = store.take_lease(seen, "somebody", 60.0)
    assert epoch is not None
    clock, counts = SystemClock(), Counts()
    hold = Hold(epoch, SETTINGS.lease, clock.monotonic())
    node: Any = mq.node if death is None else DyingNode(mq, death)
    used: Any = store if death is None else DyingStore(store, death)
    with contextlib.suppress(InturnError):
        session = ScanSession(used, node, clock, SETTINGS, hold, f"outbox-{seen.name}", counts)
        try:
            while session.turn() or session.in_flight:
                if death is not None and death.has_come:
                    break
                if session.in_flight:
                    session.wait()
        finally:
            session.end()
    return counts


def fill(outbox: Outbox, url: str, subject: str) -> None:
    with opened(url) as connection:
        for number in range(ROWS):
            outbox.put(connection, subject, b"%d" % number, key=f"key-{number % 3}")
        connection.commit()


@pytest.mark.parametrize("is_done", [False, True], ids=["before the step", "after it"])
def test_a_death_at_any_step_neither_loses_nor_repeats_a_row(
    mq: Connection, tmp_path: Path, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shift_module, "SYNC_S", 0.0)
    recalled = 0
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    outbox = made(url)
    with opened(url) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # quicker
    store = outbox._store()
    for step in range(1, 200):
        death = Death(step, is_done)
        subject = f"step-{step}"
        mq.create_subject(subject, partitions=2)
        fill(outbox, url, subject)
        scan(mq, store, death)
        if death.has_come:
            scan(mq, store, Death(step // 2 + 1, not is_done))  # the next scanner dies, too
        recalled += scan(mq, store).recovered
        assert store.count()[0] == 0
        assert store.find_lease().recovery == {}  # type: ignore[union-attr]
        check_once_and_in_order(stored(mq, subject), ROWS)
        if not death.has_come:
            break
    else:
        pytest.fail("there are more steps than that")
    store.close()
    assert step > 10
    assert recalled > 0, "some of them died between storing and deleting"
