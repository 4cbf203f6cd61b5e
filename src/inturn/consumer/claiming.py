"""A consumer that works under somebody else's lease: what it asks a node for, as the node has to hear it.

The consumer itself is as ever: it joins, acquires, pulls, commits, releases and leaves. Its group is the claims that it
was given, so joining and leaving are answered here; acquiring becomes claiming; everything else goes on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inturn.model.commands import Acquire, Assignment, Claim, Command, Done, Heartbeat, Leave, Node, Reply
from inturn.model.slot import SlotSet
from inturn.model.subject import Subject

_FOR_GOOD_S = 10.0 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ClaimedPart:
    """Some slots of a partition, and the lease that they are claimed under."""

    owner: str
    epoch: int
    slots: SlotSet


class ClaimingNode:
    """See `inturn.model.commands.Node`."""

    def __init__(self, node: Node, subject: Subject, parts: Mapping[int, ClaimedPart]) -> None:
        self._node = node
        self._subject = subject
        self._parts = dict(parts)

    def submit(self, command: Command, reply: Reply) -> None:
        match command:
            case Heartbeat(generation=0):
                partitions = tuple(sorted(self._parts))
                order, assignment = command.order, command.assignment
                reply(Assignment(1, partitions, self._subject, _FOR_GOOD_S, order=order, assignment=assignment))
            case Heartbeat():
                pass  # nothing will change: it is asked again when it gave up waiting
            case Acquire():
                self._node.submit(self._claim(command), reply)
            case Leave():
                reply(Done())
            case _:
                self._node.submit(command, reply)

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
