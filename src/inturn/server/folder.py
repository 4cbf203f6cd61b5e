"""The folder of a node: lock, database and logs. One process has the folder open, and serves other processes.

The first process that locks the folder opens the folder and listens on a socket in it. All other processes are clients
of that process. When the process ends, in whatever way, the clients lose their streams, and the first client that gets
the lock opens the folder: acknowledged messages are still stored, and living members keep their leases. Only a server
(`inturn serve`) gets some time to come back first, so that a restarted server finds the folder free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from inturn.log.disk import RealDisk
from inturn.log.embedded import EmbeddedEngine
from inturn.model.errors import Closed, FolderInUse, InturnError, InvalidInput, VersionMismatch
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings, LogSettings, Role
from inturn.model.time import Clock, TimerThread
from inturn.node.node import InProcessNode
from inturn.node.service_node import ServiceNode
from inturn.protocol.commands import Command, DiskRoom, Reply
from inturn.protocol.observer import Observer
from inturn.store.cluster import take_role
from inturn.store.database import Database
from inturn.transport.address import Address
from inturn.transport.client import RemoteNode
from inturn.transport.client_stream import StreamSettings
from inturn.transport.server import StreamServer
from inturn.version import SOFTWARE

LOCK_NAME = "inturn.lock"
DATABASE_NAME = "state.db"
LOG_NAME = "log"
SOCKET_NAME = "inturn.sock"
_SERVER = " server"  # after the process id
SOCKET_PATH_MAX = 100  # the system's limit is 104 to 108 bytes
# A forked child inherits the locks, and must release them at once.
_locked: set[Folder] = set()
_changing = threading.RLock()  # held during a fork, so that every taken lock is in `_locked`
# A child that was forked while a SQLite database was open cannot open the database: SQLite would wait forever for the
# locks of the parent. Such a child can only be a client of the process that has the folder open.
_inherited: set[str] = set()


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a folder open, or had the folder open last."""

    pid: int | None = None
    is_server: bool = False

    @property
    def is_live_server(self) -> bool:
        """Whether the server process runs. Not visible for processes of a different container."""
        if not self.is_server or self.pid is None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # the process runs as a different user
            pass
        return True


class Folder:
    """Locked from construction to `close`. The lock ends with the process, in whatever way, and is not inherited by
    children.

    Raise FolderInUse if a different process has the folder open, or if this process was forked from such a process.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True, is_server: bool = False) -> None:
        """`is_server`: clients may expect the process to come back. Stored in the lock file, also after the end."""
        if not isinstance(path, str | os.PathLike):
            raise InvalidInput(f"folder {path!r} is a {type(path).__name__}; give a path")
        self.path = Path(path)
        self._is_server = is_server
        if not create and not self.path.is_dir():
            raise InvalidInput(f"no folder {str(self.path)!r}; give the folder that connect() was called with")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # messages are private to the user
            self._real_path = os.path.realpath(self.path)
        except (OSError, ValueError) as error:
            raise self._not_opened(error) from error
        with _changing:
            try:
                lock_file = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise self._not_opened(error) from error
            try:
                self._take(lock_file)
            except BaseException:
                os.close(lock_file)
                raise
            self._lock_file: int | None = lock_file
            _locked.add(self)

    @property
    def database_path(self) -> Path:
        return self.path / DATABASE_NAME

    @property
    def log_path(self) -> Path:
        return self.path / LOG_NAME

    def close(self) -> None:
        with _changing:
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None  # a different file may have the number from now on
                _locked.discard(self)

    def _not_opened(self, error: OSError | ValueError) -> InvalidInput:
        why = error.strerror if isinstance(error, OSError) else error
        return InvalidInput(f"folder {str(self.path)!r} cannot be opened: {why}")

    def _take(self, lock_file: int) -> None:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(str(self.path), holder_in(lock_file).pid) from None
        if self._real_path in _inherited:
            raise FolderInUse(str(self.path), os.getpid())
        os.ftruncate(lock_file, 0)
        os.pwrite(lock_file, f"{os.getpid()}{_SERVER if self._is_server else ''}".encode(), 0)


def socket_path(folder: str | os.PathLike[str]) -> str:
    """The socket of the process that has the folder open. If the folder's path is too long for a socket, the socket is
    in a private folder of this user, under a name derived from the folder's path."""
    path = os.path.join(os.path.realpath(folder), SOCKET_NAME)
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
        return path
    own = os.path.join(tempfile.gettempdir(), f"inturn-{os.getuid()}")
    os.makedirs(own, mode=0o700, exist_ok=True)
    if os.lstat(own).st_uid != os.getuid():
        raise InvalidInput(f"{own!r} belongs to another user; remove it, or use a folder with a shorter path")
    return os.path.join(own, f"{xxh3_64_hexdigest(os.fsencode(path))}.sock")


def _leave_to_parent() -> None:
    """In a forked child."""
    _inherited.update(folder._real_path for folder in _locked)
    for folder in list(_locked):
        folder.close()
    _changing.release()


def holder_in(lock_file: int) -> Holder:
    text = os.pread(lock_file, 32, 0).decode("ascii", "replace")
    pid = text.removesuffix(_SERVER)
    return Holder(int(pid) if pid.isdecimal() else None, text.endswith(_SERVER))


