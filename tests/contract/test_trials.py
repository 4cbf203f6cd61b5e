"""C16: a stored message for a named consumer, out of turn, for diagnosis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inturn import Connection, Context, Hook, LeaseSettings, LogSettings, Message, ResultKind, aio, suspend
from inturn.consumer.trace import RUNS, chunks, runs_of
from inturn.model.errors import InvalidInput, NotFound, TrialTimeout
from tests.contract.bed import WAIT_S, Bed, Seen, committed, eventually, quick, send


def only_direct(message: Message, context: Context) -> object:
    """Only trials succeed, so messages in turn wait."""
    if not context.is_direct:
        return suspend(0.01)
    if message.body == b"bad":
        raise ValueError("no such account")
    if message.body == b"later":
        return suspend(1)
    return "nonsense" if message.body == b"odd" else None


def waits_when_tried(entered: threading.Event, gate: threading.Event) -> Callable[[Message, Context], None]:
    def handle(message: Message, context: Context) -> None:
        if context.is_direct:
            entered.set()
            gate.wait(WAIT_S)

    return handle


def joined(mq: Connection, count: int = 1, subject: str = "line") -> None:
    def members() -> int:
        try:
            return len(mq.group(subject, "g").describe().members)
        except NotFound:
            return 0

    eventually(lambda: members() == count, "members have joined")


@pytest.mark.usefixtures("quiet")
def test_a_named_consumer_tells_what_becomes_of_one_message(line: Connection) -> None:
    """C16: success, failure and exception, with text and time; offsets and counts stay."""
    send(line, "line", "a:first", "a:bad", "b:later", "c:odd", "d:fine")
    with line.consumer("line", "g", only_direct, order="key", settings=quick(), name="worker") as consumer:
        joined(line)
        tried = {offset: line.group("line", "g").try_message("worker", 0, offset) for offset in (4, 1, 2, 3)}
        statistics = consumer.statistics()
    assert {offset: state.result for offset, state in tried.items()} == {
        4: ResultKind.SUCCESS,
        1: ResultKind.EXCEPTION,
        2: ResultKind.FAILED,
        3: ResultKind.INVALID,
    }
    assert tried[1].error == "ValueError: no such account"
    assert "only_direct" in tried[1].traceback
    assert "nonsense" in tried[3].error
    assert (tried[4].error, tried[4].traceback) == ("", "")
    assert all(state.member == consumer.name for state in tried.values())
    assert all(0 <= state.duration_s < WAIT_S for state in tried.values())
    assert committed(line) == 0
    assert statistics.ok_count == 0, "a trial is no progress"


def test_a_trial_runs_beside_what_runs_and_has_no_epoch(line: Connection) -> None:
    """C16: out of turn, by name. A system that fences by epoch refuses writes of a trial."""
    send(line, "line", "a:0", "a:1")
    entered, gate = threading.Event(), threading.Event()
    contexts: list[tuple[int, int, bool, int]] = []

    def handle(message: Message, context: Context) -> None:
        contexts.append((message.offset, context.epoch, context.is_direct, context.attempt))
        if not context.is_direct:
            entered.set()
            gate.wait(WAIT_S)

    with line.consumer("line", "g", handle, order="key", settings=quick(concurrency=1)) as consumer:
        assert entered.wait(WAIT_S)
        line.group("line", "g").try_message(consumer.name, 0, 1, timeout_s=WAIT_S)
        assert contexts == [(0, 1, False, 1), (1, 0, True, 1)]
        gate.set()
        eventually(lambda: committed(line) == 2, "both are handled in turn as well")
    assert [(offset, is_direct) for offset, _, is_direct, _ in contexts] == [(0, False), (1, True), (1, False)]


def test_the_one_that_is_named_gets_it_whoever_holds_the_partition(mq: Connection) -> None:
    """C16"""
    send(mq, "orders", *(f"k{number}:{number}" for number in range(20)))
    one, two = Seen(), Seen()
    with (
        mq.consumer("orders", "g", one, settings=quick(), name="one"),
        mq.consumer("orders", "g", two, settings=quick(), name="two"),
    ):
        joined(mq, 2, "orders")
        eventually(lambda: committed(mq, subject="orders") == 20, "all is handled")
        one.messages.clear()
        two.messages.clear()
        partition, message = next(
            (p.partition, 0) for p in mq.group("orders", "g").describe().partitions if p.committed
        )
        for name in ("one", "two", "one"):
            mq.group("orders", "g").try_message(name, partition, message)
        assert (len(one.messages), len(two.messages)) == (2, 1)


def test_async_handlers_batches_and_manual_acknowledgement_can_be_tried(line: Connection) -> None:
    """C16, C18, C9"""
    send(line, "line", "a:x")

    async def handle(message: Message, context: Context) -> None:
        assert message.body == b"x"

    def batch(messages: list[Message], context: Context) -> None:
        assert [message.body for message in messages] == [b"x"]
        context.ack()

    def forgets(message: Message, context: Context) -> None:
        pass

    for group, handler, settings, result in (
        ("loop", handle, quick(), "success"),
        ("batches", batch, quick(batch=5, ack="manual"), "success"),
        ("forgets", forgets, quick(ack="manual"), "nothing"),
    ):
        with line.consumer("line", group, handler, settings=settings, name="w") as consumer:
            eventually(lambda consumer=consumer: consumer.leases(), "it has joined")  # type: ignore[misc]
            assert line.group("line", group).try_message("w", 0, 0).result == result


class Noted(Hook):
    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def before(self, messages: Sequence[Message], context: Context) -> None:
        if context.is_direct:
            self.calls.append(("before", context.is_direct))

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        if context.is_direct:
            self.calls.append((kind.value, context.is_direct))


def test_hooks_see_a_trial_and_traces_do_not(line: Connection, tmp_path: Path) -> None:
    """C16, C14: an audit of the traces does not see the trial."""
    send(line, "line", "a:x")
    hook, seen = Noted(), Seen()
    settings = quick(trace=str(tmp_path / "traces"))
    with line.consumer("line", "g", seen, settings=settings, name="w", hooks=[hook]):
        eventually(lambda: committed(line) == 1, "it is handled in turn")
        assert line.group("line", "g").try_message("w", 0, 0).result == "success"
    assert hook.calls == [("before", True), ("success", True)]
    traced = [
        offset
        for path in (tmp_path / "traces").rglob("*.trace")
        for chunk in chunks(path.read_bytes(), (RUNS,))
        for run in runs_of(chunk)
        for offset in run.offsets
    ]
    assert traced == [0], "the message is traced once: handled in turn"


def test_who_is_not_there_or_has_no_one_name_is_told_so(line: Connection) -> None:
    """C16"""
    send(line, "line", "a:x")
    with pytest.raises(NotFound, match="no group"):
        line.group("line", "g").try_message("w", 0, 0)
    with (
        line.consumer("line", "g", Seen(), settings=quick(), name="w"),
        line.consumer("line", "g", Seen(), settings=quick(), name="w"),
    ):
        joined(line, 2)
        with pytest.raises(NotFound, match="no member 'nobody'; in group 'g' on subject 'line': it has w-"):
            line.group("line", "g").try_message("nobody", 0, 0)
        with pytest.raises(InvalidInput, match="several of group 'g' begin so"):
            line.group("line", "g").try_message("w", 0, 0)
    with pytest.raises(NotFound, match="it has none that runs"):
        line.group("line", "g").try_message("w", 0, 0)


@pytest.mark.parametrize(
    ("partition", "offset", "error", "why"),
    [
        (0, 1, NotFound, "the partition ends at 1"),
        (1, 0, NotFound, "the subject has partitions 0 to 0"),
        (0, -1, NotFound, "retention has removed it: the partition begins at 0"),
        (0, "0", InvalidInput, "whole number"),
        (True, 0, InvalidInput, "whole number"),
    ],
)
def test_a_message_that_is_not_there_is_told_so(
    line: Connection, partition: Any, offset: Any, error: type[Exception], why: str
) -> None:
    """C16"""
    send(line, "line", "a:x")
    with line.consumer("line", "g", Seen(), settings=quick(), name="w"):
        joined(line)
        with pytest.raises(error, match=why):
            line.group("line", "g").try_message("w", partition, offset)


def test_a_message_that_retention_has_removed_is_told_so(bed: Bed) -> None:
    """C16"""
    log = LogSettings(flush="os", segment_bytes=2_000, retention_bytes=4_000)  # type: ignore[arg-type]
    mq = bed.open(log=log)
    mq.create_subject("line", 1)
    for _ in range(30):
        send(mq, "line", "a:" + "x" * 500)
    mq = bed.reopen(log=log)  # reopening applies retention
    with mq.consumer("line", "g", Seen(), settings=quick(), name="w"):
        joined(mq)
        start = mq.describe_subject("line").partitions[0].start_offset
        assert start > 0
        with pytest.raises(NotFound, match=f"retention has removed it: the partition begins at {start}"):
            mq.group("line", "g").try_message("w", 0, 0)


def test_a_member_that_does_not_tell_in_time_is_not_waited_for(line: Connection) -> None:
    """C16: a running handler continues. A trial that has not started by then never starts."""
    send(line, "line", "a:slow", "b:other")
    entered, gate = threading.Event(), threading.Event()
    tried: list[bytes] = []

    def handle(message: Message, context: Context) -> None:
        if context.is_direct:
            tried.append(message.body)
            entered.set()
            gate.wait(WAIT_S)

    with line.consumer("line", "g", handle, settings=quick(), name="w") as consumer:
        joined(line)

        def is_begun() -> bool:
            with pytest.raises(TrialTimeout, match=r"has not reported the trial of line/0@0 within 0.3 s"):
                line.group("line", "g").try_message("w", 0, 0, timeout_s=0.3)
            return entered.is_set()

        eventually(is_begun, "it was begun in time")
        with pytest.raises(TrialTimeout):
            line.group("line", "g").try_message("w", 0, 1, timeout_s=0.3)
        eventually(lambda: not consumer._core.trials.has_waiting, "the member has heard that it was given up")
        gate.set()
        assert line.group("line", "g").try_message("w", 0, 1).result == "success"
        assert consumer.error is None
    assert tried == [b"slow", b"other"], "the one that was given up was not begun"


def test_a_member_that_leaves_meanwhile_is_not_waited_for(line: Connection) -> None:
    """C16: a stop waits for the running trial. A killed member is removed, and the operator gets an error."""
    send(line, "line", "a:slow")
    entered, gate = threading.Event(), threading.Event()
    consumer = line.consumer("line", "g", waits_when_tried(entered, gate), settings=quick(), name="w")
    consumer.start()
    joined(line)
    results: list[object] = []

    def ask() -> None:
        try:
            results.append(line.group("line", "g").try_message("w", 0, 0, timeout_s=WAIT_S).result)
        except NotFound as error:
            results.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    assert entered.wait(WAIT_S)
    stopping = threading.Thread(target=consumer.stop)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive()
    gate.set()
    stopping.join(WAIT_S)
    asking.join(WAIT_S)
    assert results == ["success"]


def test_who_asks_hears_that_the_member_was_counted_out(bed: Bed) -> None:
    """C16"""
    # Long enough that a busy machine does not remove the member before the trial has started.
    mq = bed.open(flush="os", lease=LeaseSettings(life_s=2.0, renew_s=0.15, margin_s=0.05))
    mq.create_subject("line", 1)
    send(mq, "line", "a:slow")
    entered, gate = threading.Event(), threading.Event()
    consumer = mq.consumer("line", "g", waits_when_tried(entered, gate), settings=quick(), name="w")
    consumer.start()
    joined(mq)

    def kill() -> None:
        entered.wait(WAIT_S)
        consumer.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(NotFound, match="it left before it reported a result"):
        mq.group("line", "g").try_message("w", 0, 0, timeout_s=WAIT_S)
    gate.set()
    killing.join()


def test_tags_do_not_matter_to_a_trial(line: Connection) -> None:
    """C16, B7: the operator asked for this very message."""
    send(line, "line", "a:x")
    seen = Seen()
    with line.consumer("line", "g", seen, settings=quick(), tags="y", name="w"):
        eventually(lambda: committed(line) == 1, "it is not wanted")
        assert seen.messages == []
        assert line.group("line", "g").try_message("w", 0, 0).result == "success"
    assert seen.bodies == [b"x"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("mode", ["shared", "broadcast"])
def test_members_of_groups_without_leases_can_be_asked_too(line: Connection, mode: str, tmp_path: Path) -> None:
    """C16, C12: a trial does not change deliveries, acknowledgements or offset files."""
    send(line, "line", "a:first", "a:bad", "b:later", "c:odd", "d:fine")
    offsets = tmp_path / "offsets" if mode == "broadcast" else None
    with line.consumer(
        "line", "g", only_direct, settings=quick(), mode=mode, offsets=offsets, name="worker"
    ) as consumer:
        joined(line)
        tried = [line.group("line", "g").try_message("worker", 0, offset).result for offset in (4, 1, 2, 3)]
        assert consumer.statistics().ok_count == 0, "a trial is no progress"
    assert tried == [ResultKind.SUCCESS, ResultKind.EXCEPTION, ResultKind.FAILED, ResultKind.INVALID]
    if mode == "shared":
        assert line.group("line", "g").describe().lag == 5


async def test_a_message_can_be_tried_with_asyncio(bed: Bed) -> None:
    """C16"""
    blocking = bed.open(flush="os")
    blocking.create_subject("line", 1)
    send(blocking, "line", "a:x")

    async def handle(message: Message, context: Context) -> None:
        pass

    async with aio.connect(blocking.target) as mq, mq.consumer("line", "g", handle, settings=quick(), name="w") as one:
        await asyncio.to_thread(eventually, lambda: one.blocking.leases(), "it has joined")
        assert (await mq.group("line", "g").try_message("w", 0, 0)).result == "success"
