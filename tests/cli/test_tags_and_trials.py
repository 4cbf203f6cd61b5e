"""Tags and trials on the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import inturn
from inturn import Connection, Context, Message
from tests.cli.conftest import Cli
from tests.contract.bed import eventually


@pytest.fixture
def tagged(cli: Cli) -> Cli:
    """The subject orders with a single partition: 0 and 1 are paid, 2 is shipped, 3 has no tag."""
    cli("subject", "create", "orders", "--partitions", "1")
    for lines, tags in (("a\nb\n", ["--tag", "paid"]), ("c\n", ["--tag", "shipped", "--tag", "late"]), ("d\n", [])):
        assert cli("produce", "orders", *tags, stdin=lines).code == 0
    return cli


@pytest.mark.parametrize(
    ("expression", "bodies"),
    [("paid", ["a", "b"]), ("late||gone", ["c"]), ("paid || shipped", ["a", "b", "c"]), ("*", ["a", "b", "c", "d"])],
)
def test_messages_are_looked_at_by_their_tags(tagged: Cli, expression: str, bodies: list[str]) -> None:
    """B7"""
    found = tagged("consume", "orders", "--tags", expression, "--json").json_lines
    assert [one["body"] for one in found] == bodies


def test_a_member_of_a_group_prints_what_has_its_tags_and_passes_the_rest(tagged: Cli) -> None:
    """B7: the offset moves past all messages."""
    ran = tagged("consume", "orders", "--group", "billing", "--tags", "shipped || paid", "--json")
    assert [one["body"] for one in ran.json_lines] == ["a", "b", "c"]
    described = tagged("group", "describe", "billing", "--json").json["subjects"][0]
    assert described["lag"] == 0
    assert described["tags"] is None, "nobody is there any more"


def test_the_tags_of_a_group_are_shown(tagged: Cli) -> None:
    """B7"""
    with inturn.connect(tagged.data) as mq, mq.consumer("orders", "g", lambda message, context: None, tags="b||a"):
        wait_for_member(mq)
        assert tagged("group", "describe", "g", "--json").json["subjects"][0]["tags"] == "a || b"
        assert "a || b" in tagged("group", "describe", "g").out


def test_a_wrong_expression_is_told(tagged: Cli) -> None:
    """B7"""
    for more in ([], ["--group", "g"]):
        error = tagged("consume", "orders", "--tags", "a || ", "--json", *more).error
        assert error["type"] == "InvalidInput"
        assert "'a || '" in error["message"]


def wait_for_member(mq: Connection) -> None:
    eventually(lambda: mq.group("orders", "g").describe().members, "somebody has joined")


def handle(message: Message, context: Context) -> None:
    if context.is_direct and message.body == b"b":
        raise ValueError("no such [account]")


@pytest.fixture
def working(tagged: Cli) -> Iterator[Cli]:
    with inturn.connect(tagged.data) as mq, mq.consumer("orders", "g", handle, name="worker"):
        wait_for_member(mq)
        yield tagged


def tried(cli: Cli, offset: int, *more: str, member: str = "worker") -> list[str]:
    where = ["--group", "g", "--member", member, "--partition", "0", "--offset", str(offset)]
    return ["group", "try", "orders", *where, *more]


def test_a_message_is_tried_and_the_result_is_shown(working: Cli) -> None:
    """C16"""
    ran = working(*tried(working, 0))
    assert ran.code == 0
    assert ran.out.startswith("success after ")
    told = working(*tried(working, 0, "--json")).json
    assert (told["result"], told["error"], told["offset"]) == ("success", None, 0)
    assert told["member"].startswith("worker-")


def test_a_message_that_fails_is_shown_with_where_and_the_command_fails(working: Cli) -> None:
    """C16"""
    ran = working(*tried(working, 1))
    assert ran.code == 1
    assert "exception after" in ran.out
    assert "ValueError: no such [account]" in ran.out
    assert "in handle" in ran.out
    ran = working(*tried(working, 1, "--json"))
    assert ran.code == 1
    assert ran.json["error"] == "ValueError: no such [account]"
    assert "in handle" in ran.json["traceback"]


def test_who_or_what_is_not_there_is_told(working: Cli) -> None:
    """C16"""
    assert "it has worker-" in working(*tried(working, 0, "--json", member="nobody")).error["message"]
    assert "the partition ends at 4" in working(*tried(working, 4, "--json")).error["message"]
