"""Modules for executors: send the package inturn and the modules of handlers, and check that compiled modules are
installed. Also loads handlers by name ("module:function"), as the command line and the data source name handlers."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import threading
import uuid
import zipfile
import zipimport
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

from inturn.consumer.outcome import text_of
from inturn.consumer.validation import check_handler
from inturn.consumer.worker import Handler
from inturn.model.errors import InvalidInput
from inturn.spark.extra import INSTALL, register

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

HandlerName: TypeAlias = str | Handler


def load_handler(handler: HandlerName) -> Handler:
    """The handler function: imported by name, or as given. InvalidInput gives the reason if the handler cannot be
    used."""
    if not isinstance(handler, str):
        check_handler(handler)
        return handler
    module_name, colon, path = handler.partition(":")
    if not colon or not module_name or not path:
        raise InvalidInput(f"handler {handler!r}: name it as module:function, for example shop:notify")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InvalidInput(
                f"handler {handler!r}: there is no module {error.name!r} (looked from {os.getcwd()} and in "
                f"{len(sys.path)} places of the Python path); run it where the module is, or set PYTHONPATH"
            ) from None
        why = f"{module_name} needs a module that is not installed: {error}"
        raise InvalidInput(f"handler {handler!r}: {why}") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise InvalidInput(f"handler {handler!r}: importing {module_name} failed with {text_of(error)}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise InvalidInput(f"handler {handler!r}: {module_name} has no {name!r}") from None
    if not callable(found):
        raise InvalidInput(f"handler {handler!r} is {found!r}, which cannot be called with (message, context)")
    check_handler(found)
    return found


def module_of(handler: HandlerName) -> str | None:
    """The module that executors have to import for the handler. None if the handler is pickled with the task."""
    if isinstance(handler, str):
        return handler.partition(":")[0]
    name = getattr(handler, "__module__", None)
    return None if name in (None, "__main__") else name


# Modules that inturn imports in a task. Most are compiled for a machine and cannot be sent.
INSTALLED = ("msgspec", "numpy", "pyarrow", "pyroaring", "sqlalchemy", "structlog", "uvloop", "xxhash")
EXECUTORS_S = 60.0  # for the first executor; a cluster that has to start machines takes about as long
_UNUSABLE = re.compile(
    r'Cannot run program "[^"]*"[^:]*: (?:error=\d+, )?([^\n]+)'
    r"|\[PYTHON_VERSION_MISMATCH\] ([^\n]+)|Error from python worker:"
)
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # date of every zip entry: the same files give the same archive

_folder: tempfile.TemporaryDirectory[str] | None = None


def is_local(master: str | None) -> bool:
    """Whether the tasks run on this machine, with the modules installed here."""
    return master is not None and master.startswith("local")


def ship(spark: SparkSession, modules: Iterable[str] = ()) -> bool:
    """Send the package inturn and these modules, with their packages, to the executors. Returns False, and sends no
    module, if the executors run on this machine.

    Only Python code is sent. msgspec, numpy, pyarrow, pyroaring, sqlalchemy, structlog, uvloop, xxhash and all other
    imports of a handler have to be installed on the executors; `check_executors` verifies this. Tasks that start later
    have the modules. A module is not sent again if it has not changed, or if spark-submit has sent its archive."""
    context = spark.sparkContext
    if is_local(context.master):
        return False
    for archive in sorted({_archive(module) for module in ("inturn", *modules)}):
        if archive.name not in _sent(context):
            path = list(sys.path)
            context.addPyFile(str(archive))
            sys.path[:] = path  # Spark puts its copy first; this process imports the original files
    register(spark)  # again: a source sees only the files sent before its registration
    return True


def check_executors(spark: SparkSession, modules: Iterable[str] = (), wait_s: float = EXECUTORS_S) -> None:
    """Raise `InvalidInput`, with the missing modules and their hosts, if executors cannot import the modules of inturn
    or the given modules, cannot run Python, or if there is no executor after `wait_s`.

    Runs a job with one task per core. An executor without a free core is not checked."""
    wanted = [*INSTALLED, "inturn", *modules]

    def missing(_: Iterable[int]) -> Iterator[tuple[str, str, str]]:
        # Pickled as it is: inturn itself cannot be imported where a module is missing.
        import importlib
        import socket

        for module in wanted:
            try:
                importlib.import_module(module)
            except ImportError as error:
                yield error.name or module, socket.gethostname(), str(error)

    tasks = max(spark.sparkContext.defaultParallelism, 1)
    with _executor_timeout(spark.sparkContext, wait_s):
        found = spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(missing).collect()
    if not found:
        return
    names = sorted({name for name, _, _ in found})
    hosts = sorted({host for _, host, _ in found})
    raise InvalidInput(
        f"executors on {', '.join(hosts)} cannot import {', '.join(names)} ({found[0][2]}); compiled modules cannot be "
        f"sent there: install them in the Python that PYSPARK_PYTHON names, with {INSTALL}"
    )


@contextlib.contextmanager
def _executor_timeout(context: SparkContext, wait_s: float) -> Iterator[None]:
    """Run a job in the block. Cancel the job if there is no executor after `wait_s`, because Spark would wait forever.
    Raise InvalidInput in this case, and if the executors cannot run Python."""
    tag = f"inturn-{uuid.uuid4().hex}"
    has_timed_out = threading.Event()

    def check() -> None:
        if not _has_executors(context):
            has_timed_out.set()
            context.cancelJobsWithTag(tag)

    timer = threading.Timer(wait_s, check)
    timer.daemon = True
    context.addJobTag(tag)
    timer.start()
    try:
        yield
    except Exception as error:
        if has_timed_out.is_set():
            host = context.getConf().get("spark.driver.host")
            raise InvalidInput(
                f"{context.master} has given no executor within {wait_s:g} s: does it have the cores and the memory "
                f"that one takes (spark.executor.cores, spark.executor.memory), and do its machines reach this driver "
                f"at {host} (spark.driver.host)?"
            ) from error
        unusable = _unusable_python(context, str(error))
        if unusable is None:
            raise
        raise unusable from error
    finally:
        timer.cancel()
        context.removeJobTag(tag)


def _has_executors(context: SparkContext) -> bool:
    status = context._jsc.sc().getExecutorMemoryStatus()
    return is_local(context.master) or status.size() > 1  # the driver counts as one


def _unusable_python(context: SparkContext, error: str) -> InvalidInput | None:
    """A short error for Spark's long error text, if the Python of the executors is the cause. None for other causes."""
    found = _UNUSABLE.search(error)
    if found is None:
        return None
    why = next((one for one in found.groups() if one), "it fails at its start").rstrip(".")
    version = ".".join(str(number) for number in sys.version_info[:2])
    return InvalidInput(
        f"executors cannot use the Python {context.pythonExec!r}: {why}; set PYSPARK_PYTHON to a Python {version} that "
        "is at the same path on all of their machines, and on this one"
    )


