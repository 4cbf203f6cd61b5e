"""The decisions of a scanner, without I/O: the horizon, the lease, and which rows are sent now.

The lease keeps scanners from disturbing each other. The guarantees (no row twice, no row out of order) do not depend on
the lease: the new holder opens the named producer of the outbox, and so fences the previous producer. Only durations on
the process's own monotonic clock are compared.

Rows are read in the order of ids, up to the horizon, and sent in that order. A row that cannot be sent delays only its
key: a refused row until the next try, a stuck partition until the partition stores again. Rows that were passed over
are read again from the first such row on, so no row of a key is ever sent before an older row of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from inturn.model.settings import LeaseSettings
from inturn.outbox.row import Row
from inturn.outbox.table import OutboxSettings

_Position = TypeVar("_Position")


class Horizon(Generic[_Position]):
    """The newest position such that all transactions open at that time have ended since.

    A position is taken together with the open transactions. Once none of these is open, the position is settled,
    whatever was opened meanwhile. So transactions that overlap without end do not stop the horizon; only a transaction
    that never ends does.
    """

    def __init__(self, settled: _Position) -> None:
        self.settled = settled
        self.waits_for: frozenset[Hashable] = frozenset()
        self._pending = settled

    def advance(self, position: _Position, open_now: Collection[Hashable]) -> _Position:
        """`open_now` must be read after `position`."""
        if self.waits_for:
            if not self.waits_for.isdisjoint(open_now):
                return self.settled
            self.settled = self._pending
        self.waits_for = frozenset(open_now)
        if self.waits_for:
            self._pending = position
        else:
            self.settled = position
        return self.settled


def settled_id(newest: int, lows: Iterable[int]) -> int:
    """The highest id such that no open transaction has, or will have, a row up to the id.

    `newest` is the highest visible id. `lows` are of the open transactions, read later than `newest`: all ids of a
    transaction are above the low of the transaction, of which only the lowest 32 bits are known.
    """
    return min([newest, *(newest + _signed(low - newest) for low in lows)])


def _signed(number: int) -> int:
    """The lowest 32 bits as a signed number: the distance of two ids."""
    return (number + 2**31) % 2**32 - 2**31


@dataclass(frozen=True, slots=True)
class ScanLease:
    """The lease as stored in the database."""

    name: str  # of the outbox, and so of the producer
    owner: str | None
    epoch: int
    beat: int
    life_ms: int
    recovery: dict[str, list[int]]  # recovery offsets by subject, one for each partition


class LeaseWatch:
    """Used by a scanner that waits for the lease. The lease may be taken if free, or if this watch has seen no renewal
    for a full life of the lease."""

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
    """Used by the scanner that holds the lease: how long, counted from before the lease was requested."""

    def __init__(self, epoch: int, settings: LeaseSettings, asked_at_s: float) -> None:
        self.epoch = epoch
        self._settings = settings
        self._asked_at_s = asked_at_s

    def renewed(self, asked_at_s: float) -> None:
        self._asked_at_s = asked_at_s

    def is_live(self, now_s: float) -> bool:
        return now_s < self._asked_at_s + self._settings.life_s - self._settings.margin_s

    def is_due(self, now_s: float) -> bool:
        """The lease should be renewed."""
        return now_s >= self._asked_at_s + self._settings.renew_s


_RECOVERING = "recovering"  # stands for rows known to be stored, and not read yet


@dataclass(slots=True)
class Choice:
    """Rows to send, and rows that are stored already."""

    send: list[Row] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)  # not to be sent: the log has these rows


class _Lane:
    __slots__ = ("count", "moved_at_s")

    def __init__(self, now_s: float) -> None:
        self.count = 0
        self.moved_at_s = now_s  # when the lane was last empty, or a row was stored


class ScanCore:
    """Called by one thread at a time."""

    def __init__(self, settings: OutboxSettings, recovered: Iterable[str] = (), recovered_until: int = 0) -> None:
        """`recovered` are tokens found in the logs, of rows up to the id `recovered_until`."""
        self.cursor = 0  # rows up to here were read
        self._settings = settings
        self._recovered = set(recovered)
        self._recovered_until = recovered_until
        self._in_flight: dict[int, tuple[Row, Hashable]] = {}
        self._lanes: dict[Hashable, _Lane] = {}
        self._refused: set[int] = set()
        self._lost: set[int] = set()  # failed on the way: perhaps stored
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
        """Some rows failed on the way: only another recovery can find out whether the rows are stored."""
        return bool(self._lost)

    @property
    def is_waiting_for_lanes(self) -> bool:
        return bool(self._passed_lanes)

    def unaccounted(self) -> set[Hashable]:
        """Rows that may be stored while still in the table."""
        found: set[Hashable] = {*self._in_flight, *self._lost}
        if self._recovered:
            found.add(_RECOVERING)
        return found

    def choose(
        self, rows: Iterable[Row], lane_of: Callable[[Row], Hashable], now_s: float, up_to: int | None = None
    ) -> Choice:
        """Choose from rows read behind the cursor, in the order of ids. Rows to send count as in flight.

        `up_to`: no further rows exist up to this id.
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
        """The chosen row was not sent: an earlier row of the key was refused."""
        self._leave(row.id)
        self._pass_over(row)

    def refused(self, row: Row) -> None:
        """The row was not sent, because the message is not acceptable."""
        self._refused.add(row.id)
        self._hold(row)

    def failed(self, row: Row) -> None:
        """The row was sent and given up; perhaps the message is stored."""
        self._lost.add(row.id)
        self._hold(row)

    def stored(self, row_id: int, now_s: float) -> None:
        """The message of the row was acknowledged."""
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
        """Try refused rows again, but not lost rows."""
        self._refused.clear()
        self._held.clear()
        self._rewind()

    def _takes(self, row: Row, lane: Hashable, now_s: float, choice: Choice) -> bool:
        """False: this row has to wait, and all rows behind."""
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
