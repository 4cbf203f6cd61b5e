"""Replies that do something on the way back. They know their session, as the reply underneath does.

A visitor: one stream to a guarded server. Who it is, and what becomes of each of its commands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from inturn.model.errors import AccessDenied, AuthenticationFailed, InturnError, QuotaExceeded
from inturn.protocol.commands import (
    Answer,
    Append,
    Claim,
    Command,
    DescribeGroup,
    GroupList,
    Hello,
    Leave,
    ListGroups,
    ListSubjects,
    OpenProducer,
    ProducerOpened,
    Reply,
    SubjectList,
)
from inturn.protocol.reply import WrappedReply
from inturn.security.audit_log import AuditLog
from inturn.security.permissions import AS_MEMBER, Action, Need, derived, is_act, needed
from inturn.security.rate_limit import Metered
from inturn.security.tokens import ANONYMOUS, LOCAL

if TYPE_CHECKING:
    from inturn.security.guard import Guard, Known
    from inturn.security.tokens import TokenRecord

_DETAILS = ("partitions", "position", "key", "offset", "by", "why")


class Filtered(WrappedReply):
    """Changes the answer, not an error."""

    __slots__ = ("_change",)

    def __init__(self, reply: Reply, change: Callable[[Answer], Answer]) -> None:
        super().__init__(reply)
        self._change = change

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(answer if isinstance(answer, InturnError) else self._change(answer))


class Noted(WrappedReply):
    """Writes down what became of an act, before its asker hears of it."""

    __slots__ = ("_address", "_command", "_log", "_principal")

    def __init__(self, reply: Reply, log: AuditLog, principal: str, address: str, command: Command) -> None:
        super().__init__(reply)
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


_ASK_FOR_RULE = "ask for a rule in the server's access file"

_SPECIAL = frozenset((ListSubjects, ListGroups, OpenProducer, Leave))


class Visitor:
    """See `inturn.transport.server_session.Pass` for when it is asked what."""

    def __init__(self, guard: Guard, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool) -> None:
        self._guard = guard
        self._address = address
        self._certificate = certificate
        self._is_local = is_local
        self._token: TokenRecord | None = None
        self._known: Known | None = None

    def greet(self, hello: Hello) -> None:
        try:
            principal = self._authenticated(hello)
        except AuthenticationFailed as error:
            self._refused(self._address, None, "Hello", error.why)
            raise
        known = self._guard.known(principal)
        if known.connections_max is not None and known.stream_count >= known.connections_max:
            self._refused(principal, principal, "Hello", f"{known.connections_max} connections are its quota")
            raise QuotaExceeded(principal, "connections", known.connections_max)
        known.stream_count += 1
        self._known = known

    def _authenticated(self, hello: Hello) -> str:
        if self._is_local:
            return LOCAL
        principal, self._token = self._guard.authenticate(hello, self._certificate)
        return principal

    def gone(self) -> None:
        known, self._known = self._known, None
        if known is not None:
            known.stream_count -= 1
            if not known.stream_count:
                self._guard.forget(known)

    @property
    def is_valid(self) -> bool:
        """Whether it would be let in again."""
        return self._token is None or self._guard.tokens.holds(self._token, self._guard.clock.time_ms())

    @property
    def metered(self) -> Metered | None:
        return None if self._known is None else self._known.metered

    def admitted(self, command: Command, reply: Reply) -> Reply | None:
        known = self._known
        assert known is not None, "nothing is sent before the greeting"
        refusal = self._refusal(command, known)
        if refusal is not None:
            fields = where(needed(command))
            self._refused(known.principal, known.principal, type(command).__name__, refusal.what, **fields)
            reply(refusal)
            return None
        if type(command) in _SPECIAL:
            return self._special(command, reply)
        if self._guard.audit_log is not None and is_act(command):
            return Noted(reply, self._guard.audit_log, known.principal, self._address, command)
        return reply

    def _special(self, command: Command, reply: Reply) -> Reply:
        if isinstance(command, ListSubjects | ListGroups):
            return Filtered(reply, self._listed)
        if isinstance(command, OpenProducer):
            return Filtered(reply, partial(self._opened, command.name))
        assert isinstance(command, Leave)
        self._guard.members.forget(_place(command, command.member))
        return reply

    def _refusal(self, command: Command, known: Known) -> AccessDenied | None:
        principal = known.principal
        if not known.may_send(command):
            need = needed(command)
            return AccessDenied(principal, type(command).__name__ if need is None else _what(need), _ASK_FOR_RULE)
        if principal == ANONYMOUS:  # one or many, nobody knows: names are not theirs
            return None
        refusal = self._ownership_refusal(command, principal)
        return None if principal == LOCAL else refusal  # the folder's user may do everything

    # Names belong to whoever used them first

    def _ownership_refusal(self, command: Command, principal: str) -> AccessDenied | None:
        kind = type(command)
        if kind is Append:
            return self._producer_refusal(command, principal)  # type: ignore[arg-type]
        if kind is OpenProducer:
            return self._name_refusal(command.name, principal)  # type: ignore[attr-defined]
        return self._member_refusal(command, principal) if kind in AS_MEMBER else None

    def _member_refusal(self, command: Command, principal: str) -> AccessDenied | None:
        members, place = self._guard.members, _place(command, command.member)  # type: ignore[attr-defined]
        if type(command) is not Claim and members.owner(place) == principal:  # most of the time
            return None
        places = (place, _place(command, command.owner)) if isinstance(command, Claim) else (place,)
        taken = members.take(principal, *places)
        return None if taken is None else _not_yours(principal, f"act for member {taken[-1]!r}")  # type: ignore[index]

    def _name_refusal(self, name: str | None, principal: str) -> AccessDenied | None:
        if name is None or self._guard.producers.take(principal, name) is None:
            return None
        return _not_yours(principal, f"open producer {name!r}")

    def _producer_refusal(self, command: Append, principal: str) -> AccessDenied | None:
        """An id that nobody opened since the server was started belongs to its first user, on that subject: what is
        sent elsewhere can neither take it away nor be taken for its producer's."""
        producer_id, producers = command.batch.producer_id, self._guard.producers
        owner = producers.owner(producer_id)
        if not producer_id or owner == principal:  # most of the time
            return None
        if owner is None and producers.take(principal, (producer_id, command.subject)) is None:
            return None
        return _not_yours(principal, f"send as producer {producer_id}")

    # What is changed on its way back

    def _opened(self, name: str | None, answer: Answer) -> Answer:
        """Whoever opened a producer is its owner, whoever used the id before it was given out. But what was opened
        through the folder under another's name stays that one's."""
        known, producers = self._known, self._guard.producers
        if not isinstance(answer, ProducerOpened) or known is None or known.principal == ANONYMOUS:
            return answer
        if name is None or producers.owner(name) == known.principal:
            producers.give(known.principal, answer.producer_id)
        return answer

    def _listed(self, answer: Answer) -> Answer:
        """Only subjects that the principal may do something with, and groups that it may describe."""
        known = self._known
        if known is None or known.may_everything:
            return answer
        if isinstance(answer, SubjectList):
            return SubjectList(tuple(one for one in answer.subjects if known.may(_anything(one.name))))
        if isinstance(answer, GroupList):
            return GroupList(
                tuple(one for one in answer.groups if known.may_send(DescribeGroup(one.subject, one.group)))
            )
        return answer

    def _refused(self, source: str, principal: str | None, command: str, why: str, **fields: object) -> None:
        if self._guard.audit_log is not None:
            self._guard.audit_log.refused(
                source, principal=principal, address=self._address, command=command, **fields, why=why
            )


def _not_yours(principal: str, what: str) -> AccessDenied:
    return AccessDenied(principal, f"{what}, which is another principal's", "use one of your own")


def _place(command: Any, member: str) -> tuple[str, str, str]:
    return command.subject, command.group, member


def _what(need: Need) -> str:
    """In words: "produce on subject 'a'"."""
    actions = " or ".join(need.actions) if len(need.actions) < len(Action) else "do anything"
    subject = "" if need.subject is None else f" on subject {need.subject!r}"
    group = "" if need.group is None else f" for group {need.group!r}"
    return f"{actions}{subject}{group}"


def _anything(subject: str) -> Need:
    return Need(tuple(Action), derived(subject).origin)
