"""Access rules: every command of the protocol is refused unless a rule allows the command."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from inturn.errors import AccessDenied, InvalidInput
from inturn.model.routing import Partition, Route, even_ranges
from inturn.model.subject import Subject, dead_letter_subject, retry_subject
from inturn.protocol import commands
from inturn.protocol.commands import (
    Acquire,
    Append,
    Claim,
    Command,
    Commit,
    CreateSubject,
    DescribeGroup,
    FindSubject,
    FindTrial,
    GroupList,
    GroupName,
    Heartbeat,
    Leave,
    ListGroups,
    ListSubjects,
    Move,
    OpenProducer,
    OpenRetry,
    ProducerOpened,
    Pull,
    Read,
    Release,
    ResetGroup,
    ResolvePosition,
    SteerKey,
    SubjectList,
)
from inturn.security.access import Access, Patterns, parse_access
from inturn.security.permissions import AS_MEMBER, OF_OTHERS, TABLE, Permission, derived, needed
from tests.security.played import PlayedGuard, all_commands, batch, sample

FREE = {"Hello", "Ping", "ListSubjects", "ListGroups", "ListBrokerGroups"}  # the lists are filtered
DEAD, RETRY = dead_letter_subject("billing", "orders"), retry_subject("billing", "orders")
EVERYTHING = '[[allow]]\nprincipals = "*"\nactions = "*"\nsubjects = "*"\ngroups = "*"\n'


def rule(actions: str, *, who: str = "shop", subjects: str = "orders", groups: str | None = "billing") -> str:
    text = f'[[allow]]\nprincipals = "{who}"\nactions = "{actions}"\nsubjects = "{subjects}"\n'
    return text if groups is None else text + f'groups = "{groups}"\n'


# All commands


@pytest.mark.parametrize("kind", all_commands(), ids=lambda kind: kind.__name__)
def test_every_command_says_what_it_needs(kind: type[Command]) -> None:
    """A new command fails here until `TABLE` names the action that the sender needs."""
    assert kind in TABLE, f"{kind.__name__} is missing in TABLE of inturn/security/actions.py"
    need = needed(sample(kind))
    assert (need is None) == (kind.__name__ in FREE)


def test_the_table_has_nothing_that_is_no_command() -> None:
    assert set(TABLE) == set(all_commands())


@pytest.mark.parametrize("kind", all_commands(), ids=lambda kind: kind.__name__)
def test_without_a_rule_no_command_reaches_the_node(kind: type[Command], tmp_path: Path) -> None:
    """Deny by default. The refusal does not tell whether the subject or group exists."""
    played = PlayedGuard(tmp_path, access=rule("*", who="ops"))
    answer = played.enter("mallory").ask(sample(kind))
    if kind.__name__ in FREE:
        assert not isinstance(answer, AccessDenied)
        return
    assert isinstance(answer, AccessDenied)
    assert answer.principal == "mallory"
    assert not played.node.asked
    assert isinstance(played.enter("ops").ask(sample(kind)), kind), "a rule for everything lets it through"


@pytest.mark.parametrize("kind", all_commands(), ids=lambda kind: kind.__name__)
def test_an_action_allows_what_it_says_and_nothing_else(kind: type[Command], tmp_path: Path) -> None:
    need = needed(sample(kind))
    if need is None:
        return
    rules = "".join(rule(action, who=f"may-{action}") for action in Permission)
    access = parse_access_text(rules)
    for action in Permission:
        allowed = any(one.allows(need) for one in access.rules_for(f"may-{action}"))
        assert allowed == (action in need.permissions)


@pytest.mark.parametrize("kind", all_commands(), ids=lambda kind: kind.__name__)
def test_a_rule_for_another_subject_or_group_does_not_fit(kind: type[Command]) -> None:
    need = needed(sample(kind))
    if need is None or need.subject is None:
        return
    other_subject = parse_access_text(rule("*", subjects="invoices"))
    other_group = parse_access_text(rule("*", groups="reporting"))
    assert not any(one.allows(need) for one in other_subject.rules_for("shop"))
    if need.group is not None:
        assert not any(one.allows(need) for one in other_group.rules_for("shop"))


def parse_access_text(text: str) -> Access:
    return parse_access(tomllib.loads(text), "access.toml")


# Derived subjects


def test_derived_subjects_belong_to_their_origin() -> None:
    assert (derived("orders").origin, derived("orders").kind) == ("orders", "")
    assert (derived(DEAD).origin, derived(DEAD).kind, derived(DEAD).group) == ("orders", "dead", "billing")
    nested = derived(retry_subject("alerts", DEAD))
    assert (nested.origin, nested.kind, nested.group) == ("orders", "retry", "alerts")
    for odd in ("%", "%%", "%retry%", "%retry%g", "%other%g%orders", "%dead%g%"):
        assert isinstance(derived(odd).origin, str)  # an odd name raises no exception


def member_command(kind: type[Command], subject: str, group: str = "billing") -> Command:
    made: Command = sample(kind, subject=subject, group=group)
    return made


@pytest.mark.parametrize("kind", [Heartbeat, Commit, Release, Pull])
def test_dead_letters_of_a_group_are_driven_again_by_those_who_may(kind: type[Command], tmp_path: Path) -> None:
    """Commits in the dead-letter subject record redriven messages: `consume` is not enough."""
    played = PlayedGuard(tmp_path, access=rule("consume", who="shop") + rule("redrive", who="ops"))
    assert isinstance(played.enter("shop").ask(member_command(kind, DEAD)), AccessDenied)
    assert isinstance(played.enter("ops").ask(member_command(kind, DEAD)), kind)
    assert isinstance(played.enter("shop").ask(member_command(kind, RETRY)), kind)
    assert isinstance(played.enter("ops").ask(member_command(kind, RETRY)), AccessDenied)


def test_nobody_but_a_redriver_stores_in_a_retry_or_dead_letter_subject(tmp_path: Path) -> None:
    played = PlayedGuard(
        tmp_path, access=rule("produce", who="shop", groups=None, subjects="*") + rule("redrive", who="ops")
    )
    shop, ops = played.enter("shop"), played.enter("ops")
    assert isinstance(shop.ask(Append("orders", 0, batch())), Append)
    for subject in (RETRY, DEAD):
        assert isinstance(shop.ask(Append(subject, 0, batch())), AccessDenied)
        assert isinstance(ops.ask(Append(subject, 0, batch())), Append)
    assert isinstance(ops.ask(Append("orders", 0, batch())), AccessDenied)
    assert isinstance(ops.ask(Append(dead_letter_subject("other", "orders"), 0, batch())), AccessDenied)


def test_whoever_may_read_may_look_at_dead_letters(tmp_path: Path) -> None:
    played = PlayedGuard(tmp_path, access=rule("read", who="shop"))
    shop = played.enter("shop")
    for kind in (FindSubject, commands.DescribeSubject):
        assert isinstance(shop.ask(kind(DEAD)), kind)
    assert isinstance(shop.ask(Read(DEAD, 0, 0, 1)), Read)
    for member_kind in (Acquire, Leave):
        assert isinstance(shop.ask(member_command(member_kind, DEAD)), member_kind)
    assert isinstance(shop.ask(member_command(Commit, DEAD)), AccessDenied)
    assert isinstance(shop.ask(member_command(Acquire, "orders")), AccessDenied)


@pytest.mark.parametrize("kind", [Read, ResolvePosition])
def test_a_member_of_a_group_reads_by_its_right_to_consume(kind: type[Command], tmp_path: Path) -> None:
    """Broadcast consumers and trials read this way: for the same group only, and as a member only."""
    played = PlayedGuard(tmp_path, access=rule("consume", who="shop") + rule("read", who="billing"))
    shop, reader = played.enter("shop"), played.enter("billing")
    assert isinstance(shop.ask(sample(kind, group="billing")), kind)
    assert isinstance(shop.ask(sample(kind, group="reporting")), AccessDenied)
    assert isinstance(shop.ask(sample(kind, group="")), AccessDenied)
    assert isinstance(shop.ask(sample(kind, group="billing", subject="invoices")), AccessDenied)
    assert isinstance(shop.ask(sample(kind, group="billing", subject=RETRY)), kind)
    assert isinstance(shop.ask(sample(kind, group="billing", subject=DEAD)), AccessDenied)
    assert isinstance(reader.ask(sample(kind, group="")), kind)
    assert isinstance(reader.ask(sample(kind, group="billing")), AccessDenied)


def test_one_action_for_one_thing(tmp_path: Path) -> None:
    """Offset reset, steering, creation of subjects: every action has a separate name."""
    texts = "".join(rule(action, who=who) for action, who in (("consume", "shop"), ("reset", "billing")))
    played = PlayedGuard(tmp_path, access=texts + rule("steer", who="ops"))
    shop, billing, ops = (played.enter(one) for one in ("shop", "billing", "ops"))
    reset = ResetGroup("orders", "billing", "first")
    steer = SteerKey("orders", "billing", b"k", "skip", "me", "why")
    assert isinstance(billing.ask(reset), ResetGroup)
    assert isinstance(ops.ask(steer), SteerKey)
    for client, command in ((shop, reset), (shop, steer), (ops, reset), (billing, steer)):
        assert isinstance(client.ask(command), AccessDenied)
    for client in (shop, billing, ops):
        assert isinstance(client.ask(sample(CreateSubject)), AccessDenied)
        assert isinstance(client.ask(DescribeGroup("orders", "billing")), DescribeGroup)
    assert isinstance(shop.ask(OpenRetry("orders", "billing", 3)), OpenRetry)
    assert isinstance(shop.ask(OpenRetry("orders", "reporting", 3)), AccessDenied)
    assert isinstance(shop.ask(sample(Move, to_subject=RETRY)), Move)


def test_whoever_only_looks_cannot_give_up_the_trial_of_another(tmp_path: Path) -> None:
    played = PlayedGuard(tmp_path, access=rule("describe", who="shop") + rule("steer", who="ops"))
    shop, ops = played.enter("shop"), played.enter("ops")
    look, give_up = sample(FindTrial), sample(FindTrial, gives_up=True)
    assert isinstance(shop.ask(look), FindTrial)
    assert isinstance(shop.ask(give_up), AccessDenied)
    for command in (look, give_up):
        assert isinstance(ops.ask(command), FindTrial)


def test_a_refusal_names_who_what_and_what_to_do(tmp_path: Path) -> None:
    played = PlayedGuard(tmp_path, access=EVERYTHING.replace('"*"\na', '"ops"\na', 1))
    denied = played.enter("shop").ask(member_command(Pull, "orders"))
    assert "'shop' may not consume on subject 'orders' for group 'billing'" in str(denied)
    assert "access file" in str(denied)


# Lists


def a_subject(name: str) -> Subject:
    return Subject(name, Route(name, 1, (Partition("main", name),), even_ranges(1)))


def test_lists_show_only_what_one_may_do_something_with(tmp_path: Path) -> None:
    access = rule("consume", who="shop") + rule("produce", who="shop", subjects="in*", groups=None)
    played = PlayedGuard(tmp_path, access=access)
    shop = played.enter("shop")
    shop.ask(ListSubjects())
    all_subjects = SubjectList(tuple(map(a_subject, ("orders", "invoices", "salaries", DEAD))))
    assert [one.name for one in shop.answered(all_subjects).subjects] == ["orders", "invoices", DEAD]
    shop.ask(ListGroups())
    groups = GroupList((GroupName("orders", "billing"), GroupName("orders", "audit"), GroupName("salaries", "billing")))
    assert shop.answered(groups).groups == (GroupName("orders", "billing"),)
    mallory = played.enter("mallory")
    mallory.ask(ListSubjects())
    assert mallory.answered(all_subjects) == SubjectList(())


# Names


@pytest.fixture
def open_to_all(tmp_path: Path) -> PlayedGuard:
    return PlayedGuard(tmp_path, access=EVERYTHING)


def test_every_command_that_names_a_member_says_whose_it_is() -> None:
    """A member of the sender: no other principal may use the name.

    A member of a different principal: the name is only read.
    """
    named = {kind for kind in all_commands() if "member" in kind.__struct_fields__}
    assert named == AS_MEMBER | OF_OTHERS, "see AS_MEMBER and OF_OTHERS in inturn/security/actions.py"
    assert not AS_MEMBER & OF_OTHERS


MEMBER_COMMANDS = [kind for kind in all_commands() if kind in AS_MEMBER]


@pytest.mark.parametrize("kind", MEMBER_COMMANDS, ids=lambda kind: kind.__name__)
def test_nobody_acts_for_the_member_of_another_principal(kind: type[Command], open_to_all: PlayedGuard) -> None:
    """A description of the group shows the member name.

    The name is not enough to pull, commit or leave as the member.
    """
    billing, mallory = open_to_all.enter("billing"), open_to_all.enter("mallory")
    assert isinstance(billing.ask(sample(Heartbeat)), Heartbeat)
    stolen = mallory.ask(sample(kind))
    assert isinstance(stolen, AccessDenied)
    assert "another principal" in str(stolen)
    assert isinstance(open_to_all.enter("billing").ask(sample(kind)), kind), "its own principal may, on any stream"
    elsewhere = sample(kind, subject="invoices")
    assert isinstance(mallory.ask(elsewhere), kind), "the name is another member's there"


def test_a_name_that_was_left_is_free(open_to_all: PlayedGuard) -> None:
    billing, mallory = open_to_all.enter("billing"), open_to_all.enter("mallory")
    billing.ask(sample(Heartbeat))
    billing.ask(sample(Leave))
    assert isinstance(mallory.ask(sample(Heartbeat)), Heartbeat)
    assert isinstance(billing.ask(sample(Heartbeat)), AccessDenied)


def test_nobody_claims_under_the_lease_of_another_principal(open_to_all: PlayedGuard) -> None:
    billing, mallory = open_to_all.enter("billing"), open_to_all.enter("mallory")
    billing.ask(sample(Acquire, member="driver"))
    claim = sample(Claim, owner="driver", member="task")
    assert isinstance(mallory.ask(claim), AccessDenied)
    assert isinstance(billing.ask(claim), Claim)


def test_nobody_fences_or_sends_as_the_producer_of_another_principal(open_to_all: PlayedGuard) -> None:
    """A forged sequence would make the real batch look like a duplicate."""
    shop, mallory = open_to_all.enter("shop"), open_to_all.enter("mallory")
    assert isinstance(shop.ask(OpenProducer("till-1")), OpenProducer)
    shop.answered(ProducerOpened(7, 1))
    assert isinstance(mallory.ask(OpenProducer("till-1")), AccessDenied)
    assert isinstance(mallory.ask(OpenProducer("till-2")), OpenProducer)
    assert isinstance(mallory.ask(Append("orders", 0, batch(7))), AccessDenied)
    assert isinstance(shop.ask(Append("orders", 0, batch(7))), Append)
    assert isinstance(open_to_all.enter("shop").ask(Append("orders", 0, batch(7))), Append)


def test_an_id_that_was_used_before_it_was_given_out_is_whose_it_is_given_to(open_to_all: PlayedGuard) -> None:
    """Ids count up. A client that guesses the next id must not block the producer that gets the id."""
    shop, mallory = open_to_all.enter("shop"), open_to_all.enter("mallory")
    assert isinstance(mallory.ask(Append("orders", 0, batch(8))), Append), "the node refuses it"
    shop.ask(OpenProducer())
    shop.answered(ProducerOpened(8, 0))
    assert isinstance(shop.ask(Append("orders", 0, batch(8))), Append)
    assert isinstance(mallory.ask(Append("orders", 0, batch(8))), AccessDenied)
    assert isinstance(mallory.ask(Append("invoices", 0, batch(8))), AccessDenied)


def test_an_id_of_before_a_restart_is_of_whom_uses_it_first_on_that_subject(open_to_all: PlayedGuard) -> None:
    """The guard has forgotten the principal of the id.

    A principal without `produce` on a subject cannot block the id there.
    """
    shop, mallory = open_to_all.enter("shop"), open_to_all.enter("mallory")
    assert isinstance(mallory.ask(Append("invoices", 0, batch(7))), Append)
    assert isinstance(shop.ask(Append("orders", 0, batch(7))), Append)
    assert isinstance(mallory.ask(Append("orders", 0, batch(7))), AccessDenied)
    assert isinstance(shop.ask(Append("invoices", 0, batch(7))), AccessDenied)


def test_what_is_used_through_the_folder_is_nobody_elses_and_is_never_refused_there(open_to_all: PlayedGuard) -> None:
    local, shop, mallory = open_to_all.enter_locally(), open_to_all.enter("shop"), open_to_all.enter("mallory")
    local.ask(OpenProducer("till"))
    local.answered(ProducerOpened(7, 1))
    local.ask(sample(Heartbeat))
    for stolen in (OpenProducer("till"), Append("orders", 0, batch(7)), sample(Heartbeat), sample(Release)):
        assert isinstance(mallory.ask(stolen), AccessDenied)
    shop.ask(OpenProducer("counter"))
    shop.answered(ProducerOpened(9, 0))
    shop.ask(sample(Heartbeat, member="m-2"))
    for taken in (OpenProducer("counter"), Append("orders", 0, batch(9)), sample(Heartbeat, member="m-2")):
        assert isinstance(local.ask(taken), type(taken))


def test_a_producer_that_was_opened_through_the_folder_stays_its_principals(open_to_all: PlayedGuard) -> None:
    """The node tells the principal of the fence, and the principal may open the producer again."""
    local, shop = open_to_all.enter_locally(), open_to_all.enter("shop")
    shop.ask(OpenProducer("counter"))
    shop.answered(ProducerOpened(9, 0))
    local.ask(OpenProducer("counter"))
    local.answered(ProducerOpened(9, 1))
    assert isinstance(shop.ask(Append("orders", 0, batch(9))), Append)
    assert isinstance(shop.ask(OpenProducer("counter")), OpenProducer)


# The file


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("orders", ["orders"], ["order", "orders2", "Orders", "xorders"]),
        ("order.*", ["order.", "order.book", "order.a.b"], ["order", "orderXbook", "xorder.book"]),
        ("o?der", ["order", "o.der"], ["oder", "oorder"]),
        ("*", ["", "anything", "%dead%g%s"], []),
        ("a[b]c", ["a[b]c"], ["abc"]),
        ("a|b", ["a|b"], ["a", "b"]),
        ("(.)+", ["(.)+"], ["xx"]),
    ],
)
def test_patterns(pattern: str, fits: list[str], fits_not: list[str]) -> None:
    patterns = Patterns([pattern])
    assert all(map(patterns.fit, fits))
    assert not any(map(patterns.fit, fits_not))
    assert patterns.fit(f"{fits[0]}\n") == pattern.endswith("*")


def test_a_name_that_almost_fits_many_stars_is_decided_at_once() -> None:
    """The sender of a command chooses the name: matching must not take time exponential in the number of stars."""
    patterns = Patterns(["*a" * 12 + "*b", "x*aa*aab"])
    assert not patterns.fit("a" * 400)
    assert patterns.fit("a" * 400 + "b")
    assert patterns.fit("xaaaab")
    assert not patterns.fit("xaaab"), "what one star has taken, another cannot have"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[allow]", "no TOML"),
        ("x = 1", "unknown field `x`"),
        ('[[allow]]\nprincipals = "a"\nactions = "produce"', "subjects"),
        (rule("fly"), "'fly' is not a valid Permission; there are produce, consume"),
        (rule("consume", groups=None), "rule 1: it allows consume, which is about groups"),
        (rule("*", groups=None), "which is about groups"),
        (rule("produce", groups="") + rule("produce"), "rule 1: an empty name"),
        (rule("produce").replace("principals", "principal"), "unknown field `principal`"),
        ("[[deny]]\n", "unknown field `deny`"),
        ('[[quota]]\nprincipals = "*"\nconnections = 0\n', "above 0"),
        ('[[quota]]\nprincipals = "*"\nbytes_per_s = -1.5\n', "above 0"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    """A server does not start with an invalid file, and guesses nothing."""
    with pytest.raises(InvalidInput, match=re.escape(said)):
        PlayedGuard(tmp_path, access=text)


def test_rules_are_read_again_and_hold_for_those_who_are_there(tmp_path: Path) -> None:
    played = PlayedGuard(tmp_path, access=rule("produce", groups=None))
    shop = played.enter("shop")
    append = Append("orders", 0, batch())
    assert isinstance(shop.ask(append), Append)
    played.access_file.write_text(rule("read", groups=None))
    played.guard.reload()
    assert isinstance(shop.ask(append), AccessDenied)
    played.access_file.write_text("nonsense")
    played.guard.reload()
    assert isinstance(shop.ask(append), AccessDenied)
    assert isinstance(shop.ask(Read("orders", 0, 0, 1)), Read)
    played.access_file.write_text(rule("produce", groups=None))
    played.guard.reload()
    assert isinstance(shop.ask(append), Append)


def test_without_a_file_whoever_is_known_may_do_everything(tmp_path: Path) -> None:
    shop = PlayedGuard(tmp_path).enter("shop")
    for kind in all_commands():
        if kind.__name__ not in FREE:
            assert isinstance(shop.ask(sample(kind)), kind)
