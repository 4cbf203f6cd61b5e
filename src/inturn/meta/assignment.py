"""The assignment of partitions: every partition goes to exactly one living member."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from xxhash import xxh3_64_intdigest

from inturn.model.settings import AssignmentStrategy

# Points of a member on the ring: with 64 points, the shares of a few members differ by about an eighth.
RING_POINTS = 64


def assign(
    strategy: AssignmentStrategy,
    members: Iterable[str],
    partition_count: int,
    previous: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[int, ...]]:
    """The partitions of every member, in order; empty without members. `previous` is for sticky only."""
    names = sorted(members)
    if not names:
        return {}
    match strategy:
        case AssignmentStrategy.AVERAGE:
            return _average(names, partition_count)
        case AssignmentStrategy.CIRCLE:
            return {name: tuple(range(first, partition_count, len(names))) for first, name in enumerate(names)}
        case AssignmentStrategy.CONSISTENT_HASH:
            return _consistent_hash(names, partition_count)
        case AssignmentStrategy.STICKY:
            return _sticky(names, partition_count, previous)


def _average(names: list[str], partition_count: int) -> dict[str, tuple[int, ...]]:
    share, larger = divmod(partition_count, len(names))
    found, start = {}, 0
    for rank, name in enumerate(names):
        stop = start + share + (rank < larger)
        found[name] = tuple(range(start, stop))
        start = stop
    return found


def _consistent_hash(names: list[str], partition_count: int) -> dict[str, tuple[int, ...]]:
    """Each partition belongs to the next point on the ring. So a member that joins or leaves moves no partition between
    two other members."""
    ring = sorted((_place(f"member {name} {point}"), name) for name in names for point in range(RING_POINTS))
    found: dict[str, list[int]] = {name: [] for name in names}
    for partition in range(partition_count):
        at = bisect_left(ring, (_place(f"partition {partition}"), ""))
        found[ring[at % len(ring)][1]].append(partition)
    return {name: tuple(partitions) for name, partitions in found.items()}


def _place(text: str) -> int:
    """The place on the ring. Names with invalid characters, from a broken environment, are hashed, too."""
    return xxh3_64_intdigest(text.encode(errors="surrogatepass"))


def _sticky(
    names: list[str], partition_count: int, previous: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shares differ by at most one partition, and no partition moves without need."""
    kept = {name: [p for p in previous.get(name, ()) if p < partition_count] for name in names}
    share, larger = divmod(partition_count, len(names))
    # Members with the most partitions get the larger shares: so fewer partitions move.
    by_load = sorted(names, key=lambda name: (-len(kept[name]), name))
    quota = {name: share + (rank < larger) for rank, name in enumerate(by_load)}
    for name in names:
        del kept[name][quota[name] :]
    taken = {partition for partitions in kept.values() for partition in partitions}
    free = (partition for partition in range(partition_count) if partition not in taken)
    for name in by_load:
        while len(kept[name]) < quota[name]:
            kept[name].append(next(free))
    return {name: tuple(sorted(partitions)) for name, partitions in kept.items()}
