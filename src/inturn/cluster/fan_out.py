"""Errands: what meta has to ask of several brokers for one command, in a thread of a few.

Keys and messages of a cluster: each is with the broker of its partition.

Groups of a cluster: meta has their members, the brokers their leases and offsets.

Subjects of a cluster: meta has their routes, the brokers their logs.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import msgspec

from inturn.cluster.broker_links import Brokers, homes_of
from inturn.meta.broker_registry import BrokerRegistry
from inturn.model.errors import BrokerGroupClosed, Closed, GroupConflict, InturnError, NotFound
from inturn.model.logs import get_logger
from inturn.model.offsets import parse_position
from inturn.model.routing import slot_of
from inturn.model.settings import Order, Routing, one_of
from inturn.model.subject import Subject
from inturn.node.catalog import Known
from inturn.node.group_commands import GroupCommands, check_parked
from inturn.node.key_commands import SteeringCommands
from inturn.node.long_polls import Waking
from inturn.node.subject_commands import GrowthCommands, check_growth
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
ERRANDS_MAX = 16  # at a time
_Wanted = TypeVar("_Wanted")

# By the type of the command. Called in a thread, without the lock.
ErrandTable: TypeAlias = dict[type[Command], Callable[[Any], Answer]]


class Errands:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(ERRANDS_MAX, "inturn-errand")

    def go(self, errand: Callable[[], Answer], reply: Reply) -> None:
        """In a thread. What it raises is the answer."""

        def run() -> None:
            answer: Answer | InturnError
            try:
                answer = errand()
            except InturnError as error:
                answer = error
            except Exception as error:
                _log.exception("meta.errand_failed")
                answer = InturnError(f"meta failed: {error!r}")
            reply(answer)

        try:
            self._pool.submit(run)
        except RuntimeError:  # it was closed just now
            reply(Closed("node"))

    def close(self) -> None:
        """What runs is still answered."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Here:
    """Meta itself, asked without its errands. What it says it says at once."""

    def __init__(self, submit: Callable[[Command, Reply], None]) -> None:
        self.submit = submit

    def ask(self, command: Command, wanted: type[_Wanted]) -> _Wanted:
        return ask(self, command, wanted, patience_s=0.0)


