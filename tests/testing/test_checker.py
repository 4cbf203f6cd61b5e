"""Histories with a seeded bug, every history beside the closest legal neighbour."""

from __future__ import annotations

import time
from typing import Literal

import pytest

from inturn.model.errors import InvalidInput
from inturn.testing.checker import OrderViolated, ViolationKind, check
from inturn.testing.history import (
    HandlerResult,
    HandlerStart,
    History,
    LeaseEnd,
    LeaseGranted,
    ProcessRestarted,
    SendAcknowledged,
)
from tests.testing.checker_story import Story, broken, kept

K = ViolationKind


# No violation.


def test_messages_in_order_are_fine_and_counted() -> None:
    verdict = kept(Story(0, 1, 2).grant("a", 1).run("a", 1, 0, 1, 2).commit("a", 1, 3))
    assert (verdict.sent, verdict.started, verdict.finished, verdict.duplicates) == (3, 3, 3, 0)
    assert (verdict.lease_grants, verdict.commits, verdict.overlaps_after_lease_loss) == (1, 1, 0)


def test_an_empty_history_breaks_no_order() -> None:
    kept(Story())


def test_a_restart_of_a_node_changes_nothing() -> None:
    story = Story(0, 1).grant("a", 1).run("a", 1, 0)
    story.history.record(ProcessRestarted())
    kept(story.run("a", 1, 1).commit("a", 1, 2))


def test_an_order_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'partition', 'key' or 'none'"):
        check(History(), order="global")  # type: ignore[arg-type]


# Lost.


def test_a_message_that_nobody_handled_is_lost() -> None:
    verdict = broken(Story(0, 1).grant("a", 1).run("a", 1, 0), K.LOST)
    assert verdict.violations[0].offsets == (1,)


def test_a_message_that_only_ever_failed_is_lost() -> None:
    broken(Story(0).grant("a", 1).run("a", 1, 0, result="failed"), K.LOST)


def test_a_message_cut_off_by_a_crash_is_lost_even_if_its_thread_reports_an_end_later() -> None:
    broken(Story(0).grant("a", 1).start("a", 1, 0).crash("a").end("a", 1, 0), K.LOST)


def test_nothing_is_lost_while_the_work_is_not_complete() -> None:
    kept(Story(0, 1).grant("a", 1).run("a", 1, 0), complete=False)


def test_a_message_that_was_moved_by_name_is_not_lost() -> None:
    kept(Story(0, 1).grant("a", 1).run("a", 1, 0, result="moved").run("a", 1, 1).commit("a", 1, 2))


def test_each_group_must_finish_each_message() -> None:
    story = Story(0).grant("a", 1).run("a", 1, 0)
    story.history.record(LeaseGranted("s", "other", 0, "b", 1))
    verdict = broken(story, K.LOST)
    assert verdict.violations[0].group == "other"
    kept(story, group="g")
    broken(story, K.LOST, subject="s", group="never seen")


def test_an_acknowledged_message_that_the_log_does_not_hold_is_lost_even_if_it_was_handled() -> None:
    story = Story(0, 1).grant("a", 1).run("a", 1, 0, 1)
    verdict = broken(story, K.LOST, stored={("s", 0, 0): "m0"})
    assert verdict.violations[0].group is None
    kept(story, stored={("s", 0, 0): "m0", ("s", 0, 1): None})


# Unexpected.


def test_another_message_at_an_acknowledged_offset_is_unexpected() -> None:
    story = Story(0).grant("a", 1)
    story.history.record(HandlerStart("s", "g", 0, 0, b"k", "a", 1, "another"))
    broken(story.end("a", 1, 0), K.UNEXPECTED)


def test_another_key_at_an_acknowledged_offset_is_unexpected() -> None:
    story = Story(0).grant("a", 1)
    story.history.record(HandlerStart("s", "g", 0, 0, b"another", "a", 1, "m0"))
    broken(story.end("a", 1, 0), K.UNEXPECTED, order="key")


