"""The parking lot of one key, as the holder of its partition sees it.

The messages are rows at the node. While the lot is being resumed, its rows are read from the head and run in a lane;
newer messages of the key go to its tail, so that they wait in order wherever the lot goes. Once the end has been read
and nothing more is on its way to the tail, newer messages wait in the lane behind the last rows instead; when those
are over, the lane is an ordinary one, and the commit that removes the last row frees the key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from inturn.consumer.lane import Lane
from inturn.model.message import Message, Origin, Outgoing
from inturn.model.settings import LotState
from inturn.protocol.commands import ParkedMessage

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(slots=True, eq=False)
class ParkingLot:
    key: bytes
    state: LotState
    lane: Lane | None = None  # while it is being resumed
    rows: set[tuple[int, int]] = field(default_factory=set)  # read and not removed: (partition, offset)
    after: int = 0  # the position up to which it was read
    is_read: bool = False  # up to its end
    since_read: list[ParkedMessage] | None = None  # a read is on its way: what may be behind the tail it finds
    not_again: set[tuple[int, int]] = field(default_factory=set)  # removed, though that read may still find them
    read_early: set[tuple[int, int]] = field(default_factory=set)  # read although their commit is not answered yet

    @property
    def takes_to_tail(self) -> bool:
        """Where a newer message of the key goes: to the tail of the lot, or else to the lane."""
        return self.state is LotState.PARKED or not self.is_read

    def forget_lane(self) -> None:
        """A lane is not seen by the garbage collector: the circle has to be cut."""
        if self.lane is not None:
            self.lane.lot = None
            self.lane = None

    def begin_again(self) -> None:
        """Nothing of it runs: the next time it is read from its head."""
        self.forget_lane()
        self.rows, self.after, self.is_read, self.since_read = set(), 0, False, None


def parked(message: Message) -> ParkedMessage:
    content = Outgoing(
        message.body, message.key, message.born_at_ms, message.tags, message.properties, message.message_id
    )
    return ParkedMessage(message.partition, message.offset, _encoder.encode(content))


def unparked(one: ParkedMessage, subject: str) -> Message:
    message = _decoder.decode(one.content)
    message.offset = one.offset
    message.origin = Origin(subject, one.partition)
    return message
