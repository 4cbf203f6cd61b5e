"""Messages that a group has given up: list, read and redrive dead letters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from inturn import Connection, ConsumerSettings, Context, DeadLetter, Message, RetryDelays, Subject
from inturn.errors import Closed, InvalidInput, LeaseHeld, NotFound, StorageError
from inturn.protocol.commands import Commit, Move, OpenDeadLetters, Reply
from inturn.protocol.request import ask
from tests.contract.bed import SHORT_LEASE, WAIT_S, Bed, Seen, committed, eventually, has_joined, of_key, quick, send
from tests.contract.test_failing_keys import Fails
from tests.contract.test_robustness import Submit, put_between

pytestmark = pytest.mark.usefixtures("quiet")
DEAD, RETRY = "%dead%g%line", "%retry%g%line"


def giving_up(**settings: Any) -> ConsumerSettings:
    retry = RetryDelays((0.02, 0.05), first_level=1)
    return quick(**{"max_attempts": 2, "on_exhausted": "dead-letter", "retry": retry, **settings})


def bodies(letters: list[DeadLetter]) -> list[bytes]:
    return [letter.message.body for letter in letters]


def by_subject(seen: Seen) -> dict[str, list[str]]:
    """The messages of every subject, in order. A retry may come before the next message of the key."""
    found: dict[str, list[str]] = {}
    for message in seen.messages:
        found.setdefault(message.subject, []).append(message.body.decode())
    return found


@pytest.fixture
def dead(line: Connection) -> Connection:
    """The messages 0, 2, 4 of "line" are dead letters of the group g."""
    send(line, "line", "bad:0", "k:1", "bad:2", "k:3", "bad:4")
    with line.consumer("line", "g", Fails(), order="key", settings=giving_up()):
        eventually(lambda: committed(line) == 5, "all of them")
    return line


@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_a_message_that_is_given_up_lets_the_next_one_run(line: Connection, order: str) -> None:
    """C11."""
    seen = Seen(Fails(body=b"0"))
    with line.producer() as producer:
        for number in range(3):
            producer.send(
                "line", b"%d" % number, key="bad", tags=("t",), properties={"mine": "yes"}, message_id=f"m{number}"
            )
    with line.consumer("line", "g", seen, order=order, settings=giving_up()):
        eventually(lambda: committed(line) == 3, "all of them")
        eventually(lambda: line.group("line", "g").dead_letters().list(), "the first is a dead letter")
    (letter,) = line.group("line", "g").dead_letters().list()
    assert (letter.subject, letter.partition, letter.offset, letter.attempts) == ("line", 0, 0, 2)
    message = letter.message
    assert (message.body, message.key, message.tags, message.message_id) == (b"0", b"bad", ("t",), "m0")
    assert message.properties["mine"] == "yes"
    assert (message.subject, message.partition, message.offset) == (DEAD, 0, 0)
    assert line.group("line", "g").keys() == []
    assert of_key(seen.messages, "bad").count("0") == 2


def test_the_dead_letter_is_durable_before_the_offset_moves(line: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11."""
    go_on: list[Callable[[], None]] = []
    held_back = threading.Event()

    def hold(command: Move, reply: Reply, real: Submit) -> None:
        go_on.append(lambda: real(command, reply))
        held_back.set()

    put_between(monkeypatch, line, Move, hold)
    seen = Seen(Fails(body=b"0"))
    send(line, "line", "bad:0", "k:1", "bad:2")
    with line.consumer("line", "g", seen, order="key", settings=giving_up()):
        assert held_back.wait(WAIT_S)
        eventually(lambda: of_key(seen.messages, "k") == ["1"], "another key")
        time.sleep(0.1)
        assert committed(line) == 0
        assert of_key(seen.messages, "bad") == ["0", "0"], "the next of its key waits until it is safe"
        assert line.group("line", "g").dead_letters().list() == []
        for one in go_on:
            one()
        eventually(lambda: committed(line) == 3, "all of them")
    assert bodies(line.group("line", "g").dead_letters().list()) == [b"0"]


