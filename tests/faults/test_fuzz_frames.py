"""Hostile bytes and commands: the server stays up, memory stays bounded, and other clients are not affected."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from pyroaring import BitMap64

import inturn
from inturn.model.batch import encode
from inturn.model.errors import InturnError, InvalidInput
from inturn.model.message import Outgoing
from inturn.protocol import commands
from inturn.protocol.codec import ERROR, KINDS, VERSIONS, pack
from inturn.protocol.commands import (
    Acquire,
    Append,
    Command,
    Commit,
    Granted,
    Heartbeat,
    Hello,
    Ping,
    Progress,
    Pull,
    Read,
)
from inturn.protocol.frames import HEADER_BYTES, frame_of
from tests.faults.hostile import Raw, ServerProcess, no_trace_of_ours, unharmed

COMMANDS = {code: kind for code, kind in KINDS.items() if issubclass(kind, Command) and kind is not Hello}
VICTIM = "victim"  # the subject under attack; healthy clients use other subjects
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("hostile"))
    with inturn.connect(server.address) as mq:
        mq.create_subject(VICTIM, 2)
    yield server
    server.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


def _greeted(server: ServerProcess) -> Raw:
    raw = Raw(server.port)
    raw.hello()
    return raw


# Bytes


def test_random_bytes_end_their_own_stream_only(server: ServerProcess, rng: random.Random) -> None:
    with unharmed(server, "bytes"):
        for number in range(60):
            with Raw(server.port) as raw, contextlib.suppress(ConnectionError):
                if number % 2:
                    raw.hello()
                raw.send(rng.randbytes(rng.choice((1, 3, 15, 100, 5000))))
                raw.socket.shutdown(socket.SHUT_WR)
                assert raw.is_hung_up_on()


@pytest.mark.parametrize("greets", [False, True])
def test_absurd_lengths_end_the_stream_at_once(server: ServerProcess, greets: bool) -> None:
    with unharmed(server, f"lengths-{greets}"):
        for length in (0, 1, HEADER_BYTES - 5, 64 * MIB + 1, 2**31, 2**32 - 1):
            with Raw(server.port) as raw, contextlib.suppress(ConnectionError):
                if greets:
                    raw.hello()
                frame = frame_of(7, 3, b"")
                raw.send(struct.pack("<I", length) + frame[4:])
                assert raw.is_hung_up_on()


def test_right_frames_with_random_bodies_are_answered_with_an_error(server: ServerProcess, rng: random.Random) -> None:
    with unharmed(server, "bodies"), _greeted(server) as raw:
        for code in (*KINDS, ERROR, 999, 65535):
            for size in (0, 1, 20, 3000):
                assert isinstance(raw.answer(raw.send_frame(code, rng.randbytes(size))), InturnError) or code in (
                    3,
                    53,
                    60,
                )


def test_bodies_that_claim_more_than_they_have_are_answered_with_an_error(server: ServerProcess) -> None:
    claims = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    deep = [b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\x81\xa6fields\x81\xa1a" + b"\xdc\xff\xff" * 900]
    with unharmed(server, "claims"), _greeted(server) as raw:
        for code, kind in (*KINDS.items(), (ERROR, None)):
            names = getattr(kind, "__struct_fields__", ())
            for body in (*claims, *deep, *(_map_with(name, claim) for name in names for claim in claims)):
                answer = raw.answer(raw.send_frame(code, body))
                assert isinstance(answer, InturnError), (code, body[:40])


def _map_with(name: str, value: bytes) -> bytes:
    return b"\x81" + msgspec.msgpack.encode(name) + value


@pytest.mark.parametrize("code", sorted(set(KINDS) - set(COMMANDS)))
def test_what_is_no_command_is_refused(server: ServerProcess, code: int) -> None:
    """Answers, and a second Hello."""
    with _greeted(server) as raw:
        body = bytes(pack(1, Hello(VERSIONS)))[HEADER_BYTES:] if KINDS[code] is Hello else b"\x80"
        assert isinstance(raw.answer(raw.send_frame(code, body)), InturnError)
    server.assert_unharmed()


def test_whoever_does_not_greet_is_hung_up_on(server: ServerProcess) -> None:
    with Raw(server.port) as raw, contextlib.suppress(ConnectionError):
        answer = raw.ask(Ping())
        assert isinstance(answer, InturnError)
    with Raw(server.port) as raw:
        raw.send(pack(1, Hello((2**31, 2**32))))
        assert raw.is_hung_up_on()
    server.assert_unharmed()


# Commands

NUMBERS = [0, 1, -1, 2, 7, 1024, 65536, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
TIMES = [0.0, -1.0, 1e-9, 0.05, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    *("", VICTIM, "attackers", "healthy", "a" * 300, "%dead%attackers%victim", "%retry%attackers%victim", "%", "\x00"),
    *("../../etc", "ünï", "first", "last", "offset:-1", "timestamp:99999999999999999999", "key", "park", "skip"),
    *("' or 1=1 --", "x" * 200_000, "slots", "strict", "independent", "sticky", "partition", "parked"),
]
BLOBS = [b"", b"k", b"\xff" * 2000, bytes(300_000), BitMap64([3, 5]).serialize(), b"\x01" + bytes(30)]
OTHERS: list[Any] = [None, True, [], {}, [[]], {"a": 1}, "text", 5, 1.5, b"bytes", [1, 2, 3], [[1, 2], [3, 4]]]


def _hostile(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value of the type, at the limits of the type, or of a different type."""
    if rng.random() < 0.04:
        return rng.choice(OTHERS)
    origin: Any = getattr(hint, "__origin__", None)
    arguments: tuple[Any, ...] = getattr(hint, "__args__", ())
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            count = rng.choice((0, 1, 2, 50)) if depth < 3 else 0
            return [_hostile(arguments[0], rng, depth + 1) for _ in range(count)]
        return [_hostile(one, rng, depth + 1) for one in arguments]
    if arguments:  # a union
        return _hostile(rng.choice(arguments), rng, depth)
    match hint:
        case _ if hint is int:
            return rng.choice(NUMBERS)
        case _ if hint is float:
            return rng.choice(TIMES)
        case _ if hint is str:
            return rng.choice(TEXTS if depth < 2 else [text for text in TEXTS if len(text) < 1000])
        case _ if hint is bytes:
            return rng.choice(BLOBS if depth < 2 else [blob for blob in BLOBS if len(blob) < 3000])
        case _ if hint is bool:
            return rng.random() < 0.5
        case _ if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return _struct(hint, rng, depth + 1)
        case _ if hasattr(hint, "__dataclass_fields__"):
            return {name: _hostile(one, rng, depth + 1) for name, one in get_type_hints(hint).items()}
    return None


