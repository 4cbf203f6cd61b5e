"""Where a group may move messages that failed: its own retry and dead-letter subjects, and nowhere else."""

from __future__ import annotations

from inturn.model.errors import InvalidInput
from inturn.model.names import dead_letter_subject, retry_subject
from inturn.state.groups import GroupRecord


def origin_of(group: str, subject: str) -> str:
    """The subject that the group's messages come from in the first place: its retry subject is only a detour."""
    return subject.removeprefix(retry_subject(group, ""))


def check_target(group: GroupRecord, to_subject: str) -> None:
    """Raise InvalidInput unless failed messages of the group may be moved there."""
    origin = origin_of(group.name, group.subject)
    allowed = (retry_subject(group.name, origin), dead_letter_subject(group.name, origin))
    if to_subject not in allowed:
        raise InvalidInput(
            f"subject {to_subject!r}: failed messages of group {group.name!r} move to "
            f"{allowed[0]!r} or {allowed[1]!r} only"
        )
