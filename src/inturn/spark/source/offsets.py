"""Where a query starts and ends in each partition, and how much of that one micro-batch takes."""

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
_MS_MIN = 100_000_000_000  # 1973: a smaller number is not meant as a time
_log = get_logger("inturn.spark")

ByPartition = dict[int, int]  # partition → offset


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a query starts or ends: `kind` is "earliest", "latest", "committed", "timestamp" or "offsets"."""

    kind: str
    timestamp_ms: int = 0
    offsets: tuple[tuple[int, int], ...] = ()  # partition and offset; EARLIEST and LATEST, too


@dataclass(frozen=True, slots=True)
class Extent:
    """What is there of one partition: `start <= offset < end`."""

    start: int
    end: int


def parse_bound(option: str, text: str, subject: str) -> Bound:
    """Understands "earliest", "latest", "committed", a time (ISO, or milliseconds since 1970), or offsets as JSON:
    {"subject": {"0": 12, "1": -2}}, or short {"0": 12, "1": -2}; -2 is earliest, -1 latest."""
    text = text.strip()
    if text in ("earliest", "latest", "committed"):
        return Bound(text)
    if text.startswith("{"):
        return Bound("offsets", offsets=_explicit(option, text, subject))
    return Bound("timestamp", parse_time(option, text))


def parse_time(option: str, text: str) -> int:
    """Milliseconds since 1970, of that number as text or of a time in ISO form (without a zone it is local)."""
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
            raise InvalidInput(f"option {option}: it is for subject {next(iter(told))!r}, the query reads {subject!r}")
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


# What a node says


def extents_of(node: Node, subject: str) -> dict[int, Extent]:
    """What is there of each partition, now."""
    described = ask(node, DescribeSubject(subject), SubjectDescription)
    return {one.index: Extent(one.start_offset, one.end_offset) for one in described.partitions}


def resolve(
    node: Node, subject: str, extents: Mapping[int, Extent], option: str, bound: Bound, group: str | None
) -> ByPartition:
    """The offset of a bound in every partition. It may be outside of what is there: see `kept_within`."""
    match bound.kind:
        case "earliest":
            return {partition: extent.start for partition, extent in extents.items()}
        case "latest":
            return {partition: extent.end for partition, extent in extents.items()}
        case "timestamp":
            text = position_text(Position("timestamp", bound.timestamp_ms))
            found = ask(node, ResolvePosition(subject, text), Offsets).offsets
            # What came since the extents were asked for is not part of the query.
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
            f"{_listed(told)}; give one for each, -2 for the earliest and -1 for the latest"
        )
    places = {EARLIEST: "start", LATEST: "end"}
    return {
        partition: getattr(extents[partition], places[offset]) if offset in places else offset
        for partition, offset in sorted(told.items())
    }


def _listed(partitions: Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(partitions)))


# What is not there any more


def kept_within(
    subject: str, extents: Mapping[int, Extent], offsets: Mapping[int, int], fail_on_data_loss: bool
) -> ByPartition:
    """The same offsets; those that are outside of what is there raise NotFound, or are moved inside with a warning."""
    inside = {}
    for partition, offset in offsets.items():
        extent = extents.get(partition)
        if extent is None:
            raise NotFound(
                "partition", f"{subject}/{partition}", "offsets name it; was the subject deleted and created anew?"
            )
        inside[partition] = min(max(offset, extent.start), extent.end)
        if inside[partition] != offset:
            lose(subject, partition, offset, extent, fail_on_data_loss)
    return inside


def lose(subject: str, partition: int, offset: int, extent: Extent, fail_on_data_loss: bool) -> None:
    """An offset that is asked for is not there. Raises NotFound, or says so in the log."""
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
        f"the first that is there is {extent.start}, retention has removed those before; start at 'earliest', keep "
        "messages longer,"
        if offset < extent.start
        else f"the partition ends at {extent.end}; is it the subject and the server that this offset came from? Start "
        "at 'latest',"
    )
    raise NotFound(
        "offset",
        f"{subject}/{partition}@{offset}",
        f"{why} or set failOnDataLoss to false to go on with what there is",
    )


# Streams


def offsets_json(subject: str, offsets: Mapping[int, int]) -> dict[str, dict[str, int]]:
    """As Spark keeps them in the checkpoint. Always in the same order: Spark compares the texts."""
    return {subject: {str(partition): offsets[partition] for partition in sorted(offsets)}}


def parse_offsets(subject: str, told: Mapping[str, Mapping[str, int]]) -> ByPartition:
    """The reverse. InvalidInput if they are another subject's."""
    if subject not in told:
        raise InvalidInput(
            f"the checkpoint is one of subject {', '.join(map(repr, told))}, the query reads {subject!r}; "
            "use another checkpointLocation"
        )
    return {int(partition): offset for partition, offset in told[subject].items()}


def admitted(start: Mapping[int, int], end: Mapping[int, int], limit: int) -> ByPartition:
    """Where a micro-batch of `limit` messages ends: each partition gives as much of it as it has of all that waits."""
    waiting = {partition: max(0, offset - start.get(partition, 0)) for partition, offset in end.items()}
    total = sum(waiting.values())
    if total <= limit:
        return dict(end)
    taken = {partition: limit * count // total for partition, count in waiting.items()}
    left = limit - sum(taken.values())
    # Less than one for each partition is left over; those that wait for most are the first to get it.
    for partition in sorted(waiting, key=lambda one: taken[one] - waiting[one])[:left]:
        taken[partition] += 1
    return {partition: start.get(partition, 0) + count for partition, count in taken.items()}
