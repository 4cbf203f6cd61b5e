"""The scheduler decides which lane runs next. No I/O, no threads: called by one thread at a time.

An idle worker takes the ready lane with the most waiting messages: this order comes closest to the bound, max(total
work / workers, longest lane). Lanes stand in buckets by length; within a bucket, first ready is first served. Every
AGEING-th take serves the buckets in turn instead, so that long lanes never starve a short lane: a lane waits for at
most AGEING × (number of buckets) × (lanes before it in its bucket) takes.

If handlers are quick, a worker takes several messages at once, from the same lane or several lanes, so that the lock is
paid once for about CHUNK_S of work. Lanes that a worker has not begun after OVERDUE_S are taken back if other workers
are idle, after STUCK_S in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from inturn.consumer.lane import Lane
from inturn.consumer.run import Run

CHUNK_S = 0.002
CHUNK_MAX = 4096
TINY_CHUNK = 40
MIN_HANDLING_S = 1e-7
STUCK_S = 0.2
OVERDUE_S = 0.02  # well above the time that threads wait for the interpreter
AGEING = 8
_SLOWER, _QUICKER = 1.25, 0.9  # how much a run changes `_handling_s` at most: the worker may have had to wait
_BUCKETS = 8 * 62
_ALL = (1 << _BUCKETS) - 1


class Scheduler:
    def __init__(self) -> None:
        self._buckets: list[deque[Lane]] = [deque() for _ in range(_BUCKETS)]
        self._filled = 0  # a bit for each bucket that may hold a lane
        self._takes = 0
        self._turn = _BUCKETS  # the bucket that ageing served last
        self._handling_s = CHUNK_S  # how long one message takes, smoothed
        self.new_run: Callable[[deque[Lane], float, float, int], Run] = Run
        self.ready_count = 0
        self.runs: dict[Run, None] = {}  # in order: the same history runs the same way again

    def ready(self, lane: Lane) -> None:
        """Mark a lane as ready. The lane has messages and does not run; or the lane is ready already, and has more
        messages now."""
        count = len(lane.messages) - lane.at
        # Exact up to 15, above that within an eighth.
        bucket = count if count < 16 else ((length := count.bit_length()) - 3 << 3) + (count >> length - 4 & 7)
        if lane.bucket != bucket:
            self.ready_count += lane.bucket < 0
            lane.bucket = bucket  # an entry in another bucket is void now
            self._buckets[bucket].append(lane)
            self._filled |= 1 << bucket

    def unready(self, lane: Lane) -> None:
        self.ready_count -= lane.bucket >= 0
        lane.bucket = -1

    def expect(self, handling_s: float) -> None:
        """Set the expected duration of a handler call; the measured durations correct the figure from there."""
        self._handling_s = handling_s

    @property
    def chunk(self) -> int:
        """How many messages a worker takes at once."""
        return max(1, min(CHUNK_MAX, int(CHUNK_S / self._handling_s)))

    @property
    def is_tiny(self) -> bool:
        """Handlers take a few microseconds: they only compute."""
        return self.chunk >= TINY_CHUNK

    @property
    def wanted_workers(self) -> int:
        """How many more workers would find enough to do."""
        return -(-self.ready_count // self.chunk)

    def room(self, now_s: float, cores: int) -> int | None:
        """How many more workers could compute at the same time, besides the busy workers; None: handlers are not quick.

        The interpreter runs one thread at a time; only handlers that are not tiny may release the interpreter.
        """
        if self.chunk == 1:
            return None
        busy = sum(now_s - run.asked_at_s < OVERDUE_S for run in self.runs)
        return (1 if self.is_tiny else cores) - busy

    def take(self, now_s: float) -> Run | None:
        """Work for a worker. Pass the run to `end` when the run is over."""
        if not self.ready_count:
            self._forget_void()
            return None
        chunk = left = self.chunk
        lanes: deque[Lane] = deque()
        run = self.new_run(lanes, now_s, now_s + 2 * CHUNK_S, chunk)
        below = self._below()
        while left > 0:
            filled = self._filled & below
            if not filled:
                if below == _ALL or lanes:
                    break
                below = _ALL
                continue
            bucket = filled.bit_length() - 1
            queue = self._buckets[bucket]
            while queue:
                lane = queue.popleft()
                if lane.bucket == bucket:
                    lane.bucket = -1
                    lane.run = run
                    lane.state.buffer.lanes_in_runs += 1
                    lanes.append(lane)
                    left -= len(lane.messages) - lane.at
                    if left <= 0:
                        break
            else:
                self._filled ^= 1 << bucket
        if not lanes:
            return None
        self.ready_count -= len(lanes)
        self.runs[run] = None
        return run

    def _forget_void(self) -> None:
        """Drop entries of lanes that are not ready any more: an entry keeps its lane, and the messages, alive."""
        while self._filled:
            bucket = self._filled.bit_length() - 1
            self._buckets[bucket].clear()
            self._filled ^= 1 << bucket

    def _below(self) -> int:
        """The buckets to take from, from the highest down: all buckets, or with every AGEING-th take the buckets below
        the bucket that ageing served last."""
        self._takes += 1
        if self._takes % AGEING:
            return _ALL
        filled = self._filled & ((1 << self._turn) - 1) or self._filled
        self._turn = max(0, filled.bit_length() - 1)
        return (1 << self._turn + 1) - 1

    def end(self, run: Run, now_s: float) -> list[Lane]:
        """The run is over: returns the lanes of the run, free again."""
        self.runs.pop(run, None)
        if run.handled:
            each_s = (now_s - run.started_at_s) / run.handled
            low_s, high_s = _QUICKER * self._handling_s, _SLOWER * self._handling_s
            self._handling_s = min(max(each_s, low_s, MIN_HANDLING_S), high_s)
        return self._over(run) + self._untouched(run, len(run.todo))

    def take_back(self, now_s: float) -> list[Lane]:
        """Lanes of busy runs: the lanes that the runs have left; and of the lanes that a slow run has not begun, half
        if no other lane is ready, all if the run is stuck."""
        lanes: list[Lane] = []
        for run in self.runs:
            if run.over:
                lanes += self._over(run)
        is_idle = not self.ready_count and not lanes
        for run in self.runs:
            if run.todo and is_idle and now_s >= run.started_at_s + OVERDUE_S:
                lanes += self._untouched(run, (len(run.todo) + 1) // 2)
            elif run.todo and now_s >= run.started_at_s + STUCK_S:
                lanes += self._untouched(run, len(run.todo))
        return lanes

    def withdraw(self, lane: Lane) -> bool:
        """Take a lane back that the run has not begun; returns False if the run has begun the lane."""
        run = lane.run
        if run is None:
            return False
        try:
            run.todo.remove(lane)
        except (ValueError, IndexError):  # the worker was quicker, or took a lane just now
            return False
        self._free(lane)
        return True

    def next_overdue_s(self) -> float:
        """The time at which `take_back` can take lanes from a slow run."""
        started_at_s = min((run.started_at_s for run in self.runs if run.todo), default=float("inf"))
        return started_at_s + (STUCK_S if self.ready_count else OVERDUE_S)

    def _over(self, run: Run) -> list[Lane]:
        lanes = []
        over = run.over
        while over:
            lane = over.popleft()
            lane.run = None
            lane.state.buffer.lanes_in_runs -= 1
            lanes.append(lane)
        return lanes

    def _untouched(self, run: Run, count: int) -> list[Lane]:
        lanes = []
        for _ in range(count):
            try:
                lanes.append(run.todo.pop())  # the worker takes from the other end
            except IndexError:
                break
            self._free(lanes[-1])
        return lanes

    def _free(self, lane: Lane) -> None:
        lane.run = None
        lane.state.buffer.lanes_in_runs -= 1
