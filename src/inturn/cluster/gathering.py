"""Asking several brokers at once, and going on when all of them have answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from inturn.model.commands import Answer, Command, Node
from inturn.model.errors import InturnError

Answers = dict[str, Answer | InturnError]  # by broker group


def gather(commands: Mapping[str, tuple[Node, Command]], then: Callable[[Answers], None]) -> None:
    """Submit each command to its node. `then` is called once, from whatever thread the last answer comes in."""
    lock = threading.Lock()
    answers: Answers = {}
    if not commands:
        then(answers)
        return

    def arrived(name: str, answer: Answer | InturnError) -> None:
        with lock:
            answers[name] = answer
            is_last = len(answers) == len(commands)
        if is_last:
            then(answers)

    for name, (node, command) in commands.items():
        node.submit(command, lambda answer, name=name: arrived(name, answer))  # type: ignore[misc]
