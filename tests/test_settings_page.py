"""docs/reference/settings.md lists exactly the existing settings, with type, default and unit."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from inturn.cli.main import app
from inturn.security.access import Quota
from tests.markdown import DOCS, code, rows, sections

SOURCE = Path(__file__).parent.parent / "src" / "inturn"
WITHOUT_THE_WORD = {"FlowControl", "RetryDelays", "Limits", "Credentials"}
NOT_FOR_PROGRAMS = {"testing", "bench"}
PAGE = sections((DOCS / "reference" / "settings.md").read_text(encoding="utf-8"))
KIB = 1024


@functools.cache
def settings_classes() -> dict[str, type]:
    return {name: getattr(importlib.import_module(module), name) for module, name in _found()}


def _found() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if place.parts[0] in NOT_FOR_PROGRAMS:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (node.name.endswith("Settings") or node.name in WITHOUT_THE_WORD):
                yield ".".join(["inturn", *place.with_suffix("").parts]), node.name


def shown(name: str, value: Any) -> str:
    """A default in the notation of the page."""
    match value:
        case None | bool():
            return str(value)
        case enum.Enum():
            return f'"{value.value}"'
        case str():
            return f'"{value}"'
        case int() if name.endswith("_bytes"):
            return shown_bytes(value)
        case int() | float():
            return f"{value:,.15g}"
        case tuple():
            return " ".join(shown(name, one) for one in value)
    fields = dataclasses.fields(value)
    usual = type(value)()
    changed = [one.name for one in fields if getattr(value, one.name) != getattr(usual, one.name)]
    return f"{type(value).__name__}({', '.join(f'{one}={getattr(value, one):g}' for one in changed)})"


def shown_bytes(value: int) -> str:
    for unit, size in (("GiB", KIB**3), ("MiB", KIB**2), ("KiB", KIB)):
        if value and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value:,}"


def real(kind: type) -> dict[str, tuple[str, str, str]]:
    """By name: type, default, and the unit if the name ends with a unit."""
    made = {}
    for field in dataclasses.fields(kind):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        text = "needed" if default is dataclasses.MISSING else shown(field.name, default)
        made[field.name] = (str(field.type).replace(" | ", " or "), text, unit_of(field.name))
    return made


def unit_of(name: str) -> str:
    if name.endswith("_bytes"):
        return "bytes"
    return "s" if name.endswith("_s") or "_s_" in name else ""


def documented(section: str) -> dict[str, tuple[str, str, str]]:
    found = {}
    for name, kind, default, unit, meaning in rows(PAGE[section]):
        assert meaning, f"{name}: say what it means"
        is_told = unit_of(code(name)) != ""
        found[code(name)] = (code(kind), default if default == "needed" else code(default), unit if is_told else "")
    return found


@pytest.mark.parametrize("name", sorted(settings_classes()))
def test_every_setting_is_on_the_page_with_its_type_its_default_and_its_unit(name: str) -> None:
    assert documented(name) == real(settings_classes()[name])


def test_the_page_has_no_settings_that_there_are_not() -> None:
    assert {name for name in PAGE if re.fullmatch(r"[A-Z]\w+[A-Z]\w+|Limits|Credentials", name)} == set(
        settings_classes()
    )


def test_the_options_of_a_server_are_on_the_page_with_their_defaults() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    real_options = {}
    for one in serve.params:
        if one.param_type_name == "option" and one.name not in ("data", "json_output", "help"):
            real_options[one.opts[0]] = _option_default(one.default)
    page_options = {}
    for option, default, meaning in rows(PAGE["inturn serve"]):
        assert meaning
        page_options[code(option)] = default if default == "off" else code(default)
    assert page_options == real_options


def _option_default(default: object) -> str:
    match default:
        case False:
            return "off"
        case "":
            return '""'
        case float():
            return f"{default:g}"
        case enum.Enum():
            return str(default.value)
    return str(default)


def test_the_environment_variables_are_on_the_page() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert {code(name) for name, _ in rows(PAGE["Environment"])} == set(re.findall(r'"(INTURN_[A-Z_]+)"', sources))


def test_quotas_are_on_the_page() -> None:
    fields = {one.name for one in msgspec.structs.fields(Quota)}
    assert {code(name) for name, _ in rows(PAGE["Quotas"])} == fields


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("x_bytes", 3 * KIB * KIB, "3 MiB"),
        ("x_bytes", 1025, "1,025"),
        ("x", 20_000, "20,000"),
        ("x_s", 0.5, "0.5"),
        ("x_s", 604800.0, "604,800"),
        ("x", None, "None"),
        ("x", "auto", '"auto"'),
    ],
)
def test_a_default_is_said_as_people_read_it(name: str, value: object, text: str) -> None:
    assert shown(name, value) == text
