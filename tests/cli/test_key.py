from __future__ import annotations

import getpass
import threading

import pytest

import inturn
from inturn.cli import key as key_commands
from tests.cli import troubled
from tests.cli.conftest import Cli

GROUP = ["--group", "billing"]


@pytest.fixture
def parked(cli: Cli) -> Cli:
    """The keys bad (offsets 0 and 2) and worse (offset 3) are parked."""
    troubled.make(cli.data, "park")
    return cli


@pytest.fixture
def blocked(cli: Cli) -> Cli:
    troubled.make(cli.data, "block")
    return cli


def work(cli: Cli, *, until: int) -> list[bytes]:
    """Run consumers that succeed until the given number of keys is left. Return the handled bodies."""
    handled: list[bytes] = []

    def handle(message: inturn.Message, context: inturn.Context) -> None:
        handled.append(message.body)

    def is_over(mq: inturn.Connection) -> bool:
        keys = mq.group("orders", "billing").keys()
        return len(keys) == until and not any(one.requests for one in keys)

    with inturn.connect(cli.data, flush="os") as mq:
        troubled.consume(mq, lambda: is_over(mq), "park", handler=handle)
    return handled


def test_parked_keys_are_listed(parked: Cli) -> None:
    listed = parked("key", "list", "orders", *GROUP, "--json").json
    assert (listed["subject"], listed["group"]) == ("orders", "billing")
    bad, worse = sorted(listed["keys"], key=lambda one: one["offset"])
    assert bad == {
        "key": "bad", "partition": 0, "state": "parked", "offset": 0, "attempts": 2, "waiting": 1, "requests": [],
        "error": "RuntimeError: no [red]connection[/red]", "reason": "failed 2 times", "since_ms": bad["since_ms"],
    }  # fmt: skip
    assert (worse["key_base64"], worse["offset"], worse["waiting"]) == ("d29yc2X/", 3, 0)


def test_people_get_a_table(parked: Cli) -> None:
    shown = parked("key", "list", "orders", *GROUP).out
    for heading in ("key", "partition", "state", "head offset", "attempts", "last error", "age", "waiting behind"):
        assert heading in shown
    assert "no [red]connection[/red]" in shown, "markup in an error is text"
    assert "worse\\xff" in shown
    assert " s " in shown


def test_blocked_keys_are_listed(blocked: Cli) -> None:
    found = blocked("key", "list", "orders", *GROUP, "--json").json["keys"]
    assert {(one["state"], one["attempts"]) for one in found} == {("blocked", 2)}


def test_no_trouble_is_no_error(orders: Cli) -> None:
    orders("consume", "orders", *GROUP)
    assert orders("key", "list", "orders", *GROUP, "--json").json["keys"] == []
    ran = orders("key", "list", "orders", *GROUP)
    assert (ran.code, ran.out) == (0, "")
    assert "all is well" in ran.err


def test_what_is_not_there_is_told(parked: Cli) -> None:
    for command in (
        ["list", "orders"],
        ["show", "orders", "bad"],
        ["park", "orders", "bad"],
        ["resume", "orders", "bad"],
    ):
        error = parked("key", *command, "--group", "nosuch", "--json").error
        assert (error["type"], error["kind"]) == ("NotFound", "group")
    for command in (["show"], ["resume"], ["skip", "--yes"]):
        error = parked("key", command[0], "orders", "good", *command[1:], *GROUP, "--json").error
        assert error["type"] == "NotFound"
        assert "good" in error["message"]
    assert parked("key", "list", "orders").code == 2, "--group is missing"


@pytest.mark.parametrize("fixture", ["parked", "blocked"])
def test_a_key_is_shown_with_its_first_message(request: pytest.FixtureRequest, fixture: str) -> None:
    """From the parking lot, or from the log."""
    cli: Cli = request.getfixturevalue(fixture)
    shown = cli("key", "show", "orders", "bad", *GROUP, "--json").json
    assert (shown["state"], shown["offset"]) == (fixture, 0)
    head = shown["head"]
    assert (head["subject"], head["partition"], head["offset"], head["key"]) == ("orders", 0, 0, "bad")
    assert (head["body"], head["properties"]) == ('{"n": 0}', {"mine": "yes"})
    assert shown["history"] == []
    text = cli("key", "show", "orders", "bad", *GROUP).out
    assert '{"n": 0}' in text
    assert "no [red]connection[/red]" in text
    assert cli("key", "show", "orders", "worse\udcff", *GROUP, "--json").json["head"]["offset"] == 3


def test_a_request_waits_for_the_next_consumer(parked: Cli) -> None:
    ran = parked("key", "resume", "orders", "bad", *GROUP, "--why", "mended")
    assert ran.code == 0
    assert "it will be done by the next consumer that holds partition 0" in ran.out
    shown = parked("key", "show", "orders", "bad", *GROUP, "--json").json
    (request,) = shown["requests"]
    assert (request["action"], request["why"]) == ("resume", "mended")
    assert request["by"].startswith(f"{getpass.getuser()}@")
    assert "resume asked for by" in parked("key", "list", "orders", *GROUP).err
    again = parked("key", "resume", "orders", "bad", *GROUP, "--json").json
    assert (again["request_id"], again["done_at_ms"]) == (request["request_id"], None), "asked for only once"
    assert work(parked, until=1) == [b'{"n": 0}', b'{"n": 2}']
    assert [one.get("key") for one in parked("key", "list", "orders", *GROUP, "--json").json["keys"]] == [None]


