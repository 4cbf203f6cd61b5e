"""No file of the repository names the machine of the author."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home)/")
REGISTRY = re.compile(r"https?://|--(extra-)?index-url|--find-links")


def _repository_files() -> list[Path]:
    """Files that are tracked, or would be tracked after `git add`."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _repository_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ] == []


def test_the_lock_file_names_no_registry() -> None:
    assert REGISTRY.search((ROOT / "requirements.lock").read_text()) is None
