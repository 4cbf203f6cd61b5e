"""Finished sets, parking lots, skips and attempts: every seeded bug beside the closest legal neighbour."""

from __future__ import annotations

import time

import pytest

from inturn.testing.checker import ViolationKind
from inturn.testing.history import Committed, HandlerResult, KeySkipped, LeaseGranted
from tests.testing.checker_story import Order, Story, broken, kept

K = ViolationKind
BOTH_ORDERS: list[Order] = ["partition", "key"]


def two_keys() -> Story:
    """Offsets 1, 3, 5 of key k, and 2, 4, 6 of a second key. The consumer "a" has the lease."""
    return Story(1, 3, 5).sent(2, 4, 6, key=b"other").grant("a", 1)


def parked() -> Story:
    """Offset 1 of key k failed, and the whole key is parked."""
    return Story(1, 2, 3).grant("a", 1).fail("a", 1, 1).commit("a", 1, 4, park=(1, 2, 3))


# Finished sets.


def test_a_claim_of_what_is_finished_is_fine_and_need_not_run_again() -> None:
    story = two_keys().run("a", 1, 2, 4).commit("a", 1, 1, 2, 4).crash("a").takeover("a", 1, "b", 2)
    verdict = kept(story.run("b", 2, 1, 6, 3, 5).commit("b", 2, 7), "key")
    assert verdict.duplicates == 0


def test_a_claim_of_a_running_message_is_premature() -> None:
    story = two_keys().run("a", 1, 2).start("a", 1, 4).commit("a", 1, 1, 2, 4).end("a", 1, 4).run("a", 1, 1, 3, 5, 6)
    assert broken(story, K.PREMATURE_COMMIT, order="key").violations[0].offsets == (4,)


def test_a_premature_claim_is_reported_once_although_each_commit_repeats_it() -> None:
    story = two_keys().start("a", 1, 2)
    for _ in range(3):
        story.commit("a", 1, 1, 2)
    verdict = broken(story.end("a", 1, 2).run("a", 1, 1, 3, 4, 5, 6).commit("a", 1, 7), K.PREMATURE_COMMIT, order="key")
    assert len(verdict.violations) == 1


def test_a_claim_does_not_rely_on_a_leftover_handler_of_an_older_epoch() -> None:
    story = two_keys().start("a", 1, 2).takeover("a", 1, "b", 2).start("b", 2, 2).end("a", 1, 2)
    broken(story.commit("b", 2, 1, 2).end("b", 2, 2), K.PREMATURE_COMMIT, order="key", complete=False)


def test_a_claim_relies_on_what_was_finished_before_its_lease() -> None:
    story = two_keys().run("a", 1, 2).takeover("a", 1, "b", 2).commit("b", 2, 1, 2)
    kept(story, "key", complete=False)


def test_a_claim_of_an_offset_at_which_nothing_is_stored_is_fine() -> None:
    kept(Story(1, 5).grant("a", 1).run("a", 1, 1).commit("a", 1, 2, 3, 4).run("a", 1, 5))


@pytest.mark.parametrize("order", ["partition", "key", "none"])
def test_a_claimed_message_that_runs_again_in_a_new_epoch_is_repeated(order: Order) -> None:
    story = Story(1).sent(2, key=b"other").grant("a", 1).run("a", 1, 1, 2).commit("a", 1, 1, 1, 2).crash("a")
    verdict = broken(story.takeover("a", 1, "b", 2).run("b", 2, 2), K.REPEATED, order=order)
    assert [type(item.event).__name__ for item in verdict.violations[0].evidence] == ["Committed", "HandlerStart"]


def test_a_message_that_was_finished_but_not_claimed_may_run_again_in_a_new_epoch() -> None:
    story = Story(1).sent(2, key=b"other").grant("a", 1).run("a", 1, 2).commit("a", 1, 1).crash("a")
    assert kept(story.takeover("a", 1, "b", 2).run("b", 2, 2, 1), "key").duplicates == 1


