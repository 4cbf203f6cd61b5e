"""The programs in docs/how-to/ that need only inturn run as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.bed import in_one_of

HOW_TO = Path(__file__).parent.parent / "docs" / "how-to"
PRINTS = {
    "tags.md": "order-7 paid\norder-7 shipped\n[('created',)]\n",
    "process-workers.md": "",
}


@pytest.mark.parametrize("name", PRINTS)
def test_a_program_of_a_how_to_runs(name: str, tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (HOW_TO / name).read_text(encoding="utf-8"), re.DOTALL)
    assert program is not None
    file = tmp_path / "thumbnails.py"

    def prints_it(timeout_s: int) -> None:
        file.write_text(program[1].replace("timeout_s=5", f"timeout_s={timeout_s}"), encoding="utf-8")
        ran = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == PRINTS[name]
        assert ran.stderr == ""

    # The bound: the program finishes within the `timeout_s`, and every run takes all of this time.
    times_s = iter((2, 20))  # the longer time is for a busy machine
    in_one_of(2, lambda: prints_it(next(times_s)))
