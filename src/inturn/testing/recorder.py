"""A recorder that builds a history while the system runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import cast

from pyroaring import BitMap64

from inturn.model.errors import InvalidInput
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.protocol.commands import Progress
from inturn.testing.history import (
    HANDLER_RESULTS,
    LEASE_ENDS,
    ClaimEnded,
    ClaimGranted,
    Committed,
    ConsumerCrashed,
    Event,
    GroupFiltered,
    Grown,
    HandlerEnd,
    HandlerResult,
    HandlerStart,
    History,
    KeyResumed,
    KeySkipped,
    LeaseEnd,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)


class Recorder:
    """Implements `inturn.protocol.observer.Observer`; handlers and producers of a test report the other events.

    May be called from any thread; events keep the order of the calls. Call `started` first and `ended` last in the
    handler, so that the end is recorded before the consumer continues: an end that is recorded late looks like an
    overlap.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.history = History()  # grows while threads record: check a `snapshot`

    def snapshot(self) -> History:
        """A copy of the history so far."""
        with self._lock:
            return History(self.history)

    def sent(
        self,
        subject: str,
        partition: int,
        offset: int,
        key: bytes | None = None,
        message_id: str | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        with self._lock:
            at_s = self._clock.monotonic()
            self._add(SendAcknowledged(subject, partition, offset, key, message_id, tags, at_s=at_s))

    def group_filtered(
        self, subject: str, group: str, tags: str, unwanted: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        """The group consumes with this tag expression. `unwanted` has further offsets that are filtered out, in
        addition to messages that were `sent` with other tags."""
        with self._lock:
            at_s = self._clock.monotonic()
            self._add(GroupFiltered(subject, group, tags, dict(unwanted or {}), at_s=at_s))

    def started(
        self,
        subject: str,
        group: str,
        partition: int,
        offset: int,
        key: bytes | None,
        consumer: str,
        epoch: int,
        message_id: str | None = None,
        *,
        attempt: int | None = None,
        under: int | None = None,
    ) -> None:
        """`under`: the partition of the lease, if different from `partition` (a parking lot that moved)."""
        with self._lock:
            at_s = self._clock.monotonic()
            what = (subject, group, partition, offset, key)
            # By position: called for every message.
            self._add(HandlerStart(*what, consumer, epoch, message_id, attempt, under, at_s=at_s))

    def ended(
        self,
        subject: str,
        group: str,
        partition: int,
        offset: int,
        key: bytes | None,
        consumer: str,
        epoch: int,
        message_id: str | None = None,
        *,
        result: str,
    ) -> None:
        """Raises InvalidInput unless `result` is a `HandlerResult`."""
        if result not in HANDLER_RESULTS:
            raise InvalidInput(f"handler result {result!r}: use one of {', '.join(sorted(HANDLER_RESULTS))}")
        known = cast(HandlerResult, str(result))
        with self._lock:
            at_s = self._clock.monotonic()
            # By position: called for every message.
            self._add(HandlerEnd(subject, group, partition, offset, key, consumer, epoch, message_id, known, at_s=at_s))

    def crashed(self, consumer: str) -> None:
        with self._lock:
            self._add(ConsumerCrashed(consumer, at_s=self._clock.monotonic()))

    def restarted(self) -> None:
        with self._lock:
            self._add(ProcessRestarted(at_s=self._clock.monotonic()))

    def claim_granted(self, subject: str, group: str, partition: int, claimant: str, epoch: int, slots: bytes) -> None:
        with self._lock:
            at_s = self._clock.monotonic()
            self._add(ClaimGranted(subject, group, partition, claimant, epoch, slots, at_s=at_s))

    def claim_ended(self, subject: str, group: str, partition: int, claimant: str, epoch: int) -> None:
        with self._lock:
            self._add(ClaimEnded(subject, group, partition, claimant, epoch, at_s=self._clock.monotonic()))

    def grown(self, subject: Subject) -> None:
        descents = tuple((one.child, one.parent, one.slots, one.barrier) for one in subject.route.descents)
        with self._lock:
            self._add(Grown(subject.name, descents, at_s=self._clock.monotonic()))

    def offsets_reset(self, subject: str, group: str, offsets: Mapping[int, int]) -> None:
        with self._lock:
            self._add(OffsetsReset(subject, group, dict(offsets), at_s=self._clock.monotonic()))

    def key_skipped(self, subject: str, group: str, partition: int, offset: int, key: bytes | None) -> None:
        with self._lock:
            self._add(KeySkipped(subject, group, partition, offset, key, at_s=self._clock.monotonic()))

    def key_resumed(self, subject: str, group: str, partition: int, key: bytes | None) -> None:
        with self._lock:
            self._add(KeyResumed(subject, group, partition, key, at_s=self._clock.monotonic()))

    # Events that a node reports to its observer.

    def lease_granted(self, subject: str, group: str, partition: int, owner: str, epoch: int) -> None:
        with self._lock:
            self._add(LeaseGranted(subject, group, partition, owner, epoch, at_s=self._clock.monotonic()))

    def lease_ended(self, subject: str, group: str, partition: int, owner: str, epoch: int, why: str) -> None:
        if why not in LEASE_ENDS:
            raise InvalidInput(f"end of a lease {why!r}: use one of {', '.join(sorted(LEASE_ENDS))}")
        known = cast(LeaseEnd, str(why))
        with self._lock:
            self._add(LeaseEnded(subject, group, partition, owner, epoch, known, at_s=self._clock.monotonic()))

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        finished = tuple(BitMap64.deserialize(progress.finished)) if progress.finished else ()
        parked = tuple((one.partition, one.offset) for lot in progress.lots for one in lot.added)
        unparked = tuple(place for lot in progress.lots for place in lot.removed)
        with self._lock:
            event = Committed(
                subject=subject,
                group=group,
                partition=progress.partition,
                owner=owner,
                epoch=progress.epoch,
                offset=progress.offset,
                finished=finished,
                parked=parked,
                unparked=unparked,
                at_s=self._clock.monotonic(),
            )
            self._add(event)

    def _add(self, event: Event) -> None:
        self.history.record(event)
