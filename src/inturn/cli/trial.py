"""`inturn group try`: a stored message, handled by a named member, with the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Group, Json, Server, Subject, examples
from inturn.cli.screen import Screen, plain
from inturn.cli.session import command, opened
from inturn.model.result import ResultKind

if TYPE_CHECKING:
    from inturn.protocol.commands import TrialState

EXAMPLES = examples(
    "inturn group describe billing",
    "inturn group try orders --group billing --member worker-7 --partition 0 --offset 42",
)
NOT_DONE = 1


def try_message(
    subject: Subject,
    group: Group,
    member: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The member, a name from `inturn group describe` or a prefix of the name.",
            show_default=False,
        ),
    ],
    partition: Annotated[int, typer.Option(help="The partition of the message.", min=0, show_default=False)],
    offset: Annotated[int, typer.Option(help="The offset of the message.", min=0, show_default=False)],
    timeout_s: Annotated[float, typer.Option(help="Time to wait for the result.", min=0.0)] = 30.0,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Let a member handle a message now, out of turn, and show the result.

    Offsets do not move, attempts are not counted, and there is no retry. Order is not kept: the call runs beside other
    calls of the handler, with context.is_direct. Side effects of the handler are real. Exit code 1 unless the result is
    success.
    """
    with command(json_output) as screen:
        with opened(data) as connection:
            state = connection.group(subject, group).try_message(member, partition, offset, timeout_s=timeout_s)
        if screen.is_json:
            screen.json(_fields(subject, group, state))
        else:
            _print(screen, state)
        screen.flush()
        if state.result not in (ResultKind.SUCCESS, ResultKind.TIMEOUT):
            raise typer.Exit(NOT_DONE)


def _print(screen: Screen, state: TrialState) -> None:
    colour = "green" if state.result == ResultKind.SUCCESS else "yellow"
    screen.out.print(
        f"[{colour}]{state.result}[/{colour}] after {1000 * state.duration_s:,.1f} ms by {plain(state.member)}",
        soft_wrap=True,
    )
    if state.error:
        screen.out.print(plain(state.error), soft_wrap=True)
    for line in state.traceback.rstrip().splitlines():
        screen.out.print(f"[dim]{plain(line)}[/dim]", soft_wrap=True)


def _fields(subject: str, group: str, state: TrialState) -> dict[str, object]:
    return {
        "subject": subject,
        "group": group,
        "member": state.member,
        "partition": state.trial.partition,
        "offset": state.trial.offset,
        "result": state.result,
        "error": state.error or None,
        "duration_s": state.duration_s,
        "traceback": state.traceback or None,
    }
