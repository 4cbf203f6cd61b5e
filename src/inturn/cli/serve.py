"""`inturn serve`: open a folder and serve it at an address, until somebody stops it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli import logs
from inturn.cli.logs import LogFormat
from inturn.cli.options import DEFAULT_DATA, Folder, Json, examples
from inturn.cli.screen import Screen, age_text, counted
from inturn.cli.serve_teller import Teller
from inturn.cli.session import command
from inturn.model.errors import InvalidInput
from inturn.model.settings import Flush, LeaseSettings, LogSettings
from inturn.wire.address import is_address

if TYPE_CHECKING:
    from inturn.service import Service

EXAMPLES = examples(
    "inturn serve ./data",
    "inturn serve ./data --port 0 --json",
    "inturn serve ./data --http 7421 --log-format json",
    "inturn serve /var/lib/queue --host 0.0.0.0 --retention-s 604800",
)
LOOK_S = 0.1  # how soon a signal is acted upon
DRAW_S = 0.5
_LEASE = LeaseSettings()


def serve(
    context: typer.Context,
    folder: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="The folder; made if it is not there.", show_default=DEFAULT_DATA),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. Others than this machine need another.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 7420,
    flush: Annotated[Flush, typer.Option(help="What an acknowledged message survives.")] = Flush.ALWAYS,
    lease_s: Annotated[
        float, typer.Option(help="How long the lease of a consumer lives that is not heard of any more.")
    ] = _LEASE.life_s,
    retention_s: Annotated[
        float | None, typer.Option(help="Delete what is older; for ever unless given.", show_default=False)
    ] = None,
    retention_bytes: Annotated[
        int | None, typer.Option(help="Delete the oldest of a partition above this.", show_default=False)
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="When stopped: how long consumers have to commit and give back.", min=0)
    ] = 5.0,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Answer /metrics, /healthz and /readyz there: host:port, or a port of this machine. Off unless given.",
            show_default=False,
        ),
    ] = None,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="How the log on stderr is written; json is one object per line.", show_default="console"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more than warnings.")] = False,
    data: Folder = DEFAULT_DATA,
    json_output: Json = False,
) -> None:
    """Serve a folder to other processes and machines: inturn.connect("inturn://host:7420").

    One line on stdout says when it listens; everything else goes to stderr. SIGTERM and Ctrl-C stop it gracefully, a
    second one at once. There is no authentication yet: whoever reaches the port may do everything.
    """
    path = _folder(context, folder, data)
    with command(json_output) as screen:
        if verbose or log_format is not None:
            is_wordy = verbose or log_format is LogFormat.JSON
            logs.configure(json_output, logging.INFO if is_wordy else logging.WARNING, log_format)
        teller = Teller(screen, is_logged=log_format is LogFormat.JSON)
        http_at = None if http is None else _http(http)
        log = LogSettings(flush=flush, retention_s=retention_s, retention_bytes=retention_bytes)
        with _signals() as signals:
            service = _opened(path, host, port, log, _lease(lease_s), http_at)
            teller.ready(service, path)
            _warn_if_open(teller, host, None if http_at is None else http_at[0])
            try:
                _wait(screen, service, signals)
            finally:
                signals.is_stopping = True
                teller.stopping(service.held_count, grace_s)
                teller.stopped(service.close(grace_s), lease_s)


def _folder(context: typer.Context, folder: str | None, data: str) -> str:
    source = context.get_parameter_source("data")
    if folder is not None and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(f"the folder is given twice, {folder!r} and --data {data!r}: leave one of them out")
    path = data if folder is None else folder
    if is_address(path):
        raise typer.BadParameter(f"{path!r} is an address: give the folder to serve, and --host and --port")
    return path


def _http(text: str) -> tuple[str, int]:
    from inturn.ops.http_server import parse_http

    return parse_http(text)


def _lease(life_s: float) -> LeaseSettings:
    """Renewing and the margin in the proportions of the defaults."""
    share = life_s / _LEASE.life_s
    return LeaseSettings(life_s, _LEASE.renew_s * share, _LEASE.margin_s * share)


def _opened(
    path: str, host: str, port: int, log: LogSettings, lease: LeaseSettings, http: tuple[str, int] | None
) -> Service:
    from inturn.service import Service
    from inturn.wire.address import Address

    try:
        return Service(path, address=Address(host, port), log=log, lease=lease, http=http)
    except InvalidInput as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            raise InvalidInput(
                f"port {port} of {host} is in use; stop who listens there, or choose another with --port (0: any)"
            ) from None
        raise


def _warn_if_open(teller: Teller, host: str, http_host: str | None) -> None:
    if _is_reached_by_others(host):
        teller.warn(
            f"{host} can be reached from other machines, and there is no authentication yet: whoever reaches the port "
            "can read and write everything; let only a network that you trust reach it"
        )
    if http_host is not None and _is_reached_by_others(http_host):
        teller.warn(
            f"HTTP on {http_host} can be reached from other machines: /metrics names all subjects and groups; let only "
            "a network that you trust reach it"
        )


def _is_reached_by_others(host: str) -> bool:
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who knows where it leads
        return True


class _Signals:
    """A flag, no event: the lock of one may be held by the very thread that the signal interrupts."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_stopping = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            os._exit(0)  # as kill -9 would: what was acknowledged is safe, and leases live on
        self.is_asked = True


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    former = {number: signal.signal(number, signals.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _wait(screen: Screen, service: Service, signals: _Signals) -> None:
    """Until a signal, with a line of figures below the log where there is a terminal."""
    if screen.is_json or not screen.err.is_terminal:
        while not signals.is_asked:
            time.sleep(LOOK_S)
        return
    from rich.live import Live

    started_at_s = draw_at_s = time.monotonic()
    with Live(console=screen.err, auto_refresh=False, transient=True) as live:
        while not signals.is_asked:
            now_s = time.monotonic()
            if now_s >= draw_at_s:
                draw_at_s = now_s + DRAW_S
                connections, leases = (
                    counted(service.connection_count, "connection"),
                    counted(service.held_count, "lease"),
                )
                up = age_text(now_s - started_at_s)
                live.update(f"[dim]{connections}, {leases} held, up {up}; Ctrl-C stops[/dim]", refresh=True)
            time.sleep(LOOK_S)
