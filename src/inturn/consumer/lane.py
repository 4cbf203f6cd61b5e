"""A lane: messages that run one after the other. A key of a partition, a partition as a whole, or a single message.

Where handlers take microseconds, one of them runs at a time anyway, and a lane for each key costs more than it gives.
Then all of a partition is one **straight** lane, in the order of the log, which is the order of every key in it. It is
spread over the lanes of its keys as soon as something is the matter: a handler that takes longer, or fails, or somebody
who asks something of a key.
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

LaneKey: TypeAlias = bytes | int | None  # a key; the offset of a message on its own; None: the whole partition
STRAIGHT = -1  # no offset: the key of a straight lane


class Lane(msgspec.Struct, eq=False, gc=False):
    """While a run has it, its worker moves `at`, and writes `kept`, `failed` and `outcome`, without a lock.

    A lane is ready (`bucket` is not -1), in a run, waiting, or empty; never two of them at once. There may be as many
    as messages, so they are kept from the garbage collector: whoever drops a partition takes its lanes apart.
    """

    state: PartitionState
    key: LaneKey
    messages: list[Message]
    inbox: list[Message]  # where the worker notes what is finished
    at: int = 0  # the next of `messages` to be handled
    bucket: int = -1
    run: Run | None = None
    waits: int = 0  # suspended, blocked, or behind a message that is being moved; another number each time
    parks: str = ""  # why it is to be parked as soon as nothing of it runs; nothing is started any more
    uncommitted: Sequence[Message] = ()  # manual acknowledgement: handled, not committed
    failed: Sequence[Message] = ()  # given to the handler, and not over
    outcome: Outcome | None = None  # why the run stopped here; None: no failure
    lot: ParkingLot | None = None  # its messages come from a parking lot
    # A straight lane that was spread: nothing of it is begun any more. If it ran then, what is left of the key that may
    # have been running waits in `then`, from the place `spread_at` on.
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
        """A handler has a message of it, or may have."""
        running = None if self.run is None else self.run.lane
        return running is not None and (running is self or running.then is self)

    @property
    def is_plain(self) -> bool:
        """Nothing is the matter with it."""
        return self.outcome is None and not self.uncommitted and self.lot is None and not self.parks

    @property
    def head(self) -> Message | None:
        """The first message that is not over."""
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
        """They are the next again."""
        self.messages[: self.at] = messages
        self.at = 0
