"""Replies that do something on the way back. They know their session, as the reply underneath does."""

from __future__ import annotations

from collections.abc import Callable

from inturn.model.commands import Answer, Append, Command, Reply
from inturn.model.errors import InturnError
from inturn.security.actions import Need, needed
from inturn.security.audit_log import AuditLog

_DETAILS = ("partitions", "position", "key", "offset", "by", "why")


class Filtered:
    """Changes the answer, not an error."""

    __slots__ = ("_change", "_reply", "session")

    def __init__(self, reply: Reply, change: Callable[[Answer], Answer]) -> None:
        self.session = getattr(reply, "session", None)
        self._reply = reply
        self._change = change

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(answer if isinstance(answer, InturnError) else self._change(answer))


class Noted:
    """Writes down what became of an act, before its asker hears of it."""

    __slots__ = ("_address", "_command", "_log", "_principal", "_reply", "session")

    def __init__(self, reply: Reply, log: AuditLog, principal: str, address: str, command: Command) -> None:
        self.session = getattr(reply, "session", None)
        self._reply = reply
        self._log = log
        self._principal = principal
        self._address = address
        self._command = command

    def __call__(self, answer: Answer | InturnError) -> None:
        self._log.noted(
            "act",
            principal=self._principal,
            address=self._address,
            command=type(self._command).__name__,
            **where(needed(self._command)),
            **_details(self._command),
            outcome=type(answer).__name__ if isinstance(answer, InturnError) else "done",
        )
        self._reply(answer)


def where(need: Need | None) -> dict[str, object]:
    """For the audit log."""
    if need is None:
        return {}
    return {"action": "|".join(need.actions), "subject": need.subject, "group": need.group}


def _details(command: Command) -> dict[str, object]:
    """Of what was asked; nothing of a message."""
    if isinstance(command, Append):
        return {"to": command.subject, "messages": command.batch.count}
    found = {name: value for name in _DETAILS if (value := getattr(command, name, None)) is not None}
    key = found.get("key")
    if isinstance(key, bytes):
        found["key"] = key.decode(errors="backslashreplace")
    asked = getattr(command, "action", None)
    return found if asked is None else {**found, "asked": asked}
