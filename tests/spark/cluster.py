"""A Spark cluster on loopback: a master and two workers in separate processes, and Pythons for the executors.

`python -m tests.spark.cluster FOLDER` starts a cluster, prints the address in a line of JSON, and stops the cluster at
the end of stdin. So the cluster ends with its parent process, also after a crash of the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyspark

from inturn.spark.java import java_home

HOST = "127.0.0.1"
WORKERS, WORKER_CORES, WORKER_MEMORY = 2, 1, "1g"
START_S = 60.0
STOP_S = 10.0
_ROOT = Path(__file__).parents[2]
QUICK_JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}  # for a JVM with a life of one minute
# Variables that belong to the tests' Python, or would select a different Spark.
_LEFT_OUT = re.compile("PYTHON.*|PYSPARK.*|SPARK.*|VIRTUAL_ENV")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Executor:
    """A Java process of a worker, for one application."""

    id: str
    pid: int


@dataclass(frozen=True)
class Cluster:
    """`master` is the master URL for a session; `workers` are process ids. Executors work in folders below `folder`."""

    master: str
    workers: tuple[int, ...]
    folder: Path

    def executors(self) -> list[Executor]:
        found = []
        for worker in self.workers:
            for pid in _children(worker):
                words = _words(pid)
                if "--executor-id" in words:
                    found.append(Executor(words[words.index("--executor-id") + 1], pid))
        return sorted(found, key=lambda one: int(one.id))

    def pythons(self, executor: Executor) -> dict[int, str]:
        """The Python daemon processes of the executor, with their program."""
        return {pid: words[0] for pid in _children(executor.pid) if "pyspark.daemon" in (words := _words(pid))}

    def tasks(self, executor: Executor) -> set[int]:
        """The Python processes of the executor that run tasks."""
        return {task for pid in self.pythons(executor) for task in _children(pid)}


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster, until the end of the block or of this process."""
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.spark.cluster", str(folder)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the tests only; the tests end the cluster
    ) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        try:
            told = json.loads(supervisor.stdout.readline() or '{"error": "it ended"}')
            assert "error" not in told, f"the cluster did not start: {told['error']}"
            yield Cluster(told["master"], tuple(told["workers"]), folder)
        finally:
            supervisor.stdin.close()
            supervisor.wait(START_S)


def python_without_inturn(folder: Path, modules: Iterable[str]) -> Path:
    """A Python with these modules and their requirements, copied from this Python, and no other modules."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for distribution in _required(modules):
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def _required(names: Iterable[str]) -> list[importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    left = list(names)
    while left:
        name = left.pop().lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of other platforms
        required = [one for one in found[name].requires or () if "extra ==" not in one]
        left += [re.split(r"[^\w.-]", one)[0] for one in required]
    return list(found.values())


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


# The supervisor


def _supervise(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    started: list[subprocess.Popen[bytes]] = []
    try:
        master = _start(folder, started, "master", "deploy.master.Master", "--port", "0")
        address = _said(folder, "master", master, r"Starting Spark master at (spark://\S+)")
        workers = [_start_worker(folder, started, f"worker-{number}", address) for number in range(WORKERS)]
        for number, worker in enumerate(workers):
            _said(folder, f"worker-{number}", worker, r"(Successfully registered) with master")
        print(json.dumps({"master": address, "workers": [worker.pid for worker in workers]}), flush=True)
        sys.stdin.read()
    except TimeoutError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    finally:
        _stop(reversed(started))  # a worker ends its executors


def _start_worker(
    folder: Path, started: list[subprocess.Popen[bytes]], name: str, master: str
) -> subprocess.Popen[bytes]:
    room = ("--port", "0", "--cores", str(WORKER_CORES), "--memory", WORKER_MEMORY, "--work-dir", str(folder / name))
    return _start(folder, started, name, "deploy.worker.Worker", *room, master)


def _start(
    folder: Path, started: list[subprocess.Popen[bytes]], name: str, what: str, *arguments: str
) -> subprocess.Popen[bytes]:
    home = Path(pyspark.__file__).parent
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not _LEFT_OUT.fullmatch(name)}
    environment |= {
        **QUICK_JAVA,  # executors inherit the option from their worker
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_LOCAL_DIRS": str(folder / "tmp"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.master.rest.enabled=false",
    }
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.{what}", "--host", HOST, "--webui-port", "0"]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_end_with_parent,  # covers kill -9; the setting survives the exec of Java
        )
    started.append(process)
    return process


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _said(folder: Path, name: str, process: subprocess.Popen[bytes], what: str) -> str:
    log = folder / f"{name}.log"
    until_s = time.monotonic() + START_S
    while (found := re.search(what, log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > until_s:
            raise TimeoutError(f"{name} did not say {what!r}: {log.read_text()[-2000:]}")
        time.sleep(0.05)
    return found[1]


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Terminate processes by id; kill processes that do not end in time."""
    left = list(processes)
    _each(left, subprocess.Popen.terminate)
    until_s = time.monotonic() + STOP_S
    while any(process.poll() is None for process in left) and time.monotonic() < until_s:
        time.sleep(0.02)
    _each(left, subprocess.Popen.kill)
    for process in left:
        process.wait()


def _each(processes: Iterable[subprocess.Popen[bytes]], do: Callable[[subprocess.Popen[bytes]], None]) -> None:
    for process in processes:
        if process.poll() is None:
            do(process)


if __name__ == "__main__":
    _supervise(Path(sys.argv[1]))
