"""The documentation: every page is in the index, every link has a target, every guarantee names tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.markdown import DOCS, rows, sections
from tests.requirement_table import files_of_tests

ROOT = DOCS.parent
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "deploy" / "README.md"]
GUARANTEES = DOCS / "guarantees.md"
INLINE = re.compile(r"\]\(([^)\s]+)\)")
DEFINITION = re.compile(r"^\[(\w+)\]: (\S+)\n +'(\w+)'$", re.MULTILINE)  # label, file, name of the test
USE = re.compile(r"\]\[(\w+)\]")


def text_of(page: Path) -> str:
    """The text without code."""
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[str]:
    """Links within the repository."""
    text = text_of(page)
    found = [*INLINE.findall(text), *(target for _, target, _ in DEFINITION.findall(text))]
    return (target for target in found if "://" not in target and not target.startswith("mailto:"))


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as repository hosts make anchors."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title)).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    listed = {(DOCS / link).resolve() for link in links(index)}
    assert [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page != index and page not in listed] == []


def test_guarantees_name_tests_that_there_are() -> None:
    known = {(f"../tests/{file.path}", name) for file in files_of_tests() for name in file.tests}
    named = DEFINITION.findall(GUARANTEES.read_text(encoding="utf-8"))
    assert len(named) > 100
    assert [(file, name) for _, file, name in named if (file, name) not in known] == []


def test_every_test_that_guarantees_name_is_used_and_every_use_is_named() -> None:
    text = GUARANTEES.read_text(encoding="utf-8")
    named = [label for label, _, _ in DEFINITION.findall(text)]
    assert len(named) == len(set(named))
    assert set(USE.findall(text)) == set(named)


def test_every_fault_in_the_guarantees_has_a_test() -> None:
    """Checks the rows of tables whose last column is for tests."""
    bare = []
    for title, text in sections(GUARANTEES.read_text(encoding="utf-8")).items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            head = table.splitlines()[0]
            if re.search(r"\| (tests|is shown by) \|$", head):
                bare += [f"{title}: {cells[0]}" for cells in rows(table) if not USE.search(cells[-1])]
    assert bare == []


@pytest.mark.parametrize(
    "title", sorted({"Sent in order, once", "Stored", "One owner at a time", "On Spark", "Growing", "Clusters"})
)
def test_a_section_of_the_guarantees_says_what_is_not_promised(title: str) -> None:
    assert "Not promised:" in sections(GUARANTEES.read_text(encoding="utf-8"))[title]


def test_a_heading_becomes_an_anchor(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One, `two` & three\n## Four-five\n")
    assert anchors(page) == {"one-two--three", "four-five"}


def test_every_source_of_the_comparison_is_used_and_every_number_has_one() -> None:
    text, _, listed = (DOCS / "comparison.md").read_text(encoding="utf-8").partition("## Sources")
    sources = [int(number) for number in re.findall(r"^(\d+)\. ", listed, re.MULTILINE)]
    assert sources == list(range(1, len(sources) + 1))
    assert {int(number) for number in re.findall(r"\[(\d+)\]", text)} == set(sources)
