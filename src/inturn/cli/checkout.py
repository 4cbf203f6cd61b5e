"""Commands whose code is not installed with the package: the benchmarks and the demo are parts of a checkout."""

from __future__ import annotations

import importlib
from typing import Any

from inturn.model.errors import InvalidInput


def from_checkout(module: str, target: str) -> Any:
    """Import a module that only a checkout has. InvalidInput names the make target to run in a checkout."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (package, module):
            raise
        raise InvalidInput(
            f"the package {package!r} is not installed with inturn; in a checkout of the repository, run `{target}`"
        ) from None
