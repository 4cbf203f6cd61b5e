"""B7: a group that wants messages with some tags only."""

from __future__ import annotations

import time
from typing import Any

import pytest

from inturn import Connection, Context, FlowControl, LogSettings, Message, ProducerSettings, RetryDelays
from inturn.consumer.claimant import ClaimedPart, ClaimingNode
from inturn.consumer.consumer import Consumer
from inturn.consumer.options import Scope
from inturn.model.errors import GroupConflict, InvalidInput, NotFound
from inturn.model.routing import SLOT_COUNT, SlotSet
from inturn.model.time import SystemClock
from tests.contract.bed import SHORT_LEASE, WAIT_S, Bed, Seen, Witness, committed, eventually, quick

HALVES = (SlotSet.of(range(0, SLOT_COUNT, 2)), SlotSet.of(range(1, SLOT_COUNT, 2)))


def send(
    mq: Connection, *messages: str, subject: str = "line", witness: Witness | None = None, **settings: Any
) -> None:
    """Send messages, given as "key:tag,tag". The body is the number. Stored in this order."""
    with mq.producer(settings=ProducerSettings(**settings)) as producer:
        handles = []
        for number, text in enumerate(messages):
            key, _, tags = text.partition(":")
            names = tuple(tags.split(",")) if tags else ()
            handles.append((producer.send(subject, b"%d" % number, key=key or None, tags=names), key, names))
        for handle, key, names in handles:
            stored = handle.result(WAIT_S)
            if witness is not None:
                place = stored.subject, stored.partition, stored.offset
                witness.recorder.sent(*place, key.encode() or None, tags=names)


def agreed(mq: Connection) -> str | None:
    """The expression of the members; None without members."""
    try:
        return mq.group("line", "g").describe().tags
    except NotFound:
        return None


def troubled(mq: Connection) -> list[str]:
    """The states of failing keys; empty before the first member has joined."""
    try:
        return [key.state for key in mq.group("line", "g").keys()]
    except NotFound:
        return []


def raises(message: Message, context: Context) -> None:
    raise RuntimeError("always")


@pytest.mark.parametrize("order", ["partition", "key", "none"])
def test_a_group_gets_messages_with_one_of_its_tags_and_the_offset_passes_the_others(
    line: Connection, order: str
) -> None:
    """B7"""
    send(line, "a:paid", "a:created", "b:", "b:lost,shipped", "a:paid,shipped", "c:created")
    seen = Seen()
    with line.consumer("line", "g", seen, order=order, tags="paid || shipped", settings=quick()) as consumer:
        seen.wait_for(3)
        eventually(lambda: committed(line) == 6, "all is committed")
        described = line.group("line", "g").describe()
        assert described.lag == 0
        assert described.tags == "paid || shipped"
        statistics = consumer.statistics()
    assert sorted(seen.bodies) == [b"0", b"3", b"4"]
    assert statistics.unwanted_count == 3
    assert statistics.missing == 0, "they are not gone, only not wanted"
    assert statistics.ok_count == 3


@pytest.mark.parametrize("settings", [{"batch_count": 7}, {"compression": "zstd", "batch_count": 50}])
def test_batches_of_any_kind_are_filtered(line: Connection, settings: dict[str, Any]) -> None:
    """B7: compressed batches, too, and batches without a wanted message."""
    if "compression" in settings:
        pytest.importorskip("zstandard")
    tags = ["x" if number % 3 else "y" for number in range(100)] + ["z"] * 100 + ["y"]
    send(line, *(f"k{number % 5}:{tag}" for number, tag in enumerate(tags)), **settings)
    seen = Seen()
    with line.consumer("line", "g", seen, order="key", tags="y", settings=quick(pull_bytes=700)):
        seen.wait_for(35)
        eventually(lambda: committed(line) == 201, "all is committed")
    assert sorted(int(body) for body in seen.bodies) == [*range(0, 100, 3), 200]


def test_a_stretch_that_nobody_wants_moves_the_offset_without_a_message(line: Connection) -> None:
    """B7: also while messages come separately. A later consumer does not read the range again."""
    with line.consumer("line", "g", raises, tags="rare", settings=quick()) as consumer:
        with line.producer() as producer:
            for count in (1, 2):
                producer.send_sync("line", b"x", tags=("usual",))
                eventually(lambda count=count: committed(line) == count, "the offset follows")  # type: ignore[misc]
            for _ in range(3000):
                producer.send("line", b"x", tags=("usual",))
        eventually(lambda: committed(line) == 3002, "the offset follows")
        assert consumer.statistics().unwanted_count == 3002
    later = Seen()
    with line.consumer("line", "g", later, settings=quick()):
        send(line, "a:usual")
        later.wait_for(1)
    assert [message.offset for message in later.messages] == [3002], "what was left out before is gone for the group"


