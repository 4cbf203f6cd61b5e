"""P8: order by key although transactions commit out of the order of row ids, on a real PostgreSQL."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inturn import Connection, Outbox
from inturn.errors import InvalidInput
from inturn.model.time import SystemClock
from inturn.outbox import store as store_module
from inturn.outbox.scan_core import Hold
from inturn.outbox.scan_session import Counts, ScanSession
from inturn.outbox.store import OutboxStore
from tests.outbox.conftest import STEADY
from tests.outbox.shop import by_key, made, opened, stored


class Steps:
    """A scanner that does a turn when the test says so."""

    def __init__(self, mq: Connection, outbox: Outbox) -> None:
        self.store: OutboxStore = outbox._store()
        seen = self.store.read_lease("steps")
        epoch = self.store.take_lease(seen, "steps", 60.0)
        assert epoch is not None
        clock = SystemClock()
        hold = Hold(epoch, STEADY.lease, clock.monotonic())
        self._session = ScanSession(self.store, mq.node, clock, STEADY, hold, f"outbox-{seen.name}", Counts())

    def turn(self) -> None:
        """Send the settled rows, and wait until all are stored."""
        while self._session.turn() or self._session.in_flight:
            if self._session.in_flight:
                self._session.wait()

    def close(self) -> None:
        self._session.end()
        self.store.close()


@pytest.fixture
def outbox(postgres_url: str) -> Outbox:
    return made(postgres_url)


@pytest.fixture
def steps(mq: Connection, outbox: Outbox) -> Iterator[Steps]:
    made_steps = Steps(mq, outbox)
    yield made_steps
    made_steps.close()


def test_a_row_waits_for_a_lower_id_whose_transaction_is_open(
    mq: Connection, outbox: Outbox, steps: Steps, postgres_url: str
) -> None:
    with opened(postgres_url) as early, opened(postgres_url) as late:
        assert outbox.put(early, "orders", b"1", key="k") == 1
        assert outbox.put(late, "orders", b"2", key="k") == 2
        late.commit()
        steps.turn()
        assert stored(mq) == [], "2 is there, but 1 may come"
        early.commit()
        steps.turn()
    assert by_key(stored(mq)) == {b"k": [1, 2]}


def test_a_lower_id_that_is_rolled_back_is_waited_for_no_longer(
    mq: Connection, outbox: Outbox, steps: Steps, postgres_url: str
) -> None:
    with opened(postgres_url) as early, opened(postgres_url) as late:
        outbox.put(early, "orders", b"1", key="k")
        outbox.put(late, "orders", b"2", key="k")
        late.commit()
        early.rollback()
        steps.turn()
    assert by_key(stored(mq)) == {b"k": [2]}


def test_a_transaction_that_stays_open_holds_back_only_what_came_after_it_began_to_put(
    mq: Connection, outbox: Outbox, steps: Steps, postgres_url: str
) -> None:
    with opened(postgres_url) as early, opened(postgres_url) as long, opened(postgres_url) as other:
        outbox.put(early, "orders", b"1", key="a")
        early.commit()
        outbox.put(long, "orders", b"2", key="b")
        outbox.put(early, "orders", b"3", key="a")
        early.commit()
        other.execute("CREATE TABLE unrelated (id int)")  # writes and has a transaction id, but puts no row
        steps.turn()
        assert by_key(stored(mq)) == {b"a": [1]}
        assert outbox.status().open_transactions == 1
        long.commit()
        steps.turn()
        assert by_key(stored(mq)) == {b"a": [1, 3], b"b": [2]}, "whatever `other` is doing"


def test_the_order_is_that_of_the_ids_also_where_transaction_numbers_say_otherwise(
    mq: Connection, outbox: Outbox, steps: Steps, postgres_url: str
) -> None:
    """The first transaction gets the lower transaction number, but waits for a row that the second transaction has
    locked. So the first transaction puts later, and the rows happened later.
    """
    with opened(postgres_url) as first, opened(postgres_url) as second:
        first.execute("CREATE TABLE accounts (id int PRIMARY KEY, balance int)")
        first.execute("INSERT INTO accounts VALUES (1, 0)")
        first.commit()
        first.execute("INSERT INTO accounts VALUES (2, 0)")  # gets the transaction number
        second.execute("UPDATE accounts SET balance = 10 WHERE id = 1")
        outbox.put(second, "orders", b"1", key="account-1")
        second.commit()
        first.execute("UPDATE accounts SET balance = 20 WHERE id = 1")
        outbox.put(first, "orders", b"2", key="account-1")
        first.commit()
        steps.turn()
    assert by_key(stored(mq)) == {b"account-1": [1, 2]}


class Writers:
    """Connections that put, commit and roll back at random. Rows are numbered in the order of ids."""

    def __init__(self, outbox: Outbox, connections: list[Any], seed: int) -> None:
        self._outbox = outbox
        self._connections = connections
        self._random = random.Random(seed)
        self._number = 0
        self._open: dict[int, list[int]] = {}
        self.committed: set[int] = set()

    def step(self) -> None:
        index = self._random.randrange(len(self._connections))
        connection, chance = self._connections[index], self._random.random()
        if chance < 0.5:
            self._open.setdefault(index, []).append(self._put(connection))
        elif chance < 0.6:
            self._put_and_undo(connection)
        elif chance < 0.9:
            connection.commit()
            self.committed.update(self._open.pop(index, []))
        else:
            connection.rollback()
            self._open.pop(index, None)

    def end(self) -> None:
        for index, connection in enumerate(self._connections):
            connection.commit()
            self.committed.update(self._open.pop(index, []))

    def _put(self, connection: Any) -> int:
        self._number += 1
        self._outbox.put(connection, "orders", b"%d" % self._number, key=self._random.choice("abc"))
        return self._number

    def _put_and_undo(self, connection: Any) -> None:
        with connection.transaction(force_rollback=True):  # a savepoint, if a transaction has begun
            self._put(connection)


def play(mq: Connection, outbox: Outbox, steps: Steps, url: str, seed: int) -> Writers:
    with opened(url) as one, opened(url) as two, opened(url) as three:
        writers = Writers(outbox, [one, two, three], seed)
        chance = random.Random(-seed)
        for _ in range(60):
            writers.step()
            if chance.random() < 0.4:
                steps.turn()
        writers.end()
        steps.turn()
    return writers


@pytest.mark.parametrize("seed", range(1, 13))
def test_whatever_the_order_of_commits_keys_are_stored_in_the_order_of_ids(
    mq: Connection, outbox: Outbox, steps: Steps, postgres_url: str, seed: int
) -> None:
    writers = play(mq, outbox, steps, postgres_url, seed)
    found = by_key(stored(mq))
    assert {number for numbers in found.values() for number in numbers} == writers.committed
    for numbers in found.values():
        assert numbers == sorted(set(numbers))


def test_a_scanner_that_does_not_look_at_open_transactions_would_be_found_out(
    mq: Connection, outbox: Outbox, steps: Steps, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the test above can fail."""
    monkeypatch.setattr(store_module, "settled_id", lambda newest, lows: newest)
    play(mq, outbox, steps, postgres_url, 1)
    assert any(numbers != sorted(numbers) for numbers in by_key(stored(mq)).values()) or outbox.status().waiting


