"""C18: handlers in processes, and the contract while processes die."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import inturn
from inturn import Connection, ConsumerSettings, Context, Hook, Message, ResultKind
from inturn.consumer import worker_processes as processes
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.process_child import BEGUN, DONE, UNTOUCHED, GivenLane, WorkFrame, _Calls
from inturn.consumer.worker_process import WorkerProcess
from inturn.consumer.worker_processes import take_chunk
from inturn.model.errors import InvalidInput
from inturn.model.message import Origin
from inturn.model.time import SystemClock
from inturn.testing.checker import Verdict, check
from inturn.testing.history import Event, HandlerEnd, HandlerStart, History
from inturn.testing.recorder import Recorder
from tests.consumer import process_handlers as handlers
from tests.consumer.process_handlers import LINE_BYTES
from tests.contract.bed import eventually

WAIT_S = 20.0
Line = dict[str, Any]


class Notes:
    """The notes of the handlers in all processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[Line]:
        data = self.path.read_bytes() if self.path.exists() else b""
        return [json.loads(line) for line in data[: len(data) // LINE_BYTES * LINE_BYTES].splitlines()]

    def count(self, event: str = "end") -> int:
        return sum(line["event"] == event for line in self.lines())

    def offsets(self, event: str = "end") -> list[int]:
        return [line["offset"] for line in self.lines() if line["event"] == event]

    def recent_pids(self) -> set[int]:
        return {line["pid"] for line in self.lines()[-50:]}

    def open_gate(self) -> None:
        Path(f"{self.path}.go").touch()


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notes:
    monkeypatch.setenv(handlers.NOTES, str(tmp_path / "notes"))
    return Notes(tmp_path / "notes")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(SystemClock())


@pytest.fixture
def mq(tmp_path: Path, recorder: Recorder) -> Iterator[Connection]:
    with inturn.connect(tmp_path / "data", flush="os", observer=recorder) as connection:
        connection.create_subject("line", 1)
        yield connection


def quick(**settings: Any) -> ConsumerSettings:
    chosen = {"commit_interval_s": 0.01, "heartbeat_s": 0.15, "concurrency": 1, "workers": "processes", **settings}
    return ConsumerSettings(**chosen)


def send(mq: Connection, *texts: str, recorder: Recorder | None = None) -> None:
    """Send messages, given as "key:body"."""
    with mq.producer() as producer:
        handles = []
        for text in texts:
            key, _, body = text.rpartition(":")
            handles.append((producer.send("line", body.encode(), key=key or None), key))
        for handle, key in handles:
            stored = handle.result(WAIT_S)
            if recorder is not None:
                recorder.sent("line", stored.partition, stored.offset, key.encode() or None)


def committed(mq: Connection) -> int:
    if not mq.groups():
        return 0
    return mq.group("line", "g").describe().partitions[0].committed


def judged(notes: Notes, recorder: Recorder) -> Verdict:
    """The verdict of the order checker. A call in a killed process ended before the next call for the message."""
    events: list[Event] = list(recorder.snapshot())
    open_calls: dict[tuple[int, int], Line] = {}  # by offset and epoch
    for line in notes.lines():
        what = line["subject"], line["group"], line["partition"], line["offset"]
        key = None if line["key"] is None else line["key"].encode()
        who = line["consumer"], line["epoch"]
        place = line["offset"], line["epoch"]
        if line["event"] == "start":
            before = open_calls.pop(place, None)
            if before is not None:
                assert before["pid"] != line["pid"], "a process that lives ends its calls"
                events.append(HandlerEnd(*what, key, *who, None, "exception", at_s=line["at_s"] - 1e-9))
            open_calls[place] = line
            events.append(HandlerStart(*what, key, *who, None, line["attempt"], at_s=line["at_s"]))
        else:
            del open_calls[place]
            events.append(HandlerEnd(*what, key, *who, None, "success", at_s=line["at_s"]))
    history = History(sorted(events, key=lambda event: event.at_s))
    verdict = check(history, order="key")
    verdict.raise_if_bad()
    return verdict


@pytest.mark.parametrize("handler", [handlers.noted, handlers.slow])
def test_keys_stay_in_order_while_worker_processes_are_killed(
    mq: Connection, notes: Notes, recorder: Recorder, handler: Callable[..., None]
) -> None:
    """C18, the contract: quick handlers in chunks of several lanes, and slow handlers."""
    count = 3000 if handler is handlers.noted else 600
    send(mq, *(f"k{number % 17}:{number}" for number in range(count)), recorder=recorder)
    rng = random.Random(1)
    killed: set[int] = set()
    with mq.consumer("line", "g", handler, order="key", settings=quick(concurrency=2)) as consumer:
        for share in (0.1, 0.35, 0.6):
            eventually(lambda share=share: notes.count() > share * count, "work goes on")  # type: ignore[misc]
            eventually(lambda: notes.recent_pids() - killed, "one that lives is at work")
            pid = rng.choice(sorted({line["pid"] for line in notes.lines()} - killed))
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: committed(mq) == count, "all is committed")
        failed_count = consumer.statistics().failed_count
    verdict = judged(notes, recorder)
    assert verdict.finished >= count
    assert verdict.duplicates <= len(killed)
    assert failed_count <= len(killed), "only the call that it was at has failed"
    assert len({line["pid"] for line in notes.lines()}) > 2, "a process that died was replaced"
    assert os.getpid() not in {line["pid"] for line in notes.lines()}


def test_what_a_handler_does_in_its_process_counts_as_anywhere(mq: Connection, notes: Notes) -> None:
    """C18, C9: raising, suspending, returning nonsense, and ending the process. Each message is repeated in place."""
    send(mq, "a:raise", "a:fine", "b:suspend", "b:fine", "c:nonsense", "c:fine", "d:exit", "d:fine", "e:fine")
    with mq.consumer("line", "g", handlers.told, order="key", settings=quick()) as consumer:
        eventually(lambda: committed(mq) == 9, "all is committed")
        assert consumer.statistics().failed_count == 4
    starts = [(line["key"], line["offset"], line["attempt"]) for line in notes.lines() if line["event"] == "start"]
    for key, offset in (("a", 0), ("b", 2), ("c", 4), ("d", 6)):
        assert [one for one in starts if one[0] == key] == [(key, offset, 1), (key, offset, 2), (key, offset + 1, 1)]


def test_a_message_that_kills_its_process_is_given_up_after_its_attempts(mq: Connection, notes: Notes) -> None:
    """C18, C11: a message that uses all memory must not run for ever. The dead letter names the cause."""
    send(mq, "a:exit", "a:fine", "b:fine")
    settings = quick(max_attempts=2, on_exhausted="dead-letter")
    with mq.consumer("line", "g", handlers.always_dies, order="key", settings=settings):
        eventually(lambda: committed(mq) == 3, "all is over")
        (letter,) = mq.group("line", "g").dead_letters().list()
    assert letter.message.body == b"exit"
    assert notes.offsets("start").count(0) == 2


def test_why_a_handler_failed_is_told_with_where_it_was(mq: Connection, notes: Notes) -> None:
    """C18, C14: hooks run in the consumer's process, and see the exception from the worker process."""
    seen: list[tuple[str, str]] = []

    class Noted(Hook):
        def after(
            self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
        ) -> None:
            notes_of = "" if error is None else "".join(getattr(error, "__notes__", ()))
            seen.append((kind.value, f"{type(error).__name__}: {error} {notes_of}"))

    send(mq, "a:raise")
    with mq.consumer("line", "g", handlers.told, order="key", settings=quick(), hooks=[Noted()], name="w"):
        eventually(lambda: committed(mq) == 1, "it is handled in the end")
        tried = mq.group("line", "g").try_message("w", 0, 0)
    assert [kind for kind, _ in seen] == ["exception", "success", "exception"]
    assert seen[0][1].startswith("ValueError: no such account")
    assert "process_handlers.py" in seen[0][1]
    assert tried.result == "exception", "a trial is a first attempt, in a process, too"
    assert tried.error == "ValueError: no such account"
    assert "process_handlers.py" in tried.traceback
    assert [line["is_direct"] for line in notes.lines() if line["event"] == "start"] == [False, False, True]


def test_batches_and_manual_acknowledgement_work_in_processes(mq: Connection, notes: Notes) -> None:
    """C18, C9"""
    send(mq, *(f"k{number % 2}:{number}" for number in range(20)))
    settings = quick(batch=5, ack="manual", concurrency=2)
    with mq.consumer("line", "g", handlers.acknowledges, order="key", settings=settings):
        eventually(lambda: committed(mq) == 20, "all is committed")
    assert sorted(notes.offsets()) == list(range(20))


def test_a_key_that_hangs_keeps_nothing_but_itself_from_running(mq: Connection, notes: Notes) -> None:
    """C18, C10: even when the process has taken many lanes at once, and has not started the other lanes."""
    send(mq, *(f"warm{number % 50}:x" for number in range(3000)))
    with mq.consumer("line", "g", handlers.waits, order="key", settings=quick(concurrency=2)) as consumer:
        eventually(lambda: committed(mq) == 3000, "handlers are known to be quick")
        consumer._core.scheduler.expect(0.0001)  # even if handlers took longer on a busy machine
        assert consumer._core.scheduler.chunk > 2
        texts = [f"k{number}:x" for number in range(200)]
        send(mq, *texts[:3], "stuck:wait", *texts[3:])
        eventually(lambda: notes.count() == 3200, "all others are handled")
        send(mq, *texts)
        eventually(lambda: notes.count() == 3400, "also what comes later of keys that were given out together with it")
        notes.open_gate()
        eventually(lambda: committed(mq) == 3401, "and this one, when it ends")
    assert len(notes.offsets()) == len(set(notes.offsets())) == 3401, "none ran twice"


def test_stopping_waits_for_the_handler_that_runs(mq: Connection, notes: Notes) -> None:
    """C18, C2"""
    send(mq, "a:wait", "a:fine")
    consumer = mq.consumer("line", "g", handlers.waits, order="key", settings=quick())
    consumer.start()
    eventually(lambda: notes.count("start") == 1, "it runs")
    (pid,) = {line["pid"] for line in notes.lines()}
    stopping = threading.Thread(target=consumer.stop)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive()
    notes.open_gate()
    stopping.join(WAIT_S)
    assert notes.offsets() == [0]
    assert committed(mq) == 1
    eventually(lambda: not is_alive(pid), "the process has ended, too")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):  # the process may end between the two calls
        return False


