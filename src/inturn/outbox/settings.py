"""How an outbox is scanned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from inturn.model.errors import InvalidInput
from inturn.model.settings import LeaseSettings


def _short_lease() -> LeaseSettings:
    # Shorter than a consumer's: who comes too early sends nothing twice and nothing out of order, see decision 0012.
    return LeaseSettings(life_s=6.0, renew_s=1.5, margin_s=0.5)


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """How an outbox is scanned: how often is looked, how much is on its way at once, when a row is tried again."""

    poll_s: float = 0.1  # how long after a look that found nothing the next one comes
    batch: int = 500  # rows read at once
    in_flight: int = 4000  # rows on their way at once, and
    lane: int = 1000  # of these for one partition at the most
    stuck_s: float = 1.0  # a partition that stores nothing for so long is passed over, the others go on
    retry_s: float = 10.0  # a row that was refused is tried again after this
    lease: LeaseSettings = field(default_factory=_short_lease)

    def __post_init__(self) -> None:
        for name in ("poll_s", "stuck_s", "retry_s", "batch", "in_flight", "lane"):
            value = getattr(self, name)
            kinds = int | float if name.endswith("_s") else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                raise InvalidInput(f"OutboxSettings.{name} is {value!r}; it must be a number above 0")
        if not isinstance(self.lease, LeaseSettings):
            raise InvalidInput(f"OutboxSettings.lease is {self.lease!r}; give a LeaseSettings")
