"""The catalog: the subjects and groups that a node knows, by name."""

from __future__ import annotations

from inturn.model.errors import GroupConflict, NotFound
from inturn.model.settings import GroupMode
from inturn.model.subject import Subject, check_name
from inturn.store.groups import GroupRecord


class Catalog:
    """Changed under the node's lock. Entries are never removed, so a single lookup needs no lock."""

    def __init__(self) -> None:
        self.subjects: dict[str, Subject] = {}
        self.groups: dict[tuple[str, str], GroupRecord] = {}  # by subject and name

    def subject(self, name: str) -> Subject:
        subject = self.subjects.get(check_name("subject", name, reserved=True))
        if subject is None:
            raise NotFound("subject", name, "create it first: create_subject(), or `inturn subject create`")
        return subject

    def group(self, subject: str, name: str) -> GroupRecord:
        group = self.groups.get((check_name("subject", subject, reserved=True), check_name("group", name)))
        if group is None:
            raise NotFound("group", name, f"no consumer has joined it on subject {subject!r} yet")
        return group


def check_mode(group: GroupRecord, mode: GroupMode) -> None:
    """Raise GroupConflict if the group was made with another mode."""
    if group.mode is not mode:
        raise GroupConflict(
            group.name,
            f"it was made with mode={group.mode.value!r}, this asks for {mode.value!r}; use the same, or another group",
        )
