"""What a broker learns from meta: subjects and their growth, named producers, groups."""

from __future__ import annotations

from collections.abc import Container

from inturn.broker.broker import Broker
from inturn.cluster.seals import Seals
from inturn.model.clock import Clock
from inturn.model.commands import (
    Answer,
    Done,
    GroupOpened,
    LearnProducer,
    LearnSubject,
    OpenGroup,
    Sealed,
    SealSubject,
)
from inturn.model.errors import InvalidInput
from inturn.model.settings import GroupMode, one_of
from inturn.model.subject import Subject
from inturn.node.answering import AnswerTable, Try
from inturn.node.groups import GroupCommands
from inturn.node.growth import GrowthCommands
from inturn.node.known import Known
from inturn.node.subjects import SubjectCommands
from inturn.state.groups import GroupRecord
from inturn.state.seals import Seal


class LearningCommands:
    def __init__(
        self,
        known: Known,
        subjects: SubjectCommands,
        growth: GrowthCommands,
        groups: GroupCommands,
        broker: Broker,
        seals: Seals,
        clock: Clock,
    ) -> None:
        self._known = known
        self._subjects = subjects
        self._growth = growth
        self._groups = groups
        self._broker = broker
        self._seals = seals
        self._clock = clock

    @property
    def answers(self) -> AnswerTable:
        return {
            LearnSubject: self._learn_subject,
            LearnProducer: self._learn_producer,
            SealSubject: self._seal_subject,
            OpenGroup: self._open_group,
        }

    # Subjects

    def subject(self, subject: Subject) -> None:
        """Open it, or go on with its newer route; nothing if that is known."""
        before = self._known.subjects.get(subject.name)
        if before is not None and before.route.version >= subject.route.version:
            return
        learnt = self._subjects.rows.learn(subject, self._clock.time_ms())
        self._seals.settle(learnt)
        if before is None:
            self._subjects.open(learnt)
        else:
            self._growth.grown(before, learnt)

    def _learn_subject(self, command: LearnSubject, _: Try) -> Answer:
        self.subject(command.subject)
        return Done()

    def _seal_subject(self, command: SealSubject, _: Try) -> Answer:
        """Durable before the ends are told: whatever happens to this process, nothing more comes below them."""
        subject = self._known.subject(command.name)
        if command.version != subject.route.version + 1:
            raise InvalidInput(
                f"subject {subject.name!r} has route version {subject.route.version} at broker group "
                f"{self._broker.broker_group!r}, and cannot be sealed for version {command.version}; grow it again"
            )
        self._seals.put(Seal(subject.name, command.version, command.growth))
        barriers = self._broker.seal(subject, command.version)
        for index in barriers:
            self._broker.log(subject, index).sync()
        return Sealed(tuple(sorted(barriers.items())))

    def break_seals(self, void: Container[str]) -> None:
        """These growths came to nothing: the old routes hold again."""
        for name in self._seals.break_void(void):
            subject = self._known.subject(name)
            self._broker.seal(subject, subject.route.version)

    # Producers and groups

    def _learn_producer(self, command: LearnProducer, _: Try) -> Answer:
        self._broker.producer_ids.learn(command.producer)
        return Done()

    def group(self, subject: str, name: str, start: str, mode: str) -> GroupRecord:
        """The group, which begins here now unless it is known."""
        known = self._known.groups.get((subject, name))
        if known is not None:
            return known
        return self._groups.make(self._known.subject(subject), name, start, one_of(GroupMode, "mode", mode))

    def _open_group(self, command: OpenGroup, _: Try) -> Answer:
        group = self.group(command.subject, command.group, command.start, command.mode)
        holders = self._broker.leases.holders(group)
        return GroupOpened(group.start, group.mode.value, tuple(sorted(holders.items())))
