"""Keys: what is the matter with them, and what somebody asks of them."""

from __future__ import annotations

from functools import partial

from inturn.broker.broker import Broker
from inturn.meta.membership import Membership
from inturn.model.commands import Answer, DescribeKey, FindRequest, ListKeys, SteerKey
from inturn.model.errors import GroupConflict
from inturn.model.settings import KeyAction, Order
from inturn.node.answering import AnswerTable, Try, may_wait
from inturn.node.known import Known
from inturn.node.waking import Waking
from inturn.state.groups import GroupRecord


class SteeringCommands:
    def __init__(self, known: Known, broker: Broker, membership: Membership, wake: Waking) -> None:
        self._known = known
        self._broker = broker
        self._keys = broker.keys
        self._membership = membership
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {
            SteerKey: self._steer,
            FindRequest: self._find_request,
            ListKeys: lambda command, _: self._keys.list_keys(self._known.group(command.subject, command.group)),
            DescribeKey: self._describe,
        }

    def _steer(self, command: SteerKey, _: Try) -> Answer:
        subject, group = self._known.subject(command.subject), self._known.group(command.subject, command.group)
        self.check(group, command)
        request, is_new = self._keys.steer(subject, group, command, partial(self._broker.gates.home, subject, group))
        if is_new:
            self._wake.announce(group)
        return request

    def check(self, group: GroupRecord, command: SteerKey) -> None:
        """GroupConflict if that can be asked of no key of this group."""
        if not group.is_exclusive:
            raise GroupConflict(
                group.name,
                f"it is a {group.mode.value} group, in which no key waits for anything; there is nothing to do",
            )
        order = self._membership.order(group)
        if command.action == KeyAction.PARK and order not in (None, Order.KEY):
            raise GroupConflict(
                group.name, f"its members use order={order!r}; a key can be parked only with order='key'"
            )

    def _find_request(self, command: FindRequest, attempt: Try) -> Answer | None:
        group = self._known.group(command.subject, command.group)
        if may_wait(command.wait_s, attempt) and self._keys.is_waiting(group, command.id):
            return None
        return self._keys.find(group, command.id)

    def _describe(self, command: DescribeKey, _: Try) -> Answer:
        group = self._known.group(command.subject, command.group)
        return self._keys.describe(self._known.subject(command.subject), group, command)
