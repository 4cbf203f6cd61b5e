"""`inturn`: the command line. A command is in the module of its name; this module registers all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from inturn.cli import (
    audit,
    broker_group,
    checkout,
    consume,
    dead_letter,
    doctor,
    drain,
    group,
    key,
    outbox,
    produce,
    serve,
    subject,
    token,
    top,
)
from inturn.cli.options import examples

app = typer.Typer(
    name="inturn",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=examples(
        "inturn subject create orders --partitions 4",
        "inturn produce orders orders.jsonl --key-field customer.id",
        "inturn consume orders --limit 10",
        "inturn group describe billing",
        "inturn top",
        "inturn serve ./data",
        "inturn key list orders --group billing",
        "inturn drain orders --group billing --handler shop:bill",
        "inturn doctor",
    ),
)


def _print_version(asked: bool) -> None:
    if asked:
        from inturn import __version__

        typer.echo(f"inturn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Ordered messaging in a folder: messages of a key are handled in the order in which they were sent.

    All commands work on a folder: --data, or the environment variable INTURN_DATA, or ./data. Several processes may
    use a folder at once. Or on a server (`inturn serve`): --server, or INTURN_SERVER. The token is in INTURN_TOKEN, or
    in the file INTURN_TOKEN_FILE; the variables for TLS are INTURN_TLS_CA, INTURN_TLS_CERT and INTURN_TLS_KEY.
    """


app.add_typer(subject.app, name="subject")
app.command("produce", epilog=produce.EXAMPLES)(produce.produce)
app.command("consume", epilog=consume.EXAMPLES)(consume.consume)
app.add_typer(group.app, name="group")
app.command("top", epilog=top.EXAMPLES)(top.top)
app.command("serve", epilog=serve.EXAMPLES)(serve.serve)
app.add_typer(broker_group.app, name="broker-group")
app.add_typer(token.app, name="token")
app.add_typer(key.app, name="key")
app.add_typer(dead_letter.app, name="dead-letter")
app.add_typer(outbox.app, name="outbox")
app.command("drain", epilog=drain.EXAMPLES)(drain.drain)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("audit", epilog=audit.EXAMPLES)(audit.audit)
app.command("demo", epilog=checkout.DEMO_EXAMPLES)(checkout.run_demo)
app.command("bench", epilog=checkout.BENCH_EXAMPLES)(checkout.run_bench)
