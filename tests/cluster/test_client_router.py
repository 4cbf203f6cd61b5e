"""M1: a command about partitions of several brokers is divided, and the answers are joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inturn.cluster.broker_links import Answers, gather
from inturn.cluster.client_router import Divided, divided, joined, partitions_of
from inturn.model.errors import ConnectionLost, InturnError, InvalidInput
from inturn.protocol.commands import (
    Acknowledge,
    Acknowledged,
    Answer,
    Command,
    Commit,
    Committed,
    PartitionReceipts,
    Progress,
    Renew,
    Renewed,
    Reply,
)

HOMES = ("east", "west", "east", "north")
LOST = ConnectionLost("broker group west", "it is away")


def renew(*partitions: int) -> Renew:
    return Renew("s", "g", "m", tuple((index, 7) for index in partitions))


def commit(*partitions: int) -> Commit:
    return Commit("s", "g", "m", tuple(Progress(index, 7, 5) for index in partitions))


def acknowledge(*partitions: int) -> Acknowledge:
    return Acknowledge("s", "g", "m", 1, tuple(PartitionReceipts(index, 7) for index in partitions))


@given(st.sampled_from([renew, commit, acknowledge]), st.lists(st.integers(0, 3), min_size=1, unique=True))
def test_each_broker_gets_its_part_and_nothing_else(make: object, partitions: list[int]) -> None:
    command: Divided = make(*partitions)  # type: ignore[operator]
    parts = divided(command, HOMES.__getitem__)
    assert sorted(index for part in parts.values() for index in partitions_of(part)) == sorted(partitions)
    for home, part in parts.items():
        assert {HOMES[index] for index in partitions_of(part)} == {home}
    if len(parts) == 1:
        assert parts[HOMES[partitions[0]]] is command


def test_answers_are_put_together() -> None:
    parts = divided(renew(0, 1, 2), HOMES.__getitem__)
    answers: Answers = {"east": Renewed((0, 2), (2,)), "west": Renewed(())}
    assert joined(parts, answers) == Renewed((0, 2), (2,), ())
    parts = divided(acknowledge(0, 1), HOMES.__getitem__)
    assert joined(parts, {"east": Acknowledged(((0, 3),)), "west": Acknowledged()}) == Acknowledged(((0, 3),))


def test_of_what_could_not_be_asked_nothing_is_said() -> None:
    """A partition of a broker that did not answer is neither renewed nor refused: the earlier deadline still counts."""
    parts = divided(renew(0, 1), HOMES.__getitem__)
    assert joined(parts, {"east": Renewed((0,)), "west": LOST}) == Renewed((0,), (), (1,))
    parts = divided(commit(0, 1, 3), HOMES.__getitem__)
    answers: Answers = {"east": Committed((0,)), "west": LOST, "north": Committed(())}
    assert joined(parts, answers) == Committed((0,), (1,))


def test_errors_of_all_and_those_that_last_are_told() -> None:
    parts = divided(commit(0, 1), HOMES.__getitem__)
    assert joined(parts, {"east": LOST, "west": LOST}) is LOST
    wrong = InvalidInput("no")
    assert joined(parts, {"east": Committed((0,)), "west": wrong}) is wrong
    # An acknowledgement is stored completely or reported as lost. The member sends the whole acknowledgement again.
    parts = divided(acknowledge(0, 1), HOMES.__getitem__)
    assert joined(parts, {"east": Acknowledged(), "west": LOST}) is LOST


class _Late:
    """A node that answers when the test says so."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def submit(self, command: Command, reply: Reply) -> None:
        self.replies.append(reply)


def test_gathering_ends_with_the_last_answer_and_only_once() -> None:
    nodes = {"east": _Late(), "west": _Late()}
    ended: list[dict[str, Answer | InturnError]] = []
    gather({name: (node, renew(0)) for name, node in nodes.items()}, ended.append)
    nodes["west"].replies[0](LOST)
    assert ended == []
    nodes["east"].replies[0](Renewed((0,)))
    assert ended == [{"west": LOST, "east": Renewed((0,))}]
    gather({}, ended.append)
    assert ended[1] == {}
