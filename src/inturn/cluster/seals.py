"""The seals of a broker: meta is about to grow subjects, whose partitions take nothing by the old route meanwhile."""

from __future__ import annotations

from collections.abc import Container

from inturn.model.subject import Subject
from inturn.state.seals import Seal, SealRows


class Seals:
    """Durable. Call it under the node's lock."""

    def __init__(self, rows: SealRows) -> None:
        self._rows = rows
        self._seals = rows.all()

    @property
    def growths(self) -> tuple[str, ...]:
        return tuple(seal.growth for seal in self._seals.values())

    def sealed_for(self, subject: Subject) -> int:
        """The route version before which its logs take no appends: that of a growth that has begun, or its own."""
        seal = self._seals.get(subject.name)
        return subject.route.version if seal is None else seal.version

    def put(self, seal: Seal) -> None:
        self._rows.put(seal)
        self._seals[seal.subject] = seal

    def settle(self, subject: Subject) -> None:
        """The route that it was sealed for is known: that is over."""
        seal = self._seals.get(subject.name)
        if seal is not None and seal.version <= subject.route.version:
            self._remove(seal)

    def break_void(self, growths: Container[str]) -> list[str]:
        """These growths came to nothing. Returns the subjects that were sealed for them."""
        void = [seal for seal in self._seals.values() if seal.growth in growths]
        for seal in void:
            self._remove(seal)
        return [seal.subject for seal in void]

    def _remove(self, seal: Seal) -> None:
        self._rows.remove(seal.subject)
        del self._seals[seal.subject]
