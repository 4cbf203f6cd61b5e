from __future__ import annotations

from inturn.consumer.core import ConsumerCore
from inturn.model.routing import Partition, Route, even_ranges
from inturn.model.settings import ConsumerSettings, LeaseSettings, Order
from inturn.model.subject import Subject
from inturn.protocol.commands import Acquire, Assignment, Command, Granted, Heartbeat, Renew, Renewed

SUBJECT = Subject("s", Route("s", 1, (Partition("local", "p1"),), even_ranges(1)))


def _one(commands: list[Command], kind: type[Command]) -> Command:
    return next(command for command in commands if isinstance(command, kind))


def test_the_life_of_a_lease_is_what_its_grantor_says_at_the_grant_and_at_every_renewal() -> None:
    """A consumer with settings for longer leases must not work past the end of the lease that the node granted."""
    lease = LeaseSettings(life_s=15.0, renew_s=0.5, margin_s=0.1)
    core = ConsumerCore("s", "g", "m", Order.PARTITION, "first", ConsumerSettings(), lease)
    core.answered(_one(core.poll(0.0), Heartbeat), Assignment(1, (0,), SUBJECT, 60.0), 0.0)
    core.answered(_one(core.poll(0.0), Acquire), Granted(1, 0, 1.0), 0.2)
    assert core.partitions[0].lease.deadline_s == 0.9
    core.answered(_one(core.poll(0.8), Renew), Renewed((0,)), 0.85)
    assert core.partitions[0].lease.deadline_s == 0.8 + 1.0 - 0.1
