"""What has happened in a held partition since the last commit that was answered.

A partition that a consumer asked for, holds, or is giving back; and what of it waits to be handled. No I/O.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyroaring import BitMap64

from inturn.consumer.context import Context
from inturn.consumer.lane import Lane, LaneKey
from inturn.consumer.parking import HeldLot
from inturn.model.batch import CHOSEN, Batch, BatchHeader
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.offsets import ClaimTracker, CommitTracker, mark_of
from inturn.model.settings import LotState
from inturn.protocol.commands import Command, Failure, Granted, KeyRequest, LotChange, ParkedMessage, Progress, Pull


@dataclass(slots=True)
class LotNews:
    state: LotState
    reason: str = ""
    added: list[ParkedMessage] = field(default_factory=list)
    removed: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class News:
    failed: dict[int, Failure] = field(default_factory=dict)  # by offset
    settled: list[int] = field(default_factory=list)
    lots: dict[bytes, LotNews] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.failed or self.settled or self.lots or self.requests)

    def lot(self, key: bytes, state: LotState, reason: str = "") -> LotNews:
        news = self.lots.setdefault(key, LotNews(state, reason))
        news.state = state
        news.reason = reason or news.reason
        return news

    def lot_changes(self) -> tuple[LotChange, ...]:
        return tuple(
            LotChange(key, one.state, one.reason, tuple(one.added), tuple(one.removed))
            for key, one in self.lots.items()
        )

    def put_before(self, older: News) -> None:
        """A commit was not answered: what it said has to be said again."""
        newer_failed, newer_lots = self.failed, self.lots
        settled = set(self.settled)
        self.failed = {offset: one for offset, one in older.failed.items() if offset not in settled} | newer_failed
        self.settled = [offset for offset in older.settled if offset not in newer_failed] + self.settled
        self.requests = older.requests + self.requests
        self.lots = older.lots
        for key, newer in newer_lots.items():
            lot = self.lot(key, newer.state, newer.reason)
            lot.added += newer.added
            lot.removed += newer.removed


NEVER = float("-inf")


class Stage(enum.Enum):
    ASKING = "asking"  # for the lease
    ACTIVE = "active"  # pulling and handling
    DRAINING = "draining"  # nothing new is started; then commit and release
    RELEASING = "releasing"
    LOST = "lost"  # somebody else may have it: wait for a handler that still runs, commit nothing


@dataclass(slots=True)
class Pending:
    """A command on its way, and until when its answer is waited for."""

    command: Command
    sent_at_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A lane that waits, and for as long as it does for this very reason: until then."""

    lane: Lane
    number: int
    until_s: float = NEVER

    @property
    def is_over(self) -> bool:
        return self.lane.waits != self.number


@dataclass(slots=True, eq=False)
class Moving:
    """Messages on their way to a retry or dead-letter subject. Their lane waits until they are safe there."""

    waiting: Waiting
    messages: Sequence[Message]
    to_subject: str
    to_partition: int
    lot: HeldLot | None = None  # that they come from

    @property
    def place(self) -> tuple[str, int]:
        return self.to_subject, self.to_partition


@dataclass(slots=True)
class SentNews:
    """A commit on its way: what it says, and the lanes that may not go on before it is stored."""

    number: int
    offset: int
    version: int  # of the tracker
    news: News
    unsure: list[Waiting]


