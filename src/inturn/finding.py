"""What `inturn doctor` says: of a folder, or of a server."""

from __future__ import annotations

import enum
from dataclasses import dataclass

LOW_FACTOR = 4  # warn below so many times the reserve
NOTHING_TO_DO = "nothing to do"


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. `partition` is "subject/index" where it is about one."""

    check: str
    level: Level
    what: str
    next_step: str = ""
    partition: str | None = None
    offset: int | None = None


def disk_finding(free_bytes: int, reserve_bytes: int) -> Finding:
    what = f"{free_bytes:,} bytes are free, {reserve_bytes:,} are kept in reserve"
    if free_bytes < reserve_bytes:
        return Finding(
            "disk", Level.ERROR, f"{what}: appends are refused", "free some room; appends resume by themselves"
        )
    if free_bytes < LOW_FACTOR * reserve_bytes:
        return Finding("disk", Level.WARNING, what, "free some room before appends are refused")
    return Finding("disk", Level.OK, what)
