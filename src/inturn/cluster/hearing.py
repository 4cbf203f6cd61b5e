"""How meta hears members: without an errand, but for the first of a group, which makes it known to the brokers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from inturn.cluster.brokers import Brokers, homes_of
from inturn.cluster.errands import Errands, Here
from inturn.cluster.gathering import Answers
from inturn.model.commands import (
    Answer,
    Assignment,
    Done,
    GroupOpened,
    Heartbeat,
    ListRequests,
    OpenGroup,
    Reply,
    RequestList,
)
from inturn.model.errors import GroupConflict, InturnError
from inturn.model.names import check_name
from inturn.model.position import LAST, parse_position
from inturn.model.settings import GroupMode, one_of
from inturn.node.known import Known
from inturn.state.groups import GroupRecord


class HoldersThere:
    """Who holds leases at the brokers, as they said when a group was opened. Call it under the node's lock."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Mapping[str, tuple[int, ...]]] = {}

    def of(self, group: GroupRecord) -> Mapping[str, tuple[int, ...]]:
        """The partitions by member."""
        return self._held.get((group.subject, group.name), {})

    def note(self, name: tuple[str, str], opened: Mapping[str, GroupOpened]) -> None:
        held: dict[str, tuple[int, ...]] = {}
        for one in opened.values():
            for member, partitions in one.holders:
                held[member] = tuple(sorted((*held.get(member, ()), *partitions)))
        self._held[name] = held


class Hearing:
    def __init__(self, known: Known, holders: HoldersThere, brokers: Brokers, here: Here, errands: Errands) -> None:
        self._known = known
        self._holders = holders
        self._brokers = brokers
        self._here = here
        self._errands = errands
        self._opened: set[tuple[str, str]] = set()  # groups that all brokers of their subject know
        self._opening: dict[tuple[str, str], threading.Lock] = {}

    def hear(self, command: Heartbeat, reply: Reply) -> None:
        with_requests = _WithRequests(self._add_requests, command, reply)
        if (command.subject, command.group) in self._opened or command.subject not in self._known.subjects:
            self._here.submit(command, with_requests)
            return

        def told(answer: Answer | InturnError) -> None:
            if isinstance(answer, InturnError):
                reply(answer)
            else:
                self._here.submit(command, with_requests)

        self._errands.go(lambda: self._open_group(command), told)

    def _open_group(self, command: Heartbeat) -> Answer:
        """Let all brokers know of the group before anybody else does: a new one begins there where it is now."""
        name = command.subject, command.group
        with self._brokers.lock:
            lock = self._opening.setdefault(name, threading.Lock())
        with lock:
            if name in self._opened:
                return Done()
            with self._brokers.lock:
                known = self._known.groups.get(name)
            start, mode = (command.start, one_of(GroupMode, "mode", command.mode))
            if known is not None:
                start, mode = known.start, known.mode
            check_name("group", command.group)
            parse_position(start)
            homes = self._brokers.homes(command.subject)
            open_group = OpenGroup(*name, start, mode.value)
            if known is None and parse_position(start) == LAST:
                # One that is told later would begin at what is last by then, and pass by what was sent since.
                opened = self._brokers.ask_all(homes, open_group, GroupOpened)
            else:
                told = self._brokers.tell(homes, open_group)
                opened = {home: one for home, one in told.items() if isinstance(one, GroupOpened)}
            for one in opened.values():
                if one.mode != mode.value:
                    raise GroupConflict(command.group, f"it was made with mode={one.mode!r}; use the same, or another")
            with self._brokers.lock:
                self._holders.note(name, opened)
            if len(opened) == len(homes):
                self._opened.add(name)
        return Done()

    def _add_requests(self, command: Heartbeat, assignment: Assignment, reply: Reply) -> None:
        """What waits for somebody to act upon it is with the brokers."""

        def told(answers: Answers) -> None:
            found = [one for each in answers.values() if isinstance(each, RequestList) for one in each.requests]
            requests = tuple(sorted(found, key=lambda one: one.id))
            reply(msgspec.structs.replace(assignment, requests=requests))

        self._brokers.gather(homes_of(assignment.subject), ListRequests(command.subject, command.group), told)


class _WithRequests:
    """The reply to a heartbeat. It knows its session, as the reply underneath does."""

    __slots__ = ("_add", "_command", "_reply", "session")

    def __init__(self, add: Callable[[Heartbeat, Assignment, Reply], None], command: Heartbeat, reply: Reply) -> None:
        self.session = getattr(reply, "session", None)
        self._add = add
        self._command = command
        self._reply = reply

    def __call__(self, answer: Answer | InturnError) -> None:
        if isinstance(answer, Assignment):
            self._add(self._command, answer, self._reply)
        else:
            self._reply(answer)
