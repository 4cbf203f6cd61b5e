"""One act of the demo: a thread of its own that the views look at meanwhile, and that can be stopped."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from inturn.consumer.consumer import Consumer

LIMIT_S = 120.0  # on a machine where an act takes longer something is wrong
POLL_S = 0.02


class Interrupted(Exception):
    """The act was stopped, or took too long."""


class Act(ABC):
    """`error` is set when it is over and was not played to its end."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._watched: list[Consumer] = []  # one that stops by itself ends the act
        self._stop = threading.Event()
        self._until_s = time.monotonic() + LIMIT_S
        self._thread = threading.Thread(target=self._run, name="inturn-demo", daemon=True)

    @abstractmethod
    def play(self) -> None:
        """What happens, from the beginning to the end. In the thread of the act."""

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        return self.is_over and self.error is None

    def stop(self) -> None:
        """Returns when the act is over. Raises what went wrong in it, but for its being interrupted."""
        self._stop.set()
        self._thread.join()
        if self.error is not None and not isinstance(self.error, Interrupted):
            raise self.error

    def _run(self) -> None:
        try:
            self.play()
        except Exception as error:
            self.error = self.error or error

    def _wait(self, condition: Callable[[], bool], poll_s: float = POLL_S) -> None:
        while not condition():
            self._pause(poll_s)
            for consumer in self._watched:
                if consumer.error is not None:
                    raise consumer.error
            if time.monotonic() > self._until_s:
                raise Interrupted

    def _pause(self, for_s: float) -> None:
        if self._stop.wait(for_s):
            raise Interrupted
