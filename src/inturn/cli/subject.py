"""`inturn subject`: create, grow, list, describe and delete subjects."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, Subject, examples
from inturn.cli.screen import Screen, fields_text, plain, size_text
from inturn.cli.session import command, opened
from inturn.model.settings import Keyless, Limits, Routing, Strategy
from inturn.model.subject import Subject as SubjectValue

if TYPE_CHECKING:
    from inturn.client import Connection
    from inturn.protocol.commands import PartitionDescription, SubjectDescription

LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class ClosedPartition:
    """A partition that a group does not consume before `parent` is finished up to `offset`."""

    group: str
    partition: int
    parent: int
    offset: int | None

    def fields(self) -> dict[str, object]:
        return {"group": self.group, "partition": self.partition, "waits_for": self.parent, "offset": self.offset}


def _closed_partitions(connection: Connection, subject: str) -> list[ClosedPartition]:
    found = []
    for one in connection.groups():
        if one.subject == subject:
            for partition in connection.group(subject, one.group).describe().partitions:
                if partition.gate is not None:
                    gate = partition.gate
                    found.append(ClosedPartition(one.group, partition.partition, gate.parent, gate.offset))
    return found


def _wait_open(screen: Screen, connection: Connection, subject: str) -> list[ClosedPartition]:
    """Wait until all groups consume all partitions. Ctrl-C ends the waiting only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    waiting = _closed_partitions(connection, subject)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen.err, transient=True, disable=screen.is_json) as progress:
        total = len(waiting)
        task = progress.add_task("partitions open to their groups", total=total)
        try:
            while waiting:
                time.sleep(LOOK_S)
                waiting = _closed_partitions(connection, subject)
                progress.update(task, completed=total - len(waiting))
        except KeyboardInterrupt:
            pass
    return waiting


def _show_closed(screen: Screen, waiting: list[ClosedPartition]) -> None:
    if not waiting:
        screen.note("all groups consume all partitions")
        return
    screen.table(
        ["group", ">partition", ">waits for partition", ">offset"],
        (
            [plain(one.group), str(one.partition), str(one.parent), "–" if one.offset is None else f"{one.offset:,}"]
            for one in waiting
        ),
    )
    screen.note("a group consumes a new partition after the earlier messages of its keys are finished")


app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Create, grow, list and describe subjects.")

_DEFAULT_LIMITS = Limits()
_STATE_STYLE = {"ok": "green", "stopped": "yellow", "damaged": "bold red"}


@app.command(
    "create",
    epilog=examples(
        "inturn subject create orders --partitions 8",
        "inturn subject create images --max-body-bytes 50000000",
        "inturn subject create orders --broker-group east --broker-group west",
    ),
)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 200 of A-Z a-z 0-9 . _ -", show_default=False)],
    partitions: Annotated[int, typer.Option("--partitions", "-p", help="How many logs share the work.")] = 4,
    routing: Annotated[Routing, typer.Option(help="slots: by the key. selector: by a function of the program.")] = (
        Routing.SLOTS
    ),
    strategy: Annotated[Strategy, typer.Option(help="What happens behind a message that fails.")] = Strategy.STRICT,
    keyless: Annotated[
        Keyless, typer.Option(help="With order by key: messages without a key run independently, or in one lane.")
    ] = Keyless.INDEPENDENT,
    max_body_bytes: Annotated[int, typer.Option(help="The largest body.")] = _DEFAULT_LIMITS.body_bytes,
    max_key_bytes: Annotated[int, typer.Option(help="The largest key.")] = _DEFAULT_LIMITS.key_bytes,
    max_properties_bytes: Annotated[
        int, typer.Option(help="All properties of a message together.")
    ] = _DEFAULT_LIMITS.properties_bytes,
    broker_group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="In a cluster: the broker group of the partitions, in turns if given several times. Default: two "
            "available broker groups.",
            show_default=False,
        ),
    ] = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Create a subject, and the folder if missing. The same settings again are no error; different settings are."""
    with command(json_output) as screen:
        limits = Limits(max_body_bytes, max_key_bytes, max_properties_bytes)
        _check(name, partitions)
        with opened(data, create=True) as connection:
            made = connection.create_subject(
                name,
                partitions,
                routing=routing,
                strategy=strategy,
                limits=limits,
                keyless=keyless,
                broker_groups=broker_group or (),
            )
        if screen.is_json:
            screen.json(_fields(made))
        else:
            screen.out.print(f"subject [bold]{plain(made.name)}[/bold]: {_settings_text(made)}", soft_wrap=True)


@app.command(
    "grow",
    epilog=examples("inturn subject grow orders --partitions 8", "inturn subject grow orders --partitions 8 --wait"),
)
def grow(
    name: Subject,
    partitions: Annotated[
        int, typer.Option("--partitions", "-p", help="The new number of partitions.", show_default=False)
    ],
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Show the progress of the groups, until all groups consume the new partitions."),
    ] = False,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Give a subject more partitions, while producers and consumers run. A second run with the same number is no error.

    The order of every key holds: a group consumes a new partition as soon as the earlier messages of the keys that
    moved there are finished.
    """
    with command(json_output) as screen, opened(data) as connection:
        before = connection.subject(name).partition_count
        grown = connection.grow_subject(name, partitions)
        if not screen.is_json:
            screen.out.print(
                f"subject [bold]{plain(name)}[/bold]: {before} → [bold]{grown.partition_count}[/bold] partitions, "
                f"route version {grown.route.version}",
                soft_wrap=True,
            )
        waiting = _wait_open(screen, connection, name) if wait else _closed_partitions(connection, name)
        if screen.is_json:
            screen.json({**_fields(grown), "partitions_before": before, "waiting": [one.fields() for one in waiting]})
        else:
            _show_closed(screen, waiting)