def test_members_of_a_group_agree_on_the_tags(line: Connection) -> None:
    """B7: the notation does not matter. When no member is left, other tags may be used."""
    with line.consumer("line", "g", Seen(), tags="b||a", settings=quick()):
        eventually(lambda: agreed(line) == "a || b", "the first has joined")
        with line.consumer("line", "g", Seen(), tags=" a || b ", settings=quick()) as second:
            eventually(lambda: len(line.group("line", "g").describe().members) == 2, "the second has joined")
            assert second.error is None
        for others in ("a", None):
            third = line.consumer("line", "g", Seen(), tags=others, settings=quick())
            third.start()
            with pytest.raises(GroupConflict, match=r"its members use tags='a \|\| b'"):
                third.wait(WAIT_S)
            third.stop()
    with line.consumer("line", "g", Seen(), tags="a", settings=quick()):
        eventually(lambda: agreed(line) == "a", "another expression")
    assert agreed(line) is None


def test_a_wrong_expression_is_refused_before_anything_happens(line: Connection) -> None:
    """B7"""
    for make in (
        lambda: line.consumer("line", "g", Seen(), tags="a ||"),
        lambda: line.handler("line", "g", tags="a ||"),
        lambda: line.reader("line", tags="a ||"),
        lambda: line.consumer("line", "g", Seen(), tags="a", settings=quick(tags="b")),
    ):
        with pytest.raises(InvalidInput, match="tags"):
            make()


def test_the_contract_holds_with_tags_through_failures_and_a_killed_consumer(bed: Bed) -> None:
    """B7, the contract: checked by the order checker, which knows the unwanted messages."""
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("line", 2)
    witness.recorder.group_filtered("line", "g", "y || z")
    tags = ("x", "y", "x,z", "", "w")
    send(mq, *(f"k{number % 7}:{tags[number % 5]}" for number in range(400)), witness=witness, batch_count=9)

    def fail_at_first(message: Message, context: Context) -> None:
        time.sleep(0.0005)
        if context.attempt == 1 and int(message.body) % 11 == 0:
            raise RuntimeError("at first")

    settings = quick(backoff_min_s=0.01)
    first, second = Seen(witness.watch(fail_at_first)), Seen(witness.watch(fail_at_first))
    consumer = mq.consumer("line", "g", first, order="key", tags="y || z", settings=settings, name="first")
    consumer.start()
    first.wait_for(40)
    witness.kill(consumer)
    with mq.consumer("line", "g", second, order="key", tags="y || z", settings=settings, name="second"):
        eventually(lambda: committed(mq) == 400, "all is committed")
    verdict = witness.judge(order="key")
    assert verdict.finished >= 160
    assert {int(one.body) % 5 for one in (*first.messages, *second.messages)} == {1, 2}


def test_what_is_left_out_behind_a_stuck_key_does_not_hold_up_others(line: Connection) -> None:
    """B7, C13: the span counts wanted messages only."""
    texts = ["stuck:y", *(["k:x"] * 500), *(f"k{number}:y" for number in range(40)), *(["k:x"] * 500), "last:y"]
    send(line, *texts, batch_count=20)

    def fail(message: Message, context: Context) -> None:
        if message.key == b"stuck":
            raise RuntimeError("always")

    seen = Seen(fail)
    settings = quick(flow=FlowControl(span=60), backoff_min_s=0.2, backoff_max_s=0.2)
    with line.consumer("line", "g", seen, order="key", tags="y", settings=settings):
        eventually(lambda: b"last" in {one.key for one in seen.messages}, "the last one runs")
        eventually(lambda: line.group("line", "g").describe().lag == 1, "all but the first is done")


@pytest.mark.usefixtures("quiet")
def test_what_is_retried_or_given_up_keeps_its_tags(line: Connection) -> None:
    """B7, B6: the retry subject is filtered by the tags, too."""
    send(line, "a:x", "a:y", "b:y")
    seen = Seen(raises)
    retry = RetryDelays(levels_s=(0.02,), first_level=0)
    settings = quick(strategy="best-effort", max_attempts=2, on_exhausted="dead-letter", retry=retry)
    with line.consumer("line", "g", seen, order="key", tags="y", settings=settings):
        seen.wait_for(4)
        eventually(lambda: len(line.group("line", "g").dead_letters().list()) == 2, "both are given up")
        assert sorted(seen.attempts) == [1, 1, 2, 2]
        assert {letter.message.tags for letter in line.group("line", "g").dead_letters().list()} == {("y",)}
        line.group("line", "g").dead_letters().redrive()
        seen.wait_for(5)


