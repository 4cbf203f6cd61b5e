"""With order="none" no message waits for a different message.

Handlers may take lists, and failed messages are retried later.
"""

from __future__ import annotations

import threading
from collections import Counter

from inturn import Connection, ConsumerSettings, Context, Message, RetryDelays, suspend
from tests.contract.bed import WAIT_S, Seen, Witness, committed, eventually, quick, send

DELAYS = RetryDelays((0.05, 0.1), 0)


class Lists:
    """A handler that takes and records lists."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[bytes], int]] = []
        self._lock = threading.Lock()

    def note(self, messages: list[Message], context: Context) -> list[bytes]:
        bodies = [message.body for message in messages]
        with self._lock:
            self.calls.append((bodies, context.attempt))
        return bodies

    @property
    def counts(self) -> Counter[bytes]:
        return Counter(body for bodies, _ in self.calls for body in bodies)


def settings(**others: object) -> ConsumerSettings:
    return quick(retry=DELAYS, **others)


def test_a_list_has_messages_of_any_keys_and_several_lists_run_at_once(line: Connection) -> None:
    """C9."""
    send(line, "line", *(f"k{number % 7}:{number}" for number in range(64)))
    lists, meet, first_two = Lists(), threading.Barrier(2), iter(range(2))

    def handle(messages: list[Message], context: Context) -> None:
        if len(lists.note(messages, context)) == 8 and next(first_two, None) is not None:
            meet.wait(WAIT_S)

    with line.consumer("line", "g", handle, order="none", settings=settings(batch=8, concurrency=4)):
        eventually(lambda: committed(line) == 64, "all of them")
    assert not meet.broken
    assert max(len(bodies) for bodies, _ in lists.calls) == 8
    assert set(lists.counts.values()) == {1}


def test_a_list_that_fails_is_retried_through_the_retry_subject_and_the_others_go_on(
    line: Connection, quiet: None
) -> None:
    """C8."""
    witness = Witness()
    send(line, "line", *(f"k:{number}" for number in range(40)), witness=witness)
    lists = Lists()

    def handle(messages: list[Message], context: Context) -> None:
        if b"11" in lists.note(messages, context) and context.attempt == 1:
            raise RuntimeError("not now")

    with line.consumer("line", "g", handle, order="none", settings=settings(batch=4)):
        eventually(lambda: committed(line) == 40, "all are done here")
        eventually(lambda: lists.counts[b"11"] == 2, "the retry")
        (failed,) = [bodies for bodies, attempt in lists.calls if attempt == 1 and b"11" in bodies]
        eventually(lambda: all(lists.counts[body] == 2 for body in failed), "all of the list are retried")
    assert sum(lists.counts.values()) == 40 + len(failed)


def test_a_suspended_list_comes_again_and_holds_nothing_back(line: Connection) -> None:
    """C8."""
    send(line, "line", *(str(number) for number in range(20)))
    lists = Lists()

    def handle(messages: list[Message], context: Context) -> object:
        return suspend(0.05) if b"5" in lists.note(messages, context) and context.attempt == 1 else None

    with line.consumer("line", "g", handle, order="none", settings=settings(batch=5, concurrency=1)):
        eventually(lambda: committed(line) == 20, "all of them")
    (suspended,) = [bodies for bodies, attempt in lists.calls if attempt == 2]
    assert b"5" in suspended
    assert lists.counts == Counter([*(b"%d" % number for number in range(20)), *suspended])


def test_after_max_attempts_it_is_a_dead_letter_whatever_was_chosen(line: Connection, quiet: None) -> None:
    """C11."""
    send(line, "line", "k:good", "k:bad", "k:fine")

    def handle(message: Message, context: Context) -> None:
        if message.body == b"bad":
            raise RuntimeError("never")

    seen = Seen(handle)
    with line.consumer("line", "g", seen, order="none", settings=settings(max_attempts=3)):
        eventually(lambda: committed(line) == 3, "all are done here")
        eventually(lambda: len(list(line.group("line", "g").dead_letters().list())) == 1, "it is given up")
    assert [attempt for attempt, body in zip(seen.attempts, seen.bodies, strict=True) if body == b"bad"] == [1, 2, 3]
    (letter,) = line.group("line", "g").dead_letters().list()
    assert letter.message.properties["%attempts"] == "3"
