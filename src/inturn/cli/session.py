"""The frame of every command: logging, errors in one line, exit codes.

0: done. 1: an error of inturn or of the system. 2: wrong usage (typer's). 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from inturn.cli.screen import Screen
from inturn.model.errors import ConnectionLost, InturnError, InvalidInput
from inturn.model.offsets import Position, parse_position, position_text
from inturn.server.folder import DATABASE_NAME
from inturn.transport.address import is_address

if TYPE_CHECKING:
    from inturn.client import Connection
    from inturn.model.settings import LogSettings
    from inturn.security.credentials import Credentials


@contextlib.contextmanager
def command(is_json: bool) -> Iterator[Screen]:
    """Run the body of a command; an error becomes a message and an exit code."""
    from inturn.cli import logs

    screen = Screen(is_json)
    logs.configure(is_json)
    try:
        yield screen
        screen.flush()
    except BrokenPipeError:  # `| head`: the reader has ended
        screen.drop_stdout()
        raise typer.Exit(0) from None
    except (InturnError, OSError) as error:
        screen.error(_unreachable(error) if isinstance(error, ConnectionLost) else error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextlib.contextmanager
def opened(data: str, *, create: bool = False, log: LogSettings | None = None) -> Iterator[Connection]:
    """A connection to the folder or the server. Unless `create`, no folder and no files are created."""
    from inturn.client import Connection

    if not create and not is_address(data):
        check_folder(data)
    with Connection(data, log=log, create=create, credentials=credentials_for(data)) as connection:
        yield connection


def credentials_for(data: str) -> Credentials:
    """The credentials of the environment, for a server. No option takes a token: other users of the machine can read
    the command line of a process."""
    from inturn.security.credentials import NONE, credentials_from_environment

    return credentials_from_environment() if is_address(data) else NONE


def _unreachable(error: ConnectionLost) -> ConnectionLost:
    """The error with the next step for a command: a command does not retry."""
    if is_address(error.address):
        next_step = "start a server with `inturn serve`, or give the right address with --server"
        error.args = (f"no server at {error.address}: {error.why}; {next_step}",)
    return error


def check_folder(data: str) -> None:
    folder = Path(data)
    if not folder.is_dir():
        raise InvalidInput(
            f"no folder {data!r}; give the right folder with --data, or create it with `inturn subject create`"
        )
    if not (folder / DATABASE_NAME).is_file():
        raise InvalidInput(
            f"folder {data!r} is no folder of inturn ({DATABASE_NAME} is missing); give the right folder with --data"
        )


def position(text: str) -> Position:
    """A position from the command line. Raises InvalidInput for any other text."""
    wrong = f"position {text[:60]!r}: use first, last, a time such as 2026-01-31T12:00, or an offset"
    try:
        parsed = parse_position(text)
        position_text(parsed)
    except (InvalidInput, ValueError, OverflowError):
        raise InvalidInput(wrong) from None
    if parsed.kind == "committed":
        raise InvalidInput(wrong)
    return parsed
