"""`inturn drain`: a backlog is taken over from the consumers of a group, worked off on Spark, and handed back."""

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
UNDONE = 1  # by no decision about a key: there is more that could be handled, or that cannot be read


def drain(
    subject: Subject,
    group: Group,
    handler: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="What handles a message; found from the current folder, or on the Python path.",
            show_default=False,
        ),
    ] = None,
    master: Annotated[str, typer.Option(help="Where Spark runs: local[2], or the address of a cluster.")] = "local[*]",
    tasks: Annotated[
        int | None, typer.Option(help="How many work at once; as many as Spark has cores.", min=1, show_default=False)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Handlers that run at once, in each task.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Above 1: the handler gets lists of up to so many.", min=1)] = 1,
    order: Annotated[
        Order | None,
        typer.Option(help="What stays in order, if the group has no members that say it; key unless given."),
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Only messages with one of these tags, if the group has no members that say it: 'paid || shipped'.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[Strategy, typer.Option(help="What happens behind a message that fails.")] = Strategy.STRICT,
    max_attempts: Annotated[
        int | None, typer.Option(help="Give a message up after so many.", min=1, show_default=False)
    ] = None,
    on_exhausted: Annotated[
        OnExhausted | None,
        typer.Option(help="With --max-attempts: what becomes of a message that is given up; block unless given."),
    ] = None,
    round_s: Annotated[float, typer.Option(help="How long a Spark job lasts, about.", min=0.1)] = 30.0,
    max_lag: Annotated[
        int | None,
        typer.Option(
            help="Go on with what comes, until so few are left. Without it: what is there at the start.",
            min=0,
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Record there what is done, for an audit.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate how long it would take.")] = False,
    handler_ms: Annotated[
        float | None,
        typer.Option(help="With --dry-run: how long a handler takes; some usual times unless given.", min=0.0),
    ] = None,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Work off the backlog of a group on Spark, in the same order its consumers keep.

    The consumers of the group hand their partitions over, keep running, and get them back at the end. Whatever dies in
    between, nothing is lost or overtaken. Ctrl-C hands back as soon as the running handlers are over; a second one
    cancels the Spark job, and the group goes on when its leases have ended; a third one does not wait for that.
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
    """All that can be wrong is looked at before Spark is started, which takes its time."""
    from inturn.cli.drain_view import DrainView
    from inturn.spark.ordered.admission import check_master, describe_existing, order_of
    from inturn.spark.ordered.drain import Drain, DrainOptions
    from inturn.spark.ordered.task import disconnect
    from inturn.spark.session import session
    from inturn.spark.shipping import load_handler

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # before the session, which gives our path to its workers
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
        say(f"now: {members}, and nothing gets done")
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
        screen.table(["longest, one after the other", ">messages, about", ">share"], rows)


def _bound_text(one: Estimate, tasks: int, backlog: Backlog) -> str:
    match one.bound:
        case "lane":
            return f"{plain(backlog.lanes[0].name)}, whose messages run one after the other"
        case "handlers":
            return "how many handlers run at once"
        case _:
            return f"reading and ordering, {backlog.cost_us:.0f} µs a message on each of {counted(tasks, 'core')}"


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
