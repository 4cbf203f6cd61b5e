"""Handlers by name: lookup and error texts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inturn.model.errors import InvalidInput
from inturn.spark.shipping import load_handler, module_of
from tests.spark import noting

SHOP = """
class Till:
    def bill(self, message, context):
        return "billed"

    async def later(self, message, context):
        return "later"

till = Till()
price = 5

def bill(message, context):
    return "bill"

def alone(message):
    pass

def yields(message, context):
    yield message
"""


@pytest.fixture(autouse=True)
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ("handler_shop", "handler_closed", "handler_needy", "handler_gone")
    (tmp_path / "handler_shop.py").write_text(SHOP)
    (tmp_path / "handler_closed.py").write_text("raise RuntimeError('closed on mondays')")
    (tmp_path / "handler_needy.py").write_text("import no_such_library")
    (tmp_path / "handler_gone.py").write_text("import sys\nsys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in names:
        sys.modules.pop(name, None)


def test_a_handler_is_found_by_module_and_function() -> None:
    assert load_handler("handler_shop:bill")(None, None) == "bill"  # type: ignore[arg-type]
    assert load_handler("handler_shop:till.bill")(None, None) == "billed"  # type: ignore[arg-type]
    assert load_handler("handler_shop:till.later") is not None


def test_a_function_is_its_own_handler() -> None:
    def handle(message: object, context: object) -> None:
        pass

    assert load_handler(handle) is handle


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("handler_shop", "name it as module:function, for example shop:notify"),
        (":bill", "name it as module:function"),
        ("handler_shop:", "name it as module:function"),
        ("no_such_shop:bill", "there is no module 'no_such_shop' (looked from "),
        ("no_such_shop.till:bill", "there is no module 'no_such_shop' (looked from "),
        ("handler_shop:bil", "handler_shop has no 'bil'"),
        ("handler_shop:till.bil", "handler_shop has no 'bil'"),
        ("handler_shop:price", "is 5, which cannot be called with (message, context)"),
        ("handler_shop:alone", "handler alone(message) cannot be called with (message, context)"),
        ("handler_shop:yields", "has a `yield` in it"),
        ("handler_closed:bill", "importing handler_closed failed with RuntimeError: closed on mondays"),
        ("handler_gone:bill", "importing handler_gone failed with SystemExit: 3"),
        ("handler_needy:bill", "handler_needy needs a module that is not installed: No module named 'no_such_library'"),
    ],
)
def test_what_cannot_be_a_handler_says_why(name: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(why)):
        load_handler(name)


def test_ctrl_c_while_a_module_is_imported_is_no_fault_of_the_module(tmp_path: Path) -> None:
    (tmp_path / "handler_slow.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_handler("handler_slow:bill")


def test_the_module_that_executors_need_is_known() -> None:
    assert module_of("shop.tills:bill") == "shop.tills"
    assert module_of(noting.ignore) == "tests.spark.noting"

    def handle(message: object, context: object) -> None:
        pass

    handle.__module__ = "__main__"
    assert module_of(handle) is None
