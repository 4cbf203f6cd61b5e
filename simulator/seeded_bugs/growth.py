"""Bugs of growth: a subject gets more partitions."""

from __future__ import annotations

from inturn.broker.growth_gates import GrowthGates
from inturn.consumer.partition_state import PartitionState
from inturn.log.partition_log import PartitionLog
from inturn.producer.core import ProducerCore
from inturn.producer.partition_queue import PartitionQueue
from simulator.seeded_bugs.bug import Bugs

BUGS = Bugs()
_add_edit = BUGS.add_edit

_add_edit(
    "child_is_opened_early",
    "A child is open though older messages of the same keys are unfinished in a parent.",
    GrowthGates,
    "_closed_by",
    "found = self._unfinished(subject, group, descent)",
    "found = None",
)
_add_edit(
    "grandparent_is_forgotten",
    "A child is open as soon as its parent is finished, though the parent waits for a grandparent.",
    GrowthGates,
    "_closed_by",
    "if self.closed(subject, group, descent.parent) is not None:",
    "if False:",
)
_add_edit(
    "barrier_is_passed_by_one",
    "The last message below the barrier is not looked at.",
    GrowthGates,
    "_unfinished",
    "offset <= at < descent.barrier",
    "offset <= at < descent.barrier - 1",
)
_add_edit(
    "gate_looks_at_the_offset_only",
    "A growth gate ignores slots: messages that were not finished out of turn count as finished.",
    GrowthGates,
    "_unfinished",
    "and at not in done:",
    "and at < place.offset:",
)
_add_edit(
    "lots_come_back_to_the_parent",
    "A repeated report of a parking lot, after a lost answer, counts after the lot has moved.",
    GrowthGates,
    "without_moved",
    "if not subject.route.descents or",
    "if True or",
)
_add_edit(
    "lots_stay_with_the_parent",
    "A parking lot does not move to the child that its key moved to.",
    GrowthGates,
    "_moving",
    "return sorted(key for key in keys if descent.has(slot_of(key)))",
    "return []",
)
_add_edit(
    "lots_move_while_somebody_works_on_them",
    "A growth gate does not wait for a parking lot that is being resumed.",
    GrowthGates,
    "_closed_by",
    "if found is None and self._is_busy(group, descent):",
    "if False:",
)
_add_edit(
    "route_is_checked_before_duplicates",
    "A stored batch is refused for its old route, and stored in a child, too.",
    PartitionLog,
    "_store",
    "    duplicate = self._producers.duplicate_of(batch, gap)\n",
    "    if self._sealed is not None and batch.route_version != self._sealed[1]:\n"
    "        raise RouteChanged(self._sealed[0], batch.route_version, self._sealed[1])\n"
    "    duplicate = self._producers.duplicate_of(batch, gap)\n",
)
_add_edit(
    "parents_are_not_sealed",
    "A log takes batches that were routed by an older route.",
    PartitionLog,
    "_store",
    "if self._sealed is not None and batch.route_version != self._sealed[1]:",
    "if False:",
)
_add_edit(
    "producer_does_not_wait_for_answers_when_a_subject_grows",
    "A producer routes sent messages again, though the messages may be stored.",
    PartitionQueue,
    "is_settled",
    "return first is None or first.is_refused",
    "return True",
)
_add_edit(
    "new_messages_overtake_what_is_to_be_divided",
    "New messages follow the new route at once, though older messages of their keys wait for the old route.",
    ProducerCore,
    "learn",
    "self._grown[subject.name] = subject",
    "self._grown[subject.name] = subject; self._by_slot[subject.name] = list(subject.route.by_slot)",
)
_add_edit(
    "foreign_offsets_are_taken_for_own",
    "Attempts of a message in a moved parking lot count for the message with the same offset in the partition.",
    PartitionState,
    "mark",
    "return mark_of(message.partition, message.offset, self.index)",
    "return message.offset",
)