def test_a_claim_counts_even_if_a_later_commit_leaves_it_out() -> None:
    story = two_keys().run("a", 1, 2).commit("a", 1, 1, 2).commit("a", 1, 1).takeover("a", 1, "b", 2).run("b", 2, 2)
    broken(story, K.REPEATED, order="key", complete=False)


def test_each_message_below_a_commit_that_runs_again_is_repeated() -> None:
    story = Story(1, 2, 3).grant("a", 1).run("a", 1, 1, 2, 3).commit("a", 1, 3).takeover("a", 1, "b", 2)
    verdict = broken(story.run("b", 2, 1, 2, 3), K.REPEATED)
    assert [violation.offsets for violation in verdict.violations] == [(1,), (2,)]


def test_a_claimed_message_that_runs_again_in_its_epoch_is_repeated_and_out_of_order() -> None:
    story = two_keys().run("a", 1, 2).commit("a", 1, 1, 2).run("a", 1, 2)
    broken(story, K.REPEATED, K.OUT_OF_ORDER, order="key", complete=False)


def test_a_rollback_does_not_go_back_to_a_claimed_message() -> None:
    story = two_keys().run("a", 1, 2).commit("a", 1, 1, 2).run("a", 1, 4, result="rollback").run("a", 1, 2, 4)
    broken(story, K.REPEATED, order="key", complete=False)


def test_a_rollback_may_go_back_to_what_is_not_claimed() -> None:
    story = two_keys().run("a", 1, 2).commit("a", 1, 1, 2).run("a", 1, 4).run("a", 1, 6, result="rollback")
    kept(story.run("a", 1, 4, 6), "key", complete=False)


def test_a_reset_allows_claimed_messages_to_run_again() -> None:
    story = two_keys().run("a", 1, 2, 4, 6).commit("a", 1, 1, 2, 4, 6).lease_end("a", 1, "released").reset(3)
    kept(story.grant("b", 2).run("b", 2, 4, 6, 3, 5).commit("b", 2, 7), "key")


# Parking.


@pytest.mark.parametrize("order", ["partition", "key", "none"])
def test_parked_messages_are_counted_and_not_lost(order: Order) -> None:
    verdict = kept(parked(), order)
    assert (verdict.parked, verdict.skipped, verdict.finished) == (3, 0, 0)
    assert str(verdict).endswith(", 3 parked")


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_parked_key_is_resumed_in_the_same_epoch(order: Order) -> None:
    story = parked().run("a", 1, 1, 2).commit("a", 1, 4, unpark=(1, 2)).run("a", 1, 3).commit("a", 1, 4, unpark=(3,))
    assert kept(story, order).parked == 0


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_parked_key_is_resumed_after_a_hand_over(order: Order) -> None:
    story = parked().lease_end("a", 1, "released").grant("b", 2).run("b", 2, 1).commit("b", 2, 4, unpark=(1,))
    story.takeover("b", 2, "c", 3).run("c", 3, 2, 3).commit("c", 3, 4, unpark=(2, 3))
    kept(story, order)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_crash_before_the_lot_was_committed_repeats_its_head(order: Order) -> None:
    story = parked().run("a", 1, 1, 2).crash("a").takeover("a", 1, "b", 2).run("b", 2, 1, 2, 3)
    assert kept(story.commit("b", 2, 4, unpark=(1, 2, 3)), order).duplicates == 2


def test_a_parked_message_that_fails_again_is_repeated() -> None:
    kept(parked().fail("a", 1, 1).run("a", 1, 1, 2, 3).commit("a", 1, 4, unpark=(1, 2, 3)), "key")


def test_a_key_parked_by_request_goes_on_behind_what_had_succeeded() -> None:
    story = Story(1, 2, 3).grant("a", 1).run("a", 1, 1).commit("a", 1, 4, park=(2, 3))
    kept(story.run("a", 1, 2, 3).commit("a", 1, 4, unpark=(2, 3)), "key")


