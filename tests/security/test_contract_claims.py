"""The contract of claims on a server with all security features; see `test_contract`."""

from __future__ import annotations

import pytest

from tests.contract.test_claims import (
    mq,
    test_a_running_consumer_is_taken_over_and_goes_on_afterwards,
    test_two_claimants_share_the_partitions_of_a_keeper,
    witness,
)

__all__ = [
    "mq",
    "test_a_running_consumer_is_taken_over_and_goes_on_afterwards",
    "test_two_claimants_share_the_partitions_of_a_keeper",
    "witness",
]
pytestmark = pytest.mark.usefixtures("quiet")
