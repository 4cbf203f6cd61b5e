"""The handle of one group on one subject: statistics, position, order, keys in trouble, dead letters."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from inturn.client.dead_letters import DeadLetters
from inturn.client.options import check_wait, check_whole, user_and_host
from inturn.client.reader import Reader
from inturn.consumer.parking import unparked
from inturn.model.errors import TrialTimeout
from inturn.model.message import Message
from inturn.model.offsets import Position, parse_position, position_text
from inturn.model.settings import KeyAction, Order, one_of
from inturn.model.time import Clock
from inturn.producer.validation import encoded_key
from inturn.protocol.commands import (
    Command,
    DescribeGroup,
    DescribeKey,
    Done,
    FindRequest,
    FindTrial,
    GroupDescription,
    KeyDescription,
    KeyDetails,
    KeyList,
    KeyRequest,
    ListKeys,
    Node,
    RequestState,
    ResetGroup,
    SetOrder,
    SteerKey,
    Trial,
    TrialState,
    TryMessage,
)
from inturn.protocol.request import ask

_Wanted = TypeVar("_Wanted")
TRIAL_WAIT_S = 20.0  # per command: a node does not delay an answer for much longer


class Group:
    """The handle of one group on one subject, from `Connection.group`. Safe to use from several threads.

        billing = mq.group("orders", "billing")
        print(billing.describe().lag)
        for key in billing.keys():
            billing.resume(key.key, why="the scale is repaired")

    The handle stores no state: every call asks the node. Every call raises NotFound if the subject or the group does
    not exist, and Closed after the connection was closed.
    """

    def __init__(self, subject: str, name: str, *, node: Node, clock: Clock, check_open: Callable[[], None]) -> None:
        """For `Connection.group`. `check_open` raises Closed once the connection is closed."""
        self.subject = subject
        self.name = name
        self._node = node
        self._clock = clock
        self._check_open = check_open

    def __repr__(self) -> str:
        return f"Group(subject={self.subject!r}, name={self.name!r})"

    def describe(self) -> GroupDescription:
        """The members, and per partition: committed offset, lag, owner and epoch of the lease."""
        return self._ask(DescribeGroup(self.subject, self.name), GroupDescription)

    def reset(self, position: str | int | datetime | Position) -> None:
        """Move the group to a position in all partitions. GroupConflict while a consumer of the group runs."""
        self._ask(ResetGroup(self.subject, self.name, position_text(parse_position(position))), Done)

    def set_order(self, order: Order | str | None) -> None:
        """Set the order for all members of the group; None returns the decision to the members.

        "partition" is stricter than "key", and "key" is stricter than "none". Members follow an order stricter than
        their own: running handlers finish first. For a weaker order members stop with GroupConflict, since handlers may
        rely on the order in the code. GroupConflict is also raised for a shared group (no order), and while keys are
        parked unless the order is "key". Retries (the group's retry subject) keep the members' own order.
        """
        text = "" if order is None else one_of(Order, "order", order).value
        self._ask(SetOrder(self.subject, self.name, text), Done)

    def try_message(self, member: str, partition: int, offset: int, *, timeout_s: float = 30.0) -> TrialState:
        """Have one member handle one stored message now, for diagnosis, and return the result.

        The handler is called beside running handlers, with `context.is_direct` and epoch 0; hooks are called too. Order
        is not kept. Nothing is committed, counted or moved, whatever the result. `member` is a name from
        `describe().members`, or the beginning of the name (as given to `consumer(name=...)`). NotFound if the member or
        the message does not exist, or if the member left meanwhile. TrialTimeout if no result came in time: the handler
        may run all the same.
        """
        check_whole(partition=partition, offset=offset)
        check_wait("timeout_s", timeout_s)
        trial = self._ask(TryMessage(self.subject, self.name, member, partition, offset, uuid.uuid4().hex), Trial)
        until_s = self._clock.monotonic() + timeout_s
        while True:
            left_s = until_s - self._clock.monotonic()
            wait_s = max(0.0, min(left_s, TRIAL_WAIT_S))
            state = self._ask(FindTrial(self.subject, self.name, trial.id, wait_s, left_s <= 0), TrialState)
            if state.result is not None:
                return state
            if left_s <= 0:
                raise TrialTimeout(state.member, f"{self.subject}/{partition}@{offset}", timeout_s)

    # Keys

    def keys(self) -> list[KeyDescription]:
        """The keys that do not proceed without help (failing, blocked, parked, being resumed), and the keys with an
        open request; the longest trouble first."""
        return list(self._ask(ListKeys(self.subject, self.name), KeyList).keys)

    def describe_key(self, key: str | bytes) -> KeyDetails:
        """State, parked messages and requests of one key. NotFound if the key has no trouble.

        Where senders choose the partition and several partitions have trouble with the key: the longest trouble.
        """
        return self._ask(DescribeKey(self.subject, self.name, encoded_key(key)), KeyDetails)

    def key_head(self, key: str | bytes) -> Message | None:
        """The first unfinished message of the key, from the parking lot or the log. NotFound as `describe_key`.

        None if no message of the key failed or was parked yet, or if retention removed the message.
        """
        return self.head_of(self.describe_key(key))

    def head_of(self, details: KeyDetails) -> Message | None:
        """As `key_head`, for a result of `describe_key`."""
        if details.parked:
            return unparked(details.parked[0], self.subject)
        offset = details.description.offset
        if offset is None:
            return None
        self._check_open()
        found = Reader(self._node, self.subject, offset).read(details.description.partition)
        return found[0] if found and found[0].offset == offset else None

    def park(
        self,
        key: str | bytes,
        *,
        by: str | None = None,
        why: str = "",
        partition: int | None = None,
        wait_s: float = 10.0,
    ) -> RequestState:
        """Put all unhandled messages of the key, and all later ones, into the key's parking lot, in order.

        The consumer with the lease of the key's partition parks the key once the running handler of the key has
        returned. The call waits for that, `wait_s` at most. Afterwards `done_at_ms` is None and the request stays: the
        same consumer, or the next holder of the lease, acts on the request. `by` and `why` are recorded with the
        request; `by` is user@host by default. `partition` is needed only where senders choose the partition (routing
        "selector"). A repeated request that still waits is the same request. Needs a group that consumes with
        order="key"; other groups ignore the request.
        """
        return self._request(KeyAction.PARK, key, by=by, why=why, partition=partition, wait_s=wait_s)

    def resume(
        self,
        key: str | bytes,
        *,
        by: str | None = None,
        why: str = "",
        partition: int | None = None,
        wait_s: float = 10.0,
    ) -> RequestState:
        """Let a parked or blocked key run again: waiting messages in order, before any newer message of the key.

        Attempts are counted from the beginning. Done means that the messages started to run, not that the parking lot
        is empty. The call waits, and the request stays, as in `park`. NotFound if the key is neither parked nor
        blocked.
        """
        return self._request(KeyAction.RESUME, key, by=by, why=why, partition=partition, wait_s=wait_s)

    def skip(
        self,
        key: str | bytes,
        *,
        offset: int | None = None,
        by: str | None = None,
        why: str = "",
        partition: int | None = None,
        wait_s: float = 10.0,
    ) -> RequestState:
        """Drop the first message of a failing, blocked or parked key for this group, and record `by` and `why`.

        The message stays in the log. A failing key continues with the next message; a parked key stays parked. Give the
        `offset` of the message that you inspected: if another message is first by now, InvalidInput is raised and names
        the current offset, so a repeated skip drops no second message. The call waits, and the request stays, as in
        `park`; a waiting request is only for that message. NotFound if no message of the key failed or is parked.
        """
        return self._request(KeyAction.SKIP, key, by=by, why=why, partition=partition, wait_s=wait_s, offset=offset)

    # Dead letters

    def dead_letters(self) -> DeadLetters:
        """The messages that the group has given up on this subject (`on_exhausted="dead-letter"`): to inspect, and to
        drive again."""
        self._check_open()
        return DeadLetters(self._node, self.subject, self.name)

    def _request(
        self,
        action: KeyAction,
        key: str | bytes,
        *,
        by: str | None,
        why: str,
        partition: int | None,
        wait_s: float,
        offset: int | None = None,
    ) -> RequestState:
        """Send a key request, and wait up to `wait_s` until a consumer has acted.

        InvalidInput, before the node is asked, for values of a wrong type.
        """
        check_wait("wait_s", wait_s)
        for name, number in (("partition", partition), ("offset", offset)):
            if number is not None:
                check_whole(**{name: number})
        by = user_and_host() if by is None else by
        encoded = encoded_key(key)
        if action is KeyAction.SKIP and offset is None:
            # A skip that is repeated after a lost answer must not drop the next message, too.
            offset = self._head_offset(encoded, partition)
        command = SteerKey(
            subject=self.subject,
            group=self.name,
            key=encoded,
            action=action.value,
            by=by,
            why=why,
            partition=partition,
            offset=offset,
        )
        request = self._ask(command, KeyRequest)
        return self._ask(FindRequest(self.subject, self.name, request.id, wait_s), RequestState)

    def _head_offset(self, key: bytes, partition: int | None) -> int | None:
        for found in self.keys():
            if found.key == key and partition in (None, found.partition):
                return found.offset
        return None

    def _ask(self, command: Command, wanted: type[_Wanted]) -> _Wanted:
        self._check_open()
        return ask(self._node, command, wanted)
