"""Producing: routing, order, names, limits."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from inturn import Connection, Limits, ProducerSettings, slot_of
from inturn.model.errors import Closed, InvalidInput, LimitExceeded, NotFound, ProducerFenced
from tests.contract.bed import WAIT_S, Bed, Witness


def stored_bodies(mq: Connection, subject: str = "orders") -> list[bytes]:
    return [message.body for message in mq.reader(subject)]


def test_messages_of_a_key_are_stored_in_the_order_they_were_sent(mq: Connection) -> None:
    """P1."""
    with mq.producer() as producer:
        for number in range(500):
            producer.send("orders", b"%d" % number, key=f"key-{number % 7}")
    by_key: dict[bytes | None, list[int]] = defaultdict(list)
    places: dict[bytes | None, set[int]] = defaultdict(set)
    for message in mq.reader("orders"):
        by_key[message.key].append(int(message.body))
        places[message.key].add(message.partition)
    assert len(by_key) == 7
    for key, numbers in by_key.items():
        assert numbers == sorted(numbers)
        assert len(places[key]) == 1
    assert sum(map(len, by_key.values())) == 500


def test_several_threads_each_keep_the_order_of_their_keys(bed: Bed, mq: Connection) -> None:
    """P1: with a producer per thread, and with a shared producer."""
    shared = mq.producer()

    def send(name: str, own: bool) -> None:
        producer = mq.producer() if own else shared
        for number in range(150):
            producer.send("orders", f"{name}:{number}".encode(), key=name)

    threads = [threading.Thread(target=send, args=(f"t{n}", n % 2 == 0)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_name: dict[str, list[int]] = defaultdict(list)
    for message in bed.reopen().reader("orders"):
        name, number = message.body.decode().split(":")
        by_name[name].append(int(number))
    assert by_name == {f"t{n}": list(range(150)) for n in range(6)}


def test_threads_that_send_synchronously_with_one_producer_all_get_their_own_place(mq: Connection) -> None:
    """P3: the messages of several threads may be in the same batch."""
    producer = mq.producer()
    places: list[tuple[int, int, bytes]] = []
    lock = threading.Lock()

    def send(name: int) -> None:
        for number in range(50):
            body = b"%d:%d" % (name, number)
            stored = producer.send_sync("orders", body, key="same", timeout_s=WAIT_S)
            with lock:
                places.append((stored.partition, stored.offset, body))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(places) == sorted((m.partition, m.offset, m.body) for m in mq.reader("orders"))


@pytest.mark.parametrize(("key", "slot"), [("a", 204), ("order-1", 515), ("customer-42", 827), ("schlüssel", 951)])
def test_a_key_leads_to_its_slot_and_a_slot_to_its_partition(mq: Connection, key: str, slot: int) -> None:
    """P2, M3: golden values. A text and the UTF-8 bytes of the text are the same key."""
    assert slot_of(key.encode()) == slot
    with mq.producer() as producer:
        assert producer.send_sync("orders", b"", key=key).partition == slot // 256
        assert producer.send_sync("orders", b"", key=key.encode()).partition == slot // 256


def test_a_key_stays_in_its_partition_when_everything_is_opened_again(bed: Bed) -> None:
    """P2."""
    mq = bed.open()
    mq.create_subject("orders", partitions=7)
    with mq.producer() as producer:
        before = [producer.send_sync("orders", b"", key=f"k{n}").partition for n in range(50)]
    mq = bed.reopen()
    with mq.producer() as producer:
        assert [producer.send_sync("orders", b"", key=f"k{n}").partition for n in range(50)] == before


def test_messages_without_a_key_are_spread(mq: Connection) -> None:
    """P2."""
    with mq.producer() as producer:
        handles = [producer.send("orders", b"") for _ in range(400)]
        partitions = [handle.result(WAIT_S).partition for handle in handles]
    assert all(partitions.count(index) > 50 for index in range(4))


def test_a_synchronous_send_tells_partition_and_offset(mq: Connection) -> None:
    """P3."""
    with mq.producer() as producer:
        places = [producer.send_sync("orders", b"%d" % n, key="k") for n in range(5)]
    assert [place.offset for place in places] == [0, 1, 2, 3, 4]
    assert {(place.subject, place.partition) for place in places} == {("orders", slot_of(b"k") // 256)}
    description = mq.describe_subject("orders")
    assert description.partitions[places[0].partition].end_offset == 5


def test_pipelined_sends_are_acknowledged_in_order_and_stored_once(mq: Connection) -> None:
    """P4."""
    producer = mq.producer(settings=ProducerSettings(batch_count=3))
    handles = [producer.send("orders", b"%d" % number, key="k") for number in range(1000)]
    producer.flush(WAIT_S)
    assert all(handle.done for handle in handles)
    assert [handle.result(0).offset for handle in handles] == list(range(1000))
    assert stored_bodies(mq) == [b"%d" % number for number in range(1000)]


def test_everything_of_a_message_comes_back(mq: Connection) -> None:
    with mq.producer() as producer:
        producer.send_sync(
            "orders", b"\x00\xff", key="k", tags=("a", "b"), properties={"x": "ü", "": ""}, message_id="id-1"
        )
    (message,) = mq.reader("orders")
    assert (message.body, message.key, message.tags) == (b"\x00\xff", b"k", ("a", "b"))
    assert (message.properties, message.message_id, message.id) == ({"x": "ü", "": ""}, "id-1", "id-1")
    assert message.born_at_ms > 1_600_000_000_000


def test_properties_that_are_used_again_do_not_change_what_was_sent(mq: Connection) -> None:
    """P4: the message is fixed at `send`."""
    properties: dict[str, str] = {}
    with mq.producer() as producer:
        for number in range(300):
            properties["number"] = str(number)
            producer.send("orders", b"%d" % number, key="k", properties=properties)
    assert all(message.properties["number"] == message.body.decode() for message in mq.reader("orders"))


def test_an_empty_key_is_a_key_and_an_empty_body_is_a_body(mq: Connection) -> None:
    with mq.producer() as producer:
        assert producer.send_sync("orders", b"", key="").partition == slot_of(b"") // 256
    (message,) = mq.reader("orders")
    assert (message.body, message.key) == (b"", b"")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_compressed_messages_come_back_as_they_were(mq: Connection, compression: str | None) -> None:
    with mq.producer(settings=ProducerSettings(compression=compression)) as producer:
        for _ in range(10):
            producer.send("orders", b"abc" * 1000, key="k")
    assert stored_bodies(mq) == [b"abc" * 1000] * 10


# Selectors


def test_a_selector_chooses_the_partition_and_its_argument_is_the_key(mq: Connection) -> None:
    """P2."""
    mq.create_subject("chosen", 3, routing="selector")
    with mq.producer() as producer:
        stored = producer.send_sync("chosen", b"", selector=lambda parts, message, arg: 5 % len(parts), arg="order-5")
    assert stored.partition == 2
    (message,) = mq.reader("chosen")
    assert message.key == b"order-5"


def test_a_selector_sees_the_partitions_and_the_message(mq: Connection) -> None:
    """P2."""
    mq.create_subject("chosen", 3, routing="selector")
    got: list[object] = []

    def choose(partitions, message, arg):
        got.extend([len(partitions), message.body, message.key, arg])
        return 0

    with mq.producer() as producer:
        producer.send_sync("chosen", b"body", key="k", selector=choose, arg={"any": "thing"})
    assert got == [3, b"body", b"k", {"any": "thing"}]


@pytest.mark.parametrize("wrong", [3, -1, None, "0", True])
def test_a_selector_that_names_no_partition_stores_nothing(mq: Connection, wrong: object) -> None:
    """P2."""
    mq.create_subject("chosen", 3, routing="selector")
    with mq.producer() as producer, pytest.raises(InvalidInput, match="0 to 2"):
        producer.send("chosen", b"", selector=lambda *_: wrong, arg="k")  # type: ignore[arg-type]
    assert stored_bodies(mq, "chosen") == []


def test_a_selector_is_for_subjects_that_route_by_selector(mq: Connection) -> None:
    """P2."""
    mq.create_subject("chosen", 3, routing="selector")
    with mq.producer() as producer:
        with pytest.raises(InvalidInput, match="routing='selector'"):
            producer.send("orders", b"", key="k", selector=lambda *_: 0)
        with pytest.raises(InvalidInput, match="give selector="):
            producer.send("chosen", b"", key="k")


# Named producers


def test_a_second_producer_of_a_name_fences_the_first(mq: Connection) -> None:
    """P5."""
    first = mq.producer("ledger")
    first.send_sync("orders", b"1", key="k")
    second = mq.producer("ledger")
    with pytest.raises(ProducerFenced) as caught:
        first.send_sync("orders", b"lost", key="k", timeout_s=WAIT_S)
    assert "replaced by a newer one of the same name" in str(caught.value)
    assert not caught.value.retriable
    second.send_sync("orders", b"2", key="k")
    with pytest.raises(ProducerFenced):
        first.send_sync("orders", b"lost", key="k", timeout_s=WAIT_S)
    assert stored_bodies(mq) == [b"1", b"2"]


def test_a_fenced_producer_is_called_by_its_name(mq: Connection) -> None:
    """P5: the error names the producer."""
    first = mq.producer("ledger")
    mq.producer("ledger")
    with pytest.raises(ProducerFenced, match="ledger"):
        first.send_sync("orders", b"", key="k", timeout_s=WAIT_S)


def test_a_fenced_producer_of_a_best_effort_subject_fails_too(mq: Connection) -> None:
    """P5, P7."""
    mq.create_subject("loose", 1, strategy="best-effort")
    first = mq.producer("ledger")
    mq.producer("ledger")
    try:
        for _ in range(2):
            with pytest.raises(ProducerFenced):
                first.send_sync("loose", b"", key="k", timeout_s=WAIT_S)
    finally:
        first.close(0.1)  # the caller got the error already


def test_a_named_producer_fences_the_one_from_before_a_restart(bed: Bed) -> None:
    """P5: epochs and sequences survive reopening."""
    mq = bed.open()
    mq.create_subject("orders", 1)
    for number in range(3):
        with mq.producer("ledger") as producer:
            assert producer.send_sync("orders", b"%d" % number, key="k").offset == number
        mq = bed.reopen()
    assert stored_bodies(mq) == [b"0", b"1", b"2"]
    old, new = mq.producer("ledger"), mq.producer("ledger")
    assert new.send_sync("orders", b"3", key="k").offset == 3
    with pytest.raises(ProducerFenced):
        old.send_sync("orders", b"x", key="k", timeout_s=WAIT_S)


def test_other_names_and_nameless_producers_do_not_fence_each_other(mq: Connection) -> None:
    """P5."""
    producers = [mq.producer(), mq.producer(), mq.producer("a"), mq.producer("b")]
    for _ in range(2):
        for producer in producers:
            producer.send_sync("orders", b"", key="k", timeout_s=WAIT_S)
    assert len(stored_bodies(mq)) == 8


# Limits and wrong input


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"body": b"x" * 101}, "Limits.body_bytes"),
        ({"key": "k" * 11}, "Limits.key_bytes"),
        ({"properties": {"name": "x" * 20}}, "Limits.properties_bytes"),
    ],
)
def test_what_is_too_large_is_refused_by_name_and_not_stored(
    mq: Connection, given: dict[str, object], limit: str
) -> None:
    mq.create_subject("small", 1, limits=Limits(body_bytes=100, key_bytes=10, properties_bytes=20))
    values: dict[str, object] = {"body": b"", "key": "k", **given}
    with mq.producer() as producer:
        for send in (producer.send, producer.send_sync):
            with pytest.raises(LimitExceeded, match=limit):
                send("small", **values)  # type: ignore[arg-type]
    assert stored_bodies(mq, "small") == []


def test_a_large_message_within_the_limits_comes_back(mq: Connection) -> None:
    body = bytes(range(256)) * 4096 * 4
    with mq.producer() as producer:
        producer.send_sync("orders", body, key="k")
    assert stored_bodies(mq) == [body]


def test_an_unknown_subject_says_how_to_make_it(mq: Connection) -> None:
    with mq.producer() as producer:
        for send in (producer.send, producer.send_sync):
            with pytest.raises(NotFound, match="create_subject"):
                send("nothing", b"")


def test_sending_after_closing_says_closed(mq: Connection) -> None:
    producer = mq.producer()
    mq.close()
    for send in (producer.send, producer.send_sync):
        with pytest.raises(Closed):
            send("orders", b"", key="k")


def test_a_witnessed_history_of_sends_is_in_order(mq: Connection) -> None:
    witness = Witness()
    with mq.producer() as producer:
        for number in range(20):
            witness.sent(producer.send_sync("orders", b"", key=b"%d" % (number % 3)), b"%d" % (number % 3))
    assert witness.judge(complete=False).sent == 20
