from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from inturn.consumer.run import Run
from inturn.store.leases import LeaseRows
from simulator.seeded_bugs import BUGS, SEEDS_MAX, BrokenBug, Patch, SeededBug, finding, seeds_to_find
from simulator.seeded_bugs.bug import edited
from simulator.simulation import simulate


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# Seeds where slow bugs were found last. These seeds are tried first, to save the time of a search. When a change of the
# simulation makes a seed wrong, only the time of a search is lost.
FOUND_AT = {
    "old_ask_is_granted_again": 1055,
    "asks_of_a_lost_stream_are_granted": 175,
    "commit_goes_back": 1,
    "commit_is_not_checked_by_the_broker": 3,
    "damaged_frames_are_taken": 110,
    "dead_letter_is_not_waited_for": 192,
    "deadline_counts_from_the_answer": 7,
    "deadline_is_not_checked_before_a_start": 69,
    "epoch_is_not_checked": 53,
    "failed_move_counts_as_done": 137,
    "fenced_producer_is_accepted": 12,
    "full_session_drops_what_it_cannot_take": 168,
    "late_copy_of_a_commit_is_stored": 53,
    "lease_is_over_after_a_restart": 37,
    "leases_end_with_the_node": 14,
    "node_does_not_hear_of_a_lost_stream": 175,
    "one_batch_is_remembered": 14,
    "producers_are_forgotten_at_a_restart": 15,
    "recovered_tail_is_not_synced": 14,
    "repeat_does_not_wait_for_the_commit": 29,
    "second_copy_of_an_answer_ends_the_stream": 26,
    "skipped_message_is_not_over": 20,
    "suspended_lane_goes_on_with_the_next_pull": 145,
    "tail_is_forgotten_when_the_end_is_read": 14,
    "torn_payload_is_kept": 107,
    "what_is_over_of_a_lot_is_read_again": 14,
    "claims_are_granted_at_once_after_a_restart": 81,
    "claim_does_not_renew_the_lease": 73,
    "claims_outlive_their_lease": 359,
    "lease_is_released_under_claims": 171,
    "release_of_a_kept_lease_goes_back": 22,
    "parked_keys_are_not_told_to_claimants": 73,
    "parked_keys_are_told_to_all_claimants": 33,
    "former_claim_is_taken_for_the_present_one": 73,
    "lease_ends_by_the_wall_clock": 33,
    "lost_stream_ends_the_leases": 30,
    "numbers_come_round_too_soon": 9,
    "requests_are_kept_over_a_reconnect": 11,
    "lost_requests_are_not_answered": 11,
    "silence_is_not_noticed": 10,
    "rest_of_a_read_is_dropped": 9,
    "damaged_length_is_believed": 9,
    "session_answers_the_newest_request": 9,
    "readers_see_unsynced": 4,
    "missing_batch_is_not_noticed": 2,
    "buffer_survives_the_lease": 14,
    "kept_messages_count_as_done": 3,
    "parked_keys_are_not_handed_over": 0,
    "newer_messages_do_not_wait_for_a_resumed_key": 14,
    "skip_drops_whatever_is_first": 9,
    "claimants_offset_is_believed": 1,
    "slots_are_not_chosen": 1,
    "grandparent_is_forgotten": 40,
    "lots_come_back_to_the_parent": 3029,
    "route_is_checked_before_duplicates": 28,
    "foreign_offsets_are_taken_for_own": 19,
    "lots_move_while_somebody_works_on_them": 205,
    "barrier_is_passed_by_one": 3,
    "failed_message_of_a_straight_lane_is_passed_by": 10,
    "lots_stay_with_the_parent": 19,
    "producer_does_not_wait_for_answers_when_a_subject_grows": 32,
    "parents_are_not_sealed": 19,
    "new_messages_overtake_what_is_to_be_divided": 32,
    "lease_is_not_checked": 2,
    "live_lease_is_granted": 4,
    "commit_is_not_fenced_anywhere": 3,
    "attempts_are_stored_once": 7,
    "silent_member_keeps_its_share": 1,
    "lost_offsets_are_used_again": 1,
    "partial_batch_stays": 4,
    "torn_tail_is_not_cut": 1,
    "dropped_partition_goes_on": 2,
    "finished_set_is_not_committed": 1,
    "rollback_forgets_what_was_kept": 3,
    "blocked_message_is_tried_by_the_next_holder": 4,
    "key_goes_on_beside_its_handler_when_its_lane_is_spread": 1,
    "failed_message_of_a_straight_lane_is_repeated_at_the_end": 10,
    "child_is_opened_early": 16,
}