def test_parked_messages_above_the_committed_offset_are_claimed_by_the_finished_set() -> None:
    story = two_keys().fail("a", 1, 2).commit("a", 1, 1, 2, 4, 6, park=(2, 4, 6)).takeover("a", 1, "b", 2)
    kept(story.run("b", 2, 2, 1, 3, 4, 5, 6).commit("b", 2, 7, unpark=(2, 4, 6)), "key")


def test_a_message_parked_without_being_claimed_may_be_parked_again_and_runs_once() -> None:
    story = two_keys().fail("a", 1, 2).commit("a", 1, 1, park=(2,)).takeover("a", 1, "b", 2)
    story.commit("b", 2, 1, 2, 4, park=(2, 4)).run("b", 2, 2, 4).commit("b", 2, 1, unpark=(2, 4))
    kept(story, "key", complete=False)
    broken(story.takeover("b", 2, "c", 3).run("c", 3, 2), K.REPEATED, order="key", complete=False)


def test_a_commit_past_a_failed_message_that_is_parked_only_later_is_premature() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1).commit("a", 1, 2).commit("a", 1, 2, park=(1,))
    broken(story, K.PREMATURE_COMMIT, K.LOST, order="key")


def test_a_later_message_of_a_parked_key_that_is_neither_parked_nor_finished_may_not_be_passed() -> None:
    story = Story(1, 2).grant("a", 1).fail("a", 1, 1).commit("a", 1, 3, park=(1,))
    assert broken(story, K.PREMATURE_COMMIT, K.LOST, order="key").violations[0].offsets == (2,)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_newer_message_that_runs_before_the_parking_lot_skips_it(order: Order) -> None:
    story = parked().sent(4).run("a", 1, 4)
    verdict = broken(story, K.SKIPPED, order=order)
    assert verdict.violations[0].offsets == (1, 2, 3)
    assert "parking lot" in verdict.violations[0].message


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_lot_that_is_resumed_after_newer_messages_is_out_of_order(order: Order) -> None:
    story = parked().sent(4).run("a", 1, 4, 1, 2, 3).commit("a", 1, 5, unpark=(1, 2, 3))
    broken(story, K.SKIPPED, K.OUT_OF_ORDER, order=order)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_lot_that_is_resumed_by_a_successor_after_newer_messages_was_skipped(order: Order) -> None:
    story = parked().sent(4).takeover("a", 1, "b", 2).run("b", 2, 4).takeover("b", 2, "c", 3).run("c", 3, 1, 2, 3)
    broken(story, K.SKIPPED, order=order)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_lot_that_is_resumed_from_its_middle_is_skipped(order: Order) -> None:
    verdict = broken(parked().run("a", 1, 2, 1, 3), K.SKIPPED, K.OUT_OF_ORDER, order=order)
    assert verdict.violations[0].offsets == (1,)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_failed_message_of_a_lot_is_not_passed(order: Order) -> None:
    broken(parked().fail("a", 1, 1).run("a", 1, 2), K.SKIPPED, order=order)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_failed_message_of_a_lot_is_not_passed_although_an_older_epoch_had_finished_it(order: Order) -> None:
    story = parked().run("a", 1, 1).takeover("a", 1, "b", 2).fail("b", 2, 1).run("b", 2, 2)
    broken(story, K.SKIPPED, order=order)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_what_an_older_epoch_finished_does_not_count_for_whoever_parks_it(order: Order) -> None:
    story = (
        Story(1, 2).grant("a", 1).run("a", 1, 1).takeover("a", 1, "b", 2).fail("b", 2, 1).commit("b", 2, 2, park=(1,))
    )
    assert broken(story.run("b", 2, 2), K.SKIPPED, order=order).parked == 1


