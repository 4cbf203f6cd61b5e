"""Start and end offsets of a query in every partition, and the end offsets of a micro-batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from inturn.model.errors import InvalidInput, NotFound
from inturn.model.logs import get_logger
from inturn.model.offsets import Position, position_text
from inturn.protocol.commands import (
    DescribeGroup,
    DescribeSubject,
    GroupDescription,
    Node,
    Offsets,
    ResolvePosition,
    SubjectDescription,
)
from inturn.protocol.request import ask

EARLIEST = -2
LATEST = -1
_MS_MIN = 100_000_000_000  # 1973: a smaller number is not a time
_log = get_logger("inturn.spark")

ByPartition = dict[int, int]  # partition → offset


@dataclass(frozen=True, slots=True)
class Bound:
    """The start or end of a query. `kind`: "earliest", "latest", "committed", "timestamp" or "offsets"."""

    kind: str
    timestamp_ms: int = 0
    offsets: tuple[tuple[int, int], ...] = ()  # (partition, offset); the offset may be EARLIEST or LATEST


@dataclass(frozen=True, slots=True)
class Extent:
    """The stored offsets of one partition: `start <= offset < end`."""

    start: int
    end: int


def parse_bound(option: str, text: str, subject: str) -> Bound:
    """Parse "earliest", "latest", "committed", a time (ISO, or milliseconds since 1970), or offsets as JSON:
    {"subject": {"0": 12, "1": -2}}, or short {"0": 12, "1": -2}; -2 is earliest, -1 is latest."""
    text = text.strip()
    if text in ("earliest", "latest", "committed"):
        return Bound(text)
    if text.startswith("{"):
        return Bound("offsets", offsets=_explicit(option, text, subject))
    return Bound("timestamp", parse_time(option, text))


def parse_time(option: str, text: str) -> int:
    """Parse milliseconds since 1970, or a time in ISO form (local time if there is no zone)."""
    try:
        if text.isascii() and text.isdigit() and int(text) >= _MS_MIN:
            return Position("timestamp", int(text)).value
        if not text.isdigit():
            return Position("timestamp", round(datetime.fromisoformat(text).timestamp() * 1000)).value
    except (ValueError, OverflowError):
        pass
    also = "" if "imestamp" in option else """ 'earliest', 'latest', 'committed', offsets as JSON ({"0": 12}), or"""
    raise InvalidInput(
        f"option {option}={text!r}: use{also} a time such as '2026-01-31T12:00' or milliseconds since 1970"
    )


def _explicit(option: str, text: str, subject: str) -> tuple[tuple[int, int], ...]:
    wrong = InvalidInput(f'option {option}={text!r}: use JSON as {{"{subject}": {{"0": 12, "1": -2}}}}')
    try:
        told = json.loads(text)
    except ValueError:
        raise wrong from None
    if len(told) == 1 and isinstance(next(iter(told.values())), dict):
        if subject not in told:
            raise InvalidInput(f"option {option} names subject {next(iter(told))!r}, the query reads {subject!r}")
        told = told[subject]
    offsets = []
    for partition, offset in told.items():
        if not (partition.isascii() and partition.isdigit()) or isinstance(offset, bool) or not isinstance(offset, int):
            raise wrong
        if not EARLIEST <= offset < 2**63:
            raise wrong
        offsets.append((int(partition), offset))
    if not offsets:
        raise wrong
    return tuple(sorted(offsets))


# Requests to the node


def extents_of(node: Node, subject: str) -> dict[int, Extent]:
    """The current extent of every partition."""
    described = ask(node, DescribeSubject(subject), SubjectDescription)
    return {one.index: Extent(one.start_offset, one.end_offset) for one in described.partitions}


def resolve(
    node: Node, subject: str, extents: Mapping[int, Extent], option: str, bound: Bound, group: str | None
) -> ByPartition:
    """The offset of a bound in every partition. Offsets may be outside the stored range: see `within_extents`."""
    match bound.kind:
        case "earliest":
            return {partition: extent.start for partition, extent in extents.items()}
        case "latest":
            return {partition: extent.end for partition, extent in extents.items()}
        case "timestamp":
            text = position_text(Position("timestamp", bound.timestamp_ms))
            found = ask(node, ResolvePosition(subject, text), Offsets).offsets
            # Messages that were stored after the extents were read are not part of the query.
            return {partition: min(found[partition], extent.end) for partition, extent in extents.items()}
        case "committed":
            assert group is not None
            return _committed(node, subject, group, extents)
    return _resolve_explicit(subject, extents, option, dict(bound.offsets))


def _committed(node: Node, subject: str, group: str, extents: Mapping[int, Extent]) -> ByPartition:
    try:
        described = ask(node, DescribeGroup(subject, group), GroupDescription)
    except NotFound as error:
        if error.kind != "group":
            raise
        return {partition: extent.start for partition, extent in extents.items()}
    committed = {one.partition: one.committed for one in described.partitions}
    return {partition: committed.get(partition, extent.start) for partition, extent in extents.items()}


def _resolve_explicit(subject: str, extents: Mapping[int, Extent], option: str, told: Mapping[int, int]) -> ByPartition:
    if told.keys() != extents.keys():
        raise InvalidInput(
            f"option {option}: subject {subject!r} has partitions {_listed(extents)}, offsets were given for "
            f"{_listed(told)}; give an offset for every partition, -2 for the earliest and -1 for the latest"
        )
    places = {EARLIEST: "start", LATEST: "end"}
    return {
        partition: getattr(extents[partition], places[offset]) if offset in places else offset
        for partition, offset in sorted(told.items())
    }


def _listed(partitions: Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(partitions)))


# Removed messages


def within_extents(
    subject: str, extents: Mapping[int, Extent], offsets: Mapping[int, int], fail_on_data_loss: bool
) -> ByPartition:
    """The offsets, limited to the stored range. An offset outside raises NotFound, or is moved inside with a
    warning."""
    inside = {}
    for partition, offset in offsets.items():
        extent = extents.get(partition)
        if extent is None:
            raise NotFound(
                "partition", f"{subject}/{partition}", "offsets name it; was the subject deleted and created again?"
            )
        inside[partition] = min(max(offset, extent.start), extent.end)
        if inside[partition] != offset:
            report_data_loss(subject, partition, offset, extent, fail_on_data_loss)
    return inside


def report_data_loss(subject: str, partition: int, offset: int, extent: Extent, fail_on_data_loss: bool) -> None:
    """Report a requested offset that is not stored: raise NotFound, or log a warning."""
    if not fail_on_data_loss:
        _log.warning(
            "spark.data_lost",
            subject=subject,
            partition=partition,
            offset=offset,
            start_offset=extent.start,
            end_offset=extent.end,
        )
        return
    why = (
        f"the first stored offset is {extent.start}, retention has removed earlier messages; start at 'earliest', "
        "retain messages longer,"
        if offset < extent.start
        else f"the partition ends at {extent.end}; does the offset come from a different subject or server? Start "
        "at 'latest',"
    )
    raise NotFound(
        "offset",
        f"{subject}/{partition}@{offset}",
        f"{why} or set failOnDataLoss to false to continue with the stored messages",
    )


# Streams


def offsets_json(subject: str, offsets: Mapping[int, int]) -> dict[str, dict[str, int]]:
    """Offsets in the form of Spark's checkpoint. The order is fixed, because Spark compares the texts."""
    return {subject: {str(partition): offsets[partition] for partition in sorted(offsets)}}


def parse_offsets(subject: str, told: Mapping[str, Mapping[str, int]]) -> ByPartition:
    """The reverse of `offsets_json`. InvalidInput for offsets of a different subject."""
    if subject not in told:
        raise InvalidInput(
            f"the checkpoint belongs to subject {', '.join(map(repr, told))}, the query reads {subject!r}; "
            "use a different checkpointLocation"
        )
    return {int(partition): offset for partition, offset in told[subject].items()}


def batch_end(start: Mapping[int, int], end: Mapping[int, int], limit: int) -> ByPartition:
    """The end offsets of a micro-batch of `limit` messages. Partitions share the limit in proportion to their
    backlog."""
    waiting = {partition: max(0, offset - start.get(partition, 0)) for partition, offset in end.items()}
    total = sum(waiting.values())
    if total <= limit:
        return dict(end)
    taken = {partition: limit * count // total for partition, count in waiting.items()}
    left = limit - sum(taken.values())
    # The rest is less than one message per partition. Partitions with the largest remaining backlog get it first.
    for partition in sorted(waiting, key=lambda one: taken[one] - waiting[one])[:left]:
        taken[partition] += 1
    return {partition: start.get(partition, 0) + count for partition, count in taken.items()}
