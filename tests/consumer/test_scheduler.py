"""C5, C6: the scheduler with lanes and runs only, in virtual time, driven by the test."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inturn.consumer.lane import Lane
from inturn.consumer.outcome import Next, Outcome
from inturn.consumer.partition_state import PartitionState
from inturn.consumer.run import Run
from inturn.consumer.scheduler import AGEING, CHUNK_MAX, CHUNK_S, OVERDUE_S, Scheduler
from inturn.model.message import Message
from inturn.model.result import ResultKind

FAILED = Outcome(Next.REPEAT, ResultKind.EXCEPTION)
KEYS = [b"a", b"b", b"c", b"d", b"e", b"f"]


def leased_for_ever() -> PartitionState:
    state = PartitionState(0)
    state.lease.deadline_s = float("inf")
    return state


def lane_of(state: PartitionState, key: bytes, count: int = 0) -> Lane:
    return Lane(state, key, [Message(b"", key, offset=number) for number in range(count)], state.buffer.inbox)


def full_lane(state: PartitionState, count: int, key: bytes = b"k") -> Lane:
    return lane_of(state, key, count)


def work_through(scheduler: Scheduler, run: Run, now_s: float, each_s: float = 0.0) -> tuple[list[Message], float]:
    """All messages of the run, and the time of the end. A lane is ready again if messages wait."""
    clock = [now_s]
    handled = []
    for given in run.calls(lambda: clock[0]):
        handled += given
        clock[0] += each_s
    put_back(scheduler, scheduler.end(run, clock[0]))
    return handled, clock[0]


def put_back(scheduler: Scheduler, lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.forget_handled()
        if lane.waiting:
            scheduler.ready(lane)


@dataclass(eq=False)
class Worker:
    run: Run
    calls: Iterator[list[Message]]
    given: list[Message] = field(default_factory=list)


class Lanes(RuleBasedStateMachine):
    """Lanes become ready, grow, are taken, run message by message, are taken back, withdrawn, set aside.

    The model: per key, which message has to come next, and how many there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.state = leased_for_ever()
        self.lanes = {key: lane_of(self.state, key) for key in KEYS}
        self.stored = dict.fromkeys(KEYS, 0)
        self.next_offset = dict.fromkeys(KEYS, 0)
        self.running: dict[bytes, Worker] = {}
        self.workers: list[Worker] = []
        self.aside: set[bytes] = set()
        self.takes = 0
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def go_on(self, lanes: Sequence[Lane]) -> None:
        """The work of the scheduler's owner when lanes are free again."""
        for lane in lanes:
            assert lane.run is None
            assert lane.bucket == -1
            assert isinstance(lane.key, bytes)
            if lane.outcome is not None:
                lane.put_back(lane.failed)
                lane.failed, lane.outcome = (), None
            lane.forget_handled()
            if lane.waiting and lane.key not in self.aside:
                self.scheduler.ready(lane)

    @rule(key=st.sampled_from(KEYS), count=st.sampled_from([1, 2, 3, 15, 16, 17, 40]))
    def grow(self, key: bytes, count: int) -> None:
        lane = self.lanes[key]
        lane.messages += [Message(b"", key, offset=self.stored[key] + number) for number in range(count)]
        self.stored[key] += count
        if lane.run is None and key not in self.aside:
            self.scheduler.ready(lane)

    @rule()
    def take(self) -> None:
        ready = [lane for lane in self.lanes.values() if lane.bucket >= 0]
        longest = max((lane.bucket for lane in ready), default=-1)
        chunk = self.scheduler.chunk
        buckets = {id(lane): lane.bucket for lane in ready}
        run = self.scheduler.take(self.now_s)
        if run is None:
            assert not ready, "work-conserving: what is ready is taken"
            return
        self.takes += 1
        assert run in self.scheduler.runs
        if self.takes % AGEING:
            taken = [buckets[id(lane)] for lane in run.todo]
            assert taken[0] == longest, "the longest first"
            assert taken == sorted(taken, reverse=True)
            left = max((lane.bucket for lane in self.lanes.values()), default=-1)
            assert left <= taken[-1], "nothing longer is left behind"
        counts = [lane.waiting for lane in run.todo]
        assert sum(counts[:-1]) < chunk, "no more lanes than it needs"
        self.workers.append(Worker(run, run.calls(self.monotonic)))

    @precondition(lambda self: self.workers)
    @rule(choice=st.randoms(use_true_random=False), took_s=st.sampled_from([0.0, 0.00001, 0.0001, 0.001, 0.01]))
    def step(self, choice: random.Random, took_s: float) -> None:
        """A handler returns, and the worker continues."""
        worker = choice.choice(self.workers)
        self.now_s += took_s
        self._is_over(worker)
        worker.given = next(worker.calls, [])
        if not worker.given:
            self._end(worker)
            return
        (message,) = worker.given
        key = message.key
        assert key is not None
        assert key not in self.running, "two messages of one lane never run at once"
        assert message.offset == self.next_offset[key], "in order, none lost, none twice"
        self.next_offset[key] += 1
        self.running[key] = worker

    @precondition(lambda self: any(worker.given for worker in self.workers))
    @rule(choice=st.randoms(use_true_random=False))
    def fail(self, choice: random.Random) -> None:
        worker = choice.choice([one for one in self.workers if one.given])
        (message,) = worker.given
        assert message.key is not None
        assert not worker.run.settle(FAILED)
        self._is_over(worker)
        self.next_offset[message.key] = message.offset

    def _is_over(self, worker: Worker) -> None:
        for message in worker.given:
            assert message.key is not None
            del self.running[message.key]
        worker.given = []

    def _end(self, worker: Worker) -> None:
        self.workers.remove(worker)
        lanes = self.scheduler.end(worker.run, self.now_s)
        assert worker.run not in self.scheduler.runs
        self.go_on(lanes)

    @rule(later_s=st.sampled_from([0.0, CHUNK_S, OVERDUE_S]))
    def take_back(self, later_s: float) -> None:
        self.now_s += later_s
        runs = self.scheduler.runs
        overdue = [run for run in runs if run.todo and self.now_s >= run.started_at_s + OVERDUE_S]
        is_idle = not self.scheduler.ready_count and not any(run.over for run in runs)
        lanes = self.scheduler.take_back(self.now_s)
        assert not any(run.over for run in runs), "what a run is done with is free"
        if is_idle and overdue:
            assert lanes, "others have nothing to do"
        self.go_on(lanes)

    @rule(key=st.sampled_from(KEYS))
    def withdraw(self, key: bytes) -> None:
        lane = self.lanes[key]
        is_untouched = lane.run is not None and lane in lane.run.todo
        assert self.scheduler.withdraw(lane) == is_untouched
        if is_untouched:
            self.go_on([lane])

    @rule(key=st.sampled_from(KEYS))
    def unready(self, key: bytes) -> None:
        self.scheduler.unready(self.lanes[key])
        self.aside.add(key)

    @rule()
    def ready_again(self) -> None:
        aside, self.aside = self.aside, set()
        for key in sorted(aside):
            if self.lanes[key].run is None and self.lanes[key].waiting:
                self.scheduler.ready(self.lanes[key])

    @invariant()
    def a_lane_is_in_one_place(self) -> None:
        in_runs = [lane for run in self.scheduler.runs for lane in (*run.todo, *run.over)]
        in_runs += [run.lane for run in self.scheduler.runs if run.lane is not None]
        assert len(set(map(id, in_runs))) == len(in_runs)
        for lane in self.lanes.values():
            assert (lane.run is not None) == any(one is lane for one in in_runs)
            assert lane.run is None or lane.bucket == -1
        assert self.state.buffer.lanes_in_runs == len(in_runs)

    @invariant()
    def the_number_of_ready_lanes_is_right(self) -> None:
        ready = [lane for lane in self.lanes.values() if lane.bucket >= 0]
        assert self.scheduler.ready_count == len(ready)
        for key, lane in self.lanes.items():
            is_free = lane.run is None and key not in self.aside
            assert (lane.bucket >= 0) == (is_free and lane.waiting > 0)
        chunk = self.scheduler.chunk
        assert chunk * self.scheduler.wanted_workers >= len(ready) > chunk * (self.scheduler.wanted_workers - 1)

    def teardown(self) -> None:
        """Finish all lanes: no message is lost."""
        for worker in list(self.workers):
            while worker in self.workers:
                self._step_to_end(worker)
        self.ready_again()
        while self.scheduler.ready_count:
            before = len(self.workers)
            self.take()
            assert len(self.workers) == before + 1
            while self.workers:
                self._step_to_end(self.workers[0])
        assert self.next_offset == self.stored
        assert sorted(message.offset for message in self.state.buffer.inbox) == sorted(
            offset for count in self.stored.values() for offset in range(count)
        )
        assert self.state.buffer.lanes_in_runs == 0

    def _step_to_end(self, worker: Worker) -> None:
        self._is_over(worker)
        worker.given = next(worker.calls, [])
        if not worker.given:
            self._end(worker)
            return
        (message,) = worker.given
        assert message.key is not None
        assert message.offset == self.next_offset[message.key]
        self.next_offset[message.key] += 1
        self.running[message.key] = worker


