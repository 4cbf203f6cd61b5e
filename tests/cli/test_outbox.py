"""P8: `inturn outbox`, the scanner as a command."""

from __future__ import annotations

import json
import signal
import sqlite3
from pathlib import Path

import pytest

from inturn import Outbox
from tests.cli.conftest import Cli
from tests.contract.bed import eventually


@pytest.fixture
def shop(orders: Cli, tmp_path: Path) -> Path:
    """A database with ten messages that wait for the subject orders."""
    path = tmp_path / "shop.db"
    put(path, "orders", range(10), create=True)
    return path


def put(path: Path, subject: str, numbers: range, create: bool = False) -> None:
    outbox, connection = Outbox(), sqlite3.connect(path)
    if create:
        outbox.create_table(connection)
    for number in numbers:
        outbox.put(connection, subject, b"row %d" % number, key="k")
    connection.commit()
    connection.close()


def test_the_statements_are_printed_for_a_migration(cli: Cli, tmp_path: Path) -> None:
    printed = cli("outbox", "ddl", "--dialect", "sqlite", "--table", "letters").out
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.executescript(printed)
        connection.executescript(printed)
        Outbox(table="letters").put(connection, "orders", b"hello")
    connection.close()
    found = cli("outbox", "ddl", "--dialect", "postgresql", "--json").json
    assert (found["dialect"], found["table"]) == ("postgresql", "inturn_outbox")
    assert any("CREATE TRIGGER" in statement for statement in found["statements"])
    assert cli("outbox", "ddl", "--dialect", "mysql", "--json").error["type"] == "InvalidInput"


def test_what_is_there_is_sent_once(orders: Cli, shop: Path) -> None:
    ran = orders("outbox", "scan", "--database", str(shop), "--once", "--json")
    assert (ran.code, ran.json["sent"], ran.json["waiting"]) == (0, 10, 0)
    bodies = [line["body"] for line in orders("consume", "orders", "--json").json_lines]
    assert [body for body in bodies if body.startswith("row")] == [f"row {number}" for number in range(10)]
    assert "0 messages sent" in orders("outbox", "scan", "--database", str(shop), "--once").out


def test_rows_that_are_refused_are_told_and_the_exit_code_says_so(orders: Cli, shop: Path) -> None:
    put(shop, "no.such", range(2))
    ran = orders("outbox", "scan", "--database", f"sqlite:///{shop}", "--once", "--json")
    assert (ran.code, json.loads(ran.out)["sent"], json.loads(ran.out)["waiting"]) == (1, 10, 2)
    (row,) = json.loads(ran.out)["refused_rows"]
    assert (row["id"], row["subject"], row["key"]) == (11, "no.such", "k")
    status = orders("outbox", "status", "--database", str(shop), "--json").json
    assert (status["waiting"], status["scanner"], status["refused"][0]["attempts"]) == (2, None, 1)
    text = orders("outbox", "status", "--database", str(shop)).out
    for part in ("2 messages waiting", "scanned by nobody", "no.such", "create it first"):
        assert part in text


def test_a_scanner_runs_until_it_is_stopped_and_gives_the_lease_back(orders: Cli, shop: Path) -> None:
    process = orders.process("outbox", "scan", "--database", str(shop), "--json")
    outbox = Outbox(shop)
    eventually(lambda: outbox.status().waiting == 0, "it sends what is there")
    put(shop, "orders", range(10, 20))
    eventually(lambda: outbox.status().waiting == 0, "and what comes")
    held = orders("outbox", "scan", "--database", str(shop), "--once", "--json")
    assert held.error["type"] == "OutboxHeld"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["sent"]) == (0, 20), err
    assert outbox.status().scanner is None


def test_a_database_without_an_outbox_is_told_how_to_get_one(orders: Cli, tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    error = orders("outbox", "scan", "--database", str(path), "--once", "--json").error
    assert "no database file" in error["message"]
    assert not path.exists(), "a wrong name makes no file"
    path.touch()
    error = orders("outbox", "scan", "--database", str(path), "--once", "--json").error
    assert error["type"] == "InvalidInput"
    assert "inturn outbox ddl --dialect sqlite" in error["message"]
    assert orders("outbox", "status", "--database", "nonsense://x", "--json").error["type"] == "InvalidInput"
