"""Where brokers are, and whether they are there, as meta last said."""

from __future__ import annotations

from inturn.model.commands import BrokerGroupDescription, BrokerGroupList, ListBrokerGroups
from inturn.model.errors import InturnError
from inturn.model.request import ask
from inturn.wire.client import RemoteNode


class Whereabouts:
    def __init__(self, meta: RemoteNode) -> None:
        self._meta = meta
        self._known: dict[str, BrokerGroupDescription] = {}

    def locate(self, broker_group: str) -> str | None:
        """Its address; None if nobody knows. Asks meta, and waits."""
        try:
            listed = ask(self._meta, ListBrokerGroups(), BrokerGroupList, patience_s=0.0)
            self._known = {one.name: one for one in listed.groups}
        except InturnError:
            pass  # meta is away: its last word counts
        known = self._known.get(broker_group)
        return None if known is None else known.address

    def is_dead(self, broker_group: str) -> bool:
        """As meta told when a broker was last looked for."""
        known = self._known.get(broker_group)
        return known is not None and not known.is_heard
