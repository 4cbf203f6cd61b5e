from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import inturn
from inturn.cli import logs
from inturn.cli.checkout import from_checkout
from inturn.cli.screen import printable
from inturn.model.logs import get_logger
from tests.cli.conftest import Cli

COMMANDS = [
    [],
    ["subject"],
    ["subject", "create"],
    ["subject", "list"],
    ["subject", "describe"],
    ["produce"],
    ["consume"],
    ["group"],
    ["group", "list"],
    ["group", "describe"],
    ["group", "reset"],
    ["serve"],
    ["broker-group"],
    ["broker-group", "list"],
    ["broker-group", "set"],
    ["top"],
    ["doctor"],
    ["demo"],
    ["bench"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(cli: Cli, command: list[str]) -> None:
    ran = cli(*command, "--help")
    assert ran.code == 0
    assert "Usage: " in ran.out
    if command not in (["subject"], ["group"], ["broker-group"]):
        assert "$ inturn" in ran.out


def test_the_version_is_printed(cli: Cli) -> None:
    assert cli("--version").out == f"inturn {inturn.__version__}\n"


def test_completion_can_be_installed(cli: Cli) -> None:
    assert "--install-completion" in cli("--help").out


def test_an_unknown_command_is_wrong_usage(cli: Cli) -> None:
    assert cli("nosuch").code == 2


@pytest.mark.parametrize(("command", "package"), [("demo", "demo"), ("bench", "benchmarks")])
def test_an_installed_wheel_says_in_one_line_how_to_get_the_demo_and_the_benchmarks(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as in an environment with only the wheel
    arguments = [command, *(["all"] if command == "bench" else [])]
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.count("\n") == 1
    assert f"'{package}' is part of the repository" in ran.err
    assert f"run `make {command}` there" in ran.err
    assert cli(*arguments, "--json").error["type"] == "InvalidInput"


def test_a_checkout_that_misses_a_module_is_not_taken_for_a_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_checkout.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        from_checkout("broken_checkout", "make demo")


def test_help_is_quick() -> None:
    """The limit is about five times the load time of the dependencies.

    Processor time, because the machine may be busy.
    """

    def takes_s(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    made_of_s = min(takes_s("import asyncio, sqlite3, msgspec, rich.console, structlog, typer") for _ in range(3))
    assert min(takes_s("from inturn.cli.main import app; app(['--help'])") for _ in range(3)) < 12 * made_of_s


def test_the_folder_is_an_option_too(cli: Cli) -> None:
    other = cli.data.with_name("other")
    assert cli("subject", "create", "orders", "--data", str(other)).code == 0
    assert [one["name"] for one in cli("subject", "list", "-d", str(other), "--json").json["subjects"]] == ["orders"]
    assert not cli.data.exists()


def test_warnings_of_the_library_are_short_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(is_json=False)
    logger = get_logger("inturn.test")
    logger.info("test.hidden")
    logger.warning("test.shown", partition=3, error=None)
    logger.warning("test.shown", partition=3)  # a repetition is left out
    logs.mute("test.muted", command="Pull")
    logger.warning("test.muted", command="Pull")
    logger.warning("test.muted", command="Commit")
    assert capsys.readouterr().err == "warning: test.shown partition=3\nwarning: test.muted command=Commit\n"


def test_warnings_are_json_lines_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(is_json=True)
    get_logger("inturn.test").warning("test.shown", partition=3)
    lines = [json.loads(line)["log"] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        {"event": "test.shown", "partition": 3, "level": "warning"},
    ]


def test_control_characters_never_reach_the_terminal() -> None:
    assert printable("plain ü") == "plain ü"
    assert printable("\x1b[31m\n\u202e") == "\\x1b[31m\\n\\u202e"
