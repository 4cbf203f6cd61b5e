"""For tests of ordered systems: the order checker, histories, a fake clock, a disk that fails, the simulation, and
faults done to real processes.

Names are loaded when they are first used, so that a test that needs the checker does not load the simulation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from inturn.testing.process_faults import FaultCounts
    from inturn.testing.process_proxy import Behaviour, Proxies, Proxy
    from inturn.testing.process_run import ProcessReport, ProcessSettings, run_processes
    from inturn.testing.recorder import Recorder
    from inturn.testing.sim_disk import SimCrash, SimDisk
    from inturn.testing.simulation import Report, simulate
    from inturn.testing.verdict import OrderViolated, Verdict, Violation, ViolationKind

__all__ = [
    "Behaviour",
    "ClaimEnded",
    "ClaimGranted",
    "Committed",
    "ConsumerCrashed",
    "Event",
    "FakeClock",
    "FaultCounts",
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
    "ProcessReport",
    "ProcessRestarted",
    "ProcessSettings",
    "Proxies",
    "Proxy",
    "Recorder",
    "Report",
    "SendAcknowledged",
    "SimCrash",
    "SimDisk",
    "Verdict",
    "Violation",
    "ViolationKind",
    "check",
    "run_processes",
    "simulate",
]

_MODULES = {
    "check": "checker",
    "FakeClock": "clock",
    "FaultCounts": "process_faults",
    "Recorder": "recorder",
    **dict.fromkeys(("Behaviour", "Proxies", "Proxy"), "process_proxy"),
    **dict.fromkeys(("ProcessReport", "ProcessSettings", "run_processes"), "process_run"),
    **dict.fromkeys(("SimCrash", "SimDisk"), "sim_disk"),
    **dict.fromkeys(("Report", "simulate"), "simulation"),
    **dict.fromkeys(("OrderViolated", "Verdict", "Violation", "ViolationKind"), "verdict"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'history')}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
