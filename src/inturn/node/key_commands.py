"""Trials: single messages that single members are asked to handle out of turn.

They live in memory: whoever asked waits for the result, and hears of a node that was started again.

Keys: what is the matter with them, and what somebody asks of them.

Trials: asked for, waited for, reported by the member that was asked.

Broker groups: which there are, and what each may do.
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
from inturn.node.acceptance import AnswerTable, Try, may_wait
from inturn.node.catalog import Known
from inturn.node.long_polls import Waking
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

WAITING_COUNT_MAX = 100  # of a group: all that are for a member are in every answer to its heartbeat
KEPT_COUNT_MAX = 1_000  # of a group, those that are over among them
ID_LENGTH_MAX = 100
ERROR_LENGTH_MAX = 2_000
TRACEBACK_LENGTH_MAX = 16_000


class Trials:
    """Call it under the node's lock."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, TrialState]] = {}  # by group id and id, oldest first

    def ask(self, group: GroupRecord, member: str, command: TryMessage) -> tuple[Trial, bool]:
        """The trial, and whether it is new."""
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
        """Nobody but these members can report any more."""
        states, there = self._states.get(group.id, {}), set(members)
        for trial_id in [one for one, state in states.items() if state.result is None and state.member not in there]:
            del states[trial_id]

    def waiting(self, group: GroupRecord, member: str) -> tuple[Trial, ...]:
        """Those that this member has not reported yet."""
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
        """False if nobody waits for it any more."""
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
    """The member of this name, or the only one whose name begins so."""
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


class BrokerGroupCommands:
    def __init__(self, known: Known, registry: BrokerRegistry, broker: Broker, wake: Waking) -> None:
        self._known = known
        self._registry = registry
        self._broker = broker
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {
            ListBrokerGroups: lambda _, __: BrokerGroupList(self._registry.describe(self._known.subjects.values())),
            SetBrokerGroup: self._set,
        }

    def _set(self, command: SetBrokerGroup, _: Try) -> Answer:
        self.set(command.name, one_of(BrokerGroupState, "state", command.state))
        groups = self._registry.describe(self._known.subjects.values())
        return next(one for one in groups if one.name == command.name)

    def set(self, name: str, state: BrokerGroupState) -> None:
        """Durably. If it is the one that is here, what is held back hears of it at once."""
        self._registry.set_state(name, state)
        if name == self._broker.broker_group:
            self._broker.state = state
            self._wake.new_work()
