"""How commands are answered: at once, or not yet."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

from inturn.model.commands import Answer, Command


class Try(enum.Enum):
    """The first try is the client speaking, and renews; later ones are ours, and must not."""

    FIRST = enum.auto()
    AGAIN = enum.auto()
    LAST = enum.auto()


# By the type of the command. None: nothing to say yet, which the last try must not be. Called under the node's lock.
AnswerTable: TypeAlias = dict[type[Command], Callable[[Any, Try], Answer | None]]


def may_wait(wait_s: float, attempt: Try) -> bool:
    """Whether a command with this `wait_s` may be held back at this try."""
    return attempt is not Try.LAST and wait_s > 0
