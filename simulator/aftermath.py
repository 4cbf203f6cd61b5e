"""The end of a simulated history: read the logs, and judge the logs with all recorded events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from inturn.consumer.outcome import OFFSET, PARTITION
from inturn.model.batch import StoredBatch, decode, is_intact
from inturn.model.errors import LogDamaged
from inturn.model.message import Message, Origin
from inturn.model.subject import Subject, dead_letter_subject
from inturn.protocol.commands import FindSubject
from inturn.protocol.request import ask
from inturn.testing.checker import check
from inturn.testing.history import (
    ClaimEnded,
    Committed,
    ConsumerCrashed,
    HandlerEnd,
    HandlerStart,
    History,
    KeySkipped,
    LeaseEnded,
    SendAcknowledged,
)
from simulator.settings import GROUP, SUBJECT, WANTED

if TYPE_CHECKING:
    from simulator.simulation import Simulation

_Stored: TypeAlias = dict[tuple[int, int], Message]  # by partition and offset


class Aftermath:
    """`problems` is empty if the contract held."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._damage: list[str] = []
        stored = self._stored()
        if sim.settings.consumer.tags:
            self._note_unwanted(stored)
        self.history = self._judged_history(stored)
        ids = {(SUBJECT, *place): message.message_id for place, message in stored.items()}
        self.verdict = check(self.history, subject=SUBJECT, group=GROUP, order=sim.settings.order.value, stored=ids)
        self.problems = self._problems(stored)
        self._count()

    def _problems(self, stored: _Stored) -> list[str]:
        sim, history, verdict = self._sim, self.history, self.verdict
        problems = [f"{violation.kind}: {violation.message}" for violation in verdict.violations]
        problems += self._damage
        problems += _log_problems(stored)
        problems += _release_problems(history)
        if not sim.settings.is_local:
            problems += _gone_problems(history)
        problems += self._dead_letter_problems()
        if verdict.parked:
            problems.append(f"still parked at the end: {verdict.parked}")
        problems += sim.node.problems
        problems += [problem for consumer in sim.consumers for problem in consumer.problems]
        problems += [problem for link in sim.network.links for problem in link.problems]
        return problems

    def _stored(self) -> _Stored:
        """All messages in the logs, by partition and offset."""
        stored = {}
        for index in range(self._sim.subject.partition_count):
            try:
                for batch in self._batches(index):
                    for message in decode(batch, Origin(SUBJECT, index)):
                        stored[index, message.offset] = message
            except LogDamaged as error:
                self._damage.append(f"damaged: {error}")
        return stored

    def _batches(self, index: int, subject: Subject | None = None) -> Iterator[StoredBatch]:
        log = self._sim.node.node.broker.log(subject or self._sim.subject, index)
        offset = log.start_offset
        while batches := log.read(offset, 1_000_000):
            for batch in batches:
                if not is_intact(batch):
                    raise LogDamaged(str(index), batch.header.base_offset, "the payload does not fit its checksum")
                yield batch
                offset = batch.header.next_offset

    def _note_unwanted(self, stored: _Stored) -> None:
        unwanted: dict[int, list[int]] = defaultdict(list)
        for (partition, offset), message in stored.items():
            if WANTED not in message.tags:
                unwanted[partition].append(offset)
        known = {partition: tuple(offsets) for partition, offsets in unwanted.items()}
        self._sim.recorder.group_filtered(SUBJECT, GROUP, WANTED, known)
        self._sim.coverage["log.unwanted message"] += sum(map(len, known.values()))

    def _judged_history(self, stored: _Stored) -> History:
        """The history without messages that a power loss may take: messages that were not synced."""
        history = self._sim.recorder.snapshot()
        if self._sim.settings.promises_all:
            return history
        kept = History()
        for event in history:
            if isinstance(event, Committed):
                parked = tuple(place for place in event.parked if place in stored)
                unparked = tuple(place for place in event.unparked if place in stored)
                kept.record(msgspec.structs.replace(event, parked=parked, unparked=unparked))
            elif (
                isinstance(event, SendAcknowledged | HandlerStart | HandlerEnd)
                and (event.partition, event.offset) not in stored
            ):
                self._sim.coverage["log.unsynced lost"] += 1
            else:
                kept.record(event)
        return kept

    def _dead_letter_problems(self) -> list[str]:
        """A message that was given up must be a dead letter, unless handled later, or skipped by an operator."""
        history = self.history
        ends = [event for event in history if isinstance(event, HandlerEnd)]
        over = {(event.partition, event.offset) for event in ends if event.result == "success"}
        over |= {(event.partition, event.offset) for event in history if isinstance(event, KeySkipped)}
        moved = {(event.partition, event.offset) for event in ends if event.result == "moved"} - over
        self._sim.coverage["log.dead letter"] += len(moved)
        if not moved or not self._sim.settings.promises_all:
            return []
        name = dead_letter_subject(GROUP, SUBJECT)
        subject = ask(self._sim.node.node, FindSubject(name), Subject)
        found = set()
        for batch in self._batches(0, subject):
            for message in decode(batch, Origin(name, 0)):
                found.add((int(message.properties[PARTITION]), int(message.properties[OFFSET])))
        return [f"given up, but not among the dead letters: {place}" for place in sorted(moved - found)]

    def _count(self) -> None:
        coverage, verdict = self._sim.coverage, self.verdict
        for event in self.history:
            name = type(event).__name__
            coverage[f"event.{name}" + (f" {event.why}" if name == "LeaseEnded" else "")] += 1  # type: ignore[union-attr]
        for path in self._sim.node.disk.paths():
            if path.endswith(".log"):
                coverage["log.segment after a gap" if path.endswith("-gap.log") else "log.segment"] += 1
        coverage["verdict.duplicates"] += verdict.duplicates
        coverage["verdict.skipped"] += verdict.skipped
        coverage["verdict.overlaps after lease loss"] += verdict.overlaps_after_lease_loss


