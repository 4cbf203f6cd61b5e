"""The last act: a big sale is too much for two consumers. A drain works the backlog off on Spark and hands back.

At the end an audit on Spark compares all traces with the log.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from demo.act import LIMIT_S, ActLook, Events, Interrupted, SendWindow, short_name
from demo.children import SERVER, ProcessAct, ProcessBoard
from demo.incident_verdict import Handled, HandledCounts, read_handled
from demo.orders import (
    INCIDENT_GROUP,
    INCIDENT_PARTITIONS,
    INCIDENT_SUBJECT,
    NOTIFY,
    ONLINE,
    TASK_CONCURRENCY,
    TASK_COUNT,
    IncidentScale,
    notification_id,
    notifications,
)
from inturn.cli.screen import counted
from inturn.client import Connection
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings
from inturn.model.time import SystemClock
from inturn.producer.send_batch import Stored
from inturn.protocol.commands import GroupDescription
from inturn.testing.history import SendAcknowledged

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from inturn.spark.audit.verdict import AuditVerdict
    from inturn.spark.ordered.drain_report import DrainProgress, DrainReport

SEND_S = 0.01  # interval between two sends of the producer
RATE_S = 2.0  # rates are over the last so many seconds
# For a Java process that lives less than a minute: the second compiler would still be warming up at the end.
QUICK_JAVA = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
SPARK_LIMIT_S = 300.0  # for the start of Spark, in the background since the first act
now_s = SystemClock.monotonic  # the clock of the traces


class SparkStart:
    """Starts Spark in a thread while the first acts are played: the last act need not wait for the JVM.

    `missing` is set if the last act cannot be played here, and says what to install. `error` is set if Spark did not
    start.
    """

    def __init__(self) -> None:
        self.session: SparkSession | None = None
        self.missing: str | None = None
        self.error: Exception | None = None
        self._is_checked = threading.Event()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inturn-demo-spark", daemon=True)

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def is_possible(self) -> bool:
        """Whether Spark is known to run here. Does not block."""
        return self._is_checked.is_set() and self.missing is None and self.error is None

    def wait_checked(self) -> str | None:
        """Block until it is known whether Spark can run here. Returns `missing`."""
        self._is_checked.wait()
        return self.missing

    def stop(self) -> None:
        """Stop Spark; a start under way is awaited."""
        self._is_stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.session is not None:
            self.session.stop()

    def _run(self) -> None:
        try:
            self.missing = missing_for_spark()
        except Exception as error:
            self.error = error
        finally:
            self._is_checked.set()
        if self.missing is not None or self.error is not None or self._is_stopped.is_set():
            return
        try:
            from inturn.spark.session import session

            spark = session("inturn demo", f"local[{TASK_COUNT}]", config=QUICK_JAVA)
            if not self._is_stopped.is_set():
                # The first job starts the Python workers, and takes longer than the rounds of the drain.
                spark.range(0, TASK_COUNT, 1, TASK_COUNT).mapInArrow(_warm_up, "id long").collect()
            self.session = spark
        except Exception as error:
            self.error = error


def missing_for_spark() -> str | None:
    """Why the last act cannot be played here, and what to install. None if complete."""
    from inturn.spark.extra import needs_extra
    from inturn.spark.java import java_home

    try:
        with needs_extra():
            for module in ("pandas", "pyarrow", "pyspark"):
                importlib.import_module(module)
        java_home()
    except InturnError as error:
        return str(error)
    return None


def _warm_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a worker of Spark: import the modules of the tasks."""
    import inturn.spark.ordered.task  # noqa: F401

    yield from batches


@dataclass(slots=True)
class IncidentPartition:
    end: int = 0
    done: int = 0
    owner: str | None = None
    epoch: int = 0

    @property
    def lag(self) -> int:
        return max(0, self.end - self.done)


@dataclass(frozen=True, slots=True)
class IncidentLook(ActLook):
    phase: str
    address: str
    partitions: tuple[IncidentPartition, ...]
    handled_by: dict[str, int]
    sent_per_s: float
    done_per_s: float

    @property
    def sent(self) -> int:
        return sum(one.end for one in self.partitions)

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.partitions)

    @property
    def eta_s(self) -> float | None:
        """Time to work the lag off at this rate, if no message is added."""
        return self.lag / self.done_per_s if self.done_per_s > 0 and self.lag else None


