"""Files that are looked at from time to time: which of them have changed?"""

from __future__ import annotations

import os


class WatchedFiles:
    """By name; a name may have several files."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, str, tuple[int, ...] | None]] = []

    def add(self, name: str, path: str) -> None:
        self._seen.append((name, path, _mark(path)))

    def changed(self, *, always: bool = False) -> list[str]:
        """Since the last look, each name once."""
        names: dict[str, None] = {}
        for place, (name, path, mark) in enumerate(self._seen):
            found = _mark(path)
            if always or found != mark:
                self._seen[place] = (name, path, found)
                names[name] = None
        return list(names)


def _mark(path: str) -> tuple[int, ...] | None:
    """Another file, another content or another owner has another one; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
