"""Who wants to know what a node decides: tests, traces."""

from __future__ import annotations

from typing import Protocol

from inturn.model.subject import Subject
from inturn.protocol.commands import Progress


class Observer(Protocol):
    """Called in the order of the decisions, under the node's lock: be quick, call nothing back."""

    def lease_granted(self, subject: str, group: str, partition: int, owner: str, epoch: int) -> None: ...

    def lease_ended(self, subject: str, group: str, partition: int, owner: str, epoch: int, why: str) -> None:
        """`why` is "released", "expired", or "gone" for a consumer whose process ended."""
        ...

    def claim_granted(self, subject: str, group: str, partition: int, claimant: str, epoch: int, slots: bytes) -> None:
        """Under the lease of this epoch. Whoever had any of the slots (a SlotSet) has lost its claim by that."""
        ...

    def claim_ended(self, subject: str, group: str, partition: int, claimant: str, epoch: int) -> None:
        """It was given back."""
        ...

    def grown(self, subject: Subject) -> None:
        """It has a new route; what comes from now on is stored by that."""
        ...

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        """Progress that was stored: what is done, what is parked, what came out of a parking lot."""
        ...
