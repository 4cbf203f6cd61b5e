"""The thread that writes what a producer could not send to its outbox, and notices when it was sent from there."""

from __future__ import annotations

import threading

from inturn.model.errors import InturnError, SendFailed
from inturn.model.logs import get_logger
from inturn.producer.core import ProducerCore
from inturn.producer.flight import Flight
from inturn.producer.keeping import Keeper

_log = get_logger("inturn.producer")
LOOK_S = 0.1  # how often is looked for rows that are gone, while some key waits for that


class KeeperThread:
    """Shares the producer's lock. A handle is answered when its row is durable, not before."""

    def __init__(
        self, keeper: Keeper, core: ProducerCore, lock: threading.Lock, roomier: threading.Condition, name: str
    ) -> None:
        self._keeper = keeper
        self._core = core
        self._lock = lock
        self._roomier = roomier
        self._work = threading.Condition(lock)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Called under the lock."""
        self._work.notify()

    def close(self) -> None:
        """Write what is left, then end."""
        with self._lock:
            self._is_closed = True
            self._work.notify()
        self._thread.join()
        self._keeper.close()

    def _run(self) -> None:
        keeping = self._core.keeping
        assert keeping is not None
        while True:
            with self._lock:
                if not keeping.has_work:
                    if self._is_closed:
                        return
                    self._work.wait(LOOK_S if keeping.has_keys else None)
                flights = keeping.take()
                last_rows = keeping.last_rows()
            if flights:
                self._keep(flights)
            elif last_rows:
                self._look(last_rows)

    def _keep(self, flights: list[Flight]) -> None:
        rows = [row for flight in flights for row in self._core.to_keep(flight)]
        try:
            row_ids = self._keeper.keep(rows)
        except Exception as error:  # whatever it is, those who wait are told, and the thread lives on
            self._not_kept(flights, error)
            return
        _log.warning("producer.kept_in_outbox", messages=len(rows), subject=rows[0].subject)
        with self._lock:
            start = 0
            for flight in flights:
                end = start + len(flight.messages)
                self._core.kept(flight, row_ids[start:end])
                start = end
            self._roomier.notify_all()

    def _not_kept(self, flights: list[Flight], error: Exception) -> None:
        _log.error("producer.outbox_failed", messages=sum(len(one.messages) for one in flights), error=str(error))
        with self._lock:
            for flight in flights:
                cause = f"the outbox could not keep it either: {error}"
                self._core.not_kept(flight, SendFailed(flight.subject, str(flight.home), cause))
            self._roomier.notify_all()

    def _look(self, last_rows: list[int]) -> None:
        try:
            gone = self._keeper.gone(last_rows)
        except InturnError as error:
            _log.warning("producer.outbox_not_read", error=str(error))
            return
        if gone:
            with self._lock:
                assert self._core.keeping is not None
                self._core.keeping.forget(gone)
