"""Dead letters: messages that a group has given up, to inspect and to drive again.

Dead letters are stored in a subject of their own, `%dead%group%subject`. Driven letters are recorded as commits of the
group of the same name on that subject, under a lease, so that two concurrent callers never drive the same letter
twice.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from inturn.client.reader import Reader
from inturn.consumer.outcome import ATTEMPTS, OFFSET, PARTITION, SUBJECT, past_attempts
from inturn.model.batch import Batch, encode
from inturn.model.errors import InvalidInput, NotFound, StaleEpoch
from inturn.model.message import Message, Outgoing
from inturn.model.offsets import CommitTracker
from inturn.model.routing import slot_of
from inturn.model.settings import Order, RetryDelays
from inturn.model.subject import Subject, dead_letter_subject, retry_subject
from inturn.protocol.commands import (
    Acquire,
    Append,
    Appended,
    Assignment,
    Commit,
    Committed,
    DescribeGroup,
    DescribeSubject,
    Done,
    FindSubject,
    Granted,
    GroupDescription,
    Heartbeat,
    Leave,
    Node,
    OpenRetry,
    Progress,
    Renew,
    Renewed,
    SubjectDescription,
)
from inturn.protocol.request import ask

LIST_COUNT = 100
LEASE_WAIT_S = 5.0  # another caller lists or drives letters: both are short
LEVEL = 0  # of the retry subject: the shortest delay


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group has given up, with the original place and the number of attempts."""

    message: Message  # as stored among the dead letters
    subject: str  # the original place, with partition and offset
    partition: int
    offset: int
    attempts: int


class DeadLetters:
    """The dead letters of one group on one subject. Safe to use from several threads.

    The list is empty, without an error, until a consumer with `on_exhausted="dead-letter"` (or "park", for messages
    without a key) has given up the first message.
    """

    def __init__(self, node: Node, subject: str, group: str) -> None:
        self._node = node
        self.subject = subject
        self.group = group
        self.name = dead_letter_subject(group, subject)  # of the subject of the dead letters
        ask(node, DescribeGroup(subject, group), GroupDescription)  # or NotFound

    def list(self, limit: int = LIST_COUNT) -> list[DeadLetter]:
        """Letters that were not driven again, oldest first, `limit` at most. `message.offset` identifies a letter."""
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidInput(f"limit={limit!r}: give a whole number above 0")
        letters: list[DeadLetter] = []
        if self._find() is None:
            return letters
        finished = self._finished()
        for message in _messages(self._node, self.name, finished.low):
            if message.offset not in finished:
                letters.append(_letter(message))
                if len(letters) == limit:
                    break
        return letters

    def get(self, offset: int) -> DeadLetter:
        """The letter with this offset among the dead letters, even if driven again. NotFound if there is no such
        letter."""
        self._check_offsets([offset])
        found = next(_messages(self._node, self.name, offset), None)
        if found is None or found.offset != offset:
            raise self._not_found(offset)
        return _letter(found)

    def redrive(self, offsets: Iterable[int] | None = None) -> int:
        """Give dead letters to the group once more: all, or the letters with these offsets. Returns the number.

        A letter goes to the group's retry subject, with no attempts counted, and is handled after the shortest delay,
        by this group only: a consumer with max_attempts and on_exhausted="dead-letter" or "park", or with best effort,
        handles its retry subject without further settings. The letter runs out of order: later messages of the key were
        handled long ago. Letters driven before are passed over. NotFound, and no letter is driven, if an offset was
        never among the dead letters. If the process dies meanwhile, the letters driven last may be driven again: at
        most one read (about 1 MiB).
        """
        wanted = None
        if offsets is not None:
            wanted = set(offsets)
            self._check_offsets(wanted)
            if not wanted:
                return 0
        if self._find() is None:
            return 0
        retry = self._open_retry()
        count = 0
        with _Lease(self._node, self.name, self.group, joins=True) as lease:
            for messages in _chunks(self._node, self.name, lease.finished, wanted):
                lease.renew()
                ask(self._node, Append(retry.name, LEVEL, _redriven(messages, retry)), Appended)
                lease.commit([message.offset for message in messages])
                count += len(messages)
        return count

    def _find(self) -> Subject | None:
        try:
            return ask(self._node, FindSubject(self.name), Subject)
        except NotFound:
            return None

    def _finished(self) -> CommitTracker:
        """The letters that were driven again."""
        try:
            ask(self._node, DescribeGroup(self.name, self.group), GroupDescription)
        except NotFound:
            return CommitTracker()  # no letter was driven yet
        with _Lease(self._node, self.name, self.group) as lease:
            return lease.finished

    def _open_retry(self) -> Subject:
        """The retry subject; made with the default delays if no consumer has made the subject yet."""
        try:
            return ask(self._node, FindSubject(retry_subject(self.group, self.subject)), Subject)
        except NotFound:
            levels = len(RetryDelays().levels_s)
            return ask(self._node, OpenRetry(self.subject, self.group, levels), Subject)

    def _check_offsets(self, offsets: Iterable[int]) -> None:
        start = end = 0
        if self._find() is not None:
            (place,) = ask(self._node, DescribeSubject(self.name), SubjectDescription).partitions
            start, end = place.start_offset, place.end_offset
        for offset in offsets:
            if isinstance(offset, bool) or not isinstance(offset, int):
                raise InvalidInput(f"offset {offset!r}: give a whole number")
            if not start <= offset < end:
                raise self._not_found(offset)

    def _not_found(self, offset: int) -> NotFound:
        return NotFound(
            "dead letter with offset",
            str(offset),
            f"see the letters of group {self.group!r} on {self.subject!r}: list(), or `inturn dead-letter list`",
        )