def test_concurrency_can_be_changed_while_processes_run(mq: Connection, notes: Notes) -> None:
    """C18, C16"""
    send(mq, *(f"k{number}:wait" for number in range(3)))
    with mq.consumer("line", "g", handlers.waits, order="key", settings=quick()) as consumer:
        eventually(lambda: notes.count("start") == 1, "one runs")
        consumer.concurrency = 3
        eventually(lambda: notes.count("start") == 3, "three run")
        notes.open_gate()
        eventually(lambda: committed(mq) == 3, "all is committed")
        consumer.concurrency = 1
    assert len({line["pid"] for line in notes.lines()}) == 3


def start_program(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("process_program.py")
    return subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "other"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_ctrl_c_lets_the_handler_in_its_process_finish(tmp_path: Path, notes: Notes) -> None:
    """C18: a terminal sends the signal to all processes at once."""
    with start_program(tmp_path) as program:
        eventually(lambda: notes.count("start") == 1, "the handler runs")
        os.killpg(program.pid, signal.SIGINT)
        time.sleep(0.1)
        assert notes.count() == 0
        notes.open_gate()
        out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert out == "1\n", "it was handled and committed"
    assert notes.offsets() == [0]


def test_a_program_that_ends_without_stopping_lets_the_handler_finish(tmp_path: Path, notes: Notes) -> None:
    """C18: worker processes do not end before the consumer."""
    with start_program(tmp_path, "leave") as program:
        eventually(lambda: notes.count("start") == 1, "the handler runs")
        time.sleep(0.2)
        notes.open_gate()
        _, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert notes.offsets() == [0]
    with inturn.connect(tmp_path / "other") as again:
        assert committed(again) == 1


def test_processes_end_when_their_consumer_is_killed(tmp_path: Path, notes: Notes) -> None:
    """C18: kill -9 leaves no process behind. The next consumer waits for the lease, as after a crash of a machine."""
    with start_program(tmp_path) as program:
        eventually(lambda: notes.count("start") == 1, "the handler runs")
        (pid,) = {line["pid"] for line in notes.lines()}
        program.kill()
        program.wait(60)
        eventually(lambda: not is_alive(pid), "the process has ended, in the middle of its handler")
    with inturn.connect(tmp_path / "other") as again:
        assert again.group("line", "g").describe().partitions[0].owner is not None


def test_what_was_to_be_handled_waits_when_no_process_can_be_started(
    mq: Connection, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18: there is no room for a new process. The keys continue as soon as there is room."""
    failures = iter([OSError(errno.EAGAIN, "no room")] * 3)

    def start(*arguments: Any) -> WorkerProcess:
        for error in failures:
            raise error
        return WorkerProcess(*arguments)

    monkeypatch.setattr(processes, "START_AGAIN_S", 0.01)
    with mq.consumer("line", "g", handlers.noted, order="key", settings=quick()):
        send(mq, "a:0")
        eventually(lambda: notes.count() == 1, "the first")
        monkeypatch.setattr(processes, "WorkerProcess", start)
        os.kill(notes.lines()[0]["pid"], signal.SIGKILL)
        send(mq, "a:1", "b:2", "c:3")
        eventually(lambda: committed(mq) == 4, "all of them, in another process")
    assert next(failures, None) is None


def test_what_moved_to_a_partition_is_told_from_what_is_its_own() -> None:
    """C18, M5: a message of a parent may have the same offset as a blocked message of this partition."""
    progress = SimpleNamespace(exhausted={10}, attempts={10: 3})
    state: Any = SimpleNamespace(index=2, progress=progress, lease=SimpleNamespace(deadline_s=1.0))
    state.mark = partial(PartitionState.mark, state)
    lanes: list[Any] = [
        SimpleNamespace(
            state=state, parks=False, at=0, messages=[Message(b"x", b"k", offset=10, origin=Origin("line", partition))]
        )
        for partition in (0, 2)
    ]
    run = SimpleNamespace(todo=deque(lanes), over=[], budget=10)
    (chunk,) = take_chunk(run, 0.0)  # type: ignore[arg-type]
    assert (chunk.lane, chunk.attempts) == (lanes[0], [1])
    assert run.over == [lanes[1]]


def nested() -> Callable[..., None]:
    def handle(message: Message, context: Context) -> None:
        pass

    return handle


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (lambda message, context: None, "or a lambda"),
        (nested(), "is defined inside a function"),
        (handlers.Handler(), "is a Handler"),
        (handlers.Handler().method, "is a method"),
        (handlers.never, "is `async def`"),
    ],
)
def test_a_handler_that_a_process_cannot_import_is_refused(mq: Connection, handler: Any, why: str) -> None:
    """C18: at once, and the error names a solution."""
    with pytest.raises(InvalidInput, match=why):
        mq.consumer("line", "g", handler, processes=2)
    assert mq.groups() == []


def test_a_handler_that_only_this_process_can_import_is_refused_at_the_start(
    mq: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C18: no member joins the group, and no process is left."""
    (tmp_path / "gone_tomorrow.py").write_text("def handle(message, context): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import gone_tomorrow  # type: ignore[import-not-found]

    consumer = mq.consumer("line", "g", gone_tomorrow.handle, processes=1)
    (tmp_path / "gone_tomorrow.py").unlink()
    for compiled in (tmp_path / "__pycache__").glob("gone_tomorrow*"):
        compiled.unlink()
    with pytest.raises(InvalidInput, match=r"cannot load handler gone_tomorrow:handle: ModuleNotFoundError"):
        consumer.start()
    assert mq.groups() == []
    assert not consumer.is_running


def test_settings_of_processes_are_checked() -> None:
    """C18"""
    with pytest.raises(InvalidInput, match="workers"):
        ConsumerSettings(workers="fibres")


def test_a_process_begins_nothing_after_the_deadline_of_the_lease() -> None:
    """C18, M9: the process checks the clock before every call, however long the message took to arrive."""
    calls: list[int] = []
    now_s = SystemClock.monotonic()
    messages = [Message(b"x", b"k", offset=offset, origin=Origin("line", 0)) for offset in range(3)]

    def handle(message: Message, context: Context) -> None:
        calls.append(message.offset)
        lane.deadline_s = now_s  # the deadline has passed before the next message

    lane = GivenLane("line", "g", 0, "c", 1, now_s + 60.0, messages, [1, 1, 1])
    late = GivenLane("line", "g", 0, "c", 1, now_s, messages, [1, 1, 1])
    states = bytearray(6)
    over = _Calls(handle, WorkFrame([lane, late], 900.0), states, lambda over: None).run(0)
    assert over.told == []
    assert calls == [0]
    assert list(states) == [DONE, UNTOUCHED, UNTOUCHED] + [UNTOUCHED] * 3
    assert BEGUN not in states
