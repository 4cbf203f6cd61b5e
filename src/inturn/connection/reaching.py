"""The node of a connection: a folder that is opened, or a server that is reached."""

from __future__ import annotations

import os
from typing import Protocol

from inturn.cluster.routed_node import routed
from inturn.dialling import dialled
from inturn.model.clock import Clock
from inturn.model.commands import Node
from inturn.model.errors import InvalidInput
from inturn.model.observer import Observer
from inturn.model.settings import LeaseSettings, LogSettings
from inturn.security.credentials import NONE, Credentials
from inturn.shared_folder import SharedFolder
from inturn.version import SOFTWARE
from inturn.wire.address import is_address
from inturn.wire.client import RemoteNode


class ConnectedNode(Node, Protocol):
    """A node that a connection owns."""

    @property
    def lease(self) -> LeaseSettings | None: ...

    def close(self) -> None: ...

    def disown(self) -> None:
        """In a forked child: everything is the parent's."""


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
    """What the target says. `wait_s` is for servers, `create` for folders."""
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
    """InvalidInput for what is no business of such a target. A token that nobody asks for is a mistake: better told
    than forgotten."""
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
        return routed(node, str(address), clock, credentials)
    except BaseException:
        node.close()
        raise
