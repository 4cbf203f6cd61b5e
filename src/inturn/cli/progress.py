"""A bar or a counter on stderr during a long command; no output where stderr is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from inturn.cli.screen import Screen

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

DRAW_S = 0.1


class Meter:
    """Counts bytes and messages. With `total_bytes` a bar with the time left, else a counter with a rate."""

    def __init__(self, screen: Screen, what: str, total_bytes: int | None, *, counts_messages: bool = True) -> None:
        self.done_bytes = 0
        self.count = 0
        self._total_bytes = total_bytes
        self._started_s = time.monotonic()
        self._draw_at_s = self._started_s
        self._counts_messages = counts_messages
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if not screen.is_json and screen.err.is_terminal:
            self._bar = _bar(screen, total_bytes is not None)
            self._task = self._bar.add_task(what, total=total_bytes, told="")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def advance(self, read_bytes: int, count: int = 0) -> None:
        """Cheap: draws at most ten times a second."""
        self.done_bytes += read_bytes
        self.count += count
        if self._bar is not None and (self.count & 0x3F == 0 or not self._counts_messages):
            now_s = time.monotonic()
            if now_s >= self._draw_at_s:
                self._draw_at_s = now_s + DRAW_S
                self._draw()

    def _draw(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        completed = self.done_bytes if self._total_bytes is None else min(self.done_bytes, self._total_bytes)
        told = f"{self.count:,} messages  {self.count / max(self.elapsed_s, 1e-6):,.0f}/s"
        self._bar.update(self._task, completed=completed, told=told if self._counts_messages else "")

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._draw()
            self._bar.stop()


def _bar(screen: Screen, has_total: bool) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    what, told = TextColumn("{task.description}"), TextColumn("{task.fields[told]}")
    if has_total:
        columns = (what, BarColumn(bar_width=24), DownloadColumn(), told, TimeRemainingColumn(compact=True))
        return Progress(*columns, console=screen.err, transient=True)
    return Progress(SpinnerColumn(), what, told, TimeElapsedColumn(), console=screen.err, transient=True)
