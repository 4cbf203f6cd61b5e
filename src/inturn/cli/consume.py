"""`inturn consume`: print messages, or handle messages as a member of a group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.member import MemberView, handle
from inturn.cli.message_text import MessagePrinter
from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, Subject, complete_group, examples
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
FOLLOW_S = 0.2  # interval between two reads at the end of the log


def consume(
    subject: Subject,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="first, last, a time such as 2026-01-31T12:00 (local unless with a zone), or an offset. "
            "With --group: the start of a new group.",
        ),
    ] = "first",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more messages at the end, until Ctrl-C.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="Stop after this number of messages.", min=1, show_default=False)
    ] = None,
    partition: Annotated[int | None, typer.Option(help="Only this partition.", min=0, show_default=False)] = None,
    key: Annotated[str | None, typer.Option(help="Only messages of this key.", show_default=False)] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Only messages with a tag in 'paid || shipped'. With --group: the same for all members.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Handle messages as a member of this group, in order, with commits.",
            show_default=False,
            autocompletion=complete_group,
        ),
    ] = None,
    order: Annotated[
        Order | None,
        typer.Option(help="With --group: the order to keep, the same for all members. Default: partition."),
    ] = None,
    mode: Annotated[
        GroupMode | None,
        typer.Option(help="With --group: how the members share messages, fixed for the group. Default: exclusive."),
    ] = None,
    visibility_s: Annotated[
        float | None,
        typer.Option(
            help="With --mode shared: a message that is not printed within this time is delivered again.",
            show_default=False,
        ),
    ] = None,
    offsets: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="With --mode broadcast: the folder of the offsets.", show_default=False),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="With --group: prefix of the member name; with --mode broadcast also the name of its offsets.",
            show_default=False,
        ),
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(help="With --group: give a message up after this number of attempts.", min=1, show_default=False),
    ] = None,
    on_exhausted: Annotated[
        OnExhausted | None,
        typer.Option(help="With --max-attempts: the action for a message that is given up. Default: block."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="With --group: record a trace in this folder, for `inturn audit`.",
            show_default=False,
        ),
    ] = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Print messages: partition, offset, time of birth, key and body.

    Without --group no progress is stored.
    With --group printing is the handler: printed messages are committed, and the next run continues there.
    The command ends at the end of the log, or when the group has handled everything, unless --follow.
    Printing does not fail: --max-attempts is for messages that failed in other members. With --on-exhausted dead-letter
    or park, and with --order none, messages that wait for a retry are printed when they are due; use --follow then.
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
                how = MemberView(
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
    """The partitions to read. With a key and routing by slots: only partitions that the slot of the key has been in."""
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
    """Messages of all partitions in turns, by offset within a partition. With `before_wait` without end.

    `indexes` returns the partitions to read now. The error of a damaged partition goes to `troubles`.
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