@app.command("list", epilog=examples("inturn subject list", "inturn subject list --json"))
def list_subjects(data: Data = DEFAULT_DATA, server: Server = None, json_output: Json = False) -> None:
    """List all subjects with their size."""
    with command(json_output) as screen:
        with opened(data) as connection:
            found = [_described(connection, subject) for subject in connection.subjects()]
        if screen.is_json:
            screen.json({"subjects": [{**_fields(one.subject), **_totals(one)} for one in found]})
            return
        if not found:
            screen.note("no subjects yet; create a subject with `inturn subject create NAME`")
            return
        screen.table(
            ["subject", ">partitions", "routing", "strategy", ">messages", ">size", "state"], map(_list_row, found)
        )


@app.command("describe", epilog=examples("inturn subject describe orders", "inturn subject describe orders --json"))
def describe(name: Subject, data: Data = DEFAULT_DATA, server: Server = None, json_output: Json = False) -> None:
    """Describe a subject: its route, and the content of its partitions."""
    with command(json_output) as screen:
        with opened(data) as connection:
            found = connection.describe_subject(name)
        if screen.is_json:
            screen.json(
                {
                    **_fields(found.subject),
                    **_totals(found),
                    "partition_list": [_partition_fields(found.subject, one) for one in found.partitions],
                }
            )
        else:
            _print_description(screen, found)


def _described(connection: Connection, subject: SubjectValue) -> SubjectDescription:
    """A subject with a dead broker must not hide the rest of a list: it is listed without partitions."""
    from inturn.model.errors import BrokerGroupClosed
    from inturn.protocol.commands import SubjectDescription

    try:
        return connection.describe_subject(subject.name)
    except BrokerGroupClosed:
        return SubjectDescription(subject, ())


def _check(name: str, partitions: int) -> None:
    """Validate before the folder is created: a mistake leaves no folder behind."""
    from inturn.model.routing import check_partition_count
    from inturn.model.subject import check_name

    check_name("subject", name)
    check_partition_count(name, partitions)


def _settings_text(subject: SubjectValue) -> str:
    limits = subject.limits
    return fields_text(
        {
            "partitions": subject.partition_count,
            "routing": subject.routing,
            "strategy": subject.strategy,
            "keyless": subject.keyless,
            "body": f"≤ {size_text(limits.body_bytes)}",
            "key": f"≤ {size_text(limits.key_bytes)}",
            "properties": f"≤ {size_text(limits.properties_bytes)}",
        }
    )


def _list_row(found: SubjectDescription) -> list[str]:
    subject, totals = found.subject, _totals(found)
    return [
        plain(subject.name),
        str(subject.partition_count),
        subject.routing,
        subject.strategy,
        f"{totals['message_count']:,}",
        size_text(sum(one.size_bytes for one in found.partitions)),
        _state_text(str(totals["state"])),
    ]


def _print_description(screen: Screen, found: SubjectDescription) -> None:
    subject = found.subject
    screen.out.print(f"subject [bold]{plain(subject.name)}[/bold]  {_settings_text(subject)}", soft_wrap=True)
    screen.table(
        [">partition", "slots", ">first offset", ">end offset", ">messages", ">size", "state", "log"],
        (
            [
                str(one.index),
                ", ".join(f"{start}–{stop - 1}" for start, stop in _slot_ranges(subject, one.index)),
                f"{one.start_offset:,}",
                f"{one.end_offset:,}",
                f"{one.end_offset - one.start_offset:,}",
                size_text(one.size_bytes),
                _state_text(one.state),
                plain(str(one.partition)),
            ]
            for one in found.partitions
        ),
    )
    if any(one.state != "ok" for one in found.partitions):
        screen.note("[yellow]not all partitions are well: run `inturn doctor`[/yellow]")


def _state_text(state: str) -> str:
    return f"[{_STATE_STYLE.get(state, 'yellow')}]{state}[/]"


def _slot_ranges(subject: SubjectValue, index: int) -> list[tuple[int, int]]:
    return [(slots.start, slots.stop) for slots in subject.route.ranges if slots.partition == index]


def _fields(subject: SubjectValue) -> dict[str, object]:
    limits = subject.limits
    return {
        "name": subject.name,
        "partitions": subject.partition_count,
        "routing": subject.routing.value,
        "strategy": subject.strategy.value,
        "keyless": subject.keyless.value,
        "route_version": subject.route.version,
        "broker_groups": sorted({one.broker_group for one in subject.route.partitions}),
        "limits": {
            "body_bytes": limits.body_bytes,
            "key_bytes": limits.key_bytes,
            "properties_bytes": limits.properties_bytes,
        },
    }


def _totals(found: SubjectDescription) -> dict[str, object]:
    states = {one.state for one in found.partitions}
    return {
        "message_count": sum(one.end_offset - one.start_offset for one in found.partitions),
        "size_bytes": sum(one.size_bytes for one in found.partitions),
        "state": next((state for state in ("damaged", "stopped") if state in states), "ok" if states else "unreached"),
    }


def _partition_fields(subject: SubjectValue, one: PartitionDescription) -> dict[str, object]:
    return {
        "partition": one.index,
        "log": str(one.partition),
        "slots": [list(slots) for slots in _slot_ranges(subject, one.index)],
        "start_offset": one.start_offset,
        "end_offset": one.end_offset,
        "size_bytes": one.size_bytes,
        "state": one.state,
    }
