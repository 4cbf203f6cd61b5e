"""Flow control: which limit pauses the pulls of a partition, and which message the partition waits for. No I/O."""

from __future__ import annotations

from inturn.consumer.partition_state import PartitionState
from inturn.consumer.scheduler import Scheduler
from inturn.model.message import Message
from inturn.model.settings import SPAN_MAX, ConsumerSettings
from inturn.protocol.commands import Failure

QUICK_BUFFERED_COUNT = 4096
LONG_S = 1.0  # messages behind a handler that runs for longer do not count as waiting
STUCK_SHARE = 4  # of `buffered_bytes`: messages behind failing or hanging messages count only up to this share


class FlowLimits:
    def __init__(self, settings: ConsumerSettings, scheduler: Scheduler) -> None:
        self._settings = settings
        self._scheduler = scheduler

    def pauses(self, state: PartitionState, now_s: float) -> bool:
        """Whether flow control withholds pulls of this partition. The lease is renewed all the same."""
        buffer, is_through = state.buffer, state.is_through
        buffer.limit = None if is_through else self.limit_of(state)
        if is_through or buffer.limit is not None:
            return True
        flow = self._settings.flow
        count_max = self.buffered_count
        if buffer.waiting_count < count_max and buffer.waiting_bytes < flow.buffered_bytes:
            return False
        count, size_bytes = self.held_back(state, now_s)
        return buffer.waiting_count - count >= count_max or buffer.waiting_bytes - size_bytes >= flow.buffered_bytes

    def may_resume(self, state: PartitionState) -> bool:
        """Enough is free to pull again. The span is judged by the last snapshot for a commit, which suffices."""
        flow, buffer = self._settings.flow, state.buffer
        return (
            2 * buffer.waiting_count < self.buffered_count
            and 2 * buffer.waiting_bytes < flow.buffered_bytes
            and buffer.pull_offset - state.progress.tracker.known_low < flow.span
        )

    @property
    def buffered_count(self) -> int:
        """The limit of buffered messages. For quick handlers the limit is low: a long buffer does not fit into the
        processor's cache."""
        count = self._settings.flow.buffered_count
        return min(count, QUICK_BUFFERED_COUNT) if self._scheduler.is_tiny else count

    def held_back(self, state: PartitionState, now_s: float) -> tuple[int, int]:
        """The number and bytes of messages behind a message that fails or hangs. These messages must not stop the pulls
        of other keys."""
        count = size_bytes = 0
        for lane in state.buffer.lanes.values():
            run = lane.run
            # A run without a current lane has sent lanes to a process; only a hanging lane is left there by then.
            is_at_it = run is not None and (lane.runs_now or run.lane is None)
            if lane.waits or (run is not None and is_at_it and now_s - run.asked_at_s > LONG_S):
                count += lane.waiting
                size_bytes += sum([len(message.body) for message in lane.messages[lane.at :]])
        return count, size_bytes

    def is_span_full(self, state: PartitionState) -> bool:
        buffer, tracker = state.buffer, state.progress.tracker
        span, pulled = self._settings.flow.span, buffer.pull_offset - tracker.known_low
        if pulled < span:
            return False
        # Filtered-out offsets count only when the finished set would be too large to commit.
        return state.span >= span or (bool(buffer.filtered_out) and buffer.pull_offset - tracker.low >= SPAN_MAX)

    def limit_of(self, state: PartitionState) -> str | None:
        """The limit that stops pulls of the partition, if one or a few keys have used the limit up."""
        if self.is_span_full(state):
            return "span"
        is_full = state.buffer.waiting_bytes >= STUCK_SHARE * self._settings.flow.buffered_bytes
        return "buffered_bytes" if is_full else None

    def name_blocking(self, state: PartitionState) -> None:
        """Record the message that the partition waits for, even if the message has not failed, so that operators find
        its key."""
        head = self.blocking(state)
        progress = state.progress
        if head is not None and head.offset not in progress.failures and not progress.attempts.get(head.offset):
            progress.attempts.setdefault(head.offset, 0)
            error = "unfinished: the whole partition waits for it"
            lane = state.buffer.lanes.get(head.key)
            progress.record(Failure(head.offset, head.key, 0, error, 0 if lane is None else lane.waiting))

    def blocking(self, state: PartitionState) -> Message | None:
        """The message that stops the partition: the lowest unfinished message, or the first message of the longest
        lane."""
        if state.buffer.limit == "buffered_bytes":
            lanes = (lane for lane in state.buffer.lanes.values() if lane.lot is None)
            longest = max(lanes, key=lambda lane: lane.waiting, default=None)
            if longest is not None and longest.head is not None:
                return longest.head
        progress = state.progress
        moving = [message for move in (*progress.moves, *progress.moves_in_flight) for message in move.messages]
        lanes = (lane for lane in state.buffer.lanes.values() if lane.lot is None)
        heads = [head for lane in lanes if (head := lane.head) is not None]
        unfinished = [one for one in (*moving, *heads) if one.offset not in progress.tracker]
        return min(unfinished, key=lambda one: one.offset, default=None)
