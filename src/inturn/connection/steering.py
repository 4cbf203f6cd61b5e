"""Asking something of a key, and waiting until the holder of its partition has acted upon it."""

from __future__ import annotations

import getpass
import os
import socket

from inturn.connection.arguments import check_wait, check_whole
from inturn.model.commands import FindRequest, KeyList, KeyRequest, ListKeys, RequestState, SteerKey
from inturn.model.request import Ask
from inturn.model.settings import KeyAction
from inturn.producer.acceptance import encoded_key


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
