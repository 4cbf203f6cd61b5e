"""Run code in a new Python process, for tests of things that a process can do only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

CHILD_S = 110.0  # less than a test may take
_LEFT_OUT = ("JAVA_HOME", "PYSPARK_PYTHON")


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run without JAVA_HOME and PYSPARK_PYTHON, unless `variables` set environment variables."""
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )


def found_by(ended: subprocess.CompletedProcess[str]) -> Any:
    """The output of the child, parsed as JSON."""
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
