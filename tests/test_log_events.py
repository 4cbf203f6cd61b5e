"""docs/reference/logs.md lists exactly the logged events, with level and fields."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "inturn"
REFERENCE = ROOT / "docs" / "reference" / "logs.md"
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
NAME = re.compile(r"[a-z]+\.[a-z_]+\Z")


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    levels: frozenset[str]
    fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the logger."""

    where: str
    name: str
    levels: frozenset[str]
    fields: frozenset[str]


class Unreadable(AssertionError):
    """A use of the logger that this test cannot follow."""


def calls_in(path: Path, where: str) -> Iterator[Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    followed: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_logger(node.func.value):
            followed.add(node.func.value)
            yield _call(node, node.func.attr, f"{where}:{node.lineno}")
    for node in ast.walk(tree):
        if _is_logger(node) and isinstance(node.ctx, ast.Load) and node not in followed:  # type: ignore[attr-defined]
            line = node.lineno  # type: ignore[attr-defined]
            raise Unreadable(f"{where}:{line}: call _log.warning(…) and its like directly, so that the event is found")


def _is_logger(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "_log"


def _call(node: ast.Call, method: str, where: str) -> Call:
    arguments = node.args
    if method == "log":
        named = {one.attr for one in ast.walk(arguments[0]) if isinstance(one, ast.Attribute)}
        levels = frozenset(name.lower() for name in named if name.isupper()) & LEVELS
        arguments = arguments[1:]
    elif method in LEVELS:
        levels = frozenset({"error" if method == "exception" else method})
    else:
        raise Unreadable(f"{where}: _log.{method} is no level")
    if len(arguments) != 1 or not isinstance(arguments[0], ast.Constant) or not isinstance(arguments[0].value, str):
        raise Unreadable(f"{where}: the event must be a text, and everything else a field by name")
    if any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable(f"{where}: name the fields, no **")
    fields = frozenset(str(keyword.arg) for keyword in node.keywords) - {"exc_info"}
    return Call(where, arguments[0].value, levels, fields)


@functools.cache
def logged() -> dict[str, Event]:
    found: dict[str, Event] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for call in calls_in(path, str(path.relative_to(ROOT))):
            known = found.get(call.name, Event(call.name, frozenset(), frozenset()))
            found[call.name] = Event(call.name, known.levels | call.levels, known.fields | call.fields)
    return found


def documented() -> dict[str, Event]:
    found = {}
    for line in REFERENCE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        match = re.fullmatch(r"`([a-z]+\.[a-z_]+)`", cells[0])
        if match is not None:
            assert len(cells) == 4, line
            assert cells[3], f"{cells[0]}: say when it is logged"
            levels = frozenset(re.findall(r"[a-z]+", cells[1]))
            assert match[1] not in found, f"{match[1]} is there twice"
            found[match[1]] = Event(match[1], levels, frozenset(re.findall(r"`([a-z_]+)`", cells[2])))
    return found


def test_every_event_is_in_the_reference_with_its_level_and_its_fields() -> None:
    assert documented() == logged()


def test_events_have_names_of_one_form() -> None:
    assert [name for name in logged() if NAME.match(name) is None] == []


def test_the_reference_is_in_the_order_of_the_names() -> None:
    assert list(documented()) == sorted(documented())


@pytest.mark.parametrize(
    "text",
    [
        "note = _log.warning",
        "_log.warning(name)",
        "_log.warning(f'a.{b}')",
        "_log.warning('a.b %s', b)",
        "_log.warning('a.b', **fields)",
        "tell(_log)",
        "_log.shout('a.b')",
    ],
)
def test_what_would_hide_an_event_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.py").write_text(text)
    with pytest.raises(Unreadable):
        list(calls_in(tmp_path / "x.py", "x.py"))


def test_a_call_is_understood(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "_log = get_logger('x')\n"
        "_log.exception('a.b', one=1)\n"
        "_log.log(logging.INFO if c else logging.WARNING, 'c.d', two=2, exc_info=e)\n"
    )
    first, second = calls_in(tmp_path / "x.py", "x.py")
    assert (first.name, first.levels, first.fields) == ("a.b", frozenset({"error"}), frozenset({"one"}))
    assert (second.name, second.levels, second.fields) == ("c.d", frozenset({"info", "warning"}), frozenset({"two"}))
