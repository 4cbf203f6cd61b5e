"""The resources that a client can use before authentication, and a principal after authentication."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

import inturn
from inturn.errors import AccessDenied, ConnectionLost, InvalidInput
from inturn.model.settings import LeaseSettings
from inturn.protocol.codec import VERSIONS
from inturn.protocol.commands import (
    Acknowledge,
    Append,
    Commit,
    Done,
    Fetch,
    FindSubject,
    Heartbeat,
    Hello,
    ListSubjects,
    Ping,
    Pull,
    Read,
    Release,
    Renew,
    SubjectList,
)
from inturn.security.guard import NameOwners
from inturn.security.rate_limit import PrincipalMeter, RateMeter
from inturn.testing.clock import FakeClock
from inturn.transport.listener import ConnectionLimits
from inturn.transport.server_session import HELLO_BYTES_MAX, ServerSettings
from tests.contract.bed import WAIT_S, Seen, in_one_of, quick
from tests.security.conftest import Serve
from tests.security.played import PlayedGuard, sample

ALL = '[[allow]]\nprincipals = "*"\nactions = "*"\nsubjects = "*"\ngroups = "*"\n'


# Before authentication


def test_whoever_does_not_say_who_it_is_is_hung_up_on(serve: Serve) -> None:
    guarded = serve("shop", settings=ServerSettings(greeting_s=0.2))
    with guarded.raw() as raw:
        raw.send(b"\x20")  # the first byte of a length: data, but never a whole frame
        began_s = time.monotonic()
        assert raw.is_hung_up_on()
        assert time.monotonic() - began_s < WAIT_S / 2
    assert guarded.connect("shop", wait_s=WAIT_S).subjects() == []


def test_whoever_has_said_it_may_stay(serve: Serve) -> None:
    guarded = serve("shop", settings=ServerSettings(greeting_s=1.0))
    with guarded.raw() as raw:
        raw.ask(Hello(VERSIONS, "x", guarded.tokens["shop"]))
        threading.Event().wait(1.2)
        assert isinstance(raw.ask(Ping()), Done)


def test_a_greeting_has_few_bytes(serve: Serve) -> None:
    guarded = serve("shop")
    with guarded.raw() as raw:
        raw.send((HELLO_BYTES_MAX + 1).to_bytes(4, "little"))
        assert raw.is_hung_up_on()


def test_those_who_only_hold_the_door_lose_their_oldest(serve: Serve) -> None:
    """Many silent clients connect. A client with a token is still accepted."""
    guarded = serve("shop", settings=ServerSettings(ungreeted=8, greeting_s=30.0))
    silent = [socket.create_connection(("127.0.0.1", guarded.port)) for _ in range(50)]
    assert guarded.connect("shop").subjects() == []
    silent[0].settimeout(30.0)
    assert silent[0].recv(1) == b""
    for one in silent:
        one.close()


def test_one_address_has_so_many_connections_and_others_are_let_in(serve: Serve) -> None:
    guarded = serve("shop", settings=ServerSettings(connections_per_address=3))
    for _ in range(3):
        guarded.connect("shop")
    with pytest.raises(ConnectionLost):
        guarded.connect("shop")
    assert guarded.local().subjects() == []  # through the folder: no address


class _Visit:
    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_doors_count_by_host_in_all_and_by_what_was_said() -> None:
    settings = ServerSettings(connections=4, connections_per_address=2, ungreeted=3)
    doors: ConnectionLimits[_Visit] = ConnectionLimits(settings)
    a, b, c, d = (_Visit() for _ in range(4))
    assert doors.admit(a, "h1") is None
    assert doors.admit(b, "h1") is None
    assert doors.admit(_Visit(), "h1") == "2 connections of one address"
    assert doors.admit(c, "h2") is None
    doors.greeted(a)
    assert doors.admit(d, "") is None
    assert [one.is_aborted for one in (a, b, c, d)] == [False] * 4
    assert doors.admit(_Visit(), "h3") == "4 connections"
    doors.leave(a)
    doors.leave(a)
    e = _Visit()
    assert doors.admit(e, "h1") is None
    assert [one.is_aborted for one in (b, c, d, e)] == [True, False, False, False], "the oldest that was not greeted"
    assert doors.all() == [c, d, e]


def test_the_host_with_the_most_that_say_nothing_loses_its_oldest() -> None:
    """A single address cannot make clients of other addresses lose the stream before authentication."""
    doors: ConnectionLimits[_Visit] = ConnectionLimits(ServerSettings(ungreeted=4))
    other, another = _Visit(), _Visit()
    assert doors.admit(other, "h1") is None
    silent = [_Visit() for _ in range(50)]
    for one in silent[:25]:
        assert doors.admit(one, "h2") is None
    doors.replace(other, by=(taken_on := _Visit()))
    assert doors.admit(another, "h3") is None
    for one in silent[25:]:
        assert doors.admit(one, "h2") is None
    assert set(doors.all()) == {another, taken_on, *silent[-2:]}
    assert [one.is_aborted for one in (other, taken_on, another)] == [False] * 3
    assert [one.is_aborted for one in silent] == [True] * 48 + [False] * 2
    doors.greeted(silent[-1])
    assert doors.admit(_Visit(), "h4") is None
    assert not silent[-1].is_aborted
    assert doors.admit(_Visit(), "h4") is None
    assert taken_on.is_aborted, "as many of each: the oldest"


# After authentication


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_meter_allows_a_burst_and_then_its_rate() -> None:
    clock = Time()
    meter = RateMeter(10.0, clock)
    for _ in range(10):
        meter.take(1)
        assert meter.wait_s() == 0.0
    meter.take(5)
    assert meter.wait_s() == pytest.approx(0.5)
    clock.now_s += 0.5
    assert meter.wait_s() == 0.0
    assert not meter.try_take()
    clock.now_s += 1000.0
    assert [meter.try_take() for _ in range(11)] == [True] * 10 + [False]


def test_commands_and_bytes_are_metered_apart() -> None:
    clock = Time()
    metered = PrincipalMeter(10.0, 1000.0, clock)
    metered.take_received(3000)
    assert metered.wait_s() == pytest.approx(2.0)
    for _ in range(40):
        metered.take_command()
    assert metered.wait_s() == pytest.approx(3.0)
    assert PrincipalMeter(None, 5.0, clock).wait_s() == 0.0


def test_a_client_is_heard_while_it_waits_for_answers_that_were_too_much() -> None:
    """Bytes that the client sends are different: the client can stop sending."""
    clock = Time()
    metered = PrincipalMeter(None, 1000.0, clock)
    metered.take_answer(5000)
    assert [metered.wait_s(), metered.deaf_s()] == pytest.approx([4.0, 0.0])
    metered.take_received(3000)
    assert [metered.wait_s(), metered.deaf_s()] == pytest.approx([7.0, 2.0])
    clock.now_s += 2.0
    assert [metered.wait_s(), metered.deaf_s()] == pytest.approx([5.0, 0.0])


def test_beyond_its_quota_a_client_keeps_what_it_has_and_gets_no_more(tmp_path: Path) -> None:
    """Renewals, commits and heartbeats are executed at once, all other commands later, in order."""
    clock = FakeClock()
    access = ALL + '[[quota]]\nprincipals = "shop"\nbytes_per_s = 100_000\n'
    shop = PlayedGuard(tmp_path, access, clock).enter("shop")
    shop.ask(ListSubjects())
    shop.session.written(1_000_000)  # an answer
    assert shop.session.quota_wait_s == pytest.approx(9.0, abs=0.1)
    waiting = [sample(kind) for kind in (Pull, Read, Fetch, Release, FindSubject, Append)]
    for command in waiting:
        assert shop.ask(command) is None
    for kind in (Renew, Commit, Heartbeat, Acknowledge):
        assert isinstance(shop.ask(sample(kind)), kind)
    assert isinstance(shop.ask(Ping()), Done)
    clock.advance(8.0)
    shop.session.go_on()
    assert shop.session.has_waiting
    clock.advance(2.0)
    before = len(shop.asked)
    shop.session.go_on()
    assert [type(command) for command in shop.asked[before:]] == [type(command) for command in waiting]
    assert not shop.session.has_waiting


def test_what_waits_for_the_quota_is_bounded_and_done_in_the_end(tmp_path: Path) -> None:
    clock = FakeClock()
    played = PlayedGuard(tmp_path, ALL + '[[quota]]\nprincipals = "shop"\nbytes_per_s = 100_000\n', clock)
    played.settings = ServerSettings(unanswered_count=2)
    shop = played.enter("shop")
    shop.session.written(1_000_000)
    for _ in range(5):
        shop.ask(ListSubjects())
    assert shop.session.is_full
    assert shop.session.unanswered_count == 3
    clock.advance(10.0)
    shop.session.go_on()
    assert len(shop.asked) == 3
    for _, reply in list(played.node.asked):
        reply(SubjectList(()))
    shop.session.go_on()
    assert len(shop.asked) == 5


def test_what_a_client_sends_itself_beyond_its_quota_is_not_looked_at(tmp_path: Path) -> None:
    clock = FakeClock()
    access = ALL + '[[quota]]\nprincipals = "shop"\nbytes_per_s = 100\n'
    shop = PlayedGuard(tmp_path, access, clock).enter("shop")
    renew = sample(Renew, member="m" * 150)
    shop.ask(renew)
    assert shop.ask(renew) is None
    assert shop.session.deaf_s > 0.0
    clock.advance(60.0)
    shop.session.go_on()
    assert shop.asked == [renew, renew]


def test_pulls_on_their_way_share_what_comes_back_in_a_second(tmp_path: Path) -> None:
    """So all answers together stay within the quota of the client. Every answer has at least a batch."""
    access = ALL + '[[quota]]\nprincipals = "shop"\nbytes_per_s = 100_000\n'
    played = PlayedGuard(tmp_path, access, FakeClock())
    shop, billing = played.enter("shop"), played.enter("billing")
    pull = sample(Pull, max_bytes=1 << 20)
    assert [shop.ask(pull).max_bytes for _ in range(4)] == [100_000, 50_000, 33_333, 25_000]
    assert shop.ask(sample(Pull, max_bytes=10)).max_bytes == 10
    assert billing.ask(sample(Pull, member="m-2", max_bytes=1 << 20)).max_bytes == 1 << 20


def test_a_quota_below_what_is_pulled_at_once_costs_a_consumer_no_lease(serve: Serve) -> None:
    """The answers from ten partitions use the quota up for longer than a lease lives. The quota still holds."""
    access = ALL + '[[quota]]\nprincipals = "billing"\nbytes_per_s = 400_000\n'
    guarded = serve("shop", "billing", access=access, lease=LeaseSettings(life_s=1.0, renew_s=0.2, margin_s=0.1))
    shop, billing = guarded.connect("shop"), guarded.connect("billing")
    shop.create_subject("orders", partitions=10)
    with shop.producer() as producer:
        for number in range(30):
            producer.send("orders", bytes(50_000), key=f"k{number}")
        producer.flush()
    groups = iter(["g1", "g2", "g3", "g4"])

    def loses_none() -> None:
        seen = Seen()
        began_s = time.monotonic()
        with billing.consumer("orders", next(groups), seen, order="key", settings=quick()):
            seen.wait_for(30)
            took_s = time.monotonic() - began_s
        assert took_s > 1.0, "1.5 MB: 0.4 of them at once; the last answer is not waited for"
        epochs = {(one.partition, epoch) for one, epoch in zip(seen.messages, seen.epochs, strict=True)}
        assert len(epochs) == len({partition for partition, _ in epochs}), "a lease was lost"

    in_one_of(4, loses_none)  # the bound: the lease is shorter than the time of the quota


def test_to_come_again_is_no_way_round_a_quota(tmp_path: Path) -> None:
    """A used quota stays used across streams until refilled. After that the server forgets a disconnected principal."""
    clock = FakeClock()
    played = PlayedGuard(tmp_path, ALL + '[[quota]]\nprincipals = "shop"\ncommands_per_s = 10\n', clock)
    first = played.enter("shop")
    for _ in range(10):
        first.ask(ListSubjects())
    assert first.session.quota_wait_s == 0.0
    first.session.lost()
    clock.advance(0.1)
    played.guard.reload()
    second = played.enter("shop")
    second.ask(ListSubjects())
    assert second.session.quota_wait_s == 0.0
    second.ask(ListSubjects())
    assert second.session.quota_wait_s > 0.0
    second.session.lost()
    clock.advance(1.2)
    played.guard.reload()
    assert not played.guard._principals


def test_commands_that_are_refused_count_as_well(tmp_path: Path) -> None:
    """Pings and invalid commands count, too."""
    clock = FakeClock()
    access = '[[quota]]\nprincipals = "shop"\ncommands_per_s = 4\n'
    shop = PlayedGuard(tmp_path, access, clock).enter("shop")
    too_long = FindSubject("s" * 100_000)
    for command, answer in ((Ping(), Done), (too_long, InvalidInput), (Hello(VERSIONS), InvalidInput)):
        assert isinstance(shop.ask(command), answer)
    assert isinstance(shop.ask(FindSubject("orders")), AccessDenied)
    assert shop.session.quota_wait_s == 0.0
    shop.ask(Ping())
    assert shop.session.quota_wait_s > 0.0


def test_too_many_commands_are_answered_later_not_refused(serve: Serve) -> None:
    """Other clients do not wait."""
    access = ALL + '[[quota]]\nprincipals = "shop"\ncommands_per_s = 50\n'
    guarded = serve("shop", "billing", access=access)
    shop, billing = guarded.connect("shop"), guarded.connect("billing")
    began_s = time.monotonic()
    for _ in range(100):  # 50 at once, then 50 a second
        shop.subjects()
    took_s = time.monotonic() - began_s
    assert took_s > 0.7

    def does_not_wait() -> None:
        began_s = time.monotonic()
        for _ in range(100):
            billing.subjects()
        assert time.monotonic() - began_s < took_s

    in_one_of(4, does_not_wait)  # the bound: 100 commands take less time than with a quota


def test_a_client_that_has_to_wait_for_long_is_not_lost(serve: Serve) -> None:
    """The client gets signs of life. Otherwise the client would give the stream up after some seconds, and resend."""
    access = ALL + '[[quota]]\nprincipals = "shop"\nbytes_per_s = 100_000\n'
    guarded = serve("shop", access=access)
    shop = guarded.connect("shop")
    shop.create_subject("orders", partitions=1)
    streams = _streams_seen(guarded)
    with shop.producer() as producer:
        began_s = time.monotonic()
        stored = producer.send("orders", bytes(350_000)).result(2 * WAIT_S)  # 100 kB at once, the rest takes 2.5 s
        shop.subjects()
        assert time.monotonic() - began_s > 1.5
    assert stored.offset == 0
    assert _streams_seen(guarded) == streams
    assert [len(message.body) for message in guarded.local().reader("orders")] == [350_000]


def _streams_seen(guarded: object) -> int:
    return guarded.service.connection_count  # type: ignore[attr-defined,no-any-return]


def test_quotas_are_of_a_principal_on_all_of_its_connections(serve: Serve) -> None:
    access = ALL + '[[quota]]\nprincipals = "shop"\ncommands_per_s = 40\n'
    guarded = serve("shop", access=access)
    clients = [guarded.connect("shop") for _ in range(4)]
    began_s = time.monotonic()
    for _ in range(20):
        for client in clients:
            client.subjects()
    assert time.monotonic() - began_s > 0.7


def test_connections_over_the_quota_are_told_and_let_in_later(serve: Serve) -> None:
    access = ALL + '[[quota]]\nprincipals = "sh*"\nconnections = 2\n'
    guarded = serve("shop", "billing", access=access)
    first, _ = guarded.connect("shop"), guarded.connect("shop")
    with pytest.raises(ConnectionLost, match="2 connections, as many as the quota allows"):
        guarded.connect("shop")
    for _ in range(3):
        guarded.connect("billing")
    first.close()
    assert guarded.connect("shop", wait_s=WAIT_S).subjects() == []


def test_new_quotas_hold_at_once(serve: Serve) -> None:
    guarded = serve("shop", access=ALL)
    shop = guarded.connect("shop")
    guarded.rewrite_access(ALL + '[[quota]]\nprincipals = "shop"\ncommands_per_s = 20\n')
    began_s = time.monotonic()
    for _ in range(60):
        shop.subjects()
    assert time.monotonic() - began_s > 0.8


def test_names_are_remembered_up_to_a_number_and_only_their_owner_loses_them() -> None:
    owners = NameOwners(names_max=3)
    assert owners.take("a", "1", "2", "3") is None
    assert owners.take("b", "9") is None
    assert owners.take("a", "9") == "9"
    assert owners.take("a", "4") is None
    assert owners.take("b", "1") is None, "the oldest of a is forgotten"
    assert owners.take("b", "2") == "2"
    assert owners.take("a", "9", "5") == "9"
    assert owners.take("b", "5") is None, "what was refused took nothing"
    owners.forget("2")
    owners.forget("2")
    assert owners.take("b", "2") is None
    owners.give("a", "2")
    assert owners.owner("2") == "a"
    assert owners.take("b", "2") == "2"


def test_a_hostile_client_of_one_principal_does_not_hold_up_another(serve: Serve) -> None:
    guarded = serve("mallory", "shop", access=ALL.replace('"*"', '"shop"', 1))
    shop = guarded.connect("shop")
    shop.create_subject("orders", partitions=1)
    stop = threading.Event()

    def flood() -> None:
        mallory = guarded.connect("mallory")
        while not stop.is_set():
            with pytest.raises(inturn.errors.AccessDenied):
                mallory.describe_subject("orders")

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for one in threads:
        one.start()
    try:
        with shop.producer() as producer:
            for number in range(50):
                producer.send_sync("orders", b"%d" % number, key="k", timeout_s=60.0)
    finally:
        stop.set()
        for one in threads:
            one.join()
    assert [int(one.body) for one in shop.reader("orders")] == list(range(50))
    assert len(guarded.refusals()) < 200, "the log of refusals is bounded"
