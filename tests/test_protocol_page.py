"""docs/reference/protocol.md lists every command, answer and value of the protocol, with number and fields."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator

import msgspec
import pytest

from inturn.model.batch import HEADER_BYTES as BATCH_HEADER_BYTES
from inturn.protocol import frames
from inturn.protocol.codec import ERROR, KINDS, VERSIONS, ErrorBody
from inturn.protocol.commands import Answer, Command
from inturn.transport.server_session import HELLO_BYTES_MAX, ServerSettings
from tests.markdown import DOCS, code, rows, sections

TEXT = (DOCS / "reference" / "protocol.md").read_text(encoding="utf-8")
PAGE = sections(TEXT)
COMMANDS = {kind.__name__ for kind in KINDS.values() if issubclass(kind, Command)}


def fields_of(kind: type) -> list[str]:
    """The fields in order. A question mark follows an optional field."""
    if issubclass(kind, msgspec.Struct):
        return [f"{one.name}{'' if one.required else '?'}" for one in msgspec.structs.fields(kind)]
    made = dataclasses.fields(kind)  # type: ignore[arg-type]
    return [f"{one.name}{'' if _is_needed(one) else '?'}" for one in made]


def _is_needed(field: dataclasses.Field[object]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def is_array(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and bool(kind.__struct_config__.array_like)


@functools.cache
def values_inside() -> tuple[type, ...]:
    """The values inside commands and answers, in the order of the first use."""
    found: dict[type, None] = {}
    for kind in KINDS.values():
        _look_into(kind, found)
    return tuple(kind for kind in found if kind not in KINDS.values())


def _look_into(kind: object, found: dict[type, None]) -> None:
    for part in typing.get_args(kind):
        _look_into(part, found)
    is_made_of_fields = isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind))
    if isinstance(kind, type) and is_made_of_fields and kind not in found:
        found[kind] = None
        for hint in typing.get_type_hints(kind).values():
            _look_into(hint, found)


def _row(kind: type) -> tuple[str, list[str]]:
    return ("array" if is_array(kind) else "map"), fields_of(kind)


def _fields(cell: str) -> list[str]:
    return re.findall(r"`(\w+\??)`", cell)


def test_every_command_is_on_the_page_with_its_number_and_its_fields() -> None:
    listed = {code(name): (int(number), form, _fields(all)) for number, name, form, all, *_ in rows(PAGE["Commands"])}
    real = {kind.__name__: (number, *_row(kind)) for number, kind in KINDS.items() if issubclass(kind, Command)}
    assert listed == real


def test_every_command_says_what_it_is_answered_with() -> None:
    answers = {kind.__name__ for kind in typing.get_args(Answer)}
    named = [(code(name), code(answer), what) for _, name, _, _, answer, what in rows(PAGE["Commands"])]
    assert [name for name, answer, what in named if answer not in answers or not what] == []


def test_commands_are_answered_with_what_our_own_code_waits_for() -> None:
    """A call that waits for an answer names both kinds: `ask(node, FindSubject(name), Subject)`."""
    page = {code(name): code(answer) for _, name, _, _, answer, _ in rows(PAGE["Commands"])}
    waited_for = set(_asked())
    assert len(waited_for) > 20
    assert [(name, answer) for name, answer in waited_for if page[name] != answer] == []


def _asked() -> Iterator[tuple[str, str]]:
    answers = {kind.__name__ for kind in typing.get_args(Answer)}
    for path in (DOCS.parent / "src" / "inturn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) >= 2 and ast.unparse(node.args[-1]) in answers:
                asked = [ast.unparse(one.func) for one in node.args if isinstance(one, ast.Call)]
                yield from ((name, ast.unparse(node.args[-1])) for name in asked if name in COMMANDS)


def test_every_answer_is_on_the_page_with_its_number_and_its_fields() -> None:
    listed = {code(name): (int(number), form, _fields(all)) for number, name, form, all, _ in rows(PAGE["Answers"])}
    real = {kind.__name__: (number, *_row(kind)) for number, kind in KINDS.items() if not issubclass(kind, Command)}
    assert listed == {"ErrorBody": (ERROR, *_row(ErrorBody)), **real}


def test_every_value_inside_of_them_is_on_the_page() -> None:
    listed = {code(name): (form, _fields(fields)) for name, form, fields, _ in rows(PAGE["Values inside"])}
    assert listed == {kind.__name__: _row(kind) for kind in values_inside()}


@pytest.mark.parametrize(
    "said",
    [
        f"versions {VERSIONS[0]} to {VERSIONS[1]}",
        f"header of {frames.HEADER_BYTES} bytes",
        f"{HELLO_BYTES_MAX} bytes",
        f"{ServerSettings().frame_bytes >> 20} MiB",
        f"{ServerSettings().greeting_s:g} s",
        f"{ServerSettings().silence_s:g} s",
        f"{BATCH_HEADER_BYTES} bytes",
    ],
)
def test_the_figures_in_the_text_are_right(said: str) -> None:
    assert said in TEXT


def test_a_frame_is_what_the_page_says() -> None:
    """Decoded by the table of the page, not by the reader of the package."""
    sizes = {code(name): int(size) for name, size, _ in rows(PAGE["Frames"]) if size}
    assert sizes == {"length": 4, "guard": 2, "code": 2, "checksum": 4, "number": 4}
    frame, taken = frames.frame_of(7, 3, b"\x80"), {}
    at = 0
    for name, size in sizes.items():
        taken[name] = int.from_bytes(frame[at : at + size], "little")
        at += size
    assert (taken["length"], taken["code"], taken["number"]) == (len(frame) - 4, 3, 7)
    assert frame[at:] == b"\x80"
