"""A drain driver as a separate process, for fault tests: `python -m tests.spark.drain_driver SPEC`.

The driver starts Spark, reports readiness and the process id of Java, waits for the start file, drains, and reports the
result.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from inturn.model.errors import InturnError
from inturn.model.settings import ConsumerSettings
from inturn.spark.ordered.drain import Drain, DrainSettings
from inturn.spark.session import session
from tests.spark.noting import Noting

QUICK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


class DriverSpec(msgspec.Struct, frozen=True):
    """Handlers write notes to `folder`; driver and test exchange files in `place`."""

    address: str
    subject: str
    group: str
    folder: str
    place: str
    handling_s: float
    round_s: float = 5.0
    max_lag: int | None = None


class Ready(msgspec.Struct, frozen=True):
    java: int  # process id


class Ended(msgspec.Struct, frozen=True):
    """`error` is the class and the text of the error that ended the drain, or empty."""

    ended: str = ""
    error: str = ""
    done: int = 0
    lag: int = 0
    rounds: int = 0
    failed_rounds: int = 0


def tell(path: Path, what: msgspec.Struct) -> None:
    """Write the file atomically."""
    written = path.with_suffix(".writing")
    written.write_bytes(msgspec.json.encode(what))
    written.rename(path)


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1].encode(), type=DriverSpec)
    place = Path(spec.place)
    spark = session("inturn-drain-faults", "local[2]", config=QUICK)
    spark.range(2).count()  # the first job is slow
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    tell(place / "ready", Ready(gateway.proc.pid))
    while not (place / "go").exists():
        time.sleep(0.02)
    handler = Noting(Path(spec.folder), handling_s=spec.handling_s)
    consumer = ConsumerSettings(concurrency=8, commit_interval_s=0.05, heartbeat_s=0.5)
    settings = DrainSettings(round_s=spec.round_s, max_lag=spec.max_lag)
    drain = Drain(spark, spec.address, spec.subject, spec.group, handler, consumer=consumer, settings=settings)
    try:
        report = drain.run()
    except InturnError as error:
        tell(place / "ended", Ended(error=f"{type(error).__name__}: {error}"))
    else:
        counts = (report.done, report.lag, report.rounds, report.failed_rounds)
        tell(place / "ended", Ended(report.ended, "", *counts))
    spark.stop()


if __name__ == "__main__":
    main()
