"""Which tests prove which requirement: read from the tests, written to docs/requirements.md.

A test names the proved ids at the beginning of the docstring: `C9, C10: …`. A test without ids has the ids at the
beginning of the module's docstring. `make docs` writes the page; `tests/test_requirements.py` compares the page.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "docs" / "requirements.toml"
PAGE = ROOT / "docs" / "requirements.md"
ID = re.compile(r"\b[PMBCS]\d{1,2}\b")
# After the ids comes the end, or the text about the requirement.
AT_THE_BEGINNING = re.compile(r"[PMBCS]\d{1,2}(?:, [PMBCS]\d{1,2})*(?=[.:,]|\Z)")

EVERY_BED = ("embedded", "served", "shared", "grouped")  # see tests/contract/bed.py
BEDS = (*EVERY_BED, "secured")
INTRODUCTION = """# Requirements, and the tests that prove them

Written by `make docs` from [requirements.toml](requirements.toml) and the tests; change it there. A test names what it
proves at the beginning of its docstring: `C9, C10: …`. Without, what its module's docstring begins with counts.

The contract suite runs in process (embedded), through a server (served), through a folder that another process has
open (shared), and through a cluster of a meta server and two brokers (grouped); some of it through a server with TLS,
tokens and rules, too (secured). Tests that run by themselves are of a part, or have processes of their own. What is
promised, fault by fault: [guarantees.md](guarantees.md)."""


@dataclass(frozen=True, slots=True)
class Part:
    title: str
    ids: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Requirements:
    parts: tuple[Part, ...]
    not_yet: Mapping[str, str]
    partly: Mapping[str, Mapping[str, str]]

    @property
    def ids(self) -> dict[str, str]:
        return dict(itertools.chain.from_iterable(part.ids.items() for part in self.parts))


@dataclass(frozen=True, slots=True)
class Proof:
    """A test, by file (relative to the folder of all tests) and name."""

    file: str
    name: str
    ids: tuple[str, ...]
    beds: tuple[str, ...]  # empty: the test is about a part, without a bed


@dataclass(slots=True)
class TestFile:
    """The ids in the docstrings of a file, and the fixtures of the tests."""

    path: str
    docstring: str
    tests: dict[str, tuple[str, list[str]]] = field(default_factory=dict)  # name: docstring, fixtures
    fixtures: dict[str, list[str]] = field(default_factory=dict)
    imported: list[tuple[str, str]] = field(default_factory=list)  # tests of other files: module, name


def requirements() -> Requirements:
    read = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    parts = tuple(Part(part["title"], part["ids"]) for part in read["part"])
    return Requirements(parts, read.get("not_yet", {}), read.get("partly", {}))


def ids_of(docstring: str) -> tuple[str, ...]:
    found = AT_THE_BEGINNING.match(docstring)
    return tuple(ID.findall(found[0])) if found else ()


@functools.cache
def files_of_tests() -> tuple[TestFile, ...]:
    tests = ROOT / "tests"
    paths = [*tests.rglob("test_*.py"), *tests.rglob("conftest.py")]
    return tuple(read_file(path, str(path.relative_to(tests))) for path in sorted(paths))


def read_file(path: Path, name: str) -> TestFile:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    file = TestFile(name, ast.get_docstring(tree) or "")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [one.arg for one in node.args.args]
            if node.name.startswith("test_"):
                file.tests[node.name] = (ast.get_docstring(node) or "", given)
            elif any("fixture" in ast.unparse(one) for one in node.decorator_list):
                file.fixtures[node.name] = given
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).endswith(".TestCase"):
            file.tests[ast.unparse(node.targets[0])] = ("", [])  # a state machine of hypothesis
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
            file.imported += [(node.module, one.name) for one in node.names if one.name.startswith("test_")]
    return file


@functools.cache
def proofs() -> tuple[Proof, ...]:
    """All tests with an id, in the docstring of the test or of the file."""
    files = files_of_tests()
    secured = {
        (module.removeprefix("tests.").replace(".", "/") + ".py", name)
        for file in files
        for module, name in file.imported
    }
    return tuple(
        Proof(file.path, name, ids, beds_of(file, given) + (("secured",) if (file.path, name) in secured else ()))
        for file in files
        for name, (docstring, given) in file.tests.items()
        if (ids := ids_of(docstring) or ids_of(file.docstring))
    )


def beds_of(file: TestFile, given: list[str]) -> tuple[str, ...]:
    if not file.path.startswith("contract/"):
        return ()
    (shared,) = (one for one in files_of_tests() if one.path == "contract/conftest.py")
    reached = set(_reached(given, {**shared.fixtures, **file.fixtures}))
    if "bed" in reached:
        return EVERY_BED
    return ("served",) if reached & {"served", "short", "service"} else ()


def _reached(names: list[str], fixtures: Mapping[str, list[str]]) -> Iterator[str]:
    for name in names:
        yield name
        # A fixture that takes a fixture of the same name means the fixture outside of the file, nearer to the bed.
        yield from _reached([one for one in fixtures.get(name, []) if one != name], fixtures)


def page() -> str:
    known, all_proofs = requirements(), proofs()
    by_id = {id: [proof for proof in all_proofs if id in proof.ids] for id in known.ids}
    lines = [
        *INTRODUCTION.splitlines(),
    ]
    for part in known.parts:
        lines += ["", f"## {part.title}", "", "| id | what | runs | tests |", "| --- | --- | --- | --- |"]
        lines += [_row(id, what, by_id[id], known) for id, what in part.ids.items()]
    if known.not_yet or known.partly:
        lines += ["", "## Not yet", ""]
    lines += [f"- **{id}**: {why}." for id, why in known.not_yet.items()]
    lines += [f"- **{id}**, in part: {gap['missing']}." for id, gap in known.partly.items()]
    lines += ["", "## The tests"]
    for id, found in by_id.items():
        if found:
            lines += ["", f"### {id}", *_listed(found)]
    return "\n".join(lines) + "\n"


def _row(id: str, what: str, found: list[Proof], known: Requirements) -> str:
    if id in known.not_yet:
        return f"| {id} | {what} | *not yet* | |"
    beds = {bed for proof in found for bed in proof.beds}
    runs = ", ".join(bed for bed in BEDS if bed in beds) or "by itself"
    return f"| {id} | {what} | {runs} | [{len(found)}](#{id.lower()}) |"


def _listed(found: list[Proof]) -> Iterator[str]:
    for beds in sorted({proof.beds for proof in found}, key=lambda beds: (-len(beds), beds)):
        here = [proof for proof in found if proof.beds == beds]
        yield from ("", f"{', '.join(beds).capitalize() or 'By themselves'}:", "")
        for file, of_file in itertools.groupby(here, lambda proof: proof.file):
            yield f"- [{file}](../tests/{file})::"
            yield from (f"  - `{proof.name}`" for proof in of_file)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
