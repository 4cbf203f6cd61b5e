"""M4, M5: partitions are added while producers and consumers run, and the order of every key holds."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from inturn import Connection, Context, LogSettings, Message
from inturn.errors import InvalidInput, NotFound
from inturn.model.routing import slot_of
from inturn.protocol.commands import GroupDescription
from tests.contract.bed import WAIT_S, Bed, Seen, eventually, quick

KEYS = [f"key-{number}".encode() for number in range(40)]


class Keeps:
    """Records the numbers of every key, and fails or waits as the test says."""

    def __init__(self) -> None:
        self.numbers: defaultdict[bytes, list[int]] = defaultdict(list)
        self.partitions: set[int] = set()
        self.failing: set[bytes] = set()
        self.waits = threading.Event()
        self.waits.set()

    def __call__(self, message: Message, context: Context) -> None:
        assert message.key is not None
        self.waits.wait(30)
        if message.key in self.failing:
            raise ValueError("not now")
        self.partitions.add(message.partition)
        self.numbers[message.key].append(int(message.body))

    def count(self) -> int:
        return sum(map(len, self.numbers.values()))


def send(mq: Connection, first: int, rounds: int) -> None:
    with mq.producer() as producer:
        for number in range(first, first + rounds):
            for key in KEYS:
                producer.send("order.book", b"%d" % number, key=key)


def group_of(mq: Connection, group: str = "notify") -> GroupDescription:
    """The group exists after the first heartbeat of a member."""
    found: list[GroupDescription] = []

    def is_there() -> bool:
        try:
            found.append(mq.group("order.book", group).describe())
        except NotFound:
            return False
        return True

    eventually(is_there, "the group is there")
    return found[-1]


def in_order(keeps: Keeps, rounds: int, keys: list[bytes] = KEYS) -> bool:
    return all(keeps.numbers[key] == list(range(rounds)) for key in keys)


@pytest.fixture
def book(mq: Connection) -> Connection:
    mq.create_subject("order.book", partitions=2)
    return mq


def test_a_subject_grows_twice_under_producers_and_a_group_that_lags(book: Connection) -> None:
    keeps = Keeps()
    keeps.waits.clear()
    with book.consumer("order.book", "notify", keeps, order="key", settings=quick(concurrency=4)):
        send(book, 0, 5)
        assert book.grow_subject("order.book", 4).partition_count == 4
        send(book, 5, 5)
        grown = book.grow_subject("order.book", 8)
        send(book, 10, 5)
        assert grown.route.version == 3
        shut = [one for one in group_of(book).partitions if one.gate is not None]
        assert {one.partition for one in shut} == {2, 3, 4, 5, 6, 7}
        keeps.waits.set()
        eventually(lambda: keeps.count() >= 15 * len(KEYS), "it comes to that")
        eventually(lambda: group_of(book).lag == 0, "it comes to that")
    assert in_order(keeps, 15)
    assert keeps.partitions == set(range(8))


def test_a_producer_goes_on_through_the_switch(book: Connection) -> None:
    """No message is lost, doubled or overtaken, whatever the producer was doing at the switch."""
    keeps = Keeps()
    with book.consumer("order.book", "notify", keeps, order="key", settings=quick(concurrency=4)):
        with book.producer() as producer:
            for number in range(60):
                for key in KEYS:
                    producer.send("order.book", b"%d" % number, key=key)
                if number in (20, 40):
                    book.grow_subject("order.book", 3 if number == 20 else 6)
        eventually(lambda: keeps.count() >= 60 * len(KEYS), "it comes to that")
    assert in_order(keeps, 60)
    ends = book.describe_subject("order.book").partitions
    assert sum(one.end_offset for one in ends) == 60 * len(KEYS)
    assert len(ends) == 6


def test_the_handle_of_a_message_says_where_it_went(book: Connection) -> None:
    with book.producer() as producer:
        producer.send_sync("order.book", b"0", key=KEYS[0])
        route = book.grow_subject("order.book", 8).route
        handles = [producer.send("order.book", b"1", key=key) for key in KEYS]
        for key, handle in zip(KEYS, handles, strict=True):
            assert handle.result(WAIT_S).partition == route.by_slot[slot_of(key)]


def test_one_blocked_key_holds_back_only_the_child_that_it_moved_to(book: Connection) -> None:
    keeps = Keeps()
    send(book, 0, 3)
    route = book.grow_subject("order.book", 4).route
    blocked = next(key for key in KEYS if route.by_slot[slot_of(key)] == 2)
    send(book, 3, 3)
    keeps.failing.add(blocked)
    others = [key for key in KEYS if route.by_slot[slot_of(key)] != 2]
    with book.consumer("order.book", "notify", keeps, order="key", settings=quick(concurrency=4)):
        eventually(lambda: in_order(keeps, 6, others), "it comes to that")
        (shut,) = [one for one in group_of(book).partitions if one.gate is not None]
        assert shut.partition == 2
        assert shut.gate is not None
        assert shut.gate.offset is not None
        keeps.failing.clear()
        eventually(lambda: keeps.count() >= 6 * len(KEYS), "it comes to that")
    assert in_order(keeps, 6)


def test_a_parked_key_follows_its_slot_and_holds_back_nothing(book: Connection) -> None:
    keeps = Keeps()
    send(book, 0, 3)
    route = book.grow_subject("order.book", 4).route
    parked = next(key for key in KEYS if route.by_slot[slot_of(key)] == 3)
    keeps.failing.add(parked)
    settings = quick(concurrency=4, max_attempts=1, on_exhausted="park")
    with book.consumer("order.book", "notify", keeps, order="key", settings=settings):
        eventually(lambda: in_order(keeps, 3, [key for key in KEYS if key != parked]), "it comes to that")
        eventually(
            lambda: not any(one.gate for one in group_of(book).partitions),
            "it comes to that",
        )
        send(book, 3, 3)
        eventually(lambda: group_of(book).lag == 0, "it comes to that")
        assert keeps.numbers[parked] == []
        (told,) = book.group("order.book", "notify").keys()
        assert (told.key, told.partition, told.state, told.waiting) == (parked, 3, "parked", 5)
        book.group("order.book", "notify").skip(parked, why="it is broken")
        keeps.failing.clear()
        book.group("order.book", "notify").resume(parked, why="mended")
        eventually(lambda: len(keeps.numbers[parked]) == 5, "it comes to that")
        eventually(lambda: book.group("order.book", "notify").keys() == [], "it comes to that")
    assert keeps.numbers[parked] == [1, 2, 3, 4, 5]
    assert in_order(keeps, 6, [key for key in KEYS if key != parked])


def test_a_key_whose_child_is_shut_is_steered_where_it_is(book: Connection) -> None:
    keeps = Keeps()
    send(book, 0, 2)
    route = book.grow_subject("order.book", 4).route
    send(book, 2, 2)
    key = next(key for key in KEYS if route.by_slot[slot_of(key)] == 2)
    keeps.failing.add(key)
    settings = quick(concurrency=4, max_attempts=1, on_exhausted="block")
    with book.consumer("order.book", "notify", keeps, order="key", settings=settings):
        group_of(book)
        eventually(
            lambda: any(one.state == "blocked" for one in book.group("order.book", "notify").keys()), "it comes to that"
        )
        keeps.failing.clear()
        book.group("order.book", "notify").skip(key, why="broken")
        eventually(lambda: keeps.count() >= 4 * len(KEYS) - 1, "it comes to that")
    assert keeps.numbers[key] == [1, 2, 3]


def test_a_group_that_begins_later_reads_parents_before_children(book: Connection) -> None:
    send(book, 0, 4)
    book.grow_subject("order.book", 5)
    send(book, 4, 4)
    keeps = Keeps()
    with book.consumer("order.book", "late", keeps, order="key", settings=quick(concurrency=4)):
        eventually(lambda: keeps.count() >= 8 * len(KEYS), "it comes to that")
    assert in_order(keeps, 8)
    newest = Seen()
    with book.consumer("order.book", "newest", newest, order="key", start="last", settings=quick()):
        eventually(lambda: len(group_of(book, "newest").members) == 1, "it comes to that")
        eventually(lambda: all(one.owner for one in group_of(book, "newest").partitions), "it comes to that")
        send(book, 8, 1)
        eventually(lambda: len(newest.bodies) == len(KEYS), "it comes to that")
    assert set(newest.bodies) == {b"8"}


def test_a_reset_goes_back_over_parents_and_children_in_order(book: Connection) -> None:
    send(book, 0, 3)
    book.grow_subject("order.book", 4)
    send(book, 3, 3)
    first = Keeps()
    with book.consumer("order.book", "notify", first, order="key", settings=quick(concurrency=4)):
        eventually(lambda: first.count() >= 6 * len(KEYS), "it comes to that")
    book.group("order.book", "notify").reset("first")
    again = Keeps()
    with book.consumer("order.book", "notify", again, order="key", settings=quick(concurrency=4)):
        eventually(lambda: again.count() >= 6 * len(KEYS), "it comes to that")
    assert in_order(again, 6)


def test_order_by_partition_holds_across_growth(book: Connection) -> None:
    keeps = Keeps()
    send(book, 0, 3)
    book.grow_subject("order.book", 6)
    send(book, 3, 3)
    with book.consumer("order.book", "notify", keeps, settings=quick()):
        eventually(lambda: keeps.count() >= 6 * len(KEYS), "it comes to that")
    assert in_order(keeps, 6)


def test_the_same_again_is_no_error(book: Connection) -> None:
    grown = book.grow_subject("order.book", 4)
    assert book.grow_subject("order.book", 4) == grown
    assert book.create_subject("order.book", partitions=2) == grown, "it has grown since"


def test_what_cannot_grow_is_told_so(book: Connection) -> None:
    with pytest.raises(InvalidInput, match="it can grow, not shrink"):
        book.grow_subject("order.book", 1)
    with pytest.raises(InvalidInput, match="1025"):
        book.grow_subject("order.book", 1025)
    with pytest.raises(NotFound, match="nowhere"):
        book.grow_subject("nowhere", 4)
    book.create_subject("chosen", partitions=2, routing="selector")
    with pytest.raises(InvalidInput, match="selector"):
        book.grow_subject("chosen", 4)


def test_a_reader_goes_on_into_new_partitions(book: Connection) -> None:
    send(book, 0, 2)
    reader = book.reader("order.book")
    rows = iter(reader)
    read = [next(rows)]
    book.grow_subject("order.book", 8)
    send(book, 2, 2)
    read += rows
    assert len(read) == 4 * len(KEYS)
    assert {message.partition for message in read} == set(range(8))
    numbers = {key: [int(message.body) for message in read if message.key == key] for key in KEYS}
    assert all(sorted(found) == [0, 1, 2, 3] for found in numbers.values())
    assert list(reader) == []


def test_what_retention_took_of_a_parent_holds_no_child_back(bed: Bed, quiet: None) -> None:
    """M5: for a group that has not started, and for a group with a blocked key whose messages were removed."""
    log = LogSettings(flush="os", segment_bytes=2_000, retention_bytes=8_000)  # type: ignore[arg-type]
    mq = bed.open(log=log)
    mq.create_subject("order.book", partitions=2)
    send(mq, 0, 5)
    blocked, behind = Keeps(), Keeps()
    blocked.failing = {KEYS[0]}
    with mq.consumer("order.book", "notify", blocked, order="key", settings=quick(backoff_min_s=20)):
        eventually(lambda: blocked.count() == 5 * (len(KEYS) - 1), "all but one key")
    send(mq, 5, 50)
    mq.grow_subject("order.book", 4)
    send(mq, 55, 2)
    mq = bed.reopen(log=log)  # reopening applies retention
    assert all(one.start_offset > 5 * len(KEYS) for one in mq.describe_subject("order.book").partitions[:2])
    late = Keeps()
    with (
        mq.consumer("order.book", "notify", behind, order="key", settings=quick()),
        mq.consumer("order.book", "late", late, order="key", settings=quick()),
    ):
        for group in ("notify", "late"):
            eventually(lambda group=group: group_of(mq, group).lag == 0, "everything that is there")  # type: ignore[misc]
    for keeps in (behind, late):
        assert keeps.partitions == {0, 1, 2, 3}
        for key in KEYS:
            numbers = keeps.numbers[key]
            assert numbers == list(range(numbers[0], 57)), "in order, without a gap"