@dataclass(slots=True, eq=False)
class HeldPartition:
    index: int
    subject: str = ""
    group: str = ""
    member: str = ""
    delay_s: float = 0.0  # a retry subject: how long its messages wait before they are handled
    until: int | None = None  # nothing at or above this offset is handled
    stage: Stage = Stage.ASKING
    epoch: int = 0
    is_claim: bool = False  # of some slots, under somebody else's lease
    ask: int = 0  # the last one
    life_s: float = 0.0  # of the lease, as the grantor said; it is the one that counts
    lease_ends_s: float = NEVER
    authorised_until_s: float = NEVER
    # No handler is started at or after this: the earlier of both, or NEVER once the partition is being given up.
    deadline_s: float = NEVER
    lanes: dict[LaneKey, Lane] = field(default_factory=dict)
    lots: dict[bytes, HeldLot] = field(default_factory=dict)
    delayed: deque[tuple[float, list[Message]]] = field(default_factory=deque)  # not to be handled before
    active: int = 0  # lanes that runs have
    inbox: list[Message] = field(default_factory=list)  # finished, as workers note it, without a lock
    tracker: CommitTracker = field(default_factory=CommitTracker)
    waiting_count: int = 0  # pulled and not finished
    waiting_bytes: int = 0
    moving: deque[Moving] = field(default_factory=deque)
    moving_now: list[Moving] = field(default_factory=list)  # in `moving_batch`
    moving_batch: Batch | None = None
    pull_offset: int = 0  # the next to be pulled
    end_offset: int = 0
    attempts: dict[int, int] = field(default_factory=dict)  # how often a message failed, by mark
    recorded: dict[int, Failure] = field(default_factory=dict)  # what the node knows of failures, or will, by mark
    exhausted: set[int] = field(default_factory=set)  # marks of those that are not tried again by themselves
    news: News = field(default_factory=News)
    unsure: list[Waiting] = field(default_factory=list)  # their failures are not stored yet
    sent: SentNews | None = None
    commit_number: int = 0
    committed: int = 0
    committed_version: int = 0
    requests: list[KeyRequest] = field(default_factory=list)  # to act upon
    request_mark: int = 0
    pending: dict[type[Command], Pending] = field(default_factory=dict)
    pulled_at_s: float = 0.0
    retry_at_s: float = NEVER  # after an error
    error: InturnError | None = None
    is_damaged: bool = False  # the error is about what was pulled, and a pull does not mend it
    is_paused: bool = False
    limit: str | None = None  # of FlowControl: paused by this one, and one key is to blame
    missing: int = 0  # offsets that were gone before they could be pulled
    gaps: deque[tuple[int, int]] = field(default_factory=deque)  # those of them that are above the lowest unfinished
    unwanted: BitMap64 = field(default_factory=BitMap64)  # left out for their tags, above the lowest unfinished
    unwanted_count: int = 0  # of all

    def granted(self, answer: Granted, deadline_s: float, now_s: float) -> None:
        self.stage = Stage.ACTIVE
        self.error = None
        self.epoch = answer.epoch
        self.is_claim = answer.is_claim
        self.life_s = answer.life_s
        self.lease_ends_s = deadline_s
        self.deadline_s = min(self.lease_ends_s, self.authorised_until_s)
        self.tracker = (ClaimTracker if answer.is_claim else CommitTracker)(answer.offset, answer.finished)
        self.pull_offset = self.committed = self.end_offset = answer.offset
        self.attempts = {one.offset: one.attempts for one in answer.failures}
        self.recorded = {one.offset: one for one in answer.failures}
        self.exhausted = {one.offset for one in answer.failures if one.is_exhausted}
        self.lots = {lot.key: HeldLot(lot.key, LotState(lot.state)) for lot in answer.lots}
        self.requests = list(answer.requests)
        self.request_mark = answer.request_mark
        self.pulled_at_s = now_s

    def renewed(self, deadline_s: float) -> None:
        self.lease_ends_s = max(self.lease_ends_s, deadline_s)
        if self.stage is Stage.ACTIVE:
            self.deadline_s = min(self.lease_ends_s, self.authorised_until_s)

    def authorised(self, until_s: float) -> None:
        self.authorised_until_s = until_s
        if self.stage is Stage.ACTIVE:
            self.deadline_s = min(self.lease_ends_s, self.authorised_until_s)

    def context(self) -> Context:
        return Context(self.subject, self.group, self.index, self.member, self.epoch)

    def forget_lanes(self) -> None:
        """Lanes are not seen by the garbage collector, so nothing of this partition must hold them in the end."""
        self.lanes = {}
        self.unsure = []
        if self.sent is not None:
            self.sent.unsure = []
        for lot in self.lots.values():
            if lot.lane is not None and lot.lane.run is None:
                lot.forget_lane()

    def part_lots(self) -> None:
        for lot in self.lots.values():
            lot.forget_lane()
        self.moving.clear()
        self.moving_now = []

    @property
    def is_delayed(self) -> bool:
        return self.delay_s > 0

    @property
    def is_resting(self) -> bool:
        """It waits for the answer to its pull, and for nothing else: nothing runs, or is to be handled or stored."""
        return (
            self.stage is Stage.ACTIVE
            and len(self.pending) == 1
            and Pull in self.pending
            and not (self.waiting_count or self.active or self.inbox or self.lots or self.requests)
            and not (self.moving or self.moving_now or self.delayed or self.unsure or self.limit or self.has_progress)
        )

    # What is pulled

    @property
    def is_through(self) -> bool:
        """All that is to be handled was pulled."""
        return self.until is not None and self.stage is Stage.ACTIVE and self.pull_offset >= self.until

    def bounded(self, offset: int) -> int:
        return offset if self.until is None else min(offset, max(self.until, self.pull_offset))

    def wanted(self, header: BatchHeader, messages: list[Message]) -> list[Message]:
        """Those of a batch that are not pulled yet; what was not chosen is left to others."""
        first, stop = max(self.pull_offset, header.base_offset), self.bounded(header.next_offset)
        if header.compression == CHOSEN and isinstance(self.tracker, ClaimTracker):
            messages = [message for message in messages if first <= message.offset < stop]
            self.tracker.leave_to_others(first, stop, [message.offset for message in messages])
            return messages
        if len(messages) != header.count:  # tags left some out
            return [message for message in messages if first <= message.offset < stop]
        if first == header.base_offset and stop == header.next_offset:
            return messages
        return messages[first - header.base_offset : stop - header.base_offset]

    def begin(self, messages: list[Message]) -> list[Message]:
        """Count messages that were pulled; returns those that are not finished already."""
        last = self.tracker.last
        if messages and messages[0].offset <= last:
            tracker = self.tracker
            messages = [message for message in messages if message.offset > last or message.offset not in tracker]
        self.waiting_count += len(messages)
        self.waiting_bytes += sum([len(message.body) for message in messages])
        return messages

    def skip_to(self, offset: int) -> None:
        """Nothing is stored between the last pull and this offset, or nothing that is wanted."""
        first = self.pull_offset
        if offset > first:
            missing = offset - first - self.unwanted.range_cardinality(first, offset)
            if missing:
                self.missing += missing
                self.gaps.append((first, offset))
                self.unwanted.remove_range(first, offset)  # so as not to count them twice
            for gone in [one for one in self.attempts if first <= one < offset and one not in self.tracker]:
                self.settle(gone)  # it failed, and then the log lost it
            self.tracker.skip(first, offset)
            self.pull_offset = offset

    def leave_out(self, offsets: BitMap64, stop: int) -> None:
        """The tags of these are not wanted: they are done when they are passed by. Those up to `stop` are now."""
        first, last = self.pull_offset, self.bounded(stop)
        offsets.remove_range(0, first)
        if offsets and offsets.max() >= last:
            offsets.remove_range(last, offsets.max() + 1)
        if not offsets:
            return
        self.unwanted_count += len(offsets)
        self.unwanted.remove_range(0, max(0, self.tracker.known_low))
        self.unwanted |= offsets
        if self.attempts:
            for one in [one for one in self.attempts if one in offsets and one not in self.tracker]:
                self.settle(one)  # it failed when the tags of the group were others
        self.tracker.add(offsets)

    # What is finished

    def collect(self) -> None:
        """Take over what workers have noted."""
        count = len(self.inbox)
        if count:
            messages = self.inbox[:count]
            del self.inbox[:count]
            self.finish(messages)

    def pass_by(self, messages: Sequence[Message]) -> None:
        """These are not waited for any more: finished, or parked."""
        self.tracker.add([message.offset for message in messages])
        self.waiting_count -= len(messages)
        self.waiting_bytes -= sum([len(message.body) for message in messages])

    def mark(self, message: Message) -> int:
        return mark_of(message.partition, message.offset, self.index)

    def finish(self, messages: Sequence[Message]) -> None:
        self.pass_by(messages)
        if self.attempts:
            for message in messages:
                self.settle(message.offset)

    def record(self, failure: Failure) -> None:
        """To be stored with the next commit."""
        self.recorded[failure.offset] = self.news.failed[failure.offset] = failure

    def settle(self, offset: int) -> None:
        """A message that may have failed before is over."""
        if self.attempts.pop(offset, None) is not None and offset in self.recorded:
            del self.recorded[offset]
            self.exhausted.discard(offset)
            self.news.failed.pop(offset, None)
            self.news.settled.append(offset)

    @property
    def span(self) -> int:
        """Offsets with messages, from the lowest unfinished to the highest pulled."""
        low = self.tracker.low
        while self.gaps and self.gaps[0][1] <= low:
            self.gaps.popleft()
        unwanted = self.unwanted.range_cardinality(low, max(low, self.pull_offset)) if self.unwanted else 0
        return self.pull_offset - low - unwanted - sum(stop - max(start, low) for start, stop in self.gaps)

    # What is committed

    @property
    def has_progress(self) -> bool:
        return self.tracker.version != self.committed_version or bool(self.news) or self.sent is not None

    @property
    def is_urgent(self) -> bool:
        """Something waits for the next commit: another attempt, or somebody who asked for something."""
        every = [self.news] if self.sent is None else [self.news, self.sent.news]
        return any(news.failed or news.lots or news.requests for news in every)

    def progress(self) -> Progress:
        """All that is to be stored; `stored` or `not_stored` tells what became of it."""
        if self.sent is not None:
            self.not_stored()
        version = self.tracker.version
        low, finished = self.tracker.snapshot()
        self.commit_number += 1
        self.sent = SentNews(self.commit_number, low, version, self.news, self.unsure)
        news, self.news, self.unsure = self.news, News(), []
        return Progress(
            self.index,
            self.epoch,
            low,
            self.commit_number,
            finished,
            tuple(news.failed.values()),
            tuple(news.settled),
            news.lot_changes(),
            tuple(news.requests),
            self.ask if self.is_claim else 0,
        )

    def nothing_new(self) -> Progress:
        """Of a lease that was only kept: as it was granted, and late beside whatever others have committed since."""
        low, finished = self.tracker.snapshot()
        return Progress(self.index, self.epoch, low, 0, finished)

    def stored(self, number: int) -> SentNews | None:
        """The commit with this number was stored; returns what it said if it is the last one sent."""
        sent = self.sent
        if sent is None or sent.number != number:
            return None
        self.sent = None
        self.tracker.stored()
        self.committed = max(self.committed, sent.offset)
        self.committed_version = sent.version
        return sent

    def not_stored(self) -> None:
        if self.sent is not None:
            self.news.put_before(self.sent.news)
            self.unsure = self.sent.unsure + self.unsure
            self.sent = None

    def unstored(self, key: bytes) -> list[ParkedMessage]:
        """Messages on their way to the tail of this lot."""
        return [one for lot in self._lot_news(key) for one in lot.added]

    def unstored_removals(self, key: bytes) -> set[tuple[int, int]]:
        return {place for lot in self._lot_news(key) for place in lot.removed}

    def _lot_news(self, key: bytes) -> list[LotNews]:
        every = [self.news] if self.sent is None else [self.sent.news, self.news]
        return [news.lots[key] for news in every if key in news.lots]