def test_an_offset_acknowledged_for_two_messages_is_unexpected() -> None:
    story = Story(0).grant("a", 1).run("a", 1, 0)
    story.history.record(SendAcknowledged("s", 0, 0, b"k", "another"))
    broken(story, K.UNEXPECTED)


def test_the_same_acknowledgement_twice_is_fine() -> None:
    kept(Story(0, 0).grant("a", 1).run("a", 1, 0))


def test_ids_are_compared_only_where_they_are_known() -> None:
    story = Story(0).grant("a", 1)
    story.history.record(HandlerStart("s", "g", 0, 0, b"k", "a", 1, None))
    kept(story.end("a", 1, 0))


def test_a_message_out_of_nowhere_is_unexpected_when_the_log_is_known() -> None:
    story = Story(0).grant("a", 1).run("a", 1, 0, 1)
    broken(story, K.UNEXPECTED, stored={("s", 0, 0): "m0"})
    kept(story, stored={("s", 0, 0): "m0"}, complete=False)


def test_a_stored_message_whose_acknowledgement_got_lost_is_fine() -> None:
    story = Story(0).grant("a", 1).run("a", 1, 0, 1)
    kept(story)
    kept(story, stored={("s", 0, 0): "m0", ("s", 0, 1): "m1"})


def test_a_message_other_than_the_stored_one_is_unexpected() -> None:
    story = Story().grant("a", 1).run("a", 1, 0)
    broken(story, K.UNEXPECTED, stored={("s", 0, 0): "another"})


# Out of order.


def test_one_two_one_two_is_legal_over_a_crash_into_a_new_epoch() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1, 2).crash("a").takeover("a", 1, "b", 2).run("b", 2, 1, 2)
    assert kept(story).duplicates == 2


def test_one_two_one_two_within_an_epoch_is_out_of_order() -> None:
    broken(Story(1, 2).grant("a", 1).run("a", 1, 1, 2, 1, 2), K.OUT_OF_ORDER)


def test_two_one_two_within_an_epoch_is_out_of_order_although_a_duplicate_follows() -> None:
    broken(Story(1, 2).grant("a", 1).run("a", 1, 2, 1, 2), K.OUT_OF_ORDER, K.SKIPPED)


def test_two_one_two_is_out_of_order_even_when_an_earlier_epoch_had_finished_both() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1, 2).takeover("a", 1, "b", 2).run("b", 2, 2, 1, 2)
    broken(story, K.OUT_OF_ORDER)


@pytest.mark.parametrize("result", ["failed", "exception", "rollback"])
def test_a_failed_message_may_be_repeated_in_place(result: HandlerResult) -> None:
    kept(Story(1, 2).grant("a", 1).run("a", 1, 1, 1, result=result).run("a", 1, 1, 2))


@pytest.mark.parametrize("result", ["success", "moved"])
def test_a_finished_message_may_not_be_repeated_in_its_epoch(result: HandlerResult) -> None:
    broken(Story(1).grant("a", 1).run("a", 1, 1, result=result).run("a", 1, 1), K.OUT_OF_ORDER)


def test_a_failure_does_not_allow_to_go_back_further() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1).run("a", 1, 2, result="failed").run("a", 1, 1, 2)
    broken(story, K.OUT_OF_ORDER)


def test_a_message_cut_off_by_a_crash_is_not_repeated_in_the_same_epoch() -> None:
    story = Story(1).grant("a", 1).start("a", 1, 1).crash("a").run("a", 1, 1)
    broken(story, K.OUT_OF_ORDER)


def test_a_rollback_goes_back_to_the_first_uncommitted_message() -> None:
    story = (
        Story(1, 2, 3).grant("a", 1).run("a", 1, 1).commit("a", 1, 2).run("a", 1, 2).run("a", 1, 3, result="rollback")
    )
    kept(story.run("a", 1, 2, 3))