def test_newer_messages_go_to_the_end_of_a_lot_that_is_being_resumed() -> None:
    story = parked().start("a", 1, 1).sent(4).commit("a", 1, 5, park=(4,)).end("a", 1, 1).run("a", 1, 2, 3, 4)
    kept(story.commit("a", 1, 5, unpark=(1, 2, 3, 4)).sent(5).run("a", 1, 5).commit("a", 1, 6), "key")


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_two_messages_of_one_lot_do_not_overlap(order: Order) -> None:
    broken(parked().start("a", 1, 1, 2).end("a", 1, 1).end("a", 1, 2), K.OVERLAP, K.SKIPPED, order=order)


@pytest.mark.parametrize("order", ["partition", "key", "none"])
def test_a_message_that_came_out_of_the_lot_is_done(order: Order) -> None:
    story = parked().run("a", 1, 1).commit("a", 1, 4, unpark=(1,)).takeover("a", 1, "b", 2).run("b", 2, 1, 2, 3)
    assert broken(story, K.REPEATED, order=order).violations[0].offsets == (1,)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_done_message_is_not_parked_to_run_again(order: Order) -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1).fail("a", 1, 2).commit("a", 1, 2).takeover("a", 1, "b", 2)
    broken(story.commit("b", 2, 3, park=(1, 2)).run("b", 2, 1, 2), K.REPEATED, order=order)


@pytest.mark.parametrize("order", ["partition", "key", "none"])
def test_a_message_is_not_taken_out_of_the_lot_before_it_is_finished(order: Order) -> None:
    story = parked().start("a", 1, 1).commit("a", 1, 4, unpark=(1,)).end("a", 1, 1).run("a", 1, 2, 3)
    verdict = broken(story, K.PREMATURE_COMMIT, order=order)
    assert "took offset 1 out of the parking lot" in verdict.violations[0].message


def test_a_message_that_fell_out_of_the_lot_unfinished_is_lost() -> None:
    story = parked().commit("a", 1, 4, unpark=(1,)).run("a", 1, 2, 3)
    broken(story, K.PREMATURE_COMMIT, K.SKIPPED, K.LOST, order="key")


def test_taking_out_what_only_a_leftover_handler_finished_is_premature() -> None:
    story = parked().start("a", 1, 1).takeover("a", 1, "b", 2).start("b", 2, 1).end("a", 1, 1)
    broken(story.commit("b", 2, 4, unpark=(1,)).end("b", 2, 1), K.PREMATURE_COMMIT, order="key")


def test_a_commit_that_says_again_what_came_out_of_the_lot_changes_nothing() -> None:
    story = parked().run("a", 1, 1).commit("a", 1, 4, unpark=(1,)).commit("a", 1, 4, unpark=(1,))
    assert kept(story, "key").parked == 2


def test_a_message_that_went_through_the_lot_between_two_commits_is_done() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1).run("a", 1, 1).commit("a", 1, 2, park=(1,), unpark=(1,))
    assert kept(story, "key").parked == 0
    broken(story.takeover("a", 1, "b", 2).run("b", 2, 1), K.REPEATED, order="key")


def test_a_message_that_runs_from_the_lot_before_its_parking_is_recorded_is_finished() -> None:
    story = Story(1, 2).grant("a", 1).fail("a", 1, 1).run("a", 1, 1).commit("a", 1, 3, park=(1, 2))
    kept(story.run("a", 1, 2).commit("a", 1, 3, unpark=(1, 2)), "key")


def test_a_reset_forgets_the_lots() -> None:
    story = parked().lease_end("a", 1, "released").reset(2).grant("b", 2)
    broken(story, K.LOST, order="key")
    assert kept(story.run("b", 2, 2, 3).commit("b", 2, 4), "key").parked == 0


def test_a_lot_follows_its_key_to_another_partition() -> None:
    story = parked().run("a", 1, 1)
    story.history.record(LeaseGranted("s", "g", 1, "a", 9))
    story.history.record(Committed("s", "g", 1, "a", 9, 0, (), (), ((0, 1),)))
    assert kept(story, "key").parked == 2
    story.history.record(Committed("s", "g", 1, "a", 9, 0, (), (), ((0, 2),)))
    verdict = broken(story, K.PREMATURE_COMMIT, K.LOST, order="key")
    assert (verdict.violations[0].partition, verdict.violations[0].offsets) == (0, (2,))


