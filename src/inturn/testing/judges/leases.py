"""The judge of leases: a single owner at a time, and a higher epoch with every grant. Claims are only recorded here."""

from __future__ import annotations

from inturn.model.routing import SlotSet
from inturn.testing.history import ClaimEnded, ClaimGranted, LeaseEnded, LeaseGranted
from inturn.testing.judges.case import Case
from inturn.testing.track import ClaimTrack, LeaseTrack
from inturn.testing.verdict import ViolationKind


class LeaseJudge:
    def __init__(self, case: Case) -> None:
        self._case = case
        self.grants = 0

    def grant(self, index: int, event: LeaseGranted) -> None:
        track = self._case.track(event.subject, event.group, event.partition)
        if track is None:
            return
        self.grants += 1
        before = track.lease
        if before is not None and before.ended_index is None:
            self._case.violation_on(
                track,
                ViolationKind.TWO_OWNERS,
                f"{track}: granted to {event.owner!r} (epoch {event.epoch}) while {before.owner!r} "
                f"(epoch {before.epoch}) still held it",
                (),
                (before.index, index),
            )
        if event.epoch <= track.epoch_max:
            self._case.violation_on(
                track,
                ViolationKind.EPOCH_NOT_RAISED,
                f"{track}: granted to {event.owner!r} with epoch {event.epoch}, "
                f"although epoch {track.epoch_max} had been granted before",
                (),
                (track.grants[track.epoch_max], index),
            )
        track.lease = LeaseTrack(index, event.owner, event.epoch)
        track.grants[event.epoch] = index
        track.epoch_max = max(track.epoch_max, event.epoch)

    def end(self, index: int, event: LeaseEnded) -> None:
        track = self._case.track(event.subject, event.group, event.partition)
        lease = None if track is None else track.lease
        if lease is not None and (lease.owner, lease.epoch) == (event.owner, event.epoch) and lease.ended_index is None:
            lease.ended_index = index

    def claim_grant(self, index: int, event: ClaimGranted) -> None:
        track = self._case.track(event.subject, event.group, event.partition)
        if track is not None:
            track.claim(ClaimTrack(index, event.claimant, event.epoch, SlotSet.from_bytes(event.slots)))

    def claim_end(self, index: int, event: ClaimEnded) -> None:
        track = self._case.track(event.subject, event.group, event.partition)
        claim = None if track is None else track.claim_of(event.claimant, event.epoch)
        if claim is not None and claim.ended_index is None:
            claim.ended_index = index
