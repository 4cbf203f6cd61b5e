"""The exports of `inturn` are public. All other names may change."""

from __future__ import annotations

import enum
import inspect

import pytest

import inturn
from inturn.model import errors as error_tree

PUBLIC = [
    "SLOT_COUNT",
    "AssignmentStrategy",
    "Blocking",
    "Connection",
    "Consumer",
    "ConsumerSettings",
    "ConsumerStatistics",
    "Context",
    "DeadLetter",
    "DeadLetters",
    "FlowControl",
    "Flush",
    "Group",
    "GroupMode",
    "Hook",
    "InturnError",
    "KeyDescription",
    "KeyDetails",
    "KeyRequest",
    "Keyless",
    "Kept",
    "LeaseSettings",
    "Limits",
    "LogSettings",
    "Message",
    "OnExhausted",
    "Order",
    "Outbox",
    "OutboxSettings",
    "OutboxStatus",
    "Position",
    "Producer",
    "ProducerSettings",
    "ProducerStatistics",
    "Reader",
    "RefusedRow",
    "RequestState",
    "Result",
    "ResultKind",
    "RetryDelays",
    "Routing",
    "Scanner",
    "ScannerStatistics",
    "SendHandle",
    "SendHook",
    "Sending",
    "Stored",
    "Strategy",
    "Subject",
    "TlsSettings",
    "Trial",
    "TrialState",
    "__version__",
    "connect",
    "errors",
    "slot_of",
    "suspend",
    "token_from_environment",
]
DOCUMENTED = [name for name in PUBLIC if name not in ("SLOT_COUNT", "__version__")]
CLASSES = [name for name in DOCUMENTED if inspect.isclass(getattr(inturn, name))]


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(inturn.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert hasattr(inturn, name)


def test_nothing_is_listed_twice() -> None:
    assert len(inturn.__all__) == len(set(inturn.__all__))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(inturn, name)
    text = thing.__dict__.get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
    generated = f"{name}("  # the docstring that dataclass writes by default
    assert text, f"inturn.{name} has no docstring"
    assert not text.startswith(generated), f"inturn.{name} has only the signature that dataclass writes"


@pytest.mark.parametrize("name", [name for name in CLASSES if not issubclass(getattr(inturn, name), enum.Enum)])
def test_every_public_method_that_takes_arguments_says_what_it_does(name: str) -> None:
    undocumented = [
        f"{name}.{method}"
        for method, function in vars(getattr(inturn, name)).items()
        if inspect.isfunction(function)
        and not method.startswith("_")
        and len(inspect.signature(function).parameters) > 1
        and not inspect.getdoc(function)
    ]
    if name in ("Hook", "SendHook"):
        undocumented = []  # the docstring of the class covers both methods
    assert undocumented == []


def test_every_error_is_reachable_and_has_one_base() -> None:
    """Errors are public through `inturn.errors`."""
    kinds = [one for one in vars(inturn.errors).values() if inspect.isclass(one) and issubclass(one, Exception)]
    assert all(issubclass(kind, inturn.InturnError) for kind in kinds)
    drawn = error_tree.__doc__ or ""
    assert [kind.__name__ for kind in kinds if kind.__name__ not in drawn] == []
