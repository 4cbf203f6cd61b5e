"""inturn on Spark: sessions, the data source `inturn`, ordered handlers, drains and audits. Needs the extra
inturn[spark].

Public names are imported at first use, so that importing this package is quick and does not need Spark."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from inturn.spark.extra import needs_extra

if TYPE_CHECKING:
    from inturn.spark.audit.audit import audit as audit
    from inturn.spark.extra import register as register
    from inturn.spark.ordered.drain import Drain as Drain
    from inturn.spark.ordered.drain import DrainSettings as DrainSettings
    from inturn.spark.ordered.drain import drain as drain
    from inturn.spark.ordered.drain_report import DrainReport as DrainReport
    from inturn.spark.ordered.for_each import for_each as for_each
    from inturn.spark.ordered.for_each import for_each_stream as for_each_stream
    from inturn.spark.session import session as session
    from inturn.spark.shipping import check_executors as check_executors
    from inturn.spark.shipping import ship as ship
    from inturn.spark.source.source import InturnDataSource as InturnDataSource

# Public name → module of this package that defines the name. A new public name needs a line here and a line above.
_HOMES = {
    "Drain": "ordered.drain",
    "DrainReport": "ordered.drain_report",
    "DrainSettings": "ordered.drain",
    "InturnDataSource": "source.source",
    "audit": "audit.audit",
    "check_executors": "shipping",
    "drain": "ordered.drain",
    "for_each": "ordered.for_each",
    "for_each_stream": "ordered.for_each",
    "register": "extra",
    "session": "session",
    "ship": "shipping",
}

__all__ = sorted(_HOMES)


class _Package(ModuleType):
    """Keeps public names that are also names of modules. An import of `inturn.spark.audit.audit` binds the subpackage
    `audit` here; without this class the subpackage would replace the public function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with needs_extra():
            home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        globals()[name] = found = getattr(home, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
