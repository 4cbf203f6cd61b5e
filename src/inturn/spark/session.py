"""Spark sessions with the data source `inturn`."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inturn.model.errors import InvalidInput
from inturn.spark.extra import needs_extra, register
from inturn.spark.java import java_home
from inturn.spark.shipping import is_local, ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_EXTENDED = (_JAVA_OPTIONS, "spark.executor.extraJavaOptions")  # Spark prepends its own options
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
# Warnings of a starting JVM about modules that Spark adds. None needs an action.
_NOISE = (b"WARNING: Using incubator modules", b"WARNING: package sun.security.action not in java.base")
_starting = threading.Lock()


def session(
    app_name: str = "inturn",
    master: str = "local[*]",
    *,
    config: Mapping[str, object] | None = None,
    quiet: bool = True,
) -> SparkSession:
    """The active Spark session, or a new session, with the data source `inturn` registered.

    A new session uses the Java of `java_home`. With a local master the workers use this Python and this import path. On
    a cluster the package inturn is sent to the executors (see `ship`). `config` overrides the settings made here. An
    active session keeps its name and its master; a setting in `config` that an active session cannot change raises
    `InvalidInput`. Under spark-submit, the arguments of spark-submit override name, master and the settings made here.
    `quiet`: Spark logs only errors and shows no progress bars. `quiet` applies to the JVM, so only the first session of
    a process can set it.

    Blocks for some seconds until Spark runs. Any thread may call this function."""
    with needs_extra():
        import pyspark.sql  # noqa: F401
    asked = {key: _text(value) for key, value in (config or {}).items()}
    with _starting:
        spark = _active()
        if spark is not None:
            _adapt(spark, asked)
        elif "PYSPARK_GATEWAY_PORT" in os.environ:
            spark = _start_submitted(app_name, master, asked, quiet)
        else:
            spark = _start(app_name, master, asked, quiet)
        if not ship(spark):
            register(spark)
    return spark


def settings(master: str, *, quiet: bool = True) -> dict[str, str]:
    """The configuration of a new session."""
    chosen = {
        # A speculative copy of a task would only wait for the claim of the first copy.
        "spark.speculation": "false",
        # A worker that crashes in compiled code prints its stack.
        "spark.python.worker.faulthandler.enabled": "true",
        # With pushed filters the source reads only the partitions that may have matching messages.
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    if quiet:
        chosen["spark.ui.showConsoleProgress"] = "false"
    if is_local(master):
        # Only local processes connect to the driver, and a laptop's address changes with its network.
        chosen["spark.driver.bindAddress"] = chosen["spark.driver.host"] = "127.0.0.1"
        chosen["spark.ui.enabled"] = "false"
        # Spark's default of 200 is for clusters. On one machine it means 200 tasks with a few rows each.
        chosen["spark.sql.shuffle.partitions"] = str(_cores(master))
        # Both managers start processes to rename files on a local disk; the default manager takes four times as long.
        chosen["spark.sql.streaming.checkpointFileManagerClass"] = (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        )
    return chosen


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cores(master: str) -> int:
    """The number of cores of local, local[2], local[*], local[2,3] or local-cluster[2,1,1024] (workers, cores, MB)."""
    numbers = [number.strip() for number in master.partition("[")[2].rstrip("]").split(",")]
    if not numbers[0]:
        return 1
    if numbers[0] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counted = numbers[:2] if master.startswith("local-cluster") else numbers[:1]
    if not all(number.isdecimal() for number in counted):
        raise InvalidInput(f"Spark does not know a master {master!r}; use local[4], local[*] or spark://host:7077")
    product = 1
    for number in counted:
        product *= int(number)
    return max(product, 1)


def _active() -> SparkSession | None:
    """The session of this thread, or the session of the process: a process has one Spark context."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        return None
    spark = SparkSession.getActiveSession()
    return spark if spark is not None else SparkSession.builder.getOrCreate()