def _sent(context: SparkContext) -> set[str]:
    return {Path(url).name for url in context.listFiles}


def _archive(module: str) -> Path:
    """A zip of the package of this module. The name contains a hash of the content, because Spark sends a name only
    once."""
    global _folder
    loader = _spec(module.partition(".")[0], module).loader
    if isinstance(loader, zipimport.zipimporter):
        return Path(loader.archive)
    content = _zipped(module)
    if _folder is None:
        # exists until this process ends: executors fetch files from the folder
        _folder = tempfile.TemporaryDirectory(prefix="inturn-spark-")
    top = module.partition(".")[0]
    archive = Path(_folder.name) / f"{top}-{hashlib.sha256(content).hexdigest()[:16]}.zip"
    if not archive.exists():
        archive.write_bytes(content)
    return archive


def _zipped(module: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in _files(module):
            if file.name.endswith(tuple(EXTENSION_SUFFIXES)):
                raise InvalidInput(
                    f"module {module!r} has a compiled part, {file.name}, which cannot be sent to executors; "
                    "install the module on the executors"
                )
            # Python imports a package from a zip only if the zip has an entry for the folder.
            for folder in reversed(PurePosixPath(name).parents[:-1]):
                if f"{folder}/" not in archive.NameToInfo:
                    archive.writestr(zipfile.ZipInfo(f"{folder}/", _EARLIEST), b"")
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    return content.getvalue()


def _files(module: str) -> list[tuple[str, Path]]:
    """Archive names and files of the outermost package with an `__init__` that contains the module."""
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        spec = _spec(".".join(names[:depth]), module)
        if spec.origin is None or not spec.has_location:
            continue
        origin = Path(spec.origin)
        inside = "/".join(names[:depth])
        if spec.submodule_search_locations is None:
            return [(inside + origin.suffix, origin)]
        below = sorted(file for file in origin.parent.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return [(f"{inside}/{file.relative_to(origin.parent).as_posix()}", file) for file in below]
    raise InvalidInput(f"module {module!r} has no file that could be sent to executors")


def _spec(name: str, module: str) -> importlib.machinery.ModuleSpec:
    if name == "__main__":
        raise InvalidInput(
            "code in __main__ cannot be sent to executors; move the code to a module file and import the module"
        )
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise InvalidInput(f"no module {module!r} can be imported here; is its folder in PYTHONPATH?")
    return spec
