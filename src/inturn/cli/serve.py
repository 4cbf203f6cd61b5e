"""`inturn serve`: open a folder and serve it at an address, until a signal stops the server."""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli import logs
from inturn.cli.logs import LogFormat
from inturn.cli.options import DEFAULT_DATA, Folder, Json, examples
from inturn.cli.screen import Screen, age_text, counted, plain
from inturn.cli.session import command
from inturn.model.errors import FolderInUse, InvalidInput
from inturn.model.logs import get_logger
from inturn.model.settings import Flush, LeaseSettings, LogSettings, Role
from inturn.server.folder import holder_of
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from inturn.cluster.settings import ClusterSettings
    from inturn.security.settings import SecuritySettings
    from inturn.server.server import Server


def notify(*states: str) -> bool:
    """Send states such as "READY=1" to systemd, as a datagram. False if systemd did not start this process, or is
    unreachable."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    if path.startswith("@"):  # an abstract socket, no file
        path = "\0" + path[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as telling:
            telling.connect(path)
            telling.sendall("\n".join(states).encode())
    except OSError:  # systemd notices the end of the process
        return False
    return True


_log = get_logger("inturn.server")


class Teller:
    """Reports the state of the server: a line on stdout and remarks on stderr, and states to systemd.

    With a JSON log the remarks are log events: every line of the log is JSON.
    """

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
        """Waits for the folder, open in a different process."""
        who = "a different process" if pid is None else f"process {pid}"
        notify(f"STATUS=waiting for the folder, open in {who}")
        _log.info("server.waiting", holder=pid, wait_s=wait_s)
        if not self._is_logged:
            self._screen.note(f"{who} has the folder open: waiting up to {wait_s:g} s")

    def stopping(self, held_count: int, grace_s: float) -> None:
        notify("STOPPING=1", "STATUS=waiting for consumers to release their partitions")
        _log.info("server.stopping", leases=held_count, grace_s=grace_s)
        if held_count and not self._is_logged:
            leases = counted(held_count, "lease")
            self._screen.note(
                f"stopping: waiting up to {grace_s:g} s for {leases}; a second signal ends the server at once"
            )

    def stopped(self, is_clean: bool, lease_s: float) -> None:
        _log.info("server.stopped", is_clean=is_clean)
        if not self._is_logged:
            left = "" if is_clean else f"; held leases live on for {lease_s:g} s"
            self._screen.note(f"stopped{left}")


EXAMPLES = examples(
    "inturn serve ./data",
    "inturn serve ./data --port 0 --json",
    "inturn serve ./data --http 7421 --log-format json",
    "inturn serve /var/lib/queue --host 0.0.0.0 --tokens tokens.json --tls-cert queue.pem --tls-key queue.key",
    "inturn serve ./meta --role meta",
    "inturn serve ./east --role broker --broker-group east --meta inturn://127.0.0.1:7420 --port 7431",
    "inturn serve ./data --access access.toml --audit-log /var/log/inturn-audit.jsonl",
)
LOOK_S = 0.1  # interval between two checks for signals
DRAW_S = 0.5
FOLDER_WAIT_S = 10.0  # for a command that is about to end; a longer wait would not help
_LEASE = LeaseSettings()
_EVERYWHERE = ("0.0.0.0", "::", "")


class ServedRole(enum.StrEnum):
    """The role of a server in a cluster."""

    META = "meta"
    BROKER = "broker"


def serve(
    context: typer.Context,
    folder: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="The folder; created if missing.", show_default=DEFAULT_DATA),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. The default serves this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0: any free port.", min=0, max=65535)] = 7420,
    flush: Annotated[Flush, typer.Option(help="The crash that an acknowledged message survives.")] = Flush.ALWAYS,
    lease_s: Annotated[
        float, typer.Option(help="Life of a lease after the last heartbeat of its consumer.")
    ] = _LEASE.life_s,
    retention_s: Annotated[
        float | None, typer.Option(help="Delete older messages. Default: keep all.", show_default=False)
    ] = None,
    retention_bytes: Annotated[
        int | None, typer.Option(help="Delete the oldest messages of a larger partition.", show_default=False)
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="At a stop: time for consumers to commit and release their leases.", min=0)
    ] = 5.0,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Clients need a token of this file (inturn token create). Default: FOLDER/tokens.json, if it exists.",
            show_default=False,
        ),
    ] = None,
    access: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Access rules, in TOML. Without rules every authenticated client may do everything.",
            show_default=False,
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use TLS, with this certificate chain.", show_default=False)
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="The key of the certificate.", show_default=False)
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Clients need a certificate of this CA. The certificate names the client, unless a token does.",
            show_default=False,
        ),
    ] = None,
    audit_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Append refusals and administrative acts, as JSON lines.", show_default=False
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Accept clients from other machines without authentication: every client that reaches the port can "
            "read, write and delete everything.",
        ),
    ] = False,
    role: Annotated[
        ServedRole | None,
        typer.Option(
            help="In a cluster: meta holds subjects, groups and members; a broker holds the partitions of one broker "
            "group. Default: both roles.",
            show_default=False,
        ),
    ] = None,
    broker_group: Annotated[
        str, typer.Option(metavar="NAME", help="For a broker: the name of the broker group.", show_default=False)
    ] = "",
    meta: Annotated[
        str, typer.Option(metavar="ADDRESS", help="For a broker: the address of the meta server.", show_default=False)
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="For a broker: the address for clients and meta, if different from the listener.",
            show_default=False,
        ),
    ] = "",
    http: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve /metrics, /healthz and /readyz at host:port, or at a port of this machine. Default: off.",
            show_default=False,
        ),
    ] = None,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="The format of the log on stderr; json: one object per line.", show_default="console"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more than warnings.")] = False,
    data: Folder = DEFAULT_DATA,
    json_output: Json = False,
) -> None:
    """Serve a folder to other processes and machines: inturn.connect("inturn://host:7420").

    The server prints one line on stdout when it listens; all other output goes to stderr. SIGTERM and Ctrl-C stop the
    server gracefully, a second signal at once. SIGHUP reloads tokens, rules and certificates; a change of the files
    does the same. The server listens on 127.0.0.1 only, unless clients must authenticate.
    """
    path = _folder(context, folder, data)
    with command(json_output) as screen:
        if verbose or log_format is not None:
            is_wordy = verbose or log_format is LogFormat.JSON
            logs.configure(json_output, logging.INFO if is_wordy else logging.WARNING, log_format)
        teller = Teller(screen, is_logged=log_format is LogFormat.JSON)
        http_at = None if http is None else _http(http)
        log = LogSettings(flush=flush, retention_s=retention_s, retention_bytes=retention_bytes)
        security = _security(path, tokens, access, tls_cert, tls_key, tls_client_ca, audit_log, insecure)
        cluster = _cluster(role, broker_group, meta, advertise, host)
        with _signals() as signals:
            service = _opened_in_time(
                path,
                teller,
                signals,
                lambda: _opened(path, host, port, log, _lease(lease_s), http_at, security, cluster),
            )
            if service is None:
                return
            teller.ready(service, path)
            _warn_if_open(teller, host, None if http_at is None else http_at[0], security)
            try:
                _wait(screen, service, signals)
            finally:
                signals.is_stopping = True
                teller.stopping(service.held_count, grace_s)
                teller.stopped(service.close(grace_s), lease_s)


def _folder(context: typer.Context, folder: str | None, data: str) -> str:
    source = context.get_parameter_source("data")
    if folder is not None and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(f"the folder is given twice, {folder!r} and --data {data!r}: omit one")
    path = data if folder is None else folder
    if is_address(path):
        raise typer.BadParameter(f"{path!r} is an address: give the folder to serve, and --host and --port")
    return path


def _http(text: str) -> tuple[str, int]:
    from inturn.server.http import parse_http

    return parse_http(text)


def _security(
    path: str,
    tokens: str | None,
    access: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    audit_log: str | None,
    insecure: bool,
) -> SecuritySettings:
    from inturn.security.settings import SecuritySettings, ServerTlsSettings
    from inturn.security.tokens import TOKENS_NAME

    if (tls_cert is None) != (tls_key is None):
        raise InvalidInput("--tls-cert and --tls-key belong together: give both, or neither")
    if tls_client_ca is not None and tls_cert is None:
        raise InvalidInput("--tls-client-ca asks for TLS: give --tls-cert and --tls-key, too")
    tls = None
    if tls_cert is not None and tls_key is not None:
        tls = ServerTlsSettings(tls_cert, tls_key, tls_client_ca)
    beside = os.path.join(path, TOKENS_NAME)
    if tokens is None and os.path.exists(beside):
        tokens = beside
    return SecuritySettings(tokens, access, tls, audit_log, insecure)


def _cluster(role: ServedRole | None, broker_group: str, meta: str, advertise: str, host: str) -> ClusterSettings:
    """Meta and brokers authenticate to each other with the credentials of the environment: INTURN_TOKEN and so on."""
    from inturn.cluster.settings import ClusterSettings
    from inturn.security.credentials import NONE, credentials_from_environment

    if role is ServedRole.BROKER:
        if not broker_group or not meta:
            raise InvalidInput("--role broker needs --broker-group NAME and --meta ADDRESS")
        if not advertise and host in _EVERYWHERE:
            raise InvalidInput(
                f"a broker that listens at {host} needs the address for other machines: --advertise inturn://host:port"
            )
    elif broker_group or meta or advertise:
        raise InvalidInput("--broker-group, --meta and --advertise are for --role broker")
    credentials = NONE if role is None else credentials_from_environment()
    return ClusterSettings(Role(role.value if role is not None else ""), broker_group, meta, advertise, credentials)


def _lease(life_s: float) -> LeaseSettings:
    """Renewal and margin in the proportions of the defaults."""
    share = life_s / _LEASE.life_s
    return LeaseSettings(life_s, _LEASE.renew_s * share, _LEASE.margin_s * share)


def _opened_in_time(path: str, teller: Teller, signals: _Signals, open_: Callable[[], Server]) -> Server | None:
    """Wait for a program that has the folder open, but not for a server. None if a signal stops the wait."""
    until_s = time.monotonic() + FOLDER_WAIT_S
    is_second = is_told = False
    while not signals.is_asked:
        try:
            return open_()
        except FolderInUse as error:
            # Checked twice: a process that has just locked the folder may not have written its name yet.
            if time.monotonic() >= until_s or (is_second and holder_of(path).is_live_server):
                raise
            if is_second and not is_told:
                is_told = True
                teller.waiting(error.pid, FOLDER_WAIT_S)
        is_second = True
        time.sleep(LOOK_S)
    return None


def _opened(
    path: str,
    host: str,
    port: int,
    log: LogSettings,
    lease: LeaseSettings,
    http: tuple[str, int] | None,
    security: SecuritySettings,
    cluster: ClusterSettings,
) -> Server:
    from inturn.server.server import Server
    from inturn.transport.address import Address

    try:
        return Server(
            path, address=Address(host, port), log=log, lease=lease, http=http, security=security, cluster=cluster
        )
    except InvalidInput as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            raise InvalidInput(
                f"port {port} of {host} is in use; stop its program, or choose a port with --port (0: any)"
            ) from None
        raise


def _warn_if_open(teller: Teller, host: str, http_host: str | None, security: SecuritySettings) -> None:
    from inturn.security.settings import is_loopback

    if not is_loopback(host) and not security.authenticates:
        teller.warn(
            f"{host} can be reached from other machines without authentication (--insecure): every client that "
            "reaches the port can read, write and delete everything; let only a trusted network reach the port"
        )
    elif not is_loopback(host) and security.tls is None:
        teller.warn(
            f"{host} can be reached from other machines without TLS: tokens and messages can be read on their "
            "way, and stolen tokens be used; give --tls-cert and --tls-key"
        )
    if http_host is not None and not is_loopback(http_host):
        teller.warn(
            f"HTTP on {http_host} can be reached from other machines: /metrics names all subjects and groups; let only "
            "a trusted network reach the port"
        )


class _Signals:
    """Flags, no threading.Event: the interrupted thread may hold the lock of the event."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_stopping = False
        self.is_reload_asked = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            os._exit(0)  # as kill -9: acknowledged messages are safe, and leases live on
        self.is_asked = True

    def reload(self, number: int, frame: FrameType | None) -> None:
        self.is_reload_asked = True


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    former = {number: signal.signal(number, signals.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    former[signal.SIGHUP] = signal.signal(signal.SIGHUP, signals.reload)
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _wait(screen: Screen, service: Server, signals: _Signals) -> None:
    """Wait for a signal, with a line of figures below the log on a terminal."""
    if screen.is_json or not screen.err.is_terminal:
        while not signals.is_asked:
            _reload_if_asked(service, signals)
            time.sleep(LOOK_S)
        return
    from rich.live import Live

    started_at_s = draw_at_s = time.monotonic()
    with Live(console=screen.err, auto_refresh=False, transient=True) as live:
        while not signals.is_asked:
            _reload_if_asked(service, signals)
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


def _reload_if_asked(service: Server, signals: _Signals) -> None:
    if signals.is_reload_asked:
        signals.is_reload_asked = False
        service.reload()
