"""Which rows are stored already, though they are in the table still: read from the logs after the scanner before this
one was fenced, so that nothing of it can arrive any more."""

from __future__ import annotations

from collections.abc import Iterator

from inturn.model.batch import StoredBatch, contents, is_intact
from inturn.model.commands import DescribeSubject, Node, PartitionDescription, Pulled, Read, SubjectDescription
from inturn.model.errors import AccessDenied, NotFound, StorageError
from inturn.model.logs import get_logger
from inturn.model.request import ask
from inturn.model.settings import MIB
from inturn.outbox.marks import Offsets
from inturn.outbox.row import TOKEN

_log = get_logger("inturn.outbox")
READ_BYTES = 4 * MIB


def recall(node: Node, marks: Offsets, producer_id: int) -> set[str]:
    """The tokens of all that this producer stored from the marks on. What cannot be read, or must not be, is passed
    over: such rows are sent again."""
    tokens: set[str] = set()
    for subject, offsets in marks.items():
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
