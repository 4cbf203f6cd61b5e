"""`inturn audit`: prove from traces that the order was kept."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.options import Json, complete_group, complete_subject, examples
from inturn.cli.screen import plain
from inturn.cli.session import command, credentials_for

if TYPE_CHECKING:
    from inturn.spark.audit.verdict import AuditVerdict, AuditViolation

EXAMPLES = examples(
    "inturn audit ./traces",
    "inturn audit ./traces --subject orders --group billing --data ./data --complete",
    "inturn audit ./traces --json",
)


def audit(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACES...", help="Folders of traces, or files in such folders.", show_default=False),
    ],
    subject: Annotated[
        str | None,
        typer.Option("--subject", "-s", help="Only this subject.", show_default=False, autocompletion=complete_subject),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", help="Only this group.", show_default=False, autocompletion=complete_group),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            metavar="PATH",
            help="Compare with the log in this folder; needs --subject.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="ADDRESS",
            help="Compare with the log of this server; needs --subject.",
            show_default=False,
        ),
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION",
            help="With --data or --server: the tags that the group consumes, such as 'paid || shipped'.",
            show_default=False,
        ),
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="All work is done: every stored message must be finished.")
    ] = False,
    clock_skew: Annotated[
        float | None,
        typer.Option(
            help="Largest difference in seconds between the clocks of two machines.", min=0.0, show_default=False
        ),
    ] = None,
    master: Annotated[str, typer.Option(help="The Spark master.")] = "local[*]",
    json_output: Json = False,
) -> None:
    """Prove from the traces of consumers that the order was kept, on Spark. Exit code 0: kept, 1: broken.

    Consumers record a trace with ConsumerSettings(trace=FOLDER). All members of the group must record.
    With --data or --server every message of the log must be in the traces.
    """
    if data is not None and server is not None:
        raise typer.BadParameter("give --data or --server, not both")
    target = data if data is not None else server
    if target is not None and subject is None:
        raise typer.BadParameter("--data and --server need --subject: the log of which subject?")
    for path in traces:
        if "://" not in path and not os.path.exists(path):
            raise typer.BadParameter(f"there is no {path!r}; give the folder of ConsumerSettings(trace=…)")
    with command(json_output) as screen:
        from inturn.spark.audit.audit import CLOCK_SKEW_S, audit
        from inturn.spark.session import session

        known = credentials_for(target or "")
        spark = session("inturn audit", master)
        try:
            verdict = audit(
                spark,
                traces,
                log=target,
                subject=subject,
                group=group,
                tags=tags,
                complete=complete,
                clock_skew_s=CLOCK_SKEW_S if clock_skew is None else clock_skew,
                token=known.token,
                tls=known.tls,
            )
        finally:
            spark.stop()
        if screen.is_json:
            screen.json(_fields(verdict))
        else:
            colour = "green" if verdict.ok else "red"
            first, *rest = str(verdict).splitlines()
            screen.out.print(f"[{colour}]{plain(first)}[/{colour}]", soft_wrap=True)
            for line in rest:
                screen.out.print(plain(line), soft_wrap=True)
    if not verdict.ok:
        raise typer.Exit(1)


def _fields(verdict: AuditVerdict) -> dict[str, object]:
    return {
        "ok": verdict.ok,
        "violation_count": verdict.violation_count,
        "groups": [
            {
                "subject": one.subject,
                "group": one.group,
                "ok": one.ok,
                "started": one.started,
                "finished": one.finished,
                "duplicates": one.duplicates,
                "commits": one.commits,
                "lease_grants": one.lease_grants,
                "overlaps_after_lease_loss": one.overlaps_after_lease_loss,
                "parked": one.parked,
                "skipped": one.skipped,
                "unproven": one.unproven,
                "unseen_epochs": one.unseen_epochs,
                "broken": {kind.value: count for kind, count in one.broken.items()},
            }
            for one in verdict.groups
        ],
        "violations": [_violation_fields(one) for one in verdict.violations],
    }


def _violation_fields(one: AuditViolation) -> dict[str, object]:
    return {
        "kind": one.kind.value,
        "subject": one.subject,
        "group": one.group,
        "partition": one.partition,
        "offset": one.offset,
        "message": one.message,
        "evidence": [{name: getattr(item, name) for name in item.__slots__} for item in one.evidence],
    }
