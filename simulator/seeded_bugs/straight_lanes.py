"""Bugs of straight lanes."""

from __future__ import annotations

from inturn.consumer.dispatcher import Dispatcher
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_add_edit = BUGS.add_edit

_add_edit(
    "key_goes_on_beside_its_handler_when_its_lane_is_spread",
    "A straight lane that is spread amid a run lets the rest of the running key start at once.",
    Dispatcher,
    "spread",
    "if lane.run is not None and at:",
    "if False:",
)
_add_edit(
    "failed_message_of_a_straight_lane_is_passed_by",
    "A message that fails in a straight lane is not repeated.",
    Dispatcher,
    "_after_straight",
    "    if failed:\n",
    "    if False:\n",
)
_add_edit(
    "failed_message_of_a_straight_lane_is_repeated_at_the_end",
    "A message that fails in a straight lane is repeated after the rest of its key.",
    Dispatcher,
    "_after_straight",
    "self.scheduler.unready(goes_on)\n",
    "goes_on = Lane(state, key, [], state.buffer.inbox)\n",
)
