"""The small tables of an audit: leases, claims, and the offsets that commits reached.

A trace has one event for some hundred messages. One job brings the events to the driver, without the offsets that they
list. The tables are computed there, column by column, and Spark receives them as local relations to broadcast: a job of
Spark for each table would take far longer than the tables do.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from pyspark.sql import functions as F
from xxhash import xxh64_intdigest

from inturn.consumer.trace import HASH_SEED
from inturn.model.violation import ViolationKind
from inturn.spark.audit.evidence import CLAIM, GROUP, NEVER, PLACE, struct_of
from inturn.spark.audit.verdict import AuditEvidence, FoundViolation, violation

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

GroupName: TypeAlias = tuple[str, str]  # subject, group

_COLUMNS = (
    *("subject", "group", "owner", "seq", "kind", "at_ns", "until_ns", "partition"),
    *("epoch", "offset", "key_hash", "why", "is_claim", "by_node"),
)
_LISTS = ("finished", "parked", "unparked")
_PLACE_SCHEMA = "place bigint, subject string, group string, partition int"
_STEP_SCHEMA = f"{_PLACE_SCHEMA}, bucket bigint, from bigint, to bigint, {CLAIM}"


class Place(NamedTuple):
    """A partition of a subject, as a group consumes it."""

    subject: str
    group: str
    partition: int

    @property
    def number(self) -> int:
        """The number that `place_number` has for this place: Spark's `xxhash64(subject, group, partition)`."""
        number = HASH_SEED
        for part in (self.subject.encode(), self.group.encode(), self.partition.to_bytes(4, "little", signed=True)):
            number = xxh64_intdigest(part, number)
        return number - (1 << 64) if number >> 63 else number

    @property
    def group_name(self) -> GroupName:
        return self.subject, self.group


class Event(NamedTuple):
    """An event of a trace, without the offsets that it lists: see `EVENT_SCHEMA`."""

    place: Place
    owner: str
    seq: int
    kind: str
    at_ns: int
    until_ns: int
    epoch: int
    offset: int
    key_hash: int | None
    why: str
    is_claim: bool
    by_node: bool

    def evidence(self) -> AuditEvidence:
        offset = self.offset if self.offset >= 0 else None
        about = self.place.partition, offset, self.epoch, self.owner
        return AuditEvidence(self.kind, *about, None, None, self.at_ns, self.until_ns)

    def found(self, kind: ViolationKind, offset: int | None, *evidence: AuditEvidence) -> FoundViolation:
        return FoundViolation(self.until_ns, violation(kind, *self.place, offset, evidence))


@dataclass(frozen=True, slots=True)
class Lease:
    """An epoch of a place. `before` is the lease with the next lower epoch that left a trace."""

    place: Place
    epoch: int
    granted_ns: int
    owners: frozenset[str]
    next_granted_ns: int | None  # the first grant of a higher epoch
    ended_ns: int | None  # when the lease was over for certain
    is_cut: bool  # the trace of its owner, or of a member that worked under it, has no end
    before: Lease | None

    @property
    def unseen(self) -> int:
        """Epochs between the lease and the one before that left no trace."""
        return 0 if self.before is None else self.epoch - self.before.epoch - 1