# Parking under order by partition: other keys continue.


def test_other_keys_go_on_behind_a_parked_message_of_their_partition() -> None:
    story = two_keys().fail("a", 1, 1).commit("a", 1, 2, 3, 5, park=(1, 3, 5)).run("a", 1, 2, 4)
    story.run("a", 1, 1, 3).run("a", 1, 6).run("a", 1, 5).commit("a", 1, 7, unpark=(1, 3, 5))
    kept(story, "partition")
    kept(story, "key")


def test_the_partition_goes_on_after_its_failed_message_was_finished_in_the_lot() -> None:
    story = two_keys().fail("a", 1, 1).commit("a", 1, 2, park=(1,)).run("a", 1, 1).commit("a", 1, 2, unpark=(1,))
    kept(story.run("a", 1, 2, 3, 4, 5, 6).commit("a", 1, 7), "partition")
    story = Story(1, 2).grant("a", 1).fail("a", 1, 1).commit("a", 1, 2, park=(1,)).run("a", 1, 1, 2)
    kept(story.commit("a", 1, 3, unpark=(1,)), "partition")


def test_other_keys_of_the_partition_wait_until_the_failed_message_is_parked() -> None:
    story = two_keys().fail("a", 1, 1).run("a", 1, 2).commit("a", 1, 3, park=(1,))
    kept(story, "key", complete=False)
    broken(story, K.SKIPPED, complete=False)


def test_a_lot_does_not_run_beside_another_message_of_the_partition() -> None:
    story = two_keys().fail("a", 1, 1).commit("a", 1, 2, park=(1,)).start("a", 1, 2, 1).end("a", 1, 1).end("a", 1, 2)
    kept(story, "key", complete=False)
    broken(story, K.OVERLAP, complete=False)


def test_a_failed_message_is_not_passed_by_another_key_unless_it_is_the_parked_one() -> None:
    story = two_keys().fail("a", 1, 1).commit("a", 1, 2, park=(1,)).fail("a", 1, 2).run("a", 1, 3)
    broken(story, K.SKIPPED, complete=False)


def test_a_lot_of_the_partition_runs_in_order_although_others_were_started_since() -> None:
    story = two_keys().fail("a", 1, 1).commit("a", 1, 2, 3, park=(1, 3)).run("a", 1, 2, 4).run("a", 1, 3, 1)
    broken(story, K.SKIPPED, K.OUT_OF_ORDER, complete=False)


def test_what_a_partition_rolled_back_may_be_parked_and_run_from_the_lot() -> None:
    story = two_keys().run("a", 1, 1, 2, 3).commit("a", 1, 1, park=(5,)).run("a", 1, 4, result="rollback")
    story.run("a", 1, 1, 2).commit("a", 1, 3, park=(3, 5)).run("a", 1, 4, 3, 5, 6)
    kept(story.commit("a", 1, 7, unpark=(3, 5)))
    story = two_keys().fail("a", 1, 1).commit("a", 1, 2, park=(1,)).run("a", 1, 1).commit("a", 1, 2, unpark=(1,))
    story.run("a", 1, 2, 3).run("a", 1, 4, result="rollback").run("a", 1, 2).commit("a", 1, 3, park=(3,))
    kept(story.run("a", 1, 3, 4, 5, 6).commit("a", 1, 7, unpark=(3,)))


# Skipped by name.


@pytest.mark.parametrize("order", ["partition", "key", "none"])
def test_a_message_that_was_given_up_is_counted_and_not_lost(order: Order) -> None:
    story = Story(1, 2).grant("a", 1).fail("a", 1, 1).skip(1).run("a", 1, 2).commit("a", 1, 3)
    verdict = kept(story, order)
    assert (verdict.skipped, verdict.parked, verdict.finished) == (1, 0, 1)
    assert str(verdict).endswith(", 1 skipped by name")


