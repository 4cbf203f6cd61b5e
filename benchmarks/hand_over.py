"""hand-over: the pause of a partition when its consumer leaves and a different consumer of the group takes over.

Server, producer and both consumers are processes, over TCP; 8 partitions, 100 messages a second per partition all the
time, order by partition. The consumer that leaves holds half of the partitions.
Stopped: from the end of its last call for a partition to the start of the first call by the other consumer.
Killed (kill -9): from the kill to the same start. The figures are the worst of all moved partitions and repetitions.
Beside the figures: the life of the lease, for the kill; and the worst pause between two calls of a partition that
stays, in the second before: the effect of the pace of the messages and the machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.child import Child
from benchmarks.noting_child import Call, calls_since
from benchmarks.report import BenchReport, BenchRow, Beside, median
from benchmarks.served_child import served
from inturn.client import Connection, connect
from inturn.model.errors import InturnError
from inturn.model.settings import LeaseSettings

SUBJECT, GROUP = "bench", "group"
PARTITIONS, RATE = 8, 800
LEASE = LeaseSettings(life_s=3.0, renew_s=0.5, margin_s=0.3)
QUICK_LEASE = LeaseSettings(life_s=1.0, renew_s=0.2, margin_s=0.1)
AIM_STOPPED_MS, AIM_AFTER_LEASE_MS = 200.0, 300.0
STALL_S = 30.0
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pauses:
    """The pauses of the partitions that moved, and for comparison of the partitions that stayed."""

    handed_ms: list[float] = field(default_factory=list)
    staying_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scene:
    """A consumer stays all the time; other consumers come and go in sequence."""

    address: str
    mq: Connection
    staying: Child


def run(quick: bool) -> BenchReport:
    repetitions, lease = (1, QUICK_LEASE) if quick else (6, LEASE)
    stopped, killed = Pauses(), Pauses()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-bench-")))
        address = stack.enter_context(served(folder, lease)).hear()
        mq = stack.enter_context(connect(address, wait_s=10.0))
        mq.create_subject(SUBJECT, partitions=PARTITIONS)
        producer = stack.enter_context(Child("pacing_child", address, SUBJECT))
        scene = Scene(address, mq, stack.enter_context(_consumer(address, "stays")))
        producer.hear()
        scene.staying.hear()
        producer.ask("start", RATE)
        for number in range(repetitions):
            _hand_over(scene, f"stops-{number}", stopped, kills=False)
            _hand_over(scene, f"dies-{number}", killed, kills=True)
        producer.ask("stop")
    rows = [_stopped_row(stopped), _killed_row(killed, lease)]
    first = rows[0]
    return BenchReport("hand-over", first.figure, first.unit, first.beside, first.ratio, rows)


def _consumer(address: str, name: str) -> Child:
    return Child("noting_child", address, SUBJECT, GROUP, name)


def _hand_over(scene: Scene, name: str, pauses: Pauses, *, kills: bool) -> None:
    with _consumer(scene.address, name) as going:
        going.hear()
        held = _wait_for_half(scene, name)
        time.sleep(1.5)  # all partitions are consumed, and renewals happen at any time of their interval
        since_ns = time.monotonic_ns()
        if kills:
            going.kill()
            last_ns = dict.fromkeys(held, since_ns)
        else:
            going.ask("stop")
            calls = calls_since(going, 0)
            last_ns = {call.partition: call.ended_ns for call in calls}  # the last of each stays
        first_ns = _wait_for_first_calls(scene.staying, since_ns, held)
    pauses.handed_ms.extend((first_ns[partition] - last_ns[partition]) / 1e6 for partition in held)
    before = calls_since(scene.staying, since_ns - SECOND_NS)
    pauses.staying_ms.append(_worst_pause_ms(call for call in before if call.began_ns < since_ns))
    scene.staying.ask("forget")


def _wait_for_half(scene: Scene, name: str) -> list[int]:
    """The partitions of the new consumer."""
    until_s = time.monotonic() + STALL_S
    while time.monotonic() < until_s:
        partitions = scene.mq.group(SUBJECT, GROUP).describe().partitions
        # A name gets a random suffix: every start is a new member.
        held = [one.partition for one in partitions if (one.owner or "").startswith(f"{name}-")]
        if len(held) == PARTITIONS // 2:
            return held
        time.sleep(0.05)
    raise InturnError(f"{name} did not get half of the partitions in {STALL_S:.0f} s")


def _wait_for_first_calls(child: Child, since_ns: int, partitions: list[int]) -> dict[int, int]:
    """The time of the next consumption, by partition."""
    until_s = time.monotonic() + STALL_S
    while time.monotonic() < until_s:
        first_ns: dict[int, int] = {}
        for call in calls_since(child, since_ns):
            first_ns.setdefault(call.partition, call.began_ns)
        if set(partitions) <= first_ns.keys():
            return first_ns
        time.sleep(0.05)
    raise InturnError(f"partitions {set(partitions) - first_ns.keys()} were not consumed again in {STALL_S:.0f} s")


def _worst_pause_ms(calls: Iterable[Call]) -> float:
    last_ns: dict[int, int] = {}
    worst_ns = 0
    for call in calls:
        worst_ns = max(worst_ns, call.began_ns - last_ns.get(call.partition, call.began_ns))
        last_ns[call.partition] = call.ended_ns
    return worst_ns / 1e6


def _stopped_row(pauses: Pauses) -> BenchRow:
    figure, staying = max(pauses.handed_ms), _staying(pauses)
    aim = f"< {AIM_STOPPED_MS:g} ms"
    ratio = figure / staying.figure
    return BenchRow("stopped, worst", figure, "ms", [staying], ratio, aim, figure < AIM_STOPPED_MS, _more(pauses))


def _killed_row(pauses: Pauses, lease: LeaseSettings) -> BenchRow:
    figure, life_ms = max(pauses.handed_ms), lease.life_s * 1000
    beside = [Beside("the life of the lease", life_ms), _staying(pauses)]
    aim, is_met = f"< lease + {AIM_AFTER_LEASE_MS:g} ms", figure < life_ms + AIM_AFTER_LEASE_MS
    return BenchRow("killed, worst", figure, "ms", beside, figure / life_ms, aim, is_met, _more(pauses))


def _staying(pauses: Pauses) -> Beside:
    return Beside("a partition that stays, worst pause", max(pauses.staying_ms))


def _more(pauses: Pauses) -> dict[str, float]:
    return {"median_ms": median(pauses.handed_ms), "hand_overs": len(pauses.handed_ms)}
