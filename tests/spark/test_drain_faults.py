"""S3: drains with killed processes, and online consumers in other processes. The order checker judges the calls of all
processes together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inturn import LeaseSettings
from inturn.testing.history import HandlerEnd
from simulator.processes.child import ConsumerSpec
from simulator.processes.history import Death
from tests.spark.drain_driver import DriverSpec, Ended, Ready
from tests.spark.judged import GROUP, SUBJECT, Judged, judging
from tests.spark.noting import EVENTS, is_alive
from tests.spark.waiting import wait_until

pytestmark = pytest.mark.timeout(500)  # every test starts a Spark

LEASE = LeaseSettings(life_s=2.5, renew_s=0.4, margin_s=0.2)
MESSAGES, KEYS, PARTITIONS = 3000, 60, 3
HANDLING_S = 0.03
WAIT_S = 100.0


class Fault:
    """A running drain in separate processes, with two online consumers in separate processes."""

    def __init__(self, judged: Judged, place: Path) -> None:
        self.judged = judged
        self.place = place
        self._sent = 0
        self._deaths: dict[Path, float] = {}
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._watch_tasks, daemon=True)
        self._online = [self._start_online(number) for number in range(2)]
        self.driver = self._start_driver()

    def begin(self) -> None:
        """Start all processes, send the backlog, start the drain, and wait until tasks handle messages."""
        self._watch.start()
        wait_until(lambda: (self.place / "ready").exists(), "Spark has started", WAIT_S)
        wait_until(lambda: self.judged.has_group() and self._members() == 2, "both online consumers are members")
        self.send(MESSAGES)
        (self.place / "go").touch()
        wait_until(lambda: len(self.tasks()) == 2, "two tasks are at work", WAIT_S)
        wait_until(lambda: self.done_by_tasks() > 100, "they have done something", WAIT_S)
        assert self.judged.lag > 500, "there is nothing left to be hurt"

    def send(self, count: int) -> None:
        self.judged.send(count, KEYS, first=self._sent)
        self._sent += count

    @property
    def java(self) -> int:
        return msgspec.json.decode((self.place / "ready").read_bytes(), type=Ready).java

    def ended(self) -> Ended:
        wait_until(lambda: (self.place / "ended").exists(), "the drain has ended", WAIT_S)
        return msgspec.json.decode((self.place / "ended").read_bytes(), type=Ended)

    def tasks(self) -> list[int]:
        """The processes of tasks that have handled a message."""
        return [int(path.name.removesuffix(EVENTS)) for path in self._task_files()]

    def done_by_tasks(self) -> int:
        return sum(path.read_bytes().count(b'"HandlerEnd"') for path in self._task_files())

    def finish(self) -> None:
        """Wait until the online consumers have finished the remaining messages; then end all processes."""
        wait_until(lambda: self.judged.lag == 0, "the online consumers do the rest", WAIT_S)
        wait_until(lambda: self._members() == 2, "the group is theirs again")
        for process in self._online:
            process.terminate()
            assert process.wait(30) == 0
        self.driver.wait(60)
        wait_until(lambda: len(self._deaths) == len(self._task_files()), "no task lives on", WAIT_S)

    def judge(self) -> int:
        """Check that all messages were handled in order. Returns the number of repeated calls: only uncommitted
        messages of a dead process repeat."""
        deaths = [Death(path, at_s) for path, at_s in self._deaths.items()]
        verdict = self.judged.judge("key", deaths)
        assert len(self.judged.noted.handled()) == self._sent
        by_online = {one for one in self.judged.noted.ends if one.consumer.startswith("online")}
        assert by_online, "the online consumers did nothing"
        repeated = 0
        for ends in self._good_ends().values():
            assert all(one.consumer.startswith("drain") for one in ends[:-1]), ends
            assert len({one.consumer for one in ends}) == len(ends)
            repeated += len(ends) - 1
        assert repeated == verdict.duplicates
        return repeated

    def close(self) -> None:
        self._is_over.set()
        for process in (self.driver, *self._online):
            if process.poll() is None:
                process.kill()
            process.wait()
        if (self.place / "ready").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.java, signal.SIGKILL)

    def _good_ends(self) -> dict[tuple[int, int], list[HandlerEnd]]:
        found: dict[tuple[int, int], list[HandlerEnd]] = {}
        for one in self.judged.noted.ends:
            if one.result == "success":
                found.setdefault((one.partition, one.offset), []).append(one)
        return found

    def _members(self) -> int:
        described = self.judged.mq.group(SUBJECT, GROUP).describe()
        return len(described.members) if described.taken_over_by is None else 0

    def _task_files(self) -> list[Path]:
        return [path for path in self.judged.noted.files() if path.name.removesuffix(EVENTS).isdecimal()]

    def _watch_tasks(self) -> None:
        while not self._is_over.wait(0.01):
            for path in self._task_files():
                if path not in self._deaths and not is_alive(int(path.name.removesuffix(EVENTS))):
                    self._deaths[path] = time.monotonic()

    def _start_online(self, number: int) -> subprocess.Popen[bytes]:
        spec = ConsumerSpec(
            events=str(self.judged.folder / f"online-{number}{EVENTS}"),
            seed=number,
            address=self.judged.address,
            subject=SUBJECT,
            name=f"online-{number}",
            group=GROUP,
            order="key",
            failing_share=0.0,
            handling_s_max=0.02,
            slow_share=0.0,
        )
        return self._start("simulator.processes.consumer", spec, f"online-{number}")

    def _start_driver(self) -> subprocess.Popen[bytes]:
        where = (str(self.judged.folder), str(self.place))
        spec = DriverSpec(self.judged.address, SUBJECT, GROUP, *where, HANDLING_S)
        return self._start("tests.spark.drain_driver", spec, "driver")

    def _start(self, module: str, spec: msgspec.Struct, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, msgspec.json.encode(spec).decode()]
        with (self.place / f"{name}.log").open("wb") as said:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


@pytest.fixture
def fault(tmp_path: Path) -> Iterator[Fault]:
    with judging(tmp_path, PARTITIONS, lease=LEASE) as judged:
        place = tmp_path / "place"
        place.mkdir()
        fault = Fault(judged, place)
        try:
            fault.begin()
            yield fault
        finally:
            fault.close()


def test_a_driver_that_is_killed_leaves_everything_to_the_online_consumers(fault: Fault) -> None:
    fault.driver.kill()
    fault.finish()
    assert not (fault.place / "ended").exists()
    assert fault.judge() < 200


def test_a_worker_that_is_killed_costs_a_round_and_the_drain_goes_on(fault: Fault) -> None:
    os.kill(fault.tasks()[0], signal.SIGKILL)
    ended = fault.ended()
    assert (ended.error, ended.ended, ended.lag) == ("", "end", 0)
    assert ended.failed_rounds >= 1
    fault.send(100)  # for the online consumers: the group is handed back
    fault.finish()
    fault.judge()


def test_a_java_process_that_is_killed_ends_the_drain_and_hands_back(fault: Fault) -> None:
    os.kill(fault.java, signal.SIGKILL)
    ended = fault.ended()
    assert ended.error.startswith("DrainFailed: drain of 'orders' for group 'billing': Spark has ended: its Java")
    assert "run the drain again, or let the consumers continue" in ended.error
    fault.finish()
    assert fault.judge() < 200


def test_a_driver_that_stands_still_for_longer_than_its_leases_breaks_nothing(fault: Fault) -> None:
    fault.driver.send_signal(signal.SIGSTOP)
    time.sleep(2 * LEASE.life_s)
    fault.driver.send_signal(signal.SIGCONT)
    ended = fault.ended()
    assert (ended.error, ended.ended) == ("", "end")
    fault.finish()
    assert fault.judge() == 0
