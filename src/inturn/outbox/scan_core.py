"""The horizon: how far one may go while things that began earlier have not ended yet. Pure.

The lease of an outbox: one scanner at a time. Pure; only durations on one's own monotonic clock are compared.

The lease is there so that scanners do not get into each other's way. That nothing is sent twice or out of order does
not hang on it: whoever takes it opens the named producer of the outbox, which fences the one before.

The decisions of a scanner: which rows are sent now, which have to wait. No I/O.

Rows are read in the order of their ids, up to the horizon, and sent in that order. What cannot be sent holds back its
key, and nobody else: a row that was refused, until it is tried again; a partition that stores nothing, until it does.
What was passed over is read again from its first row on, so nothing of a key is ever sent before an older row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from inturn.model.settings import LeaseSettings
from inturn.outbox.row import Row
from inturn.outbox.table import OutboxSettings

_Mark = TypeVar("_Mark")


class Horizon(Generic[_Mark]):
    """The newest mark such that all that was open when it was taken has ended since.

    A mark is taken together with what is open; once none of these is open any more, the mark is settled, whatever has
    been opened meanwhile. So things that overlap without end do not stop it, only one that does not end does.
    """

    def __init__(self, settled: _Mark) -> None:
        self.settled = settled
        self.waits_for: frozenset[Hashable] = frozenset()
        self._mark = settled

    def advance(self, mark: _Mark, open_now: Collection[Hashable]) -> _Mark:
        """`open_now` has to be read after `mark`."""
        if self.waits_for:
            if not self.waits_for.isdisjoint(open_now):
                return self.settled
            self.settled = self._mark
        self.waits_for = frozenset(open_now)
        if self.waits_for:
            self._mark = mark
        else:
            self.settled = mark
        return self.settled


def settled_id(newest: int, lows: Iterable[int]) -> int:
    """Up to which id no open transaction has a row, or will have one.

    `newest` is the highest id that can be seen. `lows` are of the transactions that are open, read later than that: the
    ids of each are above its low one, of which only the lowest 32 bits are known.
    """
    return min([newest, *(newest + _signed(low - newest) for low in lows)])


def _signed(number: int) -> int:
    """The lowest 32 bits as a number with a sign: how far two ids are from each other."""
    return (number + 2**31) % 2**32 - 2**31


@dataclass(frozen=True, slots=True)
class ScanLease:
    """As it is in the database."""

    name: str  # of the outbox, and so of its producer
    owner: str | None
    epoch: int
    beat: int
    life_ms: int
    recovery: dict[str, list[int]]  # recovery offsets by subject, one for each partition


class LeaseWatch:
    """Of one who would like to have it: it may be taken if it is free, or if this very watcher has seen no renewal for
    a full life of it."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since_s = 0.0

    def may_take(self, row: ScanLease, now_s: float) -> bool:
        if row.owner is None:
            return True
        if self._seen != (row.epoch, row.beat):
            self._seen = row.epoch, row.beat
            self._since_s = now_s
        return now_s - self._since_s >= row.life_ms / 1000


class Hold:
    """Of the one who has it: until when, counted from before it was asked for."""

    def __init__(self, epoch: int, settings: LeaseSettings, asked_at_s: float) -> None:
        self.epoch = epoch
        self._settings = settings
        self._asked_at_s = asked_at_s

    def renewed(self, asked_at_s: float) -> None:
        self._asked_at_s = asked_at_s

    def is_live(self, now_s: float) -> bool:
        return now_s < self._asked_at_s + self._settings.life_s - self._settings.margin_s

    def is_due(self, now_s: float) -> bool:
        """It should be renewed."""
        return now_s >= self._asked_at_s + self._settings.renew_s


_RECOVERING = "recovering"  # stands for rows of which it is known that they are stored, and that were not read yet


@dataclass(slots=True)
class Choice:
    send: list[Row] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)  # these need not be sent: the log has them


class _Lane:
    __slots__ = ("count", "moved_at_s")

    def __init__(self, now_s: float) -> None:
        self.count = 0
        self.moved_at_s = now_s  # when it was empty last, or something of it was stored


