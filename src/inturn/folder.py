"""The folder: one process has it open at a time. Says who, when it is not us."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from inturn.model.errors import FolderInUse, InvalidInput

LOCK_NAME = "inturn.lock"
DATABASE_NAME = "state.db"
LOG_NAME = "log"


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


def _pid_in(lock_file: int) -> int | None:
    text = os.pread(lock_file, 32, 0)
    return int(text) if text.isdigit() else None
