"""A server: a folder, opened and served at an address, until `close`."""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING

from inturn.cluster.broker_server import BrokerServer
from inturn.cluster.settings import ClusterSettings, node_maker
from inturn.model.settings import LeaseSettings, LogSettings
from inturn.model.time import Clock, SystemClock
from inturn.protocol.observer import Observer
from inturn.security.guard import Guard
from inturn.security.settings import SecuritySettings
from inturn.server.folder import OpenedFolder, listen_in
from inturn.transport.address import DEFAULT_PORT, Address
from inturn.transport.server import StreamServer
from inturn.transport.server_session import ServedNode, ServerSettings
from inturn.version import SOFTWARE

if TYPE_CHECKING:
    from inturn.server.http import Endpoint
    from inturn.server.metrics import Measures

GRACE_S = 5.0
_LOOK_S = 0.01
_UNGUARDED, _INSECURE = SecuritySettings(), SecuritySettings(is_insecure=True)


class Server:
    """Meta and broker in one process, or either of the two. Also listens on the socket in the folder, for
    `connect(path)`.

    Without authentication in `security`, the server serves this machine only: InvalidInput for an address on a network.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        address: Address | None = None,
        log: LogSettings | None = None,
        lease: LeaseSettings | None = None,
        settings: ServerSettings | None = None,
        clock: Clock | None = None,
        observer: Observer | None = None,
        http: tuple[str, int] | None = None,
        security: SecuritySettings | None = None,
        cluster: ClusterSettings | None = None,
    ) -> None:
        """`http`: host and port for metrics and readiness; port 0: any free port. None: nothing is measured. `cluster`
        None: meta and broker in one server."""
        cluster = cluster if cluster is not None else ClusterSettings()
        security = security if security is not None else SecuritySettings()
        address = address if address is not None else Address("127.0.0.1", DEFAULT_PORT)
        if address.path is None:
            security.check_host(address.host)
        lease = lease if lease is not None else LeaseSettings()
        clock = clock if clock is not None else SystemClock()
        log = log if log is not None else LogSettings()
        self._clock = clock
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            # Before the folder is opened or made: report wrong files of the guard first.
            guard = None if security in (_UNGUARDED, _INSECURE) else Guard(security, clock)
            if guard is not None:
                undo.callback(guard.close)
            self._guard = guard
            role, group = cluster.role, cluster.broker_group
            make = node_maker(cluster, clock)
            self._opened = OpenedFolder(
                path,
                log,
                lease,
                clock,
                observer,
                create=True,
                role=role,
                broker_group=group,
                make=make,
                is_server=True,
            )
            undo.callback(self._opened.close)
            node: ServedNode = self._opened.node
            measures = None
            if http is not None:
                from inturn.server.metrics import MeasuredNode, Measures  # needs Prometheus

                measures = Measures()
                node = MeasuredNode(node, clock, measures)
            on_error = None if measures is None else measures.failed
            self._server = StreamServer(node, lease, clock, SOFTWARE, settings, on_error, guard, role)
            undo.callback(self._server.close)
            if isinstance(self._opened.node, BrokerServer):
                self._opened.node.catch_up()
            listen_in(self._server, self._opened.folder)
            self.address = self._server.listen(address)
            if isinstance(self._opened.node, BrokerServer):
                self._opened.node.report(cluster.advertise or str(self.address))
            self._endpoint: Endpoint | None = None
            if http is not None and measures is not None:
                self._endpoint = self._new_endpoint(*http, measures, log)
            undo.pop_all()

    def _new_endpoint(self, host: str, port: int, measures: Measures, log: LogSettings) -> Endpoint:
        # Imported only with `http`: these imports would take most of the start time.
        from inturn.server.http import Endpoint
        from inturn.server.metrics import ServerCollector

        node, room = self._opened.node, partial(self._opened.room, log)
        collector = ServerCollector(node.statistics, self._server, measures, node.readiness, room, self._clock)
        return Endpoint(host, port, collector, node.readiness, self._clock)

    @property
    def http_url(self) -> str | None:
        return None if self._endpoint is None else self._endpoint.url

    @property
    def connection_count(self) -> int:
        return len(self._server.streams)

    @property
    def held_count(self) -> int:
        """The number of live leases."""
        return self._opened.node.held_count

    def reload(self) -> None:
        """Read tokens, rules and certificates again. The server also does so within about a second after a change."""
        self._server.reload()

    def close(self, grace_s: float = GRACE_S) -> bool:
        """Accept no new work, ask consumers to release partitions and accept commits for at most `grace_s`; then hang
        up. False if a lease was still held then: the holder keeps the lease for the lease's life."""
        if self._is_closed:
            return True
        self._is_closed = True
        node = self._opened.node
        node.stop_gently()
        until_s = self._clock.monotonic() + grace_s
        while node.held_count and self._clock.monotonic() < until_s:
            time.sleep(_LOOK_S)
        is_clean = not node.held_count
        self._server.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._opened.close()
        if self._guard is not None:
            self._guard.close()
        return is_clean
