"""Claims: claimants that work on some slots of a partition, under the lease of a different member.

A claim is to slots as a lease is to a partition: exclusive, renewed by use, ended by a release or by a full life
without renewal. Claims are kept in memory only and belong to an epoch: the end of the lease ends its claims. After a
restart, a lease and all its possible claims count as just renewed. For a full life no slot can be claimed under such a
lease, and its holder can neither release nor acquire the lease. Former claimants claim again.
"""

from __future__ import annotations

from dataclasses import dataclass

from inturn.broker.leases import Lease, LeaseKey, LeaseTable
from inturn.model.errors import InvalidInput, LeaseHeld, StaleEpoch
from inturn.model.routing import SlotSet
from inturn.model.time import Clock
from inturn.protocol.commands import Claim, ClaimDescription
from inturn.protocol.observer import Observer
from inturn.store.groups import GroupRecord

REMEMBERED_LIVES = 10  # lives of a lease during which ended claims are remembered, to recognise late copies


@dataclass(slots=True)
class HeldClaim:
    claimant: str
    ask: int
    slots: SlotSet
    epoch: int  # of the lease
    deadline_s: float
    number: int = 0  # of the last accepted commit; late copies have no higher number
    done: int = 0
    is_over: bool = False  # released, or lost to a different claimant; remembered to recognise late copies


