"""One connection per process, target and credentials, whoever asks for it: a Spark worker runs many tasks in its
life."""

from __future__ import annotations

import socket

from inturn.connection import Connection
from inturn.folder import socket_path
from inturn.model.errors import ConnectionLost
from inturn.security.credentials import NONE, Credentials
from inturn.wire.address import Address, is_address

CONNECT_WAIT_S = 5.0  # for a server that is just being started again
_connections: dict[str, dict[Credentials, Connection]] = {}


def connected(target: str, who: str, credentials: Credentials = NONE) -> Connection:
    """To a server or to a folder that is there. `who` is named if it cannot be reached: "the driver", "a task".

    After a fork the parent's connections are closed ones here, so a child opens its own.
    """
    there = _connections.setdefault(target, {})
    known = there.get(credentials)
    if known is not None and not known.is_closed:
        return known
    try:
        made = _served(target) or Connection(
            target, create=False, wait_s=CONNECT_WAIT_S, credentials=credentials if is_address(target) else NONE
        )
    except ConnectionLost as error:
        raise unreachable(error, who) from error
    there[credentials] = made
    return made


def _served(target: str) -> Connection | None:
    """To whoever has the folder open, as a client only: Spark's workers live on for a while after their last task, and
    must not be the ones who open the folder anew when its owner closes it. None if nobody has it open."""
    if is_address(target):
        return None
    try:
        return Connection(str(Address(path=socket_path(target))))
    except ConnectionLost:
        return None


def unreachable(error: ConnectionLost, who: str) -> ConnectionLost:
    """The same, told from where it was tried and what may be in the way."""
    host = socket.gethostname()
    hint = (
        f"{error.why}; {who} on host {host!r} tried. Check that this host resolves and reaches the address (there "
        f"'localhost' and 127.0.0.1 are {host!r} itself), and that no firewall is between"
        if is_address(error.address)
        else f"{error.why}; {who} on host {host!r} tried"
    )
    return ConnectionLost(error.address, hint)


def disconnect(target: str) -> None:
    for known in _connections.pop(target, {}).values():
        known.close()
