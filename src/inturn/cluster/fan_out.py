"""Fan-outs: commands that meta sends to several brokers and answers with the combined answers of the brokers.

Meta has routes, members and orders. The brokers have logs, leases, offsets and keys. A fan-out blocks, so each runs in
a thread of a pool, without the node's lock.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from inturn.cluster.broker_links import Brokers, homes_of
from inturn.meta.broker_registry import BrokerRegistry
from inturn.meta.membership import Membership
from inturn.model.errors import BrokerGroupClosed, Closed, GroupConflict, InturnError, NotFound
from inturn.model.logs import get_logger
from inturn.model.offsets import parse_position
from inturn.model.routing import slot_of
from inturn.model.settings import Order, Routing, one_of
from inturn.model.subject import Subject
from inturn.node.acceptance import CommandService, SubmitTable
from inturn.node.catalog import Catalog
from inturn.node.group_commands import GroupCommands, check_ordered, check_parked
from inturn.node.key_commands import check_key_request
from inturn.node.long_polls import WakeUps
from inturn.node.subject_commands import Growth, check_growth
from inturn.protocol.commands import (
    Answer,
    Command,
    CreateSubject,
    DescribeGroup,
    DescribeKey,
    DescribeSubject,
    Done,
    FindMessage,
    FindRequest,
    ForgetMember,
    GroupDescription,
    GrowSubject,
    KeyDetails,
    KeyList,
    KeyRequest,
    LearnSubject,
    Leave,
    ListKeys,
    Offsets,
    OpenDeadLetters,
    OpenRetry,
    Reply,
    ResetGroup,
    ResolvePosition,
    Sealed,
    SealSubject,
    SetOrder,
    SteerKey,
    SubjectDescription,
    Trial,
    TryMessage,
)
from inturn.protocol.request import ask
from inturn.store.cluster import REQUEST_IDS
from inturn.store.groups import GroupRecord

_log = get_logger("inturn.meta")
THREADS_MAX = 16
_Command = TypeVar("_Command", bound=Command)
_Wanted = TypeVar("_Wanted")

# Functions by the type of the command. Called in a thread of the pool, without the lock.
FanOutTable: TypeAlias = dict[type[Command], Callable[[Any], Answer]]


class FanOutThreads:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS_MAX, "inturn-fan-out")

    def submit(self, function: Callable[[_Command], Answer], command: _Command, reply: Reply) -> None:
        """Call the function in a thread of the pool. An error that the function raises is the answer."""

        def run() -> None:
            answer: Answer | InturnError
            try:
                answer = function(command)
            except InturnError as error:
                answer = error
            except Exception as error:
                _log.exception("meta.errand_failed")
                answer = InturnError(f"meta failed: {error!r}")
            reply(answer)

        try:
            self._pool.submit(run)
        except RuntimeError:  # the pool was closed just now
            reply(Closed("node"))

    def close(self) -> None:
        """Running fan-outs are still answered."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class FanOutService(CommandService):
    """A service whose commands run in threads of the pool."""

    def __init__(self, threads: FanOutThreads) -> None:
        self._threads = threads

    @property
    def fan_outs(self) -> FanOutTable:
        return {}

    @property
    def submits(self) -> SubmitTable:
        return {kind: partial(self._threads.submit, function) for kind, function in self.fan_outs.items()}


class LocalAnswers:
    """The answers of meta itself, without fan-outs. Meta answers these commands at once."""

    def __init__(self, submit: Callable[[Command, Reply], None]) -> None:
        self.submit = submit

    def ask(self, command: Command, wanted: type[_Wanted]) -> _Wanted:
        return ask(self, command, wanted, patience_s=0.0)


