"""Trials: asked for, waited for, reported by the member that was asked."""

from __future__ import annotations

from collections.abc import Callable

from inturn.broker.trials import Trials, chosen_member
from inturn.meta.membership import Membership
from inturn.model.commands import Answer, Done, FindTrial, ReportTrial, TryMessage
from inturn.model.errors import NotFound
from inturn.model.subject import Subject
from inturn.node.answering import AnswerTable, Try, may_wait
from inturn.node.known import Known
from inturn.node.waking import Waking


class TrialCommands:
    """`check_stored` raises NotFound unless there is a message at a partition and offset."""

    def __init__(
        self,
        known: Known,
        trials: Trials,
        membership: Membership,
        wake: Waking,
        check_stored: Callable[[Subject, int, int], None],
    ) -> None:
        self._known = known
        self._trials = trials
        self._membership = membership
        self._wake = wake
        self._check_stored = check_stored

    @property
    def answers(self) -> AnswerTable:
        return {TryMessage: self._try, FindTrial: self._find, ReportTrial: self._report}

    def _try(self, command: TryMessage, _: Try) -> Answer:
        subject, group = self._known.subject(command.subject), self._known.group(command.subject, command.group)
        members = self._membership.members(group)
        member = chosen_member(group, members, command.member)
        self._trials.forget(group, members)
        self._check_stored(subject, command.partition, command.offset)
        trial, is_new = self._trials.ask(group, member, command)
        if is_new:
            self._wake.announce(group)
        return trial

    def _find(self, command: FindTrial, attempt: Try) -> Answer | None:
        group = self._known.group(command.subject, command.group)
        state = self._trials.find(group, command.id)
        if state.result is None and state.member not in self._membership.members(group):
            self._trials.give_up(group, command.id)
            raise NotFound(
                "member",
                state.member,
                "it left before it told a result; the message may have been handled",
            )
        if state.result is None and may_wait(command.wait_s, attempt):
            return None
        if command.gives_up:
            self._trials.give_up(group, command.id)
            self._wake.announce(group)  # its member is to forget it
        return state

    def _report(self, command: ReportTrial, _: Try) -> Answer:
        group = self._known.group(command.subject, command.group)
        if self._trials.report(group, command):
            self._wake.trials(group)
        return Done()
