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
    """Messages of a parked key count as parked, but are not stored."""
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
    "While a key is being resumed, newer messages go to a lane instead of the tail of the parking lot.",
    Patch(ParkingLot, "takes_to_tail", property(lambda lot: lot.state is LotState.PARKED)),
)


@_instead_of(PartitionState, "granted")
def parked_keys_are_not_handed_over(self: PartitionState, answer: Granted, deadline_s: float, now_s: float) -> None:
    """The next holder does not know which keys are parked."""
    _granted(self, msgspec.structs.replace(answer, lots=()), deadline_s, now_s)


_add(
    "key_is_free_before_its_last_message",
    "consumer",
    "A key counts as free when its parking lot was read, though the messages are not handled; the node agrees.",
    Patch(Dispatcher, "go_on", edited(Dispatcher.go_on, " and not lane.lot.rows:", ":")),
    Patch(inturn.store.parking_lots, "_free", edited(inturn.store.parking_lots._free, "left is not None", "False")),
)
_add_edit(
    "key_is_free_before_its_lot_is_read",
    "A key counts as free when no message of its parking lot is loaded, though the lot may have more.",
    Dispatcher,
    "go_on",
    "lane.lot.is_read and not lane.lot.rows:",
    "not lane.lot.rows:",
)
_add_edit(
    "rows_are_removed_when_they_are_read",
    "Messages leave the parking lot when read, not when finished.",
    Dispatcher,
    "lot_read",
    "lane = lot.lane\n",
    "lane = lot.lane; removed = state.progress.changes.of_lot(lot.key, lot.state).removed\n"
    "    removed += [(one.partition, one.offset) for one in read]\n",
)
_add_edit(
    "tail_is_forgotten_when_the_end_is_read",
    "Messages that came to the tail of a parking lot during a read of its end are not read.",
    Dispatcher,
    "lot_read",
    "if content.is_end:",
    "if False:",
)
_add_edit(
    "what_is_over_of_a_lot_is_read_again",
    "A parking lot is read from its head again, with finished messages whose end is not stored yet.",
    Dispatcher,
    "lot_read",
    "if (one.partition, one.offset) not in lot.not_again]",
    "]",
)


@_instead_of(ParkingLot, "begin_again")
def lot_that_is_parked_again_is_read_on(self: ParkingLot) -> None:
    """A key that is parked while resuming continues behind the read messages, not at its head."""
    after = self.after
    _begin_again(self)
    self.after = after


@_instead_of(Dispatcher, "park")
def rows_at_hand_leave_the_lot_when_it_is_parked_again(self: Dispatcher, lane: Lane, reason: str) -> None:
    """A key that is parked while resuming loses the loaded messages of its parking lot."""
    lot, state = lane.lot, lane.state
    if lot is not None:
        state.progress.changes.of_lot(lot.key, LotState.PARKED).removed += list(lot.rows)
    _park(self, lane, reason)


# Skipping

_add_edit(
    "skip_drops_whatever_is_first",
    "A skip drops the first message of the key, even if different from the message of the request.",
    KeyRequests,
    "_act_skip",
    " and (message.partition, message.offset) == (origin, offset):",
    ":",
)


@_instead_of(KeyRequests, "_drop_head")
def skipped_message_is_not_over(self: KeyRequests, lane: Lane, message: Message) -> None:
    """A skipped message does not run, but is not recorded as finished."""
    lane.at += 1
    self._dispatcher.scheduler.unready(lane)
    self._dispatcher.go_on(lane)
