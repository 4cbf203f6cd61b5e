"""The embedded log engine: a folder of segments per partition, and a few threads that run the syncs of all logs."""

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
    """Runs jobs in the order of submission, as many at the same time as there are threads.

    A bare SimpleQueue: submitting a job costs a few µs, with concurrent.futures several times as much.
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
        """Run all submitted jobs, then end. Blocks."""
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
    """Logs under `<root>/<partition.name>`. The caller must have locked the folder: the engine takes no lock on disk.

    For Flush.INTERVAL, the caller must run `timers.run_due`. With `submit` (simulation) no threads are started.
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
        """Open a log; a second call returns the same log. Blocks during recovery. Raises OSError."""
        assert self._submit is not None
        with self._lock:
            if self._closed:
                raise Closed("log engine")
            log = self._logs.get(partition)
            if log is None:
                folder = f"{self._root}/{partition.name}"
                log = self._logs[partition] = PartitionLog(
                    disk=self._disk,
                    folder=folder,
                    partition=partition,
                    settings=self._settings,
                    clock=self._clock,
                    submit=self._submit,
                    timers=self._timers,
                    floor=floor,
                )
            return log

    def apply_retention(self) -> int:
        """Delete segments beyond the retention in every log. Returns the number of deleted segments. Blocks."""
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
