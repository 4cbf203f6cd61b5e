"""The broker: appends, pulls and commits, each with its check.

It knows logs and leases; who should consume is the business of meta. Called under the node's lock, except for
`append` and `move`, which only need the log's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from inturn.broker.keys import Keys
from inturn.broker.leases import LeaseKey, LeaseTable
from inturn.broker.rates import Rates
from inturn.log.engine import Log, LogEngine
from inturn.model.clock import Clock
from inturn.model.commands import (
    Acquire,
    Append,
    Appended,
    Commit,
    Committed,
    Done,
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
)
from inturn.model.errors import (
    GroupConflict,
    InvalidInput,
    LogDamaged,
    NotFound,
    ProducerFenced,
    RouteChanged,
    StaleEpoch,
    StorageError,
)
from inturn.model.observer import Observer
from inturn.model.position import Position
from inturn.model.route import Partition
from inturn.model.settings import PULL_BYTES_MAX
from inturn.model.subject import Subject
from inturn.state.groups import GroupRecord
from inturn.state.offsets import Offsets, finished_count
from inturn.state.producers import Producers
from inturn.state.progress import ProgressRows


class Broker:
    def __init__(
        self,
        engine: LogEngine,
        offsets: Offsets,
        progress: ProgressRows,
        producers: Producers,
        leases: LeaseTable,
        keys: Keys,
        clock: Clock,
        observer: Observer | None,
    ) -> None:
        self._engine = engine
        self._offsets = offsets
        self._progress = progress
        self._producers = producers
        self._clock = clock
        self._observer = observer
        self._logs: dict[Partition, Log] = {}
        self._producer_epochs = producers.epochs()
        self._producer_names: dict[int, str] = {}
        self._appended = Rates[Partition](clock)
        self._done = Rates[tuple[int, int]](clock)  # by group id and partition index
        self.leases = leases
        self.keys = keys

    # Logs

    def open_log(self, partition: Partition) -> Log:
        """Offsets that any group had to do with are never given out again, whatever the disk lost."""
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

    def log(self, subject: Subject, index: int) -> Log:
        if not 0 <= index < subject.partition_count:
            raise NotFound(
                "partition",
                f"{subject.name}/{index}",
                f"the subject has partitions 0 to {subject.partition_count - 1}",
            )
        return self._logs[subject.route.partitions[index]]

    def describe(self, subject: Subject) -> tuple[PartitionDescription, ...]:
        logs = [self.log(subject, index) for index in range(subject.partition_count)]
        return tuple(
            PartitionDescription(
                index,
                log.partition,
                log.start_offset,
                log.end_offset,
                log.size_bytes,
                _state(log),
                self._appended.per_s(log.partition),
            )
            for index, log in enumerate(logs)
        )

    def resolve(self, subject: Subject, position: Position) -> tuple[int, ...]:
        """The offset of a position in every partition. A group that is new has nothing committed: first."""
        return tuple(_resolve(self.log(subject, index), position) for index in range(subject.partition_count))

    # Producing

    def open_producer(self, name: str | None, nonce: str | None = None) -> tuple[int, int]:
        producer_id, epoch = self._producers.open(name, nonce)
        if name is not None:
            self._producer_epochs[producer_id] = epoch
            self._producer_names[producer_id] = name
        return producer_id, epoch

    def append(self, subject: Subject, command: Append, reply: Reply) -> None:
        log = self.log(subject, command.partition)
        batch = command.batch
        current = self._producer_epochs.get(batch.producer_id, batch.producer_epoch)
        if batch.producer_epoch < current:
            name = self._producer_names.get(batch.producer_id, str(batch.producer_id))
            raise ProducerFenced(name, batch.producer_epoch, current)
        if batch.route_version != subject.route.version:
            raise RouteChanged(subject.name, batch.route_version, subject.route.version)
        log.append(batch, reply, command.gap)

    # Consuming

    def acquire(self, group: GroupRecord, command: Acquire) -> Granted:
        lease = self.leases.acquire(LeaseKey(group, command.partition), command)
        stored = self._progress.of_partition(group.id, command.partition)
        done = stored.place.offset + finished_count(stored.place.finished)
        self._done.start((group.id, command.partition), done)
        return Granted(
            lease.epoch,
            stored.place.offset,
            lease.life_s,
            stored.place.finished,
            stored.failures,
            stored.lots,
            self.keys.waiting(group, command.partition),
            self.keys.mark(group),
        )

    def renew(self, group: GroupRecord, command: Renew) -> Renewed:
        alive = []
        for index, epoch in command.held:
            try:
                self.leases.renew(LeaseKey(group, index), command.member, epoch)
            except StaleEpoch:
                continue
            alive.append(index)
        return Renewed(tuple(alive))

    def pull(self, subject: Subject, group: GroupRecord, command: Pull, *, renews: bool) -> Pulled:
        key = LeaseKey(group, command.partition)
        self.leases.check(key, command.member, command.epoch)
        if renews:
            self.leases.renew(key, command.member, command.epoch)
        return self._read(self.log(subject, command.partition), command.offset, command.max_bytes)

    def read(self, subject: Subject, command: Read) -> Pulled:
        return self._read(self.log(subject, command.partition), command.offset, command.max_bytes)

    def commit(self, group: GroupRecord, command: Commit) -> Committed:
        """Take what comes with the current epoch, in one transaction. Late copies are taken, and change nothing."""
        taken = [progress for progress in command.progress if self._holds(group, command.member, progress)]
        stored = self._progress.store(group.id, taken, self._clock.time_ms())
        self.keys.acted_upon(group, stored)
        self._count_done(group, stored)
        if self._observer is not None:
            for progress in stored:
                self._observer.committed(group.subject, group.name, command.member, progress)
        return Committed(tuple(progress.partition for progress in taken))

    def _holds(self, group: GroupRecord, member: str, progress: Progress) -> bool:
        try:
            self.leases.check(LeaseKey(group, progress.partition), member, progress.epoch)
        except StaleEpoch:
            return False
        return True

    def release(self, group: GroupRecord, command: Release) -> None:
        if self.leases.release(LeaseKey(group, command.partition), command.member, command.progress):
            self.keys.acted_upon(group, [command.progress])
            self._count_done(group, [command.progress])

    def check_places(self, subject: Subject, progress: Progress) -> None:
        """Raises InvalidInput for what is beyond the end of the log. Offsets that a group had to do with are never
        given out again, so they would be lost to everybody."""
        places = [
            (progress.partition, progress.offset - 1),
            *((progress.partition, one.offset) for one in progress.failed),
            *((one.partition, one.offset) for lot in progress.lots for one in lot.added),
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

    def read_lot(self, group: GroupRecord, command: ReadLot) -> LotContent:
        self.leases.check(LeaseKey(group, command.partition), command.member, command.epoch)
        return self.keys.read_lot(group, command.partition, command.key, command.after, command.max_bytes)

    def move(self, group: GroupRecord, target: Subject, command: Move, reply: Reply) -> None:
        self.leases.check(LeaseKey(group, command.partition), command.member, command.epoch)
        log = self.log(target, command.to_partition)
        log.append(command.batch, lambda answer: reply(Done() if isinstance(answer, Appended) else answer))

    # Looking and steering

    def group_partitions(self, subject: Subject, group: GroupRecord) -> tuple[GroupPartition, ...]:
        now_s = self._clock.monotonic()
        rows = []
        finished = self._offsets.finished_counts(group.id)
        blocking = self.keys.blocking(group)
        for index, committed in sorted(self._offsets.committed(group.id).items()):
            lease = self.leases.get(LeaseKey(group, index))
            owner = None if lease is None else lease.owner
            remaining_s = None if lease is None or owner is None else max(0.0, lease.deadline_s - now_s)
            epoch = 0 if lease is None else lease.epoch
            end_offset, done = self.log(subject, index).end_offset, finished.get(index, 0)
            done_per_s = self._done.per_s((group.id, index))
            rows.append(
                GroupPartition(
                    index, committed, end_offset, owner, epoch, remaining_s, done, done_per_s, blocking.get(index)
                )
            )
        return tuple(rows)

    def reset(self, subject: Subject, group: GroupRecord, position: Position) -> list[int]:
        """Returns the ids of the key requests that this took back."""
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
        return self.keys.forget(group)

    def _read(self, log: Log, offset: int, max_bytes: int) -> Pulled:
        if offset < 0 or not 0 < max_bytes <= PULL_BYTES_MAX:
            raise InvalidInput(
                f"pull from offset {offset} with max_bytes {max_bytes}: "
                f"the offset must not be negative, the size 1 to {PULL_BYTES_MAX}"
            )
        end_offset = log.end_offset  # before reading: what is below it and not found is not there
        try:
            batches = tuple(log.read(offset, max_bytes))
        except OSError as error:
            raise StorageError(str(log.partition), f"cannot be read: {error}; check the disk") from error
        next_offset = batches[-1].header.next_offset if batches else max(offset, end_offset)
        return Pulled(batches, next_offset, log.end_offset, self._clock.time_ms())


def _state(log: Log) -> str:
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
