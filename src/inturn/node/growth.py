"""Growth: a subject gets more partitions while it is used."""

from __future__ import annotations

from collections.abc import Mapping

from inturn.broker.broker import Broker
from inturn.meta.growth import check_growth
from inturn.meta.membership import Membership
from inturn.model.clock import Clock
from inturn.model.commands import Answer, GrowSubject
from inturn.model.observer import Observer
from inturn.model.subject import Subject
from inturn.node.answering import AnswerTable, Try
from inturn.node.known import Known
from inturn.node.subjects import SubjectCommands
from inturn.node.waking import Waking


class GrowthCommands:
    def __init__(
        self,
        known: Known,
        subjects: SubjectCommands,
        broker: Broker,
        membership: Membership,
        wake: Waking,
        clock: Clock,
        observer: Observer | None,
    ) -> None:
        self._known = known
        self._rows = subjects.rows
        self._subjects = subjects
        self._broker = broker
        self._membership = membership
        self._wake = wake
        self._clock = clock
        self._observer = observer

    @property
    def answers(self) -> AnswerTable:
        return {GrowSubject: self._grow}

    def _grow(self, command: GrowSubject, _: Try) -> Answer:
        """Seal the parents, store route and barriers, tell everybody. Before the second step nothing has happened."""
        subject = self.settled(command.name)
        check_growth(subject, command.partitions)
        if command.partitions == subject.partition_count:
            return subject
        barriers = self._broker.seal(subject, subject.route.version + 1)
        try:
            for index in barriers:  # a gate looks at what is below the barrier, and readers see only what is synced
                self._broker.log(subject, index).sync()
            grown = self.store(subject, command.partitions, barriers)
        except BaseException:
            if not self.is_stored(subject):
                self._broker.seal(subject, subject.route.version)
            raise
        self.grown(subject, grown)
        return grown

    def settled(self, name: str) -> Subject:
        """As it is stored: perhaps the database took a growth, and its answer was lost."""
        subject, stored = self._known.subject(name), self._rows.get(name)
        if stored.route.version > subject.route.version:
            self.grown(subject, stored)
            return stored
        return subject

    def is_stored(self, subject: Subject) -> bool:
        """Whether a growth of the subject as it was has come to something."""
        return self._rows.get(subject.name).route.version != subject.route.version

    def store(self, subject: Subject, partition_count: int, barriers: Mapping[int, int]) -> Subject:
        """Durable, and known to nobody yet."""
        return self._rows.grow(subject.route.grown(partition_count, barriers), self._clock.time_ms())

    def grown(self, before: Subject, subject: Subject) -> None:
        """Go on with it as it is now, and let all members hear of it."""
        self._broker.seal(before, self._subjects.sealed_for(subject))
        if self._observer is not None:
            self._observer.grown(subject)
        self._subjects.open(subject, before.partition_count)
        for group in self._membership.groups():
            if group.subject == subject.name:
                self._membership.reassign(group, subject)
                self._wake.announce(group)
