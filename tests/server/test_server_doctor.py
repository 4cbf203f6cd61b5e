"""`inturn doctor --server`: problems of a running server, and the advice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

import inturn
from inturn import Connection, ConsumerSettings, Context, Message
from inturn.model.errors import AccessDenied, InturnError, InvalidInput
from inturn.protocol.commands import (
    Answer,
    Command,
    DescribeGroup,
    DescribeNode,
    DescribeSubject,
    DiskRoom,
    GroupDescription,
    GroupPartition,
    ListKeys,
    MemberDescription,
    NodeDescription,
    PartitionDescription,
    ReadyPart,
    Reply,
    RestlessLease,
    SubjectDescription,
)
from inturn.server.folder_doctor import Finding, Level
from inturn.server.server import Server
from inturn.server.server_doctor import LAG_MIN, examine_server
from tests.cli.conftest import Cli
from tests.contract.bed import Seen, eventually, quick, send, send_all


class Changed:
    """The node of a connection. Some answers are changed on the way."""

    def __init__(self, mq: Connection, changes: Mapping[Any, Callable[[Any], Answer | InturnError]]) -> None:
        self._node = mq.node
        self._changes = changes

    def submit(self, command: Command, reply: Reply) -> None:
        change = self._changes.get(type(command))
        self._node.submit(command, reply if change is None else lambda answer: reply(change(answer)))


def troubles(mq: Connection, sleep: Callable[[float], None] = lambda _: None, **changes: Any) -> list[Finding]:
    """The findings that are not ok, after changing fields of the node's description."""

    def changed(described: NodeDescription) -> NodeDescription:
        return msgspec.structs.replace(described, **changes)

    found = examine_server(Changed(mq, {DescribeNode: changed}), sleep=sleep)
    assert all(one.next_step for one in found if one.level is not Level.OK)
    return [one for one in found if one.level is not Level.OK]


@pytest.fixture
def mq(service: Server) -> Any:
    with inturn.connect(str(service.address)) as opened:
        yield opened


def test_a_server_that_is_well_is_told_so(orders: Cli) -> None:
    orders("consume", "orders", "--group", "billing")
    with orders.serve() as served:
        ran = orders("doctor", "--data", served.address, "--json")
        assert ran.code == 0
        assert (ran.json["ok"], ran.json["counts"]["warning"]) == (True, 0)
        checks = [one["check"] for one in ran.json["findings"]]
        assert checks == ["connect", "version", "ready", "clock", "disk", "leases", "log", "lag", "keys", "members"]
        text = orders("doctor", "--data", served.address)
    assert text.code == 0
    assert "all is well" in text.out
    assert "3 of 3 logs accept appends" in text.out


def test_the_option_is_that_of_the_other_commands(cli: Cli) -> None:
    ran = cli("doctor", "--server", "nowhere")
    assert ran.code == 2
    with cli.serve() as served:
        assert cli("doctor", "--server", served.address, "--json").json["ok"] is True  # although a folder is exported


def test_a_server_that_is_not_there_is_a_finding(cli: Cli) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"inturn://127.0.0.1:{nobody.getsockname()[1]}"
        ran = cli("doctor", "--server", address, "--json")
    assert (ran.code, ran.json["ok"]) == (1, False)
    (found,) = ran.json["findings"]
    assert (found["check"], found["level"]) == ("connect", "error")
    assert "Connection refused" in found["what"]
    assert found["next_step"]


def test_an_older_server_that_does_not_know_the_question_is_asked_the_rest(mq: Connection) -> None:
    mq.create_subject("orders", 1)
    refuse = {DescribeNode: lambda _: InvalidInput("frame 3 has the unknown code 78")}
    found = examine_server(Changed(mq, refuse))
    assert [one.check for one in found] == ["version", "log", "lag", "keys", "members"]
    assert found[0].level is Level.WARNING
    assert "older" in found[0].next_step


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"software": "inturn/9.9"}, "version", Level.WARNING, "inturn/9.9"),
        ({"now_ms": 0}, "clock", Level.WARNING, "behind"),
        ({"now_ms": 2**42}, "clock", Level.WARNING, "ahead of"),
        ({"disk": DiskRoom(1, 10)}, "disk", Level.ERROR, "appends are refused"),
        ({"disk": DiskRoom(30, 10)}, "disk", Level.WARNING, "30 bytes are free"),
        ({"parts": (ReadyPart("work", False, "it is stopping"),)}, "ready", Level.WARNING, "it is stopping"),
        ({"parts": (ReadyPart("state", False, "no disk"),)}, "ready", Level.ERROR, "state: no disk"),
        ({"restless": (RestlessLease("o", "g", 3, 9),)}, "leases", Level.WARNING, "o/3 in group g was granted 9 times"),
    ],
)
def test_what_a_server_says_of_itself_is_judged(
    mq: Connection, changes: Any, check: str, level: Level, words: str
) -> None:
    (found,) = troubles(mq, **changes)
    assert (found.check, found.level) == (check, level)
    assert words in found.what


