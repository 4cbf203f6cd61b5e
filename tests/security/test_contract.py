"""A part of the contract suite on a server with all security features: TLS, client certificates, a token, and rules.

The whole suite passes there, too, but takes minutes. Together, the tests here send every kind of command.
"""

from __future__ import annotations

import pytest

from tests.contract.conftest import line, mq
from tests.contract.test_dead_letters import (
    test_a_consumer_that_runs_handles_what_is_driven_again,
    test_under_best_effort_all_attempts_count,
)
from tests.contract.test_groups import (
    test_a_group_says_who_has_what_and_how_far,
    test_a_killed_consumer_is_succeeded_after_its_lease_and_only_what_is_open_is_repeated,
    test_several_consumers_come_and_go_and_the_contract_holds,
)
from tests.contract.test_key_order import (
    test_messages_of_one_key_never_overlap_and_stay_in_order,
    test_the_finished_set_survives_closing_and_opening_the_folder,
)
from tests.contract.test_parking import (
    test_a_skip_drops_the_head_with_a_record_of_who_and_why,
    test_resuming_keeps_the_order_while_new_messages_arrive,
)
from tests.contract.test_producing import (
    test_a_large_message_within_the_limits_comes_back,
    test_a_named_producer_fences_the_one_from_before_a_restart,
    test_a_second_producer_of_a_name_fences_the_first,
    test_compressed_messages_come_back_as_they_were,
    test_several_threads_each_keep_the_order_of_their_keys,
)

__all__ = [
    "line",
    "mq",
    "test_a_consumer_that_runs_handles_what_is_driven_again",
    "test_a_group_says_who_has_what_and_how_far",
    "test_a_killed_consumer_is_succeeded_after_its_lease_and_only_what_is_open_is_repeated",
    "test_a_large_message_within_the_limits_comes_back",
    "test_a_named_producer_fences_the_one_from_before_a_restart",
    "test_a_second_producer_of_a_name_fences_the_first",
    "test_a_skip_drops_the_head_with_a_record_of_who_and_why",
    "test_compressed_messages_come_back_as_they_were",
    "test_messages_of_one_key_never_overlap_and_stay_in_order",
    "test_resuming_keeps_the_order_while_new_messages_arrive",
    "test_several_consumers_come_and_go_and_the_contract_holds",
    "test_several_threads_each_keep_the_order_of_their_keys",
    "test_the_finished_set_survives_closing_and_opening_the_folder",
    "test_under_best_effort_all_attempts_count",
]
pytestmark = pytest.mark.usefixtures("quiet")
