"""The decisions of a scanner: which rows are sent now, which have to wait. No I/O.

Rows are read in the order of their ids, up to the horizon, and sent in that order. What cannot be sent holds back its
key, and nobody else: a row that was refused, until it is tried again; a partition that stores nothing, until it does.
What was passed over is read again from its first row on, so nothing of a key is ever sent before an older row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from inturn.outbox.row import Row
from inturn.outbox.settings import OutboxSettings

_RECALLING = "recalling"  # stands for rows of which it is known that they are stored, and that were not read yet


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
    def __init__(self, settings: OutboxSettings, recalled: Iterable[str] = (), recall_until: int = 0) -> None:
        """`recalled` are the tokens that stand in the logs; they are of rows up to the id `recall_until`."""
        self.cursor = 0  # rows up to here were read
        self._settings = settings
        self._recalled = set(recalled)
        self._recall_until = recall_until
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
        if self._recalled:
            found.add(_RECALLING)
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
            elif row.token in self._recalled:
                self._stored.add(row.id)
                choice.stored.append(row.id)
            elif row.id in self._refused or row.id in self._lost or self.is_held(row):
                self._pass_over(row)
            elif not self._takes(row, lane_of(row), now_s, choice):
                break
            self.cursor = row.id
        else:
            self.cursor = max(self.cursor, up_to or 0)
        if self.cursor >= self._recall_until:
            self._recalled.clear()
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
