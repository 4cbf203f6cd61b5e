"""`inturn dead-letter`: messages that a group has given up, and their redrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.message_text import born_text, message_fields
from inturn.cli.options import DEFAULT_DATA, Data, Group, Json, Server, Subject, examples
from inturn.cli.screen import counted, fields_text, plain
from inturn.cli.session import command, opened

if TYPE_CHECKING:
    from inturn.client.dead_letters import DeadLetter

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="List, show and redrive messages that a group has given up."
)
BODY_COLUMNS = 60


@app.command("list", epilog=examples("inturn dead-letter list orders --group billing"))
def list_letters(
    subject: Subject,
    group: Group,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Largest number of letters.", min=1)] = 100,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """List dead letters that were not redriven, oldest first."""
    with command(json_output) as screen:
        with opened(data) as connection:
            found = connection.group(subject, group).dead_letters().list(limit + 1)
        letters, is_more = found[:limit], len(found) > limit
        if screen.is_json:
            listed = [_fields(letter) for letter in letters]
            screen.json({"subject": subject, "group": group, "dead_letters": listed, "is_more": is_more})
            return
        if not letters:
            screen.note(f"no dead letters of group {plain(group)} on {plain(subject)}")
            return
        screen.table([">offset", "came from", ">attempts", "born", "key", "body"], map(_row, letters))
        if is_more:
            screen.note(f"the oldest {counted(limit, 'letter')}; there are more: use --limit")


@app.command("show", epilog=examples("inturn dead-letter show orders 3 --group billing"))
def show(
    subject: Subject,
    offset: Annotated[int, typer.Argument(metavar="OFFSET", help="An offset from `list`.", show_default=False)],
    group: Group,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Show a dead letter with all its fields, also a letter that was redriven."""
    with command(json_output) as screen:
        with opened(data) as connection:
            letter = connection.group(subject, group).dead_letters().get(offset)
        if screen.is_json:
            screen.json({"subject": subject, "group": group, **_fields(letter)})
            return
        message = letter.message
        lines: list[dict[str, object]] = [
            {"offset": message.offset, "came from": _origin(letter), "attempts": letter.attempts},
            {"key": _key_text(letter), "born": born_text(message.born_at_ms)},
            {"tags": ", ".join(message.tags)} if message.tags else {},
            {name: value for name, value in message.properties.items() if not name.startswith("%")},
            {"body": message.body.decode(errors="backslashreplace")},
        ]
        for line in filter(None, lines):
            screen.out.print(fields_text(line), soft_wrap=True)


@app.command(
    "redrive",
    epilog=examples(
        "inturn dead-letter redrive orders 3 4 --group billing", "inturn dead-letter redrive orders --all -g billing"
    ),
)
def redrive(
    subject: Subject,
    group: Group,
    offsets: Annotated[
        list[int] | None, typer.Argument(metavar="OFFSET", help="Offsets from `list`.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All letters that were not redriven.")] = False,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Deliver dead letters to the group again, through its retry subject and out of order.

    Consumers of the group that give up messages handle redriven letters by themselves, also consumers that start later.
    """
    if every == bool(offsets):
        raise typer.BadParameter("give offsets, or --all")
    with command(json_output) as screen:
        with opened(data) as connection:
            count = connection.group(subject, group).dead_letters().redrive(None if every else offsets)
        if screen.is_json:
            screen.json({"subject": subject, "group": group, "redriven": count})
            return
        screen.out.print(f"{counted(count, 'dead letter')} redriven", soft_wrap=True)
        left = 0 if every else len(set(offsets or ())) - count
        if left:
            screen.note(f"{left} were redriven before")


def _row(letter: DeadLetter) -> list[str]:
    message = letter.message
    body = message.body[: BODY_COLUMNS + 1].decode(errors="backslashreplace")
    return [
        str(message.offset),
        plain(_origin(letter)),
        str(letter.attempts),
        born_text(message.born_at_ms),
        plain(_key_text(letter)),
        plain(body if len(body) <= BODY_COLUMNS else body[:BODY_COLUMNS] + "…"),
    ]


def _origin(letter: DeadLetter) -> str:
    return f"{letter.subject}/{letter.partition}@{letter.offset}"


def _key_text(letter: DeadLetter) -> str:
    return letter.message.key_text or "–"


def _fields(letter: DeadLetter) -> dict[str, object]:
    fields = message_fields(letter.message)
    return {
        "offset": letter.message.offset,
        "origin": {"subject": letter.subject, "partition": letter.partition, "offset": letter.offset},
        "attempts": letter.attempts,
        "message": fields,
    }