def _struct(kind: type[msgspec.Struct], rng: random.Random, depth: int = 0) -> Any:
    hints = get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    if kind.__struct_config__.array_like:
        return [_hostile(hints[field.name], rng, depth) for field in fields]
    return {field.encode_name: _hostile(hints[field.name], rng, depth) for field in fields if rng.random() > 0.02}


@pytest.mark.parametrize("code", sorted(COMMANDS), ids=lambda code: KINDS[code].__name__)
def test_commands_with_absurd_values_are_answered(server: ServerProcess, code: int, rng: random.Random) -> None:
    kind = COMMANDS[code]
    with unharmed(server, f"values-{code}"), _greeted(server) as raw:
        numbers = [raw.send_frame(code, msgspec.msgpack.encode(_struct(kind, rng))) for _ in range(60)]
        raw.socket.settimeout(90.0)  # some commands use the whole wait time
        if not any(name == "wait_s" for name in kind.__struct_fields__):
            for number in numbers:
                raw.answer(number)
        assert raw.ask(Ping()) is not None


def _lease(raw: Raw, group: str, member: str = "mallory") -> int:
    raw.ask(Heartbeat(VICTIM, group, member, "key", "first"))
    granted = raw.ask(Acquire(VICTIM, group, 0, member, 1))
    assert isinstance(granted, Granted)
    return granted.epoch


