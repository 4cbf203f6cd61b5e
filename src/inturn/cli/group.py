"""`inturn group`: list, describe and reset groups, and set their order."""

from __future__ import annotations

import enum
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.message_text import blocking_fields, born_text, key_text, state_text
from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, complete_group, examples
from inturn.cli.screen import Screen, age_text, fields_text, plain, rate_text
from inturn.cli.session import command, opened, position
from inturn.cli.trial import EXAMPLES as TRY_EXAMPLES
from inturn.cli.trial import try_message
from inturn.model.errors import NotFound
from inturn.model.settings import GroupMode, Order
from inturn.model.subject import RESERVED

if TYPE_CHECKING:
    from inturn.client import Connection
    from inturn.protocol.commands import GroupDescription, GroupPartition, KeyDescription, MemberDescription

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="List and describe groups, and move their position."
)


class DecidedOrder(enum.StrEnum):
    """The order that an operator sets: a value of Order, or `asked` for the order of the members."""

    PARTITION = Order.PARTITION.value
    KEY = Order.KEY.value
    NONE = Order.NONE.value
    ASKED = "asked"


Group = Annotated[
    str,
    typer.Argument(metavar="GROUP", help="The name of a group.", show_default=False, autocompletion=complete_group),
]


@app.command("list", epilog=examples("inturn group list", "inturn group list --json"))
def list_groups(data: Data = DEFAULT_DATA, server: Server = None, json_output: Json = False) -> None:
    """List all groups with their lag."""
    with command(json_output) as screen:
        with opened(data) as connection:
            found = [connection.group(one.subject, one.group).describe() for one in connection.groups()]
        if screen.is_json:
            screen.json({"groups": [_summary(one) for one in found]})
            return
        if not found:
            screen.note("no groups yet; the first consumer of a group creates the group")
            return
        screen.table(
            ["group", "subject", "mode", ">members", ">partitions", ">lag"],
            (
                [
                    plain(one.group),
                    plain(one.subject),
                    plain(one.mode),
                    str(len(one.members)),
                    str(len(one.partitions)),
                    _lag_text(one),
                ]
                for one in found
            ),
        )