def test_a_rollback_never_goes_below_a_commit() -> None:
    story = (
        Story(1, 2, 3).grant("a", 1).run("a", 1, 1).commit("a", 1, 2).run("a", 1, 2).run("a", 1, 3, result="rollback")
    )
    assert broken(story.run("a", 1, 1, 2, 3), K.REPEATED).violations[0].offsets == (1,)


def test_a_new_epoch_does_not_start_below_what_was_committed() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1).commit("a", 1, 2).takeover("a", 1, "b", 2)
    broken(story.run("b", 2, 1, 2), K.REPEATED)


def test_a_new_epoch_starts_where_the_commit_stands() -> None:
    kept(Story(1, 2).grant("a", 1).run("a", 1, 1).commit("a", 1, 2).takeover("a", 1, "b", 2).run("b", 2, 2))


def test_a_reset_allows_to_start_below_what_was_committed() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1, 2).commit("a", 1, 3).lease_end("a", 1, "released")
    kept(story.reset(1).grant("b", 2).run("b", 2, 1, 2).commit("b", 2, 3))


def test_two_keys_may_overtake_each_other_only_under_key_order() -> None:
    story = Story(1).sent(2, key=b"other").grant("a", 1).run("a", 1, 2, 1)
    kept(story, "key")
    broken(story, K.OUT_OF_ORDER, K.SKIPPED)


def test_messages_without_a_key_have_no_order_under_key_order() -> None:
    kept(Story(1, 2, 3, key=None).grant("a", 1).start("a", 1, 3, 1).end("a", 1, 1).run("a", 1, 2).end("a", 1, 3), "key")


def test_a_message_without_a_key_is_still_not_run_twice_in_an_epoch() -> None:
    broken(Story(1, key=None).grant("a", 1).run("a", 1, 1, 1), K.OUT_OF_ORDER, order="key")


# Overlap, and starting in an old epoch.


def test_two_handlers_of_one_lane_at_once_overlap() -> None:
    broken(Story(1, 2).grant("a", 1).start("a", 1, 1, 2).end("a", 1, 1).end("a", 1, 2), K.OVERLAP, K.SKIPPED)


def test_two_consumers_overlap_on_one_message_in_one_epoch() -> None:
    story = Story(1).grant("a", 1).start("a", 1, 1).start("b", 1, 1).end("a", 1, 1).end("b", 1, 1)
    broken(story, K.OVERLAP, K.OUT_OF_ORDER)


def test_two_keys_may_run_at_once_under_key_order() -> None:
    story = Story(1).sent(2, key=b"other").grant("a", 1).start("a", 1, 1, 2).end("a", 1, 1).end("a", 1, 2)
    kept(story, "key")
    broken(story, K.OVERLAP, K.SKIPPED)


def test_a_handler_that_outlives_its_lease_may_overlap_its_successor() -> None:
    story = Story(1, 2).grant("a", 1).start("a", 1, 1).takeover("a", 1, "b", 2).run("b", 2, 1, 2).end("a", 1, 1)
    assert kept(story).overlaps_after_lease_loss == 2


def test_a_handler_that_starts_after_the_new_grant_is_stale_although_nothing_overlaps() -> None:
    story = Story(1).grant("a", 1).takeover("a", 1, "b", 2).run("a", 1, 1).run("b", 2, 1)
    broken(story, K.STALE_START)


def test_a_handler_that_starts_after_the_new_grant_and_overlaps_is_no_leftover() -> None:
    story = Story(1).grant("a", 1).takeover("a", 1, "b", 2).start("a", 1, 1).run("b", 2, 1).end("a", 1, 1)
    assert broken(story, K.STALE_START, K.OVERLAP).overlaps_after_lease_loss == 0


def test_the_old_owner_may_still_start_until_the_new_grant() -> None:
    kept(Story(1).grant("a", 1).start("a", 1, 1).end("a", 1, 1).takeover("a", 1, "b", 2).run("b", 2, 1))