class Terms:
    """Events before the last reset of a place are left out: a reset begins again."""

    def __init__(self, events: DataFrame, order: str | None, skew_ns: int) -> None:
        self.order, self.skew_ns = order, skew_ns
        self._spark = events.sparkSession
        lists = (F.coalesce(F.size(name) > 0, F.lit(False)).alias(name) for name in _LISTS)
        every = _Events.of(events.select(*_COLUMNS, *lists).toArrow())
        self.resets = _resets(every.of_kind("reset"))
        self._rows = every.since(self.resets)
        self.events = self.since_reset(events, "at_ns")
        self.lists = {name: bool(self._rows.columns[name].any()) for name in _LISTS}  # whether an event has some
        self.has_given_up = len(self._rows.where_kind("skipped", "moved")) > 0
        self.cut = self._cut_owners()
        self.grants = self._rows.of_kind("granted")
        self.claimed = self._rows.of_kind("claimed")
        self.leases = self._leases()
        self.floors = self._floors()
        self.orders = self._orders()
        self.commits = self._rows.where_kind("committed")
        self.has_hand_overs = any(lease.next_granted_ns is not None for lease in self.leases.values())

    @property
    def places(self) -> Sequence[Place]:
        """All places that left a trace since their last reset."""
        numbers = sorted(set(self._rows.columns["place"].tolist()))
        return [self._rows.places[number] for number in numbers]

    def of_kind(self, *kinds: str) -> DataFrame:
        return self.events.where(F.col("kind").isin(*kinds))

    def since_reset(self, rows: DataFrame, at: str) -> DataFrame:
        """Rows before the last reset of their place are not judged."""
        if not self.resets:
            return rows
        resets = self._table(
            ((*place, at_ns) for place, (at_ns, _) in self.resets.items()),
            "subject string, group string, partition int, reset_ns bigint",
        )
        return (
            rows.join(F.broadcast(resets), [*PLACE], "left")
            .where(F.col("reset_ns").isNull() | (F.col(at) >= F.col("reset_ns")))
            .drop("reset_ns")
        )

    # On the driver

    def _cut_owners(self) -> frozenset[tuple[str, str, str]]:
        """Subject, group and owner of traces without an end: the owner was killed, or still runs."""
        marks = self._rows.of_kind("opened", "closed")
        names = {(*event.place.group_name, event.owner): False for event in marks}
        names |= {(*event.place.group_name, event.owner): True for event in marks if event.kind == "closed"}
        return frozenset(name for name, is_closed in names.items() if not is_closed)

    def _leases(self) -> dict[tuple[Place, int], Lease]:
        """By place and epoch, in this order."""
        granted: dict[tuple[Place, int], list[Event]] = defaultdict(list)
        workers: dict[tuple[Place, int], set[str]] = defaultdict(set)
        for event in self.grants:
            granted[event.place, event.epoch].append(event)
        for event in (*self.grants, *self.claimed):
            workers[event.place, event.epoch].add(event.owner)
        ended_ns: dict[tuple[Place, int], int] = {}
        for event in self._rows.of_kind("ended"):
            # A claim that is given back ends nothing for other members under the same lease.
            if event.by_node or (event.why == "released" and not event.is_claim):
                name = event.place, event.epoch
                ended_ns[name] = max(ended_ns.get(name, event.at_ns), event.at_ns)
        next_ns: dict[tuple[Place, int], int | None] = {}
        earliest: dict[Place, int] = {}
        for place, epoch in sorted(granted, reverse=True):
            next_ns[place, epoch] = earliest.get(place)
            granted_ns = min(event.until_ns for event in granted[place, epoch])
            earliest[place] = min(earliest.get(place, NEVER), granted_ns)
        leases: dict[tuple[Place, int], Lease] = {}
        last: Lease | None = None
        for name in sorted(granted):
            place, epoch = name
            last = leases[name] = Lease(
                place,
                epoch,
                min(event.until_ns for event in granted[name]),
                frozenset(event.owner for event in granted[name]),
                next_ns[name],
                ended_ns.get(name),
                any((*place.group_name, owner) in self.cut for owner in workers[name]),
                last if last is not None and last.place == place else None,
            )
        return leases

    def _floors(self) -> dict[Place, int]:
        """Where the group began, as far as the trace shows."""
        first: dict[Place, tuple[int, int, int]] = {}
        for event in self.grants:
            if event.offset >= 0:
                found = event.epoch, event.until_ns, event.offset
                first[event.place] = min(first.get(event.place, found), found)
        reset = {place: offset for place, (_, offset) in self.resets.items()}
        return {place: offset for place, (_, _, offset) in first.items()} | reset

    def _orders(self) -> dict[GroupName, str]:
        """The groups that left a trace, and the order that their members recorded."""
        orders = {place.group_name: "" for place in self.places}
        for event in self._rows.of_kind("opened"):
            name = event.place.group_name
            orders[name] = max(orders[name], event.why or "")
        return {name: self.order or told or "key" for name, told in orders.items()}

    def commit_counts(self) -> Counter[GroupName]:
        counts: Counter[GroupName] = Counter()
        for number, count in Counter(self.commits.columns["place"].tolist()).items():
            counts[self.commits.places[number].group_name] += count
        return counts

    # Claims: commits, and the progress that comes with a lease

    @functools.cached_property
    def _committed(self) -> dict[str, Any]:
        """The columns of commits, with those of the lease that each was made under."""
        import numpy as np

        rows = self.commits
        columns = dict(rows.columns)
        leases = list(self.leases.values())
        numbers = {(rows.numbers[lease.place], lease.epoch): number for number, lease in enumerate(leases)}
        pairs, which = np.unique(np.stack([columns["place"], columns["epoch"]]), axis=1, return_inverse=True)
        found = np.array([numbers.get((int(place), int(epoch)), -1) for place, epoch in pairs.T], np.int64)
        lease = columns["lease"] = found[which.reshape(-1)]

        def of_lease(values: Iterable[int], unknown: int) -> Any:
            return np.array([*values, unknown], np.int64)[lease]

        columns["was_granted"] = lease >= 0
        columns["granted_ns"] = np.where(lease >= 0, of_lease((one.granted_ns for one in leases), 0), columns["at_ns"])
        columns["next_ns"] = of_lease((_or_never(one.next_granted_ns) for one in leases), NEVER)
        columns["ended_ns"] = of_lease((_or_never(one.ended_ns) for one in leases), NEVER)
        owners = {name: number for number, name in enumerate(rows.owners)}
        held = [number * len(owners) + owners[name] for number, one in enumerate(leases) for name in one.owners]
        columns["is_owner"] = np.isin(lease * len(owners) + columns["owner"], np.array(held, np.int64))
        cut = {(group, owners[owner]) for *group_name, owner in self.cut for group in [tuple(group_name)]}
        group_of = [place.group_name for place in rows.places]
        names, which = np.unique(np.stack([columns["place"], columns["owner"]]), axis=1, return_inverse=True)
        is_cut = np.array([(group_of[int(place)], int(owner)) in cut for place, owner in names.T], bool)
        columns["cut"] = is_cut[which.reshape(-1)]
        return columns

    @functools.cached_property
    def steps(self) -> pa.Table:
        """By place, the claim that was the first to pass an offset: all of `from` up to `to`. Steps do not overlap."""
        import numpy as np
        import pyarrow as pa

        names = ("place", "until_ns", "offset", "at_ns", "epoch", "owner", "granted_ns", "by_grant", "cut")
        committed = {**self._committed, "by_grant": np.zeros(len(self.commits), bool)}
        by_commit = ~committed["is_claim"]
        rows, owners = self.commits, {name: number for number, name in enumerate(self.commits.owners)}
        grants = [
            (
                *(rows.numbers[event.place], event.until_ns, event.offset, event.at_ns, event.epoch),
                *(owners[event.owner], event.until_ns, True, self._is_cut_before(event)),
            )
            for event in self.grants
            if event.offset >= 0
        ]
        by_grant = np.array(grants, np.int64).reshape(-1, len(names)).T
        claims = {
            name: np.concatenate([committed[name][by_commit].astype(np.int64), by_grant[number]])
            for number, name in enumerate(names)
        }
        order = np.lexsort((claims["offset"], claims["until_ns"], claims["place"]))
        claims = {name: column[order] for name, column in claims.items()}
        starts = np.flatnonzero(np.diff(claims["place"], prepend=-1))
        reached = np.zeros(len(order), np.int64)
        stops = [*starts[1:], len(order)][: len(starts)]  # none without claims
        for start, stop in zip(starts, stops, strict=True):
            floor = self.floors.get(rows.places[claims["place"][start]], 0)
            before = np.concatenate([[floor], claims["offset"][start : stop - 1]])
            reached[start:stop] = np.maximum.accumulate(before)
        is_step = claims["offset"] > reached
        columns: dict[str, Any] = {name: column[is_step] for name, column in claims.items()}
        columns |= {"from": reached[is_step], "to": columns.pop("offset")}
        columns |= {name: columns[name].astype(bool) for name in ("by_grant", "cut")}
        columns["owner"] = pa.array(rows.owners, pa.string()).take(pa.array(columns["owner"]))
        return pa.table(columns)

    def _is_cut_before(self, event: Event) -> bool:
        before = self.leases[event.place, event.epoch].before
        return before is not None and before.is_cut

    def ends(self) -> dict[Place, int]:
        """By place, the highest offset that a claim reached."""
        ends: dict[int, int] = {}
        steps = self.steps
        for place, stop in zip(steps.column("place").to_pylist(), steps.column("to").to_pylist(), strict=True):
            ends[place] = max(ends.get(place, 0), stop)
        return {self.commits.places[place]: stop for place, stop in ends.items()}

    # For Spark

    def _table(self, rows: Iterable[Sequence[Any]], schema: str) -> DataFrame:
        """A local relation: Spark has it at hand when it plans, and needs no job to read it."""
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import StructType

        kinds = to_arrow_schema(cast(StructType, StructType.fromDDL(schema)))
        columns = list(zip(*rows, strict=True)) or [()] * len(kinds)
        arrays = [pa.array(column, kind.type) for column, kind in zip(columns, kinds, strict=True)]
        return self._spark.createDataFrame(pa.Table.from_arrays(arrays, names=kinds.names), schema)

    @functools.cached_property
    def lease_table(self) -> DataFrame:
        return self._table(
            (
                (
                    *(lease.place.number, *lease.place, lease.epoch, lease.granted_ns, lease.next_granted_ns),
                    lease.before is not None and lease.before.is_cut,
                )
                for lease in self.leases.values()
            ),
            f"{_PLACE_SCHEMA}, epoch bigint, granted_ns bigint, next_granted_ns bigint, cut_before boolean",
        )

    @functools.cached_property
    def floor_table(self) -> DataFrame:
        floors = ((*place, offset) for place, offset in self.floors.items())
        return self._table(floors, "subject string, group string, partition int, floor bigint")

    @functools.cached_property
    def end_table(self) -> DataFrame:
        return self._table(
            ((place.number, offset) for place, offset in self.ends().items()), "place bigint, committed bigint"
        )

    @functools.cached_property
    def group_table(self) -> DataFrame:
        orders = ((*name, order) for name, order in self.orders.items())
        return self._table(orders, "subject string, group string, order string")

    @functools.cached_property
    def term_table(self) -> DataFrame:
        """Claims by place, epoch and owner: each counts from `term_ns` until the next one of the same owner."""
        times: dict[tuple[Place, int, str], set[int]] = defaultdict(set)
        for event in self.claimed:
            times[event.place, event.epoch, event.owner].add(event.until_ns)
        rows = (
            (*place, epoch, owner, *span)
            for (place, epoch, owner), claimed in times.items()
            for span in zip(sorted(claimed), [*sorted(claimed)[1:], NEVER], strict=True)
        )
        schema = "subject string, group string, partition int, epoch bigint, owner string"
        return self._table(rows, f"{schema}, term_ns bigint, next_term_ns bigint")

    @functools.cached_property
    def resumed_table(self) -> DataFrame | None:
        """By place and key: when its attempts began to count again. None if no key was resumed."""
        times: dict[tuple[Place, int | None], list[int]] = defaultdict(list)
        for event in self._rows.of_kind("resumed"):
            times[event.place, event.key_hash].append(event.at_ns)
        if not times:
            return None
        rows = ((*place, key_hash, resumed) for (place, key_hash), resumed in times.items())
        return self._table(rows, "subject string, group string, partition int, key_hash bigint, resumed array<bigint>")

    @functools.cached_property
    def bucket_bits(self) -> int:
        """A bucket has so many offsets, as a power of two, that it touches about one step."""
        import pyarrow.compute as pc

        steps = self.steps
        if not steps.num_rows:
            return 0
        span = pc.sum(pc.subtract(steps.column("to"), steps.column("from"))).as_py()
        return int((span // steps.num_rows).bit_length())

    @functools.cached_property
    def step_table(self) -> DataFrame:
        """The steps, once for every bucket of offsets that they touch: a join by place and bucket finds them."""
        import numpy as np
        import pyarrow as pa

        steps, places = self.steps, self.commits.places
        first = steps.column("from").to_numpy() >> self.bucket_bits
        counts = ((steps.column("to").to_numpy() - 1) >> self.bucket_bits) - first + 1
        which = np.repeat(np.arange(len(counts)), counts)
        number_in_step = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        steps = steps.take(pa.array(which))
        of_place = pa.array(steps.column("place").to_numpy())
        columns = {
            "place": pa.array([place.number for place in places], pa.int64()).take(of_place),
            "subject": pa.array([place.subject for place in places], pa.string()).take(of_place),
            "group": pa.array([place.group for place in places], pa.string()).take(of_place),
            "partition": pa.array([place.partition for place in places], pa.int32()).take(of_place),
            "bucket": pa.array(first[which] + number_in_step),
        }
        names = [part.split()[0] for part in _STEP_SCHEMA.split(", ")]
        table = pa.table({name: columns[name] if name in columns else steps.column(name) for name in names})
        return self._spark.createDataFrame(table, _STEP_SCHEMA)

    def listing_claims(self) -> DataFrame:
        """Claims that may list offsets, finished ones or those of the parking lot: `EVENT_SCHEMA` and `by_grant`.

        Only commits list offsets of the parking lot."""
        is_grant = F.col("kind") == "granted"
        is_claim = (F.col("kind") == "committed") | (is_grant & (F.col("offset") >= 0))
        return self.events.where(is_claim).withColumn("by_grant", is_grant)

    def listed_claims(self) -> DataFrame:
        """As `listing_claims`, with the columns of `CLAIM`: what a claim can rest upon."""
        leases = self.lease_table.select(*PLACE, "epoch", F.col("granted_ns").alias("lease_ns"), "cut_before")
        cut = self._table(
            ((*name, True) for name in self.cut), "subject string, group string, owner string, cut boolean"
        )
        by_grant = F.col("by_grant")
        rows = (
            self.listing_claims()
            .join(F.broadcast(leases), [*PLACE, "epoch"], "left")
            .join(F.broadcast(cut), [*GROUP, "owner"], "left")
        )
        granted_ns = F.when(by_grant, F.col("until_ns")).otherwise(F.coalesce("lease_ns", "at_ns"))
        is_cut = F.when(by_grant, F.col("cut_before")).otherwise(F.coalesce("cut", F.lit(False)))
        rows = rows.withColumns({"granted_ns": granted_ns, "cut": is_cut})
        return rows.select(*PLACE, *_LISTS, struct_of(CLAIM).alias("claim"))

    # Rules

    def violations(self) -> list[FoundViolation]:
        """Of leases and commits, in no order."""
        return [*self._epochs_not_raised(), *self._two_owners(), *self._stale_commits()]

    def _epochs_not_raised(self) -> list[FoundViolation]:
        """A grant whose epoch is not above all epochs before."""
        found = []
        highest: dict[Place, Event] = {}
        for event in sorted(self.grants, key=lambda event: (event.until_ns, event.seq)):
            above = highest.get(event.place)
            if above is not None and event.epoch <= above.epoch:
                is_later = event.until_ns > above.until_ns + self.skew_ns
                if event.epoch == above.epoch or is_later or event.by_node:
                    about = above.evidence(), event.evidence()
                    found.append(event.found(ViolationKind.EPOCH_NOT_RAISED, None, *about))
            if above is None or (event.epoch, event.until_ns) >= (above.epoch, above.until_ns):
                highest[event.place] = event
        return found

    def _two_owners(self) -> list[FoundViolation]:
        """A grant, as the node decided it, while the lease before had not ended."""
        ended_ns: dict[tuple[Place, int, str], int] = {}
        for event in self._rows.of_kind("ended"):
            if event.by_node:
                name = event.place, event.epoch, event.owner
                ended_ns[name] = min(ended_ns.get(name, NEVER), event.at_ns)
        found = []
        last: dict[Place, Event] = {}
        by_node = (event for event in self.grants if event.by_node)
        for event in sorted(by_node, key=lambda event: (event.until_ns, event.seq)):
            before = last.get(event.place)
            if before is not None and ended_ns.get((before.place, before.epoch, before.owner), NEVER) > event.until_ns:
                found.append(event.found(ViolationKind.TWO_OWNERS, None, before.evidence(), event.evidence()))
            last[event.place] = event
        return found

    def _stale_commits(self) -> list[FoundViolation]:
        """A commit that was taken from a member without the lease."""
        rows = self._committed
        at_ns = rows["at_ns"] - self.skew_ns
        is_stale = (
            ~rows["was_granted"]
            | (rows["granted_ns"] > rows["until_ns"] + self.skew_ns)
            | (rows["next_ns"] < at_ns)
            | (rows["ended_ns"] < at_ns)
            | (~rows["is_claim"] & ~rows["is_owner"])
        )
        stale = self.commits.where(is_stale).to_events()
        return [event.found(ViolationKind.STALE_COMMIT, event.offset, event.evidence()) for event in stale]


@dataclass(frozen=True)
class _Events:
    """Events as columns of numpy. `place`, `owner` and `kind` are numbers in these lists."""

    columns: dict[str, Any]
    table: pa.Table
    places: list[Place]
    owners: list[str]
    kinds: list[str]

    @classmethod
    def of(cls, table: pa.Table) -> _Events:
        import numpy as np

        encoded = {name: table.column(name).combine_chunks().dictionary_encode() for name in ("owner", "kind", *GROUP)}
        texts = {name: column.dictionary.to_pylist() for name, column in encoded.items()}
        codes = {name: column.indices.to_numpy().astype(np.int64) for name, column in encoded.items()}
        numbers = ("seq", "at_ns", "until_ns", "epoch", "offset")
        columns = {name: table.column(name).to_numpy() for name in numbers}
        flags = ("is_claim", "by_node", *_LISTS)
        columns |= {name: table.column(name).to_numpy().astype(bool) for name in flags}
        where = np.stack([codes["subject"], codes["group"], table.column("partition").to_numpy().astype(np.int64)])
        unique, place = np.unique(where, axis=1, return_inverse=True)
        places = [
            Place(texts["subject"][subject], texts["group"][group], partition)
            for subject, group, partition in unique.T.tolist()
        ]
        columns |= {"place": place.reshape(-1), "owner": codes["owner"], "kind": codes["kind"]}
        return cls(columns, table, places, texts["owner"], texts["kind"])

    @functools.cached_property
    def numbers(self) -> dict[Place, int]:
        return {place: number for number, place in enumerate(self.places)}

    def __len__(self) -> int:
        return len(self.columns["place"])

    def where(self, mask: Any) -> _Events:
        columns = {name: column[mask] for name, column in self.columns.items()}
        return _Events(columns, self.table.filter(mask), self.places, self.owners, self.kinds)

    def where_kind(self, *kinds: str) -> _Events:
        import numpy as np

        return self.where(
            np.isin(self.columns["kind"], [self.kinds.index(kind) for kind in kinds if kind in self.kinds])
        )

    def of_kind(self, *kinds: str) -> list[Event]:
        return self.where_kind(*kinds).to_events()

    def since(self, resets: dict[Place, tuple[int, int]]) -> _Events:
        import numpy as np

        if not resets:
            return self
        reset_ns = [resets[place][0] if place in resets else -NEVER for place in self.places]
        return self.where(self.columns["at_ns"] >= np.array(reset_ns, np.int64)[self.columns["place"]])

    def to_events(self) -> list[Event]:
        names = Event._fields[1:]
        rows = zip(*(self.table.column(name).to_pylist() for name in names), strict=True)
        return [Event(self.places[place], *row) for place, row in zip(self.columns["place"], rows, strict=True)]


def _resets(events: Iterable[Event]) -> dict[Place, tuple[int, int]]:
    """Time and offset of the last one of each place."""
    found: dict[Place, tuple[int, int]] = {}
    for event in events:
        last = event.at_ns, event.offset
        found[event.place] = max(found.get(event.place, last), last)
    return found


def _or_never(at_ns: int | None) -> int:
    return NEVER if at_ns is None else at_ns
