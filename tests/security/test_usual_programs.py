"""What usual programs need is what docs/how-to/secure.md says: each works with these actions, and with no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inturn import Connection
from inturn.errors import AccessDenied
from tests.contract.bed import Seen, quick, send
from tests.security.bed import Guarded, eventually
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
    """Retries, dead letters, parking, another member, statistics."""
    producer, consumer = guarded.connect("producer"), guarded.connect("consumer")
    send(producer, "orders", "bad:0", "good:1", "good:2")
    seen = Seen(lambda message, _: 1 / 0 if message.key == b"bad" else None)
    settings = quick(max_attempts=2, on_exhausted="dead-letter", strategy="best-effort")
    with consumer.consumer("orders", "billing", seen, order="key", settings=settings) as first:
        seen.wait_for(3)
        with consumer.consumer("orders", "billing", seen, order="key", settings=settings):
            eventually(lambda: len(consumer.describe_group("orders", "billing").members) == 2, "both are there")
        assert first.statistics().ok_count >= 2
    parking = quick(max_attempts=1, on_exhausted="park")
    send(producer, "orders", "bad:3", "bad:4")
    with consumer.consumer("orders", "billing", seen, order="key", settings=parking):
        eventually(lambda: [one.state for one in consumer.keys("orders", "billing")] == ["parked"], "it is parked")


def test_a_producer_can_do_nothing_else(guarded: Guarded) -> None:
    producer = guarded.connect("producer")
    send(producer, "orders", "k:0")
    for do in (
        lambda: list(producer.reader("orders")),
        lambda: producer.describe_subject("orders"),
        lambda: producer.create_subject("invoices"),
        lambda: producer.describe_group("orders", "billing"),
        lambda: producer.keys("orders", "billing"),
        lambda: producer.subject("invoices"),
    ):
        with pytest.raises(AccessDenied, match="'producer' may not"):
            do()
    with producer.producer() as one, pytest.raises(AccessDenied):
        one.send_sync("invoices", b"x", key="k", timeout_s=5.0)


def test_a_consumer_that_is_not_allowed_stops_and_says_why(guarded: Guarded) -> None:
    """Not a loop of refusals."""
    consumer = guarded.connect("consumer")
    with (
        pytest.raises(AccessDenied, match="'consumer' may not consume on subject 'orders' for group 'reporting'"),
        consumer.consumer("orders", "reporting", Seen(), settings=quick()) as one,
    ):
        one.wait(5.0)
    assert 1 <= len(guarded.refusals()) < 5


def test_a_consumer_whose_right_is_taken_away_stops(guarded: Guarded) -> None:
    consumer, producer = guarded.connect("consumer"), guarded.connect("producer")
    seen = Seen()
    with consumer.consumer("orders", "billing", seen, settings=quick()) as one:
        send(producer, "orders", "k:0")
        seen.wait_for(1)
        guarded.rewrite_access(RULES.replace('principals = "consumer"', 'principals = "nobody"'))
        with pytest.raises(AccessDenied):
            one.wait(5.0)


def dead_letter(guarded: Guarded) -> Connection:
    consumer = guarded.connect("consumer")
    send(guarded.connect("producer"), "orders", "k:bad")
    settings = quick(max_attempts=1, on_exhausted="dead-letter")
    with consumer.consumer("orders", "billing", Seen(lambda *_: 1 / 0), order="key", settings=settings):
        letters = guarded.local().dead_letters("orders", "billing")
        eventually(letters.list, "it is a dead letter")
    return consumer


@pytest.mark.usefixtures("nobody_refused")
def test_dead_letters_are_read_by_readers_and_driven_again_by_redrivers(guarded: Guarded) -> None:
    dead_letter(guarded)
    reader, redriver = guarded.connect("reader"), guarded.connect("redriver")
    assert [one.message.body for one in reader.dead_letters("orders", "billing").list()] == [b"bad"]
    assert redriver.dead_letters("orders", "billing").redrive() == 1
    assert reader.dead_letters("orders", "billing").list() == []
    assert reader.dead_letters("orders", "billing").get(0).message.body == b"bad"


def test_nobody_else_drives_them_again(guarded: Guarded) -> None:
    consumer = dead_letter(guarded)
    for one in (consumer, guarded.connect("reader"), guarded.connect("producer"), guarded.connect("looker")):
        with pytest.raises(AccessDenied):
            one.dead_letters("orders", "billing").redrive()


@pytest.mark.usefixtures("nobody_refused")
def test_a_looker_sees_everything_but_messages(guarded: Guarded) -> None:
    dead_letter(guarded)
    looker = guarded.connect("looker")
    assert "orders" in [one.name for one in looker.subjects()]
    assert looker.describe_subject("orders").partitions[0].end_offset == 1
    for one in looker.groups():
        looker.describe_group(one.subject, one.group)
        looker.keys(one.subject, one.group)


@pytest.mark.usefixtures("nobody_refused")
def test_a_producer_sees_no_groups(guarded: Guarded) -> None:
    """Those of its subjects are not its business; what is listed can be described."""
    dead_letter(guarded)
    assert guarded.connect("looker").groups() != []
    assert guarded.connect("producer").groups() == []
    for name in ("steerer", "reader", "consumer"):
        one = guarded.connect(name)
        assert [one.describe_group(found.subject, found.group).group for found in one.groups()]


@pytest.mark.usefixtures("nobody_refused")
def test_a_steerer_parks_resumes_and_skips(guarded: Guarded) -> None:
    consumer, steerer = guarded.connect("consumer"), guarded.connect("steerer")
    send(guarded.connect("producer"), "orders", "k:0", "k:1")
    seen = Seen(lambda message, _: 1 / 0 if message.body == b"0" else None)
    settings = quick(max_attempts=1)
    with consumer.consumer("orders", "billing", seen, order="key", settings=settings):
        seen.wait_for(1)
        eventually(lambda: [one.state for one in steerer.keys("orders", "billing")] == ["blocked"], "it is blocked")
        assert steerer.skip_key("orders", "billing", "k", why="broken").done_at_ms is not None
        eventually(lambda: b"1" in seen.bodies, "the next one runs")
