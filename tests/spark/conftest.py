from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from inturn.spark.session import session
from tests.spark.served import Served, serving

QUICK = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}  # for JVMs that live a minute
JVM_END_S = 30.0


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that all tests share, with the data source registered. Do not stop the session."""
    with warnings.catch_warnings():
        # Python 3.12 and newer warn because pyspark forks a JVM while this process has threads
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        shared = session("inturn-tests", "local[2]", config=QUICK)
    yield shared
    shared.stop()
    end_jvm()


def end_jvm() -> None:
    """A stopped session leaves its JVM to the next session. End the JVM after the last session."""
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    jvm = gateway.proc
    jvm.stdin.close()
    jvm.wait(JVM_END_S)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A temporary folder, served on loopback, with a connection."""
    with serving(tmp_path / "served") as opened:
        yield opened
