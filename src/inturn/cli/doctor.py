"""`inturn doctor`: check a folder without changing it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from inturn.cli.options import DEFAULT_DATA, Folder, Json, examples
from inturn.cli.progress import Meter
from inturn.cli.screen import Screen, counted, plain
from inturn.cli.session import check_folder, command
from inturn.cli.target import is_address
from inturn.model.errors import InvalidInput

EXAMPLES = examples("inturn doctor --data ./data", "inturn doctor --json | jq '.findings[] | select(.level != \"ok\")'")
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_SIGNS = {"ok": "✓", "warning": "!", "error": "✗"}


def doctor(data: Folder = DEFAULT_DATA, json_output: Json = False) -> None:
    """Check a folder in full, and change nothing.

    Every checksum and offset of every log is read, and the state beside them; each finding says what to do.
    Exit code 1 if there are errors; warnings say what the next opening will mend by itself.
    """
    with command(json_output) as screen:
        from inturn.doctor import Level, examine, log_bytes

        if is_address(data):
            raise InvalidInput(f"doctor reads files, and {data!r} is a server: run it where the server's folder is")
        check_folder(data)
        with Meter(screen, "reading logs", log_bytes(data), counts_messages=False) as meter:
            findings = examine(data, advance=meter.advance)
        counts = {level.value: sum(one.level is level for one in findings) for level in Level}
        if screen.is_json:
            screen.json({"ok": counts["error"] == 0, "counts": counts, "findings": [asdict(one) for one in findings]})
        else:
            for one in findings:
                _print_finding(screen, one.level.value, one.check, one.what, one.next_step)
            _print_verdict(screen, counts)
        screen.flush()
    if counts["error"]:
        raise typer.Exit(1)


def _print_finding(screen: Screen, level: str, check: str, what: str, next_step: str) -> None:
    style = _STYLES[level]
    screen.out.print(f"[{style}]{_SIGNS[level]} {check:<8}[/] {plain(what)}", soft_wrap=True)
    if next_step:
        screen.out.print(f"{'':<10} [dim]→[/dim] {plain(next_step)}", soft_wrap=True)


def _print_verdict(screen: Screen, counts: dict[str, int]) -> None:
    errors, warnings = counts["error"], counts["warning"]
    if errors:
        verdict = f"[bold red]{counted(errors, 'error')}[/], {counted(warnings, 'warning')}"
    elif warnings:
        verdict = f"[green]no errors[/], [yellow]{counted(warnings, 'warning')}[/]"
    else:
        verdict = "[green]all is well[/]"
    screen.out.print(verdict)
