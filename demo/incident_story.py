"""What happens in the last act: the big sale is too much for two consumers, and a drain on Spark works it off."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from demo.act import LIMIT_S, Act, Interrupted
from demo.children import GRACE_S, Children
from demo.incident_board import IncidentBoard, now_s
from demo.incident_notify import NOTIFY
from demo.incident_sale import (
    INCIDENT_GROUP,
    INCIDENT_PARTITIONS,
    INCIDENT_SUBJECT,
    ONLINE,
    TASK_CONCURRENCY,
    TASK_COUNT,
    IncidentScale,
    notification_id,
    notifications,
)
from demo.incident_trace import Handled, read_handled
from inturn.cli.screen import counted
from inturn.client import Connection, connect
from inturn.model.errors import InturnError, NotFound
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings
from inturn.producer.send_batch import SendHandle

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from inturn.spark.audit.verdict import AuditVerdict
    from inturn.spark.ordered.drain import DrainProgress, DrainReport

SERVER = "server"
LOOK_S = 0.1
SEND_S = 0.01  # the producer sends what is due so often
# For a Java process that lives half a minute: the thorough compiler would still be warming up when it is over.
QUICK_JAVA = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def missing_for_spark() -> str | None:
    """Why the act cannot be played here, and what to do about it."""
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
    """In a worker: import what tasks need."""

    yield from batches


class IncidentStory(Act):
    """What is set when it is over: `stored`, the log in the end; `handled`, from the traces; what Spark said."""

    def __init__(self, scale: IncidentScale, folder: Path, board: IncidentBoard) -> None:
        super().__init__()
        self.stored: dict[tuple[int, int], Message] = {}
        self.handled: list[Handled] = []
        self.drain: DrainReport | None = None
        self.drain_began_s = 0.0
        self.lag_then = 0
        self.online_per_s = 0.0
        self.audit: AuditVerdict | None = None
        self.audit_s = 0.0
        self._scale = scale
        self._folder = folder
        self._board = board
        self._traces = board.traces
        self._spark: SparkSession | None = None
        self._spark_error: Exception | None = None
        self._is_rush_over = threading.Event()
        self._is_sale_over = threading.Event()
        self._is_closing = threading.Event()

    def play(self) -> None:
        starting = threading.Thread(target=self._start_spark, name="spark", daemon=True)
        starting.start()  # it takes its time; the processes start meanwhile
        try:
            with Children(self._folder) as children:
                self._start(children)
                with connect(self._board.address, wait_s=GRACE_S) as connection:
                    self._tell(children, connection)
        finally:
            starting.join()
            if self._spark is not None:
                self._spark.stop()

    def _tell(self, children: Children, connection: Connection) -> None:
        connection.create_subject(INCIDENT_SUBJECT, INCIDENT_PARTITIONS)
        for name in ONLINE:
            children.tell(name, self._board.address)
        self._await(children, connection, lambda: self._is_shared() and self._spark is not None)
        till = threading.Thread(target=self._sell, args=[connection], name="till", daemon=True)
        till.start()
        try:
            self._fall_behind(children, connection)
            self._drain(children, connection)
            self._go_on(children, connection, till)
        finally:
            self._is_closing.set()  # nobody sends any more when the connection is closed
            till.join()
        children.stop(*ONLINE)
        self._board.described(connection.group(INCIDENT_SUBJECT, INCIDENT_GROUP).describe())
        self.handled = read_handled(self._traces)
        self.stored = {(one.partition, one.offset): one for one in connection.reader(INCIDENT_SUBJECT)}
        self._audit()

    # The processes

    def _start(self, children: Children) -> None:
        """The consumers at the same time as the server: they are told its address when there is one."""
        data, scale = str(self._folder / "data"), self._scale
        pid = children.start(SERVER, "demo.server", data, str(scale.lease_s))
        for name in ONLINE:
            how = (name, str(self._traces), str(scale.lease_s / 5))
            self._board.pids[name] = children.start(name, "demo.incident_consumer", *how)
        self._board.address = msgspec.json.decode(children.first_line(SERVER, self._wait))["address"]
        self._board.pids = {SERVER: pid, **self._board.pids}
        self._board.events.say(f"inturn serve at {self._board.address}, {' and '.join(ONLINE)} online; Spark starts")

    def _start_spark(self) -> None:
        from inturn.spark.session import session

        try:
            spark = session("inturn demo", f"local[{TASK_COUNT}]", config=QUICK_JAVA)
            # The first job starts the Python workers, which takes longer than all that the drain has to do here.
            spark.range(0, TASK_COUNT, 1, TASK_COUNT).mapInArrow(_warm_up, "id long").collect()
            self._spark = spark
        except Exception as error:
            self._spark_error = error

    # The scenes

    def _fall_behind(self, children: Children, connection: Connection) -> None:
        say = self._board.events.say
        self._board.enter("the sale")
        say(f"the night of the big sale: {self._scale.rush:,} notifications within {self._scale.rush_s:g} s")
        half_s = now_s() + self._scale.rush_s / 2
        self._await(children, connection, lambda: now_s() > half_s or self._is_rush_over.is_set())
        look = self._board.look()
        say(f"{look.lag:,} late: {look.sent_per_s:,.0f}/s come, {' and '.join(ONLINE)} manage {look.done_per_s:,.0f}/s")
        self._await(children, connection, self._is_rush_over.is_set)

    def _drain(self, children: Children, connection: Connection) -> None:
        from inturn.spark.ordered.drain import Drain, DrainSettings
        from inturn.spark.ordered.task import disconnect

        board, say = self._board, self._board.events.say
        look = board.look()
        self.lag_then, self.online_per_s = look.lag, look.done_per_s
        eta = "" if look.eta_s is None else f", {look.eta_s:.0f} s more for {' and '.join(ONLINE)}"
        say(f"{look.lag:,} late{eta}: drain on Spark, local[{TASK_COUNT}], {TASK_CONCURRENCY} handlers each")
        assert self._spark is not None
        consumer = ConsumerSettings(
            concurrency=TASK_CONCURRENCY, trace=str(self._traces), heartbeat_s=self._scale.lease_s / 5
        )
        drain = Drain(
            self._spark,
            board.address,
            INCIDENT_SUBJECT,
            INCIDENT_GROUP,
            NOTIFY,
            consumer=consumer,
            settings=DrainSettings(tasks=TASK_COUNT, round_s=self._scale.round_s),
        )
        interrupted: list[bool] = []

        def watch(progress: DrainProgress) -> None:
            board.drained(progress)
            self._look(connection)
            if (self._stop.is_set() or time.monotonic() > self._until_s) and not interrupted:
                interrupted.append(True)
                drain.interrupt()

        self.drain_began_s = now_s()
        try:
            self.drain = drain.run(watch)
        finally:
            disconnect(board.address)
        children.check()
        if interrupted:
            raise Interrupted
        say(
            f"{self.drain.done:,} done in {counted(self.drain.rounds, 'round')}, {self.drain.per_s:,.0f}/s; "
            f"handed back to {' and '.join(ONLINE)}"
        )

    def _go_on(self, children: Children, connection: Connection, till: threading.Thread) -> None:
        self._board.enter("online again")
        over_s = now_s() + self._scale.after_s
        self._await(children, connection, lambda: now_s() > over_s)
        self._is_sale_over.set()
        self._await(children, connection, lambda: not till.is_alive() and self._is_all_done())
        self._board.events.say(f"{' and '.join(ONLINE)} have done what came meanwhile: nothing is late")

    def _audit(self) -> None:
        """Of all traces together, against the log."""
        from inturn.spark.audit.audit import audit

        spark, traces, subject = self._spark, self._traces, INCIDENT_SUBJECT
        assert spark is not None
        self._board.enter("audit")
        self._board.events.say(f"audit on Spark: the traces of {' and '.join(ONLINE)}, and of every task, as one")
        began_s = now_s()
        log = spark.read.format("inturn").option("subject", subject).load(self._board.address)
        log = log.select("partition", "offset", "key")
        with ThreadPoolExecutor(1, "audit") as auditor:
            verdict = auditor.submit(audit, spark, traces, log=log, order="key", complete=True)
            try:
                while not verdict.done():
                    self._pause(LOOK_S)
            except Interrupted:
                while not verdict.done():
                    spark.sparkContext.cancelAllJobs()  # between two jobs of it there is nothing to cancel
                    time.sleep(LOOK_S)
                raise
            self.audit = verdict.result()
        self.audit_s = now_s() - began_s
        self._board.events.say(str(self.audit).partition("\n")[0])

    # What is waited for

    def _await(self, children: Children, connection: Connection, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            children.check()
            if self._spark_error is not None:
                raise self._spark_error
            self._look(connection)
            return condition()

        self._wait(look, LOOK_S)

    def _look(self, connection: Connection) -> None:
        try:
            self._board.described(connection.group(INCIDENT_SUBJECT, INCIDENT_GROUP).describe())
        except NotFound:  # nobody has joined yet
            return

    def _is_shared(self) -> bool:
        owned = self._board.owned()
        return len(owned) == len(ONLINE) and sum(owned.values()) == INCIDENT_PARTITIONS

    def _is_all_done(self) -> bool:
        look = self._board.look()
        return look.lag == 0 and look.sent == len(self._board.sent)

    # The producer

    def _sell(self, connection: Connection) -> None:
        try:
            self._send(connection)
        except Exception as error:
            self.error = error
            self._stop.set()

    def _send(self, connection: Connection) -> None:
        """Pipelined: the rush, then a trickle until the sale is over."""
        scale, count = self._scale, 0
        producer = connection.producer()
        window: deque[tuple[SendHandle, str, str]] = deque()
        coming = notifications(scale.customers)
        began_s = now_s()
        while not self._is_sale_over.is_set():
            passed_s = now_s() - began_s
            trickle = max(0.0, passed_s - scale.rush_s) * scale.trickle_per_s
            due = int(min(1.0, passed_s / scale.rush_s) * scale.rush + trickle)
            for key, number in itertools.islice(coming, due - count):
                message_id = notification_id(key, number)
                handle = producer.send(INCIDENT_SUBJECT, b"%d" % number, key=key, message_id=message_id)
                window.append((handle, key, message_id))
            count = due
            while window and window[0][0].done:
                self._acknowledge(window)
            if passed_s >= scale.rush_s:
                self._is_rush_over.set()
            if self._is_closing.wait(SEND_S):
                return
        while window:
            self._acknowledge(window)

    def _acknowledge(self, window: deque[tuple[SendHandle, str, str]]) -> None:
        handle, key, message_id = window.popleft()
        self._board.acknowledged(handle.result(timeout_s=LIMIT_S), key, message_id)