def test_garbage_in_a_finished_set_harms_nobody_but_its_group(server: ServerProcess, rng: random.Random) -> None:
    good = [
        BitMap64(range(10)).serialize(),
        BitMap64([1, 2**33, 2**40]).serialize(),
        BitMap64(range(10**6)).serialize(),
    ]
    with unharmed(server, "finished"), _greeted(server) as raw:
        epoch = _lease(raw, "attackers")
        for number in range(1, 200):
            data = bytearray(rng.choice(good))
            for _ in range(rng.randint(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            if rng.random() < 0.2:
                del data[rng.randrange(len(data)) :]
            progress = Progress(0, epoch, 0, number, bytes(data))
            raw.ask(Commit(VICTIM, "attackers", "mallory", (progress,)))
            raw.ask(commands.DescribeGroup(VICTIM, "attackers"))
        raw.ask(Commit(VICTIM, "attackers", "mallory", (Progress(0, epoch, 0, 10**6, rng.randbytes(2 * MIB)),)))


def test_progress_beyond_the_end_of_the_log_is_refused(server: ServerProcess) -> None:
    """Otherwise the log would continue behind the false progress after the next start, for all groups."""
    with _greeted(server) as raw:
        epoch = _lease(raw, "far")
        end = 1_000_000
        failure = commands.Failure(end, b"k", 1, "")
        parked = commands.LotChange(b"k", "parked", added=(commands.ParkedMessage(1, end, b""),))
        for progress in (
            Progress(0, epoch, end, 1),
            Progress(0, epoch, 2**63 - 1, 2),
            Progress(0, epoch, 0, 3, failed=(failure,)),
            Progress(0, epoch, 0, 4, lots=(parked,)),
        ):
            assert isinstance(raw.ask(Commit(VICTIM, "far", "mallory", (progress,))), InvalidInput)
            assert isinstance(raw.ask(commands.Release(VICTIM, "far", "mallory", progress)), InvalidInput)
        assert raw.ask(Commit(VICTIM, "far", "mallory", (Progress(0, epoch, 0, 5),))) == commands.Committed((0,))
    server.assert_unharmed()


def test_a_member_name_without_end_is_refused(server: ServerProcess) -> None:
    with _greeted(server) as raw:
        assert isinstance(raw.ask(Heartbeat(VICTIM, "far", "m" * 100_000, "key", "first")), InvalidInput)
        assert isinstance(raw.ask(Acquire(VICTIM, "far", 0, "m" * 100_000, 1)), InvalidInput)


def _batch(**changes: Any) -> Any:
    batch = encode([Outgoing(b"body", b"key")], array("H", [5]), first_sequence=0)
    return msgspec.structs.replace(batch, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 0},
        {"count": 2},
        {"count": 2**31},
        {"count": -1},
        {"checksum": 1},
        {"payload": b""},
        {"compression": 1},
        {"compression": 7},
        {"compression": 2**40},
        {"first_sequence": -1},
        {"first_sequence": 2**63},
        {"producer_id": -1},
        {"producer_id": 2**64 - 1},
        {"producer_epoch": 2**40},
        {"producer_epoch": -5},
        {"route_version": 2**40},
        {"route_version": 0},
    ],
    ids=str,
)
def test_a_batch_that_is_wrong_is_refused_and_the_log_goes_on(server: ServerProcess, changes: dict[str, Any]) -> None:
    with _greeted(server) as raw:
        answer = raw.ask(Append(VICTIM, 1, _batch(**changes)))
        if "first_sequence" not in changes and "producer_id" not in changes:
            assert isinstance(answer, InturnError), answer
    with inturn.connect(server.address) as mq, mq.producer() as producer:
        stored = producer.send_sync(VICTIM, b"after", key=_key_of_partition(mq, 1))
        assert stored.partition == 1
        assert [one.body for one in mq.reader(VICTIM, stored.offset).read(1)][-1:] == [b"after"]
    server.assert_unharmed()


def _key_of_partition(mq: inturn.Connection, partition: int) -> str:
    route = mq.subject(VICTIM).route
    return next(key for key in map(str, range(100)) if route.by_slot[inturn.slot_of(key.encode())] == partition)


# Time and room


def test_those_who_send_slowly_or_never_end_hold_nobody_up(server: ServerProcess) -> None:
    hello = bytes(pack(1, Hello(VERSIONS)))
    with unharmed(server, "slow"), contextlib.ExitStack() as open_:
        slow = [open_.enter_context(Raw(server.port)) for _ in range(20)]
        for byte in hello:
            for raw in slow:
                raw.send(bytes([byte]))
        for raw in slow:
            assert raw.answer(1) is not None
        frame = frame_of(2, 3, bytes(2 * MIB))
        for raw in slow:
            raw.send(frame[: MIB // 2])  # the rest is never sent


def test_hundreds_of_idle_connections_are_kept(server: ServerProcess) -> None:
    with unharmed(server, "idle"), contextlib.ExitStack() as open_:
        for number in range(400):
            raw = open_.enter_context(Raw(server.port))
            if number % 2:
                raw.hello()


def test_answers_that_nobody_takes_are_not_kept_without_end(server: ServerProcess) -> None:
    with inturn.connect(server.address) as mq, mq.producer() as producer:
        for _ in range(16):
            producer.send(VICTIM, bytes(MIB), key=_key_of_partition(mq, 0))
    with unharmed(server, "answers"), contextlib.ExitStack() as open_:
        for _ in range(3):
            raw = open_.enter_context(_greeted(server))
            frames = b"".join(bytes(pack(number, Read(VICTIM, 0, 0, 16 * MIB))) for number in range(2, 1000))
            raw.send(frames)
        time.sleep(1.0)
        server.assert_unharmed()


def test_long_polls_without_end_are_bounded(server: ServerProcess) -> None:
    with unharmed(server, "polls"), _greeted(server) as raw:
        for number in range(2, 5000):
            raw.send(pack(number, Read(VICTIM, 0, 2**40, 1000, 60.0)))
        time.sleep(0.2)
        pull = Pull(VICTIM, "nobody", 0, "m", 1, 0, 1000, float("nan"))
        raw.send(pack(99_999, pull))
        assert isinstance(raw.answer(99_999), InturnError)


def test_what_broke_inside_of_the_server_was_told(server: ServerProcess) -> None:
    """Every command was refused for a reason. No command caused an unexpected error."""
    assert no_trace_of_ours(Path(server.log)) == []