@pytest.mark.parametrize("state", ["stopped", "damaged"])
def test_a_log_in_trouble_is_an_error(mq: Connection, state: str) -> None:
    mq.create_subject("orders", 2)

    def change(described: SubjectDescription) -> SubjectDescription:
        first, *rest = described.partitions
        partitions: tuple[PartitionDescription, ...] = (msgspec.structs.replace(first, state=state), *rest)
        return msgspec.structs.replace(described, partitions=partitions)

    found = examine_server(Changed(mq, {DescribeSubject: change}))
    (trouble,) = [one for one in found if one.level is not Level.OK]
    assert (trouble.check, trouble.level, trouble.partition) == ("log", Level.ERROR, "orders/0")
    assert any(one.what == "1 of 2 logs accept appends" for one in found)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("on_exhausted", "state"), [("block", "blocked"), ("park", "parked")])
def test_keys_that_wait_for_somebody_are_named(mq: Connection, on_exhausted: str, state: str) -> None:
    def handle(message: Message, context: Context) -> None:
        if message.key == b"key-3":
            raise RuntimeError("no")

    mq.create_subject("orders", 1)
    send_all(mq, "orders", 24)
    settings = quick(max_attempts=1, on_exhausted=inturn.OnExhausted(on_exhausted))
    with mq.consumer("orders", "billing", handle, order="key", settings=settings):
        eventually(mq.groups, "somebody has joined")
        eventually(lambda: [one.state for one in mq.group("orders", "billing").keys()] == [state], state)
        found = [one for one in troubles(mq) if one.check == "keys"]
    assert len(found) == 1
    assert f"1 key is {state} (key-3)" in found[0].what
    assert "inturn key resume orders KEY --group billing" in found[0].next_step


def test_a_lag_that_nobody_works_on_is_told(mq: Connection) -> None:
    mq.create_subject("orders", 1)
    with mq.consumer("orders", "billing", Seen(), settings=quick()):
        eventually(mq.groups, "the group is there")
    send_all(mq, "orders", 10)
    (found,) = troubles(mq)
    assert (found.check, found.what) == ("lag", "group billing of orders has a lag of 10, and no members")


def grouped(**changes: Any) -> Callable[[GroupDescription], GroupDescription]:
    """A group with a single member that is assigned partition 0, with changes of that partition."""
    place = GroupPartition(0, 0, LAG_MIN, "m", 7, 1.0, done_per_s=0.0)
    partition = msgspec.structs.replace(place, **{k: v for k, v in changes.items() if k != "assigned"})
    held = () if partition.owner is None else (0,)
    member = MemberDescription("m", 0, changes.get("assigned", (0,)), held)
    return lambda answer: msgspec.structs.replace(
        answer, members=("m",), partitions=(partition,), member_details=(member,)
    )


@pytest.fixture
def joined(mq: Connection) -> Connection:
    mq.create_subject("orders", 1)
    with mq.consumer("orders", "billing", Seen(), settings=quick()):
        eventually(mq.groups, "the group is there")
    return mq


def test_a_lag_that_does_not_get_less_is_told(joined: Connection) -> None:
    found = examine_server(Changed(joined, {DescribeGroup: grouped()}))
    (lag,) = [one for one in found if one.level is not Level.OK]
    assert lag.check == "lag"
    assert "does not shrink: 0.0 done/s, 0.0 in/s" in lag.what
    assert "inturn drain orders --group billing" in lag.next_step
    found = examine_server(Changed(joined, {DescribeGroup: grouped(done_per_s=5.0)}))
    assert all(one.level is Level.OK for one in found)


