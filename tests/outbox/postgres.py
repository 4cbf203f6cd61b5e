"""A PostgreSQL server for tests, in a temporary folder, reached through a socket in the folder."""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

# The data need not survive: without syncs the server starts in two seconds.
OPTIONS = "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c listen_addresses='' -c max_connections=40"


def find_programs() -> Path | None:
    """The folder with initdb and pg_ctl. On Debian the folder is not on the path."""
    for folder in [*sorted(glob.glob("/usr/lib/postgresql/*/bin"), reverse=True), *os.get_exec_path()]:
        if all(os.access(os.path.join(os.path.realpath(folder), name), os.X_OK) for name in ("initdb", "pg_ctl")):
            return Path(folder)
    return None


class PostgresServer:
    """Runs from construction to `close`.

    PostgreSQL refuses to run as root: then the server runs as a different user.
    """

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._user = _other_user() if os.getuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="inturn-pg-", dir="/tmp"))  # the path of a socket is short
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._data = self._folder / "data"
        self._run("initdb", "-D", str(self._data), "-U", "inturn", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"{OPTIONS} -k {self._folder}"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-l", str(self._folder / "log"), "-o", options, "start")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://inturn@/{database}?host={self._folder}"

    def close(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "stop")
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, program: str, *arguments: str) -> None:
        ran = subprocess.run(
            [str(self._programs / program), *arguments],
            user=self._user,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
            # The server inherits open files. A pipe of the test would stay open as long as the server runs.
            close_fds=True,
        )
        assert ran.returncode == 0, f"{program}: {ran.stdout.decode(errors='replace')}"


def _other_user() -> str:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise AssertionError("PostgreSQL does not run as root, and there is no other user")
