"""Send hooks, statistics of producers, and the description of a node: the same on every bed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import inturn
from inturn import Connection, ProducerStatistics, SendHook, Sending, Stored, aio
from tests.contract.bed import WAIT_S, Seen, eventually, quick


class Noted(SendHook):
    def __init__(self, **properties: str) -> None:
        self.properties = properties
        self.before: list[Sending] = []
        self.after: list[tuple[object, Stored | None, BaseException | None]] = []

    def before_send(self, sending: Sending) -> object:
        self.before.append(sending)
        sending.properties.update(self.properties)
        return len(self.before)

    def after_send(self, begun: object, stored: Stored | None, error: BaseException | None) -> None:
        self.after.append((begun, stored, error))


def test_hooks_see_every_message_and_where_it_was_stored(line: Connection) -> None:
    noted = Noted()
    with line.producer("writer", hooks=[noted]) as producer:
        handles = [producer.send("line", b"%d" % number, key="k", message_id=f"m{number}") for number in range(5)]
        last = producer.send_sync("line", b"5")
    assert [one.body for one in noted.before] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    first = noted.before[0]
    assert (first.subject, first.key, first.message_id, first.producer) == ("line", "k", "m0", "writer")
    stored = [handle.result(0) for handle in handles] + [last]
    assert noted.after == [(number + 1, place, None) for number, place in enumerate(stored)]


def test_what_a_hook_adds_to_the_properties_arrives(line: Connection) -> None:
    mine = {"mine": "1"}
    with line.producer(hooks=[Noted(first="a"), Noted(second="b")]) as producer:
        producer.send_sync("line", b"1", properties=mine)
        producer.send_sync("line", b"2")
    found = [message.properties for message in line.reader("line")]
    assert found == [{"mine": "1", "first": "a", "second": "b"}, {"first": "a", "second": "b"}]
    assert mine == {"mine": "1"}  # the caller may use the dict again


class Broken(SendHook):
    def before_send(self, sending: Sending) -> object:
        raise RuntimeError("before")

    def after_send(self, begun: object, stored: Stored | None, error: BaseException | None) -> None:
        raise RuntimeError("after")


class BrokenAfter(Broken):
    def before_send(self, sending: Sending) -> object:
        return None


@pytest.mark.usefixtures("quiet")
def test_a_hook_that_raises_changes_nothing(line: Connection) -> None:
    noted = Noted()
    with line.producer(hooks=[Broken(), BrokenAfter(), noted]) as producer:
        stored = producer.send_sync("line", b"1")
    assert noted.after == [(1, stored, None)]


@pytest.mark.parametrize("bad", [{"x": "y" * 100_000}, {"%mine": "y"}, {"x": 7}])
def test_properties_of_a_hook_that_cannot_be_sent_are_left_out(line: Connection, bad: Any) -> None:
    noted = Noted(**bad)
    with line.producer(hooks=[noted]) as producer:
        stored = producer.send_sync("line", b"1", properties={"mine": "1"})
    assert [message.properties for message in line.reader("line")] == [{"mine": "1"}]
    assert noted.after == [(1, stored, None)]


def test_what_is_refused_is_told_to_the_hooks_and_raised(line: Connection) -> None:
    noted = Noted()
    with line.producer(hooks=[noted]) as producer:
        with pytest.raises(inturn.errors.InvalidInput, match="the body is text"):
            producer.send("line", "text", properties={"a": "b"})  # type: ignore[arg-type]
        with pytest.raises(inturn.errors.InvalidInput, match="properties is a list"):
            producer.send("line", b"", properties=["a"])  # type: ignore[arg-type]
        with pytest.raises(inturn.errors.NotFound):
            producer.send("nosuch", b"")
    assert [type(error).__name__ for _, _, error in noted.after] == ["InvalidInput", "InvalidInput", "NotFound"]
    assert all(stored is None for _, stored, _ in noted.after)


def test_a_failure_that_comes_later_is_told_to_the_hooks(line: Connection) -> None:
    noted = Noted()
    fenced = line.producer("writer", hooks=[noted])
    with line.producer("writer"):
        handle = fenced.send("line", b"1")
        with pytest.raises(inturn.errors.ProducerFenced):
            handle.result(WAIT_S)
        with pytest.raises(inturn.errors.ProducerFenced):
            fenced.send("line", b"2")
    fenced.close()
    assert [type(error).__name__ for _, _, error in noted.after] == ["ProducerFenced"] * 2


@pytest.mark.parametrize("is_sync", [False, True])
def test_a_hook_may_use_its_producer(line: Connection, is_sync: bool) -> None:
    """The hook is called without any lock of the producer."""

    class Echo(SendHook):
        producer: inturn.Producer
        count = 0

        def after_send(self, begun: object, stored: Stored | None, error: BaseException | None) -> None:
            self.count += 1
            if self.count < 3 and is_sync:
                self.producer.send_sync("line", b"echo", timeout_s=WAIT_S)
            elif self.count < 3:
                self.producer.send("line", b"echo")

    echo = Echo()
    with line.producer(hooks=[echo]) as producer:
        echo.producer = producer
        producer.send_sync("line", b"1")
        eventually(lambda: echo.count == 3, "both echoes are sent")
    assert [message.body for message in line.reader("line")] == [b"1", b"echo", b"echo"]


def test_hooks_are_told_in_order_and_before_the_producer_is_closed(mq: Connection) -> None:
    """From many threads, into several partitions, and with slow hooks."""

    class Slow(Noted):
        def __init__(self) -> None:
            super().__init__()
            self.running = 0

        def after_send(self, begun: object, stored: Stored | None, error: BaseException | None) -> None:
            self.running += 1
            assert self.running == 1, "one at a time"
            super().after_send(begun, stored, error)
            self.running -= 1

    slow = Slow()
    with mq.producer(hooks=[slow]) as producer, ThreadPoolExecutor(4) as threads:
        for number in range(4):
            threads.submit(lambda key: [producer.send("orders", b"", key=key) for _ in range(100)], f"key-{number}")
    assert len(slow.after) == 400
    assert all(error is None for _, _, error in slow.after)
    by_partition: dict[int, list[int]] = {}
    for _, stored, _ in slow.after:
        assert stored is not None
        by_partition.setdefault(stored.partition, []).append(stored.offset)
    assert all(offsets == sorted(offsets) for offsets in by_partition.values())


def test_what_is_no_hook_is_refused(line: Connection) -> None:
    for hooks in ([inturn.Hook()], [lambda sending: None], 7):
        with pytest.raises(inturn.errors.InvalidInput, match="give a list of SendHook"):
            line.producer(hooks=hooks)  # type: ignore[arg-type]


async def test_hooks_of_producers_in_asyncio(line: Connection) -> None:
    noted = Noted(added="1")
    async with aio.AsyncConnection(line, aio._Threads()).producer(hooks=[noted]) as producer:
        stored = await producer.send("line", b"1")
    assert noted.after == [(1, stored, None)]


def test_a_producer_counts_what_it_has_sent(line: Connection) -> None:
    with line.producer() as producer:
        assert producer.statistics() == ProducerStatistics(0, 0, 0, 0, 0)
        for _ in range(10):
            producer.send("line", b"x")
        producer.flush()
        assert producer.statistics() == ProducerStatistics(0, 0, 10, 0, 0)
    fenced = line.producer("writer")
    with line.producer("writer"):
        with pytest.raises(inturn.errors.ProducerFenced):
            fenced.send("line", b"1").result(WAIT_S)
        assert fenced.statistics() == ProducerStatistics(0, 0, 0, 1, 0)
    fenced.close()


def test_a_connection_knows_its_consumers_and_producers(line: Connection) -> None:
    assert (line.consumers(), line.producers()) == ([], [])
    with line.producer() as producer, line.consumer("line", "g", Seen(), settings=quick()) as consumer:
        assert line.consumers() == [consumer]
        assert line.producers() == [producer]
    assert (line.consumers(), line.producers()) == ([], [])


def test_a_node_says_how_it_is(mq: Connection) -> None:
    described = mq.describe_node()
    assert described.is_ready
    assert described.software == f"inturn/{inturn.__version__}"
    assert described.disk is not None
    assert described.disk.free_bytes > 0
    assert described.up_s >= 0
