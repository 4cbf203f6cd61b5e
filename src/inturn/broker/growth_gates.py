"""GrowthGates: whether a partition that was born of growth is open to a group.

A child is open when every parent is open and everything below the barrier whose slot went to that child is finished,
parked, or gone by retention. Once open it stays so, durably. What is parked of its slots moves to it then: see
`docs/decisions/0011-growth.md`.

Looking for what is unfinished is a walk over slot vectors, from where the last one stopped. It is cut into pieces,
since the node's lock is held: a gate that was not looked at to the end is closed, and `is_cut` says that it is worth
asking again.
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
    """What keeps a gate shut: in which parent, and which message, if that is known."""

    parent: int
    offset: int | None = None
    is_cut: bool = False  # it was not looked at to the end


class GrowthGates:
    """Call it under the node's lock."""

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
        # By group id, child and parent: everything below of the moved slots was finished when it was last looked at.
        self._walked: dict[tuple[int, int, int], int] = {}

    def closed(self, subject: Subject, group: GroupRecord, partition: int) -> ClosedGate | None:
        """What keeps the partition shut for the group; None: it is open, from now on for good."""
        descents = subject.route.descents_of(partition)
        if not descents or not group.is_exclusive or (group.id, partition) in self._open:
            return None  # without order nothing has to come first
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
        """The partition whose holder acts on keys of a slot: the last that is open of those that have had it."""
        lineage = subject.route.lineage(slot)
        for before, after in itertools.pairwise(lineage):
            if self.closed(subject, group, after) is not None:
                return before
        return lineage[-1]

    def without_moved(self, subject: Subject, group: GroupRecord, progress: Progress) -> Progress:
        """The same without what is said of keys that have moved on to a child that is open: all of it was stored
        before, and is said again since an answer was lost. The lots are not here any more."""
        if not subject.route.descents or not (progress.lots or progress.failed):
            return progress
        gone = [one for one in subject.route.descents_from(progress.partition) if (group.id, one.child) in self._open]

        def is_here(key: bytes | None) -> bool:
            return key is None or not any(one.has(slot_of(key)) for one in gone)

        lots = tuple(one for one in progress.lots if is_here(one.key))
        failed = tuple(one for one in progress.failed if is_here(one.key))
        return msgspec.structs.replace(progress, lots=lots, failed=failed)

    def forget(self, group: GroupRecord) -> None:
        """After a reset: whatever is open has to be looked at again."""
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
        """The first message of the moved slots that is not finished."""
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
                return ClosedGate(descent.parent, offset)  # its consumers say what is wrong with it
            if not batches:
                return None  # the barrier was synced before it counted: what is not there is gone
            for batch in batches:
                for at, slot in enumerate(slots_of(batch), batch.header.base_offset):
                    # A slot that is none may be in an old log; whose it would be nobody can tell: it holds back all.
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
        """Somebody works on a lot that is to move, or may begin to: also whoever was silent for too long, as long as
        nobody has taken its lease."""
        lease = self._leases.get(LeaseKey(group, descent.parent))
        if lease is None or lease.owner is None:
            return False
        if any(descent.has(slot_of(one.key)) for one in self._keys.waiting(group, descent.parent)):
            return True
        lots = self._progress.of_partition(group.id, descent.parent).lots
        return any(lot.state != LotState.PARKED and descent.has(slot_of(lot.key)) for lot in lots)

    def _moving(self, group: GroupRecord, descent: Descent) -> list[bytes]:
        """The keys of which something is parked, or was asked, in a parent."""
        keys = {lot.key for lot in self._progress.of_partition(group.id, descent.parent).lots}
        keys |= {one.key for one in self._keys.waiting(group, descent.parent)}
        return sorted(key for key in keys if descent.has(slot_of(key)))
