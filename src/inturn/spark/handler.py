"""Handlers by name: "module:function", as the command line and the options of the source give them."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TypeAlias

from inturn.consumer.fitting import check_handler
from inturn.consumer.outcome import text_of
from inturn.consumer.worker import Handler
from inturn.model.errors import InvalidInput

HandlerName: TypeAlias = str | Handler


def load_handler(handler: HandlerName) -> Handler:
    """The function of this name, or the one that was given, if it can be a handler. InvalidInput says why it cannot."""
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
    """The module that executors have to be able to import for it; None for what travels with the task."""
    if isinstance(handler, str):
        return handler.partition(":")[0]
    name = getattr(handler, "__module__", None)
    return None if name in (None, "__main__") else name
