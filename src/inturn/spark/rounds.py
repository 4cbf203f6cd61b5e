"""A round: from where a group stands, and the leases that are held, to the plans of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inturn.model.commands import GroupDescription
from inturn.model.settings import ConsumerSettings, Order
from inturn.model.subject import Subject
from inturn.spark.execution import PATIENCE_S, ROUND_S, TaskPlan
from inturn.spark.slices import Waiting, plan

MESSAGES_MAX = 4_000_000  # per partition and round: finished sets of slices have to stay small


@dataclass(frozen=True, slots=True)
class Work:
    """What all rounds of a job have in common."""

    target: str
    subject: Subject
    group: str
    order: Order = Order.KEY
    consumer: ConsumerSettings = field(default_factory=lambda: ConsumerSettings(concurrency=64))
    round_s: float = ROUND_S
    patience_s: float = PATIENCE_S

    def waiting(
        self, described: GroupDescription, ends: Mapping[int, int] | None = None, limit: int | None = None
    ) -> list[Waiting]:
        """What is to be done below these ends, or of all that is stored; of about `limit` messages in all."""
        found = []
        for one in described.partitions:
            until = one.end_offset if ends is None else ends.get(one.partition, 0)
            until = min(until, one.committed + MESSAGES_MAX)
            if one.committed < until:
                # What is finished may be above the end, where others were at work.
                count = max(1, until - one.committed - one.finished_count)
                found.append(Waiting(one.partition, count, until))
        total = sum(one.count for one in found)
        if limit is None or total <= limit:
            return found
        # Each gives up its share of what is too much, from its end.
        cuts = [one.count - max(1, one.count * limit // total) for one in found]
        return [Waiting(one.partition, one.count - cut, one.until - cut) for one, cut in zip(found, cuts, strict=True)]

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
            )
            for index, slices in enumerate(plan(self.subject, self.order, held, task_count))
        ]


def done(described: GroupDescription) -> int:
    """How many messages of all partitions are over."""
    return sum(one.committed + one.finished_count for one in described.partitions)
