"""The state of a partition in a shared group: delivered messages by member, and messages to deliver again. No I/O.

    not delivered yet ──► delivered ── acknowledged ──► finished
                            │    ▲
      returned, or not      ▼    │ delivered again, when due
      acknowledged in time  waiting

A CommitTracker holds the finished messages, which are stored as in any other group. Deliveries are kept in memory only:
after a restart all receipts are invalid (by their epoch), and unfinished messages are delivered again.
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
    """Outstanding messages with a common expiry time."""

    ends_at_s: float
    offsets: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class OpenDelivery:
    """A delivered message without an acknowledgement."""

    number: int  # of the receipt
    member: str
    term: Term


class SharedPartition:
    """All times are given as `now_s` (monotonic). Call `expire` before every other method that depends on the time."""

    def __init__(self, epoch: int, low: int, finished: bytes = b"", failures: Iterable[Failure] = ()) -> None:
        self.epoch = epoch
        self.tracker = CommitTracker(low, finished)
        self.cursor = low  # offsets at or above were not delivered yet, but may be finished
        self.given: dict[int, OpenDelivery] = {}  # by offset
        self.attempts: dict[int, int] = {}  # the number of failed deliveries, by offset
        self.redeliveries = 0
        self.commit_number = 0
        # To be stored with the next commit.
        self.failed: dict[int, Failure] = {}
        self.settled: set[int] = set()
        self._recorded: set[int] = set()  # offsets with a failure in the database, now or after the next commit
        for one in failures:
            self.attempts[one.offset] = one.attempts
            self._recorded.add(one.offset)
        self._waiting: dict[int, float] = {}  # the time of the next possible delivery, by offset
        self._due: list[tuple[float, int]] = []  # a heap of the same; entries that differ from `_waiting` are void
        # A heap by time. An entry for every message would pile up, because most messages are acknowledged early.
        self._terms: list[tuple[float, int, Term]] = []
        self._term: Term | None = None  # the newest
        self._asks: dict[str, tuple[int, float]] = {}  # the newest fetch number of every member, and its time
        # By member: receipts of fetches whose answers may not have arrived, with the fetch number.
        self._unsure: dict[str, list[tuple[int, Receipt]]] = {}
        self._numbers = itertools.count(1)

    # Delivery

    def hear(self, member: str, ask: int, answered: int, now_s: float) -> bool:
        """Register a fetch of a member. Messages of an earlier answer that did not arrive are free again; their
        delivery was no attempt. Returns False for a late copy of an older fetch: the member ignores the answer."""
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
        """The time of the member's newest fetch."""
        return self._asks[member][1]

    def forget(self, member: str) -> None:
        """Drop a silent member. The member keeps its messages until their receipts expire."""
        self._asks.pop(member, None)
        self._unsure.pop(member, None)

    def free(self, member: str, now_s: float) -> None:
        """The member has left: its messages are delivered again, and have not failed."""
        self.forget(member)
        for offset in [offset for offset, one in self.given.items() if one.member == member]:
            self._end(offset)
            self.put_off(offset, now_s)

    def due(self, now_s: float, count: int) -> list[int]:
        """Up to `count` offsets to deliver again, in rising order. The caller must call `give`, `skip` or `put_off` for
        every offset."""
        found: list[int] = []
        while len(found) < count and self.next_waiting_s() <= now_s:
            _, offset = heapq.heappop(self._due)
            del self._waiting[offset]
            found.append(offset)
        return sorted(found)

    def put_off(self, offset: int, at_s: float) -> None:
        """Delay the next delivery of a message until this time."""
        self._waiting[offset] = at_s
        heapq.heappush(self._due, (at_s, offset))

    def give(self, offset: int, member: str, ask: int, ends_at_s: float) -> Delivery:
        """Deliver a message to a member. The message must be new, or have been `due`."""
        if offset in self.given or offset in self._waiting or offset in self.tracker:
            raise ValueError(f"offset {offset} must not be delivered")
        number = next(self._numbers)
        term = self._term
        if term is None or term.ends_at_s != ends_at_s:
            term = self._term = Term(ends_at_s)
            heapq.heappush(self._terms, (ends_at_s, number, term))
        term.offsets.add(offset)
        self.given[offset] = OpenDelivery(number, member, term)
        self._unsure.setdefault(member, []).append((ask, Receipt(offset, number)))
        attempts = self.attempts.get(offset, 0)
        if offset < self.cursor:
            self.redeliveries += 1
        else:
            self.cursor = offset + 1
        return Delivery(offset, number, attempts + 1)

    def new_ones(self, first: int, stop: int, count: int) -> list[int]:
        """Up to `count` offsets from the cursor on, between `first` and `stop`, neither delivered nor finished."""
        start = max(first, self.cursor)
        if start > self.tracker.last:
            return list(range(start, min(stop, start + count)))
        return list(itertools.islice((at for at in range(start, stop) if at not in self.tracker), count))

    def pass_to(self, offset: int) -> None:
        """All offsets below this are delivered or finished."""
        self.cursor = max(self.cursor, offset)

    def skip(self, start: int, stop: int) -> None:
        """No message is stored from `start` up to `stop` (any more)."""
        self.tracker.skip(start, stop)
        for offset in [one for one in self.attempts if start <= one < stop]:
            self._settle(offset)

    # Acknowledgements and returns

    def holds(self, receipt: Receipt, member: str, now_s: float) -> bool:
        """Whether the receipt of this member is valid."""
        given = self.given.get(receipt.offset)
        if given is None or (given.number, given.member) != (receipt.number, member):
            return False
        return now_s < given.term.ends_at_s

    def _end(self, offset: int) -> None:
        """Remove the delivery of a message."""
        self.given.pop(offset).term.offsets.discard(offset)

    def acknowledge(self, offset: int) -> None:
        """The message is finished. Its receipt must be valid."""
        self._end(offset)
        self.tracker.add([offset])
        self._settle(offset)

    def give_back(self, offset: int, at_s: float, error: str | None, key: bytes | None = None) -> None:
        """Return a message for redelivery at this time or later. With an error, the message has failed. Its receipt
        must be valid."""
        self._end(offset)
        if error is not None:
            self._fail(offset, error, key)
        self.put_off(offset, at_s)

    def expire(self, now_s: float) -> int:
        """Expire receipts. The messages have failed and wait for redelivery. Returns the number of messages."""
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

    # Statistics

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def next_due_s(self) -> float:
        """The time of the next possible redelivery: the end of a delay or of a receipt."""
        while self._terms and not self._terms[0][2].offsets:
            self._pop_term()
        return min(self.next_waiting_s(), self._terms[0][0] if self._terms else NEVER)

    def next_waiting_s(self) -> float:
        while self._due and self._waiting.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else NEVER

    def shares(self) -> Mapping[str, int]:
        """The number of outstanding messages by member."""
        counts: dict[str, int] = {}
        for one in self.given.values():
            counts[one.member] = counts.get(one.member, 0) + 1
        return counts
