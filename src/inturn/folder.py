"""The folder: one process has it open at a time, and serves the others. Says who, when it is not us."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from inturn.model.errors import FolderInUse, InvalidInput

LOCK_NAME = "inturn.lock"
DATABASE_NAME = "state.db"
LOG_NAME = "log"
SOCKET_NAME = "inturn.sock"
SOCKET_PATH_MAX = 100  # the system's limit is 104 to 108 bytes


class Folder:
    """Locked from construction to `close`; the lock goes with the process, however it ends."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        if not isinstance(path, str | os.PathLike):
            raise InvalidInput(f"folder {path!r} is a {type(path).__name__}; give a path")
        self.path = Path(path)
        if not create and not self.path.is_dir():
            raise InvalidInput(f"no folder {str(self.path)!r}; give the folder that connect() was called with")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidInput(f"folder {str(self.path)!r} cannot be opened: {why}") from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _pid_in(self._lock_file)
            os.close(self._lock_file)
            raise FolderInUse(str(self.path), pid) from None
        os.ftruncate(self._lock_file, 0)
        os.pwrite(self._lock_file, str(os.getpid()).encode(), 0)

    @property
    def database_path(self) -> Path:
        return self.path / DATABASE_NAME

    @property
    def log_path(self) -> Path:
        return self.path / LOG_NAME

    def close(self) -> None:
        os.close(self._lock_file)


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


def _pid_in(lock_file: int) -> int | None:
    text = os.pread(lock_file, 32, 0)
    return int(text) if text.isdigit() else None
