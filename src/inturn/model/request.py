"""Asking a node and waiting for the answer."""

from __future__ import annotations

import threading
from typing import TypeVar

from inturn.model.commands import Answer, Command, Node
from inturn.model.errors import InturnError

_Wanted = TypeVar("_Wanted")


def ask(node: Node, command: Command, wanted: type[_Wanted]) -> _Wanted:
    """Submit a command, wait, and return its answer or raise its error."""
    answers: list[Answer | InturnError] = []
    answered = threading.Event()

    def reply(answer: Answer | InturnError) -> None:
        answers.append(answer)
        answered.set()

    node.submit(command, reply)
    if not answers:
        answered.wait()
    answer = answers[0]
    if isinstance(answer, InturnError):
        raise answer
    if not isinstance(answer, wanted):
        raise InturnError(f"{type(command).__name__} was answered with {answer!r}, not {wanted.__name__}")
    return answer