def test_without_the_skip_the_same_history_is_bad() -> None:
    story = Story(1, 2).grant("a", 1).fail("a", 1, 1).run("a", 1, 2).commit("a", 1, 3)
    broken(story, K.SKIPPED, K.PREMATURE_COMMIT, K.LOST, order="key")


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_the_head_of_a_lot_may_be_given_up(order: Order) -> None:
    story = parked().skip(1).commit("a", 1, 4, unpark=(1,)).run("a", 1, 2, 3).commit("a", 1, 4, unpark=(2, 3))
    verdict = kept(story, order)
    assert (verdict.skipped, verdict.parked) == (1, 0)


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_a_skip_gives_up_one_message_only(order: Order) -> None:
    broken(parked().skip(1).run("a", 1, 3), K.SKIPPED, order=order)


def test_a_skip_asked_of_the_lease_before_is_known_to_the_committer() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1).takeover("a", 1, "b", 2).skip(1).commit("b", 2, 2)
    kept(story, "key")


def test_a_skipped_message_does_not_run_again_after_the_commit() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1).skip(1)
    kept(story, "key")
    broken(story.commit("a", 1, 2).run("a", 1, 1), K.REPEATED, order="key")


def test_a_skip_for_another_group_does_not_count_here() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1)
    story.history.record(KeySkipped("s", "other", 0, 1, b"k"))
    broken(story.commit("a", 1, 2), K.PREMATURE_COMMIT, K.LOST, order="key", group="g")


# Attempts.


@pytest.mark.parametrize("order", BOTH_ORDERS)
def test_attempts_that_count_up_are_fine(order: Order) -> None:
    kept(
        Story(1, 2).grant("a", 1).fail("a", 1, 1, 1).fail("a", 1, 1, 2).run("a", 1, 1, attempt=3), order, complete=False
    )


@pytest.mark.parametrize("result", ["failed", "exception", "rollback"])
def test_an_attempt_that_failed_is_not_tried_again_with_its_number(result: HandlerResult) -> None:
    story = Story(1).grant("a", 1).run("a", 1, 1, result=result, attempt=2).run("a", 1, 1, attempt=2)
    verdict = broken(story, K.ATTEMPT_LOST, order="key")
    for word in ("attempt 2", f"{result!r}", "offset 1", "b'k'"):
        assert word in verdict.violations[0].message


def test_attempts_may_leave_numbers_out() -> None:
    kept(Story(1).grant("a", 1).fail("a", 1, 1, 1).run("a", 1, 1, attempt=7), "key")


def test_an_attempt_below_one_before_is_lost_in_the_same_epoch() -> None:
    broken(Story(1).grant("a", 1).fail("a", 1, 1, 2).run("a", 1, 1, attempt=1), K.ATTEMPT_LOST, order="key")


@pytest.mark.parametrize("attempt", [2, 3])
def test_a_successor_goes_on_with_the_attempt_or_the_next(attempt: int) -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1, 1).fail("a", 1, 1, 2).takeover("a", 1, "b", 2)
    kept(story.run("b", 2, 1, attempt=attempt), "key")


def test_a_successor_that_counts_anew_has_lost_the_attempts() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1, 1).fail("a", 1, 1, 2).takeover("a", 1, "b", 2)
    broken(story.run("b", 2, 1, attempt=1), K.ATTEMPT_LOST, order="key")


def test_a_successor_counts_up_from_the_attempt_that_it_repeated() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1, 2).takeover("a", 1, "b", 2).fail("b", 2, 1, 2)
    broken(story.run("b", 2, 1, attempt=2), K.ATTEMPT_LOST, order="key")


def test_an_attempt_cut_off_by_a_crash_may_be_repeated_with_its_number() -> None:
    story = Story(1).grant("a", 1).start("a", 1, 1, attempt=2).crash("a").takeover("a", 1, "b", 2)
    kept(story.run("b", 2, 1, attempt=2), "key")


