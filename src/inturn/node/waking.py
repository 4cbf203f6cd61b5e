"""What commands are held back for, and how they are woken."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from inturn.meta.membership import Membership
from inturn.model.commands import Acquire, Claim, Command, Fetch, FindRequest, FindTrial, Heartbeat, Pull, Read
from inturn.node.intake import NEW_WORK
from inturn.node.long_polls import LongPolls
from inturn.state.groups import GroupRecord


def waits_for(command: Command) -> Hashable:
    """What a command is held back for. `Waking` wakes by the same."""
    match command:
        case Pull() | Read() | Fetch():
            return of_log(command.subject, command.partition)
        case Acquire() | Claim():
            return of_lease(command.subject, command.group, command.partition)
        case Heartbeat():
            return _of_members(command.subject, command.group)
        case FindRequest():
            return _of_request(command.subject, command.group, command.id)
        case FindTrial():
            return _of_trials(command.subject, command.group)
    raise TypeError(f"{type(command).__name__} is never held back")


def of_log(subject: str, partition: int) -> Hashable:
    return "log", subject, partition


def of_lease(subject: str, group: str, partition: int) -> Hashable:
    return "lease", subject, group, partition


def _of_members(subject: str, group: str) -> Hashable:
    return "group", subject, group


def _of_request(subject: str, group: str, request_id: int) -> Hashable:
    return "request", subject, group, request_id


def _of_trials(subject: str, group: str) -> Hashable:
    return "trial", subject, group


class Waking:
    """What waits for this is tried again, after the command that is at work. Call it under the node's lock."""

    def __init__(self, held: LongPolls, membership: Membership) -> None:
        self._held = held
        self._membership = membership

    def announce(self, group: GroupRecord) -> None:
        """There is something for all members of the group to hear."""
        self._membership.announce(group)
        self.members(group)

    def members(self, group: GroupRecord) -> None:
        self._held.wake_later(_of_members(group.subject, group.name))

    def log(self, subject: str, partition: int) -> None:
        self._held.wake_later(of_log(subject, partition))

    def lease(self, subject: str, group: str, partition: int) -> None:
        self._held.wake_later(of_lease(subject, group, partition))

    def requests(self, subject: str, group: str, request_ids: Iterable[int]) -> None:
        """Whoever asked something of keys."""
        for request_id in request_ids:
            self._held.wake_later(_of_request(subject, group, request_id))

    def trials(self, group: GroupRecord) -> None:
        self._held.wake_later(_of_trials(group.subject, group.name))

    def new_work(self) -> None:
        """Whoever waits for work: perhaps there is to be none."""
        for key in self._held.keys(NEW_WORK):
            self._held.wake_later(key)
