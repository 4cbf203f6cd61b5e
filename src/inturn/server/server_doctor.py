"""The checks of `inturn doctor` for a running server: read-only, through the protocol, with findings and next steps.

A hand-over in progress is checked twice before the doctor reports a problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inturn.model.errors import AccessDenied, BrokerGroupClosed, InvalidInput, NotFound, StorageError
from inturn.model.settings import BrokerGroupState, GroupMode
from inturn.model.time import Clock, SystemClock
from inturn.protocol.commands import (
    BrokerGroupList,
    DescribeGroup,
    DescribeNode,
    DescribeSubject,
    GroupDescription,
    GroupList,
    KeyDescription,
    KeyList,
    ListBrokerGroups,
    ListGroups,
    ListKeys,
    ListSubjects,
    Node,
    NodeDescription,
    SubjectDescription,
    SubjectList,
)
from inturn.protocol.request import ask
from inturn.server.folder_doctor import Finding, Level, disk_finding
from inturn.version import SOFTWARE

PATIENCE_S = 5.0
CLOCK_S_MAX = 2.0  # above, the clocks differ; the uncertainty of the round trip is subtracted
CHECK_AGAIN_S = 2.0  # a hand-over takes less, unless a handler runs longer
LAG_MIN = 1_000  # a smaller lag is work in progress
KEYS_NAMED = 5  # per group and state, the oldest trouble first
REFUSED_NAMED = 5
_MAY_DESCRIBE = (
    "use the token of a principal that may `describe` all subjects, or let the owners of the subjects run the doctor"
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The answers of the server, as far as permitted."""

    subjects: list[SubjectDescription]
    groups: list[GroupDescription]
    refused: list[Finding]  # for commands without permission


def examine_server(
    node: Node, *, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep
) -> list[Finding]:
    """Run all checks; the findings in the order of the checks. Blocks for at most a few seconds.

    Raise ConnectionLost if the server is gone meanwhile.
    """
    clock = clock if clock is not None else SystemClock()
    findings = [*_check_node(node, clock), *_check_brokers(node)]
    try:
        seen = _look(node)
    except StorageError as error:
        next_step = (
            "look at the server's log and disk; run `inturn doctor --data FOLDER` on the server to check the folder"
        )
        return [*findings, Finding("state", Level.ERROR, f"the server cannot read the store: {error}", next_step)]
    findings += seen.refused
    findings += _check_logs(seen.subjects)
    findings += _check_lag(seen)
    findings += _check_keys(node, seen.groups)
    findings += _check_members(node, seen.groups, sleep)
    return findings


def _look(node: Node) -> _Seen:
    subjects, refused_subjects = [], []
    for subject in ask(node, ListSubjects(), SubjectList, PATIENCE_S).subjects:
        try:
            subjects.append(ask(node, DescribeSubject(subject.name), SubjectDescription, PATIENCE_S))
        except BrokerGroupClosed:  # has a separate finding
            continue
        except AccessDenied:
            refused_subjects.append(subject.name)
    groups, refused_groups = [], []
    for name in ask(node, ListGroups(), GroupList, PATIENCE_S).groups:
        try:
            groups.append(_group(node, name.subject, name.group))
        except AccessDenied:
            refused_groups.append(f"{name.group} of {name.subject}")
    refused = [*_refused("subject", refused_subjects), *_refused("group", refused_groups)]
    return _Seen(subjects, [one for one in groups if one is not None], refused)


def _refused(noun: str, names: Sequence[str], of: str = "") -> Iterator[Finding]:
    if names:
        named = ", ".join(names[:REFUSED_NAMED])
        more = f" and {len(names) - REFUSED_NAMED:,} more" if len(names) > REFUSED_NAMED else ""
        count = f"1 {noun}" if len(names) == 1 else f"{len(names):,} {noun}s"
        what = f"{of}{count} could not be checked: {named}{more}"
        yield Finding("access", Level.WARNING, what, _MAY_DESCRIBE)


def _group(node: Node, subject: str, group: str) -> GroupDescription | None:
    try:
        return ask(node, DescribeGroup(subject, group), GroupDescription, PATIENCE_S)
    except (NotFound, BrokerGroupClosed):  # gone since, or has a separate finding
        return None


# The server itself


def _check_node(node: Node, clock: Clock) -> Iterator[Finding]:
    asked_at_ms, asked_at_s = clock.time_ms(), clock.monotonic()
    try:
        described = ask(node, DescribeNode(), NodeDescription, PATIENCE_S)
    except InvalidInput as error:  # the server does not know the command
        what = f"the server cannot describe the node: {error}"
        yield Finding(
            "version",
            Level.WARNING,
            what,
            f"the server is older than this {SOFTWARE}: use the server's doctor, or upgrade",
        )
        return
    except AccessDenied as error:
        yield Finding("access", Level.WARNING, f"the server does not describe the node: {error}", _MAY_DESCRIBE)
        return
    round_trip_s = clock.monotonic() - asked_at_s
    yield _check_version(described.software)
    yield from _check_ready(described)
    yield _check_clock(described.now_ms - asked_at_ms, round_trip_s)
    if described.disk is not None:
        yield disk_finding(described.disk.free_bytes, described.disk.reserve_bytes)
    yield from _check_restless(described)


