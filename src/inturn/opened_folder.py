"""A folder that this process has open: its lock, its database, its logs, and the node on top of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial

from inturn.folder import Folder
from inturn.log.disk import RealDisk
from inturn.log.embedded import EmbeddedEngine
from inturn.model.clock import Clock
from inturn.model.commands import DiskRoom
from inturn.model.logs import get_logger
from inturn.model.observer import Observer
from inturn.model.settings import LeaseSettings, LogSettings, Role
from inturn.node.node import InProcessNode
from inturn.state.database import Database
from inturn.state.node_role import take_role
from inturn.timer_thread import TimerThread

_log = get_logger("inturn.folder")
RETENTION_CHECK_S = 60.0


class OpenedFolder:
    """Raises FolderInUse if another process has it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        log: LogSettings,
        lease: LeaseSettings,
        clock: Clock,
        observer: Observer | None,
        *,
        create: bool,
        role: Role = Role.NODE,
        broker_group: str = "",
        make: Callable[..., InProcessNode] = InProcessNode,
        is_server: bool = False,
    ) -> None:
        """`make` is what makes the node of that role; one that is not a plain one is told the id of the folder."""
        self._clock = clock
        with contextlib.ExitStack() as undo:
            self.folder = Folder(path, create=create, is_server=is_server)
            undo.callback(self.folder.close)
            self._database = Database.open(self.folder.database_path)
            undo.callback(self._database.close)
            folder_id = take_role(self._database, role, broker_group)
            self._timer_thread = TimerThread(clock)
            undo.callback(self._timer_thread.close)
            timers = self._timer_thread.timers
            self._engine = EmbeddedEngine(self.folder.log_path, log, timers, clock=clock)
            undo.callback(self._engine.close)
            known = {"folder_id": folder_id, "broker_group": broker_group} if role is Role.BROKER else {}
            self.node = make(
                self._database, self._engine, clock, timers, lease, observer, room=partial(self.room, log), **known
            )
            undo.pop_all()
        if log.retention_s is not None or log.retention_bytes is not None:
            self._apply_retention()

    def close(self) -> None:
        """Sync the logs, give the folder free."""
        with contextlib.ExitStack() as closing:  # backwards, and each of them whatever another one raises
            for close in (self.folder.close, self._database.close, self._timer_thread.close, self.node.close):
                closing.callback(close)

    def room(self, log: LogSettings) -> DiskRoom | None:
        """How full the disk of the logs is; None if it cannot be asked."""
        for path in (self.folder.log_path, self.folder.path):  # before the first subject there are no logs
            with contextlib.suppress(OSError):
                return DiskRoom(RealDisk().free_bytes(str(path)), log.reserve_bytes)
        return None

    def disown(self) -> None:
        """In a forked child: everything here is the parent's. The folder has seen to its lock itself."""
        self.node.disown()

    def _apply_retention(self) -> None:
        try:
            self._engine.apply_retention()
        except OSError as error:
            _log.warning("retention.failed", folder=str(self.folder.path), error=str(error))
        self._timer_thread.timers.at(self._clock.monotonic() + RETENTION_CHECK_S, self._apply_retention)