def test_a_partition_that_nobody_asks_for_is_told(joined: Connection) -> None:
    found = examine_server(Changed(joined, {DescribeGroup: grouped(owner=None, done_per_s=5.0)}))
    (held,) = [one for one in found if one.level is not Level.OK]
    assert held.what == "no member holds partition orders/0 in group billing, and 1,000 messages wait there"


def test_nobody_has_to_hold_a_partition_of_a_shared_group(joined: Connection) -> None:
    def shared(answer: GroupDescription) -> GroupDescription:
        return msgspec.structs.replace(grouped(owner=None, done_per_s=5.0)(answer), mode="shared")

    found = examine_server(Changed(joined, {DescribeGroup: shared}))
    assert all(one.level is Level.OK for one in found)


def refused(_: object) -> AccessDenied:
    return AccessDenied("ops", "describe that", "ask for a rule")


def test_what_one_may_not_see_is_told_and_the_rest_is_checked(joined: Connection) -> None:
    for kind, what in (
        (DescribeNode, "the server does not describe the node"),
        (DescribeSubject, "1 subject could not be checked: orders"),
        (DescribeGroup, "1 group could not be checked: billing of orders"),
    ):
        found = examine_server(Changed(joined, {kind: refused}))
        (told,) = [one for one in found if one.level is not Level.OK]
        assert (told.check, told.level) == ("access", Level.WARNING)
        assert told.what.startswith(what)
        assert "describe" in told.next_step
        assert {one.check for one in found} > {"log", "lag", "keys", "members"}


def test_keys_that_one_may_not_see_are_told(mq: Connection) -> None:
    mq.create_subject("orders", 1)
    send(mq, "orders", "bad:0")
    handler = Seen(lambda message, _: 1 / 0)
    with mq.consumer("orders", "billing", handler, order="key", settings=quick(max_attempts=1)):
        handler.wait_for(1)
        eventually(lambda: mq.group("orders", "billing").keys(), "it is blocked")
        found = examine_server(Changed(mq, {ListKeys: refused}))
    assert "the keys of 1 group could not be checked: billing of orders" in [one.what for one in found]


def test_a_member_that_holds_more_than_it_is_assigned_is_looked_at_twice(joined: Connection) -> None:
    slept: list[float] = []
    beyond = grouped(assigned=(), end_offset=0)
    found = examine_server(Changed(joined, {DescribeGroup: beyond}), sleep=slept.append)
    (member,) = [one for one in found if one.level is not Level.OK]
    assert (member.check, member.partition) == ("members", "orders/0")
    assert "m holds partition orders/0 in group billing (epoch 7) without an assignment" in member.what
    assert len(slept) == 1
    # released meanwhile, or held under a different epoch: this was a hand-over
    answers = [beyond, grouped(assigned=(), end_offset=0, epoch=8)]
    found = examine_server(Changed(joined, {DescribeGroup: lambda one: answers.pop(0)(one)}), sleep=slept.append)
    assert all(one.level is Level.OK for one in found)


def test_a_handler_that_runs_on_after_a_hand_over_is_found(mq: Connection) -> None:
    """The real case: two members, and the first member cannot release the lease."""
    let, began = threading.Event(), threading.Event()

    def handle(message: Message, context: Context) -> None:
        began.set()
        let.wait(60)

    mq.create_subject("orders", 2, routing="selector")
    with mq.producer() as producer:
        for number in range(2):
            producer.send_sync("orders", b"x", selector=lambda partitions, message, arg: int(str(arg)), arg=number)
    settings = ConsumerSettings(concurrency=4, heartbeat_s=0.15)
    with mq.consumer("orders", "billing", handle, settings=settings, name="first"):
        assert began.wait(20)
        eventually(lambda: len(mq.group("orders", "billing").describe().member_details[0].held) == 2, "both")
        with mq.consumer("orders", "billing", handle, settings=settings, name="second"):
            eventually(lambda: len(mq.group("orders", "billing").describe().members) == 2, "two members")
            found = [one for one in troubles(mq) if one.check == "members"]
            let.set()
    assert len(found) == 1
    assert found[0].what.startswith("first-")
