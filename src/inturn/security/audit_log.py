"""The audit log: refusals and administrative acts, a JSON object per line, appended and never read.

The audit log has no content of messages and no token. A client that provokes refusals causes a few lines per second at
most; the next line has the number of lines that were left out. The file may be moved away at any time, as logrotate
does: the next line makes a new file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

from inturn.model.errors import InvalidInput
from inturn.model.logs import get_logger
from inturn.model.time import Clock
from inturn.security.rate_limit import RateMeter

_log = get_logger("inturn.security")
REFUSALS_PER_S = 5.0  # per principal, or per address without authentication
REFUSALS_PER_S_MAX = 100.0  # in total
SOURCES_MAX = 10_000
BURST_S = 4.0


class AuditLog:
    """Thread-safe. A line that cannot be written is logged as an error in the server's own log, and the server goes
    on."""

    def __init__(self, path: str | os.PathLike[str], clock: Clock) -> None:
        self._path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._file: int | None = None
        self._inode: tuple[int, int] | None = None
        self._sources: dict[str, _Source] = {}
        self._all = RateMeter(REFUSALS_PER_S_MAX, clock.monotonic, BURST_S)
        try:
            self._reopen_if_moved()
        except OSError as error:
            raise InvalidInput(f"audit log {str(path)!r} cannot be written: {error.strerror}") from error

    def refused(self, source: str, **fields: object) -> None:
        """Write a refusal. The rate of refusals is limited per `source`."""
        with self._lock:
            known = self._sources.get(source)
            if known is None:
                if len(self._sources) >= SOURCES_MAX:
                    self._sources.clear()
                known = self._sources[source] = _Source(RateMeter(REFUSALS_PER_S, self._clock.monotonic, BURST_S))
            if not (known.meter.try_take() and self._all.try_take()):
                known.left_out += 1
                return
            left_out, known.left_out = known.left_out, 0
            self._write({"event": "refused", **fields, **({"left_out": left_out} if left_out else {})})

    def noted(self, event: str, **fields: object) -> None:
        """Write an act, without a limit of the rate."""
        with self._lock:
            self._write({"event": event, **fields})

    def close(self) -> None:
        with self._lock:
            self._close()

    def _write(self, fields: dict[str, object]) -> None:
        at = datetime.fromtimestamp(self._clock.time_ms() / 1000, UTC).isoformat(timespec="milliseconds")
        present = {name: value for name, value in fields.items() if value is not None}
        # In ASCII: a name cannot look like the end of a line, or send escape sequences to a terminal.
        line = json.dumps({"at": at, **present}, default=repr, separators=(",", ":")).encode() + b"\n"
        try:
            self._reopen_if_moved()
            assert self._file is not None
            os.write(self._file, line)  # in a single call: lines of several servers do not mix
        except OSError as error:
            _log.error("security.audit_log_failed", path=str(self._path), error=str(error))

    def _reopen_if_moved(self) -> None:
        try:
            found = os.stat(self._path)
            inode = (found.st_dev, found.st_ino)
        except FileNotFoundError:
            inode = None
        if self._file is not None and inode == self._inode:
            return
        self._close()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        opened = os.fstat(self._file)
        self._inode = opened.st_dev, opened.st_ino

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


class _Source:
    __slots__ = ("left_out", "meter")

    def __init__(self, meter: RateMeter) -> None:
        self.meter = meter
        self.left_out = 0