class _Lease:
    """The lease of the dead letters of a group: excludes other callers."""

    def __init__(self, node: Node, subject: str, group: str, *, joins: bool = False) -> None:
        """`joins`: create the group if missing."""
        self._node = node
        self._subject = subject
        self._group = group
        self._member = f"dead-letters-{uuid.uuid4().hex[:8]}"
        self._joins = joins
        self._epoch = 0
        self._number = 0
        self.finished = CommitTracker()

    def __enter__(self) -> Self:
        if self._joins:
            beat = Heartbeat(self._subject, self._group, self._member, Order.NONE.value, "first")
            ask(self._node, beat, Assignment)
        try:
            acquire = Acquire(self._subject, self._group, 0, self._member, 1, LEASE_WAIT_S)
            granted = ask(self._node, acquire, Granted)
        except BaseException:
            self._leave()
            raise
        self._epoch = granted.epoch
        self.finished = CommitTracker(granted.offset, granted.finished)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def renew(self) -> None:
        """Raises StaleEpoch if another caller took the lease."""
        held = ((0, self._epoch),)
        renewed = ask(self._node, Renew(self._subject, self._group, self._member, held), Renewed)
        self._check(renewed.partitions)

    def commit(self, offsets: Sequence[int]) -> None:
        self.finished.add(offsets)
        low, above = self.finished.snapshot()
        self._number += 1
        progress = Progress(0, self._epoch, low, self._number, above)
        committed = ask(self._node, Commit(self._subject, self._group, self._member, (progress,)), Committed)
        self._check(committed.partitions)

    def _check(self, partitions: tuple[int, ...]) -> None:
        if not partitions:
            raise StaleEpoch(self._group, f"{self._subject}/0", self._epoch, self._epoch + 1)

    def _leave(self) -> None:
        ask(self._node, Leave(self._subject, self._group, self._member), Done)  # releases the lease, too


def _messages(node: Node, subject: str, offset: int) -> Iterator[Message]:
    """All messages from an offset on."""
    for messages in _reads(node, subject, offset):
        yield from messages


def _reads(node: Node, subject: str, offset: int) -> Iterator[list[Message]]:
    reader = Reader(node, subject, offset)
    while messages := reader.read(0):
        yield messages


def _chunks(node: Node, subject: str, finished: CommitTracker, wanted: set[int] | None) -> Iterator[list[Message]]:
    """Unfinished messages, only the wanted ones if given; in the portions of the reads."""
    start = finished.low if wanted is None else min(wanted)
    for messages in _reads(node, subject, start):
        chosen = [
            message
            for message in messages
            if message.offset not in finished and (wanted is None or message.offset in wanted)
        ]
        if chosen:
            yield chosen
        if wanted is not None and messages[-1].offset >= max(wanted):
            return


def _redriven(messages: Sequence[Message], retry: Subject) -> Batch:
    slots = array("H", [0 if message.key is None else slot_of(message.key) for message in messages])
    return encode([_renewed(message) for message in messages], slots, route_version=retry.route.version)


def _renewed(message: Message) -> Outgoing:
    properties = message.properties | {ATTEMPTS: "0"}
    return Outgoing(message.body, message.key, message.born_at_ms, message.tags, properties, message.message_id)


def _letter(message: Message) -> DeadLetter:
    properties = message.properties
    return DeadLetter(
        message,
        properties.get(SUBJECT, ""),
        _number(properties.get(PARTITION)),
        _number(properties.get(OFFSET)),
        past_attempts(message),
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else -1
