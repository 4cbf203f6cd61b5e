"""Groups of a cluster: meta has their members, the brokers their leases and offsets."""

from __future__ import annotations

import msgspec

from inturn.cluster.brokers import Brokers
from inturn.cluster.errands import ErrandTable, Here
from inturn.cluster.key_errands import KeyErrands
from inturn.model.commands import (
    Answer,
    DescribeGroup,
    Done,
    ForgetMember,
    GroupDescription,
    Leave,
    ListKeys,
    ResetGroup,
    SetOrder,
)
from inturn.model.errors import GroupConflict, InturnError
from inturn.model.position import parse_position
from inturn.model.settings import Order, one_of
from inturn.node.groups import GroupCommands, check_parked
from inturn.node.known import Known
from inturn.node.waking import Waking
from inturn.state.groups import GroupRecord


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
