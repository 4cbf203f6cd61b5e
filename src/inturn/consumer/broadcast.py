"""A broadcast consumer: the file with its offsets, and the node that answers its commands from this file.

    OFFSETS/subject/group/name.json    the offsets, with a checksum; a small file, replaced as a whole
    OFFSETS/subject/group/name.lock    locked while a consumer of this name runs

The consumer joins, acquires, pulls, commits, releases and leaves as usual, and keeps order by partition or key. The
node knows only the name of the consumer. Acquire, Renew, Commit and Release are answered here, from the offset file; a
Pull becomes a Read. There is no lease, and no other consumer that competes.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from inturn.model.errors import InvalidInput, OffsetsUnusable, StorageError
from inturn.model.logs import get_logger
from inturn.model.settings import GroupMode
from inturn.model.subject import check_name
from inturn.protocol.commands import (
    Acquire,
    Command,
    Commit,
    Committed,
    DescribeSubject,
    Done,
    Failure,
    Granted,
    Heartbeat,
    Node,
    Offsets,
    PartitionDescription,
    Progress,
    Pull,
    Read,
    Release,
    Renew,
    Renewed,
    Reply,
    ResolvePosition,
    SubjectDescription,
)
from inturn.protocol.request import ask

VERSION = 1
_ANEW = "restore it, or remove it to begin where `start` says"


@dataclass(slots=True)
class OwnPlace:
    """The progress of a partition: finished are all offsets below `offset`, and above them those in `finished`."""

    offset: int
    finished: bytes = b""
    failures: tuple[Failure, ...] = ()


class _Row(msgspec.Struct, frozen=True):
    partition: int
    offset: int
    finished: str = ""  # base64
    failures: tuple[Failure, ...] = ()


class _Content(msgspec.Struct, frozen=True):
    version: int
    subject: str
    group: str
    name: str
    epoch: int
    partitions: tuple[_Row, ...]


class OffsetFile:
    """Open from construction to `close`, for a single consumer. `places` is None if there was no file yet."""

    def __init__(self, folder: str | os.PathLike[str], subject: str, group: str, name: str) -> None:
        check_name("subject", subject, reserved=True)
        check_name("group", group)
        check_name("consumer", name)
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise InvalidInput(f"offsets={folder!r}: give the folder in which this consumer keeps its offsets")
        self.path = Path(folder) / subject / group / f"{name}.json"
        self._names = (subject, group, name)
        self._lock_file: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise OffsetsUnusable(
                str(self.path), "another consumer uses them", "stop it, or give each consumer a name= of its own"
            ) from None
        except OSError as error:
            self.close()
            raise InvalidInput(f"offsets={str(folder)!r} cannot be used: {error.strerror}") from error
        try:
            self.epoch = 0
            self.places: dict[int, OwnPlace] | None = self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock for the next consumer."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def start(self, offsets: Mapping[int, int]) -> None:
        """There was no file: begin there, durably."""
        self.places = {index: OwnPlace(offset) for index, offset in offsets.items()}
        self.store()

    def place(self, partition: int) -> OwnPlace:
        """A partition that was added later is read from the beginning."""
        assert self.places is not None
        return self.places.setdefault(partition, OwnPlace(0))

    def raise_epoch(self) -> int:
        self.epoch += 1
        self.store()
        return self.epoch

    def note(self, progress: Progress) -> None:
        """Take progress over; `store` makes the progress durable."""
        place = self.place(progress.partition)
        place.offset, place.finished = max(place.offset, progress.offset), progress.finished
        failures = {one.offset: one for one in (*place.failures, *progress.failed)}
        for offset in progress.settled:
            failures.pop(offset, None)
        place.failures = tuple(failures.values())

    def store(self) -> None:
        """Replace the file; durable when this returns. Raises OSError."""
        assert self.places is not None
        rows = tuple(
            _Row(index, place.offset, base64.b64encode(place.finished).decode(), place.failures)
            for index, place in sorted(self.places.items())
        )
        content = msgspec.json.encode(_Content(VERSION, *self._names, self.epoch, rows))
        new = self.path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(b'{"checksum": "%s", "offsets": %s}\n' % (xxh3_64_hexdigest(content).encode(), content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self) -> dict[int, OwnPlace] | None:
        with contextlib.suppress(FileNotFoundError):
            self.path.with_suffix(".new").unlink()  # an interrupted write
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OffsetsUnusable(str(self.path), f"cannot be read: {error.strerror}", "check the disk") from error
        content = self._checked(text)
        self.epoch = content.epoch
        return {
            row.partition: OwnPlace(row.offset, base64.b64decode(row.finished), row.failures)
            for row in content.partitions
        }

    def _checked(self, text: bytes) -> _Content:
        try:
            outer = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            said: str = json.loads(bytes(outer["checksum"]))
            raw = bytes(outer["offsets"])
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            raise OffsetsUnusable(str(self.path), f"they are damaged ({error})", _ANEW) from error
        if xxh3_64_hexdigest(raw) != said:
            raise OffsetsUnusable(str(self.path), "they are damaged: the checksum does not match", _ANEW)
        try:
            content = msgspec.json.decode(raw, type=_Content)
        except msgspec.MsgspecError as error:
            why = f"they were written by another version ({error})"
            raise OffsetsUnusable(str(self.path), why, "use the inturn that wrote them") from error
        if content.version != VERSION:
            why = f"they have version {content.version}, this inturn knows {VERSION}"
            raise OffsetsUnusable(str(self.path), why, "use the inturn that wrote them")
        if (content.subject, content.group, content.name) != self._names:
            why = f"they are of {content.subject}/{content.group}/{content.name}"
            raise OffsetsUnusable(str(self.path), why, "put the file back where it was")
        return content


_FOR_GOOD_S = 10.0 * 365 * 24 * 3600
_log = get_logger("inturn.consumer")


class BroadcastNode:
    """See `inturn.protocol.commands.Node`. Called by the thread that talks to the node."""

    def __init__(self, node: Node, folder: str, subject: str, group: str, name: str) -> None:
        self._node = node
        self._folder = folder
        self._subject = subject
        self._group = group
        self._name = name
        self._file: OffsetFile | None = None

    def open(self, start: str) -> None:
        """Lock and read the offset file, or create the file according to `start`. Raises OffsetsUnusable, and the
        errors of the node."""
        file = OffsetFile(self._folder, self._subject, self._group, self._name)
        try:
            described = ask(self._node, DescribeSubject(self._subject), SubjectDescription)
            if file.places is None:
                found = ask(self._node, ResolvePosition(self._subject, start, self._group), Offsets)
                file.start(dict(enumerate(found.offsets)))
            else:
                self._compare(file, described.partitions)
        except OSError as error:
            file.close()
            why = f"cannot be written: {error.strerror}"
            raise OffsetsUnusable(str(file.path), why, "check the disk and the permissions") from error
        except BaseException:
            file.close()
            raise
        self._file = file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _compare(self, file: OffsetFile, partitions: Sequence[PartitionDescription]) -> None:
        """Refuse offsets beyond the end of a log: they belong to another log. Warn if retention removed unread
        messages."""
        for index, place in sorted((file.places or {}).items()):
            if index >= len(partitions) or place.offset > partitions[index].end_offset:
                end = f"ends at {partitions[index].end_offset}" if index < len(partitions) else "is not there"
                why = f"they say {place.offset} for partition {index}, which {end}: they are of another log"
                raise OffsetsUnusable(str(file.path), why, "use the folder of that log's consumer, or remove the file")
            oldest = partitions[index].start_offset
            if place.offset < oldest:
                _log.warning(
                    "consumer.offsets_gone",
                    subject=self._subject,
                    group=self._group,
                    partition=index,
                    offset=place.offset,
                    starts_at=oldest,
                    next_step="retention was quicker than this consumer; keep messages for longer",
                )

    def submit(self, command: Command, reply: Reply) -> None:
        match command:
            case Heartbeat():
                self._node.submit(msgspec.structs.replace(command, mode=GroupMode.BROADCAST.value), reply)
            case Acquire():
                self._acquire(command, reply)
            case Renew():
                reply(Renewed(tuple(index for index, _ in command.held)))
            case Pull():
                read = Read(
                    command.subject,
                    command.partition,
                    command.offset,
                    command.max_bytes,
                    command.wait_s,
                    group=self._group,
                )
                self._node.submit(read, reply)
            case Commit():
                if self._store(command.progress, reply):
                    reply(Committed(tuple(one.partition for one in command.progress)))
            case Release():
                if self._store((command.progress,), reply):
                    reply(Done())
            case _:
                self._node.submit(command, reply)

    def _acquire(self, command: Acquire, reply: Reply) -> None:
        assert self._file is not None
        place = self._file.place(command.partition)
        try:
            epoch = self._file.raise_epoch()
        except OSError as error:
            reply(self._not_stored(error))
            return
        reply(Granted(epoch, place.offset, _FOR_GOOD_S, place.finished, place.failures))

    def _store(self, progress: Sequence[Progress], reply: Reply) -> bool:
        assert self._file is not None
        for one in progress:
            self._file.note(one)
        try:
            self._file.store()
        except OSError as error:
            reply(self._not_stored(error))
            return False
        return True

    def _not_stored(self, error: OSError) -> StorageError:
        assert self._file is not None
        return StorageError(str(self._file.path), f"offsets cannot be written: {error.strerror}; check the disk")
