"""C10, B6: under best effort a failed message goes to the group's retry subject, and the next message runs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from inturn import Connection, ConsumerSettings, Context, Message, RetryDelays, Strategy, suspend
from inturn.errors import GroupConflict, InvalidInput
from tests.contract.bed import Bed, Seen, eventually, quick

DELAYS = RetryDelays((0.05, 0.15, 0.6), first_level=1)


def loose(**settings: Any) -> ConsumerSettings:
    return quick(strategy=Strategy.BEST_EFFORT, retry=DELAYS, **settings)


@pytest.fixture
def line(mq: Connection) -> Connection:
    mq.create_subject("line", partitions=1)
    with mq.producer() as producer:
        for number in range(5):
            producer.send("line", b"%d" % number, key="k", properties={"mine": "yes"})
    return mq


class FailsAt:
    """Fails `times` times for the given body."""

    def __init__(self, body: bytes, times: int, answer: object = None) -> None:
        self.body, self.times, self.answer = body, times, answer
        self.at_s: list[float] = []

    def __call__(self, message: Message, context: Context) -> object:
        if message.body != self.body:
            return None
        self.at_s.append(time.monotonic())
        if len(self.at_s) <= self.times:
            if self.answer is not None:
                return self.answer
            raise RuntimeError("not now")
        return None


def test_the_next_one_runs_and_the_failed_one_comes_back_after_its_delay(line: Connection) -> None:
    fails = FailsAt(b"1", 1)
    seen = Seen(fails)
    with line.consumer("line", "g", seen, settings=loose()):
        seen.wait_for(6)
    called = list(zip(seen.messages, seen.attempts, strict=True))
    in_line = [(message.body, attempt) for message, attempt in called if message.subject == "line"]
    assert in_line == [(b"0", 1), (b"1", 1), (b"2", 1), (b"3", 1), (b"4", 1)]
    assert fails.at_s[1] - fails.at_s[0] >= 0.14
    ((again, attempt),) = [one for one in called if one[0].subject != "line"]
    assert (again.body, attempt) == (b"1", 2)
    assert again.key == b"k"
    assert again.properties == {
        "mine": "yes", "%attempts": "1", "%subject": "line", "%partition": "0", "%offset": "1",
    }  # fmt: skip


def test_each_retry_waits_for_the_next_delay_and_the_last_one_repeats(line: Connection) -> None:
    fails = FailsAt(b"1", 3)
    seen = Seen(fails)
    with line.consumer("line", "g", seen, settings=loose()):
        eventually(lambda: len(fails.at_s) == 4, "three retries")
    waits = [later - earlier for earlier, later in zip(fails.at_s, fails.at_s[1:], strict=False)]
    assert [wait >= least for wait, least in zip(waits, (0.14, 0.59, 0.59), strict=True)] == [True] * 3, waits
    assert [attempt for attempt, body in zip(seen.attempts, seen.bodies, strict=True) if body == b"1"] == [1, 2, 3, 4]


def test_what_waits_for_its_retry_survives_a_restart_of_everything(bed: Bed, line: Connection) -> None:
    failed = Seen(FailsAt(b"1", 9))
    consumer = line.consumer("line", "g", failed, settings=loose())
    with consumer:
        failed.wait_for(5)
        eventually(lambda: line.group("line", "g").describe().partitions[0].lag == 0, "all is committed")
    later = bed.reopen()
    seen = Seen()
    with later.consumer("line", "g", seen, settings=loose()):
        seen.wait_for(1)
    assert seen.bodies == [b"1"]
    assert seen.attempts[0] >= 2


def test_nonsense_is_moved_but_a_suspend_is_repeated_in_place(line: Connection) -> None:
    moved = Seen(FailsAt(b"1", 1, "nonsense"))
    with line.consumer("line", "a", moved, settings=loose()):
        moved.wait_for(6)
    assert [message.body for message in moved.messages if message.subject != "line"] == [b"1"]
    suspended = Seen(FailsAt(b"1", 1, suspend(0.01)))
    with line.consumer("line", "b", suspended, settings=loose()):
        suspended.wait_for(6)
    assert suspended.bodies == [b"0", b"1", b"1", b"2", b"3", b"4"]


def test_a_batch_that_fails_is_moved_as_a_whole(line: Connection) -> None:
    calls: list[list[bytes]] = []

    def handle(messages: list[Message], context: Context) -> None:
        calls.append([message.body for message in messages])
        if len(calls) == 1:
            raise RuntimeError("not now")

    with line.consumer("line", "g", handle, settings=loose(batch=3)):
        eventually(lambda: len(calls) == 3, "the retry")
    assert calls[0] == [b"0", b"1", b"2"]
    assert sorted(calls[1:]) == [[b"0", b"1", b"2"], [b"3", b"4"]]


def test_retries_of_one_group_are_no_business_of_another(line: Connection) -> None:
    one, other = Seen(FailsAt(b"1", 1)), Seen()
    with (
        line.consumer("line", "one", one, settings=loose()),
        line.consumer("line", "other", other, settings=loose()),
    ):
        one.wait_for(6)
        other.wait_for(5)
    assert len(other.bodies) == 5


def test_members_that_ask_for_other_delays_are_refused(line: Connection) -> None:
    with line.consumer("line", "g", Seen(), settings=loose()):
        other = quick(strategy="best-effort", retry=RetryDelays((1.0,), 0))
        with pytest.raises(GroupConflict, match="3 delays"):
            line.consumer("line", "g", Seen(), settings=other).start()
    began_s = time.monotonic()
    line.close()
    assert time.monotonic() - began_s < 10, "whoever was refused is not waited for"


@pytest.mark.parametrize("bad", [{"levels_s": ()}, {"levels_s": (0,)}, {"first_level": 18}, {"first_level": -1}])
def test_delays_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="RetryDelays"):
        RetryDelays(**bad)  # type: ignore[arg-type]


def test_the_usual_delays_are_those_that_people_know() -> None:
    levels_s = RetryDelays().levels_s
    assert (levels_s[:5], levels_s[-2:], len(levels_s)) == ((1, 5, 10, 30, 60), (3600, 7200), 18)
    assert levels_s[RetryDelays().level(1)] == 10
    assert RetryDelays().level(100) == 17
