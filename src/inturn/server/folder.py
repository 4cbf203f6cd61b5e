"""The folder: one process has it open at a time, and serves the others. Says who, when it is not us.

A folder that this process has open: its lock, its database, its logs, and the node on top of them.

A folder that several processes use: whoever has it open serves the others through a socket in it.

The first to lock the folder opens it and listens; the others are its clients. When it ends, however it does, they lose
their streams, and the first of them to get the lock opens the folder in its place: what was acknowledged is there, and
so are the leases of everybody who lives on. Only a server (`inturn serve`) is given some time to come back first: it is
restarted, and finds its folder free.
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
from inturn.transport.stream_server import StreamServer
from inturn.version import SOFTWARE

LOCK_NAME = "inturn.lock"
DATABASE_NAME = "state.db"
LOG_NAME = "log"
SOCKET_NAME = "inturn.sock"
_SERVER = " server"  # after the process id
SOCKET_PATH_MAX = 100  # the system's limit is 104 to 108 bytes
# A forked child inherits their locks, which must not stay with it, whatever its parent was about to do with them.
_locked: set[Folder] = set()
_changing = threading.RLock()  # held over a fork, too, so that no lock is taken and not yet in `_locked`
# SQLite cannot open a database a second time in a child that was forked while it was open: it would wait for the locks
# of the parent for ever. Such a child can only be a client of whoever has the folder open.
_inherited: set[str] = set()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a folder open, or had it open last."""

    pid: int | None = None
    is_server: bool = False

    @property
    def is_live_server(self) -> bool:
        """As far as this process can see: in another container it would not."""
        if not self.is_server or self.pid is None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is there, and somebody else's
            pass
        return True


class Folder:
    """Locked from construction to `close`; the lock goes with the process, however it ends, and not to its children.

    Raises FolderInUse if another process has it, or if this one was forked from one that had it.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True, is_server: bool = False) -> None:
        """`is_server`: others may rely on it to come back. That is written down, and stays when it ends."""
        if not isinstance(path, str | os.PathLike):
            raise InvalidInput(f"folder {path!r} is a {type(path).__name__}; give a path")
        self.path = Path(path)
        self._is_server = is_server
        if not create and not self.path.is_dir():
            raise InvalidInput(f"no folder {str(self.path)!r}; give the folder that connect() was called with")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # messages are nobody else's business
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
                self._lock_file = None  # the number may be somebody else's from now on
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
    """Where the process that has the folder open listens for the others. If the folder's path is too long for a socket,
    it is in a folder of this user's own, under a name that only this folder has."""
    path = os.path.join(os.path.realpath(folder), SOCKET_NAME)
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
        return path
    own = os.path.join(tempfile.gettempdir(), f"inturn-{os.getuid()}")
    os.makedirs(own, mode=0o700, exist_ok=True)
    if os.lstat(own).st_uid != os.getuid():
        raise InvalidInput(f"{own!r} belongs to somebody else; remove it, or use a folder with a shorter path")
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
    """Nobody, if the folder was never opened or cannot be read."""
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
    """Raises FolderInUse if another process has it."""

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
        """`make` is what makes the node of that role; one that is not a plain one is told the id of the folder."""
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
        """Sync the logs, give the folder free."""
        with contextlib.ExitStack() as closing:  # backwards, and each of them whatever another one raises
            for close in (self.folder.close, self._database.close, self._timer_thread.close, self.node.close):
                closing.callback(close)

    def room(self, log: LogSettings) -> DiskRoom | None:
        """How full the disk of the logs is; None if it cannot be asked."""
        for path in (self.folder.log_path, self.folder.path):  # before the first subject there are no logs
            with contextlib.suppress(OSError):
                return DiskRoom(RealDisk().free_bytes(str(path)), log.reserve_bytes)
        return None

    def disown(self) -> None:
        """In a forked child: everything here is the parent's. The folder has seen to its lock itself."""
        self.node.disown()

    def _apply_retention(self) -> None:
        try:
            self._engine.apply_retention()
        except OSError as error:
            _log.warning("retention.failed", folder=str(self.folder.path), error=str(error))
        self._timer_thread.timers.at(self._clock.monotonic() + RETENTION_CHECK_S, self._apply_retention)


LINK = StreamSettings(backoff_min_s=0.005, backoff_max_s=0.05)  # next door: asking often costs little
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
        self._server: StreamServer | None = None
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
            server = StreamServer(opened.node, self._lease, self._clock, SOFTWARE)
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


def listen_in(server: StreamServer, folder: Folder) -> None:
    """Serve the processes that open the folder by its path."""
    path = socket_path(folder.path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed: nobody else listens, we have the lock
    server.listen(Address(path=path))
