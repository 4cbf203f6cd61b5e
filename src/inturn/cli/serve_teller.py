"""What a server says of itself: that it is ready, that it stops, what to beware of.

To whoever started it: one line on stdout and remarks on stderr; to systemd, if that did; and to the log in place of
the remarks where that is collected, so that no line of it is anything but JSON.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from inturn.cli.screen import Screen, counted, plain
from inturn.cli.systemd import notify
from inturn.model.logs import get_logger

if TYPE_CHECKING:
    from inturn.server.server import Server

_log = get_logger("inturn.server")


class Teller:
    def __init__(self, screen: Screen, *, is_logged: bool) -> None:
        self._screen = screen
        self._is_logged = is_logged

    def ready(self, service: Server, path: str) -> None:
        address, url, pid = str(service.address), service.http_url, os.getpid()
        _log.info("server.ready", address=address, folder=path, http=url, pid=pid)
        if self._screen.is_json:
            http = {} if url is None else {"http": url}
            self._screen.json({"address": address, "folder": path, "pid": pid, **http})
        else:
            http_text = "" if url is None else f", HTTP at [bold]{plain(url)}[/bold]"
            self._screen.out.print(
                f"serving [bold]{plain(path)}[/bold] at [bold]{plain(address)}[/bold]{http_text}, pid {pid}",
                soft_wrap=True,
            )
        self._screen.flush()
        notify("READY=1", f"STATUS=serving {path} at {address}")

    def warn(self, text: str) -> None:
        if self._is_logged:
            _log.warning("server.beware", why=text)
        else:
            self._screen.warn(text)

    def waiting(self, pid: int | None, wait_s: float) -> None:
        """For the folder, which somebody else has open."""
        who = "another process" if pid is None else f"process {pid}"
        notify(f"STATUS=waiting for the folder, which {who} has open")
        _log.info("server.waiting", holder=pid, wait_s=wait_s)
        if not self._is_logged:
            self._screen.note(f"{who} has the folder open: waiting for it, {wait_s:g} s at the most")

    def stopping(self, held_count: int, grace_s: float) -> None:
        notify("STOPPING=1", "STATUS=waiting for consumers to give their partitions back")
        _log.info("server.stopping", leases=held_count, grace_s=grace_s)
        if held_count and not self._is_logged:
            leases = counted(held_count, "lease")
            self._screen.note(f"stopping: waiting for {leases}, {grace_s:g} s at the most; once more ends it at once")

    def stopped(self, is_clean: bool, lease_s: float) -> None:
        _log.info("server.stopped", is_clean=is_clean)
        if not self._is_logged:
            left = "" if is_clean else f"; leases that are still held live on for {lease_s:g} s"
            self._screen.note(f"stopped{left}")