def test_the_successor_overlaps_a_stale_handler_whichever_came_first() -> None:
    story = Story(1).grant("a", 1).takeover("a", 1, "b", 2).start("b", 2, 1).run("a", 1, 1).end("b", 2, 1)
    broken(story, K.STALE_START, K.OVERLAP)


def test_an_overlap_with_an_older_epoch_is_not_excused_without_a_grant() -> None:
    broken(Story(1).start("a", 1, 1).run("b", 2, 1).end("a", 1, 1), K.OVERLAP)


def test_a_handler_cut_off_by_a_crash_overlaps_nobody() -> None:
    story = Story(1).grant("a", 1).start("a", 1, 1).crash("a").takeover("a", 1, "b", 2).run("b", 2, 1)
    assert kept(story).overlaps_after_lease_loss == 0


def test_an_epoch_that_was_never_granted_is_stale() -> None:
    broken(Story(1).grant("a", 1).run("a", 7, 1), K.STALE_START)


# Skipped.


def test_a_start_past_an_unfinished_message_is_a_skip() -> None:
    verdict = broken(Story(1, 2, 3).grant("a", 1).run("a", 1, 1, 3), K.SKIPPED, K.LOST)
    assert verdict.violations[0].offsets == (2,)


def test_a_start_past_a_failed_message_is_a_skip_even_if_an_earlier_epoch_had_finished_it() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1).takeover("a", 1, "b", 2)
    broken(story.run("b", 2, 1, result="failed").run("b", 2, 2), K.SKIPPED)


def test_a_new_epoch_that_starts_past_a_message_cut_off_by_a_crash_skips_it() -> None:
    story = Story(1, 2).grant("a", 1).start("a", 1, 1).crash("a").takeover("a", 1, "b", 2).run("b", 2, 2)
    broken(story, K.SKIPPED, K.LOST)


def test_a_message_acknowledged_only_later_is_skipped_all_the_same() -> None:
    story = Story(2).grant("a", 1).run("a", 1, 2).sent(1)
    broken(story, K.SKIPPED, K.LOST)


def test_a_message_known_from_the_log_only_is_skipped_all_the_same() -> None:
    story = Story(2).grant("a", 1).run("a", 1, 2)
    kept(story)
    broken(story, K.SKIPPED, stored={("s", 0, 1): "m1", ("s", 0, 2): "m2"})


def test_a_new_epoch_may_leave_out_what_an_older_one_finished() -> None:
    kept(Story(1, 2).grant("a", 1).run("a", 1, 1).takeover("a", 1, "b", 2).run("b", 2, 2))


def test_gaps_in_the_offsets_are_no_skips() -> None:
    kept(Story(1, 5, 9).grant("a", 1).run("a", 1, 1, 5, 9).commit("a", 1, 10))


def test_a_reset_gives_up_what_is_below_it() -> None:
    story = Story(1, 2, 3).grant("a", 1).run("a", 1, 1).lease_end("a", 1, "released")
    kept(story.reset(3).grant("b", 2).run("b", 2, 3).commit("b", 2, 4))


def test_a_reset_does_not_give_up_what_is_above_it() -> None:
    story = Story(1, 2, 3).grant("a", 1).lease_end("a", 1, "released").reset(2).grant("b", 2).run("b", 2, 3)
    broken(story, K.SKIPPED, K.LOST)


def test_after_a_reset_back_messages_are_due_again_one_by_one() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1, 2).lease_end("a", 1, "released").reset(1).grant("b", 2)
    broken(story.run("b", 2, 2), K.SKIPPED)


# Commits.


def test_a_commit_past_a_running_handler_is_premature() -> None:
    story = Story(1, 2).grant("a", 1).run("a", 1, 1).start("a", 1, 2).commit("a", 1, 3).end("a", 1, 2)
    broken(story, K.PREMATURE_COMMIT)


def test_a_commit_past_a_lane_that_waits_is_premature_under_key_order() -> None:
    story = Story(1).sent(2, key=b"other").grant("a", 1).run("a", 1, 2).commit("a", 1, 3).run("a", 1, 1)
    verdict = broken(story, K.PREMATURE_COMMIT, K.REPEATED, order="key")
    assert verdict.violations[0].offsets == (1,)


