"""The session guard: the guard's view of one session. Authenticates the client and authorizes every command.

`MappedReply` and `AuditedReply` wrap replies of authorized commands. Both have the `session` of the wrapped reply.
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
from inturn.protocol.request import WrappedReply
from inturn.security.audit_log import AuditLog
from inturn.security.permissions import AS_MEMBER, Need, Permission, derived, is_act, needed
from inturn.security.rate_limit import PrincipalMeter
from inturn.security.tokens import ANONYMOUS, LOCAL

if TYPE_CHECKING:
    from inturn.security.guard import ActivePrincipal, Guard
    from inturn.security.tokens import TokenRecord

_DETAILS = ("partitions", "position", "key", "offset", "by", "why")
_ASK_FOR_RULE = "ask for a rule in the server's access file"

_SPECIAL = frozenset((ListSubjects, ListGroups, OpenProducer, Leave))


class SessionGuard:
    """Implements `inturn.transport.server_session.Pass`, which documents the calls."""

    def __init__(self, guard: Guard, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool) -> None:
        self._guard = guard
        self._address = address
        self._certificate = certificate
        self._is_local = is_local
        self._token: TokenRecord | None = None
        self._principal: ActivePrincipal | None = None

    def greet(self, hello: Hello) -> None:
        try:
            principal = self._authenticated(hello)
        except AuthenticationFailed as error:
            self._refused(self._address, None, "Hello", error.why)
            raise
        active = self._guard.principal(principal)
        if active.connections_max is not None and active.stream_count >= active.connections_max:
            self._refused(principal, principal, "Hello", f"{active.connections_max} connections are its quota")
            raise QuotaExceeded(principal, "connections", active.connections_max)
        active.stream_count += 1
        self._principal = active

    def _authenticated(self, hello: Hello) -> str:
        if self._is_local:
            return LOCAL
        principal, self._token = self._guard.authenticate(hello, self._certificate)
        return principal

    def gone(self) -> None:
        active, self._principal = self._principal, None
        if active is not None:
            active.stream_count -= 1
            if not active.stream_count:
                self._guard.forget(active)

    @property
    def is_valid(self) -> bool:
        """Whether the token of the session is still valid."""
        return self._token is None or self._guard.tokens.holds(self._token, self._guard.clock.time_ms())

    @property
    def metered(self) -> PrincipalMeter | None:
        return None if self._principal is None else self._principal.metered

    def admitted(self, command: Command, reply: Reply) -> Reply | None:
        active = self._principal
        assert active is not None, "no command is sent before the greeting"
        refusal = self._refusal(command, active)
        if refusal is not None:
            fields = where(needed(command))
            self._refused(active.principal, active.principal, type(command).__name__, refusal.what, **fields)
            reply(refusal)
            return None
        if type(command) in _SPECIAL:
            return self._special(command, reply)
        if self._guard.audit_log is not None and is_act(command):
            return AuditedReply(reply, self._guard.audit_log, active.principal, self._address, command)
        return reply

    def _special(self, command: Command, reply: Reply) -> Reply:
        if isinstance(command, ListSubjects | ListGroups):
            return MappedReply(reply, self._listed)
        if isinstance(command, OpenProducer):
            return MappedReply(reply, partial(self._opened, command.name))
        assert isinstance(command, Leave)
        self._guard.members.forget(_place(command, command.member))
        return reply

    def _refusal(self, command: Command, active: ActivePrincipal) -> AccessDenied | None:
        principal = active.principal
        if not active.may_send(command):
            need = needed(command)
            return AccessDenied(principal, type(command).__name__ if need is None else _what(need), _ASK_FOR_RULE)
        if principal == ANONYMOUS:  # may be many clients: anonymous clients own no names
            return None
        refusal = self._ownership_refusal(command, principal)
        return None if principal == LOCAL else refusal  # the folder's user may do everything

    # A name belongs to the principal that used the name first

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
        """An id that was not opened since the start of the server belongs to its first user on that subject. Appends to
        other subjects can neither take the id away nor pass as appends of the producer."""
        producer_id, producers = command.batch.producer_id, self._guard.producers
        owner = producers.owner(producer_id)
        if not producer_id or owner == principal:  # most of the time
            return None
        if owner is None and producers.take(principal, (producer_id, command.subject)) is None:
            return None
        return _not_yours(principal, f"send as producer {producer_id}")

    # Changed answers

    def _opened(self, name: str | None, answer: Answer) -> Answer:
        """The principal that opened a producer owns the id, even if the id was used before. But a producer that was
        opened through the folder under the name of a different principal stays with that principal."""
        active, producers = self._principal, self._guard.producers
        if not isinstance(answer, ProducerOpened) or active is None or active.principal == ANONYMOUS:
            return answer
        if name is None or producers.owner(name) == active.principal:
            producers.give(active.principal, answer.producer_id)
        return answer

    def _listed(self, answer: Answer) -> Answer:
        """The answer with only the subjects that the principal has any permission on, and the groups that the principal
        may describe."""
        active = self._principal
        if active is None or active.may_everything:
            return answer
        if isinstance(answer, SubjectList):
            return SubjectList(tuple(one for one in answer.subjects if active.may(_anything(one.name))))
        if isinstance(answer, GroupList):
            return GroupList(
                tuple(one for one in answer.groups if active.may_send(DescribeGroup(one.subject, one.group)))
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
    """The need as text: "produce on subject 'a'"."""
    actions = " or ".join(need.permissions) if len(need.permissions) < len(Permission) else "do anything"
    subject = "" if need.subject is None else f" on subject {need.subject!r}"
    group = "" if need.group is None else f" for group {need.group!r}"
    return f"{actions}{subject}{group}"


def _anything(subject: str) -> Need:
    return Need(tuple(Permission), derived(subject).origin)


class MappedReply(WrappedReply):
    """A reply that changes answers. Errors pass unchanged."""

    __slots__ = ("_change",)

    def __init__(self, reply: Reply, change: Callable[[Answer], Answer]) -> None:
        super().__init__(reply)
        self._change = change

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(answer if isinstance(answer, InturnError) else self._change(answer))


class AuditedReply(WrappedReply):
    """A reply that writes the outcome of an act into the audit log, before the client receives the answer."""

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
    """The fields of a need for the audit log."""
    if need is None:
        return {}
    return {"action": "|".join(need.permissions), "subject": need.subject, "group": need.group}


def _details(command: Command) -> dict[str, object]:
    """Details of the command for the audit log, without any content of messages."""
    if isinstance(command, Append):
        return {"to": command.subject, "messages": command.batch.count}
    found = {name: value for name in _DETAILS if (value := getattr(command, name, None)) is not None}
    key = found.get("key")
    if isinstance(key, bytes):
        found["key"] = key.decode(errors="backslashreplace")
    asked = getattr(command, "action", None)
    return found if asked is None else {**found, "asked": asked}
