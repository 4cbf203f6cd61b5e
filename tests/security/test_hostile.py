"""Clients that are not accepted, and accepted clients that attack other principals: no log or lease is changed."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import msgspec
import pytest

from inturn.errors import AccessDenied, NotFound
from inturn.model.settings import LeaseSettings
from inturn.model.subject import retry_subject
from inturn.protocol.codec import KINDS, VERSIONS, pack, unpack
from inturn.protocol.commands import (
    Acquire,
    Append,
    Command,
    Commit,
    Heartbeat,
    Hello,
    Leave,
    Move,
    Progress,
    Pull,
    Release,
    Renew,
    Welcome,
)
from inturn.protocol.frames import FrameReader, frame_of
from inturn.security.settings import ServerTlsSettings
from inturn.transport.server_session import ServerSession, ServerSettings
from tests.contract.bed import Seen, eventually, quick, send
from tests.security.bed import Guarded
from tests.security.conftest import Serve
from tests.security.played import PlayedGuard, all_commands, batch, sample


def stranger(played: PlayedGuard) -> tuple[ServerSession, bytearray]:
    said = bytearray()
    guard = played.guard.session_guard("192.0.2.66", None, is_local=False)
    session = ServerSession(played.node, ServerSettings(), LeaseSettings(), "t", said.extend, lambda: None, None, guard)
    return session, said


@pytest.mark.parametrize("kind", all_commands(), ids=lambda kind: kind.__name__)
def test_no_command_is_looked_at_before_a_right_greeting(kind: type[Command], tmp_path: Path) -> None:
    played = PlayedGuard(tmp_path)
    command = pack(2, sample(kind))
    for first in (b"", pack(1, Hello(VERSIONS, "x")), pack(1, Hello(VERSIONS, "x", "inturn_0_x"))):
        session, said = stranger(played)
        session.received(first + command)  # in a single piece, as from a client that does not wait for an answer
        session.received(command)
        session.go_on()
        assert session.is_closed
        assert not session.is_greeted
        assert not any(isinstance(unpack(frame), Welcome) for frame in FrameReader(1 << 20).feed(bytes(said)))
    assert not played.node.asked


def test_random_frames_of_strangers_reach_nothing(tmp_path: Path) -> None:
    played = PlayedGuard(tmp_path)
    rng = random.Random(14)
    for number in range(2_000):
        session, _ = stranger(played)
        code = rng.choice([0, *KINDS, 999])
        body = rng.randbytes(rng.choice([0, 1, 8, 100, 900]))
        frame = frame_of(number, code, body)
        data = bytearray(frame if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 200)))
        if rng.random() < 0.3:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        for _ in range(3):
            session.received(bytes(data))
        assert not session.is_greeted
    assert not played.node.asked


def test_nonsense_on_both_kinds_of_doors_harms_nobody(serve: Serve, server_tls: ServerTlsSettings) -> None:
    rng = random.Random(15)
    for guarded in (serve("shop"), serve("shop", tls=server_tls)):
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", guarded.port), 30.0) as dialed:
                dialed.sendall(rng.randbytes(rng.randrange(1, 2_000)))
        assert guarded.local().subjects() == []


# A principal that may consume the same group, and knows all lease holders from the description of the group


@pytest.fixture
def guarded(serve: Serve) -> Guarded:
    made = serve("billing", "mallory", "shop")
    made.connect("shop").create_subject("orders", partitions=1)
    return made


def test_a_lease_cannot_be_used_given_back_or_taken_by_another_principal(guarded: Guarded) -> None:
    """With the holder's name and epoch, every command is refused. The holder is not affected, and order is kept."""
    shop, billing = guarded.connect("shop"), guarded.connect("billing")
    seen = Seen()
    with billing.consumer("orders", "billing", seen, order="key", settings=quick()) as consumer:
        send(shop, "orders", *(f"k:{number}" for number in range(20)))
        seen.wait_for(20)
        eventually(lambda: consumer.statistics().partitions, "it holds the partition")
        described = guarded.connect("mallory").group("orders", "billing").describe()
        (place,) = described.partitions
        owner, epoch = str(place.owner), place.epoch
        assert owner in described.members
        where = ("orders", "billing")
        progress = Progress(0, epoch, 10_000, 10_000)
        theft: list[Command] = [
            Heartbeat(*where, owner, "key", "first"),
            Acquire(*where, 0, owner, 1 << 40),
            Renew(*where, owner, ((0, epoch),)),
            Pull(*where, 0, owner, epoch, 0, 1 << 20),
            Commit(*where, owner, (progress,)),
            Release(*where, owner, progress),
            Move(*where, 0, owner, epoch, retry_subject("billing", "orders"), 0, batch()),
            Leave(*where, owner),
        ]
        with guarded.raw() as raw:
            raw.ask(Hello(VERSIONS, "x", guarded.tokens["mallory"]))
            assert [type(raw.ask(command)) for command in theft] == [AccessDenied] * len(theft)
        send(shop, "orders", *(f"k:{number}" for number in range(20, 40)))
        seen.wait_for(40)
    assert [int(body) for body in seen.bodies] == list(range(40))
    assert set(seen.epochs) == {epoch}, "it never lost its lease"