def test_a_commit_up_to_a_running_handler_is_fine() -> None:
    kept(Story(1, 2).grant("a", 1).run("a", 1, 1).start("a", 1, 2).commit("a", 1, 2).end("a", 1, 2))


def test_a_commit_past_a_message_acknowledged_only_later_is_premature() -> None:
    broken(Story(1).grant("a", 1).run("a", 1, 1).commit("a", 1, 3).sent(2), K.PREMATURE_COMMIT, K.LOST)


def test_a_commit_relies_on_what_was_finished_before_its_lease() -> None:
    story = Story(1).sent(2, key=b"other").grant("a", 1).run("a", 1, 2).takeover("a", 1, "b", 2)
    kept(story.run("b", 2, 1).commit("b", 2, 3), "key")


def test_a_commit_does_not_rely_on_a_leftover_handler_of_an_older_epoch() -> None:
    story = Story(1).grant("a", 1).start("a", 1, 1).takeover("a", 1, "b", 2).start("b", 2, 1).end("a", 1, 1)
    broken(story.commit("b", 2, 2).end("b", 2, 1), K.PREMATURE_COMMIT)


def test_a_commit_relies_on_its_own_handler_although_a_leftover_one_ends_later() -> None:
    story = Story(1).grant("a", 1).start("a", 1, 1).takeover("a", 1, "b", 2).run("b", 2, 1).end("a", 1, 1)
    kept(story.commit("b", 2, 2))


def test_a_commit_in_an_old_epoch_is_stale() -> None:
    story = Story(1).grant("a", 1).run("a", 1, 1).takeover("a", 1, "b", 2).commit("a", 1, 2)
    broken(story, K.STALE_COMMIT)


def test_a_commit_by_somebody_else_is_stale() -> None:
    broken(Story(1).grant("a", 1).run("a", 1, 1).commit("b", 1, 2), K.STALE_COMMIT)


def test_a_commit_after_the_lease_ended_is_stale() -> None:
    broken(Story(1).grant("a", 1).run("a", 1, 1).lease_end("a", 1, "released").commit("a", 1, 2), K.STALE_COMMIT)


def test_a_commit_without_any_lease_is_stale() -> None:
    broken(Story(1).run("a", 1, 1).commit("a", 1, 2), K.STALE_COMMIT)


def test_a_commit_just_before_the_release_is_fine() -> None:
    kept(Story(1).grant("a", 1).run("a", 1, 1).commit("a", 1, 2).lease_end("a", 1, "released"))


# Leases.


def test_a_grant_while_another_holds_the_lease_makes_two_owners() -> None:
    broken(Story().grant("a", 1).grant("b", 2), K.TWO_OWNERS)


def test_the_end_of_another_lease_does_not_free_this_one() -> None:
    broken(Story().grant("a", 1).takeover("a", 1, "b", 2).lease_end("a", 1).grant("c", 3), K.TWO_OWNERS)


@pytest.mark.parametrize("why", ["released", "expired", "gone"])
def test_a_grant_after_the_lease_ended_is_fine(why: LeaseEnd) -> None:
    assert kept(Story().grant("a", 1).lease_end("a", 1, why).grant("b", 2)).lease_grants == 2


def test_a_grant_with_the_same_epoch_is_not_raised() -> None:
    broken(Story().grant("a", 1).takeover("a", 1, "b", 1), K.EPOCH_NOT_RAISED)


def test_a_grant_with_an_epoch_below_the_highest_is_not_raised() -> None:
    story = Story().grant("a", 1).takeover("a", 1, "b", 5).takeover("b", 5, "c", 3)
    broken(story, K.EPOCH_NOT_RAISED)


def test_epochs_may_leave_numbers_out() -> None:
    kept(Story().grant("a", 1).takeover("a", 1, "b", 9))


