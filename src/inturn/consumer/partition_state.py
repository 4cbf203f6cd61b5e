"""A partition that a consumer acquires, holds or releases, composed of lease, buffer and progress. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyroaring import BitMap64

from inturn.consumer.context import Context
from inturn.consumer.lane import Lane
from inturn.consumer.outcome import moved_batch
from inturn.consumer.parking import ParkingLot, parked
from inturn.consumer.partition_buffer import PartitionBuffer
from inturn.consumer.partition_lease import PartitionLease, Stage
from inturn.consumer.partition_progress import PartitionProgress
from inturn.model.batch import CHOSEN, Batch, BatchHeader
from inturn.model.message import Message
from inturn.model.offsets import ClaimTracker, mark_of
from inturn.model.settings import LotState
from inturn.protocol.commands import Granted, Progress, Pull


class PartitionState:
    """Holds the steps that touch several of `lease`, `buffer` and `progress`."""

    __slots__ = ("buffer", "group", "index", "lease", "member", "progress", "subject")

    def __init__(
        self,
        index: int,
        subject: str = "",
        group: str = "",
        member: str = "",
        *,
        delay_s: float = 0.0,
        until: int | None = None,
        stage: Stage = Stage.ASKING,
    ) -> None:
        self.index = index
        self.subject = subject
        self.group = group
        self.member = member
        self.lease = PartitionLease(stage)
        self.buffer = PartitionBuffer(delay_s, until)
        self.progress = PartitionProgress()

    def granted(self, answer: Granted, lease_ends_s: float, now_s: float) -> None:
        self.lease.granted(answer, lease_ends_s)
        self.progress.granted(answer)
        self.buffer.begin_at(answer.offset, now_s)

    def context(self) -> Context:
        return Context(self.subject, self.group, self.index, self.member, self.lease.epoch)

    def mark(self, message: Message) -> int:
        return mark_of(message.partition, message.offset, self.index)

    def forget_lanes(self) -> None:
        """The garbage collector does not see lanes, so no part of this partition may refer to a lane in the end."""
        self.buffer.lanes = {}
        self.progress.forget_waits()
        for lot in self.progress.parking_lots.values():
            if lot.lane is not None and lot.lane.run is None:
                lot.forget_lane()

    def forget_parking_lots(self) -> None:
        for lot in self.progress.parking_lots.values():
            lot.forget_lane()
        self.progress.forget_moves()

    @property
    def is_idle(self) -> bool:
        """The partition only waits for the answer to a pull: no handler runs, no message waits, no change is to be
        stored."""
        lease, buffer, progress = self.lease, self.buffer, self.progress
        return (
            lease.stage is Stage.ACTIVE
            and len(lease.pending) == 1
            and Pull in lease.pending
            and not (buffer.waiting_count or buffer.lanes_in_runs or buffer.inbox)
            and not (progress.parking_lots or progress.key_requests or progress.moves or progress.moves_in_flight)
            and not (buffer.delayed or progress.waits or buffer.limit or progress.has_changes)
        )

    # Pulled messages

    @property
    def is_through(self) -> bool:
        """All that is to be handled was pulled."""
        buffer = self.buffer
        return buffer.until is not None and self.lease.stage is Stage.ACTIVE and buffer.pull_offset >= buffer.until

    def wanted(self, header: BatchHeader, messages: list[Message]) -> list[Message]:
        """The messages of a batch that are not pulled yet, without messages of slots that other members claim."""
        buffer, tracker = self.buffer, self.progress.tracker
        first, stop = max(buffer.pull_offset, header.base_offset), buffer.bounded(header.next_offset)
        if header.compression == CHOSEN and isinstance(tracker, ClaimTracker):
            messages = [message for message in messages if first <= message.offset < stop]
            tracker.leave_to_others(first, stop, [message.offset for message in messages])
            return messages
        if len(messages) != header.count:  # tags left some out
            return [message for message in messages if first <= message.offset < stop]
        if first == header.base_offset and stop == header.next_offset:
            return messages
        return messages[first - header.base_offset : stop - header.base_offset]

    def begin(self, messages: list[Message]) -> list[Message]:
        """Count pulled messages; returns the messages that are not finished already."""
        tracker = self.progress.tracker
        last = tracker.last
        if messages and messages[0].offset <= last:
            messages = [message for message in messages if message.offset > last or message.offset not in tracker]
        self.buffer.add(messages)
        return messages

    def skip_to(self, offset: int) -> None:
        """No message to handle is stored between the last pull and this offset."""
        first, progress = self.buffer.pull_offset, self.progress
        if offset > first:
            tracker = progress.tracker
            for gone in [mark for mark in progress.attempts if first <= mark < offset and mark not in tracker]:
                progress.settle(gone)  # failed before the log lost the message
            tracker.skip(first, offset)
            self.buffer.skip_to(offset)

    def leave_out(self, offsets: BitMap64, stop: int) -> None:
        """The tags filter these offsets out: the offsets below `stop` count as finished from now on."""
        progress, first, last = self.progress, self.buffer.pull_offset, self.buffer.bounded(stop)
        offsets.remove_range(0, first)
        if offsets and offsets.max() >= last:
            offsets.remove_range(last, offsets.max() + 1)
        if not offsets:
            return
        tracker = progress.tracker
        self.buffer.leave_out(offsets, max(0, tracker.known_low))
        if progress.attempts:
            for mark in [mark for mark in progress.attempts if mark in offsets and mark not in tracker]:
                progress.settle(mark)  # failed before the tags of the group changed
        tracker.add(offsets)

    @property
    def span(self) -> int:
        """Offsets with messages, from the lowest unfinished offset to the highest pulled offset."""
        return self.buffer.span(self.progress.tracker.low)

    # Finished messages

    def collect(self) -> None:
        """Take over the messages that workers have reported as finished."""
        if self.buffer.inbox:
            self.finish(self.buffer.take_inbox())

    def pass_by(self, messages: Sequence[Message]) -> None:
        """These messages are not waited for any more: finished, or parked."""
        self.progress.tracker.add([message.offset for message in messages])
        self.buffer.remove(messages)

    def finish(self, messages: Sequence[Message]) -> None:
        self.pass_by(messages)
        progress = self.progress
        if progress.attempts:
            for message in messages:
                progress.settle(message.offset)

    # Parked messages

    def park(self, lot: ParkingLot, messages: list[Message]) -> None:
        """Add messages to the tail of the parking lot, stored with the next commit."""
        if messages:
            added = [parked(message) for message in messages]
            self.progress.changes.of_lot(lot.key, lot.state).added += added
            if lot.since_read is not None:
                lot.since_read += added
            self.pass_by(messages)

    def collect_parked(self, lane: Lane) -> None:
        """Take over the finished messages of a lane that is fed by a parking lot."""
        if lane.lot is None:
            return
        count = len(lane.inbox)
        messages = lane.inbox[:count]
        del lane.inbox[:count]
        self.finish_parked(lane.lot, messages)

    def finish_parked(self, lot: ParkingLot, messages: Iterable[Message]) -> None:
        """Finish messages of a resumed key: rows of the parking lot, or newer messages behind the last row."""
        for message in messages:
            place = message.partition, message.offset
            if place in lot.rows:
                lot.rows.discard(place)
                self.progress.changes.of_lot(lot.key, lot.state).removed.append(place)
                self.progress.settle(self.mark(message))
            else:
                self.finish([message])

    def free(self, lane: Lane, lot: ParkingLot) -> None:
        """The parking lot is empty: the key is an ordinary key again from the next commit on."""
        self.progress.changes.of_lot(lot.key, LotState.FREE)
        del self.progress.parking_lots[lot.key]
        lane.lot, lane.inbox = None, self.buffer.inbox

    # Commands

    def begin_commit(self) -> Progress:
        """The progress to store. `PartitionProgress.commit_stored` or `commit_lost` follows."""
        lease = self.lease
        commit, finished = self.progress.begin_commit()
        changes = commit.changes
        return Progress(
            self.index,
            lease.epoch,
            commit.offset,
            commit.number,
            finished,
            tuple(changes.failures.values()),
            tuple(changes.settled),
            changes.lot_changes(),
            tuple(changes.requests),
            lease.acquire_number if lease.is_claim else 0,
        )

    def granted_progress(self) -> Progress:
        """The progress of a lease that was held without consuming: a snapshot from the grant, possibly older than
        later commits."""
        low, finished = self.progress.tracker.snapshot()
        return Progress(self.index, self.lease.epoch, low, 0, finished)

    def begin_move(self) -> Batch:
        """The batch of the moves in flight, or else of the next moves. There must be a move."""
        progress = self.progress
        if progress.move_batch is None:
            messages = progress.begin_moves()
            attempts = [progress.attempts.get(self.mark(message), 1) for message in messages]
            progress.move_batch = moved_batch(messages, attempts)
        return progress.move_batch
