"""Who should consume which partition: every partition goes to one living member."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from xxhash import xxh3_64_intdigest

from inturn.model.settings import AssignmentStrategy

# Points of each member on the ring: with 64 of them the shares of a few members differ by about an eighth.
RING_POINTS = 64


def assign(
    strategy: AssignmentStrategy,
    members: Iterable[str],
    partition_count: int,
    previous: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[int, ...]]:
    """The partitions of every member, in order; nothing if there are no members. `previous` is for sticky only."""
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
    """Each partition belongs to the next point on the ring: who comes or goes changes nothing between the others."""
    ring = sorted((_place(f"member {name} {point}"), name) for name in names for point in range(RING_POINTS))
    found: dict[str, list[int]] = {name: [] for name in names}
    for partition in range(partition_count):
        at = bisect_left(ring, (_place(f"partition {partition}"), ""))
        found[ring[at % len(ring)][1]].append(partition)
    return {name: tuple(partitions) for name, partitions in found.items()}


def _place(what: str) -> int:
    """On the ring. A name may come from a broken environment: whatever it has in it, it can be hashed."""
    return xxh3_64_intdigest(what.encode(errors="surrogatepass"))


def _sticky(
    names: list[str], partition_count: int, previous: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shares differ by one at most, and nothing moves without need."""
    kept = {name: [p for p in previous.get(name, ()) if p < partition_count] for name in names}
    share, larger = divmod(partition_count, len(names))
    # Whoever has most already gets one of the larger shares: it would have to give more away otherwise.
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
