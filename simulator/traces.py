"""The rows of a trace from a history: the audit can judge the history that the order checker judged.

The time of an event is its place in the history. The rows are tuples in the order of `RUN_SCHEMA` and `EVENT_SCHEMA` of
`inturn.spark.audit.traces`; events of the node's observer are marked as such, because these events are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from inturn.consumer.trace import ALONE, CRASHED, OF_KEY, OF_PARTITION, RESULTS, key_hash
from inturn.model.message import tag_filter
from inturn.testing.history import (
    ClaimGranted,
    Committed,
    ConsumerCrashed,
    Event,
    GroupFiltered,
    HandlerEnd,
    HandlerStart,
    KeyResumed,
    KeySkipped,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    SendAcknowledged,
)

TICK_NS = 1000
_Open: TypeAlias = tuple[str, str, int, int, str, int]  # subject, group, partition, offset, consumer, epoch


@dataclass(frozen=True, slots=True)
class TraceRows:
    """`sent` holds (subject, partition, offset, key, message id) of every acknowledgement."""

    runs: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    sent: list[tuple[Any, ...]] = field(default_factory=list)


def trace_rows(history: Iterable[Event], *, order: str, subject: str | None = None) -> TraceRows:
    """The rows of the history. `subject` replaces the subject of the history: several histories fit into an audit.
    Messages that the tags of the group filter out are not in `sent`."""
    rows = TraceRows()
    history = list(history)
    unwanted = unwanted_of(history)
    running: dict[_Open, tuple[int, HandlerStart]] = {}
    for index, event in enumerate(history):
        at_ns = index * TICK_NS
        match event:
            case SendAcknowledged() if (event.partition, event.offset) in unwanted:
                pass
            case SendAcknowledged():
                name = event.subject if subject is None else subject
                rows.sent.append((name, event.partition, event.offset, event.key, event.message_id))
            case HandlerStart():
                running[_place(event)] = at_ns, event
            case HandlerEnd():
                started = running.pop(_place(event), None)
                if started is not None:
                    rows.runs.append(_run(*started, at_ns, RESULTS.index(event.result), order, subject))
            case ConsumerCrashed():
                for place in [place for place in running if place[4] == event.consumer]:
                    rows.runs.append(_run(*running.pop(place), at_ns, CRASHED, order, subject))
            case _:
                rows.events.extend(_events(event, at_ns, index, order, subject))
    for name, group in sorted({(row[0], row[1]) for row in (*rows.runs, *rows.events)}):
        nothing: tuple[Any, ...] = (-1, 0, -1, None, order, [], [], [], False, True)
        rows.events.extend(
            (name, group, "", index, kind, 0, 0, *nothing) for index, kind in enumerate(("opened", "closed"))
        )
    rows.runs.extend(_run(*started, None, None, order, subject) for started in running.values())
    return rows


def unwanted_of(history: Iterable[Event]) -> set[tuple[int, int]]:
    """The messages that the tags of the group filter out, by partition and offset, in the history of a group."""
    history = list(history)
    found: set[tuple[int, int]] = set()
    for known in (event for event in history if isinstance(event, GroupFiltered)):
        tags = tag_filter(known.tags)
        found |= {(partition, offset) for partition, offsets in known.unwanted.items() for offset in offsets}
        for event in history:
            if isinstance(event, SendAcknowledged) and tags is not None and not tags.wants(event.tags):
                found.add((event.partition, event.offset))
    return found


def _place(event: HandlerStart | HandlerEnd) -> _Open:
    return event.subject, event.group, event.partition, event.offset, event.consumer, event.epoch


def _run(
    start_ns: int, start: HandlerStart, end_ns: int | None, result: int | None, order: str, subject: str | None
) -> tuple[Any, ...]:
    hashed = None if start.key is None else key_hash(start.key)
    kind = OF_PARTITION if order == "partition" else ALONE if start.key is None or order == "none" else OF_KEY
    where = start.subject if subject is None else subject, start.group, start.partition, start.offset
    who = start.consumer, start.epoch, start.attempt
    return *where, kind, hashed, *who, result, start_ns, end_ns, start_ns // TICK_NS


def _events(event: Event, at_ns: int, index: int, order: str, subject: str | None) -> list[tuple[Any, ...]]:
    def row(
        kind: str, partition: int, owner: str = "", epoch: int = 0, offset: int = -1, **more: Any
    ) -> tuple[Any, ...]:
        name = getattr(event, "subject", "") if subject is None else subject
        who = name, getattr(event, "group", ""), owner, index, kind, at_ns, at_ns, partition, epoch, offset
        sets = more.get("finished", []), more.get("parked", []), more.get("unparked", [])
        return *who, more.get("key_hash"), more.get("why", ""), *sets, False, True

    match event:
        case LeaseGranted():
            return [row("granted", event.partition, event.owner, event.epoch)]
        case ClaimGranted():
            return [row("claimed", event.partition, event.claimant, event.epoch)]
        case LeaseEnded():
            return [row("ended", event.partition, event.owner, event.epoch, why=event.why)]
        case Committed():
            sets = {"finished": list(event.finished), "parked": list(event.parked), "unparked": list(event.unparked)}
            return [row("committed", event.partition, event.owner, event.epoch, event.offset, **sets)]
        case KeySkipped():
            return [row("skipped", event.partition, offset=event.offset)]
        case KeyResumed():
            hashed = None if event.key is None else key_hash(event.key)
            return [row("resumed", event.partition, key_hash=hashed)]
        case OffsetsReset():
            return [row("reset", partition, offset=offset) for partition, offset in event.offsets.items()]
    return []