@app.command(
    "describe", epilog=examples("inturn group describe billing", "inturn group describe billing --subject orders")
)
def describe(
    group: Group,
    subject: Annotated[str | None, typer.Option("--subject", "-s", help="Only on this subject.")] = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Describe a group on all its subjects: members, progress by partition, and keys that block."""
    with command(json_output) as screen:
        with opened(data) as connection:
            found = _descriptions(connection, group, subject)
            troubles = [_troubles(connection, one) for one in found]
        lag = sum(one.lag for one in found)
        if screen.is_json:
            screen.json({"group": group, "lag": lag, "subjects": list(map(_fields, found, troubles))})
            return
        for one, trouble in zip(found, troubles, strict=True):
            _print_description(screen, one, trouble)
        if len(found) > 1:
            screen.out.print(f"total lag on {len(found)} subjects: [bold]{lag:,}[/bold]")


@app.command(
    "reset",
    epilog=examples(
        "inturn group reset billing --subject orders --to first --dry-run",
        "inturn group reset billing --subject orders --to 2026-01-31T12:00 --yes",
    ),
)
def reset(
    group: Group,
    subject: Annotated[str, typer.Option("--subject", "-s", help="The subject.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            help="first, last, a time such as 2026-01-31T12:00 (local unless with a zone), or an offset.",
            show_default=False,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the change.")] = False,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Move a group to a position in all partitions. All consumers of the group must be stopped.

    An offset outside a partition becomes the nearest offset of the partition.
    """
    if json_output and not (yes or dry_run):
        raise typer.BadParameter("--json asks no questions: add --yes or --dry-run")
    with command(json_output) as screen:
        target = position(to)
        with opened(data) as connection:
            before = connection.group(subject, group).describe()
            after = connection.reader(subject, target).offsets
            if not screen.is_json:
                _print_moves(screen, before, after)
            if not dry_run:
                if not yes:
                    typer.confirm(f"move group {group} on {subject} to {to}?", abort=True, err=True)
                connection.group(subject, group).reset(target)
        if screen.is_json:
            screen.json(_reset_fields(before, after, is_done=not dry_run))
        else:
            screen.note("nothing was changed (--dry-run)" if dry_run else "[green]done[/green]")


@app.command(
    "set",
    epilog=examples(
        "inturn group set billing --subject orders --order partition",
        "inturn group set billing --subject orders --order asked",
    ),
)
def set_group(
    group: Group,
    subject: Annotated[str, typer.Option("--subject", "-s", help="The subject.", show_default=False)],
    order: Annotated[
        DecidedOrder,
        typer.Option(
            help="The order for all members, instead of their own; asked: the order of the members.", show_default=False
        ),
    ],
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Set the order that the members of a group keep.

    Members change to a stricter order when their running handlers are finished. Members stop with an error at a weaker
    order: their handlers may rely on the order that they asked for.
    """
    with command(json_output) as screen:
        with opened(data) as connection:
            connection.group(subject, group).set_order(None if order is DecidedOrder.ASKED else Order(order.value))
            found = connection.group(subject, group).describe()
        if screen.is_json:
            screen.json({"group": group, "subject": subject, "order": found.order, "set_order": found.set_order})
        elif found.set_order is None:
            screen.note("[green]done[/green]; the members keep the order of their settings")
        else:
            screen.note(f"[green]done[/green]; the members keep order {plain(found.set_order)}")


app.command("try", epilog=TRY_EXAMPLES)(try_message)


def _descriptions(connection: Connection, group: str, subject: str | None) -> list[GroupDescription]:
    if subject is not None:
        return [connection.group(subject, group).describe()]
    names = [one for one in connection.groups() if one.group == group]
    if not names:
        raise NotFound("group", group, "`inturn group list` shows those that are there")
    names.sort(key=lambda one: one.subject.startswith(RESERVED))  # retry subjects last
    return [connection.group(one.subject, one.group).describe() for one in names]


def _troubles(connection: Connection, found: GroupDescription) -> dict[str, int]:
    """How many keys are in which state, but for those that go on by themselves."""
    states = Counter(one.state for one in connection.group(found.subject, found.group).keys())
    return {state: states[state] for state in ("failing", "blocked", "parked", "resuming")}


def _lag_text(found: GroupDescription) -> str:
    lag = found.lag
    if found.mode == GroupMode.BROADCAST:
        return "[dim]–[/dim]"  # only the members know the lag
    return f"[yellow]{lag:,}[/yellow]" if lag else "[green]0[/green]"


def _print_description(screen: Screen, found: GroupDescription, troubles: dict[str, int]) -> None:
    agreed: dict[str, object] = {"mode": found.mode}
    if found.members:
        agreed |= {"order": found.order, "assignment": found.assignment}
    if found.set_order is not None:
        agreed |= {"order": f"{found.set_order}, as was set"}
    if found.tags:
        agreed["tags"] = found.tags
    screen.out.print(
        f"group [bold]{plain(found.group)}[/bold] on [bold]{plain(found.subject)}[/bold]  "
        f"[dim]lag[/dim] {_lag_text(found)}  "
        + fields_text({"members": len(found.members) or "none running", **agreed}),
        soft_wrap=True,
    )
    if found.member_details:
        is_divided = found.mode == GroupMode.EXCLUSIVE
        columns = ["member", "online since", ">partitions"][: 3 if is_divided else 2]
        screen.table(columns, (_member_row(one)[: len(columns)] for one in found.member_details))
    if found.mode == GroupMode.SHARED:
        screen.table(
            [">partition", ">committed", ">end offset", ">lag", ">done/s", ">outstanding", ">waiting", ">redeliveries"],
            map(_shared_row, found.partitions),
        )
    elif found.mode == GroupMode.BROADCAST:
        screen.out.print("[dim]every member gets all messages, and only the member knows its progress[/dim]")
    else:
        screen.table(
            [">partition", ">committed", ">end offset", ">lag", ">done/s", "owner", ">epoch", ">lease left"],
            map(_partition_row, found.partitions),
        )
    blocking = [one.blocking for one in found.partitions if one.blocking is not None]
    if blocking:
        screen.table(
            [">partition", "blocking key", "state", ">attempts", ">waiting behind"], map(_blocking_row, blocking)
        )
    if any(troubles.values()):
        counts = ", ".join(f"{count:,} {state}" for state, count in troubles.items() if count)
        screen.out.print(
            f"keys: [yellow]{counts}[/yellow]; "
            f"see `inturn key list {plain(found.subject)} --group {plain(found.group)}`",
            soft_wrap=True,
        )


def _member_row(one: MemberDescription) -> list[str]:
    age = age_text(time.time() - one.since_ms / 1000)
    share = f"{len(one.held)}" if one.held == one.assigned else f"{len(one.held)} of {len(one.assigned)}"
    return [plain(one.name), f"{born_text(one.since_ms)} ({age})", share]


def _partition_row(one: GroupPartition) -> list[str]:
    return [
        str(one.partition),
        f"{one.committed:,}",
        f"{one.end_offset:,}",
        f"[yellow]{one.lag:,}[/yellow]" if one.lag else "[green]0[/green]",
        rate_text(one.done_per_s),
        _owner_text(one),
        str(one.epoch),
        "[dim]–[/dim]" if one.remaining_s is None else f"{one.remaining_s:.1f} s",
    ]


def _owner_text(one: GroupPartition) -> str:
    if one.gate is not None:
        where = "" if one.gate.offset is None else f", offset {one.gate.offset:,}"
        return f"[yellow]waits for partition {one.gate.parent}{where}[/yellow]"
    return "[dim]–[/dim]" if one.owner is None else plain(one.owner)


def _shared_row(one: GroupPartition) -> list[str]:
    """Delivered and not acknowledged, returned and waiting, and the number of redeliveries."""
    return [*_partition_row(one)[:5], f"{one.outstanding:,}", f"{one.waiting:,}", f"{one.redeliveries:,}"]


def _blocking_row(one: KeyDescription) -> list[str]:
    return [str(one.partition), key_text(one.key), state_text(one.state), str(one.attempts), f"{one.waiting:,}"]


def _print_moves(screen: Screen, before: GroupDescription, after: list[int]) -> None:
    screen.table(
        [">partition", ">before", ">after", ">change", ">end offset", ">lag after"],
        (
            [
                str(one.partition),
                f"{one.committed:,}",
                f"[bold]{new:,}[/bold]",
                f"{new - one.committed:+,}" if new != one.committed else "[dim]0[/dim]",
                f"{one.end_offset:,}",
                f"{max(0, one.end_offset - new):,}",
            ]
            for one, new in zip(before.partitions, after, strict=True)
        ),
        title=f"group {plain(before.group)} on {plain(before.subject)}",
    )


def _reset_fields(before: GroupDescription, after: list[int], *, is_done: bool) -> dict[str, object]:
    return {
        "group": before.group,
        "subject": before.subject,
        "done": is_done,
        "partitions": [
            {"partition": one.partition, "before": one.committed, "after": new}
            for one, new in zip(before.partitions, after, strict=True)
        ],
    }


def _summary(found: GroupDescription) -> dict[str, object]:
    return {
        "group": found.group,
        "subject": found.subject,
        "mode": found.mode,
        "members": list(found.members),
        "partition_count": len(found.partitions),
        "lag": found.lag,
    }


def _fields(found: GroupDescription, troubles: dict[str, int]) -> dict[str, object]:
    return {
        "subject": found.subject,
        "members": list(found.members),
        "member_details": found.member_details,
        "mode": found.mode,
        "order": found.order,
        "set_order": found.set_order,
        "assignment": found.assignment,
        "tags": found.tags,
        "lag": found.lag,
        "done_per_s": sum(one.done_per_s for one in found.partitions),
        "keys": troubles,
        "partitions": [
            {
                "partition": one.partition,
                "committed": one.committed,
                "end_offset": one.end_offset,
                "lag": one.lag,
                "owner": one.owner,
                "epoch": one.epoch,
                "remaining_s": one.remaining_s,
                "finished_count": one.finished_count,
                "done_per_s": one.done_per_s,
                "blocking": blocking_fields(one.blocking),
                "waits_for": None if one.gate is None else {"partition": one.gate.parent, "offset": one.gate.offset},
                "outstanding": one.outstanding,
                "waiting": one.waiting,
                "redeliveries": one.redeliveries,
            }
            for one in found.partitions
        ],
    }