def _adapt(spark: SparkSession, asked: Mapping[str, str]) -> None:
    """Change the settings of a running session. If a setting cannot change, raise before the first change."""
    different = {key: value for key, value in asked.items() if not _has(spark, key, value)}
    for key, value in different.items():
        if not spark.conf.isModifiable(key):
            raise InvalidInput(
                f"{key} is {spark.conf.get(key, None)!r} in the Spark session that is active and cannot become "
                f"{value!r}; stop that session first, or leave {key} out"
            )
    for key, value in different.items():
        spark.conf.set(key, value)


def _has(spark: SparkSession, key: str, value: str) -> bool:
    current = spark.conf.get(key, None)
    return current == value or (key in _EXTENDED and current is not None and value in current)


def _start(app_name: str, master: str, asked: Mapping[str, str], quiet: bool) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    conf = SparkConf(loadDefaults=False)
    chosen = {"spark.app.name": app_name, "spark.master": master, **settings(master, quiet=quiet), **asked}
    if quiet:
        options = f'-Dlog4j2.configurationFile="{_LOG_SETTINGS.as_uri()}" {asked.get(_JAVA_OPTIONS, "")}'
        chosen[_JAVA_OPTIONS] = options.strip()
    for key, value in chosen.items():
        conf.set(key, value)
    with _environment(_variables(master)):
        gateway = SparkContext._gateway  # the JVM of a stopped session
        if gateway is None:
            with _stderr(quiet) as where:
                gateway = launch_gateway(conf, where)  # type: ignore[no-untyped-call]
        context = SparkContext(conf=conf, gateway=gateway)
    if quiet:
        context.setLogLevel("ERROR")
    return SparkSession.builder.getOrCreate()


def _start_submitted(app_name: str, master: str, asked: Mapping[str, str], quiet: bool) -> SparkSession:
    """Start in the JVM of spark-submit, the parent of this process. Arguments of spark-submit have priority."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    if gateway is None:
        gateway = launch_gateway()  # type: ignore[no-untyped-call]
    conf = SparkConf(_jvm=gateway.jvm)
    conf.setIfMissing("spark.app.name", app_name).setIfMissing("spark.master", master)
    for key, value in settings(conf.get("spark.master", master), quiet=quiet).items():
        conf.setIfMissing(key, value)
    for key, value in asked.items():
        conf.set(key, value)
    SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.getOrCreate()


def _variables(master: str) -> dict[str, str]:
    """Environment variables for the start of Spark: the Java and the Python to use."""
    # Spark looks data sources up with PYSPARK_DRIVER_PYTHON. A registered source plans in the driver and reads in the
    # executors with PYSPARK_PYTHON. On a cluster the operator of the cluster sets PYSPARK_PYTHON.
    chosen = {"JAVA_HOME": str(java_home()), "PYSPARK_DRIVER_PYTHON": sys.executable}
    if is_local(master):
        chosen["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON") or sys.executable
        if chosen["PYSPARK_PYTHON"] == sys.executable:
            chosen["PYTHONPATH"] = os.pathsep.join(_import_path())
    return chosen


def _import_path() -> list[str]:
    """The import path of this process without the standard folders of this Python. Workers import handlers by name."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths = [os.path.abspath(path) for path in sys.path if not path.endswith(".zip")]
    return list(dict.fromkeys(path for path in paths if not any(path.startswith(one) for one in own)))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _stderr(is_filtered: bool) -> Iterator[dict[str, Any]]:
    """The stderr for a process that is started in the block: this process's stderr, without noise if filtered."""
    if not is_filtered:
        yield {}
        return
    read_end, write_end = os.pipe()
    threading.Thread(target=_pass_on, args=(read_end,), name="inturn-spark-stderr", daemon=True).start()
    try:
        yield {"stderr": write_end}
    finally:
        os.close(write_end)


def _pass_on(source: int) -> None:
    """Copy stderr line by line, without noise, until the process ends."""
    with os.fdopen(source, "rb") as lines:
        for line in lines:
            if not line.startswith(_NOISE):
                with contextlib.suppress(OSError):  # stderr may be closed; the process must not block on a full pipe
                    os.write(2, line)
