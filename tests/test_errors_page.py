"""docs/reference/errors.md lists every error, with bases, fields and `retriable`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import NamedTuple

import pytest

import inturn.errors
from inturn.model import errors as tree
from inturn.model.errors import InturnError
from inturn.spark.audit.verdict import OrderBroken
from inturn.spark.ordered.drain import DrainFailed
from inturn.spark.source.ordered import TaskFailed
from inturn.testing import OrderViolated
from tests.markdown import DOCS, code, rows

PAGE = DOCS / "reference" / "errors.md"
OUTSIDE = [DrainFailed, TaskFailed, OrderBroken, OrderViolated]


class Row(NamedTuple):
    bases: tuple[str, ...]
    is_retriable: bool
    fields: tuple[str, ...]


def kinds() -> list[type[InturnError]]:
    inside = [one for one in vars(tree).values() if inspect.isclass(one) and issubclass(one, InturnError)]
    return [*inside, *OUTSIDE]


def real(kind: type[InturnError]) -> Row:
    return Row(tuple(base.__name__ for base in kind.__bases__), kind.retriable, tuple(_fields(kind)))


def _fields(kind: type[InturnError]) -> list[str]:
    """The attributes that the class's own `__init__` sets."""
    if "__init__" not in vars(kind):
        return []
    made = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    names = [
        node.attr
        for node in ast.walk(made)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    ]
    return [name for name in names if not (kind is tree.GateClosed and name == "owner")]  # a closed gate has no owner


def documented() -> dict[str, Row]:
    found = {}
    for name, bases, retriable, fields, when, step in rows(PAGE.read_text(encoding="utf-8")):
        assert when, f"{name}: say when"
        assert step or when.startswith("the base of"), f"{name}: say what to do"
        assert retriable in ("yes", "no"), name
        assert code(name) not in found, f"{name} is there twice"
        texts = tuple(re.findall(r"`(\w+)`", bases)), retriable == "yes", tuple(re.findall(r"`(\w+)`", fields))
        found[code(name)] = Row(*texts)
    return found


@pytest.mark.parametrize("kind", kinds())
def test_every_error_is_on_the_page_as_it_is(kind: type[InturnError]) -> None:
    assert documented()[kind.__name__] == real(kind)


def test_the_page_has_no_errors_that_there_are_not() -> None:
    assert set(documented()) == {kind.__name__ for kind in kinds()}


def test_every_error_of_the_tree_is_public() -> None:
    inside = [kind.__name__ for kind in kinds() if kind not in OUTSIDE]
    assert sorted(inturn.errors.__all__) == sorted(inside)


def test_the_tree_says_which_are_retriable() -> None:
    drawn = dict(re.findall(r"(\w+) {2,}(.+)$", tree.__doc__ or "", re.MULTILINE))
    leaves = [kind for kind in kinds() if kind.__name__ in drawn]
    assert len(leaves) > 30
    assert [kind.__name__ for kind in leaves if kind.retriable != ("(retriable)" in drawn[kind.__name__])] == []
