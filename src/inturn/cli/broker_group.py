"""`inturn broker-group`: the broker groups of a cluster, and their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, examples
from inturn.cli.screen import age_text, plain
from inturn.cli.session import command, opened
from inturn.model.settings import BrokerGroupState

if TYPE_CHECKING:
    from inturn.protocol.commands import BrokerGroupDescription

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="List broker groups, and take a broker group out of work or back.",
)
_STYLE = {"available": "green", "read-only": "yellow", "unavailable": "yellow", "dead": "bold red"}


@app.command("list", epilog=examples("inturn broker-group list", "inturn broker-group list --json"))
def list_broker_groups(data: Data = DEFAULT_DATA, server: Server = None, json_output: Json = False) -> None:
    """List all broker groups: state, last heartbeat of the broker, number of partitions."""
    with command(json_output) as screen:
        with opened(data) as connection:
            found = connection.broker_groups()
        if screen.is_json:
            screen.json({"broker_groups": [_fields(one) for one in found]})
            return
        if not found:
            screen.note("no broker groups yet; start a broker: `inturn serve --role broker`")
            return
        screen.table(["broker group", "state", "broker", ">partitions", "address"], map(_row, found))


@app.command(
    "set",
    epilog=examples("inturn broker-group set east read-only", "inturn broker-group set east available"),
)
def set_state(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a broker group.", show_default=False)],
    state: Annotated[BrokerGroupState, typer.Argument(help="The new state.", show_default=False)],
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Make a broker group read-only (accepts no messages), unavailable (delivers none either), or available again.

    Strict producers wait for the broker group, best-effort producers use a different partition. A restart of servers
    does not change the state.
    """
    with command(json_output) as screen:
        with opened(data) as connection:
            changed = connection.set_broker_group(name, state)
        if screen.is_json:
            screen.json(_fields(changed))
        else:
            screen.out.print(f"broker group [bold]{plain(changed.name)}[/bold] is {changed.state}", soft_wrap=True)


def _row(one: BrokerGroupDescription) -> list[str]:
    heard = "heard" if one.is_heard else f"silent for {age_text(one.silent_s)}"
    return [
        plain(one.name),
        f"[{_STYLE.get(one.condition, 'yellow')}]{one.condition}[/]",
        heard,
        str(one.partition_count),
        plain(one.address or "this node"),
    ]


def _fields(one: BrokerGroupDescription) -> dict[str, object]:
    return {
        "name": one.name,
        "state": one.state,
        "is_heard": one.is_heard,
        "silent_s": round(one.silent_s, 3),
        "partitions": one.partition_count,
        "address": one.address,
    }