def _check_brokers(node: Node) -> Iterator[Finding]:
    try:
        groups = ask(node, ListBrokerGroups(), BrokerGroupList, PATIENCE_S).groups
    except InvalidInput:  # the server is older than broker groups
        return
    for one in groups:
        if not one.is_heard:
            what = f"the broker of broker group {one.name} was not heard for {one.silent_s:,.0f} s"
            yield Finding(
                "brokers", Level.ERROR, what, "start the broker, or look at the broker's log; the partitions wait"
            )
        elif one.state != BrokerGroupState.AVAILABLE:
            what = f"broker group {one.name} is {one.state}"
            next_step = f"to make the broker group available again: `inturn broker-group set {one.name} available`"
            yield Finding("brokers", Level.WARNING, what, next_step)
    if any(one.address for one in groups) and all(one.is_heard for one in groups):
        yield Finding("brokers", Level.OK, f"{len(groups)} brokers are heard")


def _check_version(software: str) -> Finding:
    if software == SOFTWARE:
        return Finding("version", Level.OK, f"the server and this program are {software}")
    what = f"the server is {software}, this program is {SOFTWARE}"
    return Finding("version", Level.WARNING, what, "both versions work together; use the same version where possible")


def _check_ready(described: NodeDescription) -> Iterator[Finding]:
    next_steps = {
        "work": "wait until the server has stopped and is started again; consumers then continue by themselves",
        "logs": "see the findings about logs below",
        "state": "look at the server's log and disk, then restart the server; `inturn doctor --data` checks the folder",
    }
    for part in described.parts:
        if not part.is_ready:
            what = f"the server is not ready, {part.name}: {part.why}"
            level = Level.WARNING if part.name == "work" else Level.ERROR
            yield Finding("ready", level, what, next_steps.get(part.name, "look at the server's log"))
    if described.is_ready:
        yield Finding("ready", Level.OK, f"the server is ready, and has been up for {described.up_s:,.0f} s")


def _check_clock(difference_ms: int, round_trip_s: float) -> Finding:
    """The server read its clock at some moment of the round trip."""
    difference_s = difference_ms / 1000
    if difference_s > 0:
        difference_s = max(0.0, difference_s - round_trip_s)
    if abs(difference_s) <= CLOCK_S_MAX:
        return Finding("clock", Level.OK, f"the clocks differ by {abs(difference_s):.1f} s")
    ahead = "ahead of" if difference_s > 0 else "behind"
    what = f"the server's clock is {abs(difference_s):,.1f} s {ahead} the clock here"
    next_step = (
        "set both clocks by NTP; leases are not affected, but retention, retry delays and positions by time are off"
    )
    return Finding("clock", Level.WARNING, what, next_step)


def _check_restless(described: NodeDescription) -> Iterator[Finding]:
    for one in described.restless:
        label = f"{one.subject}/{one.partition}"
        what = f"the lease of partition {label} in group {one.group} was granted {one.grant_count} times in ten minutes"
        next_step = (
            "look at the logs of the consumers: consumers crash, are cut off, or are too busy to renew (a handler "
            "that holds the interpreter); a longer `inturn serve --lease-s` helps against pauses"
        )
        yield Finding("leases", Level.WARNING, what, next_step, label)
    if not described.restless:
        yield Finding("leases", Level.OK, "no lease changes hands too often")


# Logs


def _check_logs(subjects: Sequence[SubjectDescription]) -> list[Finding]:
    findings, count = [], 0
    for subject in subjects:
        for one in subject.partitions:
            label = f"{subject.subject.name}/{one.index}"
            if one.state == "damaged":
                what = f"the log of partition {label} is damaged"
                next_step = (
                    "run `inturn doctor --data FOLDER` on the server to find the offset; stop the server and restore "
                    "the log from a backup; other partitions work"
                )
                findings.append(Finding("log", Level.ERROR, what, next_step, label))
            elif one.state != "ok":
                what = f"the log of partition {label} has {one.state}: a sync or a write failed"
                next_step = "check the server's disk, then restart the server; no acknowledged message is lost"
                findings.append(Finding("log", Level.ERROR, what, next_step, label))
            else:
                count += 1
    return [*findings, Finding("log", Level.OK, f"{count} of {count + len(findings)} logs accept appends")]


# Groups


