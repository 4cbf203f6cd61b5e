"""A handler for tasks in other processes that records calls in files; the message names the folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import inturn


def note(message: inturn.Message, context: inturn.Context) -> None:
    file = Path(message.properties["folder"]) / f"calls-{os.getpid()}"
    with file.open("a") as calls:
        calls.write(f"{message.key_text}\t{message.offset}\t{time.time_ns():020d}\n")
