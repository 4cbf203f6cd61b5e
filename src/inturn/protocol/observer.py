"""The observer of a node's decisions, for tests and traces."""

from __future__ import annotations

from typing import Protocol

from inturn.model.subject import Subject
from inturn.protocol.commands import Progress


class Observer(Protocol):
    """Called in the order of the decisions, under the node's lock. Must be quick, and must not call the node."""

    def lease_granted(self, subject: str, group: str, partition: int, owner: str, epoch: int) -> None: ...

    def lease_ended(self, subject: str, group: str, partition: int, owner: str, epoch: int, why: str) -> None:
        """`why` is "released", "expired", or "gone" for a consumer whose process ended."""
        ...

    def claim_granted(self, subject: str, group: str, partition: int, claimant: str, epoch: int, slots: bytes) -> None:
        """Under the lease of this epoch. Any former claim on one of the slots (a SlotSet) is lost."""
        ...

    def claim_ended(self, subject: str, group: str, partition: int, claimant: str, epoch: int) -> None:
        """The claim was released."""
        ...

    def grown(self, subject: Subject) -> None:
        """The subject has a new route, which applies to all later appends."""
        ...

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        """Progress was stored: finished, parked and unparked messages."""
        ...
