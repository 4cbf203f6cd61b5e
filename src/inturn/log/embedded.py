"""The embedded engine: a folder of segments per partition."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from inturn.log.disk import Disk, RealDisk
from inturn.log.partition_log import PartitionLog
from inturn.log.sync_threads import SyncThreads
from inturn.model.clock import Clock, SystemClock
from inturn.model.errors import Closed
from inturn.model.route import Partition
from inturn.model.settings import LogSettings
from inturn.model.timers import Timers


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