class IncidentBoard(ProcessBoard):
    """Times on this board are on the clock of the traces."""

    def __init__(self, scale: IncidentScale, events: Events, traces: Path) -> None:
        super().__init__(events)
        self.scale = scale
        self.traces = traces
        self.phase = "starting"
        self.sent: list[tuple[float, SendAcknowledged]] = []  # with the time of the acknowledgement
        self.partitions = [IncidentPartition() for _ in range(INCIDENT_PARTITIONS)]
        self._pids: dict[str, int] = {}
        self._counts = HandledCounts(traces)
        self._handled_by: Counter[str] = Counter()
        self._samples: deque[tuple[float, int, int]] = deque()  # time, sent, done

    @property
    def pids(self) -> dict[str, int]:
        """Of the server and the online consumers."""
        return self._pids if self.server_pid is None else {SERVER: self.server_pid, **self._pids}

    def look(self) -> IncidentLook:
        with self._lock:
            sent_per_s, done_per_s = self._rates()
            return IncidentLook(
                self.events.now_s,
                self.events.so_far(),
                self.phase,
                self.address,
                tuple(replace(one) for one in self.partitions),
                {name: self._handled_by[name] for name in (*ONLINE, *sorted(set(self._handled_by) - set(ONLINE)))},
                sent_per_s,
                done_per_s,
            )

    def _rates(self) -> tuple[float, float]:
        if len(self._samples) < 2:
            return 0.0, 0.0
        (first_s, first_sent, first_done), (last_s, last_sent, last_done) = self._samples[0], self._samples[-1]
        passed_s = last_s - first_s
        if passed_s < 0.2:
            return 0.0, 0.0
        return (last_sent - first_sent) / passed_s, max(0.0, (last_done - first_done) / passed_s)

    # Calls of the act

    def joined(self, name: str, pid: int) -> None:
        self._pids[name] = pid

    def acknowledged(self, stored: Stored, key: str, message_id: str) -> None:
        event = SendAcknowledged(stored.subject, stored.partition, stored.offset, key.encode(), message_id)
        with self._lock:
            self.sent.append((now_s(), event))

    def described(self, group: GroupDescription) -> None:
        handled_by = self._counts.read()
        with self._lock:
            for known, one in zip(self.partitions, group.partitions, strict=True):
                known.end, known.done = one.end_offset, one.committed + one.finished_count
                known.owner, known.epoch = None if one.owner is None else short_name(one.owner), one.epoch
            self._handled_by = handled_by
            at_s = now_s()
            self._samples.append(
                (at_s, sum(one.end for one in self.partitions), sum(one.done for one in self.partitions))
            )
            while len(self._samples) > 2 and at_s - self._samples[0][0] > RATE_S:
                self._samples.popleft()

    def drained(self, progress: DrainProgress) -> None:
        phases = {"taking over": "hand-over", "working": f"Spark, round {progress.round}"}
        self.enter(phases.get(progress.phase, "hand-back"))

    def enter(self, phase: str) -> None:
        with self._lock:
            if phase != self.phase:
                self.phase = phase
                self._samples.clear()  # rates are per phase

    def owned(self) -> Counter[str]:
        with self._lock:
            return Counter(one.owner for one in self.partitions if one.owner is not None)

    def sent_events(self) -> Sequence[SendAcknowledged]:
        with self._lock:
            return [event for _, event in self.sent]


