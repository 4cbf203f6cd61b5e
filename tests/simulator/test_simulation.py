from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroaring import BitMap64

from inturn.protocol.commands import Progress
from inturn.testing.history import Committed, GroupFiltered, HandlerStart
from simulator import faults
from simulator.consumer import SimRecorder
from simulator.faults import FAULTS, OF_COMMANDS, OF_STREAMS
from simulator.settings import GROUP, SUBJECT, tags_chance
from simulator.simulation import FAULTS_MIN, Report, Simulation, simulate
from simulator.workload import MESSAGES
from simulator.world import EVENTS_MAX, TimeStandsStill, World

SEEDS = range(20)  # `make test` runs more histories to show that order is kept


@pytest.fixture(scope="module")
def reports() -> Iterator[list[Report]]:
    logging.disable(logging.CRITICAL)
    yield [simulate(seed) for seed in SEEDS]
    logging.disable(logging.NOTSET)


def test_histories_keep_the_order(reports: list[Report]) -> None:
    for report in reports:
        assert report.ok, str(report)


def test_histories_are_as_large_as_they_say(reports: list[Report]) -> None:
    for report in reports:
        starts = [event for event in report.history if isinstance(event, HandlerStart)]
        assert len(report.faults) >= FAULTS_MIN
        assert len({start.consumer for start in starts}) >= 3, report
        assert {start.partition for start in starts} >= {0, 1, 2, 3}, report
        assert {(start.subject, start.group) for start in starts} == {(SUBJECT, GROUP)}
        # Without a sync, a power loss removes acknowledged messages. These messages are not in the checked history.
        if not report.coverage["log.unsynced lost"]:
            unwanted = report.coverage["log.unwanted message"]
            assert len({start.message_id for start in starts}) + unwanted >= MESSAGES, report


def test_some_histories_have_a_group_that_leaves_out_what_has_not_its_tag(reports: list[Report]) -> None:
    """B7: ranges of unwanted messages are skipped, through all faults."""
    filtered = [report for report in reports if tags_chance(report.seed) is not None]
    assert filtered
    for report in filtered:
        starts = {event.offset for event in report.history if isinstance(event, HandlerStart)}
        (known,) = (event for event in report.history if isinstance(event, GroupFiltered))
        assert starts
        assert report.coverage["log.unwanted message"] == sum(map(len, known.unwanted.values())) > 50


def test_the_same_seed_gives_the_same_history(reports: list[Report], tmp_path: Path) -> None:
    for report in reports[:3]:
        report.history.save(tmp_path / "first")
        again = simulate(report.seed)
        again.history.save(tmp_path / "again")
        assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()
        assert again.faults == report.faults
        assert again.coverage == report.coverage


def test_other_seeds_give_other_histories(reports: list[Report]) -> None:
    assert len({len(report.history) for report in reports}) > len(SEEDS) // 2


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_history_and_is_survived(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every history has only this fault, several times."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    only = {name: FAULTS[name]}
    monkeypatch.setattr("simulator.simulation.FAULTS", only)
    seed = next(seed for seed in range(1, 100) if Simulation(seed).possible_faults)
    report = simulate(seed)
    assert report.ok, str(report)
    assert set(report.faults) == {name}
    assert report.coverage[f"fault.{name}"] >= FAULTS_MIN


def test_histories_with_streams_have_no_faults_of_single_commands_and_the_other_way_round() -> None:
    simulations = [Simulation(seed) for seed in range(20)]
    assert {simulation.has_streams for simulation in simulations} == {True, False}
    for simulation in simulations:
        assert OF_COMMANDS.isdisjoint(simulation.possible_faults) is simulation.has_streams
        assert OF_STREAMS.isdisjoint(simulation.possible_faults) is not simulation.has_streams


def test_every_fault_of_the_module_is_in_the_list() -> None:
    public = {
        name
        for name, value in vars(faults).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == faults.__name__
    }
    assert public == set(FAULTS)


def test_of_what_a_commit_claims_only_what_there_are_messages_for_is_recorded() -> None:
    recorder = SimRecorder(World(0))
    recorder.sent("orders", 0, 5)
    recorder.sent("orders", 1, 6)
    gap = BitMap64()
    gap.add_range(3, 1 << 20)
    for partition, offsets in ((0, (5,)), (2, ())):
        recorder.committed("orders", "g", "c", Progress(partition, 1, 2, 1, gap.serialize()))
        committed = list(recorder.history)[-1]
        assert isinstance(committed, Committed)
        assert committed.finished == offsets


def test_a_world_that_goes_round_in_circles_is_stopped() -> None:
    world = World(0)

    def again() -> None:
        world.after(0.0, again)

    again()
    with pytest.raises(TimeStandsStill, match=f"{EVENTS_MAX} events"):
        world.run(1.0)


def test_a_problem_is_told_with_its_seed_and_faults() -> None:
    simulation = Simulation(5)
    report = simulation.run()
    assert str(report).startswith("seed 5: ok, faults: ")
