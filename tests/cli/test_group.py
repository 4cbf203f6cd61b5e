from __future__ import annotations

import re
import time

import pytest

import inturn
from inturn import AssignmentStrategy, ConsumerSettings
from tests.cli import troubled
from tests.cli.conftest import Cli
from tests.contract.bed import eventually


@pytest.fixture
def billing(orders: Cli) -> Cli:
    assert orders("consume", "orders", "--group", "billing").code == 0
    return orders


def test_groups_are_listed_with_their_lag(billing: Cli) -> None:
    billing("consume", "orders", "--group", "audit", "--limit", "10")
    listed = billing("group", "list", "--json").json["groups"]
    assert [(one["group"], one["subject"], one["lag"]) for one in listed] == [
        ("audit", "orders", 20),
        ("billing", "orders", 0),
    ]
    assert "billing" in billing("group", "list").out


def test_no_groups_is_no_error(orders: Cli) -> None:
    assert orders("group", "list", "--json").json == {"groups": []}
    assert "no groups yet" in orders("group", "list").err


def test_a_group_is_described_on_all_its_subjects(billing: Cli) -> None:
    billing("subject", "create", "parcels", "--partitions", "2")
    billing("produce", "parcels", stdin="a\nb\nc\n")
    billing("consume", "parcels", "--group", "billing", "--limit", "1")
    described = billing("group", "describe", "billing", "--json").json
    assert described["lag"] == 2
    assert [one["subject"] for one in described["subjects"]] == ["orders", "parcels"]
    partition = described["subjects"][0]["partitions"][0]
    assert set(partition) == {
        "partition",
        "waits_for",
        "committed",
        "end_offset",
        "lag",
        "owner",
        "epoch",
        "remaining_s",
        "finished_count",
        "done_per_s",
        "blocking",
        "outstanding",
        "waiting",
        "redeliveries",
    }
    assert partition["committed"] == partition["end_offset"]
    assert partition["epoch"] == 1
    only = billing("group", "describe", "billing", "--subject", "parcels", "--json").json
    assert [one["subject"] for one in only["subjects"]] == ["parcels"]
    assert "total lag on 2 subjects: 2" in billing("group", "describe", "billing").out


def test_the_members_of_a_group_that_runs_are_described(orders: Cli) -> None:
    seen: list[int] = []
    with inturn.connect(orders.data, flush="os") as mq:
        settings = ConsumerSettings(commit_interval_s=0.01, assignment=AssignmentStrategy.CIRCLE)
        handler = lambda message, context: seen.append(message.offset)  # noqa: E731
        with mq.consumer("orders", "billing", handler, order="key", settings=settings, name="worker"):
            eventually(lambda: len(seen) == 30, "all are handled")
            eventually(lambda: mq.group("orders", "billing").describe().lag == 0, "all are committed")
            (described,) = orders("group", "describe", "billing", "--json").json["subjects"]
            text = orders("group", "describe", "billing").out
    (name,) = described["members"]
    assert name.startswith("worker-")
    (member,) = described["member_details"]
    assert (member["name"], member["assigned"], member["held"]) == (name, [0, 1, 2], [0, 1, 2])
    assert abs(member["since_ms"] - time.time() * 1000) < 60_000
    assert (described["order"], described["assignment"]) == ("key", "circle")
    assert described["done_per_s"] == pytest.approx(sum(one["done_per_s"] for one in described["partitions"]))
    assert described["done_per_s"] > 0
    assert {one["owner"] for one in described["partitions"]} == {name}
    for shown in ("assignment circle", "online since", "done/s", name):
        assert shown in text


def test_the_key_that_blocks_a_partition_is_named(cli: Cli) -> None:
    troubled.make(cli.data, "block")
    described = cli("group", "describe", "billing", "--json").json["subjects"][0]
    blocking = described["partitions"][0]["blocking"]
    assert (blocking["key"], blocking["state"], blocking["attempts"], blocking["offset"]) == ("bad", "blocked", 2, 0)
    assert re.search(r"0 +bad +blocked +2 +\d", cli("group", "describe", "billing").out)


def test_an_unknown_group_is_told(billing: Cli) -> None:
    assert billing("group", "describe", "nosuch", "--json").error["type"] == "NotFound"
    assert billing("group", "describe", "billing", "--subject", "nosuch", "--json").error["type"] == "NotFound"
    reset = ["group", "reset", "nosuch", "--subject", "orders", "--to", "first", "--yes", "--json"]
    assert billing(*reset).error["type"] == "NotFound"


def test_a_dry_run_shows_and_changes_nothing(billing: Cli) -> None:
    shown = billing("group", "reset", "billing", "--subject", "orders", "--to", "first", "--dry-run", "--json").json
    assert shown["done"] is False
    assert sum(one["before"] for one in shown["partitions"]) == 30
    assert {one["after"] for one in shown["partitions"]} == {0}
    assert billing("group", "describe", "billing", "--json").json["lag"] == 0


def test_a_reset_moves_the_group(billing: Cli) -> None:
    reset = ["group", "reset", "billing", "--subject", "orders", "--yes", "--json", "--to"]
    assert billing(*reset, "first").json["done"] is True
    assert billing("group", "describe", "billing", "--json").json["lag"] == 30
    assert {one["after"] for one in billing(*reset, "2").json["partitions"]} == {2}
    assert len(billing("consume", "orders", "--group", "billing", "--json").json_lines) == 24
    billing(*reset, "2020-01-31T12:00")
    assert billing("group", "describe", "billing", "--json").json["lag"] == 30
    billing(*reset, "last")
    assert billing("group", "describe", "billing", "--json").json["lag"] == 0


@pytest.mark.parametrize(("answer", "lag"), [("n\n", 0), ("", 0), ("y\n", 30)])
def test_a_reset_asks_first(billing: Cli, answer: str, lag: int) -> None:
    ran = billing("group", "reset", "billing", "--subject", "orders", "--to", "first", stdin=answer)
    assert ran.code == (0 if lag else 1)
    assert "lag after" in ran.out
    assert billing("group", "describe", "billing", "--json").json["lag"] == lag


def test_json_never_asks(billing: Cli) -> None:
    ran = billing("group", "reset", "billing", "--subject", "orders", "--to", "first", "--json", stdin="y\n")
    assert (ran.code, ran.out) == (2, "")
