"""Errands: what meta has to ask of several brokers for one command, in a thread of a few."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from inturn.model.commands import Answer, Command, Reply
from inturn.model.errors import Closed, InturnError
from inturn.model.logs import get_logger
from inturn.model.request import ask

_log = get_logger("inturn.meta")
ERRANDS_MAX = 16  # at a time
_Wanted = TypeVar("_Wanted")

# By the type of the command. Called in a thread, without the lock.
ErrandTable: TypeAlias = dict[type[Command], Callable[[Any], Answer]]


class Errands:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(ERRANDS_MAX, "inturn-errand")

    def go(self, errand: Callable[[], Answer], reply: Reply) -> None:
        """In a thread. What it raises is the answer."""

        def run() -> None:
            answer: Answer | InturnError
            try:
                answer = errand()
            except InturnError as error:
                answer = error
            except Exception as error:
                _log.exception("meta.errand_failed")
                answer = InturnError(f"meta failed: {error!r}")
            reply(answer)

        try:
            self._pool.submit(run)
        except RuntimeError:  # it was closed just now
            reply(Closed("node"))

    def close(self) -> None:
        """What runs is still answered."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Here:
    """Meta itself, asked without its errands. What it says it says at once."""

    def __init__(self, submit: Callable[[Command, Reply], None]) -> None:
        self.submit = submit

    def ask(self, command: Command, wanted: type[_Wanted]) -> _Wanted:
        return ask(self, command, wanted, patience_s=0.0)
