"""The audit log: the contents, the secrets that never appear, and protection against flooding and lost lines."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from inturn.errors import AccessDenied, GroupConflict, InvalidInput, NotFound
from inturn.model.time import SystemClock
from inturn.security.audit_log import AuditLog
from tests.contract.bed import Seen, eventually, quick, send
from tests.security.conftest import Serve

ACCESS = """
[[allow]]
principals = "ops"
actions = "*"
subjects = "*"
groups = "*"

[[allow]]
principals = "shop"
actions = "produce"
subjects = "orders"
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_acts_and_refusals_are_written_with_who_what_and_where(serve: Serve) -> None:
    guarded = serve("ops", "shop", access=ACCESS)
    ops, shop = guarded.connect("ops"), guarded.connect("shop")
    ops.create_subject("orders", partitions=2)
    send(shop, "orders", "k:body-secret")
    with pytest.raises(AccessDenied):
        shop.create_subject("salaries")
    with pytest.raises(AccessDenied):
        next(iter(shop.reader("orders")))
    seen = Seen()
    with ops.consumer("orders", "billing", seen, settings=quick()) as consumer:
        seen.wait_for(1)
        eventually(lambda: len(consumer.statistics().partitions) == 2, "all are held")
        with pytest.raises(GroupConflict):
            ops.group("orders", "billing").reset("first")
    ops.group("orders", "billing").reset("first")
    with pytest.raises(NotFound):
        ops.group("orders", "billing").resume("k", by="ann", why="because")
    found = guarded.audited()
    keep = ("event", "principal", "command", "subject", "group", "outcome")
    assert [tuple(one.get(name) for name in keep) for one in found] == [
        ("act", "ops", "CreateSubject", "orders", None, "done"),
        ("refused", "shop", "CreateSubject", "salaries", None, None),
        ("refused", "shop", "ResolvePosition", "orders", None, None),
        ("act", "ops", "ResetGroup", "orders", "billing", "GroupConflict"),
        ("act", "ops", "ResetGroup", "orders", "billing", "done"),
        ("act", "ops", "SteerKey", "orders", "billing", "NotFound"),
    ]
    assert found[0]["partitions"] == 2
    assert found[3]["position"] == "first"
    assert {name: found[5][name] for name in ("key", "asked", "by", "why")} == {
        "key": "k",
        "asked": "resume",
        "by": "ann",
        "why": "because",
    }
    assert all(one["address"] == "127.0.0.1" and one["at"].endswith("+00:00") for one in found)
    text = guarded.audit_file.read_text()
    assert "secret" not in text
    assert not any(token in text for token in guarded.tokens.values())


def test_dead_letters_that_are_driven_again_are_acts(serve: Serve, quiet: None) -> None:
    guarded = serve("ops", access=ACCESS)
    ops = guarded.connect("ops")
    ops.create_subject("orders", partitions=1)
    send(ops, "orders", "k:bad")

    def fail(message: object, context: object) -> None:
        raise RuntimeError("no")

    settings = quick(max_attempts=1, on_exhausted="dead-letter")
    with ops.consumer("orders", "billing", fail, order="key", settings=settings):
        eventually(lambda: ops.group("orders", "billing").dead_letters().list(), "it is a dead letter")
    assert ops.group("orders", "billing").dead_letters().redrive() == 1
    (act,) = [one for one in guarded.audited() if one["command"] == "Append"]
    assert (act["action"], act["subject"], act["group"], act["messages"]) == ("redrive", "orders", "billing", 1)


def test_through_the_socket_of_the_folder_acts_are_written_too(serve: Serve) -> None:
    guarded = serve("ops", access=ACCESS)
    guarded.local().create_subject("orders")
    (act,) = guarded.audited()
    assert (act["principal"], act["command"]) == ("%local", "CreateSubject")


class Clock(SystemClock):
    ahead_s = 0.0

    def monotonic(self) -> float:
        return 100.0 + self.ahead_s


def test_whoever_provokes_refusals_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Omitted refusals are counted. Refusals of other principals, and all acts, are still written."""
    clock = Clock()
    log = AuditLog(tmp_path / "audit.jsonl", clock)
    for _ in range(10_000):
        log.refused("mallory", principal="mallory", why="no")
    written = len(lines(tmp_path / "audit.jsonl"))
    assert 10 <= written <= 50
    log.refused("shop", principal="shop", why="no")
    log.noted("act", principal="mallory")
    clock.ahead_s += 60.0
    log.refused("mallory", principal="mallory", why="no")
    *_, shop, act, last = lines(tmp_path / "audit.jsonl")
    assert (shop["principal"], act["event"]) == ("shop", "act")
    assert last["left_out"] == 10_000 - written
    for number in range(30_000):
        log.refused(f"192.0.2.{number}", why="no")
    assert len(lines(tmp_path / "audit.jsonl")) < 1_000, "nor do many addresses"


def test_a_log_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, SystemClock())
    log.noted("one")
    os.rename(path, tmp_path / "audit.jsonl.1")
    log.noted("two")
    log.noted("three")
    log.close()
    assert [one["event"] for one in lines(tmp_path / "audit.jsonl.1")] == ["one"]
    assert [one["event"] for one in lines(path)] == ["two", "three"]
    again = AuditLog(path, SystemClock())
    again.noted("four")
    assert [one["event"] for one in lines(path)] == ["two", "three", "four"], "appended, never rewritten"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_somebody_names_cannot_break_a_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", SystemClock())
    log.noted("act", subject='x"\n{"event": "forged"}', key="\x1b[2J\u2028", odd=object())
    (found,) = lines(tmp_path / "audit.jsonl")
    assert found["subject"] == 'x"\n{"event": "forged"}'
    assert (tmp_path / "audit.jsonl").read_bytes().count(b"\n") == 1


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", SystemClock())

    def write(name: str) -> None:
        for number in range(200):
            log.noted(name, number=number, filling="x" * 500)

    threads = [threading.Thread(target=write, args=(f"t{number}",)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(lines(tmp_path / "audit.jsonl")) == 800


def test_a_log_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        AuditLog(tmp_path / "no" / "folder", SystemClock())


def test_a_disk_that_is_full_stops_nobody(tmp_path: Path) -> None:
    """The server's normal log reports the full disk."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    log = AuditLog("/dev/full", SystemClock())
    log.noted("act")
    log.close()
