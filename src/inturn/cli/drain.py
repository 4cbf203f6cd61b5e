"""`inturn drain`: take a backlog over from the consumers of a group, work it off on Spark, and hand back."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Data, Group, Json, Server, Subject, examples
from inturn.cli.screen import Screen, counted, plain, rate_text
from inturn.cli.session import check_folder, command, credentials_for, opened
from inturn.model.settings import OnExhausted, Order, Strategy
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from inturn.cli.drain_estimate import Backlog, Estimate
    from inturn.model.settings import ConsumerSettings
    from inturn.spark.ordered.drain import DrainSettings
    from inturn.spark.ordered.drain_report import DrainReport

EXAMPLES = examples(
    "inturn drain orders --group billing --handler shop:bill",
    "inturn drain orders -g billing --dry-run --handler-ms 20",
    "inturn drain orders -g billing --handler shop:bill --max-lag 0 --json",
    "inturn drain orders -g billing --handler shop:bill --server inturn://queue:7420 --master spark://host:7077",
)
INTERRUPTED = 130
UNDONE = 1  # messages are left that could be handled, or that cannot be read: not because of the state of a key


def drain(
    subject: Subject,
    group: Group,
    handler: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The handler, imported from the current folder or the Python path.",
            show_default=False,
        ),
    ] = None,
    master: Annotated[str, typer.Option(help="The Spark master: local[2], or the address of a cluster.")] = "local[*]",
    tasks: Annotated[
        int | None,
        typer.Option(help="Number of tasks at once. Default: the cores of Spark.", min=1, show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Number of handlers at once per task.", min=1)] = 64,
    batch: Annotated[
        int, typer.Option(help="Above 1: the handler gets lists of up to this number of messages.", min=1)
    ] = 1,
    order: Annotated[
        Order | None,
        typer.Option(help="The order to keep, if the group has no members that define the order. Default: key."),
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Only messages with a tag in 'paid || shipped', if the group has no members that define the tags.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        Strategy, typer.Option(help="The fate of messages behind a message that fails.")
    ] = Strategy.STRICT,
    max_attempts: Annotated[
        int | None, typer.Option(help="Give a message up after this number of attempts.", min=1, show_default=False)
    ] = None,
    on_exhausted: Annotated[
        OnExhausted | None,
        typer.Option(help="With --max-attempts: the action for a message that is given up. Default: block."),
    ] = None,
    round_s: Annotated[float, typer.Option(help="Approximate duration of a Spark job.", min=0.1)] = 30.0,
    max_lag: Annotated[
        int | None,
        typer.Option(
            help="Include new messages, until this number is left. Default: only messages stored at the start.",
            min=0,
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Record a trace in this folder, for `inturn audit`.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the duration.")] = False,
    handler_ms: Annotated[
        float | None,
        typer.Option(help="With --dry-run: duration of a handler. Default: several usual durations.", min=0.0),
    ] = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Work off the backlog of a group on Spark, in the order that the consumers of the group keep.

    The consumers hand their partitions over, keep running, and get the partitions back at the end. No message is lost
    or overtaken, also after a crash of any process. Ctrl-C hands back when the running handlers are over. A second
    Ctrl-C cancels the Spark job: the group continues when the leases have ended. A third Ctrl-C does not wait.
    """
    if on_exhausted is not None and max_attempts is None:
        raise typer.BadParameter("--on-exhausted needs --max-attempts")
    if handler is None and not dry_run:
        raise typer.BadParameter("--handler is missing: give module:function, or use --dry-run")
    if handler_ms is not None and not dry_run:
        raise typer.BadParameter("--handler-ms is for --dry-run")
    with command(json_output) as screen:
        if dry_run:
            _estimate(screen, data, subject, group, order, _task_count(master, tasks), concurrency, handler_ms)
            return
        from inturn.spark.extra import needs_extra

        with needs_extra():
            from inturn.spark.ordered.drain import DrainSettings
        from inturn.model.settings import ConsumerSettings

        settings = ConsumerSettings(
            concurrency=concurrency,
            batch=batch,
            strategy=strategy,
            max_attempts=max_attempts,
            on_exhausted=on_exhausted or OnExhausted.BLOCK,
            trace=trace,
            tags=tags,
        )
        how = DrainSettings(tasks=tasks, round_s=round_s, max_lag=max_lag)
        assert handler is not None
        report = _drain(screen, data, subject, group, handler, master, order, settings, how)
        from inturn.cli.drain_view import print_report

        print_report(screen, report)
        screen.flush()
        if report.ended == "interrupted":
            raise typer.Exit(INTERRUPTED)
        if report.ended in ("limit", "damaged"):
            raise typer.Exit(UNDONE)


