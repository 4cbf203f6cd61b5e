"""Every type of the protocol has a code, and decoding returns the encoded value."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator

import msgspec
import pytest

from inturn.model import errors
from inturn.model.batch import Batch, BatchHeader, StoredBatch
from inturn.model.errors import ConnectionLost, InturnError, NotFound, ProtocolError, StaleEpoch, VersionMismatch
from inturn.protocol import commands
from inturn.protocol.codec import CODES, ERROR, KINDS, pack, unpack
from inturn.protocol.commands import Command, Pulled
from inturn.protocol.frames import FrameReader


def through(value: typing.Any) -> typing.Any:
    (frame,) = FrameReader(1 << 30).feed(bytes(pack(9, value)))
    assert frame.number == 9
    return unpack(frame)


def all_of_the_protocol() -> Iterator[type]:
    for kind in vars(commands).values():
        if inspect.isclass(kind) and issubclass(kind, Command) and kind is not Command:
            yield kind
    yield from typing.get_args(commands.Answer)


@pytest.mark.parametrize("kind", list(all_of_the_protocol()), ids=lambda kind: kind.__name__)
def test_every_command_and_answer_has_a_code(kind: type) -> None:
    assert KINDS[CODES[kind]] is kind


def test_codes_are_given_once_and_zero_is_for_errors() -> None:
    assert len(CODES) == len(KINDS)
    assert ERROR not in KINDS


def test_a_batch_goes_through_without_being_copied_by_the_reader() -> None:
    header = BatchHeader(0, 3, 1, 1, 5, 6, 7, 8, 9, 10, 2**64 - 1)
    pulled = through(Pulled((StoredBatch(header, memoryview(b"abc")),), 6, 7, 8))
    assert pulled == Pulled((StoredBatch(header, memoryview(b"abc")),), 6, 7, 8)
    append = commands.Append("orders", 3, Batch(1, 2, 3, 4, 5, 0, 2**64 - 1, b"payload"), gap=True)
    assert through(append) == append


def samples() -> list[InturnError]:
    made: list[InturnError] = []
    for kind in vars(errors).values():
        if inspect.isclass(kind) and issubclass(kind, InturnError):
            parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
            values = []
            for parameter in parameters:
                if parameter.kind is parameter.VAR_POSITIONAL:
                    values.append("text")
                elif parameter.kind is not parameter.VAR_KEYWORD:
                    annotation = str(parameter.annotation)
                    values.append(_example(annotation))
            made.append(kind(*values))
    return made


def _example(annotation: str) -> typing.Any:
    if annotation.startswith("tuple[int"):
        return (1, 2)
    if annotation.startswith("Sequence"):
        return ("a", "b")
    return 7 if annotation.startswith(("int", "float")) else "text"


@pytest.mark.parametrize("error", samples(), ids=lambda error: type(error).__name__)
def test_every_error_arrives_with_its_class_its_words_and_its_fields(error: InturnError) -> None:
    arrived = through(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
    assert arrived.retriable == error.retriable


def test_fields_of_errors_can_be_used() -> None:
    stale = through(StaleEpoch("g", "3", 4, 5))
    assert (stale.group, stale.partition, stale.epoch, stale.current) == ("g", "3", 4, 5)
    assert isinstance(through(NotFound("group", "g", "do something")), LookupError)
    assert isinstance(through(ConnectionLost("here", "gone")), ConnectionError)
    assert through(VersionMismatch((1, 2), (3, 4), "inturn/9")).theirs == (1, 2)


def test_an_error_of_a_newer_inturn_is_a_plain_error_with_its_words() -> None:
    class Newer(InturnError):
        retriable = True

    assert type(through(Newer("something new"))) is InturnError  # encoded as a class that both ends know
    body = msgspec.msgpack.encode({"code": "Newer", "message": "something new", "retriable": True, "fields": {"a": 1}})
    (frame,) = FrameReader(1 << 20).feed(bytes(pack(1, InturnError("x"))))
    arrived = unpack(msgspec.structs.replace(frame, body=memoryview(body)))
    assert type(arrived) is InturnError
    assert str(arrived) == "something new"
    assert arrived.retriable


def test_what_is_not_understood_is_named() -> None:
    (frame,) = FrameReader(1 << 20).feed(bytes(pack(1, commands.Ping())))
    with pytest.raises(ProtocolError, match="unknown code 999"):
        unpack(msgspec.structs.replace(frame, code=999))
    with pytest.raises(ProtocolError, match="no Append"):
        unpack(msgspec.structs.replace(frame, code=CODES[commands.Append]))
    with pytest.raises(ProtocolError, match="no Renew"):
        unpack(msgspec.structs.replace(frame, code=CODES[commands.Renew], body=memoryview(b"\x91" * 100_000)))
