"""Usual programs need exactly the actions in docs/how-to/secure.md: every program works with these actions."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from inturn import Connection, LeaseSettings, Outbox, OutboxSettings, ResultKind
from inturn.errors import AccessDenied
from tests.contract.bed import Seen, eventually, quick, send
from tests.security.bed import Guarded
from tests.security.conftest import Serve

RULES = """
[[allow]]
principals = "ops"
actions = "*"
subjects = "*"
groups = "*"

[[allow]]
principals = "producer"
actions = "produce"
subjects = "orders"

[[allow]]
principals = "consumer"
actions = "consume"
subjects = "orders"
groups = "billing"

[[allow]]
principals = "looker"
actions = "describe"
subjects = "*"

[[allow]]
principals = ["reader", "redriver"]
actions = "read"
subjects = "orders"

[[allow]]
principals = "redriver"
actions = "redrive"
subjects = "orders"
groups = "billing"

[[allow]]
principals = "steerer"
actions = "steer"
subjects = "orders"
groups = "billing"
"""
WHO = ("ops", "producer", "consumer", "looker", "reader", "redriver", "steerer")
OUTBOX = OutboxSettings(poll_s=0.01, retry_s=0.1, lease=LeaseSettings(life_s=12.0, renew_s=0.15, margin_s=0.05))
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def guarded(serve: Serve) -> Guarded:
    made = serve(*WHO, access=RULES)
    made.connect("ops").create_subject("orders", partitions=1)
    return made


@pytest.fixture
def nobody_refused(guarded: Guarded) -> Iterator[None]:
    yield
    assert guarded.refusals() == []


@pytest.mark.usefixtures("nobody_refused")
def test_a_producer_and_a_consumer_with_all_that_it_does_by_itself(guarded: Guarded) -> None:
    """Retries, dead letters, parking, a second member, statistics."""
    producer, consumer = guarded.connect("producer"), guarded.connect("consumer")
    send(producer, "orders", "bad:0", "good:1", "good:2")
    seen = Seen(lambda message, _: 1 / 0 if message.key == b"bad" else None)
    settings = quick(max_attempts=2, on_exhausted="dead-letter", strategy="best-effort")
    with consumer.consumer("orders", "billing", seen, order="key", settings=settings) as first:
        seen.wait_for(3)
        with consumer.consumer("orders", "billing", seen, order="key", settings=settings):
            eventually(lambda: len(consumer.group("orders", "billing").describe().members) == 2, "both are there")
        assert first.statistics().ok_count >= 2
    parking = quick(max_attempts=1, on_exhausted="park")
    send(producer, "orders", "bad:3", "bad:4")
    with consumer.consumer("orders", "billing", seen, order="key", settings=parking):
        eventually(
            lambda: [one.state for one in consumer.group("orders", "billing").keys()] == ["parked"], "it is parked"
        )


@pytest.mark.usefixtures("nobody_refused")
@pytest.mark.parametrize("start", ["first", "last"])
def test_a_broadcast_consumer_needs_no_more_than_others(guarded: Guarded, tmp_path: Path, start: str) -> None:
    """C12: the consumer reads as a member of the group, and resolves the start position."""
    producer, consumer = guarded.connect("producer"), guarded.connect("consumer")
    send(producer, "orders", "k:0")
    seen = Seen()
    with consumer.consumer(
        "orders", "billing", seen, mode="broadcast", offsets=tmp_path / "own", start=start, settings=quick()
    ):
        send(producer, "orders", "k:1")
        seen.wait_for(2 if start == "first" else 1)


@pytest.mark.usefixtures("nobody_refused")
@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_consumer_that_is_asked_to_try_a_message_may_read_it(guarded: Guarded, mode: str) -> None:
    """C16: as a member of the group."""
    consumer, steerer = guarded.connect("consumer"), guarded.connect("steerer")
    send(guarded.connect("producer"), "orders", "k:0")
    seen = Seen()
    with consumer.consumer("orders", "billing", seen, mode=mode, name="worker", settings=quick()):
        seen.wait_for(1)
        assert steerer.group("orders", "billing").try_message("worker", 0, 0).result == ResultKind.SUCCESS
    assert seen.bodies == [b"0", b"0"]


def test_a_producer_can_do_nothing_else(guarded: Guarded) -> None:
    producer = guarded.connect("producer")
    send(producer, "orders", "k:0")
    for do in (
        lambda: list(producer.reader("orders")),
        lambda: producer.create_subject("invoices"),
        lambda: producer.group("orders", "billing").describe(),
        lambda: producer.group("orders", "billing").keys(),
        lambda: producer.subject("invoices"),
    ):
        with pytest.raises(AccessDenied, match="'producer' may not"):
            do()
    with producer.producer() as one, pytest.raises(AccessDenied):
        one.send_sync("invoices", b"x", key="k", timeout_s=40.0)


def filled(path: Path, *rows: tuple[str, bytes]) -> Outbox:
    """An outbox with the given rows of a single key: subject and body of every row."""
    outbox = Outbox(path, settings=OUTBOX)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        outbox.create_table(connection)
        for subject, body in rows:
            outbox.put(connection, subject, body, key="k")
    return outbox


@pytest.mark.usefixtures("nobody_refused")
def test_an_outbox_is_sent_by_those_who_may_produce(guarded: Guarded, tmp_path: Path) -> None:
    """P8."""
    outbox = filled(tmp_path / "shop.db", ("orders", b"0"), ("orders", b"1"))
    assert outbox.scan(guarded.connect("producer")).run_once().sent == 2
    assert [message.body for message in guarded.connect("reader").reader("orders")] == [b"0", b"1"]


@pytest.mark.parametrize("also", ["", "describe"], ids=["no-right", "describe-only"])
def test_a_row_for_a_subject_that_is_not_allowed_holds_back_no_other_subject(
    guarded: Guarded, tmp_path: Path, also: str
) -> None:
    """P8: the row is refused with a reason until a rule allows the subject."""
    rule = '\n[[allow]]\nprincipals = "producer"\nactions = "{}"\nsubjects = "invoices"\n'
    if also:
        guarded.rewrite_access(RULES + rule.format(also))
    guarded.connect("ops").create_subject("invoices", partitions=1)
    outbox = filled(tmp_path / "shop.db", ("invoices", b"secret"), ("orders", b"0"))
    with outbox.scan(guarded.connect("producer")):
        eventually(lambda: outbox.status().waiting == 1, "the other one is sent")
        eventually(lambda: outbox.status().refused, "it is noted")
        (refused,) = outbox.status().refused
        assert (refused.subject, refused.attempts > 0) == ("invoices", True)
        assert "'producer' may not" in refused.error
        guarded.rewrite_access(RULES + rule.format("produce"))
        eventually(lambda: outbox.status().waiting == 0, "it is sent")
    reader = guarded.connect("ops")
    assert [message.body for message in reader.reader("orders")] == [b"0"]
    assert [message.body for message in reader.reader("invoices")] == [b"secret"]


def test_a_consumer_that_is_not_allowed_stops_and_says_why(guarded: Guarded) -> None:
    """Instead of a loop of refusals."""
    consumer = guarded.connect("consumer")
    with (
        pytest.raises(AccessDenied, match="'consumer' may not consume on subject 'orders' for group 'reporting'"),
        consumer.consumer("orders", "reporting", Seen(), settings=quick()) as one,
    ):
        one.wait(40.0)
    assert 1 <= len(guarded.refusals()) < 5


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_consumer_whose_right_is_taken_away_stops(guarded: Guarded, mode: str) -> None:
    consumer, producer = guarded.connect("consumer"), guarded.connect("producer")
    seen = Seen()
    with consumer.consumer("orders", "billing", seen, mode=mode, settings=quick()) as one:
        send(producer, "orders", "k:0")
        seen.wait_for(1)
        guarded.rewrite_access(RULES.replace('principals = "consumer"', 'principals = "nobody"'))
        with pytest.raises(AccessDenied):
            one.wait(40.0)


def dead_letter(guarded: Guarded) -> Connection:
    consumer = guarded.connect("consumer")
    send(guarded.connect("producer"), "orders", "k:bad")
    settings = quick(max_attempts=1, on_exhausted="dead-letter")
    seen = Seen(lambda *_: 1 / 0)
    with consumer.consumer("orders", "billing", seen, order="key", settings=settings):
        seen.wait_for(1)
        letters = guarded.local().group("orders", "billing").dead_letters()
        eventually(letters.list, "it is a dead letter")
    return consumer


@pytest.mark.usefixtures("nobody_refused")
def test_dead_letters_are_read_by_readers_and_driven_again_by_redrivers(guarded: Guarded) -> None:
    dead_letter(guarded)
    reader, redriver = guarded.connect("reader"), guarded.connect("redriver")
    assert [one.message.body for one in reader.group("orders", "billing").dead_letters().list()] == [b"bad"]
    assert redriver.group("orders", "billing").dead_letters().redrive() == 1
    assert reader.group("orders", "billing").dead_letters().list() == []
    assert reader.group("orders", "billing").dead_letters().get(0).message.body == b"bad"


def test_nobody_else_drives_them_again(guarded: Guarded) -> None:
    consumer = dead_letter(guarded)
    for one in (consumer, guarded.connect("reader"), guarded.connect("producer"), guarded.connect("looker")):
        with pytest.raises(AccessDenied):
            one.group("orders", "billing").dead_letters().redrive()


@pytest.mark.usefixtures("nobody_refused")
def test_a_looker_sees_everything_but_messages(guarded: Guarded) -> None:
    dead_letter(guarded)
    looker = guarded.connect("looker")
    assert "orders" in [one.name for one in looker.subjects()]
    assert looker.describe_subject("orders").partitions[0].end_offset == 1
    for one in looker.groups():
        looker.group(one.subject, one.group).describe()
        looker.group(one.subject, one.group).keys()


@pytest.mark.usefixtures("nobody_refused")
def test_a_producer_sees_no_groups(guarded: Guarded) -> None:
    """The groups of a subject are hidden from producers. All listed groups can be described."""
    dead_letter(guarded)
    assert guarded.connect("looker").groups() != []
    assert guarded.connect("producer").groups() == []
    for name in ("steerer", "reader", "consumer"):
        one = guarded.connect(name)
        assert [one.group(found.subject, found.group).describe().group for found in one.groups()]


@pytest.mark.usefixtures("nobody_refused")
def test_a_steerer_parks_resumes_and_skips(guarded: Guarded) -> None:
    consumer, steerer = guarded.connect("consumer"), guarded.connect("steerer")
    send(guarded.connect("producer"), "orders", "k:0", "k:1")
    seen = Seen(lambda message, _: 1 / 0 if message.body == b"0" else None)
    settings = quick(max_attempts=1)
    with consumer.consumer("orders", "billing", seen, order="key", settings=settings):
        seen.wait_for(1)
        eventually(
            lambda: [one.state for one in steerer.group("orders", "billing").keys()] == ["blocked"], "it is blocked"
        )
        assert steerer.group("orders", "billing").skip("k", why="broken").done_at_ms is not None
        eventually(lambda: b"1" in seen.bodies, "the next one runs")
