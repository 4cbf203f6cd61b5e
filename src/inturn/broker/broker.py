"""The broker: appends, pulls and commits, with their checks.

The broker has the logs and leases; meta decides which member consumes a partition. All methods are called under the
node's lock, except `append` and `move`: these only need the log's own lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from inturn.broker.claims import ClaimTable, HeldClaim
from inturn.broker.growth_gates import GrowthGates
from inturn.broker.keys import Keys
from inturn.broker.leases import LeaseKey, LeaseTable
from inturn.broker.producer_ids import ProducerIds
from inturn.broker.pull_filters import FILTERED_BYTES, Unfiltered
from inturn.broker.rates import Rates
from inturn.broker.shared_delivery import SharedDelivery
from inturn.log.engine import Log, LogEngine
from inturn.log.producer_table import NOBODY
from inturn.model.batch import chosen
from inturn.model.errors import (
    GroupConflict,
    InvalidInput,
    LeaseHeld,
    LogDamaged,
    NotFound,
    StaleEpoch,
    StorageError,
)
from inturn.model.message import tag_filter
from inturn.model.offsets import CommitTracker, Position, place_of
from inturn.model.routing import ALL_SLOTS, Partition, SlotSet, slot_of
from inturn.model.settings import PULL_BYTES_MAX, BrokerGroupState
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.protocol.commands import (
    Acquire,
    Append,
    Appended,
    Claim,
    ClaimDescription,
    Commit,
    Committed,
    Done,
    Fetch,
    Fetched,
    Granted,
    GroupPartition,
    LotContent,
    Move,
    PartitionDescription,
    Progress,
    Pull,
    Pulled,
    Read,
    ReadLot,
    Release,
    Renew,
    Renewed,
    Reply,
    ShutGate,
)
from inturn.protocol.observer import Observer
from inturn.store.groups import GroupRecord
from inturn.store.leases import ProgressRows
from inturn.store.offsets import GateRows, OffsetRows, finished_count, highest_finished, with_finished
from inturn.store.producers import Producers


class Broker:
    def __init__(
        self,
        engine: LogEngine,
        offsets: OffsetRows,
        progress: ProgressRows,
        producers: Producers,
        leases: LeaseTable,
        keys: Keys,
        gates: GateRows,
        clock: Clock,
        observer: Observer | None,
        broker_group: str,
    ) -> None:
        """`broker_group` is the broker group of this broker's partitions. Partitions of other broker groups are at
        other brokers."""
        self.broker_group = broker_group
        self.state = BrokerGroupState.AVAILABLE
        self._engine = engine
        self._offsets = offsets
        self._progress = progress
        self._clock = clock
        self._observer = observer
        self._logs: dict[Partition, Log] = {}
        self._appended = Rates[Partition](clock)
        self._done = Rates[tuple[int, int]](clock)  # by group id and partition index
        self.leases = leases
        self.gates = GrowthGates(gates, progress, keys, leases, self.log, clock)
        self.claims = ClaimTable(leases, clock, observer)
        self.sharing = SharedDelivery(progress, leases, clock, self._count_shared)
        self.keys = keys
        self.producer_ids = ProducerIds(producers)

    # Logs

    def open_log(self, partition: Partition) -> Log:
        """Open or make a log. Offsets that any group has seen are never used again, even after a loss of data."""
        floor = self._offsets.highest(partition.name, partition.broker_group)
        try:
            log = self._engine.open(partition, floor)
        except OSError as error:
            raise StorageError(
                str(partition), f"cannot be opened: {error}; check the disk, then `inturn doctor`"
            ) from error
        self._logs[partition] = log
        self._appended.start(partition, log.end_offset)
        log.on_grown(lambda: self._appended.reached(partition, log.end_offset))
        return log

    def owned(self, subject: Subject) -> list[int]:
        """The partitions of a subject with their log at this broker."""
        return [index for index, one in enumerate(subject.route.partitions) if one.broker_group == self.broker_group]

    def log(self, subject: Subject, index: int) -> Log:
        if not 0 <= index < subject.partition_count:
            raise NotFound(
                "partition",
                f"{subject.name}/{index}",
                f"the subject has partitions 0 to {subject.partition_count - 1}",
            )
        log = self._logs.get(subject.route.partitions[index])
        if log is None:
            home = subject.route.partitions[index].broker_group
            if home != self.broker_group:
                raise InvalidInput(
                    f"partition {subject.name}/{index} is in broker group {home!r}, not here; send the command to a "
                    "broker of that group"
                )
            raise StorageError(
                f"{subject.name}/{index}", "the log could not be made when the subject grew; check the disk, restart"
            )
        return log

    def seal(self, subject: Subject, version: int) -> dict[int, int]:
        """Refuse appends by a route before this version from now on. Returns the end offsets of the subject's logs."""
        return {index: self.log(subject, index).seal(subject.name, version) for index in self.owned(subject)}

    def describe(self, subject: Subject) -> tuple[PartitionDescription, ...]:
        logs = {index: self.log(subject, index) for index in self.owned(subject)}
        return tuple(
            PartitionDescription(
                index=index,
                partition=log.partition,
                start_offset=log.start_offset,
                end_offset=log.end_offset,
                size_bytes=log.size_bytes,
                state=log_state(log),
                appended_per_s=self._appended.per_s(log.partition),
            )
            for index, log in logs.items()
        )

    def resolve(self, subject: Subject, position: Position) -> tuple[int, ...]:
        """The offset of a position in every partition; 0 for partitions of other brokers. "committed" resolves to the
        first offset, because a new group has committed no offset."""
        found = {index: _resolve(self.log(subject, index), position) for index in self.owned(subject)}
        return tuple(found.get(index, 0) for index in range(subject.partition_count))

    # Producing

    def append(self, subject: Subject, command: Append, reply: Reply) -> None:
        log = self.log(subject, command.partition)
        self.producer_ids.check(command.batch)
        log.append(command.batch, reply, command.gap)

    # Consuming

    def acquire(self, group: GroupRecord, command: Acquire) -> Granted:
        key = LeaseKey(group, command.partition)
        self._check_nobody_works_under(key, command)
        lease = self.leases.acquire(key, command)
        stored = self._progress.of_partition(group.id, command.partition)
        done = stored.place.offset + finished_count(stored.place.finished)
        self._done.start((group.id, command.partition), done)
        return Granted(
            epoch=lease.epoch,
            offset=stored.place.offset,
            life_s=lease.life_s,
            finished=stored.place.finished,
            failures=stored.failures,
            lots=stored.lots,
            requests=self.keys.waiting(group, command.partition),
            request_mark=self.keys.last_request_id(group),
        )

    def _check_nobody_works_under(self, key: LeaseKey, command: Acquire) -> None:
        """Raise LeaseHeld if claimants may work under a lease that its owner acquires again: a member that acquires a
        partition again releases its earlier lease, and thereby ends the claims."""
        lease = self.leases.get(key)
        if lease is None or lease.owner != command.member or lease.ask == command.ask:
            return
        if self.claims.live(key) or (command.keeps and self.claims.may_be_forgotten(key)):
            raise LeaseHeld(key.group.name, str(key.partition), f"{command.member}, whose claimants still work on it")

    def claim(self, group: GroupRecord, command: Claim) -> Granted:
        """Like `acquire`, for some slots of a partition whose lease a different member holds."""
        claim = self.claims.acquire(LeaseKey(group, command.partition), command)
        lease = self.leases.check(LeaseKey(group, command.partition), command.owner, command.epoch)
        stored = self._progress.of_partition(group.id, command.partition)
        slots = claim.slots
        return Granted(
            epoch=claim.epoch,
            offset=stored.place.offset,
            life_s=lease.life_s,
            finished=stored.place.finished,
            # The slot of a message without a key is unknown here: every claimant receives the failure.
            failures=tuple(one for one in stored.failures if one.key is None or slot_of(one.key) in slots),
            lots=tuple(one for one in stored.lots if slot_of(one.key) in slots),
            requests=tuple(one for one in self.keys.waiting(group, command.partition) if slot_of(one.key) in slots),
            request_mark=self.keys.last_request_id(group),
            is_claim=True,
        )

    def _claim_or_lease(self, key: LeaseKey, member: str, epoch: int, ask: int | None = None) -> HeldClaim | None:
        """The claim of this member, or None if the member holds the lease. Raises StaleEpoch without either."""
        lease = self.leases.get(key)
        if lease is not None and lease.owner != member and self.claims.find(key, member) is not None:
            return self.claims.check(key, member, epoch, ask)
        self.leases.check(key, member, epoch)
        return None

    def renew(self, group: GroupRecord, command: Renew) -> Renewed:
        alive = []
        for index, epoch in command.held:
            try:
                self._renew(LeaseKey(group, index), command.member, epoch)
            except StaleEpoch:
                continue
            alive.append(index)
        return Renewed(tuple(alive), tuple(one for one in alive if self._is_wanted_back(group, command.member, one)))

    def _is_wanted_back(self, group: GroupRecord, member: str, index: int) -> bool:
        lease = self.leases.get(LeaseKey(group, index))
        return lease is not None and lease.is_wanted_back and lease.owner != member

    def _renew(self, key: LeaseKey, member: str, epoch: int) -> None:
        if self._claim_or_lease(key, member, epoch) is not None:
            self.claims.renew(key, member, epoch)
        else:
            self.leases.renew(key, member, epoch)

    def pull(self, subject: Subject, group: GroupRecord, command: Pull, *, renews: bool) -> Pulled:
        key = LeaseKey(group, command.partition)
        claim = self._claim_or_lease(key, command.member, command.epoch)
        if renews:
            self._renew(key, command.member, command.epoch)
        slots = ALL_SLOTS if claim is None else claim.slots
        return self._read(self.log(subject, command.partition), command, slots)

    def read(self, subject: Subject, command: Read) -> Pulled:
        return self._read(self.log(subject, command.partition), command, SlotSet.from_bytes(command.slots))

    def commit(self, group: GroupRecord, command: Commit) -> Committed:
        """Store the progress of partitions with the current epoch, in a transaction. Late copies are accepted without a
        change."""
        taken = [progress for progress in command.progress if self._holds(group, command.member, progress)]
        self._store(group, command.member, [one for one in taken if not self._is_late(group, command.member, one)])
        return Committed(tuple(progress.partition for progress in taken))

    def _store(self, group: GroupRecord, member: str, taken: Sequence[Progress]) -> None:
        claims = [self.claims.find(LeaseKey(group, one.partition), member) for one in taken]
        merged = [one if claim is None else self._merged(group, one) for one, claim in zip(taken, claims, strict=True)]
        stored = self._progress.store(group.id, merged, self._clock.time_ms())
        for one, claim in zip(taken, claims, strict=True):
            if claim is not None:
                claim.number = one.number
                claim.done += finished_count(one.finished)
        self.keys.acted_upon(group, stored)
        self._count_done(group, stored)
        if self._observer is not None:
            for progress in stored:
                lease = self.leases.get(LeaseKey(group, progress.partition))
                owner = member if lease is None or lease.owner is None else lease.owner
                self._observer.committed(group.subject, group.name, owner, progress)

    def _merged(self, group: GroupRecord, progress: Progress) -> Progress:
        """The finished messages of a claimant, merged with the stored progress of the partition.

        After a restart, a late copy of an earlier commit cannot be recognised. So failures of finished messages are
        ignored, except failures of parked messages: parked messages count as finished, and may still fail.
        """
        stored = self._progress.of_partition(group.id, progress.partition)
        place, parked = stored.place, {lot.key for lot in stored.lots}
        if progress.failed:
            done = CommitTracker(place.offset, place.finished)
            failed = tuple(one for one in progress.failed if one.offset not in done or one.key in parked)
            progress = msgspec.structs.replace(progress, failed=failed)
        offset, finished = with_finished(place, progress.finished)
        number = place.number + 1 if place.epoch == progress.epoch else 1
        return msgspec.structs.replace(progress, offset=offset, finished=finished, number=number)

    def _is_late(self, group: GroupRecord, member: str, progress: Progress) -> bool:
        """Whether the progress is a late copy of a claimant's commit. The store recognises late copies of lease
        owners."""
        claim = self.claims.find(LeaseKey(group, progress.partition), member)
        return claim is not None and progress.number <= claim.number

    def _holds(self, group: GroupRecord, member: str, progress: Progress) -> bool:
        try:
            self._claim_or_lease(LeaseKey(group, progress.partition), member, progress.epoch, progress.ask)
        except StaleEpoch:
            return False
        return True

    def release(self, group: GroupRecord, command: Release) -> None:
        key = LeaseKey(group, command.partition)
        if self._claim_or_lease(key, command.member, command.progress.epoch, command.progress.ask) is not None:
            if not self._is_late(group, command.member, command.progress):
                self._store(group, command.member, [command.progress])
            self.claims.release(key, command.member, command.progress.epoch)
            return
        claims = self.claims.call_back(key)
        if claims:
            raise LeaseHeld(group.name, str(command.partition), f"{claims[0].claimant}, under the lease")
        if command.progress.number == 0 and self.claims.may_be_forgotten(key):  # sent only by a lease holder of Spark
            raise LeaseHeld(group.name, str(command.partition), "tasks from before a restart, maybe")
        if self.leases.release(key, command.member, command.progress):
            self.keys.acted_upon(group, [command.progress])
            self._count_done(group, [command.progress])

    def check_places(self, subject: Subject, progress: Progress) -> None:
        """Raise InvalidInput for offsets beyond the end of the log. Offsets that a group has seen are never used
        again, so all groups would lose such offsets."""
        places = [
            (progress.partition, progress.offset - 1),
            *(place_of(one.offset, progress.partition) for one in progress.failed),
            *((one.partition, one.offset) for lot in progress.lots for one in lot.added),
            (progress.partition, highest_finished(progress.finished)),
        ]
        for index, offset in places:
            end_offset = self.log(subject, index).end_offset
            if offset >= end_offset:
                raise InvalidInput(
                    f"progress of partition {progress.partition} with offset {offset} of partition {index}, "
                    f"whose log ends at {end_offset}"
                )

    def _count_done(self, group: GroupRecord, stored: Iterable[Progress]) -> None:
        for progress in stored:
            done = progress.offset + finished_count(progress.finished)
            self._done.reached((group.id, progress.partition), done)

    def _count_shared(self, group: GroupRecord, partition: int, done: int, is_start: bool) -> None:
        if is_start:
            self._done.start((group.id, partition), done)
        else:
            self._done.reached((group.id, partition), done)

    def fetch(self, subject: Subject, group: GroupRecord, command: Fetch, *, is_first: bool) -> Fetched:
        """Deliver messages of a shared group, as many as available; see `SharedDelivery`."""
        return self.sharing.fetch(group, self.log(subject, command.partition), command, is_first=is_first)

    def read_lot(self, group: GroupRecord, command: ReadLot) -> LotContent:
        self._claim_or_lease(LeaseKey(group, command.partition), command.member, command.epoch)
        return self.keys.read_lot(group, command.partition, command.key, command.after, command.max_bytes)

    def move(self, group: GroupRecord, target: Subject, command: Move, reply: Reply) -> None:
        """Append to the retry or dead-letter subject. The caller checks receipts of a shared group before, under the
        node's lock."""
        self.check_mover(group, command)
        log = self.log(target, command.to_partition)
        log.append(command.batch, lambda answer: reply(Done() if isinstance(answer, Appended) else answer))

    def check_mover(self, group: GroupRecord, command: Move) -> None:
        """Raise StaleEpoch unless the member holds the source partition."""
        if group.is_exclusive:
            self._claim_or_lease(LeaseKey(group, command.partition), command.member, command.epoch)
        if command.batch.producer_id != NOBODY:
            raise InvalidInput(
                f"a batch of producer {command.batch.producer_id} cannot be moved; moved batches have producer id 0"
            )

    # Descriptions, resets and reads

    def group_partitions(self, subject: Subject, group: GroupRecord) -> tuple[GroupPartition, ...]:
        now_s = self._clock.monotonic()
        rows = []
        finished = self._offsets.finished_counts(group.id)
        blocking = self.keys.blocking(group) if group.is_exclusive else {}  # in other modes no message waits for a key
        here = set(self.owned(subject))
        for index, committed in sorted(self._offsets.committed(group.id).items()):
            if index not in here:
                continue
            lease = self.leases.get(LeaseKey(group, index))
            owner = None if lease is None else lease.owner
            remaining_s = None if lease is None or owner is None else max(0.0, lease.deadline_s - now_s)
            epoch = 0 if lease is None else lease.epoch
            end_offset, done = self.log(subject, index).end_offset, finished.get(index, 0)
            done_per_s = self._done.per_s((group.id, index))
            closed = self.gates.closed(subject, group, index)
            shared = self.sharing.find(group, index)
            rows.append(
                GroupPartition(
                    partition=index,
                    committed=committed,
                    end_offset=end_offset,
                    owner=owner,
                    epoch=epoch,
                    remaining_s=remaining_s,
                    finished_count=done,
                    done_per_s=done_per_s,
                    blocking=blocking.get(index),
                    gate=None if closed is None else ShutGate(closed.parent, closed.offset),
                    outstanding=0 if shared is None else len(shared.given),
                    waiting=0 if shared is None else shared.waiting_count,
                    redeliveries=0 if shared is None else shared.redeliveries,
                )
            )
        return tuple(rows)

    def group_claims(self, subject: Subject, group: GroupRecord) -> tuple[ClaimDescription, ...]:
        keys = [LeaseKey(group, index) for index in range(subject.partition_count)]
        return tuple(one for key in keys for one in self.claims.describe(key))

    def reset(self, subject: Subject, group: GroupRecord, position: Position) -> list[int]:
        """Reset a group without live leases. Returns the ids of the key requests that the reset deleted."""
        now_s = self._clock.monotonic()
        for index in range(subject.partition_count):
            lease = self.leases.get(LeaseKey(group, index))
            if lease is not None and lease.is_live(now_s):
                raise GroupConflict(
                    group.name,
                    f"{lease.owner} holds the lease of partition {index}; stop the group's consumers before a reset",
                )
        if position.kind == "committed":
            return []
        offsets = dict(enumerate(self.resolve(subject, position)))
        self._offsets.reset(group.id, offsets, self._clock.time_ms())
        self.leases.forget(group)
        self.gates.forget(group)
        self.sharing.forget(group)
        return self.keys.forget(group)

    def check_stored(self, subject: Subject, index: int, offset: int) -> None:
        """Raise NotFound unless a message is stored at this place."""
        log = self.log(subject, index)
        start_offset, end_offset = log.start_offset, log.end_offset
        if start_offset <= offset < end_offset:
            batches = self._read(log, Read(subject.name, index, offset, 1), ALL_SLOTS).batches
            if batches and batches[0].header.base_offset <= offset:
                return
        why = "no message is stored there: a gap"
        if offset < start_offset:
            why = f"retention has removed it: the partition begins at {start_offset}"
        elif offset >= end_offset:
            why = f"the partition ends at {end_offset}"
        raise NotFound("message", f"{subject.name}/{index}@{offset}", why)

    def _read(self, log: Log, command: Pull | Read, slots: SlotSet) -> Pulled:
        offset, max_bytes = command.offset, command.max_bytes
        is_filtered = bool(command.tags) and tag_filter(command.tags) is not None
        if offset < 0 or not 0 < max_bytes <= PULL_BYTES_MAX:
            raise InvalidInput(
                f"pull from offset {offset} with max_bytes {max_bytes}: "
                f"the offset must not be negative, the size 1 to {PULL_BYTES_MAX}"
            )
        end_offset = log.end_offset  # before reading: an offset below that is not found does not exist
        try:
            batches = tuple(log.read(offset, min(max_bytes, FILTERED_BYTES) if is_filtered else max_bytes))
        except OSError as error:
            raise StorageError(str(log.partition), f"cannot be read: {error}; check the disk") from error
        next_offset = batches[-1].header.next_offset if batches else max(offset, end_offset)
        if is_filtered:
            return Unfiltered(batches, next_offset, log.end_offset, self._clock.time_ms(), slots=slots)
        if not slots.is_all:
            batches = tuple(chosen(batch, slots) for batch in batches)
        return Pulled(batches, next_offset, log.end_offset, self._clock.time_ms())


def log_state(log: Log) -> str:
    """The state of a log: "ok", "stopped" or "damaged"."""
    match log.trouble:
        case None:
            return "ok"
        case LogDamaged():
            return "damaged"
        case _:
            return "stopped"


def _resolve(log: Log, position: Position) -> int:
    match position.kind:
        case "last":
            return log.end_offset
        case "timestamp":
            return log.offset_at(position.value)
        case "offset":
            return min(max(position.value, log.start_offset), log.end_offset)
        case _:
            return log.start_offset
