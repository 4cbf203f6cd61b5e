"""Every requirement has tests, embedded and served, and docs/requirements.md lists the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirement_table import (
    AT_THE_BEGINNING,
    EVERY_BED,
    ID,
    PAGE,
    ROOT,
    beds_of,
    files_of_tests,
    ids_of,
    page,
    proofs,
    read_file,
    requirements,
)

OF_THE_CORE = [id for id in requirements().ids if not id.startswith("S")]


def _proved() -> dict[str, set[str]]:
    """By id, the beds of the tests."""
    found: dict[str, set[str]] = {}
    for proof in proofs():
        for id in proof.ids:
            found.setdefault(id, set()).update(proof.beds)
    return found


def test_the_page_is_what_would_be_written() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_tests_name_no_requirement_that_there_is_not() -> None:
    assert set(_proved()) - set(requirements().ids) == set()


def test_every_requirement_has_a_test_or_is_said_to_be_missing() -> None:
    known = requirements()
    assert [id for id in known.ids if id not in _proved()] == sorted(known.not_yet, key=list(known.ids).index)


def test_what_is_not_there_yet_is_known_by_its_id() -> None:
    known = requirements()
    assert (set(known.not_yet) | set(known.partly)) - set(known.ids) == set()


@pytest.mark.parametrize("id", [id for id in OF_THE_CORE if id not in requirements().not_yet])
def test_what_is_there_is_tested_in_process_and_served(id: str) -> None:
    assert {"embedded", "served"} <= _proved()[id]


def test_what_is_missing_in_part_is_missing_still() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "inturn").rglob("*.py"))
    assert [id for id, gap in requirements().partly.items() if gap["until"] in sources] == []


def test_ids_stand_at_the_beginning_of_a_docstring_and_nowhere_else() -> None:
    elsewhere = []
    for file in files_of_tests():
        for name, docstring in [("", file.docstring), *((name, text) for name, (text, _) in file.tests.items())]:
            first = AT_THE_BEGINNING.match(docstring)
            rest = docstring[first.end() :] if first else docstring
            if ID.search(rest) or re.match(r"test_[pmbcs]\d+_", name):
                elsewhere.append(f"{file.path}::{name}")
    assert elsewhere == []


@pytest.mark.parametrize(
    ("docstring", "ids"),
    [
        ("C9", ("C9",)),
        ("C9.", ("C9",)),
        ("C9, M10: both.", ("C9", "M10")),
        ("M3, for every count.", ("M3",)),
        ("Nothing.", ()),
        ("As C9 says.", ()),
        ("C9 is not followed by what is said of it", ()),
    ],
)
def test_a_docstring_is_understood(docstring: str, ids: tuple[str, ...]) -> None:
    assert ids_of(docstring) == ids


def test_a_file_is_understood(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        '"""C5: all of it."""\n'
        "@pytest.fixture\ndef two(one): ...\n"
        'async def test_a(two):\n    """C6."""\n'
        "def test_b(): ...\n"
        "TestC = Machine.TestCase\n"
        "from tests.contract.test_y import helper, test_z\n"
    )
    file = read_file(tmp_path / "test_x.py", "x/test_x.py")
    assert ids_of(file.docstring) == ("C5",)
    assert file.tests == {"test_a": ("C6.", ["two"]), "test_b": ("", []), "TestC": ("", [])}
    assert file.fixtures == {"two": ["one"]}
    assert file.imported == [("tests.contract.test_y", "test_z")]


def test_the_beds_are_those_that_the_contract_suite_is_really_run_on() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "tests/contract",
    ]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert collected.returncode == 0, collected.stdout
    seen: dict[tuple[str, str], set[str]] = {}
    for path, name, parameters in re.findall(r"^tests/(\S+?)::(\w+)(?:\[(.*)\])?$", collected.stdout, re.MULTILINE):
        seen.setdefault((path, name), set()).update(set(parameters.split("-")) & set(EVERY_BED))
    read = {
        (file.path, name): set(beds_of(file, given))
        for file in files_of_tests()
        if file.path.startswith("contract/")
        for name, (_, given) in file.tests.items()
    }
    on_all_beds = {place for place, beds in read.items() if beds == set(EVERY_BED)}
    assert on_all_beds == {place for place, beds in seen.items() if beds == set(EVERY_BED)}
    assert set(read) == set(seen)