TestLanes = Lanes.TestCase
TestLanes.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


# Which lane is next


def test_the_longest_lane_is_taken_first_exactly_up_to_15_and_within_an_eighth_above() -> None:
    state = leased_for_ever()
    for shorter, longer in itertools.pairwise([1, 2, 3, 7, 14, 15, 17, 20, 23, 27, 31, 36, 64, 73, 5000, 5700]):
        scheduler = Scheduler()
        for count in (longer, shorter):
            scheduler.ready(full_lane(state, count))
        run = scheduler.take(0.0)
        assert run is not None
        assert run.todo[0].waiting == longer, (shorter, longer)


def test_of_lanes_of_one_length_the_one_that_was_ready_first_is_taken_first() -> None:
    scheduler, state = Scheduler(), leased_for_ever()
    keys = [b"%d" % number for number in range(AGEING - 1)]
    for key in keys:
        scheduler.ready(full_lane(state, 3, key))
    runs = [scheduler.take(0.0) for _ in keys]
    assert [run.todo[0].key for run in runs if run is not None] == keys


def test_a_lane_that_grows_while_it_is_ready_moves_up() -> None:
    scheduler, state = Scheduler(), leased_for_ever()
    small, large = full_lane(state, 2, b"small"), full_lane(state, 10, b"large")
    scheduler.ready(small)
    scheduler.ready(large)
    small.messages += [Message(b"", b"small", offset=number) for number in range(2, 20)]
    scheduler.ready(small)
    assert scheduler.ready_count == 2
    runs = [scheduler.take(0.0), scheduler.take(0.0)]
    assert [run.todo[0].key for run in runs if run is not None] == [b"small", b"large"]
    assert scheduler.take(0.0) is None


