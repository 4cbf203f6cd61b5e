"""The shared state of the judges: the arguments of `check`, the content of the logs, tracks and violations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from inturn.model.routing import SlotSet, slot_of
from inturn.testing.history import Event, GroupFiltered, Grown, HandlerStart, LeaseGranted, SendAcknowledged
from inturn.testing.track import LogTrack, Track, differ, name_message
from inturn.testing.verdict import Evidence, Violation, ViolationKind

StoredMessages: TypeAlias = Mapping[tuple[str, int, int], str | None]


class Case:
    def __init__(
        self,
        events: list[Event],
        subject: str | None,
        group: str | None,
        order: str,
        complete: bool,
        stored: StoredMessages | None,
    ) -> None:
        self.events = events
        self.subject, self.group = subject, group
        self.by_key, self.has_lanes = order == "key", order != "none"
        self.complete, self.stored = complete, stored
        self.logs: dict[tuple[str, int], LogTrack] = {}
        self.tracks: dict[tuple[str, str, int], Track | None] = {}  # None: excluded
        self.descents: dict[str, list[tuple[int, int, SlotSet]]] = {}  # by subject: child, parent, slots
        self.violations: list[Violation] = []
        self._elders: dict[tuple[str, int, bytes], tuple[int, ...]] = {}
        self._filters: dict[tuple[str, str], GroupFiltered] = {}  # by subject and group

    # The content of the logs. The order of the log counts, not the time of acknowledgements, so this is the first pass.

    def learn_logs(self) -> None:
        logs = self.logs
        for index, event in enumerate(self.events):
            if type(event) is SendAcknowledged:
                log = logs.get((event.subject, event.partition)) or self._log(event.subject, event.partition)
                if event.offset in log.acknowledged:
                    self._acknowledged_again(log, index, event)
                else:
                    log.acknowledged[event.offset] = index
                    log.messages[event.offset] = event
            elif type(event) is GroupFiltered:
                self._filters[event.subject, event.group] = event
            elif type(event) is HandlerStart:
                log = logs.get((event.subject, event.partition)) or self._log(event.subject, event.partition)
                log.seen.setdefault(event.offset, index)
            elif type(event) is Grown:
                self.descents[event.subject] = [
                    (child, parent, SlotSet.from_bytes(slots)) for child, parent, slots, _ in event.descents
                ]
        for subject, partition, offset in self.stored or ():
            self._log(subject, partition).stored.add(offset)
        if self.subject is not None:
            self.logs = {place: log for place, log in logs.items() if place[0] == self.subject}
        for (subject, _), log in self.logs.items():
            log.settle(self.events, self.by_key or subject in self.descents, self.stored is not None)

    def _log(self, subject: str, partition: int) -> LogTrack:
        return self.logs.setdefault((subject, partition), LogTrack())

    def _acknowledged_again(self, log: LogTrack, index: int, event: SendAcknowledged) -> None:
        before = log.messages[event.offset]
        if self.subject not in (None, event.subject) or not differ(before, event):
            return
        self.violation(
            ViolationKind.UNEXPECTED,
            f"subject {event.subject!r}, partition {event.partition}: offset {event.offset} was acknowledged for "
            f"{name_message(before)} and again for {name_message(event)}",
            (event.subject, None, event.partition),
            (event.offset,),
            (log.acknowledged[event.offset], index),
        )

    # Tracks.

    def track(self, subject: str, group: str, partition: int) -> Track | None:
        """The track of a group on a partition; None if `check` excludes the subject or group."""
        place = (subject, group, partition)
        if place not in self.tracks:
            wanted = self.subject in (None, subject) and self.group in (None, group)
            log = self.logs.get((subject, partition)) or LogTrack()
            self.tracks[place] = track = Track(subject, group, partition, log) if wanted else None
            known = self._filters.get((subject, group))
            if track is not None and known is not None:
                track.unwanted = log.unwanted(known.tags) | frozenset(known.unwanted.get(partition, ()))
        return self.tracks[place]

    def wanted_tracks(self) -> Iterator[Track]:
        return (track for track in self.tracks.values() if track is not None)

    def elders_of(self, subject: str, partition: int, key: bytes) -> tuple[int, ...]:
        """The former partitions of the key, oldest first."""
        found = self._elders.get((subject, partition, key))
        if found is None:
            slot, lineage = slot_of(key), [partition]
            for child, parent, slots in reversed(self.descents[subject]):
                if child == lineage[0] and slot in slots:
                    lineage.insert(0, parent)
            found = self._elders[subject, partition, key] = tuple(lineage[:-1])
        return found

    # Violations.

    def owner(self, index: int) -> str:
        event = self.events[index]
        assert isinstance(event, LeaseGranted)
        return event.owner

    def violation_on(
        self, track: Track, kind: ViolationKind, message: str, offsets: tuple[int, ...], indexes: tuple[int, ...]
    ) -> None:
        self.violation(kind, message, (track.subject, track.group, track.partition), offsets, indexes)

    def violation(
        self,
        kind: ViolationKind,
        message: str,
        place: tuple[str, str | None, int],
        offsets: tuple[int, ...],
        indexes: tuple[int, ...],
    ) -> None:
        evidence = tuple(Evidence(index, self.events[index]) for index in sorted(set(indexes)))
        subject, group, partition = place
        violation = Violation(
            kind=kind,
            message=message,
            subject=subject,
            group=group,
            partition=partition,
            offsets=offsets,
            evidence=evidence,
        )
        self.violations.append(violation)
