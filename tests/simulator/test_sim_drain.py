"""S3: drains in simulated histories, and the simulation's own model of claims."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from inturn.model.routing import SlotSet
from inturn.protocol.commands import Claim, Granted
from inturn.testing.history import ClaimEnded, ClaimGranted, HandlerStart
from simulator.claims import ClaimWatch
from simulator.drain import SHARE, drain_chance
from simulator.settings import GROUP, SUBJECT
from simulator.simulation import Report, simulate
from simulator.world import World

SEEDS = [seed for seed in range(100) if drain_chance(seed) is not None][:12]
LEFT = SlotSet.of(range(512)).to_bytes()
RIGHT = SlotSet.of(range(512, 1024)).to_bytes()
KEEPER = "keeper", 1


@pytest.fixture(scope="module")
def reports() -> Iterator[list[Report]]:
    logging.disable(logging.CRITICAL)
    yield [simulate(seed) for seed in SEEDS]
    logging.disable(logging.NOTSET)


def test_some_histories_have_drains() -> None:
    share = sum(drain_chance(seed) is not None for seed in range(2000)) / 2000
    assert 0.2 < SHARE < 0.25
    assert abs(share - SHARE) < 0.03


def test_histories_with_drains_keep_the_order(reports: list[Report]) -> None:
    for report in reports:
        assert report.ok, str(report)


def test_claimants_do_some_of_the_work_and_others_the_rest(reports: list[Report]) -> None:
    starts = [event.consumer for report in reports for event in report.history if isinstance(event, HandlerStart)]
    of_claimants = sum(name.startswith("claimant") for name in starts)
    assert 0.1 < of_claimants / len(starts) < 0.9, of_claimants / len(starts)
    assert not any(name.startswith("keeper") for name in starts)


def test_claims_come_and_go(reports: list[Report]) -> None:
    for kind in (ClaimGranted, ClaimEnded):
        assert sum(isinstance(event, kind) for report in reports for event in report.history) > 50


def test_other_histories_know_nothing_of_it() -> None:
    seed = next(seed for seed in range(100) if drain_chance(seed) is None)
    logging.disable(logging.CRITICAL)
    report = simulate(seed)
    logging.disable(logging.NOTSET)
    assert not any(isinstance(event, ClaimGranted) for event in report.history)
    assert not [name for name, times in report.coverage.items() if name.startswith("drain.") and times]


def test_the_same_seed_has_the_same_drains(reports: list[Report]) -> None:
    logging.disable(logging.CRITICAL)
    again = simulate(SEEDS[0])
    logging.disable(logging.NOTSET)
    assert again.history == reports[0].history
    assert again.coverage == reports[0].coverage


# The model of claims


class Watch:
    def __init__(self) -> None:
        self.world = World(0)
        self.coverage: Counter[str] = Counter()
        self.claims = ClaimWatch(self.world, self.coverage, 2.0)

    def claim(self, who: str, slots: bytes = LEFT, ask: int = 1, holder: tuple[str, int] | None = KEEPER) -> list[str]:
        command = Claim(SUBJECT, GROUP, 0, "keeper", 1, who, ask, slots)
        return self.claims.granted(command, Granted(1, 0, 2.0, is_claim=True), holder)

    def is_held(self, who: str, ask: int | None = None) -> bool:
        return self.claims.is_held((SUBJECT, GROUP, 0), who, 1, ask)


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_a_claim_is_good_if_nobody_else_has_the_slots(watch: Watch) -> None:
    assert watch.claim("a") == []
    assert watch.claim("b", RIGHT) == []
    assert watch.is_held("a")
    assert watch.is_held("b", 1)
    assert not watch.is_held("b", 2)
    assert not watch.is_held("c")


def test_a_claim_within_the_life_of_another_is_a_problem(watch: Watch) -> None:
    watch.claim("a")
    watch.world.run(1.9)
    (problem,) = watch.claim("b")
    assert "claimed too early: partition 0 by b, epoch 1; a has renewed its claim 1.900 s ago" in problem
    assert not watch.is_held("a")


def test_a_claim_after_the_life_of_another_is_none(watch: Watch) -> None:
    watch.claim("a")
    watch.world.run(2.0)
    assert watch.claim("b") == []
    assert watch.coverage["claim.lost"] == 1


def test_renewals_count(watch: Watch) -> None:
    watch.claim("a")
    watch.world.run(1.5)
    watch.claims.renewed((SUBJECT, GROUP, 0), "a")
    watch.world.run(3.0)
    assert watch.claim("b")


def test_a_restart_makes_no_claim_shorter_and_none_can_be_used(watch: Watch) -> None:
    watch.claim("a")
    watch.claims.node_crashed()
    assert not watch.is_held("a")
    watch.world.run(1.0)
    assert watch.claim("b")
    watch.world.run(2.5)
    assert watch.claim("a", RIGHT, ask=2) == []
    assert watch.is_held("a", 2)


def test_what_was_given_back_may_be_claimed_at_once(watch: Watch) -> None:
    watch.claim("a")
    watch.claims.given_back(SUBJECT, GROUP, 0, "a")
    assert watch.claim("b") == []
    watch.claims.given_back(SUBJECT, GROUP, None, "b")
    assert watch.claim("c") == []
    assert watch.coverage["claim.given back"] == 2


@pytest.mark.parametrize("holder", [None, ("keeper", 2), ("other", 1)])
def test_a_claim_without_the_lease_is_a_problem(watch: Watch, holder: tuple[str, int] | None) -> None:
    (problem,) = watch.claim("a", holder=holder)
    assert "claimed though the lease is not held" in problem


def test_a_late_copy_of_a_commit_is_not_to_be_stored(watch: Watch) -> None:
    watch.claim("a")
    place = SUBJECT, GROUP, 0
    assert watch.claims.committed(place, "a", 2, is_stored=True) == []
    assert watch.claims.committed(place, "a", 1, is_stored=False) == []
    assert watch.claims.committed(place, "a", 2, is_stored=True) == [
        "stored though it came late: partition 0, a: commit 2 after 2"
    ]


def test_the_same_ask_again_is_no_other_claim(watch: Watch) -> None:
    watch.claim("a")
    watch.world.run(1.5)
    assert watch.claim("a") == []
    assert watch.coverage["claim.granted"] == watch.coverage["claim.granted again for the same ask"] == 1
    watch.world.run(3.0)
    assert watch.claim("b")
