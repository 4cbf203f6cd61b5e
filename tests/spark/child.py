"""A Python of its own, for what a process can do or be only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

CHILD_S = 110.0  # less than a test may take
_LEFT_OUT = ("JAVA_HOME", "PYSPARK_PYTHON")


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With no Java and no Python chosen for Spark, unless `variables` of the environment say so."""
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
    """What it printed, as JSON."""
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
