"""`inturn serve`: open a folder and serve it at an address, until somebody stops it."""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli import logs
from inturn.cli.logs import LogFormat
from inturn.cli.options import DEFAULT_DATA, Folder, Json, examples
from inturn.cli.screen import Screen, age_text, counted
from inturn.cli.serve_teller import Teller
from inturn.cli.session import command
from inturn.model.errors import FolderInUse, InvalidInput
from inturn.model.settings import Flush, LeaseSettings, LogSettings, Role
from inturn.server.folder import holder_of
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from inturn.cluster.settings import ClusterSettings
    from inturn.security.settings import SecuritySettings
    from inturn.server.server import Server

EXAMPLES = examples(
    "inturn serve ./data",
    "inturn serve ./data --port 0 --json",
    "inturn serve ./data --http 7421 --log-format json",
    "inturn serve /var/lib/queue --host 0.0.0.0 --tokens tokens.json --tls-cert queue.pem --tls-key queue.key",
    "inturn serve ./meta --role meta",
    "inturn serve ./east --role broker --broker-group east --meta inturn://127.0.0.1:7420 --port 7431",
    "inturn serve ./data --access access.toml --audit-log /var/log/inturn-audit.jsonl",
)
LOOK_S = 0.1  # how soon a signal is acted upon
DRAW_S = 0.5
FOLDER_WAIT_S = 10.0  # for a command that is about to end; programs that stay would have to be ended
_LEASE = LeaseSettings()
_EVERYWHERE = ("0.0.0.0", "::", "")


class ServedRole(enum.StrEnum):
    """What a server can be told to be."""

    META = "meta"
    BROKER = "broker"


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
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Clients need a token that is in it (inturn token create); FOLDER/tokens.json, if it is there.",
            show_default=False,
        ),
    ] = None,
    access: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Who may do what, in TOML; without it, everybody who is known may do everything.",
            show_default=False,
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="Talk TLS, with this certificate chain.", show_default=False)
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="The key of the certificate.", show_default=False)
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Clients need a certificate of this CA, which names them unless a token does.",
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
            help="Let others than this machine in without asking who they are: whoever reaches the port can read, "
            "write and delete everything.",
        ),
    ] = False,
    role: Annotated[
        ServedRole | None,
        typer.Option(
            help="In a cluster: meta has subjects, groups and their members; a broker has the partitions of one broker "
            "group. Unless given, it is both.",
            show_default=False,
        ),
    ] = None,
    broker_group: Annotated[
        str, typer.Option(metavar="NAME", help="Of a broker: the name of its broker group.", show_default=False)
    ] = "",
    meta: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Of a broker: where the meta server is.", show_default=False)
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Of a broker: where clients and meta reach it, if not where it listens.",
            show_default=False,
        ),
    ] = "",
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
    second one at once. SIGHUP reads tokens, rules and certificates again, which also happens when they change. It
    listens on 127.0.0.1 only, unless clients have to say who they are.
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
        raise typer.BadParameter(f"the folder is given twice, {folder!r} and --data {data!r}: leave one of them out")
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
    """What meta and brokers show to each other is in the environment, as a client's: INTURN_TOKEN and its like."""
    from inturn.cluster.settings import ClusterSettings
    from inturn.security.credentials import NONE, credentials_from_environment

    if role is ServedRole.BROKER:
        if not broker_group or not meta:
            raise InvalidInput("--role broker needs --broker-group NAME and --meta ADDRESS")
        if not advertise and host in _EVERYWHERE:
            raise InvalidInput(
                f"a broker that listens at {host} has to say where others reach it: --advertise inturn://host:port"
            )
    elif broker_group or meta or advertise:
        raise InvalidInput("--broker-group, --meta and --advertise are for --role broker")
    credentials = NONE if role is None else credentials_from_environment()
    return ClusterSettings(Role(role.value if role is not None else ""), broker_group, meta, advertise, credentials)


def _lease(life_s: float) -> LeaseSettings:
    """Renewing and the margin in the proportions of the defaults."""
    share = life_s / _LEASE.life_s
    return LeaseSettings(life_s, _LEASE.renew_s * share, _LEASE.margin_s * share)


def _opened_in_time(path: str, teller: Teller, signals: _Signals, open_: Callable[[], Server]) -> Server | None:
    """A program that has the folder is waited for, another server is not. None if it is stopped meanwhile."""
    until_s = time.monotonic() + FOLDER_WAIT_S
    is_second = is_told = False
    while not signals.is_asked:
        try:
            return open_()
        except FolderInUse as error:
            # Looked at twice: whoever has just locked it has perhaps not written down yet who it is.
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
                f"port {port} of {host} is in use; stop who listens there, or choose another with --port (0: any)"
            ) from None
        raise


def _warn_if_open(teller: Teller, host: str, http_host: str | None, security: SecuritySettings) -> None:
    from inturn.security.settings import is_loopback

    if not is_loopback(host) and not security.authenticates:
        teller.warn(
            f"{host} can be reached from other machines, and nobody is asked who they are (--insecure): whoever "
            "reaches the port can read, write and delete everything; let only a network that you trust reach it"
        )
    elif not is_loopback(host) and security.tls is None:
        teller.warn(
            f"{host} can be reached from other machines, and there is no TLS: tokens and messages can be read on their "
            "way, and tokens then be used by others; give --tls-cert and --tls-key"
        )
    if http_host is not None and not is_loopback(http_host):
        teller.warn(
            f"HTTP on {http_host} can be reached from other machines: /metrics names all subjects and groups; let only "
            "a network that you trust reach it"
        )


class _Signals:
    """A flag, no event: the lock of one may be held by the very thread that the signal interrupts."""

    def __init__(self) -> None:
        self.is_asked = False
        self.is_stopping = False
        self.is_reload_asked = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            os._exit(0)  # as kill -9 would: what was acknowledged is safe, and leases live on
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
    """Until a signal, with a line of figures below the log where there is a terminal."""
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
