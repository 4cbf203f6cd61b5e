"""Growing a subject: what may grow, and into what."""

from __future__ import annotations

from inturn.model.errors import InvalidInput
from inturn.model.names import RESERVED
from inturn.model.route import check_partition_count
from inturn.model.settings import Routing
from inturn.model.subject import Subject


def check_growth(subject: Subject, partition_count: int) -> None:
    """Raise InvalidInput for a subject that cannot grow, or not into so many partitions."""
    check_partition_count(subject.name, partition_count)
    if subject.name.startswith(RESERVED):
        raise InvalidInput(f"subject {subject.name!r} belongs to a group, and has as many partitions as that needs")
    if subject.routing is not Routing.SLOTS:
        raise InvalidInput(
            f"subject {subject.name!r} is routed by a selector, which would choose differently among more partitions, "
            "and no order would hold; create another subject, and have its consumers finish this one first"
        )
    if partition_count < subject.partition_count:
        raise InvalidInput(
            f"subject {subject.name!r} has {subject.partition_count} partitions already; it can grow, not shrink: "
            f"give {subject.partition_count + 1} or more"
        )
