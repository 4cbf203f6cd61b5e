"""One partition of a shared group: which messages are with whom, and which are to be given out again. No I/O.

    not given out yet ──► given out ── acknowledged ──► finished
                            │    ▲
      returned, or not      ▼    │ given out again, when it is due
      acknowledged in time  waiting

What is finished is kept by a CommitTracker, and stored as for any other group. What is given out lives here, in memory:
after a restart all receipts are over, which their epoch says, and what was not finished is given out again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from inturn.model.offsets import CommitTracker
from inturn.protocol.commands import Delivery, Failure, Receipt

NEVER = float("inf")
EXPIRED = "not acknowledged in time"


@dataclass(slots=True, eq=False)
class Term:
    """What was given out at the same time, as far as somebody has it still, and when that is over."""

    ends_at_s: float
    offsets: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Given:
    """A message that somebody has."""

    number: int  # of the receipt
    member: str
    term: Term


class SharedPartition:
    """Time comes in as `now_s` (monotonic). Call `expire` before anything else that depends on it."""

    def __init__(self, epoch: int, low: int, finished: bytes = b"", failures: Iterable[Failure] = ()) -> None:
        self.epoch = epoch
        self.tracker = CommitTracker(low, finished)
        self.cursor = low  # what is at or above it was not given out yet, but may be finished
        self.given: dict[int, Given] = {}  # by offset
        self.attempts: dict[int, int] = {}  # how often it was given out in vain, by offset
        self.redeliveries = 0
        self.commit_number = 0
        # What is to be stored with the next commit.
        self.failed: dict[int, Failure] = {}
        self.settled: set[int] = set()
        self._recorded: set[int] = set()  # offsets of which there is a failure in the database, or soon will be
        for one in failures:
            self.attempts[one.offset] = one.attempts
            self._recorded.add(one.offset)
        self._waiting: dict[int, float] = {}  # when it may be given out again, by offset
        self._due: list[tuple[float, int]] = []  # a heap of the same; entries that say something else are void
        # A heap by time. Not one entry for each message: most are acknowledged long before, and would pile up here.
        self._terms: list[tuple[float, int, Term]] = []
        self._term: Term | None = None  # the last one
        self._asks: dict[str, tuple[int, float]] = {}  # the newest of each member, and when it was heard
        # What was given out to each member for asks whose answers may not have arrived: ask and receipt.
        self._unsure: dict[str, list[tuple[int, Receipt]]] = {}
        self._numbers = itertools.count(1)

    # Giving out

    def hear(self, member: str, ask: int, answered: int, now_s: float) -> bool:
        """A member asks. What was given out for an ask whose answer did not arrive is free again, and was no attempt.
        False for a late copy of an older ask: nobody waits for its answer any more."""
        if member in self._asks and ask < self._asks[member][0]:
            return False
        self._asks[member] = ask, now_s
        for given_for, receipt in self._unsure.pop(member, ()):
            given = self.given.get(receipt.offset)
            if given_for > answered and given is not None and given.number == receipt.number:
                self._end(receipt.offset)
                self.put_off(receipt.offset, now_s)
        return True

    def is_newest(self, member: str, ask: int) -> bool:
        return member in self._asks and self._asks[member][0] == ask

    def heard_at_s(self, member: str) -> float:
        """When its newest ask came."""
        return self._asks[member][1]

    def forget(self, member: str) -> None:
        """The member was not heard for long. What it has it may keep, until that is over."""
        self._asks.pop(member, None)
        self._unsure.pop(member, None)

    def free(self, member: str, now_s: float) -> None:
        """The member is gone, by its own word: whatever it has is to be given out again, and did not fail."""
        self.forget(member)
        for offset in [offset for offset, one in self.given.items() if one.member == member]:
            self._end(offset)
            self.put_off(offset, now_s)

    def due(self, now_s: float, count: int) -> list[int]:
        """Up to so many that are to be given out again, in rising order. `give`, `skip` or `put_off` each of them."""
        found: list[int] = []
        while len(found) < count and self.next_waiting_s() <= now_s:
            _, offset = heapq.heappop(self._due)
            del self._waiting[offset]
            found.append(offset)
        return sorted(found)

    def put_off(self, offset: int, at_s: float) -> None:
        """Not given out before this."""
        self._waiting[offset] = at_s
        heapq.heappush(self._due, (at_s, offset))

    def give(self, offset: int, member: str, ask: int, ends_at_s: float) -> Delivery:
        """It is this member's from now on. It must be new, or have been `due`."""
        if offset in self.given or offset in self._waiting or offset in self.tracker:
            raise ValueError(f"offset {offset} is not to be given out")
        number = next(self._numbers)
        term = self._term
        if term is None or term.ends_at_s != ends_at_s:
            term = self._term = Term(ends_at_s)
            heapq.heappush(self._terms, (ends_at_s, number, term))
        term.offsets.add(offset)
        self.given[offset] = Given(number, member, term)
        self._unsure.setdefault(member, []).append((ask, Receipt(offset, number)))
        attempts = self.attempts.get(offset, 0)
        if offset < self.cursor:
            self.redeliveries += 1
        else:
            self.cursor = offset + 1
        return Delivery(offset, number, attempts + 1)

    def new_ones(self, first: int, stop: int, count: int) -> list[int]:
        """Up to so many offsets from the cursor on, within these, that were neither given out nor finished."""
        start = max(first, self.cursor)
        if start > self.tracker.last:
            return list(range(start, min(stop, start + count)))
        return list(itertools.islice((at for at in range(start, stop) if at not in self.tracker), count))

    def pass_to(self, offset: int) -> None:
        """All new ones below this are given out, or finished."""
        self.cursor = max(self.cursor, offset)

    def skip(self, start: int, stop: int) -> None:
        """Nothing is stored there (any more)."""
        self.tracker.skip(start, stop)
        for offset in [one for one in self.attempts if start <= one < stop]:
            self._settle(offset)

    # Coming back

    def holds(self, receipt: Receipt, member: str, now_s: float) -> bool:
        """Whether this is the receipt of a message that the member has still."""
        given = self.given.get(receipt.offset)
        if given is None or (given.number, given.member) != (receipt.number, member):
            return False
        return now_s < given.term.ends_at_s

    def _end(self, offset: int) -> None:
        """Nobody has it any more."""
        self.given.pop(offset).term.offsets.discard(offset)

    def acknowledge(self, offset: int) -> None:
        """It is done. Its receipt must hold."""
        self._end(offset)
        self.tracker.add([offset])
        self._settle(offset)

    def give_back(self, offset: int, at_s: float, error: str | None, key: bytes | None = None) -> None:
        """It is to be given out again, not before this; with an error it has failed. Its receipt must hold."""
        self._end(offset)
        if error is not None:
            self._fail(offset, error, key)
        self.put_off(offset, at_s)

    def expire(self, now_s: float) -> int:
        """What was not acknowledged in time waits to be given out again, and has failed. Returns how many."""
        count = 0
        while self._terms and self._terms[0][0] <= now_s:
            for offset in sorted(self._pop_term().offsets):
                del self.given[offset]
                self._fail(offset, EXPIRED, None)
                self.put_off(offset, now_s)
                count += 1
        return count

    def _pop_term(self) -> Term:
        term = heapq.heappop(self._terms)[2]
        if term is self._term:
            self._term = None
        return term

    def _fail(self, offset: int, error: str, key: bytes | None) -> None:
        attempts = self.attempts[offset] = self.attempts.get(offset, 0) + 1
        self.failed[offset] = Failure(offset, key, attempts, error)
        self._recorded.add(offset)
        self.settled.discard(offset)

    def _settle(self, offset: int) -> None:
        if self.attempts.pop(offset, None) is not None and offset in self._recorded:
            self._recorded.discard(offset)
            self.failed.pop(offset, None)
            self.settled.add(offset)

    # Looking

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def next_due_s(self) -> float:
        """When something may be given out again: it was put off until then, or its receipt is over."""
        while self._terms and not self._terms[0][2].offsets:
            self._pop_term()
        return min(self.next_waiting_s(), self._terms[0][0] if self._terms else NEVER)

    def next_waiting_s(self) -> float:
        while self._due and self._waiting.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else NEVER

    def shares(self) -> Mapping[str, int]:
        """How many each member has."""
        counts: dict[str, int] = {}
        for one in self.given.values():
            counts[one.member] = counts.get(one.member, 0) + 1
        return counts
