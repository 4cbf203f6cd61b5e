"""The same sleeps without inturn: no log, no leases, no commits, no pulls; all lanes are known beforehand."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.calls import Calls
from inturn.model.event_loop import new_event_loop

Lanes = Sequence[Sequence[float]]  # the sleeps of a key, in their order


def longest_lane_first(lanes: Lanes, thread_count: int) -> float:
    """A free worker takes the next sleep of the lane with most sleeps left."""
    heap = [(-len(lane), number) for number, lane in enumerate(lanes) if lane]
    heapq.heapify(heap)
    lock = threading.Lock()
    calls: Calls[None] = Calls(sum(len(lane) for lane in lanes))

    def work() -> None:
        at, number = 0, -1  # `at` counts up from minus the length of the lane: also an index from its end
        while True:
            with lock:
                if at:
                    at, number = heapq.heappushpop(heap, (at, number))
                elif heap:
                    at, number = heapq.heappop(heap)
                else:
                    return  # every remaining lane has its worker
            calls.begin(None)
            time.sleep(lanes[number][at])
            calls.end()
            at += 1

    _run_threads([work] * thread_count)
    return calls.took_s


def static_hash(queues: Lanes) -> float:
    """A thread per queue; a sleep waits for all earlier sleeps of its queue."""
    calls: Calls[None] = Calls(sum(len(queue) for queue in queues))

    def work(queue: Sequence[float]) -> None:
        for sleep_s in queue:
            calls.begin(None)
            time.sleep(sleep_s)
            calls.end()

    _run_threads([partial(work, queue) for queue in queues])
    return calls.took_s


def one_task_per_lane(lanes: Lanes) -> float:
    """Bare tasks on the event loop that consumers use, too."""
    calls: Calls[None] = Calls(sum(len(lane) for lane in lanes))

    async def work(lane: Sequence[float]) -> None:
        for sleep_s in lane:
            calls.begin(None)
            await asyncio.sleep(sleep_s)
            calls.end()

    async def work_all() -> None:
        await asyncio.gather(*(work(lane) for lane in lanes))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work_all())
    return calls.took_s


def _run_threads(works: Sequence[Callable[[], None]]) -> None:
    """No thread begins before all threads are there: the start of threads is not measured."""
    ready = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        ready.wait()
        work()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
