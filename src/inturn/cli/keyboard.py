"""Keys that are pressed while something is watched, without Enter."""

from __future__ import annotations

import os
import select
import sys
import time
from types import TracebackType
from typing import Self


class Keyboard:
    """Nothing is ever pressed where stdin is no terminal, or the system has no terminals of this kind."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._former: list[object] = []

    def __enter__(self) -> Self:
        try:
            import termios
            import tty
        except ImportError:  # Windows
            return self
        if sys.stdin.isatty():
            self._fd = sys.stdin.fileno()
            self._former = list(termios.tcgetattr(self._fd))
            tty.setcbreak(self._fd)  # Ctrl-C stays what it is
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._former:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._former)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> str:
        """What is pressed within this time, as soon as it is; empty if nothing."""
        if self._fd is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._fd, 64)
        if not pressed:
            self._fd = None  # the terminal is gone
        return pressed.decode(errors="replace")
