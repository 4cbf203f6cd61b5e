"""Leases and claims, and what is done under them: pull, commit, release. Reading without one, too.

Shared groups: their members fetch messages, and acknowledge or return each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from inturn.broker.broker import Broker
from inturn.broker.leases import LeaseKey
from inturn.model.errors import GateClosed, LeaseHeld
from inturn.model.settings import GroupMode
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.node.acceptance import AnswerTable, Try, may_wait
from inturn.node.catalog import Known, check_mode
from inturn.node.long_polls import LongPolls, Waking, of_lease
from inturn.protocol.commands import (
    Acknowledge,
    Acquire,
    Answer,
    Claim,
    Command,
    Commit,
    Done,
    Fetch,
    Progress,
    Pull,
    Pulled,
    Read,
    ReadLot,
    Release,
    Renew,
)
from inturn.store.groups import GroupRecord

LOOK_ON_S = 0.01  # a gate that was not looked at to the end is looked at again after this


class ConsumingCommands:
    def __init__(self, known: Known, broker: Broker, held: LongPolls, wake: Waking, clock: Clock) -> None:
        self._known = known
        self._broker = broker
        self._held = held
        self._wake = wake
        self._clock = clock

    @property
    def answers(self) -> AnswerTable:
        return {
            Acquire: self._acquire,
            Claim: self._claim,
            Renew: lambda command, _: self._broker.renew(self._group(command), command),
            Pull: self._pull,
            Read: self._read,
            ReadLot: lambda command, _: self._broker.read_lot(self._group(command), command),
            Commit: self._commit,
            Release: self._release,
        }

    @property
    def dues(self) -> dict[type[Command], Callable[[Any], float | None]]:
        """When time itself may bring an answer to what is held back."""
        return {
            Acquire: lambda command: self._broker.leases.expires_at_s(self._key(command)),
            Claim: lambda command: self._broker.claims.expires_at_s(self._key(command), command),
        }

    @property
    def of_other_processes(self) -> dict[type[Command], Callable[[Any], None]]:
        """What comes before a command whose client is in another process, without the lock."""
        return {
            Acquire: self.outlive_node,
            Claim: self._outlive_owner,
            Commit: lambda command: self._check_places(command, command.progress),
            Release: lambda command: self._check_places(command, [command.progress]),
        }

    def _group(self, command: Renew | ReadLot | Pull | Commit | Release) -> GroupRecord:
        return self._known.group(command.subject, command.group)

    def _key(self, command: Acquire | Claim) -> LeaseKey:
        return LeaseKey(self._known.group(command.subject, command.group), command.partition)

    # Clients in other processes

    def outlive_node(self, command: Acquire) -> None:
        """The member lives on when this process ends, and its leases with it."""
        if (command.subject, command.group) in self._known.groups:
            self._broker.leases.remote.add(command.member)

    def _outlive_owner(self, command: Claim) -> None:
        """Somebody in another process is to work under the lease: it must not end with the process of its owner."""
        with self._held.lock:
            group = self._known.groups.get((command.subject, command.group))
            if group is not None:
                self._broker.leases.outlive_owner(LeaseKey(group, command.partition), command.owner, command.epoch)

    def _check_places(self, command: Commit | Release, told: Iterable[Progress]) -> None:
        subject = self._known.subject(command.subject)
        for progress in told:
            self._broker.check_places(subject, progress)

    # Leases

    def _acquire(self, command: Acquire, attempt: Try) -> Answer | None:
        subject = self._known.subject(command.subject)
        self._broker.log(subject, command.partition)
        group = self._known.group(command.subject, command.group)
        check_mode(group, GroupMode.EXCLUSIVE)
        try:
            self._check_gate(subject, group, command.partition)
            granted = self._broker.acquire(group, command)
        except LeaseHeld:
            if may_wait(command.wait_s, attempt):
                return None
            raise
        # A pull of the former owner may be waiting: it is to hear at once that its epoch is over.
        self._wake.log(command.subject, command.partition)
        return granted

    def _check_gate(self, subject: Subject, group: GroupRecord, partition: int) -> None:
        closed = self._broker.gates.closed(subject, group, partition)
        if closed is None:
            return
        lease = of_lease(subject.name, group.name, partition)
        if closed.is_cut:
            self._held.wake_at(lease, self._clock.monotonic() + LOOK_ON_S)
        raise GateClosed(group.name, str(partition), closed.parent, closed.offset)

    def _claim(self, command: Claim, attempt: Try) -> Answer | None:
        self._broker.log(self._known.subject(command.subject), command.partition)
        group = self._known.group(command.subject, command.group)
        try:
            return self._broker.claim(group, command)
        except LeaseHeld:
            if may_wait(command.wait_s, attempt):
                return None
            raise

    # Messages

    def _pull(self, command: Pull, attempt: Try) -> Answer | None:
        group = self._group(command)
        pulled = self._broker.pull(self._known.subject(command.subject), group, command, renews=attempt is Try.FIRST)
        return _if_any(pulled, command, attempt)

    def _read(self, command: Read, attempt: Try) -> Answer | None:
        return _if_any(self._broker.read(self._known.subject(command.subject), command), command, attempt)

    # Progress

    def _commit(self, command: Commit, _: Try) -> Answer:
        subject, group = self._known.subject(command.subject), self._group(command)
        told = tuple(self._broker.gates.without_moved(subject, group, one) for one in command.progress)
        committed = self._broker.commit(group, msgspec.structs.replace(command, progress=told))
        for progress in command.progress:
            self._wake.requests(command.subject, command.group, progress.requests)
        self._wake_children(subject, command.group, committed.partitions)
        return committed

    def _release(self, command: Release, _: Try) -> Answer:
        subject, group = self._known.subject(command.subject), self._group(command)
        told = self._broker.gates.without_moved(subject, group, command.progress)
        self._broker.release(group, msgspec.structs.replace(command, progress=told))
        self._wake.lease(command.subject, command.group, command.partition)
        self._wake.requests(command.subject, command.group, command.progress.requests)
        self._wake_children(subject, command.group, [command.partition])
        return Done()

    def _wake_children(self, subject: Subject, group: str, parents: Iterable[int]) -> None:
        """What was committed may be what a child has waited for."""
        descents = subject.route.descents
        for child in {one.child for one in descents if one.parent in set(parents)} if descents else ():
            self._wake.lease(subject.name, group, child)


def _if_any(pulled: Pulled, command: Pull | Read, attempt: Try) -> Pulled | None:
    has_news = pulled.next_offset > command.offset
    return pulled if has_news or not may_wait(command.wait_s, attempt) else None


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
