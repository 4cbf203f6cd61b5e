"""S7: jobs on a cluster. The executors have no installed inturn, and executors join and leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inturn import LeaseSettings
from inturn.spark.shipping import INSTALLED
from inturn.transport.address import parse_address
from simulator.processes.history import Death
from tests.spark.cluster import HOST, QUICK_JAVA, Cluster, Executor, python_without_inturn, running
from tests.spark.cluster_driver import Driver
from tests.spark.judged import GROUP, SUBJECT, Judged, judging
from tests.spark.noting import EVENTS, Noting, is_alive
from tests.spark.served import Served
from tests.spark.waiting import wait_until

# A separate group: these tests run in parallel with the tests of the shared session.
pytestmark = pytest.mark.timeout(240)

LEASE = LeaseSettings(life_s=4.0, renew_s=0.5, margin_s=0.3)
PARTITIONS, KEYS = 3, 60
CLI_S = 120.0

HANDLER = """
import os
import time
from pathlib import Path


def note(message, context):
    with (Path({folder!r}) / f"{{os.getpid()}}.calls").open("a") as calls:
        calls.write(f"{{message.key_text}} {{message.partition}} {{message.offset}} {{time.monotonic_ns()}}\\n")
"""

OTHER_VERSION = """
import collections, sys
fields = "major minor micro releaselevel serial"
sys.version_info = collections.namedtuple("version_info", fields)(3, 99, 0, "final", 0)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with running(place / "cluster") as started:
        yield started


@pytest.fixture(scope="module")
def python(place: Path) -> Path:
    """A Python with exactly the modules that executors need."""
    return python_without_inturn(place / "python", INSTALLED)


@pytest.fixture(scope="module")
def modules(place: Path) -> Path:
    """A folder with an archive, on the import path of drivers only."""
    folder = place / "modules"
    folder.mkdir()
    with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
        archive.writestr("packed.py", "")
    return folder


@pytest.fixture(scope="module")
def driver(cluster: Cluster, python: Path, modules: Path) -> Iterator[Driver]:
    started = Driver(cluster.master, python, modules)
    yield started
    started.close()


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Judged]:
    with judging(tmp_path, PARTITIONS, lease=LEASE) as opened:
        opened.make_group()
        yield opened


def _handler(modules: Path, name: str, folder: Path) -> str:
    (modules / f"{name}.py").write_text(HANDLER.format(folder=str(folder)))
    return f"{name}:note"


def _calls(folder: Path) -> dict[int, list[tuple[str, int, int, int]]]:
    """Key, partition, offset and time of all calls, by process."""
    found = {}
    for path in folder.glob("*.calls"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.stem)] = [(key, int(partition), int(offset), int(at)) for key, partition, offset, at in lines]
    return found


def _check_calls(calls: dict[int, list[tuple[str, int, int, int]]], count: int) -> None:
    """Check: `count` messages, handled once, with every key in order."""
    every = sorted((one for some in calls.values() for one in some), key=lambda one: one[3])
    assert len(every) == len({one[1:3] for one in every}) == count
    by_key: dict[str, list[tuple[int, int]]] = {}
    for key, partition, offset, _ in every:
        by_key.setdefault(key, []).append((partition, offset))
    assert len(by_key) == KEYS
    assert all(places == sorted(places) for places in by_key.values())


def _is_free(judged: Judged) -> bool:
    described = judged.mq.group(SUBJECT, GROUP).describe()
    return described.taken_over_by is None and all(one.owner is None for one in described.partitions)


def test_executors_import_what_was_sent_and_have_nothing_else(
    cluster: Cluster, driver: Driver, python: Path, modules: Path
) -> None:
    (modules / "only_here.py").touch()
    assert subprocess.run([python, "-c", "import inturn"], cwd="/", capture_output=True, check=False).returncode == 1
    assert driver.ask("check", modules=[]) is None
    found = driver.ask("where", modules=["only_here", "tests.spark.noting"])
    assert len({one["executor"] for one in found}) == 2
    for one in found:
        assert one.pop("python") == str(python)
        folder = Path(one.pop("executor"))
        assert cluster.folder in folder.parents
        for file in one.values():
            archive = next(path for path in (folder / file).parents if path.suffix == ".zip")
            assert archive.parent == folder
            assert archive.is_file()


