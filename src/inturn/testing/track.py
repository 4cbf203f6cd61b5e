"""The state of the order checker while it reads a history: tracks of a partition's log, and of a group on the
partition."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import msgspec

from inturn.model.message import tag_filter
from inturn.model.routing import SlotSet
from inturn.testing.history import Event, HandlerStart, SendAcknowledged
from inturn.testing.verdict import STR_OFFSETS_MAX

LaneKey: TypeAlias = bytes | int | None
Term: TypeAlias = int | tuple[int, int]  # an epoch, or a claim in it
Identity: TypeAlias = SendAcknowledged | HandlerStart


def ids_differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def differ(one: Identity, other: Identity) -> bool:
    return one.key != other.key or ids_differ(one.message_id, other.message_id)


def name_message(event: Identity) -> str:
    return f"message {event.message_id!r} of key {event.key!r}"


class LogTrack:
    """The known messages of a partition: acknowledged, in `stored`, or seen by a handler."""

    __slots__ = ("acknowledged", "by_key", "messages", "offsets", "seen", "stored")

    def __init__(self) -> None:
        self.acknowledged: dict[int, int] = {}  # offset → index of the first acknowledgement
        self.seen: dict[int, int] = {}  # offset → index of the first handler start
        self.stored: set[int] = set()
        self.messages: dict[int, Identity] = {}
        self.offsets: list[int] = []
        self.by_key: dict[bytes, list[int]] = {}

    def settle(self, events: list[Event], by_key: bool, has_stored: bool) -> None:
        """Sort the messages after the first pass."""
        for offset, index in self.seen.items():
            event = events[index]
            if offset not in self.messages and (not has_stored or offset in self.stored):
                assert type(event) is HandlerStart
                self.messages[offset] = event
        self.offsets = sorted(self.messages.keys() | self.stored)
        if by_key:
            for offset in self.offsets:
                message = self.messages.get(offset)
                if message is not None and message.key is not None:
                    self.by_key.setdefault(message.key, []).append(offset)

    def holds(self, offset: int) -> bool:
        return offset in self.messages or offset in self.stored

    def unwanted(self, expression: str) -> frozenset[int]:
        """Offsets of messages that were acknowledged with tags that the expression filters out."""
        tags = tag_filter(expression)
        if tags is None:
            return frozenset()
        sent = ((offset, one) for offset, one in self.messages.items() if type(one) is SendAcknowledged)
        return frozenset(offset for offset, one in sent if not tags.wants(one.tags))

    def where(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """Indexes of the events that introduced these messages, for the first few offsets."""
        found = (self.acknowledged.get(offset, self.seen.get(offset)) for offset in offsets[:STR_OFFSETS_MAX])
        return tuple(index for index in found if index is not None)


class LaneTrack:
    """A lane. All messages before index `position` of `offsets` are finished or parked."""

    __slots__ = ("leftovers", "offsets", "open", "position")

    def __init__(self, offsets: list[int], position: int) -> None:
        self.offsets = offsets
        self.position = position
        self.open: RunTrack | None = None  # the latest open run; earlier open runs were already checked
        self.leftovers = 0  # runs of lost leases that are still open


class ClaimTrack(msgspec.Struct):
    index: int
    claimant: str
    epoch: int
    slots: SlotSet
    lost_index: int | None = None  # of the grant to a different claimant
    ended_index: int | None = None


class RunTrack(msgspec.Struct):
    index: int
    offset: int
    key: bytes | None
    epoch: int
    consumer: str
    attempt: int | None
    lane: LaneTrack
    claim: ClaimTrack | None = None  # the consumer's claim
    under: int | None = None  # the partition of the lease and epoch, if different
    result: str = ""
    leftover: bool = False

    @property
    def term(self) -> Term:
        """The term of the run: order is checked within a term, and starts again with the next holder."""
        if self.under is not None:
            return -1 - self.under, self.epoch
        return self.epoch if self.claim is None else (self.epoch, self.claim.index)

    def __str__(self) -> str:
        return f"offset {self.offset}" + ("" if self.key is None else f" (key {self.key!r})")

    def close(self, result: str) -> None:
        self.result = result
        if self.lane.open is self:
            self.lane.open = None
        if self.leftover:
            self.lane.leftovers -= 1


class LeaseTrack(msgspec.Struct):
    index: int
    owner: str
    epoch: int
    ended_index: int | None = None


class Track:
    """The track of a group on a partition."""

    __slots__ = (
        *("subject", "group", "partition", "log", "lanes", "open", "last", "finished", "finished_by", "ever_finished"),
        *("floor", "committed", "commit_index", "claimed", "position", "lease", "grants", "epoch_max"),
        *("parked", "ever_parked", "lots", "skipped", "ever_skipped", "attempts", "claims", "elders", "unwanted"),
    )

    def __init__(self, subject: str, group: str, partition: int, log: LogTrack) -> None:
        self.subject, self.group, self.partition, self.log = subject, group, partition, log
        self.lanes: dict[LaneKey, LaneTrack] = {}
        self.elders: dict[bytes, LaneTrack] = {}  # of keys that moved to a different partition
        self.open: dict[str, dict[tuple[int, int], RunTrack]] = {}  # by consumer; by offset and epoch
        self.last: dict[Term, dict[LaneKey, RunTrack]] = {}  # by epoch or claim, the last run of every lane
        self.finished: dict[int, int] = {}  # offset → index of the first finish or skip since the last reset
        self.finished_by: dict[int, RunTrack] = {}  # offset → the finishing run of the highest epoch since then
        self.ever_finished: set[int] = set()
        self.floor = 0  # the offset of the last reset
        self.committed = 0
        self.commit_index: int | None = None
        self.claimed: dict[int, int] = {}  # offset → index of the first commit with the offset in its finished set
        self.position = 0  # index in log.offsets: commits were checked up to here
        self.lease: LeaseTrack | None = None
        self.grants: dict[int, int] = {}  # epoch → index
        self.epoch_max = -1
        self.claims: dict[str, ClaimTrack] = {}  # by claimant, the last claim
        self.parked: set[int] = set()  # in a parking lot, finished there or not
        self.ever_parked: set[int] = set()  # since the last reset
        self.lots: dict[bytes, list[int]] = {}  # by key, a heap of parked offsets; some may be finished already
        self.skipped: set[int] = set()  # skipped since the last reset
        self.ever_skipped: set[int] = set()
        self.unwanted: frozenset[int] = frozenset()  # offsets that the tags of the group filter out
        # By key and offset: the last run of the highest attempt.
        self.attempts: dict[bytes | None, dict[int, RunTrack]] = {}

    def __str__(self) -> str:
        return f"subject {self.subject!r}, group {self.group!r}, partition {self.partition}"

    def lane(self, key: LaneKey, by_key: bool) -> LaneTrack:
        lane = self.lanes.get(key)
        if lane is None:
            offsets = self.log.offsets
            if by_key:
                offsets = self.log.by_key.get(key, []) if isinstance(key, bytes) else []
            offsets = self._wanted(offsets)
            lane = self.lanes[key] = LaneTrack(offsets, bisect_left(offsets, self.floor))
        return lane

    def _wanted(self, offsets: list[int]) -> list[int]:
        return [offset for offset in offsets if offset not in self.unwanted] if self.unwanted else offsets

    def unfinished(self, key: bytes) -> list[int]:
        """The offsets of a key that are neither finished nor parked. Every offset is returned once."""
        lane = self.elders.get(key)
        if lane is None:
            offsets = self._wanted(self.log.by_key.get(key, []))
            lane = self.elders[key] = LaneTrack(offsets, bisect_left(offsets, self.floor))
        found = []
        position, offsets = lane.position, lane.offsets
        while position < len(offsets) and (offsets[position] in self.finished or offsets[position] in self.parked):
            position += 1
        lane.position = position
        if position < len(offsets):
            found = [one for one in offsets[position:] if one not in self.finished and one not in self.parked]
            lane.position = len(offsets)
        return found

    def claim(self, claim: ClaimTrack) -> None:
        """Add a claim. Overlapping claims of the same epoch are lost."""
        for other in self.claims.values():
            if other.epoch == claim.epoch and other.ended_index is None and other.slots.overlaps(claim.slots):
                other.lost_index = other.ended_index = claim.index
        self.claims[claim.claimant] = claim

    def claim_of(self, claimant: str, epoch: int) -> ClaimTrack | None:
        claim = self.claims.get(claimant)
        return claim if claim is not None and claim.epoch == epoch else None

    def finishes(self, offsets: Sequence[int]) -> tuple[int, ...]:
        """Indexes of the first ends that finished these messages, for the first few offsets."""
        return tuple(self.finished[offset] for offset in offsets[:STR_OFFSETS_MAX] if offset in self.finished)

    def is_done(self, offset: int) -> bool:
        """Whether a commit reported the message as finished."""
        return (offset < self.committed or offset in self.claimed) and offset not in self.parked

    def finish(self, run: RunTrack, index: int) -> None:
        offset = run.offset
        self.ever_finished.add(offset)
        self.finished.setdefault(offset, index)
        before = self.finished_by.get(offset)
        if before is None or before.epoch <= run.epoch:
            self.finished_by[offset] = run

    def skip(self, offset: int, index: int) -> None:
        self.finished.setdefault(offset, index)
        self.skipped.add(offset)
        self.ever_skipped.add(offset)

    def park(self, offset: int, epoch: int) -> None:
        """Park a message. A message that a commit reported as finished is not parked again.

        A finish in an older epoch no longer counts: the parking member did not know of this finish, and will run the
        message again.
        """
        if offset in self.parked or self.is_done(offset):
            return
        finisher = self.finished_by.get(offset)
        if finisher is not None and finisher.epoch < epoch and offset not in self.skipped:
            del self.finished[offset], self.finished_by[offset]
        self.parked.add(offset)
        self.ever_parked.add(offset)
        message = self.log.messages.get(offset)
        if message is not None and message.key is not None:
            heappush(self.lots.setdefault(message.key, []), offset)

    def unpark(self, offset: int, index: int) -> None:
        self.parked.discard(offset)
        self.claimed.setdefault(offset, index)

    def overtaken(self, key: bytes, offset: int) -> list[int]:
        """Parked and unfinished messages of a key below `offset`. Every message is returned once."""
        lot = self.lots.get(key)
        overtaken = []
        while lot and lot[0] < offset:
            parked = heappop(lot)
            if parked in self.parked and parked not in self.finished:
                overtaken.append(parked)
        return overtaken

    def waiting_in_lots(self) -> int:
        return sum(1 for offset in self.parked if offset not in self.finished)

    def reset(self, offset: int) -> None:
        self.floor = self.committed = offset
        self.commit_index = None
        self.finished, self.finished_by, self.last, self.claimed = {}, {}, {}, {}
        self.parked, self.ever_parked, self.lots, self.skipped, self.attempts = set(), set(), {}, set(), {}
        self.position = bisect_left(self.log.offsets, offset)
        for lane in (*self.lanes.values(), *self.elders.values()):
            lane.position = bisect_left(lane.offsets, offset)
