"""`inturn outbox`: messages that wait in a table of a database until they are sent."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.message_text import text_or_base64
from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, examples
from inturn.cli.progress import Meter
from inturn.cli.screen import Screen, age_text, counted, fields_text, plain
from inturn.cli.session import command, opened

if TYPE_CHECKING:
    from inturn.outbox.outbox import Outbox, OutboxStatus, RefusedRow
    from inturn.outbox.scanner import Scanner, ScannerStatistics

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Messages that wait in a table of a database until they are sent.",
)
LOOK_S = 0.2

Database = Annotated[
    str,
    typer.Option(
        "--database",
        envvar="INTURN_OUTBOX",
        metavar="URL",
        help="Where the table is: sqlite:///shop.db, postgresql://user@host/shop, or the path of a SQLite file.",
        show_default=False,
    ),
]
TableName = Annotated[str, typer.Option("--table", help="The name of the table, or SCHEMA.NAME.")]
DEFAULT_TABLE = "inturn_outbox"


@app.command("ddl", epilog=examples("inturn outbox ddl --dialect postgresql > 0042_outbox.sql"))
def print_ddl(
    dialect: Annotated[str, typer.Option("--dialect", help="postgresql or sqlite.", show_default=False)],
    table: TableName = DEFAULT_TABLE,
    json_output: Json = False,
) -> None:
    """Print the statements that create the tables of an outbox, for a migration. A second run changes nothing."""
    with command(json_output) as screen:
        from inturn.outbox.table import ddl

        statements = ddl(dialect, table)
        if screen.is_json:
            screen.json({"dialect": dialect, "table": table, "statements": statements})
            return
        typer.echo("\n\n".join(f"{statement};" for statement in statements))


@app.command("status", epilog=examples("inturn outbox status --database postgresql://shop@db/shop"))
def show_status(database: Database, table: TableName = DEFAULT_TABLE, json_output: Json = False) -> None:
    """Show waiting messages, refused messages with the reason, and the scanner."""
    with command(json_output) as screen:
        status = _outbox(database, table).status()
        if screen.is_json:
            fields = asdict(status)
            fields["refused"] = [_refused_fields(row) for row in status.refused]
            screen.json(fields)
            return
        _print_status(screen, status)


@app.command(
    "scan",
    epilog=examples(
        "inturn outbox scan --database postgresql://shop@db/shop --server inturn://queue.example:7420",
        "inturn outbox scan --database ./shop.db --once --json",
    ),
)
def scan(
    database: Database,
    table: TableName = DEFAULT_TABLE,
    once: Annotated[bool, typer.Option("--once", help="Send the messages in the table, then end.")] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, help="With --once: seconds to wait for another scanner's end.")
    ] = 0.0,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Send the messages in an outbox, messages of a key in their order, until Ctrl-C.

    Any number of scanners may run: the scanner with the lease scans, and the rest waits to take over. With --json the
    output is one object at the end. With --once the exit code is 1 if rows were refused: these rows and later rows of
    their keys stay in the table.
    """
    with command(json_output) as screen, opened(data) as connection:
        outbox = _outbox(database, table)
        scanner = outbox.scan(connection)
        if not once:
            screen.note(f"scanning {plain(table)}, if nobody else does; Ctrl-C ends it")
        with Meter(screen, f"sending what is in {plain(table)}", None) as meter:
            if once:
                done = scanner.run_once(wait_s, lambda count: _advance(meter, count))
            else:
                done = _scan_until_stopped(scanner, meter)
        status = outbox.status()
        _tell(screen, done, status)
        screen.flush()
    if once and done.refused:
        raise typer.Exit(1)


def _outbox(database: str, table: str) -> Outbox:
    from inturn.outbox.outbox import Outbox

    return Outbox(database, table=table)


def _scan_until_stopped(scanner: Scanner, meter: Meter) -> ScannerStatistics:
    sent = 0
    with _until_signalled() as stop:
        scanner.start()
        while not stop.is_set() and scanner.error is None:
            stop.wait(LOOK_S)
            now = scanner.statistics().sent
            _advance(meter, now - sent)
            sent = now
        scanner.stop()
    if scanner.error is not None:
        raise scanner.error
    return scanner.statistics()


def _advance(meter: Meter, count: int) -> None:
    for _ in range(count):  # the meter draws at multiples of 64 only
        meter.advance(0, 1)


@contextlib.contextmanager
def _until_signalled() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM end the scan after the messages on their way are acknowledged."""
    stop = threading.Event()
    former = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _tell(screen: Screen, done: ScannerStatistics, status: OutboxStatus) -> None:
    if screen.is_json:
        screen.json(
            {
                "table": status.table,
                "sent": done.sent,
                "recalled": done.recalled,
                "refused": done.refused,
                "waiting": status.waiting,
                "open_transactions": status.open_transactions,
                "refused_rows": [_refused_fields(row) for row in status.refused],
            }
        )
        return
    screen.out.print(f"[green]{counted(done.sent, 'message')}[/green] sent", soft_wrap=True)
    if done.recalled:
        screen.note(f"{done.recalled:,} had been sent by a scanner before, and were deleted only")
    if status.waiting:
        _print_status(screen, status)


def _print_status(screen: Screen, status: OutboxStatus) -> None:
    oldest = (
        "" if status.oldest_at_ms is None else f", the oldest for {age_text(time.time() - status.oldest_at_ms / 1000)}"
    )
    screen.out.print(f"[bold]{plain(status.table)}[/bold]: {counted(status.waiting, 'message')} waiting{oldest}")
    screen.out.print(fields_text({"scanned by": status.scanner or "nobody", "epoch": status.epoch}), soft_wrap=True)
    if status.open_transactions:
        screen.note(f"{counted(status.open_transactions, 'open transaction')} may hold back what was put behind")
    if status.refused:
        screen.table([">row", "subject", "key", ">attempts", "refused because"], map(_refused_cells, status.refused))


def _refused_cells(row: RefusedRow) -> list[str]:
    key = "–" if row.key is None else row.key.decode(errors="backslashreplace")
    return [str(row.id), plain(row.subject), plain(key), str(row.attempts), plain(row.error)]


def _refused_fields(row: RefusedRow) -> dict[str, object]:
    key = {"key": None} if row.key is None else text_or_base64("key", row.key)
    return {"id": row.id, "subject": row.subject, **key, "attempts": row.attempts, "error": row.error}
