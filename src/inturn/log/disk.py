"""The disk interface of the log. All disk access goes through `Disk`, so that a simulation can inject faults.

`RealDisk` is the operating system's disk. `RehearsalDisk` rehearses a recovery: it reads, and only records changes.
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
    """An open file. Every call takes a position: threads share no cursor."""

    def size(self) -> int: ...

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Write all buffers, one after the other. After an OSError some of the bytes may be written."""
        ...

    def read_at(self, position: int, length: int) -> bytes:
        """Exactly `length` bytes, fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """Make the content and a larger size survive a power loss. Blocks."""
        ...

    def sync_all(self) -> None:
        """Like `sync`, also after a truncation."""
        ...

    def truncate(self, length: int) -> None: ...

    def close(self) -> None:
        """Safe to call twice. A file without references closes by itself."""
        ...


class Disk(Protocol):
    """Files and folders by path. Creating, renaming and removing survive a power loss after `sync_folder`."""

    def open(self, path: str, create: bool = False) -> DiskFile:
        """Open for reading and writing. With `create` the file must not exist, without `create` the file must exist."""
        ...

    def size(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def make_folder(self, path: str) -> None:
        """Make a folder with its parents; durable when this returns. No error if the folder exists."""
        ...

    def sync_folder(self, path: str) -> None: ...

    def names(self, folder: str) -> list[str]: ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file and replace the target."""
        ...

    def remove(self, path: str) -> None: ...

    def free_bytes(self, folder: str) -> int: ...

    def boot_id(self) -> str:
        """The id of the present run of the machine, new after every start; empty if unknown."""
        ...


# fdatasync leaves out metadata that reading does not need; macOS has no fdatasync.
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
        # A short write has no cause. The next write either continues or raises the cause (mostly ENOSPC).
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
        # Files are dropped, not closed, where a different thread may be reading: the last reference closes.
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
    """The default of `RehearsalDisk.advance`: ignore the number of bytes read."""


class _RehearsalFile:
    """Reads, and only records changes."""

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
        pass  # recovery only writes again the bytes that it has read

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
    """`cut_bytes` is the number of bytes that recovery would remove."""

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
