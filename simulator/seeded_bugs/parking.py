"""Bugs of the consumer's parking lots, and of keys that are skipped."""

from __future__ import annotations

import msgspec

import inturn.store.parking_lots
from inturn.consumer.dispatcher import Dispatcher
from inturn.consumer.key_requests import KeyRequests
from inturn.consumer.lane import Lane
from inturn.consumer.parking import ParkingLot
from inturn.consumer.partition_state import PartitionState
from inturn.model.message import Message
from inturn.model.settings import LotState
from inturn.protocol.commands import Granted
from simulator.seeded_bugs.bug import Bugs, Patch, edited

BUGS = Bugs()
_instead_of, _add, _add_edit = BUGS.instead_of, BUGS.add, BUGS.add_edit

# Parking

_park = Dispatcher.park
_granted = PartitionState.granted
_begin_again = ParkingLot.begin_again


@_instead_of(PartitionState, "park")
def parked_messages_are_not_written(self: PartitionState, lot: ParkingLot, messages: list[Message]) -> None:
    """Messages of a parked key count as passed by, but nobody stores them."""
    self.pass_by(messages)


_add(
    "newer_messages_of_a_parked_key_run",
    "consumer",
    "While a key is parked, its newer messages run.",
    Patch(ParkingLot, "takes_to_tail", property(lambda lot: False)),
)
_add(
    "newer_messages_do_not_wait_for_a_resumed_key",
    "consumer",
    "While a key is being resumed, its newer messages go to a lane instead of the tail of its lot.",
    Patch(ParkingLot, "takes_to_tail", property(lambda lot: lot.state is LotState.PARKED)),
)


@_instead_of(PartitionState, "granted")
def parked_keys_are_not_handed_over(self: PartitionState, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder does not know which keys are parked."""
    _granted(self, msgspec.structs.replace(answer, lots=()), deadline_s, now_s)


_add(
    "key_is_free_before_its_last_message",
    "consumer",
    "A key counts as free when its lot was read, though what was read has not been handled; the node believes it.",
    Patch(Dispatcher, "go_on", edited(Dispatcher.go_on, " and not lane.lot.rows:", ":")),
    Patch(inturn.store.parking_lots, "_free", edited(inturn.store.parking_lots._free, "left is not None", "False")),
)
_add_edit(
    "key_is_free_before_its_lot_is_read",
    "A key counts as free when nothing of its lot is at hand, though more may be in it.",
    Dispatcher,
    "go_on",
    "lane.lot.is_read and not lane.lot.rows:",
    "not lane.lot.rows:",
)
_add_edit(
    "rows_are_removed_when_they_are_read",
    "Messages are taken out of the parking lot when they are read, not when they are over.",
    Dispatcher,
    "lot_read",
    "lane = lot.lane\n",
    "lane = lot.lane; removed = state.progress.changes.of_lot(lot.key, lot.state).removed\n"
    "    removed += [(one.partition, one.offset) for one in read]\n",
)
_add_edit(
    "tail_is_forgotten_when_the_end_is_read",
    "What came to the tail of a lot while its end was being read is not looked for.",
    Dispatcher,
    "lot_read",
    "if content.is_end:",
    "if False:",
)
_add_edit(
    "what_is_over_of_a_lot_is_read_again",
    "A lot is read from its head again, and with it what is over but not stored as such yet.",
    Dispatcher,
    "lot_read",
    "if (one.partition, one.offset) not in lot.not_again]",
    "]",
)


@_instead_of(ParkingLot, "begin_again")
def lot_that_is_parked_again_is_read_on(self: ParkingLot) -> None:
    """A key that is parked while it is resumed goes on later behind what had been read, not from its head."""
    after = self.after
    _begin_again(self)
    self.after = after


@_instead_of(Dispatcher, "park")
def rows_at_hand_leave_the_lot_when_it_is_parked_again(self: Dispatcher, lane: Lane, reason: str) -> None:
    """A key that is parked while it is resumed loses the messages of its lot that were at hand."""
    lot, state = lane.lot, lane.state
    if lot is not None:
        state.progress.changes.of_lot(lot.key, LotState.PARKED).removed += list(lot.rows)
    _park(self, lane, reason)


# Skipping

_add_edit(
    "skip_drops_whatever_is_first",
    "A skip drops the first message of the key, even if it is not the one that somebody looked at.",
    KeyRequests,
    "_act_skip",
    " and (message.partition, message.offset) == (origin, offset):",
    ":",
)


@_instead_of(KeyRequests, "_drop_head")
def skipped_message_is_not_over(self: KeyRequests, lane: Lane, message: Message) -> None:
    """A message that is skipped does not run any more, but nobody notes that it is over."""
    lane.at += 1
    self._dispatcher.scheduler.unready(lane)
    self._dispatcher.go_on(lane)
