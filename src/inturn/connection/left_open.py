"""Connections that are open when the process forks or ends: a child has none, and nothing that was sent is lost."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from inturn.model.errors import InturnError
from inturn.model.logs import get_logger

_log = get_logger("inturn.connection")


class _Opened(Protocol):
    @property
    def target(self) -> str: ...

    def close(self) -> None: ...

    def disown(self) -> None: ...


_opened: weakref.WeakSet[_Opened] = weakref.WeakSet()


def note_opened(connection: _Opened) -> None:
    """See to it from now on, as long as somebody has it."""
    _opened.add(connection)


def _after_fork() -> None:
    for connection in list(_opened):
        connection.disown()  # also what is closed: perhaps a thread that is not here was about to


def _at_exit() -> None:
    """A program that ends without closing does not lose what it sent."""
    for connection in list(_opened):
        try:
            connection.close()
        except InturnError as error:
            _log.error("connection.close_failed", target=connection.target, error=str(error))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
