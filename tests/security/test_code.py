"""The code base: input from outside is never executed, unpickled, or used as a path or a command."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inturn.protocol import commands
from tests.security.played import all_commands

SOURCE = Path(__file__).parents[2] / "src"
# Modules that make objects or code out of bytes.
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "yaml",
    "jsonpickle",
    "code",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_ATTRIBUTES = {("os", "system"), ("os", "popen"), ("pickle", "loads"), ("subprocess", "getoutput")}
# Where programs are started and modules are found by name, and the source of the name.
ALLOWED = {
    "subprocess": {
        "inturn/spark/java.py": "asks the Java that the environment names for its version",
    },
    "exec": {},
    "import_module": {
        "inturn/cli/checkout.py": "the benchmarks and the demo of a checkout, by fixed names",
        "inturn/spark/__init__.py": "its own modules, when they are needed",
        "inturn/consumer/process_child.py": "the handler that the parent process got as an object",
        "inturn/spark/shipping.py": "the handler that the caller of a job names; whether executors have it",
    },
}


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _found(file: Path) -> Iterator[str]:
    name = file.relative_to(SOURCE).as_posix()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        line = f"{name}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                modules = {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                modules = {module.partition(".")[0]}
            case ast.Call(func=ast.Name(id=called)) if called in FORBIDDEN_CALLS:
                if name not in ALLOWED["exec"]:
                    yield f"{line}: {called}()"
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=called)):
                if (owner, called) in FORBIDDEN_ATTRIBUTES:
                    yield f"{line}: {owner}.{called}()"
                if called == "import_module" and name not in ALLOWED["import_module"]:
                    yield f"{line}: import_module()"
                continue
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield f"{line}: shell=True"
                continue
            case _:
                continue
        for module in sorted(modules & FORBIDDEN_MODULES):
            yield f"{line}: import {module}"
        if "subprocess" in modules and name not in ALLOWED["subprocess"]:
            yield f"{line}: import subprocess"


def test_nothing_is_unpickled_evaluated_or_run_that_is_not_listed_here_with_its_reason() -> None:
    assert [one for file in _files() for one in _found(file)] == []


def test_the_list_of_reasons_has_no_file_that_is_gone() -> None:
    listed = {name for names in ALLOWED.values() for name in names}
    assert listed <= {file.relative_to(SOURCE).as_posix() for file in _files()}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
        "import os\nos.system(text)",
        "run(text, shell=True)",
        "import subprocess",
        "import importlib\nimportlib.import_module(text)",
        "def f():\n    import cloudpickle.x",
    ],
)
def test_it_is_found_where_it_is(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    (tmp_path / "bad.py").write_text(text)
    assert list(_found(tmp_path / "bad.py"))


# The fields of a command

SUSPICIOUS = (
    "path",
    "file",
    "folder",
    "dir",
    "url",
    "uri",
    "host",
    "cmd",
    "exec",
    "module",
    "handler",
    "script",
    "env",
)


def _fields(kind: type, seen: set[type]) -> Iterator[tuple[str, str, object]]:
    if kind in seen or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return
    seen.add(kind)
    for name, hint in typing.get_type_hints(kind).items():
        yield kind.__name__, name, hint
        for inner in (hint, *typing.get_args(hint)):
            yield from _fields(inner, seen)


def test_no_command_has_a_field_for_a_path_a_program_or_an_address() -> None:
    """The options of the server decide the use of the disk, not commands."""
    fields = [one for kind in all_commands() for one in _fields(kind, set())]
    assert len(fields) > 100
    assert [f"{kind}.{name}" for kind, name, _ in fields if any(word in name.lower() for word in SUSPICIOUS)] == []


def test_every_field_of_the_protocol_is_a_plain_value() -> None:
    """No Any, no object: a decoder creates only values of the declared types."""
    answers = list(typing.get_args(commands.Answer))
    for kind in [*all_commands(), *answers]:
        for owner, name, hint in _fields(kind, set()):
            assert hint not in (typing.Any, object), f"{owner}.{name}"
