from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from inturn.consumer.run import Run
from inturn.state.leases import LeaseRows
from inturn.testing import seeded_bugs
from inturn.testing.seeded_bugs import BUGS, SEEDS_MAX, BrokenBug, Patch, SeededBug, finding, seeds_to_find
from inturn.testing.simulation import simulate


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("bug", BUGS.values(), ids=str)
def test_the_simulation_finds_the_bug_and_only_the_bug(bug: SeededBug) -> None:
    seeds = seeds_to_find(bug)
    assert seeds is not None, f"{bug.name} was not found in {SEEDS_MAX} histories: {bug.description}"
    report = simulate(seeds - 1)
    assert report.ok, f"the history that found {bug.name} fails without it, too: {report}"


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
    bug = SeededBug("misfit", "state", "It never fitted.", (Patch(LeaseRows, "grant", replacement),))
    with pytest.raises(BrokenBug, match=f"misfit at seed 0 ended with {error}"):
        seeds_to_find(bug)


def test_an_edit_of_what_the_product_does_not_say_is_refused() -> None:
    edited = seeded_bugs._edited(Run.calls, "now_s >= held.deadline_s", "False")
    assert edited.__qualname__ != Run.calls.__qualname__
    with pytest.raises(AssertionError, match=r"Run\.calls does not say 'nonsense' any more"):
        seeded_bugs._edited(Run.calls, "nonsense", "False")


def test_every_layer_has_bugs() -> None:
    layers = Counter(bug.layer for bug in BUGS.values())
    assert set(layers) == {"broker", "consumer", "log", "meta", "node", "producer", "state", "wire"}
    assert len(BUGS) >= 44 + 14 + 16
    assert all(bug.description.endswith(".") for bug in BUGS.values())
