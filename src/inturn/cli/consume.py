"""`inturn consume`: look at messages, or handle them as a member of a group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.complete import complete_group
from inturn.cli.group_member import Membership, handle
from inturn.cli.message_line import MessagePrinter
from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, Subject, examples
from inturn.cli.screen import Screen, counted
from inturn.cli.session import command, opened, position
from inturn.model.errors import NotFound, StorageError
from inturn.model.settings import GroupMode, OnExhausted, Order, Routing

if TYPE_CHECKING:
    from inturn.client import Connection
    from inturn.client.reader import Reader
    from inturn.model.message import Message
    from inturn.model.offsets import Position

EXAMPLES = examples(
    "inturn consume orders --limit 10",
    "inturn consume orders --key alice --from 2026-01-31T12:00",
    "inturn consume orders --tags 'paid || shipped'",
    "inturn consume orders --group billing",
    "inturn consume orders --group billing --order key --follow",
    "inturn consume orders --group billing --order key --trace ./traces",
    "inturn consume orders --group mailing --mode shared --visibility-s 60 --follow",
    "inturn consume orders --group caches --mode broadcast --offsets ./offsets --name cache-1",
    "inturn consume orders --json | jq .body",
)
FOLLOW_S = 0.2  # between two looks for something new


def consume(
    subject: Subject,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="first, last, a time such as 2026-01-31T12:00 (local unless it says its zone), or an offset. "
            "With --group: where a new group starts.",
        ),
    ] = "first",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more at the end, until Ctrl-C.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="Stop after so many.", min=1, show_default=False)
    ] = None,
    partition: Annotated[int | None, typer.Option(help="Only this partition.", min=0, show_default=False)] = None,
    key: Annotated[str | None, typer.Option(help="Only messages of this key.", show_default=False)] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Only messages with one of these tags: 'paid || shipped'. With --group, as all its members say.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Handle them as a member of this group, in order, with commits.",
            show_default=False,
            autocompletion=complete_group,
        ),
    ] = None,
    order: Annotated[
        Order | None,
        typer.Option(help="With --group: what stays in order, as all its members say; partition unless given."),
    ] = None,
    mode: Annotated[
        GroupMode | None,
        typer.Option(help="With --group: how its members divide the messages, for good; exclusive unless given."),
    ] = None,
    visibility_s: Annotated[
        float | None,
        typer.Option(
            help="With --mode shared: what was not printed so long after it was given out is given out again.",
            show_default=False,
        ),
    ] = None,
    offsets: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="With --mode broadcast: where it remembers how far it is.", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="With --group: what its name begins with; with --mode broadcast also which offsets are its own.",
            show_default=False,
        ),
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(help="With --group: give a message up after so many.", min=1, show_default=False)
    ] = None,
    on_exhausted: Annotated[
        OnExhausted | None,
        typer.Option(help="With --max-attempts: what becomes of a message that is given up; block unless given."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="With --group: record there what is done, for `inturn audit`.", show_default=False
        ),
    ] = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Print messages: partition, offset, when they were born, key and body.

    Without --group nothing is remembered.
    With --group printing is the handler: what was printed is committed, the next run goes on there.
    It ends at the end of the log, or when the group has handled everything, unless --follow.
    Printing does not fail: --max-attempts matters for what others failed at. With --on-exhausted dead-letter or park,
    and with --order none, messages that wait for a retry are printed, too, when their time comes; use --follow then.
    """
    if group is None and any(one is not None for one in (order, max_attempts, on_exhausted, trace, mode, name)):
        raise typer.BadParameter(
            "--order, --max-attempts, --on-exhausted, --trace, --mode and --name are for the members of a --group"
        )
    if visibility_s is not None and mode is not GroupMode.SHARED:
        raise typer.BadParameter("--visibility-s needs --mode shared")
    if on_exhausted is not None and max_attempts is None:
        raise typer.BadParameter("--on-exhausted needs --max-attempts")
    if group is not None and (partition is not None or key is not None):
        raise typer.BadParameter("--group takes all messages: leave --partition and --key out")
    with command(json_output) as screen:
        target = position(start)
        printer = MessagePrinter(screen, limit)
        with opened(data) as connection:
            if group is None:
                _read(connection, screen, printer, subject, target, follow, partition, key, tags)
            else:
                how = Membership(
                    group,
                    order,
                    max_attempts,
                    on_exhausted or OnExhausted.BLOCK,
                    trace,
                    tags,
                    mode or GroupMode.EXCLUSIVE,
                    visibility_s,
                    offsets,
                    name,
                )
                handle(connection, screen, printer, subject, how, target, follow)


def _read(
    connection: Connection,
    screen: Screen,
    printer: MessagePrinter,
    subject: str,
    target: Position,
    follow: bool,
    partition: int | None,
    key: str | None,
    tags: str | None,
) -> None:
    reader = connection.reader(subject, target, tags=tags)
    wanted_key = None if key is None else os.fsencode(key)
    indexes = partial(_indexes, reader, partition, wanted_key)
    troubles: dict[int, StorageError] = {}
    try:
        for message in _messages(reader, indexes, troubles, printer.flush if follow else None):
            if wanted_key is None or message.key == wanted_key:
                printer.print(message)
                if printer.is_full:
                    break
    except KeyboardInterrupt:  # the way to end --follow
        if not follow:
            raise
    printer.flush()
    screen.note(f"[dim]{counted(printer.count, 'message')}[/dim]")
    if troubles:
        first, *others = troubles.values()
        for trouble in others:
            screen.error(trouble)
        raise first


def _indexes(reader: Reader, partition: int | None, key: bytes | None) -> list[int]:
    """The partitions to read: with a key only those that its slot has been in, where slots say it."""
    from inturn.model.routing import slot_of

    subject = reader.subject
    if partition is not None and partition >= subject.partition_count:
        raise NotFound(
            "partition", f"{subject.name}/{partition}", f"the subject has partitions 0 to {subject.partition_count - 1}"
        )
    indexes = list(range(subject.partition_count)) if partition is None else [partition]
    if key is not None and subject.routing is Routing.SLOTS:
        homes = subject.route.lineage(slot_of(key))
        indexes = [index for index in indexes if index in homes]
    return indexes


def _messages(
    reader: Reader,
    indexes: Callable[[], list[int]],
    troubles: dict[int, StorageError],
    before_wait: Callable[[], None] | None,
) -> Iterator[Message]:
    """In turns, each partition in its order, up to the end or, with `before_wait`, for ever.

    `indexes` are those to read as the subject is now. A partition that cannot be read on goes to `troubles`.
    """
    chosen = indexes()
    while True:
        found = False
        for index in chosen:
            if index in troubles:
                continue
            try:
                messages = reader.read(index)
            except StorageError as error:
                troubles[index] = error
                continue
            found = found or bool(messages)
            yield from messages
        if found:
            continue
        if reader.refresh():
            chosen = indexes()
        elif before_wait is None or len(troubles) == len(chosen):
            return
        else:
            before_wait()
            time.sleep(FOLLOW_S)