class IncidentAct(ProcessAct):
    """Set at the end: `stored`, the log; `handled`, from the traces; `drain` and `audit`, the reports of Spark."""

    subject, group, partition_count = INCIDENT_SUBJECT, INCIDENT_GROUP, INCIDENT_PARTITIONS
    consumers = ONLINE
    look_s = 0.1

    def __init__(self, scale: IncidentScale, folder: Path, board: IncidentBoard, spark: SparkStart) -> None:
        super().__init__(folder, board, scale.lease_s)
        self.stored: dict[tuple[int, int], Message] = {}
        self.handled: list[Handled] = []
        self.drain: DrainReport | None = None
        self.drain_began_s = 0.0
        self.lag_at_drain = 0
        self.online_per_s = 0.0
        self.audit: AuditVerdict | None = None
        self.audit_s = 0.0
        self._scale = scale
        self._board = board
        self._traces = board.traces
        self._spark = spark
        self._is_rush_over = threading.Event()
        self._is_sale_over = threading.Event()
        self._is_closing = threading.Event()

    def _consumer_arguments(self, name: str) -> Sequence[str]:
        return ("online", name, str(self._traces), str(self._scale.lease_s / 5))

    def _tell(self, connection: Connection) -> None:
        starts = "" if self._spark.session is not None else "; Spark starts"
        self._board.events.say(f"inturn serve at {self._board.address}, {' and '.join(ONLINE)} online{starts}")
        connection.create_subject(INCIDENT_SUBJECT, INCIDENT_PARTITIONS)
        self._admit()
        self._until_s = time.monotonic() + SPARK_LIMIT_S
        self._await(connection, self._is_ready)
        self._until_s = time.monotonic() + LIMIT_S
        till = self._start_till("till", lambda: self._send(connection))
        try:
            self._fall_behind(connection)
            self._drain(connection)
            self._go_on(connection, till)
        finally:
            self._is_closing.set()  # no producer sends when the connection is closed
            till.join()
        self._children.stop(*ONLINE)
        self._board.described(connection.group(INCIDENT_SUBJECT, INCIDENT_GROUP).describe())
        self.handled = read_handled(self._traces)
        self.stored = {(one.partition, one.offset): one for one in connection.reader(INCIDENT_SUBJECT)}
        self._audit()

    # The scenes

    def _fall_behind(self, connection: Connection) -> None:
        say = self._board.events.say
        self._board.enter("the sale")
        say(f"the night of the big sale: {self._scale.rush:,} notifications within {self._scale.rush_s:g} s")
        half_s = now_s() + self._scale.rush_s / 2
        self._await(connection, lambda: now_s() > half_s or self._is_rush_over.is_set())
        look = self._board.look()
        say(f"{look.lag:,} late: {look.sent_per_s:,.0f}/s come, {' and '.join(ONLINE)} manage {look.done_per_s:,.0f}/s")
        self._await(connection, self._is_rush_over.is_set)

    def _drain(self, connection: Connection) -> None:
        from inturn.spark.ordered.drain import Drain, DrainSettings
        from inturn.spark.ordered.task import disconnect

        board, say = self._board, self._board.events.say
        look = board.look()
        self.lag_at_drain, self.online_per_s = look.lag, look.done_per_s
        eta = "" if look.eta_s is None else f", {look.eta_s:.0f} s more for {' and '.join(ONLINE)}"
        say(f"{look.lag:,} late{eta}: drain on Spark, local[{TASK_COUNT}], {TASK_CONCURRENCY} handlers each")
        assert self._spark.session is not None
        consumer = ConsumerSettings(
            concurrency=TASK_CONCURRENCY, trace=str(self._traces), heartbeat_s=self._scale.lease_s / 5
        )
        drain = Drain(
            self._spark.session,
            board.address,
            INCIDENT_SUBJECT,
            INCIDENT_GROUP,
            NOTIFY,
            consumer=consumer,
            settings=DrainSettings(tasks=TASK_COUNT, round_s=self._scale.round_s),
        )
        is_interrupted = False

        def watch(progress: DrainProgress) -> None:
            nonlocal is_interrupted
            board.drained(progress)
            self._look(connection)
            if (self._stop.is_set() or time.monotonic() > self._until_s) and not is_interrupted:
                is_interrupted = True
                drain.interrupt()

        self.drain_began_s = now_s()
        try:
            self.drain = drain.run(watch)
        finally:
            disconnect(board.address)
        self._children.check()
        if is_interrupted:
            raise Interrupted
        say(
            f"{self.drain.done:,} done in {counted(self.drain.rounds, 'round')}, {self.drain.per_s:,.0f}/s; "
            f"handed back to {' and '.join(ONLINE)}"
        )

    def _go_on(self, connection: Connection, till: threading.Thread) -> None:
        self._board.enter("online again")
        over_s = now_s() + self._scale.after_s
        self._await(connection, lambda: now_s() > over_s)
        self._is_sale_over.set()
        self._await(connection, lambda: not till.is_alive() and self._is_all_done())
        self._board.events.say(f"{' and '.join(ONLINE)} have done what came meanwhile: nothing is late")

    def _audit(self) -> None:
        """Audit all traces together against the log."""
        from inturn.spark.audit.audit import audit

        spark = self._spark.session
        assert spark is not None
        self._board.enter("audit")
        self._board.events.say(f"audit on Spark: the traces of {' and '.join(ONLINE)}, and of every task, as one")
        began_s = now_s()
        log = spark.read.format("inturn").option("subject", INCIDENT_SUBJECT).load(self._board.address)
        log = log.select("partition", "offset", "key")
        with ThreadPoolExecutor(1, "audit") as auditor:
            verdict = auditor.submit(audit, spark, self._traces, log=log, order="key", complete=True)
            try:
                while not verdict.done():
                    self._pause(self.look_s)
            except Interrupted:
                while not verdict.done():
                    spark.sparkContext.cancelAllJobs()  # repeated: between two jobs there is nothing to cancel
                    time.sleep(self.look_s)
                raise
            self.audit = verdict.result()
        self.audit_s = now_s() - began_s
        self._board.events.say(str(self.audit).partition("\n")[0])

    # Conditions

    def _is_ready(self) -> bool:
        if self._spark.error is not None:
            raise self._spark.error
        return self._is_shared() and self._spark.session is not None

    def _is_all_done(self) -> bool:
        look = self._board.look()
        return look.lag == 0 and look.sent == len(self._board.sent)

    # The producer

    def _send(self, connection: Connection) -> None:
        """Send the rush, then a trickle until the sale is over. Pipelined."""
        scale, count = self._scale, 0
        producer = connection.producer()
        window = SendWindow(self._board.acknowledged)
        coming = notifications(scale.customers)
        began_s = now_s()
        while not self._is_sale_over.is_set():
            passed_s = now_s() - began_s
            trickle = max(0.0, passed_s - scale.rush_s) * scale.trickle_per_s
            due = int(min(1.0, passed_s / scale.rush_s) * scale.rush + trickle)
            for key, number in itertools.islice(coming, due - count):
                message_id = notification_id(key, number)
                handle = producer.send(INCIDENT_SUBJECT, b"%d" % number, key=key, message_id=message_id)
                window.add(handle, key, message_id)
            count = due
            window.settle()
            if passed_s >= scale.rush_s:
                self._is_rush_over.set()
            if self._is_closing.wait(SEND_S):
                return
        window.settle(0)
