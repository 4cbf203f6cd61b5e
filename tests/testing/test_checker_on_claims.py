"""The order checker on histories with several claimants under the same lease, each claimant on different slots."""

from __future__ import annotations

from itertools import count

import pytest

from inturn.model.routing import ALL_SLOTS, SLOT_COUNT, SlotSet, slot_of
from inturn.testing.checker import ViolationKind
from tests.testing.checker_story import Story, broken, kept

LEFT = SlotSet.of(range(512))
RIGHT = SlotSet.of(range(512, SLOT_COUNT))


def key_in(slots: SlotSet) -> bytes:
    return next(key for key in (b"key-%d" % number for number in count()) if slot_of(key) in slots)


K, L = key_in(LEFT), key_in(RIGHT)


def drain() -> Story:
    """The keeper has the lease with epoch 1.

    Offsets 0 to 3 have a key on the left, offsets 10 to 13 a key on the right.
    """
    return Story(0, 1, 2, 3, key=K).sent(10, 11, 12, 13, key=L).grant("keeper", 1)


def test_two_claimants_of_different_slots_may_run_at_once() -> None:
    story = drain().claim("a", LEFT).claim("b", RIGHT)
    story.start("a", 1, 0).start("b", 1, 10).end("b", 1, 10).end("a", 1, 0)
    story.run("a", 1, 1, 2, 3).run("b", 1, 11, 12, 13)
    story.commit("keeper", 1, 4, 10, 11).commit("keeper", 1, 14)
    verdict = kept(story, order="key")
    assert verdict.finished == 8
    assert verdict.duplicates == 0


def test_two_claimants_of_one_key_at_once_overlap() -> None:
    """The claims do not matter: the second claimant has not lost the claim, so there is no excuse."""
    story = drain().claim("a", LEFT).claim("b", RIGHT)
    story.start("a", 1, 0).start("b", 1, 1)
    broken(
        story,
        ViolationKind.OVERLAP,
        ViolationKind.STALE_START,
        ViolationKind.SKIPPED,
        order="key",
        complete=False,
    )


def test_a_run_that_is_left_over_from_a_lost_claim_is_a_named_overlap() -> None:
    story = drain().claim("a", LEFT).start("a", 1, 0).claim("b", LEFT)
    story.start("b", 1, 0).end("a", 1, 0).end("b", 1, 0)
    verdict = kept(story, order="key", complete=False)
    assert verdict.overlaps_after_lease_loss == 1
    assert verdict.duplicates == 1


def test_a_run_left_over_is_excused_also_beside_the_successor_of_the_successor() -> None:
    story = drain().claim("a", LEFT).start("a", 1, 0).claim("b", LEFT).give_back("b").claim("c", LEFT).start("c", 1, 0)
    assert kept(story, order="key", complete=False).overlaps_after_lease_loss == 1


def test_a_run_of_a_claim_that_was_given_back_is_no_left_over() -> None:
    story = drain().claim("a", LEFT).start("a", 1, 0).give_back("a").claim("b", LEFT).start("b", 1, 0)
    broken(story, ViolationKind.OVERLAP, order="key", complete=False)


def test_a_claim_of_other_slots_excuses_nothing() -> None:
    story = drain().claim("a", LEFT).start("a", 1, 0).claim("b", RIGHT).claim("c", RIGHT).start("c", 1, 0)
    broken(story, ViolationKind.OVERLAP, ViolationKind.STALE_START, order="key", complete=False)


def test_a_run_of_the_same_claimant_is_never_left_over() -> None:
    story = drain().claim("a", LEFT).start("a", 1, 0).claim("a", LEFT).start("a", 1, 1)
    broken(story, ViolationKind.OVERLAP, ViolationKind.SKIPPED, order="key", complete=False)


@pytest.mark.parametrize("how", ["lost", "given back"])
def test_nothing_is_started_after_a_claim_is_over(how: str) -> None:
    story = drain().claim("a", LEFT).run("a", 1, 0)
    if how == "lost":
        story.claim("b", LEFT)
    else:
        story.give_back("a")
    verdict = broken(story.run("a", 1, 1), ViolationKind.STALE_START, order="key", complete=False)
    assert how in str(verdict)


def test_nothing_is_started_outside_of_a_claim() -> None:
    story = drain().claim("a", LEFT).run("a", 1, 10)
    verdict = broken(story, ViolationKind.STALE_START, order="key", complete=False)
    assert f"of slot {slot_of(L)}, which it had not claimed" in str(verdict)


def test_the_owner_itself_starts_nothing_that_others_have_claimed() -> None:
    story = drain().claim("a", LEFT).run("keeper", 1, 10)
    kept(story, order="key", complete=False)
    story.run("keeper", 1, 0)
    verdict = broken(story, ViolationKind.STALE_START, order="key", complete=False)
    assert "which 'a' had claimed" in str(verdict)


def test_whoever_claims_next_begins_anew() -> None:
    """With the same epoch: uncommitted messages are repeated, and so are attempts that were not stored."""
    story = drain().claim("a", LEFT)
    story.run("a", 1, 0, 1, attempt=1).fail("a", 1, 2, attempt=1).crash("a")
    story.claim("b", LEFT).run("b", 1, 0, 1, attempt=1).run("b", 1, 2, 3, attempt=1)
    kept(story, order="key", complete=False)


def test_the_same_claimant_begins_anew_when_it_claims_again() -> None:
    story = drain().claim("a", LEFT).run("a", 1, 0, 1)
    story.claim("a", LEFT).run("a", 1, 0, 1, 2)
    kept(story, order="key", complete=False)


def test_within_a_claim_nothing_is_repeated() -> None:
    story = drain().claim("a", LEFT).run("a", 1, 0, 1, 0)
    broken(story, ViolationKind.OUT_OF_ORDER, order="key", complete=False)


def test_what_was_committed_is_not_repeated_by_whoever_claims_next() -> None:
    story = drain().claim("a", LEFT).run("a", 1, 0, 1).commit("keeper", 1, 2)
    story.claim("b", LEFT).run("b", 1, 1)
    broken(story, ViolationKind.REPEATED, order="key", complete=False)


def test_nothing_is_skipped_by_whoever_claims_next() -> None:
    story = drain().claim("a", LEFT).run("a", 1, 0).claim("b", LEFT).run("b", 1, 2)
    broken(story, ViolationKind.SKIPPED, order="key", complete=False)


def test_what_a_claimant_did_not_finish_is_not_committed() -> None:
    story = drain().claim("a", LEFT).claim("b", RIGHT).run("a", 1, 0).commit("keeper", 1, 1, 10)
    broken(story, ViolationKind.PREMATURE_COMMIT, order="key", complete=False)


def test_a_claim_ends_with_its_lease() -> None:
    story = drain().claim("a", LEFT).run("a", 1, 0).takeover("keeper", 1, "c", 2).run("a", 1, 1)
    broken(story, ViolationKind.STALE_START, order="key", complete=False)


def test_claims_of_an_epoch_before_do_not_matter() -> None:
    story = drain().claim("a", LEFT).takeover("keeper", 1, "c", 2).run("c", 2, 0, 1, 2, 3, 10, 11, 12, 13)
    kept(story.commit("c", 2, 14), order="key")


def test_a_partition_may_be_claimed_as_a_whole() -> None:
    story = drain().claim("a", ALL_SLOTS).run("a", 1, 0, 1, 2, 3, 10).crash("a")
    story.claim("b", ALL_SLOTS).run("b", 1, 0, 1, 2, 3, 10, 11, 12, 13)
    kept(story.commit("keeper", 1, 14), order="partition")