def test_a_kill_before_the_dead_letter_is_stored_loses_nothing(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11."""
    mq = bed.open(flush="os", lease=SHORT_LEASE)
    mq.create_subject("line", 1)
    held_back = threading.Event()
    put_between(monkeypatch, mq, Move, lambda command, reply, real: held_back.set())
    send(mq, "line", "bad:0", "k:1")
    consumer = mq.consumer("line", "g", Fails(), order="key", settings=giving_up())
    consumer.start()
    assert held_back.wait(WAIT_S)
    consumer.kill()
    monkeypatch.undo()
    second = Fails()
    with mq.consumer("line", "g", second, order="key", settings=giving_up()):
        eventually(lambda: committed(mq) == 2, "all of them")
    assert set(second.attempts) == {2}, "the attempt before the last was stored"
    assert bodies(mq.group("line", "g").dead_letters().list()) == [b"0"]


def test_messages_without_a_key_become_dead_letters_where_keys_are_parked(line: Connection) -> None:
    """C11."""

    def fail(message: Message, context: Context) -> None:
        raise RuntimeError("no connection")

    send(line, "line", "keyless", "k:parked")
    with line.consumer("line", "g", fail, order="key", settings=giving_up(on_exhausted="park")):
        eventually(lambda: committed(line) == 2, "both are off the log")
        eventually(lambda: [one.state for one in line.group("line", "g").keys()] == ["parked"], "the key is parked")
        assert bodies(line.group("line", "g").dead_letters().list()) == [b"keyless"]


def test_under_best_effort_all_attempts_count(line: Connection) -> None:
    """C11."""
    seen = Seen(Fails(body=b"0"))
    send(line, "line", "bad:0", "bad:1")
    settings = giving_up(strategy="best-effort", max_attempts=3)
    with line.consumer("line", "g", seen, order="key", settings=settings):
        eventually(lambda: committed(line) == 2 and line.group("line", "g").dead_letters().list(), "it is given up")
    assert by_subject(seen) == {"line": ["0", "1"], RETRY: ["0", "0"]}
    (letter,) = line.group("line", "g").dead_letters().list()
    assert (letter.subject, letter.partition, letter.offset, letter.attempts) == ("line", 0, 0, 3)


def test_under_best_effort_what_is_given_up_can_be_found_also_where_keys_are_parked(line: Connection) -> None:
    """C11: the message failed for the last time in the retry subject, where no message of the key waits behind."""
    seen = Seen(Fails(body=b"0"))
    send(line, "line", "bad:0", "bad:1")
    settings = giving_up(strategy="best-effort", on_exhausted="park")
    with line.consumer("line", "g", seen, order="key", settings=settings):
        eventually(lambda: committed(line, subject="%retry%g%line") == 1, "it has failed twice")
        assert bodies(line.group("line", "g").dead_letters().list()) == [b"0"]
    assert by_subject(seen) == {"line": ["0", "1"], RETRY: ["0"]}


# B6: list, show, redrive


def test_dead_letters_are_listed_oldest_first(dead: Connection) -> None:
    """B6."""
    letters = dead.group("line", "g").dead_letters()
    assert bodies(letters.list()) == [b"0", b"2", b"4"]
    assert bodies(letters.list(limit=2)) == [b"0", b"2"]
    assert letters.get(1).message.body == b"2"
    for wrong in (3, -1, 10**30):
        with pytest.raises(NotFound, match="dead letter"):
            letters.get(wrong)
    for nonsense in ("1", True, None):
        with pytest.raises(InvalidInput, match="offset"):
            letters.get(nonsense)  # type: ignore[arg-type]
    for limit in (0, "all", True):
        with pytest.raises(InvalidInput, match="limit"):
            letters.list(limit)  # type: ignore[arg-type]


def test_no_dead_letters_is_no_error_but_no_group_is(line: Connection) -> None:
    """B6."""
    with pytest.raises(NotFound, match="group"):
        line.group("line", "g").dead_letters()
    with pytest.raises(NotFound, match="subject"):
        line.group("nosuch", "g").dead_letters()
    with line.consumer("line", "g", Seen(), settings=quick()):
        eventually(lambda: has_joined(line), "the group is there")
    letters = line.group("line", "g").dead_letters()
    assert letters.list() == []
    assert letters.redrive() == 0
    with pytest.raises(NotFound):
        letters.get(0)
    with pytest.raises(NotFound):
        letters.redrive([0])


def test_redriving_gives_them_to_the_group_once_more(dead: Connection) -> None:
    """B6."""
    letters = dead.group("line", "g").dead_letters()
    assert letters.redrive() == 3
    assert letters.list() == []
    assert letters.redrive() == 0
    seen, other = Seen(), Seen()
    with (
        dead.consumer("line", "g", seen, order="key", settings=giving_up()),
        dead.consumer("line", "other", other, order="key", settings=giving_up()),
    ):
        seen.wait_for(3)
        other.wait_for(5)
        eventually(lambda: committed(dead, subject="%retry%g%line") == 3, "the retries are committed")
    assert of_key(seen.messages, "bad") == ["0", "2", "4"]
    assert set(seen.attempts) == {1}, "counted anew"
    assert seen.messages[0].properties["%offset"] == "0"
    assert len(other.messages) == 5, "only this group gets them again"


def test_some_may_be_chosen(dead: Connection) -> None:
    """B6."""
    letters = dead.group("line", "g").dead_letters()
    assert letters.redrive([1]) == 1
    assert bodies(letters.list()) == [b"0", b"4"]
    assert letters.redrive([1, 2, 2]) == 1, "what was driven before is passed over"
    assert bodies(letters.list()) == [b"0"]
    assert letters.redrive([]) == 0
    with pytest.raises(NotFound, match="'7'"):
        letters.redrive([0, 7])
    assert bodies(letters.list()) == [b"0"], "nothing is driven if one is not there"
    assert letters.get(1).message.body == b"2", "it can still be looked at"
    assert letters.redrive() == 1
    seen = Seen()
    with dead.consumer("line", "g", seen, order="key", settings=giving_up()):
        seen.wait_for(3)
    assert sorted(seen.bodies) == [b"0", b"2", b"4"]


def test_what_was_driven_again_is_remembered_when_the_folder_is_opened_again(bed: Bed, dead: Connection) -> None:
    """B6."""
    dead.group("line", "g").dead_letters().redrive([0, 2])
    mq = bed.reopen(flush="os")
    assert bodies(mq.group("line", "g").dead_letters().list()) == [b"2"]
    seen = Seen()
    with mq.consumer("line", "g", seen, order="key", settings=giving_up()):
        seen.wait_for(2)
    assert sorted(seen.bodies) == [b"0", b"4"]


def test_one_that_fails_again_is_a_dead_letter_again(dead: Connection) -> None:
    """B6."""
    letters = dead.group("line", "g").dead_letters()
    assert letters.redrive([1]) == 1
    fails = Fails()
    with dead.consumer("line", "g", fails, order="key", settings=giving_up()):
        eventually(lambda: len(letters.list()) == 3, "it is back")
    assert fails.attempts == [1, 2]
    again = letters.list()[-1]
    assert (again.message.body, again.message.offset) == (b"2", 3)
    assert (again.subject, again.partition, again.offset, again.attempts) == ("line", 0, 2, 2)


def test_a_consumer_that_runs_handles_what_is_driven_again(line: Connection) -> None:
    """B6."""
    fails = Fails()
    send(line, "line", "bad:0", "k:1")
    with line.consumer("line", "g", fails, order="key", settings=giving_up()):
        eventually(lambda: committed(line) == 2, "both")
        letters = line.group("line", "g").dead_letters()
        fails.is_mended = True
        assert letters.redrive() == 1
        eventually(lambda: len(fails.attempts) == 3, "it is handled")
    assert letters.list() == []


def test_redriving_without_a_retry_subject_makes_it(bed: Bed) -> None:
    """B6: consumers may give messages up without ever having a retry subject.

    The new retry subject has the default delays.
    """
    mq = bed.open(flush="os")
    mq.create_subject("line", 1)
    with mq.consumer("line", "g", Seen(), settings=quick()):
        eventually(lambda: has_joined(mq), "the group is there")
    ask(mq.node, OpenDeadLetters("line", "g"), Subject)
    assert mq.group("line", "g").dead_letters().redrive() == 0
    assert mq.subject("%retry%g%line").partition_count == 18


def test_a_failure_between_the_append_and_the_commit_repeats_and_loses_nothing(
    dead: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6."""
    put_between(monkeypatch, dead, Commit, lambda command, reply, real: reply(StorageError("state", "I/O error")))
    letters = dead.group("line", "g").dead_letters()
    with pytest.raises(StorageError):
        letters.redrive([0])
    monkeypatch.undo()
    assert bodies(letters.list()) == [b"0", b"2", b"4"]
    assert letters.redrive([0]) == 1
    seen = Seen()
    with dead.consumer("line", "g", seen, order="key", settings=giving_up()):
        seen.wait_for(2)
    assert seen.bodies == [b"0", b"0"]


def test_two_who_drive_at_the_same_time_drive_each_letter_once(
    line: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6."""
    monkeypatch.setattr("inturn.client.dead_letters.LEASE_WAIT_S", WAIT_S)
    send(line, "line", *(f"bad:{number}" for number in range(200)))
    with line.consumer("line", "g", Fails(), order="key", settings=giving_up(max_attempts=1)):
        eventually(lambda: committed(line) == 200, "all of them")
    counts: list[int] = []

    def drive() -> None:
        counts.append(line.group("line", "g").dead_letters().redrive())

    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 200
    assert len(list(line.reader("%retry%g%line"))) == 200


def test_many_letters_are_driven_in_their_order(line: Connection) -> None:
    """B6."""
    with line.producer() as producer:
        for number in range(300):
            producer.send("line", b"%d " % number + bytes(10_000), key="bad")
    with line.consumer("line", "g", Fails(), order="key", settings=giving_up(max_attempts=1)):
        eventually(lambda: committed(line) == 300, "all of them")
    assert line.group("line", "g").dead_letters().redrive() == 300
    driven = [int(message.body.split(b" ")[0]) for message in line.reader("%retry%g%line")]
    assert driven == list(range(300))


def test_a_closed_connection_says_so(bed: Bed, dead: Connection) -> None:
    """B6."""
    letters = dead.group("line", "g").dead_letters()
    bed.close()
    for call in (letters.list, letters.redrive, lambda: dead.group("line", "g").dead_letters()):
        with pytest.raises(Closed):
            call()


def test_who_holds_the_dead_letters_is_waited_for_and_named(dead: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6."""
    monkeypatch.setattr("inturn.client.dead_letters.LEASE_WAIT_S", 0.1)
    with dead.consumer(DEAD, "g", Seen(), order="none", settings=quick(retry=RetryDelays((1.0,), 0)), name="reader"):
        eventually(lambda: committed(dead, subject=DEAD) == 3, "it holds the lease")
        letters = dead.group("line", "g").dead_letters()
        for call in (letters.list, letters.redrive):
            with pytest.raises(LeaseHeld, match="reader"):
                call()
