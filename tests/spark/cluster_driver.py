"""A driver on a cluster, as a separate process: `python -m tests.spark.cluster_driver MASTER`.

The driver reads commands as lines of JSON (a function of this module and arguments) and answers with one line per
command. The driver's Python has all modules; the executors run the Python of PYSPARK_PYTHON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from inturn.model.settings import ConsumerSettings
from inturn.spark.ordered.drain import Drain, DrainSettings
from inturn.spark.ordered.task import disconnect
from inturn.spark.session import session
from inturn.spark.shipping import check_executors, ship
from tests.spark.cluster import HOST, QUICK_JAVA
from tests.spark.noting import Noting

_ROOT = Path(__file__).parents[2]
CONFIG = {
    "spark.driver.host": HOST,
    "spark.driver.bindAddress": HOST,
    "spark.ui.enabled": False,
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": 2,
    "spark.executor.extraJavaOptions": "-Dinturn.test=true",  # Spark prepends its own options
}
CONSUMER = ConsumerSettings(concurrency=8, commit_interval_s=0.05, heartbeat_s=0.5)


class Driver:
    """The test's side of the driver process."""

    def __init__(self, master: str, python: Path, modules: Path) -> None:
        """`modules` is a folder on the driver's import path only, as is the archive `packed.zip` in the folder."""
        path = os.pathsep.join([str(_ROOT), str(modules), str(modules / "packed.zip")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.cluster_driver", master],
            env={**os.environ, **QUICK_JAVA, "PYSPARK_PYTHON": str(python), "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, function: str, **arguments: object) -> Any:
        self.begin(function, **arguments)
        return self.answer()

    def refused(self, function: str, **arguments: object) -> tuple[str, str]:
        """Run a command that has to fail. Returns class and text of the error."""
        self.begin(function, **arguments)
        answer = self._line()
        assert "error" in answer, answer
        return answer["error"], answer["text"]

    def begin(self, function: str, **arguments: object) -> None:
        """Start a command; a later call reads the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"function": function, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        answer = self._line()
        assert "error" not in answer, f"{answer['error']}: {answer['text']}"
        return answer["answer"]

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the driver has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()


def where(spark: SparkSession, modules: list[str]) -> list[dict[str, str]]:
    """The files from which every executor imports these modules, after shipping."""
    ship(spark, modules)

    def look(_: Iterable[int]) -> Iterator[dict[str, str]]:
        import importlib
        import time

        time.sleep(0.5)  # so that every executor runs one task
        files = {module: importlib.import_module(module).__file__ or "" for module in ("inturn", *modules)}
        yield {"executor": os.getcwd(), "python": sys.executable, **files}

    return spark.sparkContext.parallelize(range(2), 2).mapPartitions(look).collect()


def read(spark: SparkSession, address: str, subject: str) -> dict[str, Any]:
    rows = spark.read.format("inturn").option("server", address).option("subject", subject).load()
    number = F.col("body").cast("string").cast("long")
    found = rows.groupBy("partition").agg(F.count("*").alias("count"), F.sum(number).alias("sum")).collect()
    return {str(row["partition"]): [row["count"], row["sum"]] for row in found}


def drain(
    spark: SparkSession, address: str, handler: str | dict[str, Any], round_s: float = 30.0, take_over_s: float = 60.0
) -> dict[str, Any]:
    """Drain `orders` for `billing`. The handler is a name, or the arguments of `Noting`."""
    chosen = handler if isinstance(handler, str) else Noting(Path(handler.pop("folder")), **handler)
    settings = DrainSettings(round_s=round_s, take_over_s=take_over_s)
    job = Drain(spark, address, "orders", "billing", chosen, consumer=CONSUMER, settings=settings)
    try:
        report = job.run()
    finally:
        disconnect(address)
    return {
        "ended": report.ended,
        "done": report.done,
        "lag": report.lag,
        "rounds": report.rounds,
        "failed_rounds": report.failed_rounds,
        "pids": sorted({one.pid for one in report.outcomes if one.handled}),
    }


def check(spark: SparkSession, modules: list[str], python: str | None = None) -> None:
    """Check executors with a Python other than PYSPARK_PYTHON."""
    context = spark.sparkContext
    former = context.pythonExec
    context.pythonExec = former if python is None else python
    try:
        check_executors(spark, modules)
    finally:
        context.pythonExec = former


def check_room(spark: SparkSession, memory: str, wait_s: float) -> None:
    """Check executors in a session with this executor memory."""
    spark.stop()
    too_big = session("inturn-cluster", sys.argv[1], config={**CONFIG, "spark.executor.memory": memory})
    try:
        check_executors(too_big, wait_s=wait_s)
    finally:
        too_big.stop()


def stop() -> None:
    """Free the cluster for other drivers, until the next command."""
    spark = SparkSession.getActiveSession()
    if spark is not None:
        spark.stop()


def do(function: str, **arguments: Any) -> Any:
    if function == "stop":
        stop()
        return None
    functions = {one.__name__: one for one in (where, read, drain, check, check_room)}
    spark = session("inturn-cluster", sys.argv[1], config=CONFIG)
    ship(spark, ["simulator"])  # handlers of tests record their calls with a recorder of the simulator
    return functions[function](spark, **arguments)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of other code is not an answer
    for line in sys.stdin:
        try:
            answer = {"answer": do(**json.loads(line))}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)[:4000]}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
