"""Bugs of claims: several work on one partition under one lease."""

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
    "Slots are claimed though another has some of them.",
    ClaimTable,
    "acquire",
    "and other.slots.overlaps(slots):",
    "and False:",
)
_add_edit(
    "claims_are_granted_at_once_after_a_restart",
    "After a restart the node believes that nobody has claimed anything.",
    ClaimTable,
    "acquire",
    "if now_s < lease.claims_from_s:",
    "if False:",
)


@_instead_of(ClaimTable, "renew")
def claim_is_not_renewed_by_use(self: ClaimTable, key: LeaseKey, claimant: str, epoch: int) -> None:
    """A claim is over a life after it was granted, whoever uses it, and so is its lease."""
    self.check(key, claimant, epoch)


_add_edit(
    "claim_does_not_renew_the_lease",
    "While the owner of a lease is silent, the lease runs out under those who work under it.",
    ClaimTable,
    "_renew",
    "lease.deadline_s = max(lease.deadline_s, claim.deadline_s)",
    "pass",
)
_add_edit(
    "lost_claim_is_used_on",
    "Who has lost its claim to another, or given it back, may commit and renew it all the same.",
    ClaimTable,
    "check",
    "not claim.is_over and ",
    "",
)
_add(
    "claims_outlive_their_lease",
    "broker",
    "A claim counts though the lease that it was under is another's by now.",
    Patch(ClaimTable, "_of", edited(ClaimTable._of, "self._epochs.get(place) != lease.epoch", "False")),
    Patch(ClaimTable, "check", edited(ClaimTable.check, "lease.epoch != epoch or lease.owner is None", "False")),
)
_add_edit(
    "lease_is_released_under_claims",
    "A lease is given back though others work under it.",
    Broker,
    "release",
    "if claims:",
    "if False:",
)
_add_edit(
    "release_of_a_kept_lease_goes_back",
    "What its owner says when it gives back a lease counts, though others have committed under it since.",
    PartitionState,
    "granted_progress",
    "low, 0, finished",
    "low, 1 << 40, finished",
)
_add_edit(
    "claimants_commit_replaces_what_is_finished",
    "What one claimant has finished is stored in place of what all have.",
    Broker,
    "_merged",
    "with_finished(place, progress.finished)",
    "place.offset, progress.finished",
)
_add(
    "claimants_offset_is_believed",
    "broker",
    "A claimant tells how far it is, as an owner does, and it is believed, though the rest is not its business.",
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
    "What a claimant sent under a claim that it had lost counts under the one that it has now.",
    ClaimTable,
    "check",
    "ask in (None, claim.ask)",
    "True",
)
_add(
    "slots_are_not_chosen",
    "broker",
    "A claimant is given the messages of all slots, and takes them.",
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
    "Every claimant is told of all keys that are parked, and looks after them.",
    Broker,
    "claim",
    "tuple(one for one in stored.lots if slot_of(one.key) in slots)",
    "stored.lots",
)
_add(
    "others_messages_are_told_as_finished",
    "consumer",
    "A claimant tells of the messages of others, which it passes over, that they are finished.",
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
    "What lies between the bound and the next batch that was pulled counts as a gap in the log.",
    ConsumerCore,
    "_pulled",
    "state.skip_to(buffer.bounded(header.base_offset))",
    "state.skip_to(header.base_offset)",
)
