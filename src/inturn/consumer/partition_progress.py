"""The progress of a partition: finished messages, failures, and the changes that no commit has stored yet. No I/O.

Messages are named by marks (`mark_of`): the offset, or a number that also names the partition from which the key of the
message moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from inturn.consumer.lane import Lane
from inturn.consumer.parking import ParkingLot
from inturn.consumer.partition_lease import NEVER
from inturn.model.batch import Batch
from inturn.model.message import Message
from inturn.model.offsets import ClaimTracker, CommitTracker
from inturn.model.settings import LotState
from inturn.protocol.commands import Failure, Granted, KeyRequest, LotChange, ParkedMessage

MOVED_AT_ONCE = 1000


@dataclass(slots=True)
class LotChanges:
    """The changes of a parking lot since the last commit."""

    state: LotState
    reason: str = ""
    added: list[ParkedMessage] = field(default_factory=list)
    removed: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Changes:
    """The changes that the next commit stores, besides the finished offsets."""

    failures: dict[int, Failure] = field(default_factory=dict)  # by mark
    settled: list[int] = field(default_factory=list)  # marks of failed messages that are finished now
    lots: dict[bytes, LotChanges] = field(default_factory=dict)  # by key
    requests: list[int] = field(default_factory=list)  # ids of key requests that were carried out

    def __bool__(self) -> bool:
        return bool(self.failures or self.settled or self.lots or self.requests)

    def of_lot(self, key: bytes, state: LotState, reason: str = "") -> LotChanges:
        changes = self.lots.setdefault(key, LotChanges(state, reason))
        changes.state = state
        changes.reason = reason or changes.reason
        return changes

    def lot_changes(self) -> tuple[LotChange, ...]:
        return tuple(
            LotChange(key, lot.state, lot.reason, tuple(lot.added), tuple(lot.removed))
            for key, lot in self.lots.items()
        )

    def put_before(self, older: Changes) -> None:
        """A commit was not answered: the next commit repeats the changes of that commit."""
        newer_failures, newer_lots = self.failures, self.lots
        settled = set(self.settled)
        repeated = {mark: failure for mark, failure in older.failures.items() if mark not in settled}
        self.failures = repeated | newer_failures
        self.settled = [mark for mark in older.settled if mark not in newer_failures] + self.settled
        self.requests = older.requests + self.requests
        self.lots = older.lots
        for key, newer in newer_lots.items():
            lot = self.of_lot(key, newer.state, newer.reason)
            lot.added += newer.added
            lot.removed += newer.removed


@dataclass(frozen=True, slots=True)
class LaneWait:
    """A wait of a lane. The wait is over as soon as `Lane.waits` has another number."""

    lane: Lane
    number: int
    until_s: float = NEVER

    @property
    def is_over(self) -> bool:
        return self.lane.waits != self.number


@dataclass(slots=True, eq=False)
class LaneMove:
    """Messages of a lane that go to a retry or dead-letter subject. The lane waits until they are stored."""

    wait: LaneWait
    messages: Sequence[Message]
    to_subject: str
    to_partition: int
    lot: ParkingLot | None = None  # the parking lot that the messages come from

    @property
    def place(self) -> tuple[str, int]:
        return self.to_subject, self.to_partition


@dataclass(slots=True)
class CommitInFlight:
    """A commit without an answer yet, and the lanes that may not go on before the commit is stored."""

    number: int
    offset: int
    version: int  # of the tracker
    changes: Changes
    waits: list[LaneWait]


@dataclass(slots=True, eq=False)
class PartitionProgress:
    tracker: CommitTracker = field(default_factory=CommitTracker)
    attempts: dict[int, int] = field(default_factory=dict)  # how often a message failed, by mark
    failures: dict[int, Failure] = field(default_factory=dict)  # stored at the node or about to be, by mark
    exhausted: set[int] = field(default_factory=set)  # marks of messages that are not tried again without a request
    parking_lots: dict[bytes, ParkingLot] = field(default_factory=dict)  # by key
    key_requests: list[KeyRequest] = field(default_factory=list)  # to be carried out
    last_request_id: int = 0
    moves: deque[LaneMove] = field(default_factory=deque)  # not sent yet
    moves_in_flight: list[LaneMove] = field(default_factory=list)  # in `move_batch`
    move_batch: Batch | None = None
    changes: Changes = field(default_factory=Changes)  # not in any commit yet
    waits: list[LaneWait] = field(default_factory=list)  # lanes that wait until `changes` are stored
    commit_in_flight: CommitInFlight | None = None
    commit_number: int = 0
    committed_offset: int = 0
    committed_version: int = 0

    def granted(self, answer: Granted) -> None:
        self.tracker = (ClaimTracker if answer.is_claim else CommitTracker)(answer.offset, answer.finished)
        self.committed_offset = answer.offset
        self.attempts = {failure.offset: failure.attempts for failure in answer.failures}
        self.failures = {failure.offset: failure for failure in answer.failures}
        self.exhausted = {failure.offset for failure in answer.failures if failure.is_exhausted}
        self.parking_lots = {lot.key: ParkingLot(lot.key, LotState(lot.state)) for lot in answer.lots}
        self.key_requests = list(answer.requests)
        self.last_request_id = answer.request_mark

    # Failures

    def record(self, failure: Failure) -> None:
        """The next commit stores the failure."""
        self.failures[failure.offset] = self.changes.failures[failure.offset] = failure

    def settle(self, mark: int) -> None:
        """A message that may have failed before is finished."""
        if self.attempts.pop(mark, None) is not None and mark in self.failures:
            del self.failures[mark]
            self.exhausted.discard(mark)
            self.changes.failures.pop(mark, None)
            self.changes.settled.append(mark)

    def reset_attempts(self, key: bytes) -> None:
        """An operator resumed the key: the attempts count from the beginning."""
        attempts = self.attempts
        for failure in [one for one in self.failures.values() if one.key == key and attempts.get(one.offset)]:
            attempts[failure.offset] = 0
            self.exhausted.discard(failure.offset)
            self.record(msgspec.structs.replace(failure, attempts=0, is_exhausted=False))

    # Moves to other subjects

    @property
    def has_moves(self) -> bool:
        return bool(self.moves or self.moves_in_flight)

    def is_moving(self, lane: Lane) -> bool:
        return any(move.wait.lane is lane for move in (*self.moves, *self.moves_in_flight))

    def begin_moves(self) -> list[Message]:
        """Take the waiting moves with the same destination as the first move; returns the messages."""
        place = self.moves[0].place
        rest = deque[LaneMove]()
        for move in self.moves:
            is_next = move.place == place and len(self.moves_in_flight) < MOVED_AT_ONCE
            (self.moves_in_flight if is_next else rest).append(move)
        self.moves = rest
        return [message for move in self.moves_in_flight for message in move.messages]

    def end_moves(self) -> list[LaneMove]:
        """The messages in flight are stored in the other subject."""
        moved, self.moves_in_flight, self.move_batch = self.moves_in_flight, [], None
        return moved

    def forget_moves(self) -> None:
        self.moves.clear()
        self.moves_in_flight, self.move_batch = [], None

    # Commits

    @property
    def has_changes(self) -> bool:
        """There are changes to commit, or a commit is not answered yet."""
        is_behind = self.tracker.version != self.committed_version
        return is_behind or bool(self.changes) or self.commit_in_flight is not None

    @property
    def is_urgent(self) -> bool:
        """The next attempt at a message, or an operator's request, waits for the commit."""
        commit = self.commit_in_flight
        every = [self.changes] if commit is None else [self.changes, commit.changes]
        return any(changes.failures or changes.lots or changes.requests for changes in every)

    def begin_commit(self) -> tuple[CommitInFlight, bytes]:
        """Start a commit: the changes, and the finished set. `commit_stored` or `commit_lost` follows."""
        if self.commit_in_flight is not None:
            self.commit_lost()
        version = self.tracker.version
        low, finished = self.tracker.snapshot()
        self.commit_number += 1
        commit = CommitInFlight(self.commit_number, low, version, self.changes, self.waits)
        self.commit_in_flight, self.changes, self.waits = commit, Changes(), []
        return commit, finished

    def commit_stored(self, number: int) -> CommitInFlight | None:
        """The commit with this number was stored; returns the commit if no newer commit was sent."""
        commit = self.commit_in_flight
        if commit is None or commit.number != number:
            return None
        self.commit_in_flight = None
        self.tracker.stored()
        self.committed_offset = max(self.committed_offset, commit.offset)
        self.committed_version = commit.version
        return commit

    def commit_lost(self) -> None:
        """The commit in flight was not answered: the next commit repeats the changes."""
        if self.commit_in_flight is not None:
            self.changes.put_before(self.commit_in_flight.changes)
            self.waits = self.commit_in_flight.waits + self.waits
            self.commit_in_flight = None

    def forget_waits(self) -> None:
        self.waits = []
        if self.commit_in_flight is not None:
            self.commit_in_flight.waits = []

    # Parking lots

    def lot_to_read(self) -> ParkingLot | None:
        """A parking lot that is being resumed and has no message at hand to run."""
        for lot in self.parking_lots.values():
            if lot.state is LotState.RESUMING and not lot.is_read and not (lot.lane and lot.lane.waiting):
                return lot
        return None

    def additions_to_store(self, key: bytes) -> list[ParkedMessage]:
        """Messages on the way to the tail of this parking lot."""
        return [message for lot in self._lot_changes(key) for message in lot.added]

    def removals_to_store(self, key: bytes) -> set[tuple[int, int]]:
        return {place for lot in self._lot_changes(key) for place in lot.removed}

    def _lot_changes(self, key: bytes) -> list[LotChanges]:
        commit = self.commit_in_flight
        every = [self.changes] if commit is None else [commit.changes, self.changes]
        return [changes.lots[key] for changes in every if key in changes.lots]
