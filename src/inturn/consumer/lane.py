"""A lane: messages that run in order. The messages of a key, of a whole partition, or a single message.

If handlers take microseconds, only one runs at a time anyway, and a lane per key costs more than it brings. Then the
whole partition is a single **straight** lane in the order of the log, which keeps the order of every key. The straight
lane is spread over lanes by key as soon as a handler takes longer or fails, or an operator requests something for a
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from inturn.consumer.outcome import Outcome
from inturn.model.message import Message

if TYPE_CHECKING:
    from inturn.consumer.parking import ParkingLot
    from inturn.consumer.partition_state import PartitionState
    from inturn.consumer.run import Run

LaneKey: TypeAlias = bytes | int | None  # a key; the offset of a single message; None: the whole partition
STRAIGHT = -1  # no offset: the key of a straight lane


class Lane(msgspec.Struct, eq=False, gc=False):
    """While the lane is in a run, the worker moves `at`, and writes `uncommitted`, `failed` and `outcome`, without a
    lock.

    A lane is in one state at a time: ready (`bucket` is not -1), in a run, waiting, or empty. There may be as many
    lanes as messages, so lanes are hidden from the garbage collector: code that drops a partition must take the lanes
    apart.
    """

    state: PartitionState
    key: LaneKey
    messages: list[Message]
    inbox: list[Message]  # the worker appends finished messages here
    at: int = 0  # the next of `messages` to be handled
    bucket: int = -1
    run: Run | None = None
    waits: int = 0  # suspended, blocked, or behind a message that is being moved; a new number for every wait
    parks: str = ""  # the reason to park the lane as soon as no handler runs; no handler is started any more
    uncommitted: Sequence[Message] = ()  # manual acknowledgement: handled, not committed
    failed: Sequence[Message] = ()  # passed to the handler, and not over
    outcome: Outcome | None = None  # why the run stopped here; None: no failure
    lot: ParkingLot | None = None  # the parking lot that the messages come from
    # A straight lane that was spread: no message is begun any more. If the lane ran at that time, the rest of the key
    # that may have been running waits in `then`, from the place `spread_at` on.
    is_spread: bool = False
    then: Lane | None = None
    spread_at: int = 0

    @property
    def waiting(self) -> int:
        return len(self.messages) - self.at

    @property
    def is_straight(self) -> bool:
        return self.key == STRAIGHT

    @property
    def runs_now(self) -> bool:
        """A handler has a message of the lane, or may have."""
        running = None if self.run is None else self.run.lane
        return running is not None and (running is self or running.then is self)

    @property
    def is_plain(self) -> bool:
        """The lane has no failure, no uncommitted message, no parking lot and no request to park."""
        return self.outcome is None and not self.uncommitted and self.lot is None and not self.parks

    @property
    def head(self) -> Message | None:
        """The first unfinished message."""
        for messages in (self.uncommitted, self.failed):
            if messages:
                return messages[0]
        run = self.run
        if run is not None and self.runs_now and run.given:
            return run.given[0]
        return self.messages[self.at] if self.waiting else None

    def forget_handled(self) -> None:
        if self.at:
            del self.messages[: self.at]
            self.at = 0

    def put_back(self, messages: Sequence[Message]) -> None:
        """Make these messages the next messages again."""
        self.messages[: self.at] = messages
        self.at = 0
