"""A disk for a rehearsal of recovery: it reads, and of what would be changed it only takes note."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from inturn.log.disk import Buffer, RealDisk

Advance: TypeAlias = Callable[[int], None]


def ignore(_: int) -> None:
    """For whoever does not want to know how many bytes were read."""


class _RehearsalFile:
    """Reads; of what would be changed it only takes note."""

    def __init__(self, fd: int, path: str, disk: RehearsalDisk) -> None:
        self._fd = fd
        self._path = path
        self._disk = disk

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read_at(self, position: int, length: int) -> bytes:
        parts = []
        while length > 0 and (part := os.pread(self._fd, length, position)):
            parts.append(part)
            position += len(part)
            length -= len(part)
        data = b"".join(parts)
        self._disk.advance(len(data))
        return data

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        pass  # recovery writes what it read once more

    def sync(self) -> None:
        pass

    def sync_all(self) -> None:
        pass

    def truncate(self, length: int) -> None:
        self._disk.cut_bytes += self.size() - length

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class RehearsalDisk(RealDisk):
    """`cut_bytes` is how much recovery would remove."""

    def __init__(self) -> None:
        self.cut_bytes = 0
        self.advance: Advance = ignore

    def open(self, path: str, create: bool = False) -> _RehearsalFile:  # type: ignore[override]
        if create:
            raise OSError(errno.EROFS, "nothing is made in a rehearsal", path)
        return _RehearsalFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, self)

    def make_folder(self, path: str) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass

    def rename(self, source: str, target: str) -> None:
        raise OSError(errno.EROFS, "nothing is renamed in a rehearsal", source)

    def remove(self, path: str) -> None:
        self.cut_bytes += os.stat(path).st_size if path.endswith(".log") else 0