def test_two_principals_share_a_group_as_two_members(guarded: Guarded) -> None:
    """Every principal has separate member names. The group divides partitions as among any members."""
    shop = guarded.connect("shop")
    shop.create_subject("parcels", partitions=2)
    one, two = Seen(), Seen()
    first, second = guarded.connect("billing"), guarded.connect("mallory")
    with (
        first.consumer("parcels", "billing", one, order="key", settings=quick()) as a,
        second.consumer("parcels", "billing", two, order="key", settings=quick()) as b,
    ):
        eventually(lambda: len(a.statistics().partitions) == len(b.statistics().partitions) == 1, "one each")
        send(shop, "parcels", *(f"k{number % 8}:{number}" for number in range(40)))
        eventually(lambda: len(one.messages) + len(two.messages) == 40, "all are handled")
    for number in range(8):
        bodies = [int(message.body) for message in one.messages + two.messages if message.key == b"k%d" % number]
        assert bodies == sorted(bodies)
    assert guarded.refusals() == []


def test_a_producer_cannot_be_fenced_or_imitated_by_another_principal(guarded: Guarded) -> None:
    shop, mallory = guarded.connect("shop"), guarded.connect("mallory")
    with shop.producer("till") as till:
        till.send_sync("orders", b"0", key="k")
        with pytest.raises(AccessDenied, match="open producer 'till'"):
            mallory.producer("till").send_sync("orders", b"x", key="k", timeout_s=40.0)
        till.send_sync("orders", b"1", key="k")
    assert [one.body for one in shop.reader("orders")] == [b"0", b"1"]


def test_whoever_guesses_the_next_producer_ids_takes_nothing_from_those_who_get_them(guarded: Guarded) -> None:
    """The real messages are no duplicates, and the real producers are neither fenced nor refused."""
    shop, local = guarded.connect("shop"), guarded.local()
    with shop.producer() as first, guarded.raw() as raw:
        raw.ask(Hello(VERSIONS, "x", guarded.tokens["mallory"]))
        for ahead in range(1, 5):
            forged = batch(first.id + ahead)
            for epoch in (0, 2**32 - 1):
                answer = raw.ask(Append("orders", 0, msgspec.structs.replace(forged, producer_epoch=epoch)))
                assert isinstance(answer, NotFound)
        for number, client in enumerate((shop, local, shop, local)):
            with client.producer() as producer:
                assert producer.id == first.id + number + 1
                producer.send_sync("orders", b"%d" % number, key="k", timeout_s=40.0)
    assert [int(one.body) for one in shop.reader("orders")] == [0, 1, 2, 3]
