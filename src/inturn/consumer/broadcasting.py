"""A consumer that gets everything, and keeps its own offsets: what it asks a node for, as the node has to hear it.

The consumer itself is as ever: it joins, acquires, pulls, commits, releases and leaves, and keeps order by partition or
key. The node knows it by name only. Acquiring, renewing, committing and releasing are answered here, from the offset
file; pulling becomes reading. There is no lease, and no other consumer to have one against.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inturn.consumer.offset_file import OffsetFile
from inturn.model.commands import (
    Acquire,
    Command,
    Commit,
    Committed,
    DescribeSubject,
    Done,
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
from inturn.model.errors import OffsetsUnusable, StorageError
from inturn.model.logs import get_logger
from inturn.model.request import ask
from inturn.model.settings import GroupMode

_FOR_GOOD_S = 10.0 * 365 * 24 * 3600
_log = get_logger("inturn.consumer")


class BroadcastNode:
    """See `inturn.model.commands.Node`. Called by the thread that talks to the node."""

    def __init__(self, node: Node, folder: str, subject: str, group: str, name: str) -> None:
        self._node = node
        self._folder = folder
        self._subject = subject
        self._group = group
        self._name = name
        self._file: OffsetFile | None = None

    def open(self, start: str) -> None:
        """Lock and read the offset file, or make it as `start` says. Raises OffsetsUnusable, and what a node does."""
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
            raise OffsetsUnusable(str(file.path), why, "look at the disk and at who may write there") from error
        except BaseException:
            file.close()
            raise
        self._file = file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _compare(self, file: OffsetFile, partitions: Sequence[PartitionDescription]) -> None:
        """Offsets beyond a log are not of this log; what a log has lost is said."""
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
