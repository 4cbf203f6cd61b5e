"""Shared groups: their members fetch messages, and acknowledge or return each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inturn.broker.broker import Broker
from inturn.model.commands import Acknowledge, Answer, Command, Fetch
from inturn.model.settings import GroupMode
from inturn.node.answering import AnswerTable, Try, may_wait
from inturn.node.known import Known, check_mode
from inturn.node.waking import Waking
from inturn.state.groups import GroupRecord


class SharedGroupCommands:
    def __init__(self, known: Known, broker: Broker, wake: Waking) -> None:
        self._known = known
        self._broker = broker
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {Fetch: self._fetch, Acknowledge: self._acknowledge}

    @property
    def dues(self) -> dict[type[Command], Callable[[Any], float | None]]:
        """When time itself may bring an answer to what is held back."""
        return {Fetch: self._next_due_s}

    def _group(self, command: Fetch | Acknowledge) -> GroupRecord:
        group = self._known.group(command.subject, command.group)
        check_mode(group, GroupMode.SHARED)
        return group

    def _fetch(self, command: Fetch, attempt: Try) -> Answer | None:
        group = self._group(command)
        is_first = attempt is Try.FIRST
        fetched = self._broker.fetch(self._known.subject(command.subject), group, command, is_first=is_first)
        part = self._broker.sharing.find(group, command.partition)
        is_waited_for = part is not None and part.is_newest(command.member, command.ask)
        waits = may_wait(command.wait_s, attempt) and is_waited_for
        return None if waits and not fetched.deliveries else fetched

    def _next_due_s(self, command: Fetch) -> float | None:
        return self._broker.sharing.next_due_s(self._known.group(command.subject, command.group), command.partition)

    def _acknowledge(self, command: Acknowledge, _: Try) -> Answer:
        group = self._group(command)
        for receipts in command.receipts:
            self._broker.log(self._known.subject(command.subject), receipts.partition)
        acknowledged = self._broker.sharing.acknowledge(group, command)
        for receipts in command.receipts:
            if receipts.returned:
                self._wake.log(command.subject, receipts.partition)
        return acknowledged