def _log_problems(stored: _Stored) -> list[str]:
    """A message must be in the log once, and the messages of a producer and key in their order."""
    problems = []
    seen: dict[str, tuple[int, int]] = {}
    last: dict[tuple[str, bytes | None], int] = defaultdict(lambda: -1)
    for place, message in sorted(stored.items()):
        assert message.message_id is not None
        if message.message_id in seen:
            problems.append(f"stored twice: {message.message_id} at {seen[message.message_id]} and {place}")
        seen[message.message_id] = place
        producer, number = message.message_id.rsplit(":", 1)
        if int(number) < last[producer, message.key]:
            problems.append(f"stored out of order: {message.message_id} at {place} after {last[producer, message.key]}")
        last[producer, message.key] = max(last[producer, message.key], int(number))
    return problems


def _release_problems(history: History) -> list[str]:
    """A lease may be lost while a handler runs, but must not be given back."""
    problems = []
    running: dict[tuple[str, int, int], set[int]] = defaultdict(set)  # by consumer, partition and epoch: offsets
    leases: dict[tuple[str, int, int, int], int] = {}  # by consumer, place and epoch: the partition of the lease
    for event in history:
        match event:
            case HandlerStart():
                lease = event.partition if event.under is None else event.under
                leases[event.consumer, event.partition, event.offset, event.epoch] = lease
                running[event.consumer, lease, event.epoch].add(event.offset)
            case HandlerEnd():
                lease = leases.get((event.consumer, event.partition, event.offset, event.epoch), event.partition)
                running[event.consumer, lease, event.epoch].discard(event.offset)
            case ConsumerCrashed():
                for place in [place for place in running if place[0] == event.consumer]:
                    del running[place]
            case LeaseEnded(why="released") | ClaimEnded():
                who = event.claimant if isinstance(event, ClaimEnded) else event.owner
                offsets = running[who, event.partition, event.epoch]
                if offsets:
                    problems.append(
                        f"released too early: {who}, partition {event.partition}, epoch {event.epoch} "
                        f"was still running {sorted(offsets)}"
                    )
    return problems


def _gone_problems(history: History) -> list[str]:
    """Consumers in other processes survive the node, and so do their leases."""
    return [
        f"counted as gone: {event.owner}, partition {event.partition}, epoch {event.epoch}"
        for event in history
        if isinstance(event, LeaseEnded) and event.why == "gone"
    ]
