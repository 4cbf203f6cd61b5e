"""The result of a benchmark, the same class for all benchmarks."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True)
class Beside:
    """A bound or a peer, measured in the same run."""

    what: str
    figure: float


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A setting of a sweep."""

    what: str
    figure: float
    unit: str
    beside: list[Beside]
    ratio: float
    aim: str
    is_met: bool
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """`ratio` is the figure divided by the first value in `beside`; with rows, the worst ratio of the rows with an
    aim."""

    bench: str
    figure: float
    unit: str
    beside: list[Beside]
    ratio: float
    rows: list[BenchRow] = field(default_factory=list)
    machine: dict[str, str | int] = field(default_factory=lambda: machine())

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def machine() -> dict[str, str | int]:
    return {
        "cpus": os.cpu_count() or 0,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