@pytest.mark.parametrize("beside", [0, 1, 3])
@pytest.mark.parametrize("lengths", [(1000,), (1000, 900, 500), (40, 80, 160, 320, 640, 1280)])
def test_a_short_lane_among_long_ones_that_never_end_is_taken_in_time(lengths: tuple[int, ...], beside: int) -> None:
    """The bound of the docstring: AGEING × buckets in use × the position in the bucket."""
    scheduler, state = Scheduler(), leased_for_ever()
    long_lanes = {b"%d" % length: length for length in lengths}
    for key, length in long_lanes.items():
        scheduler.ready(full_lane(state, length, key))
    before = [full_lane(state, 1, b"before %d" % number) for number in range(beside)]
    short = full_lane(state, 1, b"short")
    for lane in (*before, short):
        scheduler.ready(lane)
    buckets = 2 * len(lengths) + 1  # a long lane leaves an entry behind in the bucket below after a turn
    bound = AGEING * buckets * (beside + 1)
    for _ in range(bound):
        run = scheduler.take(0.0)
        assert run is not None
        (lane,) = run.todo
        if lane is short:
            break
        work_through(scheduler, run, 0.0, CHUNK_S)
        length = long_lanes.get(lane.key, 0) if isinstance(lane.key, bytes) else 0
        if lane.waiting < length:  # always refilled, at once
            lane.messages.append(Message(b"", lane.messages[0].key))
            scheduler.ready(lane)
    else:
        pytest.fail(f"not within {bound} takes")


def test_every_lane_has_its_turn_though_work_never_ends() -> None:
    """200 keys of very different length, every key refilled after a turn: all keys get turns again and again."""
    scheduler, state, numbers = Scheduler(), leased_for_ever(), random.Random(3)
    lanes = [full_lane(state, numbers.choice([1, 2, 5, 20, 100, 1000]), b"%d" % number) for number in range(200)]
    for lane in lanes:
        scheduler.ready(lane)
    buckets = len({lane.bucket for lane in lanes})
    last: dict[int, int] = {}
    gaps = []
    for takes in range(30_000):
        run = scheduler.take(0.0)
        assert run is not None
        for lane in list(run.todo):
            gaps.append(takes - last.get(id(lane), 0))
            last[id(lane)] = takes
            lane.messages.append(Message(b"", b""))
        work_through(scheduler, run, 0.0, CHUNK_S)
    assert len(last) == 200, "each was served"
    assert max(gaps) <= AGEING * (buckets + 2) * 200