class KeyErrands:
    def __init__(
        self,
        known: Known,
        steering: SteeringCommands,
        registry: BrokerRegistry,
        brokers: Brokers,
        here: Here,
        wake: Waking,
    ) -> None:
        self._known = known
        self._steering = steering
        self._registry = registry
        self._brokers = brokers
        self._here = here
        self._wake = wake

    @property
    def errands(self) -> ErrandTable:
        return {SteerKey: self._steer, ListKeys: self.all, DescribeKey: self._describe, TryMessage: self._try}

    def _steer(self, command: SteerKey) -> Answer:
        with self._brokers.lock:
            subject, group = self._known.subject(command.subject), self._known.group(command.subject, command.group)
            self._steering.check(group, command)
        partition = command.partition
        if partition is None:
            partition = subject.route.by_slot[slot_of(command.key)]
        request = self._brokers.ask(self._brokers.home(command.subject, partition), command, KeyRequest)
        with self._brokers.lock:
            self._wake.announce(group)
        return request

    def find_request(self, command: FindRequest, reply: Reply) -> None:
        """Ask the broker whose number the id begins with. No errand: it may be held back there for long."""
        with self._brokers.lock:
            home = self._registry.name_of(command.id // REQUEST_IDS)
        if home is None:
            reply(NotFound("request", str(command.id), "it was taken back, or never made"))
        else:
            self._brokers.to(home).submit(command, reply)

    def all(self, command: ListKeys) -> KeyList:
        """Those of all brokers; what lasts longest comes first."""
        with self._brokers.lock:
            self._known.group(command.subject, command.group)
        told = self._brokers.ask_all(self._brokers.homes(command.subject), command, KeyList)
        keys = [one for each in told.values() for one in each.keys]
        keys.sort(key=lambda one: (one.since_ms, one.partition, one.key or b"", one.offset or 0))
        return KeyList(tuple(keys))

    def _describe(self, command: DescribeKey) -> Answer:
        with self._brokers.lock:
            subject = self._known.subject(command.subject)
            self._known.group(command.subject, command.group)
        if subject.routing is Routing.SLOTS:
            home = self._brokers.home(command.subject, subject.route.by_slot[slot_of(command.key)])
            return self._brokers.ask(home, command, KeyDetails)
        homes = self._brokers.homes(command.subject)
        told = self._brokers.tell(homes, command)
        found = [one for one in told.values() if isinstance(one, KeyDetails)]
        if found:
            return min(found, key=lambda one: one.description.since_ms)
        silent = next((home for home in homes if home not in told), None)
        if silent is not None:
            raise BrokerGroupClosed(silent, "dead")  # it may be there
        raise next(one for one in told.values() if isinstance(one, InturnError))

    def _try(self, command: TryMessage) -> Answer:
        with self._brokers.lock:
            self._known.group(command.subject, command.group)
        message = FindMessage(command.subject, command.partition, command.offset)
        self._brokers.ask(self._brokers.home(command.subject, command.partition), message, Done)
        return self._here.ask(command, Trial)


class GroupErrands:
    def __init__(
        self, known: Known, groups: GroupCommands, keys: KeyErrands, brokers: Brokers, here: Here, wake: Waking
    ) -> None:
        self._known = known
        self._groups = groups
        self._keys = keys
        self._brokers = brokers
        self._here = here
        self._wake = wake

    @property
    def errands(self) -> ErrandTable:
        return {
            Leave: self._see_off,
            DescribeGroup: self._describe,
            ResetGroup: self._reset,
            SetOrder: self._set_order,
        }

    def _see_off(self, command: Leave) -> Answer:
        done = self._here.ask(command, Done)
        forget = ForgetMember(command.subject, command.group, command.member)
        self._brokers.tell(self._brokers.homes(command.subject), forget)
        return done

    def _describe(self, command: DescribeGroup) -> Answer:
        found = self._here.ask(command, GroupDescription)
        told = self._brokers.ask_all(self._brokers.homes(command.subject), command, GroupDescription)
        partitions = sorted((one for each in told.values() for one in each.partitions), key=lambda one: one.partition)
        claims = sorted((one for each in told.values() for one in each.claims), key=lambda one: one.partition)
        held: dict[str, tuple[int, ...]] = {}
        for one in partitions:
            if one.owner is not None and one.remaining_s:
                held[one.owner] = (*held.get(one.owner, ()), one.partition)
        members = tuple(msgspec.structs.replace(one, held=held.get(one.name, ())) for one in found.member_details)
        return msgspec.structs.replace(
            found, partitions=tuple(partitions), claims=tuple(claims), member_details=members
        )

    def _reset(self, command: ResetGroup) -> Answer:
        """First it is looked whether all brokers may, then each does it."""
        with self._brokers.lock:
            group = self._known.group(command.subject, command.group)
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
        look = DescribeGroup(group.subject, group.name)
        for told in self._brokers.ask_all(homes, look, GroupDescription).values():
            for one in told.partitions:
                if one.owner is not None and one.remaining_s:
                    raise GroupConflict(
                        group.name,
                        f"{one.owner} holds the lease of partition {one.partition}; stop the group's consumers before "
                        "a reset",
                    )

    def _set_order(self, command: SetOrder) -> Answer:
        with self._brokers.lock:
            group = self._known.group(command.subject, command.group)
        order = one_of(Order, "order", command.order) if command.order else None
        if order not in (None, Order.KEY):
            check_parked(group, order, self._keys.all(ListKeys(command.subject, command.group)))
        return self._here.ask(command, Done)


class SubjectErrands:
    def __init__(self, known: Known, growth: GrowthCommands, brokers: Brokers, here: Here) -> None:
        self._known = known
        self._growth = growth
        self._brokers = brokers
        self._here = here
        self._growing = threading.Lock()
        self.growths: set[str] = set()  # attempts that may still come to something

    @property
    def errands(self) -> ErrandTable:
        return {
            CreateSubject: self._make,
            OpenRetry: self._make,
            OpenDeadLetters: self._make,
            GrowSubject: self._grow,
            DescribeSubject: self._describe,
            ResolvePosition: self._resolve_position,
        }

    def _make(self, command: CreateSubject | OpenRetry | OpenDeadLetters) -> Answer:
        subject = self._here.ask(command, Subject)
        self._tell(subject)
        return subject

    def _tell(self, subject: Subject) -> None:
        """Brokers that cannot be asked now learn it later by themselves."""
        self._brokers.tell(homes_of(subject), LearnSubject(subject))

    def _grow(self, command: GrowSubject) -> Answer:
        """Seal the parents at all brokers, store route and barriers here, tell the brokers. Before the second step
        nothing has happened, and the seals are broken; after it, it has, whoever dies."""
        with self._growing:
            with self._brokers.lock:
                subject = self._growth.settled(command.name)
            check_growth(subject, command.partitions)
            if command.partitions == subject.partition_count:
                return subject
            self._tell(subject)  # one that was away may not have caught up
            growth = uuid.uuid4().hex
            self.growths.add(growth)
            grown: Subject | None = None
            try:
                grown = self._grown(subject, command.partitions, growth)
            finally:
                if grown is not None or not self._growth.is_stored(subject):
                    self.growths.discard(growth)  # else nobody knows whether it is stored: it stays sealed
            self._tell(grown)
            return grown

    def _grown(self, subject: Subject, partition_count: int, growth: str) -> Subject:
        seal = SealSubject(subject.name, subject.route.version + 1, growth)
        sealed = self._brokers.ask_all(homes_of(subject), seal, Sealed)
        barriers = dict(place for one in sealed.values() for place in one.barriers)
        with self._brokers.lock:
            self._growth.store(subject, partition_count, barriers)
            return self._growth.settled(subject.name)

    def _describe(self, command: DescribeSubject) -> Answer:
        found = self._here.ask(command, SubjectDescription)
        told = self._brokers.ask_all(self._brokers.homes(command.name), command, SubjectDescription)
        partitions = sorted((one for each in told.values() for one in each.partitions), key=lambda one: one.index)
        return SubjectDescription(found.subject, tuple(partitions))

    def _resolve_position(self, command: ResolvePosition) -> Answer:
        parse_position(command.position)
        told = self._brokers.ask_all(self._brokers.homes(command.subject), command, Offsets)
        with self._brokers.lock:
            partitions = self._known.subject(command.subject).route.partitions
        offsets = [told[one.broker_group].offsets for one in partitions]
        return Offsets(tuple(each[index] if index < len(each) else 0 for index, each in enumerate(offsets)))
