"""The prose of the project: few pronouns in docstrings and pages, a short glossary, a short README."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.markdown import DOCS, rows

ROOT = DOCS.parent
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "deploy" / "README.md"]
PACKAGES = sorted(path for path in (ROOT / "src" / "inturn").iterdir() if (path / "__init__.py").is_file())
BESIDE = [ROOT / name for name in ("benchmarks", "demo", "examples", "simulator")]
TESTS = [ROOT / "tests", *sorted(path for path in (ROOT / "tests").iterdir() if any(path.glob("*.py")))]
SHARE_MAX = 0.04
README_LINES_MAX = 180
GLOSSARY_ENTRIES_MAX = 149

# A pronoun as subject or object makes the reader look back for the noun.
PRONOUNS = frozenset(
    [
        "it",
        "its",
        "itself",
        "one",
        "ones",
        "they",
        "them",
        "their",
        "theirs",
        "he",
        "she",
        "his",
        "her",
        "who",
        "whom",
        "whose",
        "whoever",
        "whatever",
        "somebody",
        "anybody",
        "everybody",
        "nobody",
        "someone",
        "anyone",
        "everyone",
        "something",
        "anything",
        "everything",
        "nothing",
        "others",
    ]
)
# Determiners stand before a noun as often as in place of a noun. A determiner counts if the next word cannot be a noun.
DETERMINERS = frozenset(["this", "that", "these", "those", "which", "what", "each", "another", "either", "neither"])
NO_NOUN = frozenset(
    [
        "is",
        "are",
        "was",
        "were",
        "be",
        "has",
        "have",
        "had",
        "do",
        "does",
        "did",
        "can",
        "could",
        "may",
        "must",
        "will",
        "would",
        "should",
        "a",
        "the",
        "it",
        "they",
        "to",
        "of",
        "in",
        "on",
        "for",
        "and",
        "or",
        "but",
        "if",
        "when",
    ]
)


@dataclass(frozen=True, slots=True)
class Measure:
    """How many words of a text are bare pronouns."""

    pronouns: Counter[str]
    words: int

    @property
    def share(self) -> float:
        return self.pronouns.total() / max(1, self.words)

    def __str__(self) -> str:
        most = ", ".join(f"{word} {count}" for word, count in self.pronouns.most_common(8))
        return f"{self.share:.2%} of {self.words} words are bare pronouns ({most})"


def measure(text: str) -> Measure:
    """Inline code counts as a single word and is no pronoun."""
    words = re.findall(r"[a-z']+", re.sub(r"`[^`]*`", "x", text.lower()))
    found = Counter(
        word
        for word, after in zip(words, [*words[1:], "is"], strict=True)
        if word in PRONOUNS or (word in DETERMINERS and after in NO_NOUN)
    )
    return Measure(found, len(words))


def docstrings(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def prose(page: str) -> str:
    """A page without code blocks, targets of links and definitions of links."""
    without_code = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    without_definitions = re.sub(r"^\[\w+\]: .*(\n +'.*')?", "", without_code, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", without_definitions)


@pytest.mark.parametrize("folder", [*PACKAGES, *BESIDE, *TESTS], ids=lambda folder: str(folder.relative_to(ROOT)))
def test_docstrings_name_their_subjects(folder: Path) -> None:
    found = measure("\n".join(docstrings(folder)))
    assert found.share <= SHARE_MAX, str(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_their_subjects(page: Path) -> None:
    found = measure(prose(page.read_text(encoding="utf-8")))
    assert found.share <= SHARE_MAX, str(found)


@pytest.mark.parametrize("folder", [*PACKAGES, *BESIDE], ids=lambda folder: str(folder.relative_to(ROOT)))
def test_every_package_says_what_it_holds(folder: Path) -> None:
    """A newcomer reads the docstring of a package first. Examples are programs, not a package."""
    inside = [file for file in folder.rglob("__init__.py") if "examples" not in folder.parts]
    assert [
        str(file.relative_to(ROOT)) for file in inside if not ast.get_docstring(ast.parse(file.read_text("utf-8")))
    ] == []


def test_every_word_of_the_glossary_has_one_entry() -> None:
    words = [cells[0].lower() for cells in rows((DOCS / "glossary.md").read_text(encoding="utf-8"))]
    assert 80 < len(words) <= GLOSSARY_ENTRIES_MAX
    assert [word for word, count in Counter(words).items() if count > 1] == []
    assert [word for word in words if "(" in word] == []
    assert words == sorted(words)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A member that acquires a partition again releases its earlier lease.", {"its": 1}),
        ("Whoever asks anew for what it has gives up what it had.", {"whoever": 1, "what": 2, "it": 2}),
        ("Each member has a name. This lease is old.", {}),
        ("Each has a name. This is old, and so is that.", {"each": 1, "this": 1, "that": 1}),
        ("Call `it`, `they` and `one`.", {}),
    ],
)
def test_a_pronoun_is_found(text: str, found: dict[str, int]) -> None:
    assert measure(text).pronouns == found


def test_code_and_links_of_a_page_do_not_count() -> None:
    page = "Text [here](it.md).\n\n```python\nit = one\n```\n\n[label]: tests/it.py\n    'test_it'\n"
    assert measure(prose(page)).pronouns == {}