def test_an_archive_is_sent_as_it_is(driver: Driver) -> None:
    driver.ask("where", modules=["packed"])
    assert {one["packed"] for one in driver.ask("where", modules=["packed"])} == {"./packed.zip/packed.py"}


def test_what_was_sent_is_imported_by_the_driver_from_where_it_is(
    driver: Driver, judged: Judged, modules: Path
) -> None:
    handler = _handler(modules, "sent_first", judged.folder)
    driver.ask("where", modules=["sent_first"])
    judged.send(KEYS, KEYS)
    assert driver.ask("drain", address=judged.address, handler=handler)["done"] == KEYS


def test_a_query_reads_on_the_executors_what_is_stored(
    cluster: Cluster, driver: Driver, python: Path, served: Served
) -> None:
    served.connection.create_subject(SUBJECT, PARTITIONS)
    stored: dict[str, list[int]] = {}
    with served.connection.producer() as producer:
        for number in range(2000):
            producer.send(SUBJECT, b"%d" % number, key=f"k{number % KEYS}")
    for message in served.connection.reader(SUBJECT):
        counted = stored.setdefault(str(message.partition), [0, 0])
        counted[0] += 1
        counted[1] += int(message.body)
    assert driver.ask("read", address=served.address, subject=SUBJECT) == stored
    programs = {program for one in cluster.executors() for program in cluster.pythons(one).values()}
    assert programs == {str(python)}


def test_a_drain_runs_on_all_executors_in_order_and_hands_back(
    cluster: Cluster, driver: Driver, judged: Judged, modules: Path
) -> None:
    judged.send(3000, KEYS)
    handler = _handler(modules, "shop", judged.folder)
    report = driver.ask("drain", address=judged.address, handler=handler)
    assert {name: report[name] for name in ("ended", "done", "lag", "failed_rounds")} == {
        "ended": "end",
        "done": 3000,
        "lag": 0,
        "failed_rounds": 0,
    }
    calls = _calls(judged.folder)
    _check_calls(calls, 3000)
    assert set(report["pids"]) == set(calls)
    executors = cluster.executors()
    assert len(executors) == 2
    assert all(cluster.tasks(one) & set(calls) for one in executors)
    assert _is_free(judged)
    with judged.online(Noting(judged.folder)):
        judged.send(20, KEYS, first=3000)
        wait_until(lambda: len(judged.noted.handled()) == 20, "a consumer goes on with the group")


class Firewall:
    """A firewall: a second address of a server that accepts one client and refuses all other clients."""

    def __init__(self, address: str) -> None:
        server = parse_address(address)
        self._listener = socket.create_server((HOST, 0))
        self.address = f"inturn://{HOST}:{self._listener.getsockname()[1]}"
        self._ends = [socket.create_connection((server.host, server.port))]
        threading.Thread(target=self._let_in, daemon=True).start()

    def _let_in(self) -> None:
        client, _ = self._listener.accept()
        self._listener.close()
        self._ends.append(client)
        for source, target in ((client, self._ends[0]), (self._ends[0], client)):
            threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._ends):
            one.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_executors_that_cannot_reach_the_server_are_named_and_nothing_is_lost(
    driver: Driver, judged: Judged, modules: Path
) -> None:
    judged.send(600, KEYS)
    handler = _handler(modules, "unreached", judged.folder)
    driver.ask("where", modules=["unreached"])  # Spark has started
    firewall = Firewall(judged.address)
    began_s = time.monotonic()
    error, text = driver.refused("drain", address=firewall.address, handler=handler)
    took_s = time.monotonic() - began_s
    firewall.close()
    assert error == "DrainFailed"
    for part in (
        firewall.address,
        f"a task on host {socket.gethostname()!r} tried. Check that this host resolves and reaches the address",
        "committed messages stay finished",
    ):
        assert part in text
    assert took_s < 30
    assert _is_free(judged)
    assert judged.lag == 600
    assert driver.ask("drain", address=judged.address, handler=handler)["lag"] == 0
    _check_calls(_calls(judged.folder), 600)


def test_a_folder_is_no_target_on_a_cluster(cluster: Cluster, driver: Driver, tmp_path: Path) -> None:
    error, text = driver.refused("drain", address=str(tmp_path), handler="tests.spark.noting:ignore")
    assert error == "InvalidInput"
    assert text == (
        f"{str(tmp_path)!r} is a folder of this machine, which executors of {cluster.master} do not see; "
        "serve it (`inturn serve`), and give the server's address"
    )


