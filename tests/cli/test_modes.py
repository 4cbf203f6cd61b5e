"""C12: on the command line. Consume in shared and broadcast groups, list the groups, and decide the order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import inturn
from inturn import ConsumerSettings
from tests.cli.conftest import Cli
from tests.contract.bed import WAIT_S, eventually


def test_a_shared_group_prints_each_message_once_and_goes_on_where_it_was(orders: Cli) -> None:
    first = orders("consume", "orders", "--group", "crew", "--mode", "shared", "--limit", "12", "--json")
    assert len(first.json_lines) == 12
    rest = orders("consume", "orders", "--group", "crew", "--mode", "shared", "--visibility-s", "5")
    assert len(rest.out.splitlines()) == 18
    assert rest.err == "18 messages; lag of group crew on orders: 0\n"
    described = orders("group", "describe", "crew", "--json").json["subjects"][0]
    assert (described["mode"], described["lag"]) == ("shared", 0)


def test_a_broadcast_group_prints_everything_to_each_name(orders: Cli, tmp_path: Path) -> None:
    how = ("consume", "orders", "--group", "caches", "--mode", "broadcast", "--offsets", str(tmp_path / "own"))
    for name in ("one", "two"):
        assert len(orders(*how, "--name", name, "--json").json_lines) == 30
    assert orders("produce", "orders", stdin="more\n").code == 0
    ran = orders(*how, "--name", "one", "--order", "key")
    assert (len(ran.out.splitlines()), ran.err) == (1, "1 message\n")
    assert sorted(path.name for path in (tmp_path / "own" / "orders" / "caches").glob("*.json")) == [
        "one.json", "two.json",
    ]  # fmt: skip
    described = orders("group", "describe", "caches", "--json").json["subjects"][0]
    assert (described["mode"], described["partitions"]) == ("broadcast", [])
    assert "only the member knows its progress" in orders("group", "describe", "caches").out
    assert "–" in orders("group", "list").out


def test_damaged_offsets_are_an_error_with_a_next_step(orders: Cli, tmp_path: Path) -> None:
    how = ("consume", "orders", "--group", "caches", "--mode", "broadcast", "--offsets", str(tmp_path / "own"))
    assert orders(*how).code == 0
    (tmp_path / "own" / "orders" / "caches" / "consumer.json").write_text("{")
    error = orders(*how, "--json").error
    assert error["type"] == "OffsetsUnusable"
    assert "remove it to begin" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--mode", "shared"], "--group"),
        (["--name", "x"], "--group"),
        (["--group", "g", "--visibility-s", "5"], "--mode shared"),
        (["--group", "g", "--mode", "mine"], "exclusive"),
    ],
)
def test_options_that_do_not_go_together_are_told(orders: Cli, arguments: list[str], complaint: str) -> None:
    ran = orders("consume", "orders", *arguments)
    assert ran.code == 2
    assert complaint in ran.err


def test_what_the_library_refuses_is_said_in_its_words(orders: Cli) -> None:
    how = ("consume", "orders", "--group", "g", "--json", "--mode")
    assert "keeps no order" in orders(*how, "shared", "--order", "key").error["message"]
    assert "give offsets=" in orders(*how, "broadcast").error["message"]
    assert orders("consume", "orders", "--group", "crew", "--mode", "shared").code == 0
    assert orders("consume", "orders", "--group", "crew", "--json").error["type"] == "GroupConflict"


def test_a_shared_group_is_described_with_what_is_outstanding_and_what_came_again(orders: Cli) -> None:
    may_end, tried = threading.Event(), threading.Event()

    def handle(message: inturn.Message, context: inturn.Context) -> object:
        if message.offset:
            return None
        if context.attempt == 1:
            return inturn.suspend(0.01)
        tried.set()
        may_end.wait(60)
        return None

    with inturn.connect(orders.data) as mq:
        settings = ConsumerSettings(concurrency=8)
        with mq.consumer("orders", "crew", handle, mode="shared", settings=settings, name="ann"):
            assert tried.wait(WAIT_S)
            eventually(
                lambda: sum(one.redeliveries for one in mq.group("orders", "crew").describe().partitions) == 3, "again"
            )
            eventually(lambda: mq.group("orders", "crew").describe().lag == 3, "the others are acknowledged")
            described = orders("group", "describe", "crew", "--json").json["subjects"][0]
            assert (described["mode"], described["order"]) == ("shared", "none")
            assert sum(one["outstanding"] for one in described["partitions"]) == 3
            assert sum(one["redeliveries"] for one in described["partitions"]) == 3
            shown = orders("group", "describe", "crew").out
            assert "mode shared" in shown
            for column in ("outstanding", "waiting", "redeliveries"):
                assert column in shown
            assert "owner" not in shown
            may_end.set()


def test_an_order_is_decided_and_undone(orders: Cli) -> None:
    assert orders("consume", "orders", "--group", "billing", "--order", "key").code == 0
    said = orders("group", "set", "billing", "--subject", "orders", "--order", "partition", "--json").json
    assert said == {"group": "billing", "subject": "orders", "order": "partition", "set_order": "partition"}
    assert "partition, as was set" in orders("group", "describe", "billing").out
    assert orders("consume", "orders", "--group", "billing", "--order", "key").code == 0, "it follows"
    assert "order none" in orders("group", "set", "billing", "-s", "orders", "--order", "none").err
    error = orders("consume", "orders", "--group", "billing", "--order", "key", "--json").error
    assert "inturn group set" in error["message"]
    unset = orders("group", "set", "billing", "-s", "orders", "--order", "asked")
    assert "keep the order of their settings" in unset.err
    assert orders("consume", "orders", "--group", "billing", "--order", "key").code == 0
    assert orders("group", "set", "nobody", "-s", "orders", "--order", "key", "--json").error["type"] == "NotFound"
