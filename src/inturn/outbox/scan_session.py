"""A scan session: one scanner with one lease and one producer, from the takeover to the end of the lease or the
producer."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from inturn.model.errors import AccessDenied, Closed, InturnError, InvalidInput, NotFound, ProducerFenced
from inturn.model.logs import get_logger
from inturn.model.routing import slot_of
from inturn.model.settings import ProducerSettings, Strategy
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.outbox.recovery import RecoveryOffsets, ends_of, recover
from inturn.outbox.row import TOKEN, Row
from inturn.outbox.scan_core import Hold, ScanCore
from inturn.outbox.store import OutboxStore, Refusal
from inturn.outbox.table import OutboxSettings
from inturn.producer.producer import Producer
from inturn.producer.send_batch import SendHandle
from inturn.protocol.commands import FindSubject, ListSubjects, Node, SubjectList
from inturn.protocol.request import ask

_log = get_logger("inturn.outbox")
PATIENCE_S = 1.0  # for commands about subjects: without a connection the lease must still be renewed
IN_FLIGHT_LOOK_S = 0.005
CLOSE_S = 2.0
# Messages appended by the fenced producer a moment before can be read only after the sync. A row can be stored twice if
# a sync takes longer than this right when a scanner takes over.
SYNC_S = 0.1
_SENDING = ProducerSettings(buffer_wait_s=0.01)  # rows that do not fit wait in the table


@dataclass(slots=True)
class Counts:
    """Counts of a scanner since the start."""

    sent: int = 0  # rows acknowledged and deleted
    recovered: int = 0  # rows sent by an earlier scanner, only deleted by this scanner
    refused: int = 0  # refused attempts


class ScanSession:
    """Not thread-safe: one thread at a time.

    The order of the first steps matters. The producer is opened, which fences the previous producer. Then the lease is
    checked again: no other scanner opened the producer meanwhile for a newer lease. Then the logs are read: from now on
    only this session writes messages of this producer.
    """

    def __init__(
        self,
        store: OutboxStore,
        node: Node,
        clock: Clock,
        settings: OutboxSettings,
        hold: Hold,
        name: str,
        counts: Counts,
    ) -> None:
        self._store = store
        self._node = node
        self._clock = clock
        self._settings = settings
        self._hold = hold
        self._counts = counts
        self._subjects: dict[str, Subject] = {}
        self._unusable: dict[str, InturnError] = {}  # by subject: the error of the last request
        self._handles: dict[int, tuple[Row, SendHandle]] = {}
        self._chosen: deque[Row] = deque()  # to be sent after the recovery offsets are written
        self._stored: list[int] = []  # to be deleted
        self._refusals: list[Refusal] = []  # to be written to the rows
        self._retry_at_s = math.inf
        self.open_count = 0  # transactions that hold rows back
        self.changed = threading.Event()
        ask(
            node, ListSubjects(), SubjectList, PATIENCE_S
        )  # fails soon without a connection; opening would wait for much longer
        # Strict for all subjects: a row waits in order for as long as necessary.
        self._producer = Producer(node, clock, _SENDING, name=name, strategy=Strategy.STRICT)
        try:
            offsets = store.recovery_offsets(hold.epoch)
            if offsets:
                time.sleep(SYNC_S)
            tokens = recover(node, offsets, self._producer.id) if offsets else set()
            self._core = ScanCore(settings, tokens, store.newest_id() if tokens else 0)
        except BaseException:
            self.end()
            raise
        self._recovery = RecoveryOffsets(offsets)

    @property
    def in_flight(self) -> int:
        return self._core.in_flight

    def turn(self) -> bool:
        """Collect acknowledgements, read rows, write the results, send rows. False: there was nothing to do.

        OutboxLost or ProducerFenced: another scanner scans now. Closed: the connection was closed. After a retriable
        error the next turn continues where this turn ended.
        """
        now_s = self._clock.monotonic()
        is_busy = self._collect(now_s)
        if not self._chosen and self._core.room > 0 and not self._is_ending(now_s):
            is_busy = self._read(now_s) or is_busy
        if self._stored or self._refusals or self._chosen or self._hold.is_due(now_s):
            self._settle()
        if self._hold.is_live(self._clock.monotonic()):
            self._send_chosen()
        return is_busy

    def wait(self) -> None:
        """After a turn without work: wait until a message is acknowledged, or until the next poll."""
        self.changed.wait(IN_FLIGHT_LOOK_S if self._core.in_flight else self._settings.poll_s)
        self.changed.clear()

    @property
    def is_over(self) -> bool:
        """Rows failed on the way: only a new session can find out which of the rows are stored."""
        now_s = self._clock.monotonic()
        return self._is_ending(now_s) and (not self._handles or now_s >= self._retry_at_s + self._settings.retry_s)

    def end(self, patience_s: float = 0.0) -> None:
        """Wait so long for messages on the way; the next session finds the rest."""
        with contextlib.suppress(InturnError):  # rows stay in the table; `_collect` handles the errors
            self._producer.close(patience_s)

    def finish(self) -> None:
        """The regular end of a session: wait for messages on the way, and write the results."""
        self.end(CLOSE_S)
        self._collect(self._clock.monotonic(), is_closing=True)
        self._settle()

    def _is_ending(self, now_s: float) -> bool:
        return self._core.has_lost and now_s >= self._retry_at_s

    def _collect(self, now_s: float, is_closing: bool = False) -> bool:
        done = [row_id for row_id, (_, handle) in self._handles.items() if handle.done]
        for row_id in done:
            row, handle = self._handles.pop(row_id)
            try:
                place = handle.result(0)
            except (Closed, ProducerFenced):
                if not is_closing:
                    raise
                self._core.failed(row)  # perhaps stored: the recovery offsets stay
            except InturnError as error:
                self._core.failed(row)
                self._refuse(row, error)
            else:
                self._recovery.acknowledged(place.subject, place.partition, place.offset)
                self._core.stored(row_id, now_s)
                self._counts.sent += 1
                self._stored.append(row_id)
        return bool(done)

    def _read(self, now_s: float) -> bool:
        """Whether there were rows that were not read before."""
        if self._core.has_refused and not self._core.has_lost and now_s >= self._retry_at_s:
            self._retry_at_s = math.inf
            self._core.retry()
        read = self._store.read_rows(self._core.cursor, self._core.room)
        self.open_count = read.open_count
        for subject in {row.subject for row in read.rows}:
            self._learn(subject)
        cursor = self._core.cursor
        choice = self._core.choose(read.rows, self._lane, now_s, read.up_to)
        self._chosen.extend(choice.send)
        self._stored += choice.stored
        self._counts.recovered += len(choice.stored)
        return bool(read.rows) and self._core.cursor > cursor

    def _learn(self, name: str) -> None:
        """The route of a subject, for the lanes, and the ends of the logs, for the recovery offsets."""
        if self._recovery.knows(name):
            return
        self._unusable.pop(name, None)
        try:
            self._subjects[name] = ask(self._node, FindSubject(name), Subject, PATIENCE_S)
            self._recovery.learn(name, ends_of(self._node, name, PATIENCE_S))
        except (NotFound, InvalidInput, AccessDenied) as error:
            self._subjects.pop(name, None)
            self._unusable[name] = error

    def _lane(self, row: Row) -> Hashable:
        """Rows of one lane go to one partition, as far as is known."""
        subject = self._subjects.get(row.subject)
        if row.partition is not None:
            return row.subject, row.partition
        if subject is None or row.key is None:
            return row.subject, -1
        return row.subject, subject.route.by_slot[slot_of(row.key)]

    def _settle(self) -> None:
        """Results are forgotten only after the commit."""
        asked_at_s = self._clock.monotonic()
        offsets = self._recovery.to_store(self._core.unaccounted())
        self._store.settle(self._hold.epoch, self._stored, self._refusals, offsets)
        self._hold.renewed(asked_at_s)
        self._core.deleted(self._stored)
        self._stored = []
        self._refusals = []

    def _send_chosen(self) -> None:
        handle = None
        while self._chosen:
            row = self._chosen[0]
            if self._core.is_held(row):
                self._core.put_back(row)
            else:
                try:
                    handle = self._send(row)
                except (Closed, ProducerFenced):
                    raise
                except InturnError as error:
                    if error.retriable:  # no space, or no connection: not the row's fault
                        break
                    self._core.refused(row)
                    self._refuse(row, error)
            self._chosen.popleft()
        if handle is not None:
            handle.when_done(self.changed.set)

    def _send(self, row: Row) -> SendHandle:
        if row.subject in self._unusable:  # no recovery offsets: not to be sent even if the subject exists by now
            raise copy.copy(self._unusable[row.subject])
        handle = self._producer.pass_on(row.subject, row.message(), row.partition, {TOKEN: row.token})
        self._handles[row.id] = row, handle
        return handle

    def _refuse(self, row: Row, error: InturnError) -> None:
        self._counts.refused += 1
        self._refusals.append(Refusal(row.id, str(error)))
        self._retry_at_s = min(self._retry_at_s, self._clock.monotonic() + self._settings.retry_s)
        _log.warning(
            "outbox.row_refused",
            row=row.id,
            subject=row.subject,
            key=None if row.key is None else row.key.decode(errors="backslashreplace"),
            attempts=row.attempts + 1,
            error=str(error),
        )