def test_an_executor_that_is_killed_costs_no_message_and_no_order(
    cluster: Cluster, driver: Driver, judged: Judged
) -> None:
    driver.ask("where", modules=[])
    judged.send(2400, KEYS)
    before = cluster.executors()
    driver.begin("drain", address=judged.address, handler={"folder": str(judged.folder), "handling_s": 0.03})
    wait_until(lambda: all(_noted(cluster, judged, one) for one in before), "both executors have handled something")
    assert judged.lag > 500, "there is nothing left to be hurt"
    files = _noted(cluster, judged, before[0])
    os.kill(before[0].pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(_pid(path)) for path in files), "its Python ends, too")
    seen_s = time.monotonic()
    report = driver.answer()
    assert (report["ended"], report["lag"]) == ("end", 0)
    judged.judge("key", [Death(path, seen_s) for path in files])
    assert len(judged.noted.handled()) == 2400
    assert _is_free(judged)
    wait_until(lambda: len(set(cluster.executors()) - set(before)) == 1, "the worker has started another executor")


def _pid(path: Path) -> int:
    return int(path.name.removesuffix(EVENTS))


def _noted(cluster: Cluster, judged: Judged, executor: Executor) -> list[Path]:
    """The files in which the tasks of this executor have recorded calls."""
    tasks = cluster.tasks(executor)
    return [path for path in judged.noted.files() if _pid(path) in tasks]


def test_what_the_python_of_executors_lacks_is_named(driver: Driver, place: Path) -> None:
    bare = python_without_inturn(place / "bare", [one for one in INSTALLED if one not in ("msgspec", "numpy")])
    error, text = driver.refused("check", modules=[], python=str(bare))
    assert error == "InvalidInput"
    assert text.startswith(f"executors on {socket.gethostname()} cannot import msgspec, numpy (No module")
    assert "install them in the Python that PYSPARK_PYTHON names" in text


def test_a_python_that_executors_do_not_have_is_named(driver: Driver, place: Path) -> None:
    nowhere = str(place / "nowhere" / "python")
    error, text = driver.refused("check", modules=[], python=nowhere)
    assert error == "InvalidInput"
    assert text.startswith(f"executors cannot use the Python {nowhere!r}: ")
    assert "No such file or directory; set PYSPARK_PYTHON to a Python 3." in text


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (OTHER_VERSION, "different version: 3.99 than that in driver: 3."),
        ("import sys; sys.modules['pyspark'] = None", "it fails at its start; set PYSPARK_PYTHON"),
    ],
    ids=["another", "broken"],
)
def test_a_python_that_spark_cannot_use_is_named(driver: Driver, tmp_path: Path, start: str, why: str) -> None:
    python = python_without_inturn(tmp_path / "python", [])
    site = next((tmp_path / "python" / "lib").glob("python*/site-packages"))
    (site / "sitecustomize.py").write_text(start)
    error, text = driver.refused("check", modules=[], python=str(python))
    assert error == "InvalidInput"
    assert text.startswith(f"executors cannot use the Python {str(python)!r}: ")
    assert why in text


def test_a_cluster_that_gives_no_executor_is_not_waited_for(cluster: Cluster, driver: Driver) -> None:
    error, text = driver.refused("check_room", memory="64g", wait_s=3.0)
    assert error == "InvalidInput"
    assert text.startswith(f"{cluster.master} has given no executor within 3 s: does it have the cores and")


@pytest.mark.slow
def test_the_command_drains_on_a_cluster(
    cluster: Cluster, driver: Driver, python: Path, judged: Judged, modules: Path
) -> None:
    driver.ask("stop")  # the driver has all cores
    judged.send(600, KEYS)
    handler = _handler(modules, "commanded", judged.folder)
    command = ["drain", SUBJECT, "--group", GROUP, "--handler", handler, "--server", judged.address, "--json"]
    ended = subprocess.run(
        [sys.executable, "-c", "from inturn.cli.main import app; app()", *command, "--master", cluster.master],
        cwd=modules,
        env={**os.environ, **QUICK_JAVA, "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": HOST},
        capture_output=True,
        text=True,
        timeout=CLI_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["ended"], report["done"], report["lag"]) == ("end", 600, 0)
    _check_calls(_calls(judged.folder), 600)
