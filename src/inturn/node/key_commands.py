"""Commands of operators about keys, single messages and broker groups.

Key requests park, resume and skip keys. A trial is a message that a member handles out of turn. Trials live in
memory: the operator waits for the result, and gets NotFound after a restart of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from inturn.broker.broker import Broker
from inturn.meta.broker_registry import BrokerRegistry
from inturn.meta.membership import Membership
from inturn.model.errors import GroupConflict, InvalidInput, NotFound
from inturn.model.result import ResultKind
from inturn.model.settings import BrokerGroupState, KeyAction, Order, one_of
from inturn.model.subject import Subject
from inturn.node.acceptance import AnswerTable, CommandService, Try, may_wait
from inturn.node.catalog import Catalog
from inturn.node.long_polls import WakeUps
from inturn.protocol.commands import (
    Answer,
    BrokerGroupList,
    DescribeKey,
    Done,
    FindRequest,
    FindTrial,
    ListBrokerGroups,
    ListKeys,
    ReportTrial,
    SetBrokerGroup,
    SteerKey,
    Trial,
    TrialState,
    TryMessage,
)
from inturn.store.database import check_text
from inturn.store.groups import GroupRecord

WAITING_COUNT_MAX = 100  # per group: each heartbeat answer carries all waiting trials of the member
KEPT_COUNT_MAX = 1_000  # per group, finished trials included
ID_LENGTH_MAX = 100
ERROR_LENGTH_MAX = 2_000
TRACEBACK_LENGTH_MAX = 16_000


class Trials:
    """The trials of all groups. Call under the node's lock."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, TrialState]] = {}  # by group id and trial id, oldest first

    def ask(self, group: GroupRecord, member: str, command: TryMessage) -> tuple[Trial, bool]:
        """The trial, and whether the trial is new."""
        check_text("trial id", command.id, ID_LENGTH_MAX)
        states = self._states.setdefault(group.id, {})
        known = states.get(command.id)
        if known is not None:
            return known.trial, False
        waiting = sum(state.result is None for state in states.values())
        if waiting >= WAITING_COUNT_MAX:
            raise InvalidInput(
                f"{waiting} trials wait in group {group.name!r}, which is the limit; wait until some are over"
            )
        while len(states) >= KEPT_COUNT_MAX:
            del states[next(one for one, state in states.items() if state.result is not None)]
        trial = Trial(command.id, command.partition, command.offset)
        states[trial.id] = TrialState(trial, member)
        return trial, True

    def forget(self, group: GroupRecord, members: Iterable[str]) -> None:
        """Drop waiting trials of members that are not among `members`: no report can come."""
        states, living = self._states.get(group.id, {}), set(members)
        for trial_id in [one for one, state in states.items() if state.result is None and state.member not in living]:
            del states[trial_id]

    def waiting(self, group: GroupRecord, member: str) -> tuple[Trial, ...]:
        """The trials that this member has not reported yet."""
        states = self._states.get(group.id)
        if not states:
            return ()
        return tuple(one.trial for one in states.values() if one.member == member and one.result is None)

    def find(self, group: GroupRecord, trial_id: str) -> TrialState:
        state = self._states.get(group.id, {}).get(trial_id)
        if state is None:
            raise NotFound(
                "trial", trial_id, "it was given up, or the node was started again since; ask for the message again"
            )
        return state

    def report(self, group: GroupRecord, command: ReportTrial) -> bool:
        """Store the result. False if no operator waits for the trial any more."""
        state = self._states.get(group.id, {}).get(command.id)
        if state is None or state.member != command.member or state.result is not None:
            return False
        self._states[group.id][command.id] = msgspec.structs.replace(
            state,
            result=one_of(ResultKind, "result", command.result).value,
            error=command.error[:ERROR_LENGTH_MAX],
            duration_s=command.duration_s,
            traceback=command.traceback[-TRACEBACK_LENGTH_MAX:],
        )
        return True

    def give_up(self, group: GroupRecord, trial_id: str) -> None:
        self._states.get(group.id, {}).pop(trial_id, None)


def chosen_member(group: GroupRecord, members: Iterable[str], name: str) -> str:
    """The member with this name, or the only member whose name begins with `name-`. Raise InvalidInput if several
    names begin so, NotFound if none does."""
    members = list(members)
    if name in members:
        return name
    found = [one for one in members if name and one.startswith(f"{name}-")]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidInput(f"member {name!r}: several of group {group.name!r} begin so: {', '.join(found)}; give one")
    there = f"it has {', '.join(members)}" if members else "it has none that runs"
    raise NotFound("member", name, f"in group {group.name!r} on subject {group.subject!r}: {there}")


