"""Growth gates: whether a child partition that growth has made is open to a group.

A child is open when all its parents are open, and all messages of the moved slots below the barrier are finished,
parked, or deleted by retention. An open child stays open, durably. When a child opens, the parking lots of its slots
move to the child: see `docs/decisions/0011-growth.md`.

The search for unfinished messages walks over slot vectors, and continues where the last search stopped. The search is
cut into pieces, because the node's lock is held. A gate whose search was cut is closed, and `is_cut` shows that a
further check is worthwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from inturn.broker.keys import Keys
from inturn.broker.leases import LeaseKey, LeaseTable
from inturn.log.engine import Log
from inturn.model.batch import slots_of
from inturn.model.errors import LogDamaged
from inturn.model.offsets import CommitTracker
from inturn.model.routing import SLOT_COUNT, Descent, SlotSet, slot_of
from inturn.model.settings import LotState
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.protocol.commands import Progress
from inturn.store.groups import GroupRecord
from inturn.store.leases import ProgressRows
from inturn.store.offsets import GateRows

WALK_BYTES = 4 << 20
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ClosedGate:
    """Why a gate is closed: the parent with unfinished messages, and the offset of such a message, if known."""

    parent: int
    offset: int | None = None
    is_cut: bool = False  # the search was cut before its end


class GrowthGates:
    """The growth gates of all groups. Call all methods under the node's lock."""

    def __init__(
        self,
        rows: GateRows,
        progress: ProgressRows,
        keys: Keys,
        leases: LeaseTable,
        log: Callable[[Subject, int], Log],
        clock: Clock,
    ) -> None:
        self._rows = rows
        self._progress = progress
        self._keys = keys
        self._leases = leases
        self._log = log
        self._clock = clock
        self._open = rows.all()
        # By group id, child and parent: all messages of the moved slots below this offset were finished.
        self._walked: dict[tuple[int, int, int], int] = {}

    def closed(self, subject: Subject, group: GroupRecord, partition: int) -> ClosedGate | None:
        """Why the partition is closed to the group; None: the partition is open, from now on for good."""
        descents = subject.route.descents_of(partition)
        if not descents or not group.is_exclusive or (group.id, partition) in self._open:
            return None  # without order, no message must come first
        for descent in descents:
            found = self._closed_by(subject, group, descent)
            if found is not None:
                return found
        keys = {one.parent: self._moving(group, one) for one in descents}
        self._rows.open(group.id, partition, keys, self._clock.time_ms())
        self._open.add((group.id, partition))
        for descent in descents:
            self._keys.moved(group, descent.parent, keys[descent.parent], partition)
            self._walked.pop((group.id, partition, descent.parent), None)
        return None

    def home(self, subject: Subject, group: GroupRecord, slot: int) -> int:
        """The partition whose lease holder carries out requests for keys of a slot: the last open partition of the
        slot's lineage."""
        lineage = subject.route.lineage(slot)
        for before, after in itertools.pairwise(lineage):
            if self.closed(subject, group, after) is not None:
                return before
        return lineage[-1]

    def without_moved(self, subject: Subject, group: GroupRecord, progress: Progress) -> Progress:
        """The progress without the parking lots and failures of keys that have moved to an open child.

        All of these were stored before; the member repeats the commit because an answer was lost. The parking lots
        are no longer in this partition.
        """
        if not subject.route.descents or not (progress.lots or progress.failed):
            return progress
        gone = [one for one in subject.route.descents_from(progress.partition) if (group.id, one.child) in self._open]

        def is_here(key: bytes | None) -> bool:
            return key is None or not any(one.has(slot_of(key)) for one in gone)

        lots = tuple(one for one in progress.lots if is_here(one.key))
        failed = tuple(one for one in progress.failed if is_here(one.key))
        return msgspec.structs.replace(progress, lots=lots, failed=failed)

    def forget(self, group: GroupRecord) -> None:
        """After a reset, check all gates of the group again."""
        self._open = {one for one in self._open if one[0] != group.id}
        self._walked = {place: offset for place, offset in self._walked.items() if place[0] != group.id}

    def _closed_by(self, subject: Subject, group: GroupRecord, descent: Descent) -> ClosedGate | None:
        if self.closed(subject, group, descent.parent) is not None:
            return ClosedGate(descent.parent)
        found = self._unfinished(subject, group, descent)
        if found is None and self._is_busy(group, descent):
            return ClosedGate(descent.parent)
        return found

    def _unfinished(self, subject: Subject, group: GroupRecord, descent: Descent) -> ClosedGate | None:
        """The first unfinished message of the moved slots."""
        place = self._progress.of_partition(group.id, descent.parent).place
        if place.offset >= descent.barrier:
            return None
        log = self._log(subject, descent.parent)
        done = CommitTracker(place.offset, place.finished)
        wanted = SlotSet.from_bytes(descent.slots).flags
        walked = group.id, descent.child, descent.parent
        offset = max(place.offset, log.start_offset, self._walked.get(walked, 0))
        left_bytes = WALK_BYTES
        while offset < descent.barrier:
            try:
                batches = log.read(offset, READ_BYTES)
            except (LogDamaged, OSError):
                return ClosedGate(descent.parent, offset)  # consumers of the parent report the damage
            if not batches:
                return None  # the barrier was synced before it was used: a missing message was deleted
            for batch in batches:
                for at, slot in enumerate(slots_of(batch), batch.header.base_offset):
                    # An old log may have an invalid slot. Its partition is unknown, so such a message closes all gates.
                    if (slot >= SLOT_COUNT or wanted[slot]) and offset <= at < descent.barrier and at not in done:
                        self._walked[walked] = at
                        return ClosedGate(descent.parent, at)
                offset = batch.header.next_offset
                left_bytes -= batch.header.total_bytes
            self._walked[walked] = offset
            if left_bytes <= 0:
                return ClosedGate(descent.parent, offset, is_cut=True)
        return None

    def _is_busy(self, group: GroupRecord, descent: Descent) -> bool:
        """Whether the parent's lease holder works, or may begin to work, on a parking lot that will move. A holder with
        an expired lease counts until a different member acquires the lease."""
        lease = self._leases.get(LeaseKey(group, descent.parent))
        if lease is None or lease.owner is None:
            return False
        if any(descent.has(slot_of(one.key)) for one in self._keys.waiting(group, descent.parent)):
            return True
        lots = self._progress.of_partition(group.id, descent.parent).lots
        return any(lot.state != LotState.PARKED and descent.has(slot_of(lot.key)) for lot in lots)

    def _moving(self, group: GroupRecord, descent: Descent) -> list[bytes]:
        """The moved keys that have a parking lot or a waiting request in the parent."""
        keys = {lot.key for lot in self._progress.of_partition(group.id, descent.parent).lots}
        keys |= {one.key for one in self._keys.waiting(group, descent.parent)}
        return sorted(key for key in keys if descent.has(slot_of(key)))