def _check_lag(seen: _Seen) -> list[Finding]:
    appended_per_s = {one.subject.name: sum(part.appended_per_s for part in one.partitions) for one in seen.subjects}
    findings = []
    for group in seen.groups:
        label = f"group {group.group} of {group.subject}"
        done_per_s = sum(one.done_per_s for one in group.partitions)
        lag = f"{label} has a lag of {group.lag:,}"
        if group.lag and not group.members:
            next_step = "start consumers of the group; for an unneeded group there is nothing to do"
            findings.append(Finding("lag", Level.WARNING, f"{lag}, and no members", next_step))
        elif group.lag >= LAG_MIN and done_per_s <= appended_per_s.get(group.subject, -1.0):  # if the rate is known
            rates = f"{done_per_s:,.1f} done/s, {appended_per_s[group.subject]:,.1f} in/s"
            next_step = (
                f"raise concurrency=, or process the backlog with `inturn drain {group.subject} --group {group.group}`"
                "; look at the keys of the group first"
            )
            findings.append(Finding("lag", Level.WARNING, f"{lag} that does not shrink: {rates}", next_step))
        findings += _check_holders(group)
    if not findings:
        lag_sum = sum(group.lag for group in seen.groups)
        what = f"{len(seen.groups)} groups keep up, with a total lag of {lag_sum:,}"
        findings.append(Finding("lag", Level.OK, what))
    return findings


def _check_holders(group: GroupDescription) -> Iterator[Finding]:
    if not group.members or group.mode != GroupMode.EXCLUSIVE.value:  # other groups have no leases
        return
    for one in group.partitions:
        if one.owner is None and one.lag >= LAG_MIN:
            label = f"{group.subject}/{one.partition}"
            what = f"no member holds partition {label} in group {group.group}, and {one.lag:,} messages wait there"
            next_step = "look at the logs of the members: the assigned member does not ask for the lease, or is refused"
            yield Finding("lag", Level.WARNING, what, next_step, label)


def _check_keys(node: Node, groups: Sequence[GroupDescription]) -> list[Finding]:
    findings: list[Finding] = []
    refused: list[str] = []
    for group in groups:
        if any(one.blocking is not None for one in group.partitions):
            try:
                keys = ask(node, ListKeys(group.subject, group.group), KeyList, PATIENCE_S).keys
            except AccessDenied:
                refused.append(f"{group.group} of {group.subject}")
                continue
            findings += _trouble(group, keys)
    findings += _refused("group", refused, "the keys of ")
    if not findings:
        findings.append(Finding("keys", Level.OK, "no key is blocked, parked or failing"))
    return findings


def _trouble(group: GroupDescription, keys: Sequence[KeyDescription]) -> Iterator[Finding]:
    where = f"{group.subject} --group {group.group}"
    next_steps = {
        "blocked": f"fix the cause, then `inturn key resume {group.subject} KEY --group {group.group}`, or `key skip`",
        "parked": f"fix the cause, then `inturn key resume {group.subject} KEY --group {group.group}`",
        "failing": f"look at the error with `inturn key list {where}`; the message is retried automatically",
    }
    for state, next_step in next_steps.items():
        found = [one for one in keys if one.state == state]
        if found:
            named = ", ".join(_key_text(one) for one in found[:KEYS_NAMED])
            more = f" and {len(found) - KEYS_NAMED:,} more" if len(found) > KEYS_NAMED else ""
            waiting = sum(one.waiting for one in found)
            count = "1 key is" if len(found) == 1 else f"{len(found):,} keys are"
            what = (
                f"group {group.group} of {group.subject}: {count} {state} ({named}{more}), "
                f"{waiting:,} messages wait behind"
            )
            yield Finding("keys", Level.WARNING, what, next_step)


def _key_text(one: KeyDescription) -> str:
    if one.key is None:
        return f"no key, partition {one.partition} offset {one.offset}"
    return one.key.decode(errors="backslashreplace")


# Members


def _check_members(node: Node, groups: Sequence[GroupDescription], sleep: Callable[[float], None]) -> list[Finding]:
    suspects = [group for group in groups if _beyond(group)]
    findings: list[Finding] = []
    if suspects:
        sleep(CHECK_AGAIN_S)
    for before in suspects:
        now = _group(node, before.subject, before.group)
        kept = set() if now is None else _beyond(now) & _beyond(before)
        for member, partition, epoch in sorted(kept):
            label = f"{before.subject}/{partition}"
            what = f"{member} holds partition {label} in group {before.group} (epoch {epoch}) without an assignment"
            next_step = (
                "a handler of the partition still runs and has to end first; look at the handler (py-spy dump), or "
                "stop that process: other members continue when the lease has ended"
            )
            findings.append(Finding("members", Level.WARNING, what, next_step, label))
    if not findings:
        count = sum(len(group.members) for group in groups)
        findings.append(Finding("members", Level.OK, f"{count} members hold only assigned partitions"))
    return findings


def _beyond(group: GroupDescription) -> set[tuple[str, int, int]]:
    """Held but unassigned partitions: member, partition, epoch."""
    epochs = {one.partition: one.epoch for one in group.partitions}
    return {
        (member.name, partition, epochs.get(partition, 0))
        for member in group.member_details
        for partition in member.held
        if partition not in member.assigned
    }
