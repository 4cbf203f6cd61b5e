"""The permission that every command needs: a single table. A test checks that the table has all commands.

A command needs any of some permissions, on a subject, for a group or without a group. Retry and dead-letter subjects
belong to the subject and group of their origin:

    %retry%G%S   consuming is `consume` on S; storing here directly drives dead letters again: `redrive`
    %dead%G%S    consuming for group G, whose commits report which dead letters were driven again, is `redrive`;
                 consuming for other groups is `consume`
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from inturn.protocol import commands
from inturn.protocol.commands import Command


class Permission(enum.StrEnum):
    """The permissions of access rules: the values of `actions` in an access file."""

    PRODUCE = "produce"  # store messages, and see the offsets of the logs
    CONSUME = "consume"  # be a member of a group: pull, commit, park, move failed messages
    READ = "read"  # see messages without a group, including parked messages and dead letters
    DESCRIBE = "describe"  # see subjects, groups and their progress, but no message
    CREATE = "create"  # make a subject
    GROW = "grow"  # give a subject more partitions
    RESET = "reset"  # move a group to another position
    STEER = "steer"  # park, resume or skip a key
    REDRIVE = "redrive"  # send dead letters to their group again
    OPERATE = "operate"  # make a broker group read-only, unavailable, or available again
    CLUSTER = "cluster"  # be meta or a broker of this cluster


OF_GROUPS = frozenset(
    (Permission.CONSUME, Permission.RESET, Permission.STEER, Permission.REDRIVE)
)  # and so do some that describe


class Need(msgspec.Struct, frozen=True, gc=False):
    """A command needs any of the permissions. `group` None: the command is not about a group. `subject` None: the
    permission on any subject is enough."""

    permissions: tuple[Permission, ...]
    subject: str | None = None
    group: str | None = None


class Derived(msgspec.Struct, frozen=True, gc=False):
    """The origin of a subject. `kind` and `group` are empty for a subject that a user made."""

    origin: str
    kind: str = ""  # "retry" or "dead"
    group: str = ""


Needs = Callable[[Any], Need | None]


def needed(command: Command) -> Need | None:
    """The need of a command; None: all authenticated clients may send the command. Raises KeyError for a command
    without an entry in the table."""
    return TABLE[type(command)](command)


def derived(subject: str) -> Derived:
    """The origin by the name of a subject. Groups that consume a derived subject may have derived subjects again."""
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
    """The need of commands about a subject, by the attribute `subject` or `name`."""

    def needs(command: Any) -> Need:
        return Need(permissions, derived(_subject(command)).origin)

    return needs


def _for_group(*permissions: Permission) -> Needs:
    def needs(command: Any) -> Need:
        return Need(permissions, derived(command.subject).origin, command.group)

    return needs


def _as_member(*, reads: bool = False) -> Needs:
    """The need of a member's commands. `reads`: a reader of dead letters must hold the partition for a moment, to see
    which dead letters were driven again."""

    def needs(command: Any) -> Need:
        from_ = derived(command.subject)
        if from_.kind == "dead" and from_.group == command.group:
            permissions = (Permission.REDRIVE, Permission.READ) if reads else (Permission.REDRIVE,)
            return Need(permissions, from_.origin, command.group)
        return Need((Permission.CONSUME,), from_.origin, command.group)

    return needs


def _by_member_or(*permissions: Permission) -> Needs:
    """The need of reads: broadcast consumers and trials read as members of their group and need a member's permission;
    other readers need the given permissions."""
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
    """The need of commands between meta and brokers."""
    return Need((Permission.CLUSTER,))


def _find_trial(command: commands.FindTrial) -> Need:
    """Cancelling a trial needs `steer`; reading its state needs `steer` or `describe`."""
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
    commands.Move: _as_member(),  # the node moves messages only to derived subjects of the group
    commands.OpenRetry: _open_retry,
    commands.OpenDeadLetters: _as_member(),
    commands.Read: _by_member_or(Permission.READ),
    commands.ResolvePosition: _by_member_or(Permission.READ, Permission.DESCRIBE),
    commands.CreateSubject: _on(Permission.CREATE),
    commands.GrowSubject: _on(Permission.GROW),
    commands.FindSubject: _on(*_ANY),  # the route: needed with any permission
    commands.DescribeSubject: _on(
        Permission.DESCRIBE, Permission.READ, Permission.CONSUME, Permission.REDRIVE, Permission.PRODUCE
    ),
    commands.ListSubjects: _nothing,  # the answer has only subjects that the principal has any permission on
    commands.ListGroups: _nothing,  # the answer has only groups that the principal may describe
    commands.DescribeGroup: _for_group(*(OF_GROUPS | {Permission.DESCRIBE, Permission.READ})),
    commands.ResetGroup: _for_group(Permission.RESET),
    commands.SteerKey: _for_group(Permission.STEER),
    commands.FindRequest: _for_group(Permission.STEER, Permission.DESCRIBE),
    commands.ListKeys: _for_group(Permission.DESCRIBE, Permission.STEER, Permission.CONSUME),
    commands.DescribeKey: _for_group(Permission.READ),  # the answer has parked messages
    commands.DescribeNode: lambda _: Need((Permission.DESCRIBE,)),
    commands.Fetch: _as_member(),
    commands.Acknowledge: _as_member(),
    commands.SetOrder: _for_group(Permission.STEER),
    commands.TryMessage: _for_group(Permission.STEER),
    commands.FindTrial: _find_trial,
    commands.ReportTrial: _as_member(),
    commands.ListBrokerGroups: _nothing,  # needed by every client, to find the brokers
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
# Commands whose `member` is the sender: the name is bound to the sender's principal. Commands about a member other than
# the sender are in `OF_OTHERS`.
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
# Commands that are written into the audit log: commands that change more than the progress of a group.
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