def _drain(
    screen: Screen,
    data: str,
    subject: str,
    group: str,
    handler: str,
    master: str,
    order: Order | None,
    consumer: ConsumerSettings,
    settings: DrainSettings,
) -> DrainReport:
    """Validate all arguments first: the start of Spark is slow."""
    from inturn.cli.drain_view import DrainView
    from inturn.spark.ordered.admission import check_master, describe_existing, order_of
    from inturn.spark.ordered.drain import Drain, DrainOptions
    from inturn.spark.ordered.task import disconnect
    from inturn.spark.session import session
    from inturn.spark.shipping import load_handler

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # before the session starts: the workers get the import path of this process
    if not is_address(data):
        check_folder(data)
        data = os.path.abspath(data)
    check_master(master, data)
    load_handler(handler)
    with opened(data) as connection:
        connection.subject(subject)
        order_of(describe_existing(connection, subject, group), order)
    screen.note(f"[dim]starting Spark ({plain(master)})[/dim]")
    spark = session(f"inturn drain {subject} for {group}", master)
    try:
        with DrainView(screen) as view:
            known = credentials_for(data)
            options = DrainOptions(order=order, consumer=consumer, settings=settings, token=known.token, tls=known.tls)
            drain = Drain(spark, data, subject, group, handler, **options)
            return drain.run(view.show)
    finally:
        disconnect(data)
        spark.stop()


# The dry run


def _task_count(master: str, tasks: int | None) -> int:
    from inturn.spark.session import settings

    return tasks if tasks is not None else int(settings(master).get("spark.sql.shuffle.partitions", "1"))


def _estimate(
    screen: Screen,
    data: str,
    subject: str,
    group: str,
    order: Order | None,
    tasks: int,
    concurrency: int,
    handler_ms: float | None,
) -> None:
    from inturn.cli.drain_estimate import HANDLER_MS, look
    from inturn.spark.ordered.admission import describe_existing, order_of

    with opened(data) as connection:
        found = connection.subject(subject)
        described = describe_existing(connection, subject, group)
        order = order_of(described, order)
        backlog = look(connection, found, described, order)
    times_ms = HANDLER_MS if handler_ms is None else (handler_ms,)
    estimates = [backlog.estimate(one, tasks, concurrency) for one in times_ms]
    if screen.is_json:
        screen.json(_estimate_fields(subject, group, order, tasks, concurrency, backlog, estimates))
        return
    _print_estimate(screen, f"{plain(subject)} for group {plain(group)}", tasks, concurrency, backlog, estimates)


def _print_estimate(
    screen: Screen, what: str, tasks: int, concurrency: int, backlog: Backlog, estimates: list[Estimate]
) -> None:
    from inturn.cli.drain_view import time_text

    def say(text: str) -> None:
        screen.out.print(text, highlight=False, soft_wrap=True)

    say(f"[bold]{counted(backlog.messages, 'message')}[/bold] of {what} to do")
    if not backlog.messages:
        return
    members = counted(backlog.members, "member")
    if backlog.online_s is None:
        say(f"now: {members}, no progress")
    else:
        say(f"now: {members}, {rate_text(backlog.done_per_s)}/s: {time_text(backlog.online_s)}")
    say(
        f"drained by {counted(tasks, 'task')} × {counted(concurrency, 'handler')}, an estimate from "
        f"{counted(backlog.sampled, 'sampled message')}, without the start of Spark:"
    )
    rows = [(f"{one.handler_ms:g} ms", time_text(one.seconds), _bound_text(one, tasks, backlog)) for one in estimates]
    screen.table([">a handler takes", ">drained in", "bound by"], rows)
    if backlog.lanes:
        rows = [(plain(one.name), f"{one.messages:,}", f"{one.share:.1%}") for one in backlog.lanes]
        screen.table(["longest lanes", ">messages, about", ">share"], rows)


def _bound_text(one: Estimate, tasks: int, backlog: Backlog) -> str:
    match one.bound:
        case "lane":
            return f"{plain(backlog.lanes[0].name)}: messages of a lane run in sequence"
        case "handlers":
            return "the number of handlers at once"
        case _:
            return f"reading and ordering, {backlog.cost_us:.0f} µs per message on {counted(tasks, 'core')}"


def _estimate_fields(
    subject: str,
    group: str,
    order: Order,
    tasks: int,
    concurrency: int,
    backlog: Backlog,
    estimates: list[Estimate],
) -> dict[str, object]:
    return {
        "subject": subject,
        "group": group,
        "order": order.value,
        "is_estimate": True,
        "messages": backlog.messages,
        "sampled": backlog.sampled,
        "keys_seen": backlog.keys_seen,
        "members": backlog.members,
        "done_per_s": backlog.done_per_s,
        "online_s": backlog.online_s,
        "tasks": tasks,
        "concurrency": concurrency,
        "cost_us": backlog.cost_us,
        "estimates": [{"handler_ms": one.handler_ms, "seconds": one.seconds, "bound": one.bound} for one in estimates],
        "longest": [
            {"name": one.name, "partition": one.partition, "messages": one.messages, "share": one.share}
            for one in backlog.lanes
        ],
    }
