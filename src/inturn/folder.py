"""The folder: one process has it open at a time, and serves the others. Says who, when it is not us."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from inturn.model.errors import FolderInUse, InvalidInput

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
