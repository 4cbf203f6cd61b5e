"""Recovery: which rows of the table are already stored in the logs.

A recovery offset is an offset of one partition: every row that was sent and is not deleted yet is stored at or after
that offset, if stored at all. Recovery offsets are written before rows are sent, in the transaction that deletes the
rows before them. `RecoveryOffsets` is pure. `recover` reads the logs, after the previous scanner was fenced, so that no
message of the previous scanner can arrive any more.
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

Offsets = dict[str, list[int]]  # by subject, an offset for each partition; a missing partition begins at 0


class RecoveryOffsets:
    """Computes the recovery offsets of a scan session. Pure."""

    def __init__(self, stored: Offsets) -> None:
        """`stored` are the recovery offsets of the previous scanner."""
        self._horizon = Horizon[Offsets](stored)
        self._learned: Offsets = {}  # where subjects ended before the first send
        self._ends: Offsets = {}  # messages sent from now on are stored at or after these

    def knows(self, subject: str) -> bool:
        return subject in self._ends

    def learn(self, subject: str, ends: Sequence[int]) -> None:
        """Set where the logs of a subject end, before a message is sent to the subject."""
        self._ends[subject] = list(ends)
        self._learned[subject] = list(ends)

    def acknowledged(self, subject: str, partition: int, offset: int) -> None:
        ends = self._ends.get(subject)
        if ends is None:
            return
        ends += [0] * (partition + 1 - len(ends))  # partitions of a later growth
        ends[partition] = max(ends[partition], offset + 1)

    def to_store(self, unaccounted: Collection[Hashable]) -> Offsets:
        """The recovery offsets for `unaccounted` rows: sent or about to be sent, and not deleted. Empty if there are no
        such rows."""
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
    """The tokens of all messages that this producer stored at or after the recovery offsets.

    Logs that cannot be read, or must not be read, are passed over: rows stored there are sent again.
    """
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
    """Where the logs of a subject end now. NotFound if the subject does not exist."""
    found = ask(node, DescribeSubject(subject), SubjectDescription, patience_s)
    return [one.end_offset for one in found.partitions]


def _batches(node: Node, subject: str, partition: PartitionDescription, offset: int) -> Iterator[StoredBatch]:
    offset = max(offset, partition.start_offset)
    while offset < partition.end_offset:
        try:
            pulled = ask(node, Read(subject, partition.index, offset, READ_BYTES), Pulled)
        except StorageError as error:  # the messages behind the damage cannot be reached
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
