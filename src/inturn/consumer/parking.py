"""The parking lot of a key, as the holder of the partition sees it.

The messages are rows at the node. While the key is being resumed, rows are read from the head of the parking lot and
run in a lane; newer messages of the key go to the tail, so that the order is kept wherever the parking lot moves. Once
the end has been read and no message is on the way to the tail, newer messages wait in the lane behind the last rows
instead. When those rows are over, the lane is an ordinary lane, and the commit that removes the last row frees the key.
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
    lane: Lane | None = None  # while the key is being resumed
    rows: set[tuple[int, int]] = field(default_factory=set)  # read and not removed: (partition, offset)
    after: int = 0  # the position up to which rows were read
    is_read: bool = False  # up to the end
    # A read is in flight: messages added since, maybe behind the tail that the read finds.
    since_read: list[ParkedMessage] | None = None
    not_again: set[tuple[int, int]] = field(default_factory=set)  # removed rows that the read may still return
    # Rows that were read before the commit that adds them was answered.
    read_early: set[tuple[int, int]] = field(default_factory=set)

    @property
    def takes_to_tail(self) -> bool:
        """Newer messages of the key go to the tail of the parking lot, not to the lane."""
        return self.state is LotState.PARKED or not self.is_read

    def forget_lane(self) -> None:
        """The garbage collector does not see lanes: cut the reference cycle."""
        if self.lane is not None:
            self.lane.lot = None
            self.lane = None

    def begin_again(self) -> None:
        """No message of the lot runs: the next read starts at the head."""
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
