"""Streams to brokers: one to each broker group, made when it is first needed."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable

from inturn.dialling import dialled
from inturn.model.clock import Clock
from inturn.model.errors import InvalidInput
from inturn.security.credentials import Credentials
from inturn.version import SOFTWARE
from inturn.wire.client import RemoteNode

REFUSED_S = 1.0  # after which a broker that did not let us in is asked again


class BrokerLinks:
    """`locate` tells where the broker of a group is, as text, or None if nobody knows. It is asked before each dial, in
    the thread of that stream, so it may wait; a broker may come back at another address."""

    def __init__(self, locate: Callable[[str], str | None], clock: Clock, credentials: Credentials) -> None:
        self._locate = locate
        self._clock = clock
        self._credentials = credentials
        self._lock = threading.Lock()
        self._links: dict[str, RemoteNode] = {}
        self._tls: dict[str, tuple[ssl.SSLContext, str] | None] = {}
        self._again_at_s: dict[str, float] = {}
        self._is_closed = False

    def to(self, broker_group: str) -> RemoteNode:
        link = self._links.get(broker_group)
        if link is not None and not link.is_refused:
            return link
        with self._lock:
            link = self._links.get(broker_group)
            if link is None or (link.is_refused and self._clock.monotonic() >= self._again_at_s[broker_group]):
                # Once its broker has learnt of our token, or speaks our version, it lets us in.
                link = self._made(broker_group)
                if self._is_closed:
                    link.close()
                self._links[broker_group] = link
                self._again_at_s[broker_group] = self._clock.monotonic() + REFUSED_S
            return link

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for link in list(self._links.values()):
            link.close()

    def disown(self) -> None:
        """In a forked child: the threads are not here, and the sockets are the parent's."""
        self._lock = threading.Lock()
        self._is_closed = True
        for link in self._links.values():
            link.disown()

    def _made(self, broker_group: str) -> RemoteNode:
        return RemoteNode(
            lambda timeout_s: self._dial(broker_group, timeout_s),
            f"broker group {broker_group}",
            SOFTWARE,
            self._clock,
            token=self._credentials.token or "",
            tls=lambda: self._tls.get(broker_group),
        )

    def _dial(self, broker_group: str, timeout_s: float) -> socket.socket:
        found = None if self._is_closed else self._locate(broker_group)
        if not found:
            raise OSError("nobody knows where its broker is")
        try:
            address, self._tls[broker_group] = dialled(found, self._credentials)
        except InvalidInput as error:  # files that are being replaced, perhaps
            raise OSError(str(error)) from None
        return address.dial(timeout_s)