def test_entries_that_are_void_do_not_pile_up() -> None:
    """A lane that grows message by message leaves an entry behind in every earlier bucket."""
    scheduler, state = Scheduler(), leased_for_ever()
    lane = full_lane(state, 0)
    for _ in range(3000):
        for number in range(20):
            lane.messages.append(Message(b"", b"k", offset=number))
            scheduler.ready(lane)
        while (run := scheduler.take(0.0)) is not None:
            work_through(scheduler, run, 0.0)
    assert sum(len(queue) for queue in scheduler._buckets) < 20 * AGEING * 20


# Chunks


def serve(scheduler: Scheduler, lane: Lane, runs: int, each_s: float) -> None:
    for _ in range(runs):
        while lane.waiting < 2 * CHUNK_MAX:
            lane.messages += [Message(b"", b"k") for _ in range(CHUNK_MAX)]
        scheduler.ready(lane)
        run = scheduler.take(0.0)
        assert run is not None
        work_through(scheduler, run, 0.0, each_s)


def test_the_chunk_is_one_at_the_beginning() -> None:
    assert Scheduler().chunk == 1


def test_quick_handlers_are_given_many_messages_at_once() -> None:
    scheduler, lane = Scheduler(), full_lane(leased_for_ever(), 1)
    serve(scheduler, lane, 200, 1e-6)
    assert 1000 <= scheduler.chunk <= 2000
    serve(scheduler, lane, 200, 0.0)
    assert scheduler.chunk == CHUNK_MAX


@pytest.mark.parametrize("each_s", [0.002, 0.005, 1.0])
def test_slow_handlers_are_given_one_message_at_once(each_s: float) -> None:
    scheduler, lane = Scheduler(), full_lane(leased_for_ever(), 1)
    serve(scheduler, lane, 20, each_s)
    assert scheduler.chunk == 1


def test_handlers_that_become_slow_are_noticed_within_some_runs() -> None:
    """From a microsecond to 100 ms: a run changes the estimate by a quarter at most, and 1.25 ** 35 > 2000."""
    scheduler, lane = Scheduler(), full_lane(leased_for_ever(), 1)
    serve(scheduler, lane, 300, 1e-6)
    assert scheduler.chunk > 1000
    serve(scheduler, lane, 35, 0.1)
    assert scheduler.chunk == 1


def test_a_run_is_over_after_its_messages_or_its_time_but_handles_one_at_least() -> None:
    scheduler, state = Scheduler(), leased_for_ever()
    serve(scheduler, full_lane(state, 1), 300, CHUNK_S / 100)
    scheduler = _with_chunk(scheduler)
    lane = full_lane(state, 10_000, b"long")
    scheduler.ready(lane)
    run = scheduler.take(0.0)
    assert run is not None
    chunk = run._left
    assert len(work_through(scheduler, run, 0.0, CHUNK_S / 100)[0]) == chunk
    run = scheduler.take(0.0)
    assert run is not None
    handled, now_s = work_through(scheduler, run, 0.0, CHUNK_S)
    assert (len(handled), now_s) == (2, 2 * CHUNK_S)
    run = scheduler.take(0.0)
    assert run is not None
    assert len(work_through(scheduler, run, 10.0, CHUNK_S)[0]) == 1, "a worker that was held up begins all the same"


def _with_chunk(scheduler: Scheduler, chunk: int | None = None) -> Scheduler:
    """A scheduler without lanes that knows the same handling time, or the handling time for the given chunk."""
    fresh = Scheduler()
    fresh._handling_s = scheduler._handling_s if chunk is None else CHUNK_S / chunk
    return fresh


def test_what_a_slow_run_has_not_begun_is_taken_back_and_run_by_another() -> None:
    scheduler, state = _with_chunk(Scheduler(), 100), leased_for_ever()
    lanes = [full_lane(state, 3, b"%d" % number) for number in range(20)]
    for lane in lanes:
        scheduler.ready(lane)
    slow = scheduler.take(0.0)
    assert slow is not None
    assert len(slow.todo) == 20
    assert scheduler.take(0.0) is None, "all of it is with one worker"
    clock = [0.0]
    calls = slow.calls(lambda: clock[0])
    (first,) = next(calls)
    assert scheduler.take_back(CHUNK_S) == []
    assert scheduler.next_overdue_s() == OVERDUE_S
    handled: list[Message] = []
    while taken := scheduler.take_back(OVERDUE_S):
        put_back(scheduler, taken)
        while (run := scheduler.take(OVERDUE_S)) is not None:
            handled += work_through(scheduler, run, OVERDUE_S)[0]
    assert scheduler.next_overdue_s() == float("inf")
    assert len(handled) == 19 * 3, "all but the one that runs"
    assert first.key not in {message.key for message in handled}
    clock[0] = 5.0
    assert list(calls) == []
    put_back(scheduler, scheduler.end(slow, 5.0))
    rest = scheduler.take(5.0)
    assert rest is not None
    assert [message.offset for message in work_through(scheduler, rest, 5.0)[0]] == [1, 2]


