"""M1: meta and brokers as separate processes: killed, restarted, and started with the wrong folder or role."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import inturn
from inturn import Connection, Context, Message, ProducerSettings
from inturn.cluster.settings import ClusterSettings
from inturn.errors import AlreadyExists, InvalidInput, ProducerFenced
from inturn.model.settings import Role
from inturn.server.server import Server
from inturn.transport.address import Address
from tests.contract.bed import WAIT_S, GroupedBed, eventually, has_joined, quick, waits_because

PATIENT = ProducerSettings(backoff_min_s=0.01, backoff_max_s=0.1)
COMMAND = [sys.executable, "-c", "from inturn.cli.main import app; app()", "serve"]


class Process:
    """A server that can be killed and started again at the same address."""

    def __init__(self, path: Path, *options: str) -> None:
        self._path = path
        self._options = options
        self.address = ""
        self.start()

    def start(self) -> None:
        port = self.address.rpartition(":")[2] or "0"
        self._process = subprocess.Popen(
            [*COMMAND, str(self._path), "--port", port, "--lease-s", "3", "--json", *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        self.address = json.loads(self._process.stdout.readline())["address"]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


class Processes:
    def __init__(self, path: Path) -> None:
        self.meta = Process(path / "meta", "--role", "meta")
        broker = ("--role", "broker", "--meta", self.meta.address, "--broker-group")
        self.brokers = {name: Process(path / name, *broker, name) for name in ("east", "west")}

    def close(self) -> None:
        for one in (self.meta, *self.brokers.values()):
            one.kill()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


class Traffic:
    """A producer and a consumer that run through all faults, until enough messages are handled."""

    def __init__(self, mq: Connection) -> None:
        self.stored = 0
        self.is_enough = threading.Event()
        self.by_key: dict[bytes | None, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        self._mq = mq
        self.sender = threading.Thread(target=self._send)

    def _send(self) -> None:
        with self._mq.producer(settings=PATIENT) as producer:
            while not self.is_enough.is_set():
                number = self.stored
                producer.send_sync("orders", b"%d" % number, key=b"k%d" % (number % 10), timeout_s=60)
                self.stored += 1

    def handle(self, message: Message, context: Context) -> None:
        with self._lock:
            self.by_key[message.key].append(int(message.body))

    @property
    def handled(self) -> int:
        return sum(len(set(one)) for one in self.by_key.values())

    def check(self) -> None:
        """All messages are handled, and every key in order. After a crash a key may repeat uncommitted messages."""
        assert self.handled == self.stored
        for key, numbers in self.by_key.items():
            first = [number for at, number in enumerate(numbers) if number not in numbers[:at]]
            assert first == sorted(first), key


@pytest.mark.parametrize("victim", ["east", "meta"])
def test_what_is_killed_and_started_again_costs_nothing_that_was_acknowledged(
    processes: Processes, victim: str
) -> None:
    """Producers and consumers continue within the authorisation while meta is away."""
    process = processes.meta if victim == "meta" else processes.brokers[victim]
    with inturn.connect(processes.meta.address) as mq:
        eventually(lambda: len(mq.broker_groups()) == 2, "both brokers are heard")
        mq.create_subject("orders", 4)
        traffic = Traffic(mq)
        settings = quick(pull_wait_s=0.5, answer_timeout_s=2.0)
        with mq.consumer("orders", "g", traffic.handle, order="key", settings=settings):
            traffic.sender.start()
            eventually(lambda: traffic.handled > 50, "it has begun")
            process.kill()
            if victim == "meta":
                stored = traffic.stored
                eventually(lambda: traffic.handled > stored + 20, "it goes on without meta")
            process.start()
            stored = traffic.stored
            eventually(lambda: traffic.handled > stored + 100, "it goes on", 60)
            traffic.is_enough.set()
            traffic.sender.join(60)
            eventually(lambda: traffic.handled == traffic.stored, "all is handled")
            eventually(lambda: mq.group("orders", "g").describe().lag == 0, "all is committed")
        traffic.check()
        assert sorted(int(one.body) for one in mq.reader("orders")) == list(range(traffic.stored))


def test_a_named_producer_is_fenced_at_all_brokers(mq: Connection) -> None:
    """P5."""
    mq.create_subject("orders", 2)
    first = mq.producer("writer")
    keys = [f"k{number}" for number in range(10)]
    assert {first.send_sync("orders", b"x", key=key).partition for key in keys} == {0, 1}
    with mq.producer("writer") as second:
        for key in keys:
            with pytest.raises(ProducerFenced):
                first.send_sync("orders", b"y", key=key, timeout_s=WAIT_S)
        second.send_sync("orders", b"z", key="k")
    first.close()


def test_a_fence_holds_at_a_broker_that_was_away_when_it_was_made(mortal: GroupedBed) -> None:
    """P5: the broker learns of the fence when the broker comes back."""
    mq = mortal.open()
    mq.create_subject("orders", 1, broker_groups=["east"])
    first = mq.producer("writer", PATIENT)
    first.send_sync("orders", b"x", key="k")
    mortal.brokers.pop("east").close(0.0)
    eventually(lambda: not mq.broker_groups()[0].is_heard, "east is counted dead")
    second = mq.producer("writer", PATIENT)
    mortal.start_broker("east")
    eventually(lambda: mq.broker_groups()[0].is_heard, "east is back")
    with pytest.raises(ProducerFenced):
        first.send_sync("orders", b"z", key="k", timeout_s=WAIT_S)
    second.send_sync("orders", b"y", key="k", timeout_s=WAIT_S)
    for producer in (first, second):
        producer.close()


def test_one_does_not_connect_to_a_broker_nor_open_the_folder_of_one(cluster: GroupedBed, mq: Connection) -> None:
    with pytest.raises(InvalidInput, match=r"is a broker, .* connect to its meta server"):
        inturn.connect(str(cluster.brokers["east"].address))
    with pytest.raises(InvalidInput, match="that of a broker of a cluster"):
        inturn.connect(cluster.path / "east")
    path = cluster.path / "east"
    cluster.close()
    with pytest.raises(InvalidInput, match="belongs to the broker of group 'east', not to a node"):
        inturn.connect(path)


def test_a_broker_group_is_one_folder(cluster: GroupedBed, mq: Connection) -> None:
    """Where a disk is not mounted, an empty folder would store messages that are lost later."""
    mq.create_subject("orders", 2)
    with mq.producer(settings=PATIENT) as producer:
        sent = [producer.send_sync("orders", b"0", key=f"k{number}", timeout_s=WAIT_S) for number in range(20)]
        port = cluster.brokers["east"].address.port
        cluster.brokers.pop("east").close(0.0)
        place, cluster.path = cluster.path, cluster.path / "elsewhere"
        with pytest.raises(AlreadyExists, match="another folder"):
            cluster.start_broker("east", port)
        cluster.path = place
        cluster.start_broker("east", port)
        ends = {one.partition: one.offset + 1 for one in sent}
        again = [producer.send_sync("orders", b"1", key=f"k{number}", timeout_s=WAIT_S) for number in range(20)]
        first = {one.partition: one.offset for one in reversed(again)}
        assert first == ends, "it goes on where it was"


def test_a_folder_that_meta_has_not_seen_waits_for_meta(
    cluster: GroupedBed, mq: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder may be wrong: the broker stores no message before meta has confirmed the folder."""
    mq.create_subject("orders", 2)
    with mq.producer(settings=PATIENT) as producer:
        stored = [producer.send_sync("orders", b"0", key=f"k{number}", timeout_s=WAIT_S) for number in range(20)]
        in_east = next(f"k{number}" for number, one in enumerate(stored) if _home(mq, one.partition) == "east")
        assert cluster.meta is not None
        ports = cluster.meta.address.port, cluster.brokers["east"].address.port
        cluster.meta.close(0.0)
        cluster.brokers.pop("east").close(0.0)
        place, cluster.path = cluster.path, cluster.path / "elsewhere"
        cluster.start_broker("east", ports[1])
        handle = producer.send("orders", b"1", key=in_east)
        waits_because(handle, "unavailable")
        cluster.path = place
        cluster.start_meta(ports[0])
        eventually(lambda: "exists with another folder" in caplog.text, "it is refused, and told")
        waits_because(handle, "unavailable")
        cluster.brokers.pop("east").close(0.0)
        cluster.start_broker("east", ports[1])
        assert handle.result(WAIT_S).offset > 0, "behind what was there"


