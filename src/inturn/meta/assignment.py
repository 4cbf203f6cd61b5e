"""Who should consume which partition: sticky, so that as few partitions as possible move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def assign_sticky(
    members: Iterable[str], partition_count: int, previous: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Give every partition to one member. Shares differ by one at most, and nothing moves without need."""
    names = sorted(members)
    if not names:
        return {}
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
