"""A failing message holds back only the key of the message. Attempts are never forgotten."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from inturn import Connection, Consumer, Context, Group, InturnError, KeyDescription, Message, suspend
from inturn.errors import GroupConflict, InvalidInput, NotFound
from tests.contract.bed import (
    SHORT_LEASE,
    STEADY_LEASE,
    WAIT_S,
    Bed,
    Seen,
    Witness,
    committed,
    eventually,
    of_key,
    quick,
    send,
)

pytestmark = pytest.mark.usefixtures("quiet")


class Fails:
    """Raises for messages of the key with the given body, until repaired."""

    def __init__(self, key: bytes = b"bad", body: bytes | None = None) -> None:
        self._key, self._body = key, body
        self.is_mended = False
        self.at_s: list[float] = []
        self.attempts: list[int] = []

    def __call__(self, message: Message, context: Context) -> None:
        if message.key == self._key and self._body in (None, message.body):
            self.at_s.append(time.monotonic())
            self.attempts.append(context.attempt)
            if not self.is_mended:
                raise RuntimeError("no connection")


def one_key(mq: Connection, subject: str = "line", group: str = "g") -> KeyDescription | None:
    """The only failing key, or None."""
    try:
        found = mq.group(subject, group).keys()
    except NotFound:
        return None
    assert len(found) <= 1
    return found[0] if found else None


def state(mq: Connection, subject: str = "line", group: str = "g") -> str | None:
    found = one_key(mq, subject, group)
    return None if found is None else found.state


def test_a_failing_key_does_not_hold_back_the_others(line: Connection) -> None:
    """C10."""
    fails = Fails()
    seen = Seen(fails)
    send(line, "line", "bad:0", "bad:1", *(f"k{number % 9}:{number}" for number in range(300)))
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        eventually(lambda: len({one.body for one in seen.messages if one.key != b"bad"}) == 300, "the others")
        assert set(of_key(seen.messages, "bad")) == {"0"}
        fails.is_mended = True
        eventually(lambda: committed(line) == 302, "all of them")
    assert of_key(seen.messages, "bad")[-2:] == ["0", "1"]
    assert fails.attempts[:-2] == list(range(1, len(fails.attempts) - 1))
    assert fails.attempts[-1] == 1, "the next message has attempts of its own"
    assert line.group("line", "g").keys() == []


def test_the_time_between_attempts_grows(line: Connection) -> None:
    """C10: from the shortest delay on. With the longest delay from the start, six attempts would not fit."""
    fails = Fails()
    send(line, "line", "bad:0")
    with line.consumer("line", "g", fails, order="key", settings=quick(backoff_min_s=0.02, backoff_max_s=WAIT_S)):
        eventually(lambda: len(fails.at_s) >= 6, "six attempts")
    waits = [later - earlier for earlier, later in pairwise(fails.at_s[:6])]
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.08, 0.16, 0.32), strict=True)), waits


def test_the_handler_may_say_how_long_to_wait(line: Connection) -> None:
    """C10."""
    at_s: list[float] = []

    def handle(message: Message, context: Context) -> object:
        at_s.append(time.monotonic())
        return suspend(0.3) if context.attempt == 1 else None

    send(line, "line", "k:0")
    with line.consumer("line", "g", handle, order="key", settings=quick()):
        eventually(lambda: committed(line) == 1, "it is done")
    assert 0.3 <= at_s[1] - at_s[0] < WAIT_S / 2


def test_a_failing_key_is_listed_with_its_error_and_what_waits_behind_it(line: Connection) -> None:
    """C10."""
    fails = Fails()
    began_s = time.time()
    send(line, "line", "good:0", "bad:1", "bad:2", "bad:3")
    with line.consumer("line", "g", fails, order="key", settings=quick()):
        eventually(lambda: (found := one_key(line)) is not None and found.attempts >= 3, "it is listed")
        found = one_key(line)
        assert found is not None
        assert (found.key, found.partition, found.state, found.offset) == (b"bad", 0, "failing", 1)
        assert found.error == "RuntimeError: no connection"
        assert found.waiting == 2
        assert began_s - 1 < found.since_ms / 1000 < time.time() + 1
        head = line.group("line", "g").key_head("bad")
        assert head is not None
        assert (head.offset, head.body, head.key) == (1, b"1", b"bad")
        fails.is_mended = True
        eventually(lambda: line.group("line", "g").keys() == [], "nothing is the matter any more")
    with pytest.raises(NotFound, match="no message of the key has failed or is parked"):
        line.group("line", "g").describe_key("bad")


@pytest.mark.parametrize("how", ["kill", "stop", "reopen"])
def test_attempts_survive_whoever_counts_them(bed: Bed, how: str) -> None:
    """C10."""
    lease = SHORT_LEASE if how == "kill" else STEADY_LEASE
    mq = bed.open(flush="os", lease=lease)
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", "k:1")
    first, second = Fails(), Fails()
    consumer = mq.consumer("line", "g", first, order="key", settings=quick(backoff_max_s=0.05))
    consumer.start()
    eventually(lambda: len(first.attempts) >= 4, "four attempts")
    if how == "kill":
        consumer.kill()
    else:
        consumer.stop()
    if how == "reopen":
        mq = bed.reopen(flush="os", lease=lease)
    tried = first.attempts[-1]
    with mq.consumer("line", "g", second, order="key", settings=quick()):
        eventually(lambda: second.attempts, "the next holder tries it")
    assert list(dict.fromkeys(first.attempts)) == list(range(1, tried + 1))
    # The attempt that ran at the kill was not stored as failed.
    assert second.attempts[0] in ((tried, tried + 1) if how == "kill" else (tried + 1,))


def test_under_order_by_partition_the_partition_waits(line: Connection) -> None:
    """C10."""
    fails = Fails()
    seen = Seen(fails)
    send(line, "line", "k:0", "bad:1", "k:2")
    with line.consumer("line", "g", seen, order="partition", settings=quick()):
        eventually(lambda: len(fails.attempts) >= 4, "four attempts")
        assert of_key(seen.messages, "k") == ["0"]
        assert state(line) == "failing"
        fails.is_mended = True
        eventually(lambda: committed(line) == 3, "all of them")
    assert of_key(seen.messages, "k") == ["0", "2"]


# C11: max_attempts


def test_a_blocked_key_waits_for_somebody(line: Connection) -> None:
    """C11."""
    fails = Fails()
    seen = Seen(fails)
    send(line, "line", "bad:0", "k:1", "bad:2", "k:3")
    settings = quick(max_attempts=3, on_exhausted="block")
    with line.consumer("line", "g", seen, order="key", settings=settings):
        eventually(lambda: state(line) == "blocked", "it is blocked")
        time.sleep(0.2)
        assert fails.attempts == [1, 2, 3]
        assert of_key(seen.messages, "k") == ["1", "3"]
        fails.is_mended = True
        resumed = line.group("line", "g").resume("bad", by="me", why="mended")
        assert resumed.done_at_ms is not None
        assert (resumed.request.by, resumed.request.why) == ("me", "mended")
        eventually(lambda: committed(line) == 4, "all of them")
    assert of_key(seen.messages, "bad") == ["0", "0", "0", "0", "2"]
    assert fails.attempts == [1, 2, 3, 1, 1], "counted anew"


@pytest.mark.parametrize("how", ["kill", "reopen"])
def test_a_blocked_key_stays_blocked_whoever_holds_it(bed: Bed, how: str) -> None:
    """C11."""
    mq = bed.open(flush="os", lease=SHORT_LEASE)
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", "k:1")
    settings = quick(max_attempts=2)
    consumer = mq.consumer("line", "g", Fails(), order="key", settings=settings)
    consumer.start()
    eventually(lambda: state(mq) == "blocked", "it is blocked")
    consumer.kill()
    if how == "reopen":
        mq = bed.reopen(flush="os", lease=SHORT_LEASE)
    fails = Fails()
    seen = Seen(fails)
    with mq.consumer("line", "g", seen, order="key", settings=settings):
        send(mq, "line", "k:2", "bad:3")
        eventually(lambda: "2" in of_key(seen.messages, "k"), "the other key")
        time.sleep(0.1)
        assert fails.attempts == []
        fails.is_mended = True
        assert mq.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: committed(mq) == 4, "all of them")
    assert list(dict.fromkeys(of_key(seen.messages, "bad"))) == ["0", "3"]


def test_skipping_a_blocked_key_lets_the_next_one_run(bed: Bed) -> None:
    """C11."""
    witness = Witness()
    mq = bed.open(flush="os", observer=witness.recorder)
    mq.create_subject("line", 1)
    send(mq, "line", "bad:0", "k:1", "bad:2", "bad:3", witness=witness)
    fails = Fails(body=b"0")
    seen = Seen(witness.watch(fails))
    with mq.consumer("line", "g", seen, order="key", settings=quick(max_attempts=2)):
        eventually(lambda: state(mq) == "blocked", "it is blocked")
        witness.recorder.key_skipped("line", "g", 0, 0, b"bad")
        skipped = mq.group("line", "g").skip("bad", offset=0, by="ann", why="a test order")
        assert skipped.done_at_ms is not None
        eventually(lambda: committed(mq) == 4, "the others")
    assert of_key(seen.messages, "bad") == ["0", "0", "2", "3"]
    assert witness.judge(order="key").skipped == 1


def test_a_failing_key_can_be_skipped_while_it_is_repeated(line: Connection) -> None:
    """C11."""
    seen = Seen(Fails(body=b"0"))
    send(line, "line", "bad:0", "bad:1")
    with line.consumer("line", "g", seen, order="key", settings=quick(backoff_max_s=0.02)):
        eventually(lambda: state(line) == "failing", "it fails")
        assert line.group("line", "g").skip("bad", why="it will never work").done_at_ms is not None
        eventually(lambda: committed(line) == 2, "both are over")
    assert of_key(seen.messages, "bad")[-1] == "1"
    assert line.group("line", "g").keys() == []


def test_under_order_by_partition_a_blocked_partition_goes_on_after_a_skip(line: Connection) -> None:
    """C11."""
    seen = Seen(Fails(body=b"1"))
    send(line, "line", "k:0", "bad:1", "k:2")
    with line.consumer("line", "g", seen, order="partition", settings=quick(max_attempts=2)):
        eventually(lambda: state(line) == "blocked", "it is blocked")
        assert line.group("line", "g").skip("bad", offset=1).done_at_ms is not None
        eventually(lambda: committed(line) == 3, "the rest")
    assert seen.bodies == [b"0", b"1", b"1", b"2"]


def test_under_order_by_partition_a_blocked_partition_can_be_resumed(line: Connection) -> None:
    """C11."""
    fails = Fails(body=b"1")
    send(line, "line", "k:0", "bad:1", "k:2")
    with line.consumer("line", "g", fails, order="partition", settings=quick(max_attempts=2)):
        eventually(lambda: state(line) == "blocked", "it is blocked")
        fails.is_mended = True
        assert line.group("line", "g").resume("bad").done_at_ms is not None
        eventually(lambda: committed(line) == 3, "all of them")
    assert fails.attempts == [1, 2, 1]


def test_a_skip_names_the_message_that_is_meant(line: Connection) -> None:
    """C11: so a repeated or late skip drops no other message."""
    send(line, "line", "bad:0", "bad:1")
    with line.consumer("line", "g", Fails(), order="key", settings=quick(max_attempts=1)):
        eventually(lambda: state(line) == "blocked", "the first is blocked")
        with pytest.raises(InvalidInput, match="is at offset 0"):
            line.group("line", "g").skip("bad", offset=1)
        assert line.group("line", "g").skip("bad", offset=0).done_at_ms is not None
        eventually(lambda: (found := one_key(line)) is not None and found.offset == 1, "the second is blocked")
        with pytest.raises(InvalidInput, match="is at offset 1"):
            line.group("line", "g").skip("bad", offset=0)
        assert state(line) == "blocked"


def test_only_keys_in_trouble_can_be_resumed_or_skipped(line: Connection) -> None:
    """C11."""
    send(line, "line", "good:0")
    with line.consumer("line", "g", Seen(), order="key", settings=quick()):
        eventually(lambda: committed(line) == 1, "it is done")
        for request in (Group.resume, Group.skip):
            with pytest.raises(NotFound, match="good"):
                request(line.group("line", "g"), "good")
            with pytest.raises(NotFound, match="group"):
                request(line.group("line", "nosuch"), "good")
            with pytest.raises(NotFound, match="subject"):
                request(line.group("nosuch", "g"), "good")
        for wrong in (None, 5, "", b"", "\udc80"):
            with pytest.raises(InvalidInput, match="key"):
                line.group("line", "g").park(wrong)  # type: ignore[arg-type]
        wrongs: list[dict[str, Any]] = [
            {"by": 5},
            {"why": 5},
            {"by": "x" * 2000},
            {"partition": "x"},
            {"partition": True},
        ]
        for more in wrongs:
            with pytest.raises(InturnError):
                line.group("line", "g").park("good", **more)
        assert line.group("line", "g").keys() == []
        for wrong_s in (-1, float("nan"), "x", True):
            with pytest.raises(InvalidInput, match="wait_s"):
                line.group("line", "g").park("good", wait_s=wrong_s)  # type: ignore[arg-type]


def test_parking_needs_order_by_key(line: Connection) -> None:
    """C11."""
    with pytest.raises(InvalidInput, match="order='key'"):
        line.consumer("line", "g", Seen(), order="partition", settings=quick(max_attempts=1, on_exhausted="park"))


def test_a_group_with_parked_keys_is_refused_another_order(line: Connection) -> None:
    """C11."""
    send(line, "line", "bad:0", "k:1")
    with line.consumer("line", "g", Fails(), order="key", settings=quick(max_attempts=1, on_exhausted="park")):
        eventually(lambda: state(line) == "parked", "it is parked")
    other = line.consumer("line", "g", Seen(), order="partition", settings=quick())
    other.start()
    with pytest.raises(GroupConflict, match="parked"):
        other.wait(WAIT_S)
    seen = Seen()
    send(line, "line", "k:2")
    with line.consumer("line", "g", seen, order="key", settings=quick()):
        seen.wait_for(1)  # the refused consumer does not keep the lease


def test_many_keys_fail_and_recover_and_all_of_them_keep_their_order(bed: Bed) -> None:
    """C10."""
    witness = Witness()
    mq = bed.open(flush="os", lease=SHORT_LEASE, observer=witness.recorder)
    mq.create_subject("orders", 2)
    send(mq, "orders", *(f"k{number % 30}:{number}" for number in range(600)), witness=witness)
    lock = threading.Lock()
    tries: dict[bytes, int] = {}

    def handle(message: Message, context: Context) -> object:
        number = int(message.body)
        with lock:
            tries[message.body] = tries.get(message.body, 0) + 1
            count = tries[message.body]
        if number % 7 == 0 and count <= 2:
            raise RuntimeError("not now")
        return suspend(0.01) if number % 11 == 0 and count == 1 else None

    watched = witness.watch(handle)

    def consumer() -> Consumer:
        return mq.consumer("orders", "g", watched, order="key", settings=quick(backoff_max_s=0.02))

    first = consumer()
    first.start()
    eventually(lambda: len(tries) > 200, "a third of them")
    witness.kill(first)
    with consumer():
        eventually(lambda: committed(mq, subject="orders") == 600, "all of them")
        eventually(lambda: mq.group("orders", "g").keys() == [], "nothing is the matter any more")
    witness.judge(order="key")


def test_a_key_cannot_be_parked_where_the_order_is_that_of_partitions(mq: Connection) -> None:
    """C11."""
    mq.create_subject("line", 1)
    send(mq, "line", "a:0")
    seen = Seen()
    with mq.consumer("line", "g", seen, order="partition", settings=quick()):
        seen.wait_for(1)
        with pytest.raises(GroupConflict, match="order='key'"):
            mq.group("line", "g").park("a")