def test_what_a_rollback_repeats_after_success_may_keep_its_attempt() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1, attempt=1).run("a", 1, 2, result="rollback", attempt=1)
    kept(story.run("a", 1, 1, attempt=1).run("a", 1, 2, attempt=2), "key")


def test_each_message_and_group_has_its_own_attempts() -> None:
    kept(Story(1, 2).grant("a", 1).fail("a", 1, 1, 5).run("a", 1, 1, attempt=6).run("a", 1, 2, attempt=1), "key")


def test_a_resume_starts_the_attempts_of_its_key_anew() -> None:
    story = Story(1).sent(2, key=b"other").grant("a", 1).fail("a", 1, 1, 3).fail("a", 1, 2, 3)
    kept(story.resume().run("a", 1, 1, attempt=1), "key", complete=False)
    broken(story.run("a", 1, 2, attempt=1), K.ATTEMPT_LOST, order="key")


def test_a_reset_starts_attempts_anew() -> None:
    story = Story(1).grant("a", 1).run("a", 1, 1, attempt=3).lease_end("a", 1, "released").reset(1)
    kept(story.grant("b", 2).run("b", 2, 1, attempt=1), "key")


def test_a_message_parked_after_its_last_attempt_goes_on_counting_unless_it_is_resumed_by_name() -> None:
    story = Story(1).grant("a", 1).fail("a", 1, 1, 3).commit("a", 1, 2, park=(1,)).takeover("a", 1, "b", 2)
    broken(story.run("b", 2, 1, attempt=1), K.ATTEMPT_LOST, order="key")


def test_attempts_are_judged_only_where_they_are_known() -> None:
    kept(Story(1).grant("a", 1).fail("a", 1, 1, 3).fail("a", 1, 1).run("a", 1, 1, attempt=4), "key")


# No order.


def test_without_order_there_are_no_lanes() -> None:
    story = Story(1, 2, 3).grant("a", 1).start("a", 1, 3, 1).end("a", 1, 1).fail("a", 1, 2).run("a", 1, 2, 2)
    verdict = kept(story.end("a", 1, 3).commit("a", 1, 4), "none")
    assert (verdict.started, verdict.finished, verdict.duplicates) == (5, 4, 1)


def test_without_order_losses_commits_and_leases_are_judged_all_the_same() -> None:
    broken(Story(1, 2).grant("a", 1).run("a", 1, 2), K.LOST, order="none")
    broken(
        Story(1, 2).grant("a", 1).run("a", 1, 2).commit("a", 1, 3).run("a", 1, 1),
        K.PREMATURE_COMMIT,
        K.REPEATED,
        order="none",
    )
    broken(Story(1).grant("a", 1).takeover("a", 1, "b", 2).run("a", 1, 1), K.STALE_START, order="none")
    broken(Story(1).grant("a", 1).grant("b", 2).run("b", 2, 1), K.TWO_OWNERS, order="none")
    broken(Story(1).grant("a", 1).run("a", 1, 1).commit("b", 1, 2), K.STALE_COMMIT, order="none")


# Speed.


def test_long_finished_sets_and_lots_are_judged_quickly() -> None:
    """A stuck head, 300 finished offsets above in every commit, and a growing lot: about 10 µs per commit on a quiet
    machine.
    """
    count, window = 20_000, 300
    story = Story(*range(1, count)).sent(0, key=b"stuck").grant("a", 1).start("a", 1, 0)
    for offset in range(1, count // 2):
        story.run("a", 1, offset).commit("a", 1, 0, *range(max(1, offset - window), offset + 1))
    for offset in range(count // 2, count):
        story.commit("a", 1, 0, offset, park=(offset,))
    for offset in range(count // 2, count):
        story.run("a", 1, offset).commit("a", 1, 0, unpark=(offset,))
    story.end("a", 1, 0).commit("a", 1, count)
    begin = time.process_time()
    kept(story, "key")
    assert time.process_time() - begin < 20
