"""`inturn key`: list the keys of a group that are held back, and park, resume or skip them."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.message_text import born_text, key_fields, key_text, message_fields, state_text
from inturn.cli.options import DEFAULT_DATA, Data, Group, Json, Server, Subject, examples
from inturn.cli.screen import Screen, age_text, counted, fields_text, plain
from inturn.cli.session import command, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from inturn.client import Connection
    from inturn.client.group import Group as GroupHandle
    from inturn.model.message import Message
    from inturn.protocol.commands import KeyDescription, KeyDetails, KeyRequest, RequestState

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="List keys that fail, are blocked or parked; park, resume and skip keys.",
)
Key = Annotated[str, typer.Argument(metavar="KEY", help="The order key of messages.", show_default=False)]
Why = Annotated[str, typer.Option("--why", help="The reason, stored with the request.")]
Partition = Annotated[
    int | None,
    typer.Option(help="Where the key is; only needed if senders choose the partition.", min=0, show_default=False),
]

_DONE = {"park": "parked", "resume": "resumed", "skip": "skipped"}
BODY_COLUMNS = 2000


@app.command(
    "list", epilog=examples("inturn key list orders --group billing", "inturn key list orders -g billing --json")
)
def list_keys(
    subject: Subject, group: Group, data: Data = DEFAULT_DATA, server: Server = None, json_output: Json = False
) -> None:
    """List all keys that are held back, the longest first."""
    with command(json_output) as screen:
        with opened(data) as connection:
            found = connection.group(subject, group).keys()
        if screen.is_json:
            screen.json({"subject": subject, "group": group, "keys": [_fields(one) for one in found]})
            return
        if not found:
            screen.note(f"all is well: no key of group {plain(group)} on {plain(subject)} fails, is blocked or parked")
            return
        screen.table(
            ["key", ">partition", "state", ">head offset", ">attempts", "last error", ">age", ">waiting behind"],
            map(_row, found),
        )
        for one in found:
            for request in one.requests:
                screen.note(f"{key_text(one.key)}: {_request_text(request)}, not done yet")


@app.command("show", epilog=examples("inturn key show orders customer-7 --group billing"))
def show(
    subject: Subject,
    key: Key,
    group: Group,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Show a key: its state, its first message, and its last request."""
    with command(json_output) as screen:
        with opened(data) as connection:
            details = connection.group(subject, group).describe_key(os.fsencode(key))
            head = connection.group(subject, group).head_of(details)
        if screen.is_json:
            screen.json({"subject": subject, "group": group, **_details_fields(details, head)})
        else:
            _print_details(screen, details, head)


