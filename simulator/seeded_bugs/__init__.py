"""Bugs on purpose: tests check that the simulation finds the bugs.

    with BUGS["acknowledges_before_sync"].injected():
        assert not simulate(seed=7).ok

A bug is a likely mistake that replaces a small part of the product while the block runs. The product has no switches
for bugs. Not thread-safe: a replacement is global.
"""

from __future__ import annotations

from simulator.seeded_bugs import (
    broker,
    claims,
    consumer,
    growth,
    lanes,
    log,
    meta,
    node,
    parking,
    producer,
    state,
    straight_lanes,
    wire,
)
from simulator.seeded_bugs.bug import SEEDS_MAX, BrokenBug, Patch, SeededBug, finding, seeds_to_find

__all__ = ["BUGS", "SEEDS_MAX", "BrokenBug", "Patch", "SeededBug", "finding", "seeds_to_find"]

_PAGES = (broker, state, node, wire, meta, log, producer, consumer, lanes, parking, straight_lanes, growth, claims)

BUGS: dict[str, SeededBug] = {bug.name: bug for page in _PAGES for bug in page.BUGS}
