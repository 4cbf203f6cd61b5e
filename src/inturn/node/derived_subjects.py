"""Derived subjects: the retry and dead-letter subjects of a group, and what is moved there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from inturn.broker.broker import Broker
from inturn.broker.move_targets import check_target, origin_of
from inturn.model.commands import Answer, Append, Appended, Done, Move, OpenDeadLetters, OpenRetry, Reply
from inturn.model.errors import GroupConflict
from inturn.model.names import check_name, dead_letter_subject, retry_subject
from inturn.model.settings import GroupMode, Limits, Routing
from inturn.model.subject import Subject
from inturn.node.answering import AnswerTable, Try
from inturn.node.intake import Intake
from inturn.node.known import Known, check_mode
from inturn.node.long_polls import LongPolls
from inturn.node.subjects import SubjectCommands
from inturn.state.groups import GroupRecord

# Has a batch stored by the broker of another broker group.
Forward: TypeAlias = Callable[[str, Append, Reply], None]


class DerivedSubjectCommands:
    """`forward` is for a broker of a cluster; without it, only what is here can be moved to."""

    def __init__(
        self,
        known: Known,
        subjects: SubjectCommands,
        broker: Broker,
        intake: Intake,
        held: LongPolls,
        forward: Forward | None,
    ) -> None:
        self._known = known
        self._subjects = subjects
        self._broker = broker
        self._intake = intake
        self._held = held
        self._forward = forward

    @property
    def answers(self) -> AnswerTable:
        return {OpenRetry: self._open_retry, OpenDeadLetters: self._open_dead_letters}

    def _open_retry(self, command: OpenRetry, _: Try) -> Answer:
        subject = self._known.subject(command.subject)
        name = retry_subject(check_name("group", command.group), command.subject)
        known = self._known.subjects.get(name)
        if known is not None and known.partition_count != command.levels:
            raise GroupConflict(
                command.group,
                f"its retry subject has {known.partition_count} delays, this consumer asks for {command.levels}; "
                "use as many RetryDelays.levels_s",
            )
        return known if known is not None else self._made(name, command.levels, Routing.SELECTOR, subject)

    def _open_dead_letters(self, command: OpenDeadLetters, _: Try) -> Answer:
        subject = self._known.subject(command.subject)
        name = dead_letter_subject(check_name("group", command.group), origin_of(command.group, subject.name))
        known = self._known.subjects.get(name)
        return known if known is not None else self._made(name, 1, Routing.SLOTS, subject, subject.limits)

    def _made(
        self, name: str, partitions: int, routing: Routing, subject: Subject, limits: Limits | None = None
    ) -> Subject:
        """In the broker group of the first partition of the subject that it is for."""
        home = (subject.route.partitions[0].broker_group,)
        return self._subjects.make(name, partitions, routing, limits=limits, broker_groups=home, reserved=True)

    def move(self, command: Move, reply: Reply) -> None:
        """Answered when it is durable, as an append; raises what is wrong with it before. Call it without the lock."""
        with self._held.lock:
            self._intake.check(command)
            group = self._known.group(command.subject, command.group)
            check_target(group, command.to_subject)
            target = self._known.subject(command.to_subject)
            if not group.is_exclusive:
                check_mode(group, GroupMode.SHARED)
                self._broker.log(self._known.subject(command.subject), command.partition)
                self._broker.sharing.check(group, command.partition, command.epoch, command.member, command.receipts)
        self._store(group, target, command, reply)

    def _store(self, group: GroupRecord, target: Subject, command: Move, reply: Reply) -> None:
        """A derived subject is in one broker group, for all partitions of the subject that it is for."""
        is_there = 0 <= command.to_partition < target.partition_count
        if self._forward is None or not is_there or command.to_partition in self._broker.owned(target):
            self._intake.check_stores()
            self._broker.move(group, target, command, reply)
            return
        self._broker.check_mover(group, command)
        self._forward(
            target.route.partitions[command.to_partition].broker_group,
            Append(command.to_subject, command.to_partition, command.batch),
            lambda answer: reply(Done() if isinstance(answer, Appended) else answer),
        )
