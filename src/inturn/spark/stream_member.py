"""What the readers of streams have in common: leases that are held while the query lives, an end, and waiting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from inturn.connection import Connection
from inturn.model.logs import get_logger
from inturn.spark.arrivals import Arrivals
from inturn.spark.connections import connected, disconnect
from inturn.spark.holding import Holding
from inturn.spark.offsets import ByPartition, extents_of, offsets_json
from inturn.spark.options import ReadOptions

IDLE_WAIT_S = 1.0  # Spark asks again at once, 65 times a second, when there was nothing
_log = get_logger("inturn.spark")


class StreamMember(SupportsTriggerAvailableNow):
    """Lives in the process that plans, for as long as the query does. Copies of it, in tasks, hold nothing."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._target: ByPartition | None = None  # AvailableNow: nothing behind it
        self._latest: ByPartition | None = None  # the ends as they were seen last
        self._arrivals: Arrivals | None = None
        self._holding: Holding | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrivals": None, "_holding": None}

    def _connection(self) -> Connection:
        return connected(self._options.target, "the driver", self._options.credentials)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        extents = extents_of(self._connection().node, self._options.subject)
        self._target = {partition: extent.end for partition, extent in extents.items()}

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        """For the progress of the query: as `latestOffset` saw it last, whatever was admitted."""
        return None if self._latest is None else offsets_json(self._options.subject, self._latest)

    def _wait(self, offsets: ByPartition) -> None:
        """Until something is stored at or behind one of the offsets, or a moment is over."""
        if self._arrivals is None:
            self._arrivals = Arrivals(self._connection().node, self._options.subject)
        self._arrivals.wait(offsets, IDLE_WAIT_S)

    def _end_with(self, left: Iterable[int]) -> None:
        """AvailableNow has nothing more to do here, and `stop` may not come: hand back. What is left in partitions that
        others hold is theirs, and told."""
        partitions = sorted(left)
        group = self._options.group
        if partitions and group is not None:
            described = self._connection().describe_group(self._options.subject, group)
            owners = {one.partition: one.owner or "nobody" for one in described.partitions}
            _log.warning(
                "spark.left_to_others",
                subject=self._options.subject,
                group=group,
                owners={index: owners.get(index, "nobody") for index in partitions},
            )
        self._hand_back()

    def _hand_back(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.stop()

    def stop(self) -> None:
        self._arrivals = None
        self._hand_back()
        disconnect(self._options.target)
