"""From where a successor has to read the logs to find what was stored of rows that are still in the table. Pure.

A mark is an offset per partition: every row that was sent and is not deleted yet stands at it or behind it, if it is
stored at all. RecoveryOffsets are written before rows are sent, in the transaction that deletes the rows before them.

Which rows are stored already, though they are in the table still: read from the logs after the scanner before this
one was fenced, so that nothing of it can arrive any more.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

from inturn.model.batch import StoredBatch, contents, is_intact
from inturn.model.errors import AccessDenied, NotFound, StorageError
from inturn.model.logs import get_logger
from inturn.model.settings import MIB
from inturn.outbox.row import TOKEN
from inturn.outbox.scan_core import Horizon
from inturn.protocol.commands import DescribeSubject, Node, PartitionDescription, Pulled, Read, SubjectDescription
from inturn.protocol.request import ask

Offsets = dict[str, list[int]]  # by subject, one offset for each partition; a partition that is missing begins at 0


class RecoveryOffsets:
    def __init__(self, stored: Offsets) -> None:
        """`stored` is what the one before has left."""
        self._horizon = Horizon[Offsets](stored)
        self._learned: Offsets = {}  # where subjects ended when they were first sent to
        self._ends: Offsets = {}  # what is sent from now on stands behind these

    def knows(self, subject: str) -> bool:
        return subject in self._ends

    def learn(self, subject: str, ends: Sequence[int]) -> None:
        """Where the logs of a subject end, before anything is sent to it."""
        self._ends[subject] = list(ends)
        self._learned[subject] = list(ends)

    def acknowledged(self, subject: str, partition: int, offset: int) -> None:
        ends = self._ends.get(subject)
        if ends is None:
            return
        ends += [0] * (partition + 1 - len(ends))  # partitions that came later
        ends[partition] = max(ends[partition], offset + 1)

    def to_store(self, unaccounted: Collection[Hashable]) -> Offsets:
        """The marks for what is unaccounted: sent or about to be, and not deleted. Nothing is: there are none."""
        if not unaccounted:
            self._horizon = Horizon[Offsets]({})
            self._learned.clear()
            self._ends.clear()
            return {}
        before = self._horizon.settled
        now = {subject: list(ends) for subject, ends in self._ends.items()}
        settled = self._horizon.advance(now, unaccounted)
        if settled is not before:
            for subject in settled:
                self._learned.pop(subject, None)
        return {**self._learned, **settled}


_log = get_logger("inturn.outbox")
READ_BYTES = 4 * MIB


def recover(node: Node, offsets_by_subject: Offsets, producer_id: int) -> set[str]:
    """The tokens of all that this producer stored from the marks on. What cannot be read, or must not be, is passed
    over: such rows are sent again."""
    tokens: set[str] = set()
    for subject, offsets in offsets_by_subject.items():
        try:
            found = ask(node, DescribeSubject(subject), SubjectDescription)
            for one in found.partitions:
                start = offsets[one.index] if one.index < len(offsets) else 0
                for batch in _batches(node, subject, one, start):
                    if batch.header.producer_id == producer_id:
                        tokens.update(_tokens(batch))
        except NotFound:
            continue
        except AccessDenied as error:
            _log.warning("outbox.not_recalled", subject=subject, error=str(error))
    return tokens


def ends_of(node: Node, subject: str, patience_s: float) -> list[int]:
    """Where the logs of a subject end now. NotFound if there is none."""
    found = ask(node, DescribeSubject(subject), SubjectDescription, patience_s)
    return [one.end_offset for one in found.partitions]


def _batches(node: Node, subject: str, partition: PartitionDescription, offset: int) -> Iterator[StoredBatch]:
    offset = max(offset, partition.start_offset)
    while offset < partition.end_offset:
        try:
            pulled = ask(node, Read(subject, partition.index, offset, READ_BYTES), Pulled)
        except StorageError as error:  # there is no way to what stands behind it
            _log.warning("outbox.not_recalled", subject=subject, error=str(error))
            return
        for batch in pulled.batches:
            if is_intact(batch):
                yield batch
            else:
                _log.warning("outbox.log_damaged", subject=subject, partition=partition.index, offset=offset)
        if pulled.next_offset <= offset:
            return
        offset = pulled.next_offset


def _tokens(batch: StoredBatch) -> Iterator[str]:
    for message in contents(batch):
        token = message.properties.get(TOKEN)
        if token is not None:
            yield token
