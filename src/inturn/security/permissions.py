"""What a principal has to be allowed for each command: the one table, and a test that no command is missing in it.

A command needs one of some permissions, on a subject, for a group or for none. Retry and dead-letter subjects belong to the
subject and the group that they are derived from:

    %retry%G%S   consuming it is `consume` of S; whoever stores there directly drives dead letters again: `redrive`
    %dead%G%S    for group G, whose commits say what was driven again, consuming it is `redrive`; for others `consume`
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from inturn.protocol import commands
from inturn.protocol.commands import Command


class Permission(enum.StrEnum):
    """What rules allow."""

    PRODUCE = "produce"  # store messages, and see how far the logs are
    CONSUME = "consume"  # be a member of a group: pull, commit, park, move what failed
    READ = "read"  # see messages without a group, parked ones and dead letters among them
    DESCRIBE = "describe"  # see what there is and how far it is, but no message
    CREATE = "create"  # make a subject
    GROW = "grow"  # give a subject more partitions
    RESET = "reset"  # move a group to another position
    STEER = "steer"  # park, resume or skip a key
    REDRIVE = "redrive"  # give dead letters to their group again
    OPERATE = "operate"  # make a broker group read-only, unavailable, or available again
    CLUSTER = "cluster"  # be meta or a broker of this cluster


OF_GROUPS = frozenset(
    (Permission.CONSUME, Permission.RESET, Permission.STEER, Permission.REDRIVE)
)  # and so do some that describe


class Need(msgspec.Struct, frozen=True, gc=False):
    """One of the permissions, there. `group` None: it is not about a group. `subject` None: on any subject will do."""

    permissions: tuple[Permission, ...]
    subject: str | None = None
    group: str | None = None


class Derived(msgspec.Struct, frozen=True, gc=False):
    """Where a subject comes from; `kind` and `group` are empty for one that people made."""

    origin: str
    kind: str = ""  # "retry" or "dead"
    group: str = ""


Needs = Callable[[Any], Need | None]


def needed(command: Command) -> Need | None:
    """What the command needs; None: nothing, whoever was greeted may send it. KeyError if nobody has thought of it."""
    return TABLE[type(command)](command)


def derived(subject: str) -> Derived:
    """The derivation that is written in a name. Groups that consume a derived subject may have derived ones again."""
    kind = group = ""
    while subject.startswith("%"):
        parts = subject.split("%", 3)
        if len(parts) < 4 or parts[1] not in ("retry", "dead"):
            break
        if not kind:
            kind, group = parts[1], parts[2]
        subject = parts[3]
    return Derived(subject, kind, group)


def _nothing(command: Any) -> None:
    return None


def _append(command: commands.Append) -> Need:
    from_ = derived(command.subject)
    if from_.kind:
        return Need((Permission.REDRIVE,), from_.origin, from_.group)
    return Need((Permission.PRODUCE,), from_.origin)


def _on(*permissions: Permission) -> Needs:
    """Commands about a subject, by its attribute `subject` or `name`."""

    def needs(command: Any) -> Need:
        return Need(permissions, derived(_subject(command)).origin)

    return needs


def _for_group(*permissions: Permission) -> Needs:
    def needs(command: Any) -> Need:
        return Need(permissions, derived(command.subject).origin, command.group)

    return needs


def _as_member(*, reads: bool = False) -> Needs:
    """`reads`: whoever may read dead letters has to hold them for a moment, to see which were driven again."""

    def needs(command: Any) -> Need:
        from_ = derived(command.subject)
        if from_.kind == "dead" and from_.group == command.group:
            permissions = (Permission.REDRIVE, Permission.READ) if reads else (Permission.REDRIVE,)
            return Need(permissions, from_.origin, command.group)
        return Need((Permission.CONSUME,), from_.origin, command.group)

    return needs


def _by_member_or(*permissions: Permission) -> Needs:
    """Broadcast consumers and trials read as members of their group, and need what members need; others the permissions."""
    of_others, of_member = _on(*permissions), _as_member(reads=True)

    def needs(command: Any) -> Need | None:
        return of_member(command) if command.group else of_others(command)

    return needs


def _subject(command: Any) -> str:
    name: str = command.name if hasattr(command, "name") else command.subject
    return name


def _open_retry(command: commands.OpenRetry) -> Need:
    return Need((Permission.CONSUME, Permission.REDRIVE), derived(command.subject).origin, command.group)


def _of_cluster(command: Any) -> Need:
    """What only meta and brokers say to each other."""
    return Need((Permission.CLUSTER,))


def _find_trial(command: commands.FindTrial) -> Need:
    """To give it up is to steer; to look at it is not."""
    permissions = (Permission.STEER,) if command.gives_up else (Permission.STEER, Permission.DESCRIBE)
    return Need(permissions, derived(command.subject).origin, command.group)


_ANY = tuple(Permission)
TABLE: dict[type[Command], Needs] = {
    commands.Hello: _nothing,
    commands.Ping: _nothing,
    commands.OpenProducer: lambda _: Need((Permission.PRODUCE,)),
    commands.Append: _append,
    commands.Heartbeat: _as_member(),
    commands.Leave: _as_member(reads=True),
    commands.Acquire: _as_member(reads=True),
    commands.Claim: _as_member(),
    commands.Renew: _as_member(),
    commands.Pull: _as_member(),
    commands.Commit: _as_member(),
    commands.Release: _as_member(),
    commands.ReadLot: _as_member(),
    commands.Move: _as_member(),  # where to is the node's business: nowhere but to the group's own derived subjects
    commands.OpenRetry: _open_retry,
    commands.OpenDeadLetters: _as_member(),
    commands.Read: _by_member_or(Permission.READ),
    commands.ResolvePosition: _by_member_or(Permission.READ, Permission.DESCRIBE),
    commands.CreateSubject: _on(Permission.CREATE),
    commands.GrowSubject: _on(Permission.GROW),
    commands.FindSubject: _on(*_ANY),  # its route: whoever may do anything there needs it
    commands.DescribeSubject: _on(
        Permission.DESCRIBE, Permission.READ, Permission.CONSUME, Permission.REDRIVE, Permission.PRODUCE
    ),
    commands.ListSubjects: _nothing,  # the answer has only those that the principal may do something with
    commands.ListGroups: _nothing,  # the same, with those that it may describe
    commands.DescribeGroup: _for_group(*(OF_GROUPS | {Permission.DESCRIBE, Permission.READ})),
    commands.ResetGroup: _for_group(Permission.RESET),
    commands.SteerKey: _for_group(Permission.STEER),
    commands.FindRequest: _for_group(Permission.STEER, Permission.DESCRIBE),
    commands.ListKeys: _for_group(Permission.DESCRIBE, Permission.STEER, Permission.CONSUME),
    commands.DescribeKey: _for_group(Permission.READ),  # with what is parked of it
    commands.DescribeNode: lambda _: Need((Permission.DESCRIBE,)),
    commands.Fetch: _as_member(),
    commands.Acknowledge: _as_member(),
    commands.SetOrder: _for_group(Permission.STEER),
    commands.TryMessage: _for_group(Permission.STEER),
    commands.FindTrial: _find_trial,
    commands.ReportTrial: _as_member(),
    commands.ListBrokerGroups: _nothing,  # whoever may do anything needs to know where
    commands.SetBrokerGroup: lambda _: Need((Permission.OPERATE,)),
    commands.ReportBroker: _of_cluster,
    commands.ReadCatalogue: _of_cluster,
    commands.LearnSubject: _of_cluster,
    commands.LearnProducer: _of_cluster,
    commands.SealSubject: _of_cluster,
    commands.OpenGroup: _of_cluster,
    commands.FindGroup: _of_cluster,
    commands.ForgetMember: _of_cluster,
    commands.ListRequests: _of_cluster,
    commands.FindMessage: _of_cluster,
}
# Commands whose `member` is the sender's own: the name is bound to its principal. Those that name somebody else's
# member, to do something with it, are `OF_OTHERS`.
AS_MEMBER: frozenset[type[Command]] = frozenset(
    (
        commands.Heartbeat,
        commands.Leave,
        commands.Acquire,
        commands.Claim,
        commands.Renew,
        commands.Pull,
        commands.Commit,
        commands.Release,
        commands.ReadLot,
        commands.Move,
        commands.Fetch,
        commands.Acknowledge,
        commands.ReportTrial,
    )
)
OF_OTHERS: frozenset[type[Command]] = frozenset((commands.TryMessage, commands.ForgetMember))
# What is written into the audit log when it is done: what changes more than the progress of a group.
ACTS: frozenset[type[Command]] = frozenset(
    (
        commands.CreateSubject,
        commands.GrowSubject,
        commands.ResetGroup,
        commands.SetOrder,
        commands.SteerKey,
        commands.TryMessage,
        commands.SetBrokerGroup,
    )
)


def is_act(command: Command) -> bool:
    return type(command) in ACTS or (type(command) is commands.Append and command.subject.startswith("%"))