class KeyCommands(CommandService):
    """Key requests and descriptions of keys in the partitions of this node."""

    def __init__(self, catalog: Catalog, broker: Broker, membership: Membership, wake: WakeUps) -> None:
        self._catalog = catalog
        self._broker = broker
        self._keys = broker.keys
        self._membership = membership
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {
            SteerKey: self._steer,
            FindRequest: self._find_request,
            ListKeys: lambda command, _: self._keys.list_keys(self._catalog.group(command.subject, command.group)),
            DescribeKey: self._describe,
        }

    def _steer(self, command: SteerKey, _: Try) -> Answer:
        subject, group = self._catalog.subject(command.subject), self._catalog.group(command.subject, command.group)
        check_key_request(group, command, self._membership.order(group))
        request, is_new = self._keys.steer(subject, group, command, partial(self._broker.gates.home, subject, group))
        if is_new:
            self._wake.announce(group)
        return request

    def _find_request(self, command: FindRequest, attempt: Try) -> Answer | None:
        group = self._catalog.group(command.subject, command.group)
        if may_wait(command.wait_s, attempt) and self._keys.is_waiting(group, command.id):
            return None
        return self._keys.find(group, command.id)

    def _describe(self, command: DescribeKey, _: Try) -> Answer:
        group = self._catalog.group(command.subject, command.group)
        return self._keys.describe(self._catalog.subject(command.subject), group, command)


def check_key_request(group: GroupRecord, command: SteerKey, order: str | None) -> None:
    """Raise GroupConflict if no key of the group takes this request. `order`: the order of the group's members."""
    if not group.is_exclusive:
        raise GroupConflict(
            group.name,
            f"it is a {group.mode.value} group, in which no key waits for anything; there is nothing to do",
        )
    if command.action == KeyAction.PARK and order not in (None, Order.KEY):
        raise GroupConflict(group.name, f"its members use order={order!r}; a key can be parked only with order='key'")


class TrialCommands(CommandService):
    """`check_stored` raises NotFound unless a message is stored at a partition and offset; None: the caller has
    checked the message."""

    def __init__(
        self,
        catalog: Catalog,
        trials: Trials,
        membership: Membership,
        wake: WakeUps,
        check_stored: Callable[[Subject, int, int], None] | None,
    ) -> None:
        self._catalog = catalog
        self._trials = trials
        self._membership = membership
        self._wake = wake
        self._check_stored = check_stored

    @property
    def answers(self) -> AnswerTable:
        return {TryMessage: self._try, FindTrial: self._find, ReportTrial: self._report}

    def _try(self, command: TryMessage, _: Try) -> Answer:
        subject, group = self._catalog.subject(command.subject), self._catalog.group(command.subject, command.group)
        members = self._membership.members(group)
        member = chosen_member(group, members, command.member)
        self._trials.forget(group, members)
        if self._check_stored is not None:
            self._check_stored(subject, command.partition, command.offset)
        trial, is_new = self._trials.ask(group, member, command)
        if is_new:
            self._wake.announce(group)
        return trial

    def _find(self, command: FindTrial, attempt: Try) -> Answer | None:
        group = self._catalog.group(command.subject, command.group)
        state = self._trials.find(group, command.id)
        if state.result is None and state.member not in self._membership.members(group):
            self._trials.give_up(group, command.id)
            raise NotFound(
                "member",
                state.member,
                "it left before it reported a result; the message may have been handled",
            )
        if state.result is None and may_wait(command.wait_s, attempt):
            return None
        if command.gives_up:
            self._trials.give_up(group, command.id)
            self._wake.announce(group)  # so that the member drops the trial
        return state

    def _report(self, command: ReportTrial, _: Try) -> Answer:
        group = self._catalog.group(command.subject, command.group)
        if self._trials.report(group, command):
            self._wake.trials(group)
        return Done()


class BrokerGroupCommands(CommandService):
    """Lists broker groups and sets their states. `broker` None: the node has no logs."""

    def __init__(self, catalog: Catalog, registry: BrokerRegistry, broker: Broker | None, wake: WakeUps) -> None:
        self._catalog = catalog
        self._registry = registry
        self._broker = broker
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {
            ListBrokerGroups: lambda _, __: BrokerGroupList(self._registry.describe(self._catalog.subjects.values())),
            SetBrokerGroup: self._set,
        }

    def _set(self, command: SetBrokerGroup, _: Try) -> Answer:
        self.set(command.name, one_of(BrokerGroupState, "state", command.state))
        groups = self._registry.describe(self._catalog.subjects.values())
        return next(one for one in groups if one.name == command.name)

    def set(self, name: str, state: BrokerGroupState) -> None:
        """Durably. The state of this node's broker group applies to waiting commands at once."""
        self._registry.set_state(name, state)
        if self._broker is not None and name == self._broker.broker_group:
            self._broker.state = state
            self._wake.new_work()
