"""The embedded engine: a folder of segments per partition.

A few threads that run the syncs of all logs of an engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from inturn.log.disk import Disk, RealDisk
from inturn.log.partition_log import PartitionLog
from inturn.model.errors import Closed
from inturn.model.logs import get_logger
from inturn.model.routing import Partition
from inturn.model.settings import LogSettings
from inturn.model.time import Clock, SystemClock, Timers

_log = get_logger("inturn.log")


class SyncThreads:
    """Runs jobs in the order they come, as many at once as there are threads.

    A bare SimpleQueue: handing a job over costs a few µs, with concurrent.futures several times that.
    """

    def __init__(self, count: int = 4) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"inturn-sync-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Run what was submitted, then end. Blocks."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("log.sync_job_failed")


class EmbeddedEngine:
    """Logs under `<root>/<partition.name>`. Whoever makes one must own the folder: nothing here locks it.

    Someone has to call `timers.run_due` for Flush.INTERVAL. With `submit` no threads are started: the simulation.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        settings: LogSettings,
        timers: Timers,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        submit: Callable[[Callable[[], None]], None] | None = None,
        sync_threads: int = 4,
    ) -> None:
        self._root = os.fspath(root)
        self._settings = settings
        self._timers = timers
        self._clock = SystemClock() if clock is None else clock
        self._disk = RealDisk() if disk is None else disk
        self._threads = SyncThreads(sync_threads) if submit is None else None
        self._submit = self._threads.submit if self._threads is not None else submit
        self._logs: dict[Partition, PartitionLog] = {}
        self._lock = threading.Lock()
        self._closed = False

    def open(self, partition: Partition, floor: int = 0) -> PartitionLog:
        """The same log again if it is open already. Blocks while it recovers; raises OSError."""
        assert self._submit is not None
        with self._lock:
            if self._closed:
                raise Closed("log engine")
            log = self._logs.get(partition)
            if log is None:
                folder = f"{self._root}/{partition.name}"
                log = self._logs[partition] = PartitionLog(
                    self._disk, folder, partition, self._settings, self._clock, self._submit, self._timers, floor
                )
            return log

    def apply_retention(self) -> int:
        """Delete what is too old or too much in every log; how many segments. Blocks."""
        with self._lock:
            logs = list(self._logs.values())
        return sum(log.apply_retention(self._clock.time_ms()) for log in logs)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            logs = list(self._logs.values())
        for log in logs:
            log.close()
        if self._threads is not None:
            self._threads.close()
