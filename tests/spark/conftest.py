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
    """The session that all tests share; it knows the data source. Do not stop it."""
    with warnings.catch_warnings():
        # of 3.12 and newer, about how pyspark starts its JVM beside threads of ours
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        shared = session("inturn-tests", "local[2]", config=QUICK)
    yield shared
    shared.stop()
    end_jvm()


def end_jvm() -> None:
    """A session that is stopped leaves its JVM to the next one; after the last it is to go."""
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    jvm = gateway.proc
    jvm.stdin.close()
    jvm.wait(JVM_END_S)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A temporary folder, served on loopback: its address and a connection."""
    with serving(tmp_path / "served") as opened:
        yield opened
