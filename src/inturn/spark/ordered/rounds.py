"""A round: from where a group stands, and the leases that are held, to the plans of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from inturn.model.settings import SPAN_MAX, ConsumerSettings, LotState, Order
from inturn.model.subject import Subject
from inturn.protocol.commands import GroupDescription, KeyDescription
from inturn.security.credentials import NONE, Credentials
from inturn.spark.ordered.plan import Waiting, plan
from inturn.spark.ordered.task import PATIENCE_S, ROUND_S, TASK_SETTINGS, TaskPlan

Steered = frozenset[tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Work:
    """What all rounds of a job have in common."""

    target: str
    subject: Subject
    group: str
    order: Order = Order.KEY
    consumer: ConsumerSettings = TASK_SETTINGS
    round_s: float = ROUND_S
    patience_s: float = PATIENCE_S
    credentials: Credentials = NONE

    def waiting(
        self,
        described: GroupDescription,
        ends: Mapping[int, int] | None = None,
        limit: int | None = None,
        keys: Iterable[KeyDescription] = (),
    ) -> list[Waiting]:
        """What is to be done below these ends, or of all that is stored; of about `limit` messages in all. Where
        somebody asked something of a key, or a lot is being resumed, there is something to do without any message."""
        steered = {one.partition for one in keys if _is_steered(one)}
        found = []
        for one in described.partitions:
            end = one.end_offset if ends is None else ends.get(one.partition, 0)
            # What the slices of a partition have finished is committed together, as what one consumer has.
            until = min(max(end, one.committed), one.committed + SPAN_MAX)
            if one.committed < until or one.partition in steered:
                # What is finished may be above the end, where others were at work.
                count = max(1, until - one.committed - one.finished_count)
                found.append(Waiting(one.partition, count, until, until < end))
        total = sum(one.count for one in found)
        if limit is None or total <= limit:
            return found
        # Each gives up its share of what is too much, from its end.
        cuts = [one.count - max(1, one.count * limit // total) for one in found]
        return [
            Waiting(one.partition, one.count - cut, one.until - cut, one.is_cut or cut > 0)
            for one, cut in zip(found, cuts, strict=True)
        ]

    def plans(
        self, waiting: list[Waiting], owner: str, epochs: Mapping[int, int], task_count: int, number: int
    ) -> list[TaskPlan]:
        """A plan for each task, of the partitions whose leases are held."""
        held = [one for one in waiting if one.partition in epochs]
        return [
            TaskPlan(
                self.target,
                self.subject.name,
                self.group,
                owner,
                {one.partition: epochs[one.partition] for one in slices},
                slices,
                self.order,
                self.consumer,
                number,
                index,
                self.round_s,
                self.patience_s,
                self.credentials,
            )
            for index, slices in enumerate(plan(self.subject, self.order, held, task_count))
        ]


def steered(keys: Iterable[KeyDescription]) -> Steered:
    """What is still to be done for those who asked something of keys. It changes whenever some of it was done, and not
    when a message of a lot fails again."""
    return frozenset(
        (one.partition, one.key, one.state, one.offset, one.waiting, tuple(request.id for request in one.requests))
        for one in keys
        if _is_steered(one)
    )


def _is_steered(key: KeyDescription) -> bool:
    return bool(key.requests) or key.state == LotState.RESUMING


def done(described: GroupDescription) -> int:
    """How many messages of all partitions are over."""
    return sum(one.committed + one.finished_count for one in described.partitions)