@app.command("park", epilog=examples('inturn key park orders customer-7 --group billing --why "asked for a stop"'))
def park(
    subject: Subject,
    key: Key,
    group: Group,
    why: Why = "",
    partition: Partition = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Put the messages of a key aside, in order, those that come too. Needs consumers with order by key."""
    with command(json_output) as screen, opened(data) as connection:
        place: dict[str, object] = {"why": why, "partition": partition}
        handle = connection.group(subject, group)
        _tell(screen, _asked(handle, handle.park, os.fsencode(key), place), subject, group)


@app.command("resume", epilog=examples('inturn key resume orders customer-7 --group billing --why "mended"'))
def resume(
    subject: Subject,
    key: Key,
    group: Group,
    why: Why = "",
    partition: Partition = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Resume a parked or blocked key, in order, before newer messages of the key."""
    with command(json_output) as screen, opened(data) as connection:
        wanted = os.fsencode(key)
        found = _find(connection, subject, group, wanted, partition)
        place: dict[str, object] = {"why": why, "partition": partition if found is None else found.partition}
        handle = connection.group(subject, group)
        _tell(screen, _asked(handle, handle.resume, wanted, place), subject, group)


@app.command(
    "skip",
    epilog=examples(
        'inturn key skip orders customer-7 --group billing --why "a test order"',
        "inturn key skip orders customer-7 --group billing --yes",
    ),
)
def skip(
    subject: Subject,
    key: Key,
    group: Group,
    why: Why = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    partition: Partition = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Skip the first message of a failing, blocked or parked key, for this group. The message stays in the log.

    Only the message shown is skipped: if the message is no longer the first, no message is skipped.
    """
    if json_output and not yes:
        raise typer.BadParameter("--json asks no questions: add --yes")
    if not yes and not _has_terminal():
        raise typer.BadParameter("this drops a message for the group, and there is no terminal to ask at: give --yes")
    with command(json_output) as screen, opened(data) as connection:
        wanted = os.fsencode(key)
        found = _find(connection, subject, group, wanted, partition)
        if not yes:
            details = connection.group(subject, group).describe_key(wanted)
            _print_details(screen, details, connection.group(subject, group).head_of(details))
            found = details.description
            typer.confirm(f"drop offset {found.offset} of {subject} for group {group}?", abort=True, err=True)
        place: dict[str, object] = {"why": why, "partition": partition}
        if found is not None:
            place.update(partition=found.partition, offset=found.offset)
        handle = connection.group(subject, group)
        _tell(screen, _asked(handle, handle.skip, wanted, place), subject, group)


def _has_terminal() -> bool:
    return sys.stdin.isatty()


def _find(connection: Connection, subject: str, group: str, key: bytes, partition: int | None) -> KeyDescription | None:
    """The description of the key. The error of the node if the partition is not clear."""
    keys = connection.group(subject, group).keys()
    found = [one for one in keys if one.key == key and partition in (None, one.partition)]
    return found[0] if len(found) == 1 else None


def _asked(
    handle: GroupHandle, steer: Callable[..., RequestState], key: bytes, more: dict[str, object]
) -> RequestState:
    """Without a consumer for the key, do not wait."""
    if not handle.describe().members:
        more["wait_s"] = 0.0
    return steer(key, **more)


def _tell(screen: Screen, state: RequestState, subject: str, group: str) -> None:
    request = state.request
    if screen.is_json:
        screen.json({"subject": subject, "group": group, **_request_fields(request), **_state_fields(state)})
        return
    where = f"key [bold]{key_text(request.key)}[/bold] of group {plain(group)} on {plain(subject)}"
    at = "" if request.offset is None else f", offset {request.offset}"
    if state.done_at_ms is not None:
        screen.out.print(f"{where}{at}: [green]{_DONE[request.kind]}[/green]", soft_wrap=True)
    else:
        screen.out.print(
            f"{where}{at}: {request.kind} is asked for; "
            f"it will be done by the next consumer that holds partition {request.partition}",
            soft_wrap=True,
        )


def _print_details(screen: Screen, details: KeyDetails, head: Message | None) -> None:
    found = details.description
    screen.out.print(
        f"key [bold]{key_text(found.key)}[/bold]  {state_text(found.state)}  "
        + fields_text(
            {
                "partition": found.partition,
                "head offset": "–" if found.offset is None else found.offset,
                "attempts": found.attempts,
                "since": f"{born_text(found.since_ms)} ({_age(found)})",
                "waiting behind": found.waiting,
            }
        ),
        soft_wrap=True,
    )
    for name, value in (("last error", found.error), ("reason", found.reason)):
        if value:
            screen.out.print(fields_text({name: value}), soft_wrap=True)
    if head is not None:
        body = head.body[:BODY_COLUMNS].decode(errors="backslashreplace")
        more = f" … {counted(len(head.body), 'byte')}" if len(head.body) > BODY_COLUMNS else ""
        screen.out.print(fields_text({"head born": born_text(head.born_at_ms), "body": body + more}), soft_wrap=True)
    for state in details.history:
        done = "not done yet" if state.done_at_ms is None else f"done {born_text(state.done_at_ms)}"
        text = f"[dim]{born_text(state.asked_at_ms)}[/dim]  {_request_text(state.request)}, {done}"
        screen.out.print(text, soft_wrap=True)


def _row(one: KeyDescription) -> list[str]:
    return [
        key_text(one.key),
        str(one.partition),
        state_text(one.state),
        "[dim]–[/dim]" if one.offset is None else f"{one.offset:,}",
        str(one.attempts),
        plain(one.error or one.reason) or "[dim]–[/dim]",
        _age(one),
        f"{one.waiting:,}",
    ]


def _age(one: KeyDescription) -> str:
    return age_text(time.time() - one.since_ms / 1000)


def _request_text(request: KeyRequest) -> str:
    at = "" if request.offset is None else f" offset {request.offset}"
    why = f": {plain(request.why)}" if request.why else ""
    return f"{request.kind}{at} asked for by {plain(request.by)}{why}"


def _fields(one: KeyDescription) -> dict[str, object]:
    return {
        **key_fields(one.key),
        "partition": one.partition,
        "state": one.state,
        "offset": one.offset,
        "attempts": one.attempts,
        "error": one.error,
        "reason": one.reason,
        "since_ms": one.since_ms,
        "waiting": one.waiting,
        "requests": [_request_fields(request) for request in one.requests],
    }


def _details_fields(details: KeyDetails, head: Message | None) -> dict[str, object]:
    return {
        **_fields(details.description),
        "head": None if head is None else message_fields(head),
        "history": [{**_request_fields(state.request), **_state_fields(state)} for state in details.history],
    }


def _request_fields(request: KeyRequest) -> dict[str, object]:
    return {
        "request_id": request.id,
        "action": request.kind,
        **key_fields(request.key),
        "partition": request.partition,
        "offset": request.offset,
        "by": request.by,
        "why": request.why,
    }


def _state_fields(state: RequestState) -> dict[str, object]:
    return {"asked_at_ms": state.asked_at_ms, "done_at_ms": state.done_at_ms}
