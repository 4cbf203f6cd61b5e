"""Bugs of claims: several claimants work on a partition under a single lease."""

from __future__ import annotations

from inturn.broker.broker import Broker
from inturn.broker.claims import ClaimTable
from inturn.broker.leases import LeaseKey
from inturn.consumer import claimant as claiming
from inturn.consumer.core import ConsumerCore
from inturn.consumer.partition_buffer import PartitionBuffer
from inturn.consumer.partition_state import PartitionState
from inturn.model.offsets import ClaimTracker
from simulator.seeded_bugs.bug import Bugs, Patch, edited

BUGS = Bugs()
_instead_of, _add, _add_edit = BUGS.instead_of, BUGS.add, BUGS.add_edit

_add_edit(
    "claims_overlap",
    "Slots are granted though a different claimant holds some of the slots.",
    ClaimTable,
    "acquire",
    "and other.slots.overlaps(slots):",
    "and False:",
)
_add_edit(
    "claims_are_granted_at_once_after_a_restart",
    "After a restart the node forgets all claims.",
    ClaimTable,
    "acquire",
    "if now_s < lease.claims_from_s:",
    "if False:",
)


@_instead_of(ClaimTable, "renew")
def claim_is_not_renewed_by_use(self: ClaimTable, key: LeaseKey, claimant: str, epoch: int) -> None:
    """A claim ends one lease life after the grant, though in use, and so does its lease."""
    self.check(key, claimant, epoch)


_add_edit(
    "claim_does_not_renew_the_lease",
    "While the owner of a lease is silent, the lease runs out under its claimants.",
    ClaimTable,
    "_renew",
    "lease.deadline_s = max(lease.deadline_s, claim.deadline_s)",
    "pass",
)
_add_edit(
    "lost_claim_is_used_on",
    "A claimant that has lost or released its claim may still commit and renew.",
    ClaimTable,
    "check",
    "not claim.is_over and ",
    "",
)
_add(
    "claims_outlive_their_lease",
    "broker",
    "A claim counts though its lease has a new owner by now.",
    Patch(ClaimTable, "_of", edited(ClaimTable._of, "self._epochs.get(place) != lease.epoch", "False")),
    Patch(ClaimTable, "check", edited(ClaimTable.check, "lease.epoch != epoch or lease.owner is None", "False")),
)
_add_edit(
    "lease_is_released_under_claims",
    "A lease is released though claimants work under the lease.",
    Broker,
    "release",
    "if claims:",
    "if False:",
)
_add_edit(
    "release_of_a_kept_lease_goes_back",
    "The progress in a release counts, though claimants have committed since.",
    PartitionState,
    "granted_progress",
    "low, 0, finished",
    "low, 1 << 40, finished",
)
_add_edit(
    "claimants_commit_replaces_what_is_finished",
    "The finished set of a claimant replaces the finished set of all claimants.",
    Broker,
    "_merged",
    "with_finished(place, progress.finished)",
    "place.offset, progress.finished",
)
_add(
    "claimants_offset_is_believed",
    "broker",
    "The offset in a claimant's commit counts like an owner's, though other slots are unfinished.",
    Patch(Broker, "_merged", edited(Broker._merged, "offset=offset", "offset=max(offset, progress.offset)")),
    Patch(ClaimTracker, "snapshot", edited(ClaimTracker.snapshot, "return self._first", "return self.low")),
)
_add_edit(
    "late_copy_of_a_claimants_commit_is_stored",
    "A commit of a claimant that comes again, late, is stored again: what failed then has failed now.",
    Broker,
    "_is_late",
    "progress.number <= claim.number",
    "False",
)
_add_edit(
    "former_claim_is_taken_for_the_present_one",
    "A commit under a lost claim counts under the new claim of the claimant.",
    ClaimTable,
    "check",
    "ask in (None, claim.ask)",
    "True",
)
_add(
    "slots_are_not_chosen",
    "broker",
    "A claimant gets and handles the messages of all slots.",
    Patch(Broker, "_read", edited(Broker._read, "if not slots.is_all:", "if False:")),
    Patch(claiming, "_cut", lambda answer, _: answer),
)
_add_edit(
    "parked_keys_are_not_told_to_claimants",
    "A claimant does not know which of its keys are parked.",
    Broker,
    "claim",
    "tuple(one for one in stored.lots if slot_of(one.key) in slots)",
    "()",
)
_add_edit(
    "parked_keys_are_told_to_all_claimants",
    "Every claimant gets all parked keys, and handles them.",
    Broker,
    "claim",
    "tuple(one for one in stored.lots if slot_of(one.key) in slots)",
    "stored.lots",
)
_add(
    "others_messages_are_told_as_finished",
    "consumer",
    "A claimant reports the passed-over messages of other claimants as finished.",
    Patch(
        ClaimTracker,
        "leave_to_others",
        edited(ClaimTracker.leave_to_others, "self._finished |= others", "self.add(others)"),
    ),
)
_add_edit(
    "bound_is_one_too_high",
    "A consumer that is to stop at an offset handles the message there, too.",
    PartitionBuffer,
    "bounded",
    "max(self.until, self.pull_offset)",
    "max(self.until + 1, self.pull_offset)",
)
_add_edit(
    "batches_behind_the_bound_are_gone_over",
    "Offsets between the bound and the next pulled batch count as a gap in the log.",
    ConsumerCore,
    "_pulled",
    "state.skip_to(buffer.bounded(header.base_offset))",
    "state.skip_to(header.base_offset)",
)
