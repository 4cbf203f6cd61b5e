"""Trials: single messages that single members are asked to handle out of turn.

They live in memory: whoever asked waits for the result, and hears of a node that was started again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from inturn.model.commands import ReportTrial, Trial, TrialState, TryMessage
from inturn.model.errors import InvalidInput, NotFound
from inturn.model.result import ResultKind
from inturn.model.settings import one_of
from inturn.state.bounds import check_text
from inturn.state.groups import GroupRecord

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
