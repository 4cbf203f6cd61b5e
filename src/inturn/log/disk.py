"""The disk as the log sees it. All it does to a disk goes through here, so that a simulation can fail it.

A disk for a rehearsal of recovery: it reads, and of what would be changed it only takes note.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

Buffer = bytes | memoryview


class DiskFile(Protocol):
    """An open file. Positions are given with every call: there is no cursor that threads could share."""

    def size(self) -> int: ...

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Write all buffers, one after the other. After an OSError some of the bytes may be there."""
        ...

    def read_at(self, position: int, length: int) -> bytes:
        """Exactly `length` bytes, fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """The content, and the size if it grew, survive a power loss. Blocks."""
        ...

    def sync_all(self) -> None:
        """Like `sync`, also after a truncation."""
        ...

    def truncate(self, length: int) -> None: ...

    def close(self) -> None:
        """Safe to call twice. A file that is no longer referenced is closed by itself."""
        ...


class Disk(Protocol):
    """Files and folders by path. Creating, renaming and removing survive a power loss after `sync_folder`."""

    def open(self, path: str, create: bool = False) -> DiskFile:
        """For reading and writing. With `create` the file must not exist, without it must."""
        ...

    def size(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def make_folder(self, path: str) -> None:
        """With its parents; durable when this returns. No error if it is there."""
        ...

    def sync_folder(self, path: str) -> None: ...

    def names(self, folder: str) -> list[str]: ...

    def rename(self, source: str, target: str) -> None:
        """Replaces the target."""
        ...

    def remove(self, path: str) -> None: ...

    def free_bytes(self, folder: str) -> int: ...

    def boot_id(self) -> str:
        """Changes when the machine is started; empty if nobody knows."""
        ...


# fdatasync leaves out what reading does not need; macOS has none.
_sync_data = getattr(os, "fdatasync", os.fsync)


class RealFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        total = sum(map(len, buffers))
        written = os.pwritev(self._fd, buffers, position)
        if written != total:
            self._write_rest(position, buffers, written)

    def _write_rest(self, position: int, buffers: Sequence[Buffer], written: int) -> None:
        # A short write says nothing about why. The next one either goes on or says it (ENOSPC, mostly).
        rest = memoryview(b"".join(buffers))
        while written < len(rest):
            written += os.pwrite(self._fd, rest[written:], position + written)

    def read_at(self, position: int, length: int) -> bytes:
        data = os.pread(self._fd, length, position)
        if len(data) == length or not data:
            return data
        parts = [data]
        have = len(data)
        while have < length and (more := os.pread(self._fd, length - have, position + have)):
            parts.append(more)
            have += len(more)
        return b"".join(parts)

    def sync(self) -> None:
        _sync_data(self._fd)

    def sync_all(self) -> None:
        os.fsync(self._fd)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Files are dropped, not closed, where another thread may be reading: the last one to let go closes.
        with contextlib.suppress(OSError):
            self.close()


class RealDisk:
    def open(self, path: str, create: bool = False) -> RealFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return RealFile(os.open(path, flags, 0o644))

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def make_folder(self, path: str) -> None:
        path = os.path.abspath(path)
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            self.sync_folder(os.path.dirname(folder))

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.remove(path)

    def boot_id(self) -> str:
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux
            return ""

    def free_bytes(self, folder: str) -> int:
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize


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
