"""Every example runs: the files in examples/, and the Python blocks of README.md and of pages in docs/how-to/."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITH_SPARK = [path for path in EXAMPLES if path.name.startswith("spark_")]
README = ROOT / "README.md"
NO_RUN = "<!-- no-run -->"
TIME_S_MAX = 50.0  # an example takes less than 3 s; the rest is for a busy machine
SPARK_TIME_S_MAX = 200.0  # Spark takes long to start; the rest is for a busy machine

# The promised output of every example, as regular expressions, in this order.
PRINTS = {
    "quickstart.py": [r"^order-42 created\norder-42 paid\norder-42 shipped\n$"],
    "orders.py": [
        r"partition \d is second's now: epoch \d+, from offset \d+",
        r"handled by \{.*'second': \d+.*\}",
        r"200 orders, each step in its order: True",
    ],
    "failures.py": [
        r"retrying:\n  a, attempt 1: failed\n  a, attempt 2: success\n  b, attempt 1: exception \(no connection\)",
        r"  b, attempt 2: success\n  c, attempt 1: success\n  committed offset 3 of 3",
        r"all-or-nothing:\n  a, attempt 1: success\n  b, attempt 1: success\n  c, attempt 1: failed",
        r"  a, attempt 2: success\n  b, attempt 2: success\n  c, attempt 2: success\n  committed offset 3 of 3",
    ],
    "exclusive_writer.py": [
        r"refused: producer bookkeeper .* was replaced by a newer one",
        r"0: opening balance 100\n1: withdraw 30\n$",
    ],
    "outbox.py": [
        r"^the shop crashed; order 3 is shipped\n10 orders, each created, paid, shipped: True\n",
        r"^kept, and durable: True\nann clicked 0 1 2 3 4\n$",
    ],
    "asyncio_orders.py": [r"^10 orders, each in its order: created, paid, shipped\n$"],
    "key_order.py": [
        r"up to \d\d handlers at once, 1 partition",
        r"order-7 is parked at offset 57: failed 3 times, RuntimeError: no such street",
        r"  1 message behind it; 1 step handled so far",
        r"order-7 after ann resumed it: created, paid, shipped",
        r"50 orders, each in its order: True",
    ],
    "served.py": [
        r"serving at inturn://127\.0\.0\.1:\d+",
        r"stopped, and nobody held a lease any more: True",
        r"both had something to do: True",
        r"50 orders, each in its order: True",
    ],
    "shared_and_broadcast.py": [
        r"60 mails, each sent once: True",
        r"both had something to do on one partition: True\ncame again: 1",
        r"every cache heard everything, in order: True",
    ],
    "spark_audit.py": [r"order kept: 500 started, 500 finished"],
    "spark_etl.py": [r"^200 rows of 100 orders\n300 rows of 100 orders\norder-7: created, paid, shipped\n$"],
    "spark_balances.py": [r"^1000 moves of 50 accounts in \d+ round\(s\): every balance is right\n$"],
    "spark_drain.py": [
        r"^1\d\d\d notifications are late",
        r"drained \d+ at [\d,]+/s; taken over in \d+\.\d\d s",
        r"online again: \(0, 1\) and nothing late",
    ],
    "check_my_order.py": [r"order kept: 500 sent, 500 started, 500 finished", r"with one end missing: .*lost"],
}
README_PRINTS = [
    r"^order-42 created\norder-42 paid\norder-42 shipped\n",
    r"\d+ done, 0 left, handed back after \d+ s\n",
    r"(?s)created.*paid.*shipped",
]
# The same for pages in docs/how-to/ with Python blocks that run: all blocks of a page in the same namespace.
PAGES = {
    "check-order.md": [r"2 violations", r"OVERLAP: .*order-42", r"SKIPPED: .*order-42"],
    "grow.md": [r"^8 partitions\n20 jobs, each in order: True\n$"],
    "handlers.md": [r"\d+ payments of partition \d under epoch \d+\n", r"20 sent, 20 heard\n$"],
    "keys.md": [
        r"^b'parcel-7' parked after 3 attempts: RuntimeError: the scale is broken - 1 waits behind\n",
        r"^\['packed', 'weighed', 'sent'\]\n$",
    ],
    "outbox.md": [r"^$"],
    "send.md": [r"^1 sent\n$"],
    "shared-and-broadcast.md": [r"^1\n\{'one': \{'tea': b'11'\}, 'two': \{'tea': b'11'\}\}\n$"],
}


@dataclass(frozen=True, slots=True)
class Block:
    line: int
    code: str
    is_run: bool


def python_blocks(text: str) -> list[Block]:
    """The blocks that are marked as Python. A block after a comment `<!-- no-run -->` is left out."""
    blocks = []
    for found in re.finditer(r"^([ \t]*)```python[^\n]*\n(.*?)^\1```[ \t]*$", text, re.MULTILINE | re.DOTALL):
        before = text[: found.start()].rstrip()
        line = text.count("\n", 0, found.start(2)) + 1
        blocks.append(Block(line, textwrap.dedent(found.group(2)), not before.endswith(NO_RUN)))
    return blocks


def script(blocks: list[Block], name: str) -> str:
    """A program of all blocks in the same namespace. Blank lines keep the line numbers of the text."""
    lines = ["scope = {'__name__': '__main__'}"]
    for block in blocks:
        padded = "\n" * (block.line - 1) + block.code
        lines.append(f"code = compile({padded!r}, {name!r}, 'exec')")
        if block.is_run:
            lines.append("exec(code, scope)")
    return "\n".join(lines)


def run(*arguments: str | Path, folder: Path, time_s_max: float = TIME_S_MAX) -> str:
    started_s = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=2 * time_s_max,
        check=False,
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert ran.stderr == ""
    assert time.monotonic() - started_s < time_s_max
    return ran.stdout


def test_every_example_is_known_here() -> None:
    assert {path.name for path in EXAMPLES} == set(PRINTS)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path not in WITH_SPARK], ids=lambda path: path.name)
@pytest.mark.parametrize("has_folder", [False, True], ids=["temporary folder", "given folder"])
def test_an_example_prints_what_it_promises(path: Path, has_folder: bool, tmp_path: Path) -> None:
    data = tmp_path / "data"
    check_printed(PRINTS[path.name], run(path, *([data] if has_folder else []), folder=tmp_path))
    assert data.exists() == has_folder
    assert [one for one in tmp_path.iterdir() if one != data] == []


@pytest.mark.timeout(2 * SPARK_TIME_S_MAX + 20)
@pytest.mark.parametrize("path", WITH_SPARK, ids=lambda path: path.name)
def test_an_example_with_spark_prints_what_it_promises(path: Path, tmp_path: Path) -> None:
    check_printed(PRINTS[path.name], run(path, folder=tmp_path, time_s_max=SPARK_TIME_S_MAX))


def check_printed(patterns: list[str], rest: str) -> None:
    for pattern in patterns:
        found = re.search(pattern, rest)
        assert found is not None, f"no {pattern!r} in:\n{rest}"
        rest = rest[found.end() :]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda path: path.name)
def test_what_how_tos_show_is_python(path: Path) -> None:
    for block in python_blocks(path.read_text(encoding="utf-8")):
        compile(block.code, f"{path.name}:{block.line}", "exec")


@pytest.mark.parametrize("name", PAGES)
def test_a_how_to_prints_the_promised_lines(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / name
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    assert any(block.is_run for block in blocks), f"{name} has no Python block that is run"
    program = tmp_path / "page.py"
    program.write_text(script(blocks, str(page)), encoding="utf-8")
    check_printed(PAGES[name], run(program, folder=tmp_path))


@pytest.mark.timeout(2 * SPARK_TIME_S_MAX + 20)
def test_the_readme_runs(tmp_path: Path) -> None:
    blocks = python_blocks(README.read_text(encoding="utf-8"))
    assert any(block.is_run for block in blocks), "README.md has no Python block that is run"
    program = tmp_path / "readme.py"
    program.write_text(script(blocks, str(README)), encoding="utf-8")
    printed = run(program, folder=tmp_path, time_s_max=SPARK_TIME_S_MAX)
    check_printed(README_PRINTS, printed)


def test_the_first_example_of_the_readme_is_short_and_shows_the_order(tmp_path: Path) -> None:
    first = next(iter(python_blocks(README.read_text(encoding="utf-8"))))
    assert sum(bool(line.strip()) for line in first.code.splitlines()) <= 20
    program = tmp_path / "first.py"
    program.write_text(script([first], str(README)), encoding="utf-8")
    assert run(program, folder=tmp_path) == "order-42 created\norder-42 paid\norder-42 shipped\n"


def test_blocks_are_found_and_share_their_names(tmp_path: Path) -> None:
    text = f"""
# A title

```python
number = 41
```

```sh
this is not Python
```

{NO_RUN}
```python
raise SystemExit("only compiled")
```

```python
print(number + 1)
```
"""
    blocks = python_blocks(text)
    assert [(block.line, block.is_run) for block in blocks] == [(5, True), (14, False), (18, True)]
    program = tmp_path / "program.py"
    program.write_text(script(blocks, "text"), encoding="utf-8")
    assert run(program, folder=tmp_path) == "42\n"