def test_a_group_that_begins_at_the_end_begins_there_at_all_brokers(cluster: GroupedBed, mq: Connection) -> None:
    """The group gets all messages sent after the first member joined, even on a broker that was away."""
    mq.create_subject("orders", 2)
    seen: list[bytes] = []

    def note(message: Message, context: Context) -> None:
        seen.append(message.body)

    port = cluster.brokers["east"].address.port
    cluster.brokers.pop("east").close(0.0)
    with mq.consumer("orders", "late", note, start="last", settings=quick()):
        with pytest.raises(AssertionError):
            eventually(lambda: has_joined(mq, "orders", "late"), "it does not know where to begin in east", 0.5)
        cluster.start_broker("east", port)
        eventually(lambda: has_joined(mq, "orders", "late"), "it is joined")
        with mq.producer(settings=PATIENT) as producer:
            for number in range(20):
                producer.send_sync("orders", b"%d" % number, key=f"k{number}", timeout_s=WAIT_S)
        eventually(lambda: len(seen) == 20, f"all of them: {seen}")


def _home(mq: Connection, partition: int) -> str:
    return mq.subject("orders").route.partitions[partition].broker_group


def test_a_broker_whose_meta_is_something_else_does_not_start(tmp_path: Path) -> None:
    service = Server(tmp_path / "data", address=Address("127.0.0.1"))
    cluster = ClusterSettings(Role.BROKER, "east", str(service.address))
    with pytest.raises(InvalidInput, match="is no meta server"):
        Server(tmp_path / "east", address=Address("127.0.0.1"), cluster=cluster)
    service.close(0.0)