class ClaimTable:
    def __init__(self, leases: LeaseTable, clock: Clock, observer: Observer | None = None) -> None:
        self._leases = leases
        self._clock = clock
        self._observer = observer
        self._claims: dict[tuple[int, int], dict[str, HeldClaim]] = {}
        self._epochs: dict[tuple[int, int], int] = {}  # the epoch of the claims

    def acquire(self, key: LeaseKey, command: Claim) -> HeldClaim:
        """Grant the slots, or raise LeaseHeld. Raises StaleEpoch if the lease has ended, or for a late copy."""
        lease = self._leases.check(key, command.owner, command.epoch)
        slots = SlotSet.from_bytes(command.slots)
        if command.member == command.owner or not slots.bits:
            raise InvalidInput(
                f"claim of {len(slots)} slots of partition {key.partition} by {command.member!r}: claim at least one "
                "slot, with a name other than the name of the lease's owner"
            )
        now_s = self._clock.monotonic()
        claims = self._of(key, lease)
        known = claims.get(command.member)
        if known is not None and (known.ask > command.ask or (known.ask == command.ask and known.is_over)):
            raise StaleEpoch(key.group.name, str(key.partition), command.ask, known.ask)
        if known is None or known.ask < command.ask:
            if lease.is_wanted_back:
                raise StaleEpoch(key.group.name, str(key.partition), command.epoch, lease.epoch)
            if now_s < lease.claims_from_s:
                raise LeaseHeld(key.group.name, str(key.partition), "tasks from before a restart, maybe")
            for other in claims.values():
                if other.claimant != command.member and self._is_live(other, now_s) and other.slots.overlaps(slots):
                    raise LeaseHeld(key.group.name, str(key.partition), other.claimant)
            for other in claims.values():
                if other.slots.overlaps(slots):
                    other.is_over = True  # expired: its claimant is refused from now on
            for gone in [one for one in claims.values() if one.is_over and self._is_forgotten(lease, one, now_s)]:
                del claims[gone.claimant]
            known = claims[command.member] = HeldClaim(command.member, command.ask, slots, lease.epoch, now_s)
            if self._observer is not None:
                where = key.group.subject, key.group.name, key.partition
                self._observer.claim_granted(*where, command.member, lease.epoch, slots.to_bytes())
        self._renew(lease, known, now_s)
        return known

    def check(self, key: LeaseKey, claimant: str, epoch: int, ask: int | None = None) -> HeldClaim:
        """The claim, if held under this epoch and granted for this acquire number. Raises StaleEpoch."""
        lease = self._leases.get(key)
        claim = None if lease is None else self._of(key, lease).get(claimant)
        is_held = claim is not None and not claim.is_over and ask in (None, claim.ask)
        if lease is None or claim is None or not is_held or lease.epoch != epoch or lease.owner is None:
            raise StaleEpoch(key.group.name, str(key.partition), epoch, 0 if lease is None else lease.epoch)
        return claim

    def find(self, key: LeaseKey, claimant: str) -> HeldClaim | None:
        lease = self._leases.get(key)
        return None if lease is None else self._of(key, lease).get(claimant)

    def renew(self, key: LeaseKey, claimant: str, epoch: int) -> None:
        claim = self.check(key, claimant, epoch)
        lease = self._leases.get(key)
        assert lease is not None
        self._renew(lease, claim, self._clock.monotonic())

    def release(self, key: LeaseKey, claimant: str, epoch: int) -> None:
        self._end(key.group, key.partition, self.check(key, claimant, epoch))

    def release_all(self, group: GroupRecord, claimant: str) -> list[int]:
        """Release all claims of a claimant in the group, without a commit. Returns the partitions."""
        held = [
            (partition, claims[claimant])
            for (group_id, partition), claims in self._claims.items()
            if group_id == group.id and claimant in claims and not claims[claimant].is_over
        ]
        for partition, claim in held:
            self._end(group, partition, claim)
        return [partition for partition, _ in held]

    def call_back(self, key: LeaseKey) -> list[HeldClaim]:
        """Call back claims, because the owner wants to release the lease. Returns the claims that prevent the
        release."""
        claims = self.live(key)
        lease = self._leases.get(key)
        if lease is not None and (claims or self.may_be_forgotten(key)):
            lease.is_wanted_back = True
        return claims

    def may_be_forgotten(self, key: LeaseKey) -> bool:
        """Whether claimants of the time before a restart may still work under the lease."""
        lease = self._leases.get(key)
        return lease is not None and lease.owner is not None and self._clock.monotonic() < lease.claims_from_s

    def live(self, key: LeaseKey) -> list[HeldClaim]:
        """The live claims. The lease must not end before these claims."""
        lease = self._leases.get(key)
        if lease is None or lease.owner is None:
            return []
        now_s = self._clock.monotonic()
        return [claim for claim in self._of(key, lease).values() if self._is_live(claim, now_s)]

    def expires_at_s(self, key: LeaseKey, command: Claim) -> float | None:
        """The earliest time at which a refused claim may succeed."""
        lease = self._leases.get(key)
        if lease is None:
            return None
        slots = SlotSet.from_bytes(command.slots)
        others = [one for one in self.live(key) if one.claimant != command.member and one.slots.overlaps(slots)]
        return max([lease.claims_from_s, *(one.deadline_s for one in others)])

    def describe(self, key: LeaseKey) -> tuple[ClaimDescription, ...]:
        return tuple(
            ClaimDescription(key.partition, one.claimant, len(one.slots), one.done)
            for one in sorted(self.live(key), key=lambda one: one.claimant)
        )

    def _of(self, key: LeaseKey, lease: Lease) -> dict[str, HeldClaim]:
        """The claims of the present epoch of the lease. Drops claims of earlier epochs."""
        place = key.group.id, key.partition
        claims = self._claims.setdefault(place, {})
        if self._epochs.get(place) != lease.epoch:
            self._epochs[place] = lease.epoch
            claims.clear()
        return claims

    def _end(self, group: GroupRecord, partition: int, claim: HeldClaim) -> None:
        claim.is_over = True
        if self._observer is not None:
            self._observer.claim_ended(group.subject, group.name, partition, claim.claimant, claim.epoch)

    def _is_live(self, claim: HeldClaim, now_s: float) -> bool:
        return not claim.is_over and now_s < claim.deadline_s

    def _is_forgotten(self, lease: Lease, claim: HeldClaim, now_s: float) -> bool:
        return now_s >= claim.deadline_s + REMEMBERED_LIVES * lease.life_s

    def _renew(self, lease: Lease, claim: HeldClaim, now_s: float) -> None:
        claim.deadline_s = now_s + lease.life_s
        lease.deadline_s = max(lease.deadline_s, claim.deadline_s)
