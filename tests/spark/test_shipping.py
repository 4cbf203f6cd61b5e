"""S7: modules that are sent to executors, and modules that have to be installed there."""

from __future__ import annotations

import importlib.machinery
import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from inturn.model.errors import InvalidInput
from inturn.spark import shipping
from inturn.spark.shipping import INSTALLED, check_executors, is_local, ship
from tests.spark.child import found_by, run


def _names(module: str) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(shipping._zipped(module))) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import from."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_nothing_is_sent_where_the_tasks_run_on_this_machine(spark: SparkSession) -> None:
    before = spark.sparkContext.listFiles
    assert ship(spark, ["tests.spark.served"]) is False
    assert spark.sparkContext.listFiles == before
    assert [is_local(one) for one in ("local", "local[2]", "local-cluster[2,1,1024]")] == [True] * 3
    assert [is_local(one) for one in ("spark://host:7077", "yarn", "k8s://https://host", None)] == [False] * 4


def test_the_package_goes_without_tests_and_compiled_files() -> None:
    names = _names("inturn")
    assert {"inturn/__init__.py", "inturn/spark/source/source.py", "inturn/consumer/consumer.py"} <= set(names)
    assert [name for name in names if not name.startswith("inturn/") or "__pycache__" in name] == []


def test_the_same_files_make_the_same_archive() -> None:
    assert shipping._archive("inturn") == shipping._archive("inturn.model.message")


def test_a_module_brings_the_package_that_it_is_in(modules: Path) -> None:
    (modules / "whole").mkdir()
    for name in ("__init__.py", "handlers.py", "helper.py"):
        (modules / "whole" / name).touch()
    (modules / "single.py").touch()
    (modules / "loose").mkdir()  # without __init__: a namespace package, possibly in several folders
    for name in ("handlers.py", "other.py"):
        (modules / "loose" / name).touch()
    assert _names("whole.handlers") == ["whole/__init__.py", "whole/handlers.py", "whole/helper.py"]
    assert _names("single") == ["single.py"]
    assert _names("loose.handlers") == ["loose/handlers.py"]


def test_what_was_sent_can_be_imported_from_the_archive(modules: Path) -> None:
    (modules / "loose").mkdir()
    (modules / "loose" / "handlers.py").touch()
    code = "import inturn.spark, loose.handlers as one; print(inturn.__file__); print(one.__file__)"
    path = [str(shipping._archive(module)) for module in ("inturn", "loose.handlers")]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.split()
    assert said == [f"{path[0]}/inturn/__init__.py", f"{path[1]}/loose/handlers.py"]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("__main__", "code in __main__ cannot be sent to executors; move the code"),
        ("no_such_module", "no module 'no_such_module' can be imported here"),
        ("no_such.module", "no module 'no_such.module' can be imported here"),
        ("sys", "module 'sys' has no file that could be sent to executors"),
    ],
)
def test_a_module_that_cannot_be_sent_is_named(module: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(why)):
        shipping._zipped(module)


def test_a_compiled_module_is_not_sent(modules: Path) -> None:
    (modules / "fast").mkdir()
    (modules / "fast" / "__init__.py").touch()
    compiled = "core" + importlib.machinery.EXTENSION_SUFFIXES[0]
    (modules / "fast" / compiled).touch()
    with pytest.raises(InvalidInput, match=f"module 'fast' has a compiled part, {re.escape(compiled)}, which cannot"):
        shipping._zipped("fast")


def test_what_has_to_be_installed_is_what_inturn_depends_on() -> None:
    """All dependencies, except those of the command line and metrics; plus Arrow and numpy from the extra."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[^\w-]", one)[0] for one in project["dependencies"]}
    assert set(INSTALLED) == needed - {"rich", "typer", "prometheus-client"} | {"numpy", "pyarrow"}


def test_executors_that_have_everything_pass(spark: SparkSession) -> None:
    check_executors(spark)


def test_what_executors_cannot_import_is_named(spark: SparkSession) -> None:
    with pytest.raises(
        InvalidInput, match=r"cannot import no_such_module \(No module named .*pip install 'inturn\[spa"
    ):
        check_executors(spark, ["no_such_module"])


SENT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from inturn.spark import session, shipping
shipping.is_local = lambda master: False  # as if the executors were on other machines
config = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
spark = session(master="local[1]", config=config)
assert shipping.ship(spark, ["sent_handlers"]) and shipping.ship(spark, ["sent_handlers"])

def where(_):
    import inturn, sent_handlers
    return inturn.__file__, sent_handlers.__file__

print(json.dumps({
    "files": len(spark.sparkContext.listFiles),
    "where": spark.sparkContext.parallelize([0], 1).map(where).collect()[0],
}))
"""


def test_tasks_import_what_was_sent(tmp_path: Path) -> None:
    (tmp_path / "sent_handlers.py").touch()
    found = found_by(run(SENT, str(tmp_path)))
    assert found["files"] == 2
    assert re.search(r"userFiles-[^/]+/inturn-\w+\.zip/inturn/__init__\.py$", found["where"][0])
    assert re.search(r"userFiles-[^/]+/sent_handlers-\w+\.zip/sent_handlers\.py$", found["where"][1])
