"""A history of real processes: run, inject faults, heal, and let the order checker judge the history.

    report = run_processes(ProcessSettings(seed=7, order="key"))
    report.raise_if_bad()

The faults and their order come from the seed; the machine decides when exactly a fault hits. A run can be repeated,
but not replayed. The folder of a failed run is kept, and its files can be judged again.
"""

from __future__ import annotations

import heapq
import itertools
import random
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import inturn
from inturn.client import Connection
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.settings import LeaseSettings
from inturn.testing.checker import check
from inturn.testing.verdict import Verdict
from simulator.processes.cluster import GROUP, SUBJECT, Cluster, Role
from simulator.processes.faults import (
    CLOCK_JUMPS,
    FREEZES,
    GROWTHS,
    KILLS,
    RESTARTS,
    STREAM_FAULTS,
    FaultCounts,
    Injector,
    family_count,
    heal,
    plan,
)
from simulator.processes.history import Merged, merge
from simulator.processes.proxy import Proxies

SHORT_LEASE = LeaseSettings(life_s=1.0, renew_s=0.2, margin_s=0.1)
LOOK_S = 0.01
START_S = 60.0
HISTORY_NAME = "history.jsonl"
FAULT_LOG_NAME = "faults.txt"
PROBLEMS_NAME = "problems.txt"


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of a run, and its faults. `bugs` are seeded bugs by role, to check that the run finds them."""

    seed: int = 0
    order: Literal["key", "partition"] = "key"
    faults: FaultCounts | Sequence[str] = field(default_factory=FaultCounts)
    gap_s: float = 0.25  # mean time between two faults
    partitions: int = 4
    keys: int = 24
    consumers: int = 3
    producers: int = 2
    flush: str = "always"
    lease: LeaseSettings = SHORT_LEASE
    quiet_s: float = 60.0  # limit for all work after the last fault
    bugs: Mapping[Role, str] = field(default_factory=dict)
    folder: Path | None = None  # where the run's folder is made; None: where temporary files go


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """`problems` are violations of the contract, and obstacles to a verdict. `folder` is the kept folder."""

    seed: int
    order: str
    seconds: float
    faults: Counter[str]
    starts: int  # of processes, the first starts included
    stored: int
    late_starts: int
    hidden: int
    verdict: Verdict
    problems: list[str]
    folder: str | None = None

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def kills(self) -> int:
        return family_count(self.faults, KILLS)

    @property
    def freezes(self) -> int:
        return family_count(self.faults, FREEZES)

    @property
    def stream_faults(self) -> int:
        return family_count(self.faults, STREAM_FAULTS)

    def raise_if_bad(self) -> None:
        """Raise AssertionError with all problems."""
        if self.problems:
            kept = f"seed {self.seed}, order {self.order}; all its files are in {self.folder}"
            raise AssertionError("\n".join([kept, *self.problems]))

    def as_json(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "ok": self.ok,
            "seed": self.seed,
            "order": self.order,
            "seconds": round(self.seconds, 1),
            "faults": dict(sorted(self.faults.items())),
            "starts": self.starts,
            "acknowledged": verdict.sent,
            "stored": self.stored,
            "handled": verdict.finished,
            "duplicates": verdict.duplicates,
            "lease_grants": verdict.lease_grants,
            "commits": verdict.commits,
            "overlaps_after_lease_loss": verdict.overlaps_after_lease_loss,
            "late_starts": self.late_starts,
            "hidden_decisions": self.hidden,
            "problems": self.problems,
            "folder": self.folder,
        }


def run_processes(settings: ProcessSettings, tell: Callable[[str], None] = lambda _: None) -> ProcessReport:
    """Run a history. `tell` is called with every fault. The folder of a failed run stays, else the folder is
    removed."""
    folder = Path(tempfile.mkdtemp(prefix=f"inturn-faults-{settings.seed}-", dir=settings.folder))
    with Proxies() as proxies:
        run = _Run(settings, folder, proxies, tell)
        try:
            run.go()
        except InturnError as error:
            run.cluster.problems.append(f"the run came to an end: {error!r}")
        finally:
            run.cluster.close()
        report = run.judge()
    if report.ok:
        shutil.rmtree(folder)
    return report


class _Run:
    def __init__(self, settings: ProcessSettings, folder: Path, proxies: Proxies, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._random = random.Random(settings.seed)
        counts: dict[Role, int] = {"consumer": settings.consumers, "producer": settings.producers}
        self.cluster = Cluster(
            folder,
            settings.seed,
            settings.order,
            settings.lease,
            settings.flush,
            counts,
            settings.keys,
            proxies,
            settings.bugs,
        )
        self._injector = Injector(self.cluster, self._random, settings.lease.life_s, self._grow)
        self._partitions = settings.partitions  # present or requested number of partitions
        self._growing: list[threading.Thread] = []
        self._mendings: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._messages: list[Message] = []
        self._started_s = time.monotonic()

    def go(self) -> None:
        cluster = self.cluster
        cluster.start(cluster.server)
        with inturn.connect(cluster.address, wait_s=30.0) as mq:
            mq.create_subject(SUBJECT, self._settings.partitions)
            for place in cluster.places[1:]:
                cluster.start(place)
            self._wait_for(self._is_at_work, "messages are sent and handled", START_S)
            self._hurt()
            self._heal()
            self._end_all(mq)

    def _grow(self) -> None:
        """Grow the subject in a thread: the request may wait as long as the server is away."""
        self._partitions += self._random.randint(1, 3)
        thread = threading.Thread(target=self._grow_to, args=(self._partitions,), daemon=True)
        self._growing.append(thread)
        thread.start()

    def _grow_to(self, partitions: int) -> None:
        until_s = time.monotonic() + self._settings.quiet_s
        while time.monotonic() < until_s:
            try:
                with inturn.connect(self.cluster.address, wait_s=5.0) as mq:
                    if mq.subject(SUBJECT).partition_count < partitions:
                        mq.grow_subject(SUBJECT, partitions)
                    return
            except InturnError:
                time.sleep(LOOK_S)
        self.cluster.problems.append(f"not within {self._settings.quiet_s:g} s: {partitions} partitions")

    def _is_at_work(self) -> bool:
        """Wait until every role has done work: only then faults have a target."""
        return all(any(place.has_written for place in self.cluster.of(role)) for role in self.cluster.events)

    def _hurt(self) -> None:
        waiting = deque(plan(self._settings.faults, self._random))
        while waiting:
            fault = waiting.popleft()
            mending = self._injector.inject(fault)
            if mending is None:  # retried when there is a target
                waiting.append(fault)
                self._pass(LOOK_S)
                continue
            due_s = time.monotonic() + mending.after_s
            heapq.heappush(self._mendings, (due_s, next(self._numbers), mending.act))
            self._tell(self._injector.log[-1])
            self._pass(2 * self._settings.gap_s * self._random.random())

    def _pass(self, wait_s: float) -> None:
        """Wait, and run due repairs."""
        until_s = time.monotonic() + wait_s
        while True:
            now_s = time.monotonic()
            while self._mendings and self._mendings[0][0] <= now_s:
                heapq.heappop(self._mendings)[2]()
            self.cluster.look()
            if now_s >= until_s:
                return
            time.sleep(min(LOOK_S, until_s - now_s))

    def _heal(self) -> None:
        """All processes run, without faults."""
        cluster = self.cluster
        while self._mendings:
            heapq.heappop(self._mendings)[2]()
        heal(place.proxy for place in cluster.places if place.proxy is not None)
        for place in cluster.places:
            cluster.thaw(place)
            if place.process is None:
                cluster.start(place)
        self._wait_for(lambda: all(place.has_begun for place in cluster.places), "all processes have begun again")
        for thread in self._growing:
            thread.join()

    def _end_all(self, mq: Connection) -> None:
        """Producers stop, consumers do the rest, and then all end by themselves."""
        cluster = self.cluster
        for place in cluster.of("producer"):
            cluster.end(place, self._settings.quiet_s)
        self._wait_for(lambda: _is_all_done(mq), "no lag")
        try:
            self._messages = sorted(mq.reader(SUBJECT), key=lambda one: (one.partition, one.offset))
        except InturnError as error:
            cluster.problems.append(f"the log cannot be read: {error}")
        for place in (*cluster.of("consumer"), cluster.server):
            cluster.end(place, self._settings.quiet_s)

    def _wait_for(self, condition: Callable[[], bool], what: str, wait_s: float | None = None) -> None:
        wait_s = self._settings.quiet_s if wait_s is None else wait_s
        until_s = time.monotonic() + wait_s
        while not condition():
            if time.monotonic() > until_s:
                self.cluster.problems.append(f"not within {wait_s:g} s: {what}")
                return
            self._pass(0.05)

    def judge(self) -> ProcessReport:
        cluster, settings = self.cluster, self._settings
        merged = self._merged()
        stored = {(one.subject, one.partition, one.offset): one.message_id for one in self._messages}
        verdict = check(merged.history, subject=SUBJECT, group=GROUP, order=settings.order, stored=stored or None)
        problems = [
            *(str(violation) for violation in verdict.violations),
            *cluster.problems,
            *misplaced(self._messages),
        ]
        if problems:
            merged.history.save(cluster.folder / HISTORY_NAME)
            (cluster.folder / FAULT_LOG_NAME).write_text("\n".join([f"seed {settings.seed}", *self._injector.log]))
            (cluster.folder / PROBLEMS_NAME).write_text("\n".join(problems))
        return ProcessReport(
            settings.seed,
            settings.order,
            time.monotonic() - self._started_s,
            self._injector.counts,
            sum(place.started for place in cluster.places),
            len(self._messages),
            merged.late_starts,
            merged.hidden,
            verdict,
            problems,
            str(cluster.folder) if problems else None,
        )

    def _merged(self) -> Merged:
        events = self.cluster.events
        clients = [path for path in (*events["consumer"], *events["producer"]) if path.exists()]
        servers = [path for path in events["server"] if path.exists()]
        return merge(clients, servers, self.cluster.deaths, margin_s=self._settings.lease.margin_s)


def _is_all_done(mq: Connection) -> bool:
    try:
        return mq.group(SUBJECT, GROUP).describe().lag == 0
    except InturnError:  # no member has joined yet, or the server is not back yet
        return False


def misplaced(messages: Iterable[Message]) -> list[str]:
    """Problems of the log: messages of a sender and key must be stored in the order of their numbers, and once."""
    last: dict[tuple[str, bytes | None, int | None], tuple[int, int]] = {}
    problems = []
    for message in messages:
        if message.message_id is None:
            continue
        sender, _, number = message.message_id.rpartition(":")
        # Without a key there is no order, but every message must be stored once.
        lane = (sender, message.key, int(number) if message.key is None else None)
        before = last.get(lane)
        if before is not None and int(number) <= before[0]:
            how = "twice" if int(number) == before[0] else f"behind number {before[0]}"
            problems.append(
                f"STORED: {message.message_id!r} of key {message.key!r} is stored {how}, "
                f"in partition {message.partition} at offset {message.offset} (before: {before[1]})"
            )
        last[lane] = (int(number), message.offset)
    return problems


def told_faults(faults: Counter[str]) -> Sequence[tuple[str, int]]:
    """All kinds of faults by family, with the number of injections."""
    kinds = (*KILLS, *RESTARTS, *FREEZES, *STREAM_FAULTS, *CLOCK_JUMPS, *GROWTHS)
    return [(kind, faults[kind]) for kind in kinds]
