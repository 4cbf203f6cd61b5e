"""Dependencies point inwards: the imports that every package under `src/inturn` may have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "inturn"

# A package or module directly under inturn → the allowed imports. "inturn" is inturn/__init__.py: the public names.
LAYERS: dict[str, set[str]] = {
    "model": set(),
    "version": set(),
    "protocol": {"model"},
    "security": {"protocol", "model"},
    "transport": {"security", "protocol", "model"},
    "log": {"protocol", "model"},
    "store": {"protocol", "model"},
    "broker": {"log", "store", "protocol", "model"},
    "meta": {"store", "protocol", "model"},
    "node": {"broker", "meta", "log", "store", "version", "protocol", "model"},
    "producer": {"protocol", "model"},
    "consumer": {"protocol", "model"},
    "outbox": {"producer", "protocol", "model"},
    "errors": {"model"},
}
LAYERS["cluster"] = {"node", "broker", "meta", "log", "store", "transport", "security", "version", "protocol", "model"}
LAYERS["server"] = {"cluster", "node", "log", "store", "transport", "security", "version", "protocol", "model"}
LAYERS["client"] = {"server", "cluster", "outbox", "producer", "consumer", "transport", "security", "version"}
LAYERS["client"] |= {"protocol", "model"}
LAYERS["aio"] = {"client", "outbox", "producer", "consumer", "transport", "security", "version", "protocol", "model"}
LAYERS["inturn"] = {"client", "outbox", "producer", "consumer", "security", "version", "errors", "protocol", "model"}
LAYERS["metrics"] = {"client", "producer", "consumer", "protocol", "model"}
LAYERS["tracing"] = {"producer", "consumer", "protocol", "model"}
LAYERS["spark"] = set(LAYERS)
LAYERS["testing"] = set(LAYERS)
LAYERS["cli"] = set(LAYERS)


@dataclass(frozen=True, slots=True)
class Import:
    """An imported name: `from inturn.log import segment` in model/batch.py is (("log", "segment"), …)."""

    target: tuple[str, ...]  # without the leading "inturn"
    where: str


def wrong_imports(source: Path) -> list[str]:
    """The wrong imports of the tree whose top folder is the package inturn."""
    wrong = []
    for file in sorted(source.rglob("*.py")):
        inside = file.relative_to(source).with_suffix("").parts
        layer = _layer(source, inside)
        if layer not in LAYERS:
            wrong.append(f"{'/'.join(inside)}.py: inturn.{layer} is no layer yet; add it to LAYERS in {_this_file()}")
            continue
        for found in _imports(file, inside):
            target = _layer(source, found.target)
            if target == layer:
                continue
            if target not in LAYERS[layer]:
                wrong.append(f"{found.where}: {layer} must not know {target} (LAYERS in {_this_file()})")
            elif any(_is_private(name) for name in found.target):
                wrong.append(f"{found.where}: {'.'.join(found.target)} is private to {target}")
    return wrong


def _this_file() -> str:
    return f"tests/{Path(__file__).name}"


def _layer(source: Path, parts: tuple[str, ...]) -> str:
    """The package or module directly under inturn that contains the names.

    Names that are no module belong to inturn itself.
    """
    if parts and ((source / parts[0]).is_dir() or (parts[0] != "__init__" and (source / f"{parts[0]}.py").is_file())):
        return parts[0]
    return "inturn"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _imports(file: Path, inside: tuple[str, ...]) -> Iterator[Import]:
    """Every import of inturn in the file, also in functions and under TYPE_CHECKING."""
    shown = "/".join(inside) + ".py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        match node:
            case ast.Import(names=names):
                modules = [tuple(alias.name.split(".")) for alias in names]
            case ast.ImportFrom(names=names):
                start = _from(node, inside)
                modules = [(*start, alias.name) for alias in names]
            case _:
                continue
        for module in modules:
            if module[0] == "inturn":
                yield Import(module[1:], f"{shown}:{node.lineno}")


def _from(node: ast.ImportFrom, inside: tuple[str, ...]) -> tuple[str, ...]:
    """The absolute module of an import. Every leading dot is a folder up."""
    named = tuple(node.module.split(".")) if node.module else ()
    if node.level == 0:
        return named
    return ("inturn", *inside[: len(inside) - node.level], *named)


def test_imports_point_inwards() -> None:
    assert wrong_imports(SOURCE) == []


def _tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", "model/__init__.py": "", "log/_index.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("model/batch.py", "import inturn.log", "model/batch.py:1: model must not know log"),
        ("model/batch.py", "from inturn import log", "model/batch.py:1: model must not know log"),
        ("model/batch.py", "from ..log import segment", "model/batch.py:1: model must not know log"),
        ("model/batch.py", "from inturn import connect", "model/batch.py:1: model must not know inturn"),
        ("model/deep/er.py", "from ...log import segment", "model/deep/er.py:1: model must not know log"),
        ("model/__init__.py", "from .. import log", "model/__init__.py:1: model must not know log"),
        ("model/batch.py", "if TYPE_CHECKING:\n    from inturn.log import x", "model/batch.py:2: model must not"),
        ("model/batch.py", "def f():\n    import inturn.log", "model/batch.py:2: model must not know log"),
        ("broker/pull.py", "from inturn.log._index import Index", "log._index.Index is private to log"),
        ("broker/pull.py", "from inturn.log import _index", "log._index is private to log"),
        ("gossip/peer.py", "", "inturn.gossip is no layer yet; add it to LAYERS in tests/test_layers.py"),
        ("gossip.py", "", "inturn.gossip is no layer yet"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    (found,) = wrong_imports(_tree(tmp_path, {file: text}))
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("log/segment.py", "from inturn.model.batch import Batch, __doc__"),
        ("log/segment.py", "from inturn.log._index import Index\nfrom . import _index"),
        ("cli/main.py", "import inturn\nfrom inturn import connect"),
        ("model/batch.py", "import inturnal\nfrom loglib import segment"),
    ],
)
def test_a_right_import_is_left_alone(tmp_path: Path, file: str, text: str) -> None:
    assert wrong_imports(_tree(tmp_path, {file: text})) == []
