"""What arguments of a connection are checked for, before anything is sent.

Asking something of a key, and waiting until the holder of its partition has acted upon it.

Asking one member to handle one message, and waiting for what became of it.
"""

from __future__ import annotations

import getpass
import math
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import replace

from inturn.model.errors import InvalidInput, TrialTimeout
from inturn.model.message import tags_text
from inturn.model.settings import ConsumerSettings, KeyAction, checked
from inturn.model.subject import check_name
from inturn.model.time import Clock
from inturn.producer.validation import encoded_key
from inturn.protocol.commands import (
    FindRequest,
    FindTrial,
    KeyList,
    KeyRequest,
    ListKeys,
    RequestState,
    SteerKey,
    Trial,
    TrialState,
    TryMessage,
)
from inturn.protocol.request import Ask


def broker_group_names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise InvalidInput(f"broker_groups={names!r}: give a list of names")
    return tuple(check_name("broker group", name) for name in names)


def check_wait(name: str, wait_s: object) -> None:
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < math.inf:
        raise InvalidInput(f"{name}={wait_s!r}: give a number of seconds, 0 or more")


def check_whole(**numbers: object) -> None:
    """By the name of the argument."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidInput(f"{name}={number!r}: give a whole number")


def settings_with(
    settings: ConsumerSettings | None, tags: str | None, processes: int | None
) -> ConsumerSettings | None:
    """The settings with what was given beside them."""
    checked(settings, ConsumerSettings, "settings")
    if tags is None and processes is None:
        return settings
    settings = settings if settings is not None else ConsumerSettings()
    if tags is not None:
        if settings.tags not in (None, tags_text(tags) or None):
            raise InvalidInput(f"tags={tags!r}, but settings.tags is {settings.tags!r}; give one of them")
        settings = replace(settings, tags=tags)
    if processes is not None:
        settings = replace(settings, workers="processes", concurrency=processes)
    return settings


def steer(
    ask: Ask,
    action: KeyAction,
    subject: str,
    group: str,
    key: str | bytes,
    by: str | None,
    why: str,
    partition: int | None,
    wait_s: float,
    offset: int | None = None,
) -> RequestState:
    """`by` is user@host unless it is given. Waits for `wait_s` at the most; the request stays."""
    check_wait("wait_s", wait_s)
    for name, number in (("partition", partition), ("offset", offset)):
        if number is not None:
            check_whole(**{name: number})
    by = _user_and_host() if by is None else by
    encoded = encoded_key(key)
    if action is KeyAction.SKIP and offset is None:
        # A skip that is repeated after a lost answer must not drop the next message, too.
        offset = _head_offset(ask, subject, group, encoded, partition)
    command = SteerKey(subject, group, encoded, action.value, by, why, partition, offset)
    request = ask(command, KeyRequest)
    return ask(FindRequest(subject, group, request.id, wait_s), RequestState)


def _head_offset(ask: Ask, subject: str, group: str, key: bytes, partition: int | None) -> int | None:
    for one in ask(ListKeys(subject, group), KeyList).keys:
        if one.key == key and partition in (None, one.partition):
            return one.offset
    return None


def _user_and_host() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


LOOK_S = 20.0  # a node holds nothing back for much longer


def tried(
    ask: Ask, clock: Clock, subject: str, group: str, member: str, partition: int, offset: int, timeout_s: float
) -> TrialState:
    """TrialTimeout if the member did not tell in time: the handler may run all the same."""
    check_whole(partition=partition, offset=offset)
    check_wait("timeout_s", timeout_s)
    trial = ask(TryMessage(subject, group, member, partition, offset, uuid.uuid4().hex), Trial)
    until_s = clock.monotonic() + timeout_s
    while True:
        left_s = until_s - clock.monotonic()
        find = FindTrial(subject, group, trial.id, max(0.0, min(left_s, LOOK_S)), left_s <= 0)
        state = ask(find, TrialState)
        if state.result is not None:
            return state
        if left_s <= 0:
            raise TrialTimeout(state.member, f"{subject}/{partition}@{offset}", timeout_s)
