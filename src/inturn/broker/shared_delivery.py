"""Shared groups: delivery of messages from the log, and storing of acknowledgements. Called under the node's lock.

A message that is not acknowledged counts as failed. The count is durable before the next delivery, so that a message
that crashes its consumer every time is given up in the end, even across restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inturn.broker.leases import LeaseKey, LeaseTable
from inturn.broker.pull_filters import Uncut
from inturn.broker.shared_partition import SharedPartition
from inturn.log.engine import Log
from inturn.model.batch import StoredBatch, content_bytes_of
from inturn.model.errors import InvalidInput, ReceiptExpired, StorageError
from inturn.model.settings import MIB, PULL_BYTES_MAX, SPAN_MAX, VISIBILITY_S_MAX, VISIBILITY_S_MIN
from inturn.model.time import Clock
from inturn.protocol.commands import (
    Acknowledge,
    Acknowledged,
    Delivery,
    Fetch,
    PartitionReceipts,
    Progress,
    Pulled,
    Receipt,
    Returned,
)
from inturn.store.database import KEY_BYTES_MAX, check_bytes
from inturn.store.groups import GroupRecord
from inturn.store.leases import ProgressRows

FETCH_COUNT_MAX = 100_000
DELAY_S_MAX = 12 * 3600.0
READ_BYTES = 256 * 1024
MORE_BYTES = 8 * MIB  # the most by which an answer may exceed its estimated size


class SharedDelivery:
    """The delivery of all shared groups.

    `on_done` is called with the progress of a partition: group, index, number of finished messages, and whether the
    partition was just opened.
    """

    def __init__(
        self,
        progress: ProgressRows,
        leases: LeaseTable,
        clock: Clock,
        on_done: Callable[[GroupRecord, int, int, bool], None],
    ) -> None:
        self._progress = progress
        self._leases = leases
        self._clock = clock
        self._on_done = on_done
        self._parts: dict[tuple[int, int], SharedPartition] = {}  # by group id and partition index
        self._answers: dict[tuple[int, str], tuple[int, Acknowledged]] = {}  # the last answer, by group id and member

    def fetch(self, group: GroupRecord, log: Log, command: Fetch, *, is_first: bool) -> Uncut:
        """Deliver the available messages, maybe none."""
        _check(command)
        now_s = self._clock.monotonic()
        part = self._opened(group, command.partition)
        part.expire(now_s)
        is_heard = part.is_newest(command.member, command.ask)
        if is_first:
            is_heard = part.hear(command.member, command.ask, command.answered, now_s)
        fetching = _Fetching(part, log, command, now_s)
        waited_s = 0.0
        if is_heard:
            waited_s = now_s - part.heard_at_s(command.member)
            try:
                fetching.give_again()
                fetching.give_new()
            except StorageError:
                if not fetching.deliveries:  # else the next fetch meets the error
                    raise
            if part.failed:
                self._store(group, [(command.partition, part)])
        pulled = Pulled(tuple(fetching.batches), part.cursor, log.end_offset, self._clock.time_ms())
        return Uncut(part.epoch, tuple(fetching.deliveries), pulled, waited_s, tuple(fetching.kept))

    def acknowledge(self, group: GroupRecord, command: Acknowledge) -> Acknowledged:
        """Store all acknowledgements with a valid receipt, in a transaction. The answer names the refused offsets."""
        answered = self._answers.get((group.id, command.member))
        if answered is not None and command.number <= answered[0]:
            return answered[1]
        for receipts in command.receipts:
            _check_returned(receipts.returned)  # before any change
        refused: list[tuple[int, int]] = []
        changed: list[tuple[int, SharedPartition]] = []
        now_s = self._clock.monotonic()
        for receipts in command.receipts:
            part = self._opened(group, receipts.partition)
            part.expire(now_s)
            refused += [(receipts.partition, at) for at in _take(part, receipts, command.member, now_s)]
            changed.append((receipts.partition, part))
        self._store(group, changed)
        answer = Acknowledged(tuple(refused))
        self._answers[group.id, command.member] = command.number, answer
        return answer

    def check(self, group: GroupRecord, partition: int, epoch: int, member: str, receipts: Sequence[Receipt]) -> None:
        """Raise ReceiptExpired unless the member still holds all these messages."""
        now_s = self._clock.monotonic()
        part = self._opened(group, partition)
        over = [one.offset for one in receipts if epoch != part.epoch or not part.holds(one, member, now_s)]
        if over or not receipts:
            raise ReceiptExpired(group.name, str(partition), tuple(over))

    def leave(self, group: GroupRecord, member: str) -> list[int]:
        """The member has left. Its messages are delivered again. Returns the partitions of these messages."""
        self._answers.pop((group.id, member), None)
        now_s = self._clock.monotonic()
        parts = self._parts_of(group)
        had = [index for index, part in parts.items() if member in part.shares()]
        for part in parts.values():
            part.free(member, now_s)
        return had

    def forget_member(self, group: GroupRecord, member: str) -> None:
        """Drop a silent member. The member keeps its messages until their receipts expire."""
        self._answers.pop((group.id, member), None)
        for part in self._parts_of(group).values():
            part.forget(member)

    def _parts_of(self, group: GroupRecord) -> dict[int, SharedPartition]:
        return {index: part for (group_id, index), part in self._parts.items() if group_id == group.id}

    def find(self, group: GroupRecord, partition: int) -> SharedPartition | None:
        """The present state of a partition; None without a fetch since the node was started."""
        part = self._parts.get((group.id, partition))
        if part is not None:
            part.expire(self._clock.monotonic())
        return part

    def next_due_s(self, group: GroupRecord, partition: int) -> float | None:
        """The time of the next possible redelivery; None without outstanding or returned messages."""
        part = self._parts.get((group.id, partition))
        due_s = float("inf") if part is None else part.next_due_s()
        return None if due_s == float("inf") else due_s

    def forget(self, group: GroupRecord) -> None:
        """After a reset: all receipts become invalid, and the group is loaded again."""
        for place in [place for place in self._parts if place[0] == group.id]:
            del self._parts[place]

    def _opened(self, group: GroupRecord, partition: int) -> SharedPartition:
        part = self._parts.get((group.id, partition))
        if part is None:
            stored = self._progress.of_partition(group.id, partition)
            epoch = self._leases.raise_epoch(LeaseKey(group, partition))
            part = SharedPartition(epoch, stored.place.offset, stored.place.finished, stored.failures)
            self._parts[group.id, partition] = part
            self._tell_done(group, partition, part, is_start=True)
        return part

    def _store(self, group: GroupRecord, parts: Sequence[tuple[int, SharedPartition]]) -> None:
        """Store the changes of the partitions in a transaction. After an error, the next call stores the changes."""
        progress = []
        for index, part in parts:
            part.commit_number += 1
            low, finished = part.tracker.snapshot()
            failed, settled = tuple(part.failed.values()), tuple(part.settled)
            progress.append(
                Progress(
                    partition=index,
                    epoch=part.epoch,
                    offset=low,
                    number=part.commit_number,
                    finished=finished,
                    failed=failed,
                    settled=settled,
                )
            )
        self._progress.store(group.id, progress, self._clock.time_ms())
        for index, part in parts:
            part.failed.clear()
            part.settled.clear()
            self._tell_done(group, index, part)

    def _tell_done(self, group: GroupRecord, partition: int, part: SharedPartition, *, is_start: bool = False) -> None:
        self._on_done(group, partition, part.tracker.low + part.tracker.count_above, is_start)


class _Fetching:
    """An answer to a Fetch: redelivered messages first, then new messages, within the limits of the command."""

    def __init__(self, part: SharedPartition, log: Log, command: Fetch, now_s: float) -> None:
        self.batches: list[StoredBatch] = []
        self.kept: list[Sequence[int]] = []  # by batch: the delivered offsets
        self.deliveries: list[Delivery] = []
        self._part = part
        self._log = log
        self._command = command
        self._now_s = now_s
        self._ends_at_s = now_s + command.visibility_s
        self._bytes = 0  # estimated, without decompression
        self._more_bytes = 0  # the most by which the real size may exceed the estimate

    @property
    def _left(self) -> int:
        is_full = self._bytes >= self._command.max_bytes or self._more_bytes >= MORE_BYTES
        return 0 if is_full else self._command.max_count - len(self.deliveries)

    def give_again(self) -> None:
        due = self._part.due(self._now_s, self._left)
        try:
            while due and self._left > 0:
                due = due[self._give_first_of(due) :]
        finally:
            for offset in due:
                self._part.put_off(offset, self._now_s)

    def _give_first_of(self, due: Sequence[int]) -> int:
        """Deliver the due messages of a single batch. Returns how many due offsets were processed."""
        batch = next(iter(self._read(due[0], 1)), None)
        first = self._log.end_offset if batch is None else batch.header.base_offset
        gone = [offset for offset in due if offset < first]
        for offset in gone:
            self._part.skip(offset, offset + 1)
        if gone or batch is None:
            return len(gone) or len(due)
        inside = [offset for offset in due if offset < batch.header.next_offset]
        self._give(batch, inside)
        return len(inside)

    def give_new(self) -> None:
        part = self._part
        while self._left > 0 and part.cursor < (end_offset := self._log.end_offset):
            if part.cursor - part.tracker.low >= SPAN_MAX:
                return  # a larger finished set could not be stored
            batches = self._read(part.cursor, min(self._command.max_bytes, READ_BYTES))
            for batch in batches:
                if self._left <= 0:
                    return
                self._pass_gap(batch.header.base_offset)
                header = batch.header
                wanted = part.new_ones(header.base_offset, header.next_offset, self._left)
                is_cut = len(wanted) == self._left
                if wanted:
                    self._give(batch, wanted)
                part.pass_to(wanted[-1] + 1 if is_cut else header.next_offset)
            if not batches:
                self._pass_gap(end_offset)

    def _pass_gap(self, offset: int) -> None:
        if offset > self._part.cursor:
            self._part.skip(self._part.cursor, offset)
            self._part.pass_to(offset)

    def _give(self, batch: StoredBatch, offsets: Sequence[int]) -> None:
        part, command = self._part, self._command
        self.batches.append(batch)
        self.kept.append(offsets)
        if len(offsets) == batch.header.count:
            self._bytes += len(batch.payload)
        else:
            content_bytes = content_bytes_of(batch)
            part_bytes = content_bytes * len(offsets) // batch.header.count
            self._bytes += part_bytes
            self._more_bytes += content_bytes - part_bytes
        self.deliveries += [part.give(at, command.member, command.ask, self._ends_at_s) for at in offsets]

    def _read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        try:
            return self._log.read(offset, max_bytes)
        except OSError as error:
            raise StorageError(str(self._log.partition), f"cannot be read: {error}; check the disk") from error


def _take(part: SharedPartition, receipts: PartitionReceipts, member: str, now_s: float) -> list[int]:
    """Apply valid receipts. Returns the offsets of invalid receipts."""
    over: list[int] = []
    is_current = receipts.epoch == part.epoch
    for done in receipts.done:
        if is_current and part.holds(done, member, now_s):
            part.acknowledge(done.offset)
        else:
            over.append(done.offset)
    for one in receipts.returned:
        if is_current and part.holds(Receipt(one.offset, one.number), member, now_s):
            part.give_back(one.offset, now_s + one.delay_s, one.error, one.key)
        else:
            over.append(one.offset)
    return over


def _check_returned(returned: Sequence[Returned]) -> None:
    for one in returned:
        if not 0.0 <= one.delay_s <= DELAY_S_MAX:
            raise InvalidInput(f"a delay of {one.delay_s!r} s for offset {one.offset}: use 0 to {DELAY_S_MAX:g}")
        if one.key is not None:
            check_bytes("key", one.key, KEY_BYTES_MAX)


def _check(command: Fetch) -> None:
    if not 0 < command.max_count <= FETCH_COUNT_MAX or not 0 < command.max_bytes <= PULL_BYTES_MAX:
        raise InvalidInput(
            f"a fetch of {command.max_count} messages and {command.max_bytes} bytes: "
            f"the limits are {FETCH_COUNT_MAX} and {PULL_BYTES_MAX}"
        )
    if not VISIBILITY_S_MIN <= command.visibility_s <= VISIBILITY_S_MAX:
        raise InvalidInput(
            f"visibility_s is {command.visibility_s!r}; it must be {VISIBILITY_S_MIN:g} to {VISIBILITY_S_MAX:g} seconds"
        )
