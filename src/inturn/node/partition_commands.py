"""Commands about partitions: leases and claims; pull, commit and release under a lease or claim; read without a lease.

The members of a shared group fetch messages, and acknowledge or return each message.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from inturn.broker.broker import Broker
from inturn.broker.leases import LeaseKey
from inturn.broker.pull_filters import CuttingReply, FilteringReply
from inturn.model.errors import GateClosed, LeaseHeld
from inturn.model.message import tag_filter
from inturn.model.settings import GroupMode
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.node.acceptance import AnswerTable, CommandService, DueTable, RemoteTable, Try, WrapperTable, may_wait
from inturn.node.catalog import Catalog, check_mode
from inturn.node.long_polls import LongPolls, WakeUps, of_lease
from inturn.protocol.commands import (
    Acknowledge,
    Acquire,
    Answer,
    Claim,
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
    Reply,
)
from inturn.store.groups import GroupRecord

CHECK_AGAIN_S = 0.01  # the check of a growth gate that was cut short goes on after this time


class ConsumingCommands(CommandService):
    def __init__(self, catalog: Catalog, broker: Broker, held: LongPolls, wake: WakeUps, clock: Clock) -> None:
        self._catalog = catalog
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
    def due_times(self) -> DueTable:
        return {
            Acquire: lambda command: self._broker.leases.expires_at_s(self._key(command)),
            Claim: lambda command: self._broker.claims.expires_at_s(self._key(command), command),
        }

    @property
    def wrappers(self) -> WrapperTable:
        return {Pull: _filtering, Read: _filtering}

    @property
    def remote_checks(self) -> RemoteTable:
        return {
            Acquire: self.outlive_node,
            Claim: self._outlive_owner,
            Commit: lambda command: self._check_places(command, command.progress),
            Release: lambda command: self._check_places(command, [command.progress]),
        }

    def _group(self, command: Renew | ReadLot | Pull | Commit | Release) -> GroupRecord:
        return self._catalog.group(command.subject, command.group)

    def _key(self, command: Acquire | Claim) -> LeaseKey:
        return LeaseKey(self._catalog.group(command.subject, command.group), command.partition)

    # Clients in other processes

    def outlive_node(self, command: Acquire) -> None:
        """The member outlives this process, and so do the member's leases."""
        if (command.subject, command.group) in self._catalog.groups:
            self._broker.leases.remote.add(command.member)

    def _outlive_owner(self, command: Claim) -> None:
        """The claimant is in another process: the lease must not end with the process of the lease's owner."""
        with self._held.lock:
            group = self._catalog.groups.get((command.subject, command.group))
            if group is not None:
                self._broker.leases.outlive_owner(LeaseKey(group, command.partition), command.owner, command.epoch)

    def _check_places(self, command: Commit | Release, parts: Iterable[Progress]) -> None:
        subject = self._catalog.subject(command.subject)
        for progress in parts:
            self._broker.check_places(subject, progress)

    # Leases

    def _acquire(self, command: Acquire, attempt: Try) -> Answer | None:
        subject = self._catalog.subject(command.subject)
        self._broker.log(subject, command.partition)
        group = self._catalog.group(command.subject, command.group)
        check_mode(group, GroupMode.EXCLUSIVE)
        try:
            self._check_gate(subject, group, command.partition)
            granted = self._broker.acquire(group, command)
        except LeaseHeld:
            if may_wait(command.wait_s, attempt):
                return None
            raise
        # A pull of the former owner may be waiting: answer at once that its epoch is over.
        self._wake.log(command.subject, command.partition)
        return granted

    def _check_gate(self, subject: Subject, group: GroupRecord, partition: int) -> None:
        closed = self._broker.gates.closed(subject, group, partition)
        if closed is None:
            return
        lease = of_lease(subject.name, group.name, partition)
        if closed.is_cut:
            self._held.wake_at(lease, self._clock.monotonic() + CHECK_AGAIN_S)
        raise GateClosed(group.name, str(partition), closed.parent, closed.offset)

    def _claim(self, command: Claim, attempt: Try) -> Answer | None:
        self._broker.log(self._catalog.subject(command.subject), command.partition)
        group = self._catalog.group(command.subject, command.group)
        try:
            return self._broker.claim(group, command)
        except LeaseHeld:
            if may_wait(command.wait_s, attempt):
                return None
            raise

    # Messages

    def _pull(self, command: Pull, attempt: Try) -> Answer | None:
        group = self._group(command)
        pulled = self._broker.pull(self._catalog.subject(command.subject), group, command, renews=attempt is Try.FIRST)
        return _if_any(pulled, command, attempt)

    def _read(self, command: Read, attempt: Try) -> Answer | None:
        return _if_any(self._broker.read(self._catalog.subject(command.subject), command), command, attempt)

    # Progress

    def _commit(self, command: Commit, _: Try) -> Answer:
        subject, group = self._catalog.subject(command.subject), self._group(command)
        kept = tuple(self._broker.gates.without_moved(subject, group, one) for one in command.progress)
        committed = self._broker.commit(group, msgspec.structs.replace(command, progress=kept))
        for progress in command.progress:
            self._wake.requests(command.subject, command.group, progress.requests)
        self._wake_children(subject, command.group, committed.partitions)
        return committed

    def _release(self, command: Release, _: Try) -> Answer:
        subject, group = self._catalog.subject(command.subject), self._group(command)
        kept = self._broker.gates.without_moved(subject, group, command.progress)
        self._broker.release(group, msgspec.structs.replace(command, progress=kept))
        self._wake.lease(command.subject, command.group, command.partition)
        self._wake.requests(command.subject, command.group, command.progress.requests)
        self._wake_children(subject, command.group, [command.partition])
        return Done()

    def _wake_children(self, subject: Subject, group: str, parents: Iterable[int]) -> None:
        """The commit of a parent may open the growth gates of its children."""
        descents = subject.route.descents
        for child in {one.child for one in descents if one.parent in set(parents)} if descents else ():
            self._wake.lease(subject.name, group, child)


