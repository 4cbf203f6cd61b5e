"""Several lanes at once for a worker process, so that a round trip is paid once for about 2 ms of work.

Which lane the process has begun is decided by tokens in a pipe: the process reads one before it begins a lane, and
whoever takes a lane back (a handler hangs, others have nothing to do) reads one instead. One byte has one reader,
whatever is killed or frozen meanwhile, so a lane has one owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from inturn.consumer.lane import Lane
from inturn.consumer.process_frames import CALLS_MAX, DONE, LANES_MAX, UNTOUCHED, GivenLane, Told
from inturn.consumer.run import Run
from inturn.consumer.worker_process import WorkerProcess
from inturn.model.message import Message
from inturn.model.result import Result

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class ChunkLane:
    lane: Lane
    messages: list[Message]
    attempts: list[int]
    first: int  # the number of its first call

    def given(self) -> GivenLane:
        held = self.lane.held
        where = held.subject, held.group, held.index, held.member, held.epoch, held.deadline_s
        return GivenLane(*where, self.messages, self.attempts)


class OfferedLanes(deque[Lane]):
    """What is left of a run, for others to take: `rest`, which is here, and then what its process has not begun.

    `pop` is called by others under the consumer's lock; the worker itself takes nothing from here.
    """

    def __init__(self, rest: deque[Lane], lanes: list[ChunkLane], process: WorkerProcess) -> None:
        super().__init__()
        self.rest = rest
        self.taken_back: set[int] = set()
        self._lanes = lanes
        self._process = process

    def __len__(self) -> int:
        return len(self.rest) + self._process.token_count

    def __bool__(self) -> bool:
        return len(self) > 0

    def pop(self) -> Lane:  # type: ignore[override]
        if self.rest:
            return self.rest.pop()
        token = self._process.take_token()
        if token is None:
            raise IndexError("the process has begun all of it")
        self.taken_back.add(token)
        return self._lanes[token].lane

    def remove(self, lane: Lane) -> None:
        self.rest.remove(lane)  # tokens come in their order: those of the process cannot be chosen from

    def close(self) -> set[int]:
        """Nobody takes anything any more, under the consumer's lock: the numbers of lanes that somebody did take."""
        while self._process.take_token() is not None:
            pass
        return self.taken_back


def take_chunk(run: Run, now_s: float) -> list[ChunkLane]:
    """Lanes of the run, with what of them may be begun; those of which nothing may go back at once."""
    lanes: list[ChunkLane] = []
    left, size_bytes, first = min(run.budget, CALLS_MAX), 0, 0
    while left > 0 and len(lanes) < LANES_MAX and size_bytes < CHUNK_BYTES:
        try:
            lane = run.todo.popleft()
        except IndexError:
            break
        held = lane.held
        messages = [] if lane.parks or now_s >= held.deadline_s else lane.messages[lane.at : lane.at + left]
        exhausted = held.exhausted
        if exhausted:
            stop = next((at for at, one in enumerate(messages) if held.mark(one) in exhausted), len(messages))
            messages = messages[:stop]
        if not messages:
            run.over.append(lane)
            continue
        attempts = held.attempts
        tries = [attempts.get(held.mark(one), 0) + 1 for one in messages] if attempts else [1] * len(messages)
        lanes.append(ChunkLane(lane, messages, tries, first))
        first += len(messages)
        left -= len(messages)
        size_bytes += sum(len(one.body) for one in messages)
    return lanes


class Settling:
    """What became of the lanes of a chunk. `fail` settles a call that did not succeed, with what it told of itself;
    that is None if its process died."""

    def __init__(self, run: Run, lanes: list[ChunkLane], fail: Callable[[Run, Message, Told | None], None]) -> None:
        self._run = run
        self._lanes = lanes
        self._fail = fail
        self._settled: set[int] = set()

    def early(self, states: Sequence[int], told: Iterable[Told]) -> None:
        """Lanes that are over while the process is busy with another one go on without it. It has begun them, so
        nobody else can have taken them."""
        told_of = {one.number: one for one in told}
        for index, one in enumerate(self._lanes):
            if index not in self._settled and _is_over(one, states, told_of):
                self._settle(index, one, states, told_of)

    def rest(self, states: Sequence[int], told: Iterable[Told], taken_back: set[int]) -> None:
        """The process has ended, or has ended its work: what it had begun and not told of has failed."""
        told_of = {one.number: one for one in told}
        for index, one in enumerate(self._lanes):
            if index not in self._settled and index not in taken_back:
                self._settle(index, one, states, told_of)

    def _settle(self, index: int, one: ChunkLane, states: Sequence[int], told: Mapping[int, Told]) -> None:
        self._settled.add(index)
        run, lane = self._run, one.lane
        calls = states[one.first : one.first + len(one.messages)]
        tried = next((at for at, state in enumerate(calls) if state == UNTOUCHED), len(calls))
        done = next((at for at in range(tried) if not _is_done(calls[at], told.get(one.first + at))), tried)
        lane.inbox += one.messages[:done]
        lane.at += done
        run.handled += done
        run.done += done
        if done == tried:
            run.over.append(lane)
            return
        lane.at += 1
        run.handled += 1
        run.begin(lane, one.messages[done], one.attempts[done])
        self._fail(run, one.messages[done], told.get(one.first + done))


def _is_over(one: ChunkLane, states: Sequence[int], told: Mapping[int, Told]) -> bool:
    """All of it is done, or one has failed and told why."""
    for number in range(one.first, one.first + len(one.messages)):
        if not _is_done(states[number], told.get(number)):
            return number in told
    return True


def _is_done(state: int, told: Told | None) -> bool:
    return state == DONE or (told is not None and told.returned in (Result.SUCCESS.value, "none"))
