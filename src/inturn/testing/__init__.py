"""Tools for tests of ordered systems: the order checker, histories, a recorder and a fake clock.

The simulator, its seeded bugs and the process fault harness are in the package `simulator` of a checkout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inturn.testing.checker import check
from inturn.testing.clock import FakeClock
from inturn.testing.history import (
    ClaimEnded,
    ClaimGranted,
    Committed,
    ConsumerCrashed,
    Event,
    GroupFiltered,
    HandlerEnd,
    HandlerStart,
    History,
    KeyResumed,
    KeySkipped,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)
from inturn.testing.recorder import Recorder
from inturn.testing.verdict import OrderViolated, Verdict, Violation, ViolationKind

__all__ = [
    "ClaimEnded",
    "ClaimGranted",
    "Committed",
    "ConsumerCrashed",
    "Event",
    "FakeClock",
    "GroupFiltered",
    "HandlerEnd",
    "HandlerStart",
    "History",
    "KeyResumed",
    "KeySkipped",
    "LeaseEnded",
    "LeaseGranted",
    "OffsetsReset",
    "OrderViolated",
    "ProcessRestarted",
    "Recorder",
    "SendAcknowledged",
    "Verdict",
    "Violation",
    "ViolationKind",
    "check",
]

# Names that this package had in version 0.1 → the module of a checkout that has the name now.
_MOVED = {
    **dict.fromkeys(("Report", "simulate"), "simulator.simulation"),
    **dict.fromkeys(("SimCrash", "SimDisk"), "simulator.disk"),
    **dict.fromkeys(("Behaviour", "Proxies", "Proxy"), "simulator.processes.proxy"),
    **dict.fromkeys(("ProcessReport", "ProcessSettings", "run_processes"), "simulator.processes.run"),
    "FaultCounts": "simulator.processes.faults",
}

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name in _MOVED:
            raise AttributeError(f"inturn.testing.{name} is in {_MOVED[name]}, which only a checkout of inturn has")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