def _if_any(pulled: Pulled, command: Pull | Read, attempt: Try) -> Pulled | None:
    has_news = pulled.next_offset > command.offset
    return pulled if has_news or not may_wait(command.wait_s, attempt) else None


def _filtering(command: Pull | Read, reply: Reply) -> Reply:
    """Filter by tags outside of the node's lock. Raise InvalidInput for wrong tags."""
    if command.tags and (tags := tag_filter(command.tags)) is not None:
        return FilteringReply(reply, tags)
    return reply


class SharedGroupCommands(CommandService):
    def __init__(self, catalog: Catalog, broker: Broker, wake: WakeUps) -> None:
        self._catalog = catalog
        self._broker = broker
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {Fetch: self._fetch, Acknowledge: self._acknowledge}

    @property
    def due_times(self) -> DueTable:
        return {Fetch: self._next_due_s}

    @property
    def wrappers(self) -> WrapperTable:
        return {Fetch: lambda _, reply: CuttingReply(reply)}

    def _group(self, command: Fetch | Acknowledge) -> GroupRecord:
        group = self._catalog.group(command.subject, command.group)
        check_mode(group, GroupMode.SHARED)
        return group

    def _fetch(self, command: Fetch, attempt: Try) -> Answer | None:
        group = self._group(command)
        is_first = attempt is Try.FIRST
        fetched = self._broker.fetch(self._catalog.subject(command.subject), group, command, is_first=is_first)
        part = self._broker.sharing.find(group, command.partition)
        is_waited_for = part is not None and part.is_newest(command.member, command.ask)
        waits = may_wait(command.wait_s, attempt) and is_waited_for
        return None if waits and not fetched.deliveries else fetched

    def _next_due_s(self, command: Fetch) -> float | None:
        return self._broker.sharing.next_due_s(self._catalog.group(command.subject, command.group), command.partition)

    def _acknowledge(self, command: Acknowledge, _: Try) -> Answer:
        group = self._group(command)
        for receipts in command.receipts:
            self._broker.log(self._catalog.subject(command.subject), receipts.partition)
        acknowledged = self._broker.sharing.acknowledge(group, command)
        for receipts in command.receipts:
            if receipts.returned:
                self._wake.log(command.subject, receipts.partition)
        return acknowledged
