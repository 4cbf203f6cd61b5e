"""A Spark session that is ready for inturn."""

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
from inturn.spark.extra import needs_extra
from inturn.spark.java import java_home
from inturn.spark.registration import register
from inturn.spark.shipping import is_local, ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_EXTENDED = (_JAVA_OPTIONS, "spark.executor.extraJavaOptions")  # Spark puts options of its own before the user's
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
# What a JVM says at its start about the modules that Spark names to it; none of it is anything to act on.
_NOISE = (b"WARNING: Using incubator modules", b"WARNING: package sun.security.action not in java.base")
_starting = threading.Lock()


def session(
    app_name: str = "inturn",
    master: str = "local[*]",
    *,
    config: Mapping[str, object] | None = None,
    quiet: bool = True,
) -> SparkSession:
    """A Spark session that knows the data source `inturn`: the one that is active, else a new one.

    A new one runs on the Java that `java_home` finds; with a local master on this Python, whose import path the workers
    have, too. One on a cluster is sent the package inturn (see `ship`). `config` comes on top of what is set here. An
    active session keeps its name and its master; a setting in `config` that it can no longer take raises
    `InvalidInput`. Under spark-submit, what that was told comes before name, master and the settings made here.
    `quiet`: Spark logs errors alone, without progress bars; it belongs to the JVM, so it counts for the first session
    of a process.

    Blocks until Spark runs, some seconds. Any thread may call it."""
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
    """The configuration of a new session, each for a reason."""
    chosen = {
        # A second copy of a task would only wait for the first one's claim.
        "spark.speculation": "false",
        # A worker that crashes in compiled code says where.
        "spark.python.worker.faulthandler.enabled": "true",
        # Filters reach the source, which then reads only the partitions that can have such messages.
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    if quiet:
        chosen["spark.ui.showConsoleProgress"] = "false"
    if is_local(master):
        # Nobody else needs to reach it, and a laptop changes its address when it changes its network.
        chosen["spark.driver.bindAddress"] = chosen["spark.driver.host"] = "127.0.0.1"
        chosen["spark.ui.enabled"] = "false"
        # Spark's 200 are for a cluster: here each is a task that starts and ends for a few rows.
        chosen["spark.sql.shuffle.partitions"] = str(_cores(master))
        # Both start processes to put files in place on a local disk; the default one spends four times as much on it.
        chosen["spark.sql.streaming.checkpointFileManagerClass"] = (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        )
    return chosen


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cores(master: str) -> int:
    """Of local, local[2], local[*], local[2,3] and local-cluster[2,1,1024]: workers × cores × MB."""
    numbers = [number.strip() for number in master.partition("[")[2].rstrip("]").split(",")]
    if not numbers[0]:
        return 1
    if numbers[0] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counted = numbers[:2] if master.startswith("local-cluster") else numbers[:1]
    if not all(number.isdecimal() for number in counted):
        raise InvalidInput(
            f"Spark master {master!r} is none that Spark knows; use local[4], local[*] or spark://host:7077"
        )
    product = 1
    for number in counted:
        product *= int(number)
    return max(product, 1)


def _active() -> SparkSession | None:
    """This thread's session, else that of the others: a process has one Spark."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        return None
    spark = SparkSession.getActiveSession()
    return spark if spark is not None else SparkSession.builder.getOrCreate()


def _adapt(spark: SparkSession, asked: Mapping[str, str]) -> None:
    """Settings for a session that runs already; nothing is changed if one of them cannot be."""
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
        gateway = SparkContext._gateway  # the JVM of a session that was stopped
        if gateway is None:
            with _stderr(quiet) as where:
                gateway = launch_gateway(conf, where)  # type: ignore[no-untyped-call]
        context = SparkContext(conf=conf, gateway=gateway)
    if quiet:
        context.setLogLevel("ERROR")
    return SparkSession.builder.getOrCreate()


def _start_submitted(app_name: str, master: str, asked: Mapping[str, str], quiet: bool) -> SparkSession:
    """In the JVM of spark-submit, which has started this process: what that was told is the user's word, too."""
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
    """Of the environment that Spark starts in: which Java, which Python."""
    # PYSPARK_DRIVER_PYTHON finds sources by their names. One that is registered plans in the driver and reads in the
    # executors with what PYSPARK_PYTHON names; on a cluster that is for whoever has installed it there to say.
    chosen = {"JAVA_HOME": str(java_home()), "PYSPARK_DRIVER_PYTHON": sys.executable}
    if is_local(master):
        chosen["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON") or sys.executable
        if chosen["PYSPARK_PYTHON"] == sys.executable:
            chosen["PYTHONPATH"] = os.pathsep.join(_import_path())
    return chosen


def _import_path() -> list[str]:
    """Where this process finds modules, beside what all of this Python have. Handlers are imported by name."""
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
    """Where a process that is started inside writes its errors: to ours, without noise if that is asked for."""
    if not is_filtered:
        yield {}
        return
    ours, theirs = os.pipe()
    threading.Thread(target=_pass_on, args=(ours,), name="inturn-spark-stderr", daemon=True).start()
    try:
        yield {"stderr": theirs}
    finally:
        os.close(theirs)


def _pass_on(source: int) -> None:
    """Until the process ends. Whole lines, so that noise can be told from the rest."""
    with os.fdopen(source, "rb") as lines:
        for line in lines:
            if not line.startswith(_NOISE):
                with contextlib.suppress(OSError):  # ours is closed, and theirs must not wait for anybody to read
                    os.write(2, line)
