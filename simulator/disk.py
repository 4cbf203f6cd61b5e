"""A disk in memory that loses unsynced data at a crash, runs full, and fails on request.

After a crash, an unsynced write is there in full, in part, or not at all, in any order; an unsynced truncation has the
old or the new length; an unsynced folder entry has the old or the new state. The disk is stricter than most file
systems: data that survives here survives there.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence

Buffer = bytes | memoryview
_Filter = Callable[[str], bool]


class SimCrash(BaseException):
    """The simulated machine stopped here. Not an Exception: only the simulation may handle SimCrash."""


class _Inode:
    __slots__ = ("data", "durable", "pending")

    def __init__(self) -> None:
        self.data = bytearray()  # the content for readers
        self.durable = bytearray()  # the content that survives a crash
        self.pending: list[tuple[int, bytes | None]] = []  # (position, written) or (length, None) for a truncation

    def apply(self, to: bytearray, position: int, written: bytes | memoryview | None) -> None:
        if written is None:
            if len(to) > position:
                del to[position:]
            else:
                to.extend(bytes(position - len(to)))
            return
        if len(to) < position:
            to.extend(bytes(position - len(to)))
        to[position : position + len(written)] = written

    def sync(self) -> None:
        for position, written in self.pending:
            self.apply(self.durable, position, written)
        self.pending.clear()


class SimFile:
    """See `inturn.log.disk.DiskFile`. Useless after a crash, like any handle of a process that died."""

    __slots__ = ("_disk", "_inode", "_life", "path")

    def __init__(self, disk: SimDisk, path: str, inode: _Inode) -> None:
        self._disk = disk
        self._inode = inode
        self._life = disk.life
        self.path = path

    def size(self) -> int:
        self._check()
        return len(self._inode.data)

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        self._check()
        self._disk._operate("write", self.path, lambda: self._write(position, b"".join(buffers)))

    def _write(self, position: int, written: bytes) -> None:
        inode = self._inode
        grows = position + len(written) - len(inode.data)
        granted = self._disk._take(max(grows, 0))
        short = max(grows, 0) - granted
        if short:
            written = written[: len(written) - short]
        if written:
            inode.apply(inode.data, position, written)
            inode.pending.append((position, written))
        if short:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def read_at(self, position: int, length: int) -> bytes:
        self._check()
        self._disk._fail("read", self.path)
        with memoryview(self._inode.data) as view:
            return bytes(view[position : position + length])

    def sync(self) -> None:
        self._check()
        self._disk.sync_count += 1
        self._disk._operate("sync", self.path, self._inode.sync)

    sync_all = sync

    def truncate(self, length: int) -> None:
        self._check()
        self._disk._operate("truncate", self.path, lambda: self._truncate(length))

    def _truncate(self, length: int) -> None:
        inode = self._inode
        self._disk._give(len(inode.data) - length)
        inode.apply(inode.data, length, None)
        inode.pending.append((length, None))

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._life != self._disk.life:
            raise OSError(errno.EBADF, "this file was open before the crash", self.path)


class SimDisk:
    """See `inturn.log.disk.Disk`. For a single thread.

    `operations` counts changes of the disk and syncs; `sync_count` the syncs of files.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.life = 0
        self._boots = 0
        self.operations = 0
        self.sync_count = 0
        self._crash_at: int | None = None
        self._dead = False
        self._free: int | None = None
        self._failures: list[tuple[str, OSError, _Filter | None]] = []
        self._files: dict[str, _Inode] = {}
        self._durable_files: dict[str, _Inode] = {}
        self._folders: set[str] = set()
        self._pending_entries: list[tuple[str, tuple[tuple[str, _Inode | None], ...]]] = []  # folder, (path, inode)

    # The disk

    def open(self, path: str, create: bool = False) -> SimFile:
        if create:
            if path in self._files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._operate("create", path, lambda: self._entry(_folder_of(path), (path, _Inode())))
        return SimFile(self, path, self._inode(path))

    def size(self, path: str) -> int:
        return len(self._inode(path).data)

    def exists(self, path: str) -> bool:
        return path in self._files

    def make_folder(self, path: str) -> None:
        # Durable by contract, see Disk.make_folder.
        self._folders.add(path)

    def sync_folder(self, path: str) -> None:
        self._operate("sync_folder", path, lambda: self._settle_entries(path))

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self._files if _folder_of(path) == folder]

    def rename(self, source: str, target: str) -> None:
        inode = self._inode(source)
        self._operate("rename", target, lambda: self._entry(_folder_of(target), (source, None), (target, inode)))

    def remove(self, path: str) -> None:
        inode = self._inode(path)
        self._operate("remove", path, lambda: self._entry(_folder_of(path), (path, None)))
        self._give(len(inode.data))

    def free_bytes(self, folder: str) -> int:
        return 1 << 50 if self._free is None else self._free

    def boot_id(self) -> str:
        return str(self._boots)

    # Failures

    def crash(self) -> None:
        """The machine stops and starts again: keep synced data; chance decides on the rest."""
        rng = self._rng
        # Four kinds of luck: the extremes come often enough.
        chance = rng.choice((0.0, 1.0, 0.5, rng.random()))
        for _, changes in self._pending_entries:
            if rng.random() < chance:
                self._change(self._durable_files, changes)
        self._boots += 1
        self._pending_entries.clear()
        self._files = dict(self._durable_files)
        for inode in dict.fromkeys(self._files.values()):
            self._lose(inode, chance)
        self.kill()

    def kill(self) -> None:
        """Only the process dies: all writes are there, and a crash can still take unsynced writes."""
        self.life += 1
        self._dead = False
        self._crash_at = None
        self._failures.clear()

    def crash_at(self, operation: int | None) -> None:
        """Raise SimCrash at this operation (counted by `operations`), before or after its effect, by chance.

        All later operations raise SimCrash, until `crash`.
        """
        self._crash_at = operation

    def fail_next(self, operation: str, error: OSError, only: _Filter | None = None) -> None:
        """Fail the next operation of this kind on a path that `only` accepts, once, before any effect.

        Kinds: write, read, sync, truncate, create, rename, remove, sync_folder.
        """
        self._failures.append((operation, error, only))

    def fail_next_sync(self, error: OSError, only: _Filter | None = None) -> None:
        self.fail_next("sync", error, only)

    def set_free(self, free_bytes: int | None) -> None:
        """Room for so many bytes more (None: no limit). A write beyond is short, then fails with ENOSPC."""
        self._free = free_bytes

    def contents(self, path: str) -> bytes:
        return bytes(self._inode(path).data)

    def paths(self) -> list[str]:
        return sorted(self._files)

    def poke(self, path: str, position: int, data: bytes) -> None:
        """Change bytes on the disk unnoticed and durably; bytes behind the end make the file longer."""
        inode = self._inode(path)
        inode.sync()
        inode.apply(inode.data, position, data)
        inode.apply(inode.durable, position, data)

    def cut(self, path: str, length: int) -> None:
        """Shorten a file behind everybody's back, durably."""
        inode = self._inode(path)
        inode.sync()
        inode.apply(inode.data, length, None)
        inode.apply(inode.durable, length, None)

    def erase(self, path: str) -> None:
        """Remove a file behind everybody's back, durably."""
        self._settle_entries(_folder_of(path))
        del self._files[path], self._durable_files[path]

    # Inside

    def _inode(self, path: str) -> _Inode:
        inode = self._files.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return inode

    def _operate(self, operation: str, path: str, action: Callable[[], None]) -> None:
        if self._dead:
            raise SimCrash
        self._fail(operation, path)
        self.operations += 1
        if self.operations == self._crash_at:
            self._dead = True
            if self._rng.random() < 0.5:
                action()
            raise SimCrash
        action()

    def _fail(self, operation: str, path: str) -> None:
        for failure in self._failures:
            kind, error, only = failure
            if kind == operation and (only is None or only(path)):
                self._failures.remove(failure)
                raise error

    def _take(self, wanted: int) -> int:
        if self._free is None:
            return wanted
        granted = min(wanted, self._free)
        self._free -= granted
        return granted

    def _give(self, count: int) -> None:
        if self._free is not None:
            self._free += count

    def _entry(self, folder: str, *changes: tuple[str, _Inode | None]) -> None:
        self._change(self._files, changes)
        self._pending_entries.append((folder, changes))

    def _settle_entries(self, folder: str) -> None:
        kept = []
        for entry in self._pending_entries:
            if entry[0] == folder:
                self._change(self._durable_files, entry[1])
            else:
                kept.append(entry)
        self._pending_entries = kept

    @staticmethod
    def _change(files: dict[str, _Inode], changes: tuple[tuple[str, _Inode | None], ...]) -> None:
        for path, inode in changes:
            if inode is None:
                files.pop(path, None)
            else:
                files[path] = inode

    def _lose(self, inode: _Inode, chance: float) -> None:
        rng = self._rng
        for position, written in inode.pending:
            if rng.random() < chance:
                inode.apply(inode.durable, position, written)
            elif written is not None and rng.random() < chance:
                # Torn: a part of the write arrived; the rest reads as before, or as zeros.
                begin = 0 if rng.random() < 0.5 else rng.randrange(len(written))
                end = rng.randint(begin, len(written))
                inode.apply(inode.durable, position + begin, memoryview(written)[begin:end])
        inode.pending.clear()
        inode.data = bytearray(inode.durable)


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]