def test_a_broker_starts_without_meta_and_serves_what_it_knows(cluster: GroupedBed, mq: Connection) -> None:
    mq.create_subject("orders", 2)
    with mq.producer(settings=PATIENT) as producer:
        producer.send_sync("orders", b"0", key="k", timeout_s=WAIT_S)
        assert cluster.meta is not None
        cluster.meta.close(0.0)
        port = cluster.brokers["east"].address.port
        cluster.brokers.pop("east").close(0.0)
        cluster.start_broker("east", port)
        for number in range(10):
            producer.send_sync("orders", b"x", key=f"k{number}", timeout_s=WAIT_S)


def test_members_that_are_there_keep_their_partitions_when_meta_is_started_again(
    cluster: GroupedBed, mq: Connection
) -> None:
    """The brokers know the lease holders, so no partition moves although meta has lost the memory."""
    mq.create_subject("orders", 4)
    with (
        mq.consumer("orders", "g", lambda *_: None, settings=quick()),
        mq.consumer("orders", "g", lambda *_: None, settings=quick()),
    ):

        def held() -> dict[str, tuple[int, ...]]:
            return {one.name: one.held for one in mq.group("orders", "g").describe().member_details}

        eventually(lambda: has_joined(mq, "orders"), "there is the group")
        eventually(lambda: sorted(map(len, held().values())) == [2, 2], "each has two")
        before, epochs = held(), [one.epoch for one in mq.group("orders", "g").describe().partitions]
        assert cluster.meta is not None
        port = cluster.meta.address.port
        cluster.meta.close(0.0)
        cluster.start_meta(port)
        eventually(lambda: all(one.is_heard for one in mq.broker_groups()), "all are heard")
        eventually(lambda: held() == before, "both are heard again, and have what they had")
        assert [one.epoch for one in mq.group("orders", "g").describe().partitions] == epochs
