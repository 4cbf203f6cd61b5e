"""A consumer that works under somebody else's lease: what it asks a node for, as the node has to hear it.

The consumer itself is as ever: it joins, acquires, pulls, commits, releases and leaves. Its group is the claims that it
was given, so joining is answered here; acquiring becomes claiming; what a pull brings of other slots is left out;
everything else goes on as it is. A lease that is over, or wanted back, is nothing to claim under any more: then the
partition is no longer assigned.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from inturn.model.batch import CHOSEN, chosen
from inturn.model.errors import InturnError, StaleEpoch
from inturn.model.routing import SlotSet
from inturn.model.subject import Subject
from inturn.protocol.commands import Acquire, Answer, Assignment, Claim, Command, Heartbeat, Node, Pull, Pulled, Reply

_FOR_GOOD_S = 10.0 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ClaimedPart:
    """Some slots of a partition, and the lease that they are claimed under."""

    owner: str
    epoch: int
    slots: SlotSet


class ClaimingNode:
    """See `inturn.protocol.commands.Node`."""

    def __init__(self, node: Node, subject: Subject, parts: Mapping[int, ClaimedPart]) -> None:
        self._node = node
        self._subject = subject
        self._parts = dict(parts)
        self._lock = threading.Lock()
        self._assigned = set(parts)
        self._generation = 1  # of the assignment
        self._asks: dict[int, int] = {}  # the last one, by partition
        self._waiting: tuple[Heartbeat, Reply] | None = None

    def submit(self, command: Command, reply: Reply) -> None:
        match command:
            case Heartbeat():
                self._beat(command, reply)
            case Acquire():
                with self._lock:
                    self._asks[command.partition] = command.ask
                self._node.submit(self._claim(command), lambda answer: self._claimed(command, answer, reply))
            case Pull() if not self._parts[command.partition].slots.is_all:
                slots = self._parts[command.partition].slots
                self._node.submit(command, lambda answer: reply(_cut(answer, slots)))
            case _:
                self._node.submit(command, reply)

    def _beat(self, beat: Heartbeat, reply: Reply) -> None:
        """Answered when there is something new; it is asked again by whoever gave up waiting."""
        with self._lock:
            if beat.generation == self._generation:
                self._waiting = beat, reply
                return
            assignment = self._assignment(beat)
        reply(assignment)

    def _claimed(self, command: Acquire, answer: Answer | InturnError, reply: Reply) -> None:
        waiting = None
        with self._lock:
            is_over = isinstance(answer, StaleEpoch) and self._asks.get(command.partition) == command.ask
            if is_over and command.partition in self._assigned:
                self._assigned.discard(command.partition)
                self._generation += 1
                waiting, self._waiting = self._waiting, None
        if waiting is not None:
            beat, tell = waiting
            tell(self._assignment(beat))
        reply(answer)

    def _assignment(self, beat: Heartbeat) -> Assignment:
        partitions = tuple(sorted(self._assigned))
        order, strategy = beat.order, beat.assignment
        return Assignment(self._generation, partitions, self._subject, _FOR_GOOD_S, order=order, assignment=strategy)

    def _claim(self, command: Acquire) -> Claim:
        part = self._parts[command.partition]
        return Claim(
            command.subject,
            command.group,
            command.partition,
            part.owner,
            part.epoch,
            command.member,
            command.ask,
            part.slots.to_bytes(),
            command.wait_s,
        )


def _cut(answer: Answer | InturnError, slots: SlotSet) -> Answer | InturnError:
    """What was pulled, without messages of other slots. The node has left them out where it could, but one without zstd
    cannot look into a batch; whoever can neither finds out when it decodes it, and handles nothing of it."""
    if not isinstance(answer, Pulled) or all(batch.header.compression == CHOSEN for batch in answer.batches):
        return answer
    batches = (one if one.header.compression == CHOSEN else chosen(one, slots) for one in answer.batches)
    return msgspec.structs.replace(answer, batches=tuple(batches))