@functools.cache
def problem_without_bugs(seed: int) -> str:
    """Many bugs are found by the same history. Without bugs, that history is simulated only once."""
    report = simulate(seed)
    return "" if report.ok else str(report)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("bug", BUGS.values(), ids=str)
def test_the_simulation_finds_the_bug_and_only_the_bug(bug: SeededBug) -> None:
    seed = FOUND_AT.get(bug.name)
    if seed is None or finding(bug, seed) is None:
        seeds = seeds_to_find(bug)
        assert seeds is not None, f"{bug.name} was not found in {SEEDS_MAX} histories: {bug.description}"
        seed = seeds - 1
    problem = problem_without_bugs(seed)
    assert not problem, f"the history that found {bug.name} fails without it, too: {problem}"


def test_the_seeds_are_of_bugs_that_exist() -> None:
    assert set(FOUND_AT) <= set(BUGS)


@pytest.mark.parametrize("bug", BUGS.values(), ids=str)
def test_a_bug_is_undone_exactly(bug: SeededBug) -> None:
    before = [vars(patch.owner)[patch.attribute] for patch in bug.patches]
    with bug.injected():
        for patch, original in zip(bug.patches, before, strict=True):
            assert vars(patch.owner)[patch.attribute] is patch.replacement is not original
    for patch, original in zip(bug.patches, before, strict=True):
        assert vars(patch.owner)[patch.attribute] is original


def test_a_bug_is_undone_when_the_history_ends_with_an_exception() -> None:
    bug = BUGS["acknowledges_before_sync"]
    (patch,) = bug.patches
    before = vars(patch.owner)[patch.attribute]
    with pytest.raises(RuntimeError, match="in between"), bug.injected():
        raise RuntimeError("in between")
    assert vars(patch.owner)[patch.attribute] is before


def test_a_history_says_the_same_before_and_after_a_bug() -> None:
    before = simulate(3).history
    assert finding(BUGS["failed_message_counts_as_done"], 3) is not None
    assert simulate(3).history == before


@pytest.mark.parametrize(
    ("replacement", "error"),
    [
        pytest.param(lambda: 1, "TypeError", id="another signature"),
        pytest.param(lambda self, *rest: self.nonsense, "AttributeError", id="an attribute that is gone"),
        pytest.param(lambda self, *rest: {}[rest], "KeyError", id="a key that is gone"),
    ],
)
def test_a_bug_that_does_not_fit_the_product_is_an_error_and_no_find(replacement: object, error: str) -> None:
    bug = SeededBug("misfit", "store", "It never fitted.", (Patch(LeaseRows, "grant", replacement),))
    with pytest.raises(BrokenBug, match=f"misfit at seed 0 ended with {error}"):
        seeds_to_find(bug)


def test_an_edit_of_what_the_product_does_not_say_is_refused() -> None:
    careless = edited(Run.calls, "now_s >= lease.deadline_s", "False")
    assert careless.__qualname__ != Run.calls.__qualname__
    with pytest.raises(AssertionError, match=r"Run\.calls does not say 'nonsense' any more"):
        edited(Run.calls, "nonsense", "False")


def test_every_layer_has_bugs() -> None:
    layers = Counter(bug.layer for bug in BUGS.values())
    assert set(layers) == {"broker", "consumer", "log", "meta", "node", "producer", "protocol", "store", "transport"}
    assert len(BUGS) >= 44 + 14 + 16 + 18
    assert all(bug.description.endswith(".") for bug in BUGS.values())
