"""`inturn top`: all groups, live."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console

import inturn
from inturn.cli.top_view import GroupRow, TopBoard, frame, sparkline
from inturn.protocol.commands import GroupDescription, GroupPartition, KeyDescription
from inturn.server.folder import socket_path
from tests.cli import troubled
from tests.cli.conftest import Cli
from tests.contract.bed import eventually

# Ctrl-C reaches a process only from the controlling terminal of the process.
IN_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from inturn.cli.main import app; app()"
KEY = KeyDescription(b"customer-4711", 0, "failing", 17, 3, "boom", 0, 1234)


def row(group: str = "billing", lag: int = 100, appended_per_s: float = 0.0, done_per_s: float = 0.0) -> GroupRow:
    return GroupRow("orders", group, 2, 4, appended_per_s, done_per_s, lag, None, ((0.0, lag),))


def described(group: str, lag: int, blocking: tuple[KeyDescription | None, ...] = (None,)) -> GroupDescription:
    partitions = [
        GroupPartition(index, 0, lag if index == 0 else 0, "a", 1, 5.0, 0, 2.5, one)
        for index, one in enumerate(blocking)
    ]
    return GroupDescription("orders", group, ("a", "b"), tuple(partitions))


def text_of(rows: list[GroupRow], columns: int, lines: int | None = None) -> list[str]:
    out = io.StringIO()
    Console(width=columns, file=out).print(frame(rows, 60.0, columns, lines))
    return out.getvalue().splitlines()


# Data


def test_the_largest_lag_comes_first() -> None:
    rows = TopBoard().rows([(described("a", 5), 1.0), (described("b", 70), 1.0), (described("c", 5), 1.0)], 0.0)
    assert [(one.group, one.lag) for one in rows] == [("b", 70), ("a", 5), ("c", 5)]


def test_a_group_is_the_sum_of_its_partitions() -> None:
    small = KeyDescription(b"small", 1, "blocked", 1, 1, "", 0, 2)
    (one,) = TopBoard().rows([(described("a", 5, (None, small, KEY)), 4.0)], 0.0)
    assert (one.members, one.partitions, one.appended_per_s, one.done_per_s) == (2, 3, 4.0, 7.5)
    assert one.blocking is KEY


@pytest.mark.parametrize(
    ("lag", "appended_per_s", "done_per_s", "trend", "eta_s"),
    [
        (0, 5.0, 5.0, "none", None),
        (0, 0.0, 5.0, "none", None),
        (100, 0.0, 0.0, "steady", None),
        (100, 5.0, 0.0, "growing", None),
        (100, 5.0, 15.0, "shrinking", 10.0),
    ],
)
def test_when_the_lag_is_gone_is_told_only_if_it_shrinks(
    lag: int, appended_per_s: float, done_per_s: float, trend: str, eta_s: float | None
) -> None:
    one = row(lag=lag, appended_per_s=appended_per_s, done_per_s=done_per_s)
    assert (one.trend, one.eta_s) == (trend, eta_s)


def test_only_the_last_minute_is_remembered_and_only_of_groups_that_are_there() -> None:
    board = TopBoard()
    for second in range(200):
        rows = board.rows([(described("a", second), 0.0), (described("b", 1), 0.0)], float(second))
    assert len(rows[0].lags) == 60
    assert rows[0].lags[-1] == (199.0, 199)
    board.rows([(described("a", 1), 0.0)], 200.0)
    assert list(board._lags) == [("orders", "a")]


def test_a_sparkline_shows_how_the_lag_went() -> None:
    assert sparkline([(float(second), second) for second in range(60)], 59.5, 6) == "▃▄▅▆▇█"
    assert sparkline([(59.0, 7)], 59.5, 6) == "     █", "nothing is known of the time before"
    assert sparkline([(0.0, 8), (58.0, 1)], 59.5, 4) == "███▂"
    assert sparkline([(59.0, 0)], 59.5, 3) == "  ▁"
    assert sparkline([], 59.5, 3) == "   "


# The picture


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140])
def test_the_picture_fits_the_terminal_and_numbers_are_whole(columns: int) -> None:
    rows = [
        GroupRow("orders.of-all-countries", "the-billing-department", 0, 16, 1200.4, 2300.0, 1234567, KEY, ((0.0, 9),)),
        row("[red]b[/red]", lag=83201, appended_per_s=3.0),
    ]
    lines = text_of(rows, columns)
    assert max(len(line) for line in lines) <= columns
    shown = "\n".join(lines)
    assert "1,234,567" in shown
    assert "▲ growing" in shown
    assert "▼ 18 min" in shown
    assert ("last minute" in shown) == (columns >= 100)
    assert ("members" in shown) == (columns >= 80)
    assert ("2,300" in lines[2]) == (columns >= 60)
    assert "blocking: customer-4711 failing," in shown
    if columns >= 100:
        assert "customer-4711 failing, 3 attempts, 1,234 waiting, the-billing-department on" in shown
        assert "[red]b[/red]" in shown


@pytest.mark.parametrize("lines", [5, 8, 12, 40])
def test_the_picture_is_not_higher_than_the_terminal(lines: int) -> None:
    rows = [row(f"g{number}", lag=100 - number) for number in range(20)]
    shown = text_of(rows, 100, lines)
    assert len(shown) < lines
    assert "g0" in shown[2]
    assert ("less lag" in shown[-1]) == (lines < 20)


# The command


def test_once_as_json(orders: Cli) -> None:
    orders("consume", "orders", "--group", "audit", "--limit", "10")
    orders("consume", "orders", "--group", "billing", "--limit", "5")
    found = orders("top", "--once", "--json").json
    assert [(one["subject"], one["group"], one["lag"]) for one in found["groups"]] == [
        ("orders", "billing", 25),
        ("orders", "audit", 20),
    ]
    assert set(found["groups"][0]) == {
        "subject",
        "group",
        "members",
        "partition_count",
        "appended_per_s",
        "done_per_s",
        "lag",
        "trend",
        "eta_s",
        "blocking",
    }
    assert abs(found["at_ms"] - time.time() * 1000) < 60_000


def test_without_a_terminal_it_looks_once(orders: Cli) -> None:
    orders("consume", "orders", "--group", "audit", "--limit", "10")
    ran = orders("top")
    assert ran.code == 0
    assert "audit" in ran.out
    assert "\x1b" not in ran.out


def test_no_groups_is_no_error(orders: Cli) -> None:
    assert orders("top", "--once", "--json").json["groups"] == []
    assert "no groups yet" in orders("top").err


def test_no_folder_is_an_error(cli: Cli) -> None:
    assert cli("top", "--once", "--json").error["type"] == "InvalidInput"


def test_the_blocking_key_is_named(cli: Cli) -> None:
    troubled.make(cli.data, "block")
    (found,) = [one for one in cli("top", "--once", "--json").json["groups"] if one["subject"] == "orders"]
    blocking = found["blocking"]
    assert (blocking["key"], blocking["state"], blocking["attempts"]) == ("bad", "blocked", 2)
    assert re.search(r"blocking: bad blocked, 2 attempts, \d waiting, billing on orders", cli("top").out)


def test_rates_of_a_process_that_works_on_the_folder(orders: Cli) -> None:
    with inturn.connect(orders.data, flush="os") as mq, mq.consumer("orders", "billing", lambda message, context: None):
        with mq.producer() as producer:
            for number in range(50):
                producer.send("orders", b"x", key=b"%d" % number)
        looks: list[dict[str, Any]] = []

        def is_done() -> bool:
            looks[:] = orders("top", "--once", "--json").json["groups"]
            return bool(looks) and looks[0]["lag"] == 0

        eventually(is_done, "all is done")
        (found,) = looks
        assert found["members"] == 1
        assert found["appended_per_s"] > 0
        assert found["done_per_s"] > 0
        address = f"inturn+unix://{socket_path(orders.data)}"
        assert orders("top", "--once", "--json", "--server", address).json["groups"][0]["group"] == "billing"


def test_json_has_one_object_for_each_look(orders: Cli) -> None:
    orders("consume", "orders", "--group", "audit", "--limit", "10")
    process = orders.process("top", "--json", "--interval", "0.1")
    assert process.stdout is not None
    looks = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert [one["groups"][0]["lag"] for one in looks] == [20, 20, 20]
    assert looks[0]["at_ms"] < looks[2]["at_ms"]


def test_json_says_soon_that_the_server_cannot_be_reached_and_goes_on_when_it_can(orders: Cli) -> None:
    with orders.serve() as served:
        port = served.address.rpartition(":")[2]
        process = orders.process("top", "--json", "--interval", "0.1", "--server", served.address)
        assert process.stdout is not None
        assert "groups" in json.loads(process.stdout.readline())
        served.end(signal.SIGKILL)
        began_s = time.monotonic()
        while "error" not in (look := json.loads(process.stdout.readline())):
            assert "groups" in look
        assert time.monotonic() - began_s < 20
    assert look["error"]["type"] == "ConnectionLost"
    assert set(look) == {"at_ms", "error"}
    with orders.serve("--port", port):
        while "groups" not in json.loads(process.stdout.readline()):
            pass
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_live_says_soon_that_the_server_cannot_be_reached_and_q_ends_it(orders: Cli) -> None:
    orders("consume", "orders", "--group", "audit", "--limit", "10")
    with orders.serve() as served:
        process, terminal = _in_terminal(orders, "--server", served.address)
        _read(terminal, b"q ends", b"audit")
        served.end(signal.SIGKILL)
        began_s = time.monotonic()
        _read(terminal, b"no connection to")
        os.write(terminal, b"q")
        _read_to_end(terminal)
        assert time.monotonic() - began_s < 20
    os.close(terminal)
    assert process.wait(60) == 0


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_live_in_a_terminal_until_q_or_ctrl_c(orders: Cli, end: bytes) -> None:
    orders("consume", "orders", "--group", "audit", "--limit", "10")
    process, mine = _in_terminal(orders)
    shown = _read(mine, b"q ends", b"audit")
    os.write(mine, end)
    shown += _read_to_end(mine)
    os.close(mine)
    assert process.wait(60) == 0
    assert shown.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in shown, "the terminal is as it was"
    assert b"Traceback" not in shown


def _in_terminal(cli: Cli, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """`inturn top` in a terminal, and the test's end of the terminal."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, "top", "--interval", "0.1", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "INTURN_DATA": str(cli.data), "TERM": "xterm", "COLUMNS": "100", "LINES": "20"},
    )
    os.close(theirs)
    return process, mine


def _read(fd: int, *wanted: bytes) -> bytes:
    shown = b""
    until_s = time.monotonic() + 60
    while not all(one in shown for one in wanted):
        assert time.monotonic() < until_s, shown
        if select.select([fd], [], [], 1.0)[0]:
            shown += os.read(fd, 65536)
    return shown


def _read_to_end(fd: int) -> bytes:
    shown = b""
    while True:
        try:
            some = os.read(fd, 65536)
        except OSError:  # how a terminal ends on Linux
            return shown
        if not some:
            return shown
        shown += some