@pytest.mark.usefixtures("quiet")
def test_a_parked_key_holds_what_is_wanted_and_leaves_out_what_no_longer_is(line: Connection) -> None:
    """B7, C11: even when the tags of the group change before the resume."""
    send(line, "a:y", "a:x", "a:y,z", "b:y")
    failing = Seen(lambda message, context: raises(message, context) if message.key == b"a" else None)
    settings = quick(max_attempts=1, on_exhausted="park")
    with line.consumer("line", "g", failing, order="key", tags="y", settings=settings):
        eventually(lambda: troubled(line) == ["parked"], "it is parked")
        eventually(lambda: committed(line) == 4, "others go on")
        parked = line.group("line", "g").describe_key("a").parked
    assert [one.offset for one in parked] == [0, 2], "nothing that the group does not want is parked"
    seen = Seen()
    with line.consumer("line", "g", seen, order="key", tags="z", settings=settings):
        assert line.group("line", "g").resume("a", wait_s=WAIT_S).done_at_ms is not None
        eventually(lambda: not troubled(line), "the key is free")
    assert [message.offset for message in seen.messages] == [2]


@pytest.mark.usefixtures("quiet")
def test_a_failure_of_a_message_that_is_no_longer_wanted_is_forgotten(line: Connection) -> None:
    """B7: otherwise a key that no consumer reads would fail for ever."""
    send(line, "a:x", "b:y")
    with line.consumer("line", "g", raises, order="key", settings=quick()):
        eventually(lambda: len(troubled(line)) == 2, "both fail")
    seen = Seen()
    with line.consumer("line", "g", seen, order="key", tags="y", settings=quick()):
        eventually(lambda: committed(line) == 2, "both are over")
        eventually(lambda: not troubled(line), "nothing fails any more")
    assert [message.offset for message in seen.messages] == [1]


def test_claimants_get_their_slots_and_tags_and_all_is_done_in_the_end(bed: Bed) -> None:
    """B7, S2: any task that passes an unwanted message finishes the message."""
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("line", 1)
    witness.recorder.group_filtered("line", "g", "y")
    texts = [f"k{number % 13}:{'y' if number % 4 == 0 else 'x'}" for number in range(200)] + ["k:x"] * 100
    send(mq, *texts, witness=witness, batch_count=10)
    settings = quick(tags="y")
    keeper = mq.consumer(
        "line", "g", raises, order="key", settings=settings, name="keeper", duty=Scope(keeps_only=True, takes_over=True)
    )
    seen = Seen(witness.watch(lambda message, context: None))
    with keeper:
        eventually(lambda: len(keeper.leases()) == 1, "the lease is kept")
        epoch = keeper.leases()[0].epoch
        for number, slots in enumerate(HALVES):
            node = ClaimingNode(mq.node, mq.subject("line"), {0: ClaimedPart(keeper.name, epoch, slots)})
            task = Consumer(
                node,
                SystemClock(),
                "line",
                "g",
                seen,
                order="key",
                settings=settings,
                lease=SHORT_LEASE,
                name=f"task{number}",
                duty=Scope(until={0: 290}),
            )
            with task:
                assert task.wait_until_through(WAIT_S, WAIT_S)
        eventually(lambda: mq.group("line", "g").describe().lag == 10, "up to the bound all is done")
    assert sorted(int(body) for body in seen.bodies) == list(range(0, 200, 4))
    witness.judge(order="key", complete=False)


def test_a_reader_reads_what_has_its_tags(line: Connection) -> None:
    """B7: through long ranges of other messages, to the end; then the reader waits for more."""
    send(line, "a:y", *["b:x"] * 3000, "c:y,x", "d:x", batch_count=10)
    reader = line.reader("line", tags="y")
    assert [message.offset for message in reader] == [0, 3001]
    assert reader.read(0, wait_s=0.05) == []
    send(line, "a:x", "a:y")
    assert [message.offset for message in reader.read(0, wait_s=WAIT_S)] == [3004]
    assert [message.offset for message in line.reader("line", 3001, tags="*")] == [3001, 3002, 3003, 3004]


def test_damage_is_not_taken_for_something_unwanted(bed: Bed) -> None:
    """B7: a batch with unreadable tags stops the partition, and is reported."""
    mq = bed.open(log=LogSettings(flush="os"))  # type: ignore[arg-type]
    mq.create_subject("line", 1)
    send(mq, "a:y", "b:x", batch_count=1)
    bed.close()
    (segment,) = (path for path in bed.path.rglob("*.log") if path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[-3] ^= 0xFF
    segment.write_bytes(bytes(data))
    mq = bed.open(log=LogSettings(flush="os"))  # type: ignore[arg-type]
    seen = Seen()
    with mq.consumer("line", "g", seen, tags="y", settings=quick()) as consumer:
        seen.wait_for(1)
        eventually(lambda: committed(mq) == 1, "up to the damage")
        eventually(lambda: consumer.statistics().errors, "the damage is reported")
        assert "damaged at offset 1" in consumer.statistics().errors[0]
        assert committed(mq) == 1
