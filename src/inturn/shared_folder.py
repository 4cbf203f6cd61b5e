"""A folder that several processes use: whoever has it open serves the others through a socket in it.

The first to lock the folder opens it and listens; the others are its clients. When it ends, however it does, they lose
their streams, and the first of them to get the lock opens the folder in its place: what was acknowledged is there, and
so are the leases of everybody who lives on. Only a server (`inturn serve`) is given some time to come back first: it is
restarted, and finds its folder free.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from inturn.folder import Folder, holder_of, socket_path
from inturn.model.clock import Clock
from inturn.model.commands import Command, Reply
from inturn.model.errors import Closed, FolderInUse, InturnError, InvalidInput, VersionMismatch
from inturn.model.logs import get_logger
from inturn.model.observer import Observer
from inturn.model.settings import LeaseSettings, LogSettings, Role
from inturn.opened_folder import OpenedFolder
from inturn.version import SOFTWARE
from inturn.wire.address import Address
from inturn.wire.client import RemoteNode
from inturn.wire.link import LinkSettings
from inturn.wire.server import Server

_log = get_logger("inturn.folder")
LINK = LinkSettings(backoff_min_s=0.005, backoff_max_s=0.05)  # next door: asking often costs little
SERVER_BACK_S = 5.0  # a restart by systemd takes about two: RestartSec, and starting Python
OPENING_S = 10.0  # how long the process that has the folder may take until it listens


class SharedFolder:
    """A node: in this process, or in the one that has the folder open."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        log: LogSettings,
        lease: LeaseSettings,
        clock: Clock,
        observer: Observer | None,
        *,
        create: bool,
    ) -> None:
        self._log = log
        self._lease = lease
        self._clock = clock
        self._observer = observer
        self._create = create
        self._lock = threading.Lock()
        self._is_closed = False
        self._opened: OpenedFolder | None = None
        self._server: Server | None = None
        self._remote: RemoteNode | None = None
        self._path = path
        self._missed_at_s: float | None = None  # since when there is no server, if there was one
        try:
            self._open()
        except FolderInUse as error:
            self._join(error)

    @property
    def lease(self) -> LeaseSettings:
        """What holds for the leases in this folder: as whoever has it open decided."""
        remote = None if self._opened is not None or self._remote is None else self._remote.lease
        return self._lease if remote is None else remote

    @property
    def is_opened_here(self) -> bool:
        return self._opened is not None

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.model.commands.Node`."""
        opened = self._opened
        if opened is not None:
            opened.node.submit(command, reply)
        elif self._remote is not None:
            self._remote.submit(command, reply)
        else:
            reply(Closed("connection"))

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._remote is not None:
            self._remote.close()  # its thread may have been about to open the folder
        if self._server is not None:
            self._server.close()
        if self._opened is not None:
            self._opened.close()

    def disown(self) -> None:
        """In a forked child: everything here is the parent's."""
        self._is_closed = True
        if self._remote is not None:
            self._remote.disown()
        if self._server is not None:
            self._server.disown()
        if self._opened is not None:
            self._opened.disown()

    def _open(self) -> None:
        """Open it here and serve the others. Raises FolderInUse."""
        with contextlib.ExitStack() as undo:
            opened = OpenedFolder(self._path, self._log, self._lease, self._clock, self._observer, create=self._create)
            undo.callback(opened.close)
            server = Server(opened.node, self._lease, self._clock, SOFTWARE)
            undo.callback(server.close)
            try:
                listen_in(server, opened.folder)
            except (InturnError, OSError) as error:
                # Nothing is lost but company: a file system without sockets, for one.
                _log.warning("folder.not_shared", folder=str(opened.folder.path), error=str(error))
            undo.pop_all()
        self._server, self._opened = server, opened

    def _join(self, in_use: FolderInUse) -> None:
        self._remote = RemoteNode(self._dial, str(self._path), SOFTWARE, self._clock, LINK)
        try:
            self._remote.wait_until_up(OPENING_S)
            if self._remote.role is not Role.NODE:
                raise InvalidInput(
                    f"folder {str(self._path)!r} is that of a {self._remote.role} of a cluster, and only a part of it; "
                    "connect to the address of its meta server"
                )
        except BaseException as error:
            self.close()  # else its thread would go on trying to open the folder
            if isinstance(error, InturnError) and not isinstance(error, VersionMismatch | InvalidInput):
                raise FolderInUse(in_use.folder, in_use.pid) from error
            raise

    def _dial(self, timeout_s: float) -> socket.socket | None:
        """Called whenever there is no stream: perhaps whoever had the folder is gone."""
        with self._lock:
            if self._is_closed or (not self._awaits_server() and self._takes_over()):
                return None
        dialed = Address(path=socket_path(self._path)).dial(timeout_s)
        self._missed_at_s = None
        return dialed

    def _awaits_server(self) -> bool:
        if not holder_of(self._path).is_server:
            return False
        now_s = self._clock.monotonic()
        if self._missed_at_s is None:
            self._missed_at_s = now_s
        return now_s < self._missed_at_s + SERVER_BACK_S

    def _takes_over(self) -> bool:
        try:
            self._lease = self.lease  # as we and the other clients were told until now
            self._open()
        except FolderInUse:
            return False
        except InturnError as error:
            raise OSError(str(error)) from error
        _log.info("folder.taken_over", folder=str(self._path))
        return True


def listen_in(server: Server, folder: Folder) -> None:
    """Serve the processes that open the folder by its path."""
    path = socket_path(folder.path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed: nobody else listens, we have the lock
    server.listen(Address(path=path))