class ScanCore:
    def __init__(self, settings: OutboxSettings, recovered: Iterable[str] = (), recovered_until: int = 0) -> None:
        """`recovered` are the tokens that stand in the logs; they are of rows up to the id `recovered_until`."""
        self.cursor = 0  # rows up to here were read
        self._settings = settings
        self._recovered = set(recovered)
        self._recovered_until = recovered_until
        self._in_flight: dict[int, tuple[Row, Hashable]] = {}
        self._lanes: dict[Hashable, _Lane] = {}
        self._refused: set[int] = set()
        self._lost: set[int] = set()  # failed on their way: perhaps they are stored
        self._stored: set[int] = set()  # acknowledged, and not deleted yet
        self._held: set[tuple[str, bytes]] = set()
        self._passed_from: int | None = None
        self._passed_lanes: set[Hashable] = set()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def room(self) -> int:
        """How many rows may be read now."""
        return min(self._settings.batch, self._settings.in_flight - len(self._in_flight))

    @property
    def has_refused(self) -> bool:
        return bool(self._refused or self._lost)

    @property
    def has_lost(self) -> bool:
        """Some failed on their way: only a new look into the logs can tell whether they are stored."""
        return bool(self._lost)

    @property
    def is_waiting_for_lanes(self) -> bool:
        return bool(self._passed_lanes)

    def unaccounted(self) -> set[Hashable]:
        """What may be stored, though its row is there."""
        found: set[Hashable] = {*self._in_flight, *self._lost}
        if self._recovered:
            found.add(_RECOVERING)
        return found

    def choose(
        self, rows: Iterable[Row], lane_of: Callable[[Row], Hashable], now_s: float, up_to: int | None = None
    ) -> Choice:
        """Of rows that were read behind the cursor, in the order of their ids. Those to send count as in flight.

        `up_to`: there are no further rows up to this id.
        """
        choice = Choice()
        for row in rows:
            if row.id in self._in_flight or row.id in self._stored:
                pass
            elif row.token in self._recovered:
                self._stored.add(row.id)
                choice.stored.append(row.id)
            elif row.id in self._refused or row.id in self._lost or self.is_held(row):
                self._pass_over(row)
            elif not self._takes(row, lane_of(row), now_s, choice):
                break
            self.cursor = row.id
        else:
            self.cursor = max(self.cursor, up_to or 0)
        if self.cursor >= self._recovered_until:
            self._recovered.clear()
        return choice

    def is_held(self, row: Row) -> bool:
        return row.place is not None and row.place in self._held

    def put_back(self, row: Row) -> None:
        """It was to be sent, and was not: something of its key was refused before it."""
        self._leave(row.id)
        self._pass_over(row)

    def refused(self, row: Row) -> None:
        """It was not sent, because it cannot be."""
        self._refused.add(row.id)
        self._hold(row)

    def failed(self, row: Row) -> None:
        """It was sent and given up; perhaps it is stored."""
        self._lost.add(row.id)
        self._hold(row)

    def stored(self, row_id: int, now_s: float) -> None:
        """It was acknowledged."""
        self._stored.add(row_id)
        lane = self._leave(row_id)
        if lane is None:
            return
        self._lanes[lane].moved_at_s = now_s
        if lane in self._passed_lanes and self._lanes[lane].count <= self._settings.lane // 2:
            self._rewind()

    def deleted(self, row_ids: Iterable[int]) -> None:
        """These rows are gone."""
        self._stored.difference_update(row_ids)

    def retry(self) -> None:
        """Try again what was refused; not what was lost."""
        self._refused.clear()
        self._held.clear()
        self._rewind()

    def _takes(self, row: Row, lane: Hashable, now_s: float, choice: Choice) -> bool:
        """False: this row has to wait, and all behind it."""
        known = self._lanes.setdefault(lane, _Lane(now_s))
        if known.count == 0:
            known.moved_at_s = now_s
        if lane in self._passed_lanes:
            self._pass_over(row)
        elif known.count < self._settings.lane:
            known.count += 1
            self._in_flight[row.id] = row, lane
            choice.send.append(row)
        elif now_s - known.moved_at_s < self._settings.stuck_s:
            return False
        else:
            self._passed_lanes.add(lane)
            self._pass_over(row)
        return True

    def _hold(self, row: Row) -> None:
        self._leave(row.id)
        if row.place is not None:
            self._held.add(row.place)
        self._pass_over(row)

    def _pass_over(self, row: Row) -> None:
        if self._passed_from is None or row.id < self._passed_from:
            self._passed_from = row.id

    def _leave(self, row_id: int) -> Hashable:
        row_and_lane = self._in_flight.pop(row_id, None)
        if row_and_lane is None:
            return None
        lane = row_and_lane[1]
        self._lanes[lane].count -= 1
        return lane

    def _rewind(self) -> None:
        if self._passed_from is not None:
            self.cursor = min(self.cursor, self._passed_from - 1)
        self._passed_from = None
        self._passed_lanes.clear()