def test_a_key_that_is_well_can_be_parked(parked: Cli) -> None:
    asked = parked("key", "park", "orders", "good", *GROUP, "--why", "for later", "--json").json
    assert (asked["action"], asked["key"], asked["partition"], asked["offset"]) == ("park", "good", 0, None)
    parked("produce", "orders", "--key", "good", stdin="later\n")
    assert work(parked, until=3) == []
    found = parked("key", "show", "orders", "good", *GROUP, "--json").json
    assert (found["state"], found["reason"]) == ("parked", "for later")


def test_a_skip_says_which_message(parked: Cli) -> None:
    asked = parked("key", "skip", "orders", "bad", *GROUP, "--yes", "--why", "a test", "--json").json
    assert (asked["action"], asked["offset"], asked["why"]) == ("skip", 0, "a test")
    work(parked, until=2)
    shown = parked("key", "show", "orders", "bad", *GROUP, "--json").json
    assert (shown["state"], shown["offset"], shown["head"]["body"]) == ("parked", 2, '{"n": 2}')
    (record,) = shown["history"]
    assert (record["action"], record["offset"], record["why"]) == ("skip", 0, "a test")
    assert record["done_at_ms"] is not None
    assert "skip offset 0 asked for by" in parked("key", "show", "orders", "bad", *GROUP).out


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_skip_asks_first(parked: Cli, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(key_commands, "_has_terminal", lambda: True)
    ran = parked("key", "skip", "orders", "bad", *GROUP, stdin=f"{answer}\n")
    assert '{"n": 0}' in ran.out, "it shows what would be dropped"
    assert ran.code == (0 if answer == "y" else 1)
    asked = parked("key", "show", "orders", "bad", *GROUP, "--json").json["requests"]
    assert [one["offset"] for one in asked] == ([0] if answer == "y" else [])


def test_a_skip_is_refused_where_nobody_can_be_asked(parked: Cli) -> None:
    for options in ([], ["--json"]):
        ran = parked("key", "skip", "orders", "bad", *GROUP, *options, stdin="y\n")
        assert (ran.code, ran.out) == (2, "")
        assert "--yes" in ran.err
    assert parked("key", "show", "orders", "bad", *GROUP, "--json").json["requests"] == []


def test_a_folder_that_is_open_elsewhere_is_used_with_whoever_has_it(parked: Cli) -> None:
    is_open, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with inturn.connect(parked.data):
            is_open.set()
            is_over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_open.wait(20)
    try:
        listed = parked("key", "list", "orders", *GROUP, "--json").json["keys"]
        assert "bad" in [one.get("key") for one in listed]
        assert parked("key", "resume", "orders", "bad", *GROUP, "--json").json["action"] == "resume"
    finally:
        is_over.set()
        holder.join()


def test_where_senders_choose_the_partition_the_one_with_trouble_is_meant(cli: Cli) -> None:
    with inturn.connect(cli.data, flush="os") as mq:
        mq.create_subject("orders", 2, routing="selector")
        with mq.producer() as producer:
            producer.send("orders", b"x", key="bad", selector=lambda *_: 1)
        troubled.consume(mq, lambda: troubled.states(mq) == ["parked"], "park")
    assert cli("key", "resume", "orders", "bad", *GROUP, "--json").json["partition"] == 1
    assert cli("key", "park", "orders", "other", *GROUP, "--json").error["type"] == "InvalidInput"
    assert cli("key", "park", "orders", "other", *GROUP, "--partition", "0", "--json").json["partition"] == 0


def test_a_group_is_described_with_its_keys_in_trouble(parked: Cli) -> None:
    (described,) = [
        one for one in parked("group", "describe", "billing", "--json").json["subjects"] if one["subject"] == "orders"
    ]
    assert described["keys"] == {"failing": 0, "blocked": 0, "parked": 2, "resuming": 0}
    shown = parked("group", "describe", "billing", "--subject", "orders").out
    assert "keys: 2 parked; see `inturn key list orders --group billing`" in shown


def test_consuming_with_parked_keys_needs_order_by_key(parked: Cli) -> None:
    parked("produce", "orders", "--key", "good", stdin="later\n")
    assert parked("consume", "orders", *GROUP, "--json").error["type"] == "GroupConflict"
    found = parked("consume", "orders", *GROUP, "--order", "key", "--json").json_lines
    assert [one["body"] for one in found] == ["later"]


def test_consuming_ends_where_only_blocked_keys_are_left(blocked: Cli) -> None:
    blocked("produce", "orders", "--key", "good", stdin="later\n")
    ran = blocked("consume", "orders", *GROUP, "--order", "key", "--max-attempts", "2", "--json")
    assert ran.code == 1
    assert [one["body"] for one in ran.json_lines] == ["later"]
    assert "2 keys of group billing on orders blocked" in ran.err
    assert "inturn key list orders --group billing" in ran.err
