"""`inturn token`: the tokens of clients. Works on the file; a server reloads the file within a second."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inturn.cli.options import DEFAULT_DATA, Folder, Json, examples
from inturn.cli.screen import age_text, plain
from inturn.cli.session import command
from inturn.model.errors import InvalidInput
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from inturn.security.tokens import TokenFile, TokenRecord

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Create, list and revoke the tokens of clients.")
File = Annotated[
    str | None,
    typer.Option("--tokens", metavar="FILE", help="The file of hashes. Default: tokens.json in the folder."),
]
_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@app.command(
    "create",
    epilog=examples(
        "inturn token create billing",
        "inturn token create billing --expires 90d --note 'host a'",
        "inturn token create shop --tokens /etc/inturn/tokens.json --json",
    ),
)
def create(
    principal: Annotated[
        str, typer.Argument(help="The principal of the token, as in access rules.", show_default=False)
    ],
    expires: Annotated[
        str | None, typer.Option(help="Life of the token: 12h, 90d. Default: no end.", show_default=False)
    ] = None,
    note: Annotated[str, typer.Option(help="A note for the list of tokens.")] = "",
    tokens: File = None,
    data: Folder = DEFAULT_DATA,
    json_output: Json = False,
) -> None:
    """Create a token and print it, once: only the hash is stored. A principal may have several tokens, for rotation."""
    with command(json_output) as screen:
        now_ms = time.time_ns() // 1_000_000
        expires_at_ms = None if expires is None else now_ms + _span_ms(expires)
        file = _file(tokens, data)
        file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = file.create(principal, now_ms, expires_at_ms, note)
        if screen.is_json:
            screen.json(
                {"token": token, "principal": principal, "expires_at_ms": expires_at_ms, "file": str(file.path)}
            )
            return
        screen.out.print(token, markup=False, soft_wrap=True)
        screen.note(
            f"[dim]of {plain(principal)}; it is shown only now. Its hash is in {plain(str(file.path))}. Clients take "
            "it from INTURN_TOKEN, or connect(token=…)[/dim]"
        )


@app.command("list", epilog=examples("inturn token list", "inturn token list --json"))
def list_tokens(tokens: File = None, data: Folder = DEFAULT_DATA, json_output: Json = False) -> None:
    """List tokens: ids and principals, not the tokens themselves."""
    with command(json_output) as screen:
        file = _file(tokens, data)
        records = list(file.read().by_id.values()) if file.path.exists() else []
        now_ms = time.time_ns() // 1_000_000
        if screen.is_json:
            screen.json({"tokens": [_fields(one, now_ms) for one in records], "file": str(file.path)})
            return
        if not records:
            screen.note(f"no tokens in {plain(str(file.path))}; create a token with `inturn token create PRINCIPAL`")
            return
        rows = [
            [one.id, plain(one.principal), _age(one, now_ms), _expiry(one, now_ms), plain(one.note)] for one in records
        ]
        screen.table(["id", "principal", ">made", "expires", "note"], rows)


@app.command("revoke", epilog=examples("inturn token revoke 3f0a9c2e71b4"))
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The id from `inturn token list`.", show_default=False)],
    tokens: File = None,
    data: Folder = DEFAULT_DATA,
    json_output: Json = False,
) -> None:
    """Revoke a token. Servers close connections with this token about a second later."""
    with command(json_output) as screen:
        record = _file(tokens, data).revoke(token_id)
        if screen.is_json:
            screen.json({"revoked": record.id, "principal": record.principal})
            return
        screen.out.print(f"revoked {record.id} of {plain(record.principal)}")


def _file(tokens: str | None, data: str) -> TokenFile:
    from inturn.security.tokens import TOKENS_NAME, TokenFile

    if tokens is None and is_address(data):
        raise InvalidInput(f"{data!r} is an address: tokens are in a file of the server, give the file with --tokens")
    return TokenFile(Path(tokens) if tokens is not None else Path(data) / TOKENS_NAME)


def _span_ms(text: str) -> int:
    found = re.fullmatch(r"(\d{1,6})(s|min|h|d)", text)
    if found is None or not int(found[1]):
        raise InvalidInput(f"--expires {text!r}: give a number with s, min, h or d, such as 12h or 90d")
    return int(found[1]) * _UNITS_S[found[2]] * 1000


def _fields(record: TokenRecord, now_ms: int) -> dict[str, object]:
    return {
        "id": record.id,
        "principal": record.principal,
        "created_at_ms": record.created_at_ms,
        "expires_at_ms": record.expires_at_ms,
        "is_expired": record.is_expired(now_ms),
        "note": record.note,
    }


def _age(record: TokenRecord, now_ms: int) -> str:
    return f"{age_text((now_ms - record.created_at_ms) / 1000)} ago"


def _expiry(record: TokenRecord, now_ms: int) -> str:
    if record.expires_at_ms is None:
        return "[dim]never[/dim]"
    if record.is_expired(now_ms):
        return "[red]expired[/red]"
    return f"in {age_text((record.expires_at_ms - now_ms) / 1000)}"
