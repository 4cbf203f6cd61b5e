"""Heartbeats: members are heard, and hear what they have to do."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from inturn.broker.keys import Keys
from inturn.broker.trials import Trials
from inturn.meta.membership import Membership
from inturn.model.commands import Answer, Heartbeat
from inturn.node.answering import AnswerTable, Try, may_wait
from inturn.node.groups import GroupCommands
from inturn.node.intake import Intake
from inturn.node.known import Known
from inturn.node.waking import Waking


class HeartbeatCommands:
    """`watch` is called after every one: there may be somebody new to be watched."""

    def __init__(
        self,
        known: Known,
        groups: GroupCommands,
        membership: Membership,
        keys: Keys,
        trials: Trials,
        wake: Waking,
        intake: Intake,
        watch: Callable[[], None],
    ) -> None:
        self._known = known
        self._groups = groups
        self._membership = membership
        self._keys = keys
        self._trials = trials
        self._wake = wake
        self._intake = intake
        self._watch = watch

    @property
    def answers(self) -> AnswerTable:
        return {Heartbeat: self._heartbeat}

    def _heartbeat(self, command: Heartbeat, attempt: Try) -> Answer | None:
        subject = self._known.subject(command.subject)
        group = self._groups.joined(subject, command)
        came = attempt is Try.FIRST and self._membership.heartbeat(group, subject, command)
        self._watch()
        if came:
            self._wake.members(group)
        is_news = came or self._membership.generation(group) != command.generation
        if not is_news and may_wait(command.wait_s, attempt):
            return None
        trials = self._trials.waiting(group, command.member)
        answer = self._membership.answer(group, subject, command.member, self._keys.waiting(group), trials)
        return msgspec.structs.replace(answer, partitions=()) if self._intake.is_stopping else answer
