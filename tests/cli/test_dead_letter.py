from __future__ import annotations

import pytest

import inturn
from tests.cli import troubled
from tests.cli.conftest import Cli

GROUP = ["--group", "billing"]


@pytest.fixture
def dead(cli: Cli) -> Cli:
    """Offsets 0, 2 and 3 of orders are dead letters."""
    troubled.make(cli.data, "dead-letter")
    return cli


def listed(cli: Cli, *options: str) -> list[int]:
    """The origins of the listed dead letters."""
    found = cli("dead-letter", "list", "orders", *GROUP, *options, "--json").json["dead_letters"]
    return sorted(one["origin"]["offset"] for one in found)


def test_dead_letters_are_listed(dead: Cli) -> None:
    found = dead("dead-letter", "list", "orders", *GROUP, "--json").json
    assert (found["subject"], found["group"], found["is_more"]) == ("orders", "billing", False)
    assert listed(dead) == [0, 2, 3]
    first = next(one for one in found["dead_letters"] if one["origin"]["offset"] == 0)
    assert first["origin"] == {"subject": "orders", "partition": 0, "offset": 0}
    assert first["attempts"] == 2
    assert (first["message"]["key"], first["message"]["body"]) == ("bad", '{"n": 0}')
    assert dead("dead-letter", "list", "orders", *GROUP, "--limit", "2", "--json").json["is_more"] is True
    ran = dead("dead-letter", "list", "orders", *GROUP, "--limit", "2")
    assert "orders/0@" in ran.out
    assert "there are more" in ran.err


def test_one_is_shown_with_all_that_belongs_to_it(dead: Cli) -> None:
    found = dead("dead-letter", "list", "orders", *GROUP, "--json").json["dead_letters"]
    offset = next(one["offset"] for one in found if one["origin"]["offset"] == 3)
    shown = dead("dead-letter", "show", "orders", str(offset), *GROUP, "--json").json
    assert shown["message"]["key_base64"] == "d29yc2X/"
    assert shown["message"]["properties"]["mine"] == "yes"
    text = dead("dead-letter", "show", "orders", str(offset), *GROUP).out
    for part in ("orders/0@3", "worse\\xff", "mine yes", '{"n": 3}'):
        assert part in text
    assert dead("dead-letter", "show", "orders", "99", *GROUP, "--json").error["type"] == "NotFound"


def test_chosen_ones_are_driven_again(dead: Cli) -> None:
    ran = dead("dead-letter", "redrive", "orders", "0", "2", *GROUP, "--json")
    assert (ran.code, ran.json["redriven"]) == (0, 2)
    assert len(listed(dead)) == 1
    again = dead("dead-letter", "redrive", "orders", "0", "1", *GROUP)
    assert "1 dead letter redriven" in again.out
    assert "1 were redriven before" in again.err
    assert dead("dead-letter", "redrive", "orders", "99", *GROUP, "--json").error["type"] == "NotFound"


def test_all_are_driven_again_and_handled_by_the_group(dead: Cli) -> None:
    assert dead("dead-letter", "redrive", "orders", "--all", *GROUP, "--json").json["redriven"] == 3
    assert listed(dead) == []
    assert "no dead letters" in dead("dead-letter", "list", "orders", *GROUP).err
    handled: list[bytes] = []

    def handle(message: inturn.Message, context: inturn.Context) -> None:
        handled.append(message.body)

    with inturn.connect(dead.data, flush="os") as mq:
        troubled.consume(mq, lambda: len(handled) == 3, "dead-letter", handler=handle)
    assert sorted(handled) == [b'{"n": 0}', b'{"n": 2}', b'{"n": 3}']


def test_which_has_to_be_said(dead: Cli) -> None:
    for which in ([], ["1", "--all"]):
        ran = dead("dead-letter", "redrive", "orders", *which, *GROUP)
        assert (ran.code, ran.out) == (2, "")
        assert "--all" in ran.err
    assert len(listed(dead)) == 3


def test_none_is_no_error_but_no_group_is(orders: Cli) -> None:
    assert orders("dead-letter", "list", "orders", *GROUP, "--json").error["type"] == "NotFound"
    orders("consume", "orders", *GROUP)
    assert orders("dead-letter", "list", "orders", *GROUP, "--json").json["dead_letters"] == []
    assert orders("dead-letter", "redrive", "orders", "--all", *GROUP, "--json").json["redriven"] == 0
