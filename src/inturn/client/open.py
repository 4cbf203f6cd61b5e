"""Opening: the node of a connection (a folder or a server), and open connections when the process forks or ends.

A forked child has no connection; a process that ends flushes sent messages.
"""

from __future__ import annotations

import atexit
import multiprocessing.util  # noqa: F401 (registers an exit handler: see `_at_exit`)
import os
import weakref
from typing import Protocol

from inturn.cluster.client_router import router_for
from inturn.model.errors import InturnError, InvalidInput
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings, LogSettings
from inturn.model.time import Clock
from inturn.protocol.commands import Node
from inturn.protocol.observer import Observer
from inturn.security.credentials import NONE, Credentials
from inturn.server.folder import SharedFolder
from inturn.transport.address import dialled, is_address
from inturn.transport.client import RemoteNode
from inturn.version import SOFTWARE

_log = get_logger("inturn.connection")


class _Opened(Protocol):
    @property
    def target(self) -> str: ...

    def close(self) -> None: ...

    def disown(self) -> None: ...


_opened: weakref.WeakSet[_Opened] = weakref.WeakSet()


def note_opened(connection: _Opened) -> None:
    """Track the connection for forks and for the end of the process, while the connection is referenced."""
    _opened.add(connection)


def _after_fork() -> None:
    for connection in list(_opened):
        connection.disown()  # closed connections too: a thread of the parent may have been closing


def _at_exit() -> None:
    """A program that ends without closing does not lose sent messages."""
    for connection in list(_opened):
        try:
            connection.close()
        except InturnError as error:
            _log.error("connection.close_failed", target=connection.target, error=str(error))


os.register_at_fork(after_in_child=_after_fork)
# Exit handlers run in reverse order. The handler of multiprocessing ends worker processes: connections close before.
atexit.register(_at_exit)


class ConnectedNode(Node, Protocol):
    """A node owned by a connection."""

    @property
    def lease(self) -> LeaseSettings | None: ...

    def close(self) -> None: ...

    def disown(self) -> None:
        """In a forked child: all resources belong to the parent."""


def reached(
    target: str | os.PathLike[str],
    log: LogSettings | None,
    lease: LeaseSettings | None,
    clock: Clock,
    observer: Observer | None,
    credentials: Credentials,
    *,
    create: bool,
    wait_s: float,
) -> ConnectedNode:
    """The node of the target. `wait_s` is for servers, `create` for folders."""
    check_settings(target, log, lease, observer, credentials)
    if is_address(target):
        return _server(str(target), clock, wait_s, credentials)
    return SharedFolder(target, log or LogSettings(), lease or LeaseSettings(), clock, observer, create=create)


def check_settings(
    target: str | os.PathLike[str],
    log: LogSettings | None,
    lease: LeaseSettings | None,
    observer: Observer | None,
    credentials: Credentials,
) -> None:
    """InvalidInput for settings that the target does not use. An unused token is a mistake: better reported than
    ignored."""
    if is_address(target):
        if log is not None or lease is not None or observer is not None:
            raise InvalidInput(
                f"connect({str(target)!r}): flush, log, lease and observer are the server's; "
                "give them to `inturn serve`"
            )
    elif credentials != NONE:
        raise InvalidInput(
            f"connect({str(target)!r}): token and tls are for servers (inturns://host:port), this is a folder"
        )


def _server(target: str, clock: Clock, wait_s: float, credentials: Credentials) -> ConnectedNode:
    address, tls = dialled(target, credentials)
    node = RemoteNode(address.dial, str(address), SOFTWARE, clock, token=credentials.token or "", tls=tls)
    try:
        node.wait_until_up(wait_s)
        return router_for(node, str(address), clock, credentials)
    except BaseException:
        node.close()
        raise