class KeyFanOuts(FanOutService):
    """Keys and messages: each is at the broker of its partition."""

    def __init__(
        self,
        threads: FanOutThreads,
        catalog: Catalog,
        membership: Membership,
        registry: BrokerRegistry,
        brokers: Brokers,
        local: LocalAnswers,
        wake: WakeUps,
    ) -> None:
        super().__init__(threads)
        self._catalog = catalog
        self._membership = membership
        self._registry = registry
        self._brokers = brokers
        self._local = local
        self._wake = wake

    @property
    def fan_outs(self) -> FanOutTable:
        return {SteerKey: self._steer, ListKeys: self.all, DescribeKey: self._describe, TryMessage: self._try}

    @property
    def submits(self) -> SubmitTable:
        return {**super().submits, FindRequest: self._find_request}

    def _steer(self, command: SteerKey) -> Answer:
        with self._brokers.lock:
            subject, group = self._catalog.subject(command.subject), self._catalog.group(command.subject, command.group)
            check_key_request(group, command, self._membership.order(group))
        partition = command.partition
        if partition is None:
            partition = subject.route.by_slot[slot_of(command.key)]
        request = self._brokers.ask(self._brokers.home(command.subject, partition), command, KeyRequest)
        with self._brokers.lock:
            self._wake.announce(group)
        return request

    def _find_request(self, command: FindRequest, reply: Reply) -> None:
        """Ask the broker whose number the id begins with. Not in a thread: the broker may hold the command for long."""
        with self._brokers.lock:
            home = self._registry.name_of(command.id // REQUEST_IDS)
        if home is None:
            reply(NotFound("request", str(command.id), "it was taken back, or never made"))
        else:
            self._brokers.to(home).submit(command, reply)

    def all(self, command: ListKeys) -> KeyList:
        """The keys of all brokers, the oldest trouble first."""
        with self._brokers.lock:
            self._catalog.group(command.subject, command.group)
        answers = self._brokers.ask_all(self._brokers.homes(command.subject), command, KeyList)
        keys = [one for answer in answers.values() for one in answer.keys]
        keys.sort(key=lambda one: (one.since_ms, one.partition, one.key or b"", one.offset or 0))
        return KeyList(tuple(keys))

    def _describe(self, command: DescribeKey) -> Answer:
        with self._brokers.lock:
            subject = self._catalog.subject(command.subject)
            self._catalog.group(command.subject, command.group)
        if subject.routing is Routing.SLOTS:
            home = self._brokers.home(command.subject, subject.route.by_slot[slot_of(command.key)])
            return self._brokers.ask(home, command, KeyDetails)
        homes = self._brokers.homes(command.subject)
        answers = self._brokers.tell(homes, command)
        found = [one for one in answers.values() if isinstance(one, KeyDetails)]
        if found:
            return min(found, key=lambda one: one.description.since_ms)
        silent = next((home for home in homes if home not in answers), None)
        if silent is not None:
            raise BrokerGroupClosed(silent, "dead")  # the key may be at this broker
        raise next(one for one in answers.values() if isinstance(one, InturnError))

    def _try(self, command: TryMessage) -> Answer:
        with self._brokers.lock:
            self._catalog.group(command.subject, command.group)
        message = FindMessage(command.subject, command.partition, command.offset)
        self._brokers.ask(self._brokers.home(command.subject, command.partition), message, Done)
        return self._local.ask(command, Trial)


class GroupFanOuts(FanOutService):
    """Groups: meta has the members, the brokers have leases and offsets."""

    def __init__(
        self,
        threads: FanOutThreads,
        catalog: Catalog,
        groups: GroupCommands,
        keys: KeyFanOuts,
        brokers: Brokers,
        local: LocalAnswers,
        wake: WakeUps,
    ) -> None:
        super().__init__(threads)
        self._catalog = catalog
        self._groups = groups
        self._keys = keys
        self._brokers = brokers
        self._local = local
        self._wake = wake

    @property
    def fan_outs(self) -> FanOutTable:
        return {
            Leave: self._leave,
            DescribeGroup: self._describe,
            ResetGroup: self._reset,
            SetOrder: self._set_order,
        }

    def _leave(self, command: Leave) -> Answer:
        done = self._local.ask(command, Done)
        forget = ForgetMember(command.subject, command.group, command.member)
        self._brokers.tell(self._brokers.homes(command.subject), forget)
        return done

    def _describe(self, command: DescribeGroup) -> Answer:
        with self._brokers.lock:
            self._catalog.subject(command.subject)
            found = self._groups.description(self._catalog.group(command.subject, command.group))
        answers = self._brokers.ask_all(self._brokers.homes(command.subject), command, GroupDescription).values()
        partitions = sorted((one for answer in answers for one in answer.partitions), key=lambda one: one.partition)
        claims = sorted((one for answer in answers for one in answer.claims), key=lambda one: one.partition)
        held: dict[str, tuple[int, ...]] = {}
        for one in partitions:
            if one.owner is not None and one.remaining_s:
                held[one.owner] = (*held.get(one.owner, ()), one.partition)
        members = tuple(msgspec.structs.replace(one, held=held.get(one.name, ())) for one in found.member_details)
        return msgspec.structs.replace(
            found, partitions=tuple(partitions), claims=tuple(claims), member_details=members
        )

    def _reset(self, command: ResetGroup) -> Answer:
        """Check first that no broker has a live lease of the group, then reset at all brokers."""
        with self._brokers.lock:
            group = self._catalog.group(command.subject, command.group)
            self._groups.check_reset(group)
        parse_position(command.position)
        homes = self._brokers.homes(command.subject)
        self._check_unheld(group, homes)
        try:
            self._brokers.ask_all(homes, command, Done)
        except InturnError as error:
            raise GroupConflict(
                group.name,
                f"it may be reset in a part of its partitions only ({error}); repeat the reset before it is used",
            ) from error
        with self._brokers.lock:
            self._wake.announce(group)
        return Done()

    def _check_unheld(self, group: GroupRecord, homes: list[str]) -> None:
        describe = DescribeGroup(group.subject, group.name)
        for answer in self._brokers.ask_all(homes, describe, GroupDescription).values():
            for one in answer.partitions:
                if one.owner is not None and one.remaining_s:
                    raise GroupConflict(
                        group.name,
                        f"{one.owner} holds the lease of partition {one.partition}; stop the group's consumers before "
                        "a reset",
                    )

    def _set_order(self, command: SetOrder) -> Answer:
        with self._brokers.lock:
            group = self._catalog.group(command.subject, command.group)
        order = one_of(Order, "order", command.order) if command.order else None
        if order not in (None, Order.KEY):
            check_parked(group, order, self._keys.all(ListKeys(command.subject, command.group)))
        check_ordered(group)
        with self._brokers.lock:
            self._groups.set_order(group, order)
        return Done()


class SubjectFanOuts(FanOutService):
    """Subjects: meta has the routes, the brokers have the logs."""

    def __init__(
        self, threads: FanOutThreads, catalog: Catalog, growth: Growth, brokers: Brokers, local: LocalAnswers
    ) -> None:
        super().__init__(threads)
        self._catalog = catalog
        self._growth = growth
        self._brokers = brokers
        self._local = local
        self._growing = threading.Lock()
        self.growths: set[str] = set()  # attempts that may still succeed

    @property
    def fan_outs(self) -> FanOutTable:
        return {
            CreateSubject: self._make,
            OpenRetry: self._make,
            OpenDeadLetters: self._make,
            GrowSubject: self._grow,
            DescribeSubject: self._describe,
            ResolvePosition: self._resolve_position,
        }

    def _make(self, command: CreateSubject | OpenRetry | OpenDeadLetters) -> Answer:
        subject = self._local.ask(command, Subject)
        self._announce(subject)
        return subject

    def _announce(self, subject: Subject) -> None:
        """A broker that is not heard now reads the catalogue later."""
        self._brokers.tell(homes_of(subject), LearnSubject(subject))

    def _grow(self, command: GrowSubject) -> Answer:
        """Seal the parents at all brokers, store route and barriers here, announce the route to the brokers.

        A failure before the route is stored voids the growth: the brokers break the seals. After that the growth holds,
        whichever process ends.
        """
        with self._growing:
            with self._brokers.lock:
                subject = self._growth.settled(command.name)
            check_growth(subject, command.partitions)
            if command.partitions == subject.partition_count:
                return subject
            self._announce(subject)  # a broker that was away may not have caught up
            growth = uuid.uuid4().hex
            self.growths.add(growth)
            grown: Subject | None = None
            try:
                grown = self._grown(subject, command.partitions, growth)
            finally:
                if grown is not None or not self._growth.is_stored(subject):
                    self.growths.discard(growth)  # else it may be stored, or not: the logs stay sealed
            self._announce(grown)
            return grown

    def _grown(self, subject: Subject, partition_count: int, growth: str) -> Subject:
        seal = SealSubject(subject.name, subject.route.version + 1, growth)
        sealed = self._brokers.ask_all(homes_of(subject), seal, Sealed)
        barriers = dict(place for one in sealed.values() for place in one.barriers)
        with self._brokers.lock:
            self._growth.store(subject, partition_count, barriers)
            return self._growth.settled(subject.name)

    def _describe(self, command: DescribeSubject) -> Answer:
        with self._brokers.lock:
            subject = self._catalog.subject(command.name)
        answers = self._brokers.ask_all(homes_of(subject), command, SubjectDescription)
        partitions = [one for answer in answers.values() for one in answer.partitions]
        return SubjectDescription(subject, tuple(sorted(partitions, key=lambda one: one.index)))

    def _resolve_position(self, command: ResolvePosition) -> Answer:
        parse_position(command.position)
        answers = self._brokers.ask_all(self._brokers.homes(command.subject), command, Offsets)
        with self._brokers.lock:
            partitions = self._catalog.subject(command.subject).route.partitions
        offsets = [answers[one.broker_group].offsets for one in partitions]
        return Offsets(tuple(found[index] if index < len(found) else 0 for index, found in enumerate(offsets)))
