"""The node of a consumer that works under the lease of another member: translates the commands.

The consumer joins, acquires, pulls, commits, releases and leaves as usual. The claims are the group of this consumer,
so the heartbeat is answered here. An Acquire becomes a Claim. Messages of other slots are removed from pulls. All other
commands are forwarded unchanged. If the lease is over or revoked, the partition is no longer assigned.
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
    """Slots of a partition, and the lease under which the slots are claimed."""

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
        self._asks: dict[int, int] = {}  # the last acquire number, by partition
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
        """Answer when the assignment changes; a caller that gave up waiting repeats the heartbeat."""
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
    """The pulled batches without messages of other slots. The node filters if possible; a node without zstd cannot. If
    the client lacks zstd as well, decoding fails later, and no message of the batch is handled."""
    if not isinstance(answer, Pulled) or all(batch.header.compression == CHOSEN for batch in answer.batches):
        return answer
    batches = (one if one.header.compression == CHOSEN else chosen(one, slots) for one in answer.batches)
    return msgspec.structs.replace(answer, batches=tuple(batches))