def test_what_a_slow_run_has_not_begun_is_taken_back_though_there_is_always_something_else_to_do() -> None:
    """Otherwise a key would wait for a handler of a different key, for as long as that handler is stuck."""
    scheduler, state = _with_chunk(Scheduler(), 100), leased_for_ever()
    stuck, behind, other = full_lane(state, 3, b"stuck"), full_lane(state, 1, b"behind"), full_lane(state, 2, b"other")
    scheduler.ready(stuck)
    scheduler.ready(behind)
    run = scheduler.take(0.0)
    assert run is not None
    calls = run.calls(lambda: 0.0)
    assert next(calls)[0].key == b"stuck"
    scheduler.ready(other)
    for number in range(1, 100):
        put_back(scheduler, scheduler.take_back(number * OVERDUE_S))
        if behind.run is None:
            break
        assert scheduler.ready_count, "there is always something else"
    assert behind.run is None, "not within two seconds"


def test_what_a_busy_run_is_done_with_is_free_before_it_ends() -> None:
    scheduler, state = _with_chunk(Scheduler(), 100), leased_for_ever()
    quick, slow = full_lane(state, 2, b"quick"), full_lane(state, 1, b"slow")
    for lane in (quick, slow):
        scheduler.ready(lane)
    run = scheduler.take(0.0)
    assert run is not None
    calls = run.calls(lambda: 0.0)
    assert [next(calls)[0].key for _ in range(3)] == [b"quick", b"quick", b"slow"]
    assert scheduler.take_back(0.0) == [quick]
    assert quick.run is None
    assert slow.run is run


# The bound


def makespan_s(lanes: dict[int, list[float]], workers: int) -> float:
    """The virtual time that the given number of workers needs for the lanes of durations."""
    scheduler, state, clock = Scheduler(), leased_for_ever(), [0.0]
    for key, durations in lanes.items():
        scheduler.ready(lane_of(state, b"%d" % key, len(durations)))
    numbers = itertools.count()
    busy: list[tuple[float, int, Run, Iterator[list[Message]]]] = []

    def go_on(run: Run, calls: Iterator[list[Message]]) -> bool:
        for given in calls:
            (message,) = given
            assert message.key is not None
            took_s = lanes[int(message.key)][message.offset]
            heapq.heappush(busy, (clock[0] + took_s, next(numbers), run, calls))
            return True
        put_back(scheduler, scheduler.end(run, clock[0]))
        return False

    def find_work() -> None:
        while len(busy) < workers and (run := scheduler.take(clock[0])) is not None:
            assert run._left == 1, "chunk 1"
            go_on(run, run.calls(lambda: clock[0]))

    find_work()
    while busy:
        clock[0], _, run, calls = heapq.heappop(busy)
        go_on(run, calls)
        find_work()
    assert len(state.buffer.inbox) == sum(map(len, lanes.values()))
    return clock[0]


def zipf(numbers: random.Random, exponent: float, keys: int, count: int) -> list[int]:
    return numbers.choices(range(keys), [1 / (rank + 1) ** exponent for rank in range(keys)], k=count)


@pytest.mark.parametrize("kind", [*(f"{n} keys" for n in (2, 5, 16, 17, 20, 33, 100, 1000)), "zipf", "zipf 0.7"])
def test_the_work_takes_hardly_longer_than_its_bound(kind: str) -> None:
    """10 000 messages of 0 to 5 ms, 16 workers: at most 1.02 × max(total / workers, longest lane)."""
    numbers = random.Random(7)
    match kind:
        case "zipf":
            keys = zipf(numbers, 1.1, 1000, 10_000)
        case "zipf 0.7":
            keys = zipf(numbers, 0.7, 1000, 10_000)
        case _:
            keys = [numbers.randrange(int(kind.split()[0])) for _ in range(10_000)]
    lanes: dict[int, list[float]] = {}
    for key in keys:
        lanes.setdefault(key, []).append(numbers.uniform(0.0, 0.005))
    sums = [sum(durations) for durations in lanes.values()]
    bound_s = max(sum(sums) / 16, max(sums))
    assert makespan_s(lanes, 16) <= 1.02 * bound_s