def test_epochs_of_other_partitions_and_groups_are_their_own() -> None:
    story = Story().grant("a", 5)
    story.history.record(LeaseGranted("s", "g", 1, "a", 1))
    story.history.record(LeaseGranted("s", "other", 0, "b", 1))
    kept(story)


# The verdict.


def test_other_subjects_and_groups_are_left_out_when_one_is_asked_for() -> None:
    story = Story(0).grant("a", 1).run("a", 1, 0)
    story.history.record(SendAcknowledged("bad", 0, 0, None, "x"))
    story.history.record(HandlerStart("bad", "g", 0, 0, b"wrong", "a", 1, "y"))
    assert not story.check().ok
    assert kept(story, subject="s").sent == 1


def test_a_violation_names_everything_and_shows_its_evidence() -> None:
    verdict = Story(1, 2).grant("a", 1).run("a", 1, 1, 2).takeover("a", 1, "b", 2).run("b", 2, 2, 1).check()
    (violation,) = verdict.violations
    for word in ("subject 's'", "group 'g'", "partition 0", "offset 1", "offset 2", "b'k'", "'b'", "epoch 2"):
        assert word in violation.message
    assert [type(item.event) for item in violation.evidence] == [HandlerStart, HandlerStart]
    assert all(verdict_event.event.epoch == 2 for verdict_event in violation.evidence)  # type: ignore[union-attr]


def test_a_bad_verdict_raises_and_a_good_one_does_not() -> None:
    kept(Story(1).grant("a", 1).run("a", 1, 1)).raise_if_bad()
    with pytest.raises(OrderViolated, match="order broken, 1 violation: 1 sent") as caught:
        Story(1).grant("a", 1).check().raise_if_bad()
    assert isinstance(caught.value, AssertionError)
    assert caught.value.verdict.kinds() == {K.LOST}


def test_a_verdict_reads_well() -> None:
    assert str(kept(Story(1).grant("a", 1).run("a", 1, 1))) == (
        "order kept: 1 sent, 1 started, 1 finished (0 duplicates), 1 lease grant, 0 commits, "
        "0 overlaps after lease loss"
    )
    many = Story(1).grant("a", 1).run("a", 1, *[1] * 40)
    text = str(many.check())
    assert "OUT OF ORDER: subject 's', group 'g', partition 0: in epoch 1, 'a' started offset 1 (key b'k')" in text
    assert text.endswith("... and 19 more violations")


# Speed. The bounds leave room for a busy machine; on a quiet machine an event takes about 1 µs.


def _long(count: int) -> Story:
    story = Story()
    for offset in range(count):
        story.sent(offset, key=b"k%d" % (offset % 50))
    story.grant("a", 1)
    for offset in range(count):
        story.run("a", 1, offset).commit("a", 1, offset + 1)
    return story


def _seconds(story: Story, order: Literal["partition", "key"]) -> float:
    best = float("inf")
    for _ in range(5):
        begin = time.process_time()
        assert story.check(order).ok
        best = min(best, time.process_time() - begin)
    return best


@pytest.mark.parametrize("order", ["partition", "key"])
def test_time_grows_with_the_length_of_the_history_only(order: Literal["partition", "key"]) -> None:
    short, long = _long(1000), _long(16_000)
    assert _seconds(long, order) < 16 * 3 * _seconds(short, order)


@pytest.mark.parametrize("order", ["partition", "key"])
def test_a_thoroughly_broken_history_is_judged_in_linear_time_too(order: Literal["partition", "key"]) -> None:
    count = 20_000
    story = Story(*range(count)).grant("a", 1)
    story.start("a", 1, *range(count - 1, -1, -1))
    for number in range(1000):
        story.crash(f"nobody {number}")
    begin = time.process_time()
    assert story.check(order).kinds() == {K.OUT_OF_ORDER, K.SKIPPED, K.OVERLAP, K.LOST}
    assert time.process_time() - begin < 20, "seconds of the processor, whatever else the machine does"