def holder_of(folder: str | os.PathLike[str]) -> Holder:
    """An empty Holder if the folder was never opened or cannot be read."""
    try:
        lock_file = os.open(os.path.join(folder, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return Holder()
    try:
        return holder_in(lock_file)
    finally:
        os.close(lock_file)


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_leave_to_parent)


_log = get_logger("inturn.server.folder")
RETENTION_CHECK_S = 60.0


class OpenedFolder:
    """A folder that this process has open, with its node. Raise FolderInUse if a different process has the folder."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        log: LogSettings,
        lease: LeaseSettings,
        clock: Clock,
        observer: Observer | None,
        *,
        create: bool,
        role: Role = Role.NODE,
        broker_group: str = "",
        make: Callable[..., ServiceNode] = InProcessNode,
        is_server: bool = False,
    ) -> None:
        """`make` makes the node of the role; a broker also gets the broker group and the id of the folder."""
        self._clock = clock
        with contextlib.ExitStack() as undo:
            self.folder = Folder(path, create=create, is_server=is_server)
            undo.callback(self.folder.close)
            self._database = Database.open(self.folder.database_path)
            undo.callback(self._database.close)
            folder_id = take_role(self._database, role, broker_group)
            self._timer_thread = TimerThread(clock)
            undo.callback(self._timer_thread.close)
            timers = self._timer_thread.timers
            self._engine = EmbeddedEngine(self.folder.log_path, log, timers, clock=clock)
            undo.callback(self._engine.close)
            known = {"folder_id": folder_id, "broker_group": broker_group} if role is Role.BROKER else {}
            self.node = make(
                self._database, self._engine, clock, timers, lease, observer, room=partial(self.room, log), **known
            )
            undo.pop_all()
        if log.retention_s is not None or log.retention_bytes is not None:
            self._apply_retention()

    def close(self) -> None:
        """Sync the logs and unlock the folder."""
        with contextlib.ExitStack() as closing:  # in reverse order, and all of them even if one raises
            for close in (self.folder.close, self._database.close, self._timer_thread.close, self.node.close):
                closing.callback(close)

    def room(self, log: LogSettings) -> DiskRoom | None:
        """The free space of the logs' disk; None if unknown."""
        for path in (self.folder.log_path, self.folder.path):  # before the first subject there are no logs
            with contextlib.suppress(OSError):
                return DiskRoom(RealDisk().free_bytes(str(path)), log.reserve_bytes)
        return None

    def disown(self) -> None:
        """In a forked child: all resources are the parent's. The folder has released its lock already."""
        self.node.disown()

    def _apply_retention(self) -> None:
        try:
            self._engine.apply_retention()
        except OSError as error:
            _log.warning("retention.failed", folder=str(self.folder.path), error=str(error))
        self._timer_thread.timers.at(self._clock.monotonic() + RETENTION_CHECK_S, self._apply_retention)


STREAM = StreamSettings(backoff_min_s=0.005, backoff_max_s=0.05)  # on the same machine: dialling often costs little
SERVER_BACK_S = 5.0  # a restart by systemd takes about 2 s: RestartSec, and the start of Python
OPENING_S = 10.0  # time until the process with the folder listens


class SharedFolder:
    """A node in this process, or in the process that has the folder open."""

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
        self._server: StreamServer | None = None
        self._remote: RemoteNode | None = None
        self._path = path
        self._missed_at_s: float | None = None  # since when the server is missing, if a server had the folder
        try:
            self._open()
        except FolderInUse as error:
            self._join(error)

    @property
    def lease(self) -> LeaseSettings:
        """The lease settings of the folder: those of the process that has the folder open."""
        remote = None if self._opened is not None or self._remote is None else self._remote.lease
        return self._lease if remote is None else remote

    @property
    def is_opened_here(self) -> bool:
        return self._opened is not None

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
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
            self._remote.close()  # the client's thread may be opening the folder
        if self._server is not None:
            self._server.close()
        if self._opened is not None:
            self._opened.close()

    def disown(self) -> None:
        """In a forked child: all resources are the parent's."""
        self._is_closed = True
        if self._remote is not None:
            self._remote.disown()
        if self._server is not None:
            self._server.disown()
        if self._opened is not None:
            self._opened.disown()

    def _open(self) -> None:
        """Open the folder and serve other processes. Raise FolderInUse."""
        with contextlib.ExitStack() as undo:
            opened = OpenedFolder(self._path, self._log, self._lease, self._clock, self._observer, create=self._create)
            undo.callback(opened.close)
            server = StreamServer(opened.node, self._lease, self._clock, SOFTWARE)
            undo.callback(server.close)
            try:
                listen_in(server, opened.folder)
            except (InturnError, OSError) as error:
                # The node works without clients in other processes, e.g. on a file system without sockets.
                _log.warning("folder.not_shared", folder=str(opened.folder.path), error=str(error))
            undo.pop_all()
        self._server, self._opened = server, opened

    def _join(self, in_use: FolderInUse) -> None:
        self._remote = RemoteNode(self._dial, str(self._path), SOFTWARE, self._clock, STREAM)
        try:
            self._remote.wait_until_up(OPENING_S)
            if self._remote.role is not Role.NODE:
                raise InvalidInput(
                    f"folder {str(self._path)!r} is that of a {self._remote.role} of a cluster, and only a part of it; "
                    "connect to the address of its meta server"
                )
        except BaseException as error:
            self.close()  # otherwise the thread would go on trying to open the folder
            if isinstance(error, InturnError) and not isinstance(error, VersionMismatch | InvalidInput):
                raise FolderInUse(in_use.folder, in_use.pid) from error
            raise

    def _dial(self, timeout_s: float) -> socket.socket | None:
        """Called without a stream: the process that had the folder open may be gone."""
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
            self._lease = self.lease  # the settings that all clients use until now
            self._open()
        except FolderInUse:
            return False
        except InturnError as error:
            raise OSError(str(error)) from error
        _log.info("folder.taken_over", folder=str(self._path))
        return True


def listen_in(server: StreamServer, folder: Folder) -> None:
    """Serve other processes that connect to the folder by path."""
    path = socket_path(folder.path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a killed process: this process has the lock, so no other process listens
    server.listen(Address(path=path))