def test_a_table_without_its_trigger_is_not_scanned(mq: Connection, outbox: Outbox, postgres_url: str) -> None:
    with opened(postgres_url) as connection:
        connection.execute("ALTER TABLE inturn_outbox DISABLE TRIGGER inturn_outbox_open")
        connection.commit()
    with pytest.raises(InvalidInput, match="lacks the trigger inturn_outbox_open"):
        outbox.scan(mq).start()


def test_a_role_that_may_only_insert_can_put(mq: Connection, outbox: Outbox, postgres_url: str) -> None:
    with opened(postgres_url) as connection:
        connection.execute("DROP ROLE IF EXISTS app")
        connection.execute("CREATE ROLE app LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA public TO app")
        connection.execute("GRANT INSERT, SELECT (id) ON inturn_outbox TO app")
        connection.commit()
    with opened(postgres_url.replace("inturn@", "app@")) as connection:
        outbox.put(connection, "orders", b"1", key="k")
        connection.commit()
    assert outbox.scan(mq, STEADY).run_once().sent == 1
    with opened(postgres_url) as connection:
        connection.execute("DROP OWNED BY app; DROP ROLE app")
        connection.commit()


def test_writers_that_lock_what_they_change_are_heard_in_their_order(mq: Connection, url: str) -> None:
    """Threads: every thread locks an account, counts the account up, and puts the count.

    The log has the counts in order.
    """
    outbox = made(url)
    with opened(url) as connection:
        connection.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, count INTEGER NOT NULL)")
        for account in range(3):
            connection.execute(f"INSERT INTO accounts VALUES ({account}, 0)")
        connection.commit()
    threads = [threading.Thread(target=_count_up, args=(outbox, url, seed)) for seed in range(4)]
    with outbox.scan(mq, STEADY):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    outbox.scan(mq, STEADY).run_once(wait_s=40.0)
    found = by_key(stored(mq))
    assert sum(len(counts) for counts in found.values()) == 4 * 25
    for counts in found.values():
        assert counts == list(range(1, len(counts) + 1))


def _count_up(outbox: Outbox, url: str, seed: int) -> None:
    chance = random.Random(seed)
    with opened(url) as connection:
        for _ in range(25):
            account = chance.randrange(3)
            connection.execute(f"UPDATE accounts SET count = count + 1 WHERE id = {account}")
            (count,) = connection.execute(f"SELECT count FROM accounts WHERE id = {account}").fetchone()
            outbox.put(connection, "orders", b"%d" % count, key=f"account-{account}")
            connection.commit()
