"""The class of seeded bugs, and the search for a history that shows a bug.

A module per layer has the bugs of the layer, in a `Bugs`: a function that replaces a function of the product, an edit
of a function's text, or plain patches.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from simulator.disk import SimCrash
from simulator.simulation import simulate

SEEDS_MAX = 1000
_ANNOTATIONS = __future__.annotations.compiler_flag


@dataclass(frozen=True, slots=True)
class Patch:
    """`owner` is a class or a module of the product."""

    owner: Any
    attribute: str
    replacement: Any


@dataclass(frozen=True, slots=True)
class SeededBug:
    """`layer` is the package of the product with the mistake."""

    name: str
    layer: str
    description: str
    patches: tuple[Patch, ...]

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        """The product has the bug in this block, and is restored afterwards."""
        originals = [vars(patch.owner)[patch.attribute] for patch in self.patches]
        for patch in self.patches:
            setattr(patch.owner, patch.attribute, patch.replacement)
        try:
            yield
        finally:
            for patch, original in zip(self.patches, originals, strict=True):
                setattr(patch.owner, patch.attribute, original)

    def __str__(self) -> str:
        return self.name


class BrokenBug(Exception):
    """The bug no longer fits the product: the result says nothing about the simulation."""

    def __init__(self, bug: SeededBug, seed: int, error: BaseException) -> None:
        self.bug = bug
        super().__init__(f"{bug} at seed {seed} ended with {error!r}: its patch does not fit the product")


# Errors of Python for calls and names that do not fit. Write a bug so that the product raises none of these errors:
# a broken bug and a find would look the same.
_MISFITS = (TypeError, AttributeError, NameError, LookupError, UnboundLocalError, ImportError)


def finding(bug: SeededBug, seed: int) -> str | None:
    """The problems of a history with this bug; None if the simulation did not notice.

    An error of the product, or an endless repetition of events, counts as noticed. Raises BrokenBug.
    """
    with bug.injected():
        try:
            report = simulate(seed)
        except _MISFITS as error:
            raise BrokenBug(bug, seed, error) from error
        except (Exception, SimCrash) as error:
            return f"{type(error).__name__}: {error}"
    return None if report.ok else report.problems[0]


def seeds_to_find(bug: SeededBug, seeds_max: int = SEEDS_MAX, first_seed: int = 0) -> int | None:
    """The number of histories until a history shows the bug; None if no history does."""
    for count in range(1, seeds_max + 1):
        if finding(bug, first_seed + count - 1) is not None:
            return count
    return None


def edited(function: Any, old: str, new: str) -> Any:
    """The function with a part of its text replaced; for a mistake in the middle of a long function."""
    source = textwrap.dedent(inspect.getsource(function)).removeprefix("@property\n")
    assert source.count(old) == 1, f"{function.__qualname__} does not say {old!r} any more"
    code = compile(source.replace(old, new), f"<{function.__qualname__}, edited>", "exec", _ANNOTATIONS)
    names: dict[str, Any] = {}
    exec(code, function.__globals__, names)  # the text is the product's, and ours
    return names[function.__name__]


class Bugs(list[SeededBug]):
    """The bugs of a module."""

    def add(self, name: str, layer: str, description: str, *patches: Patch) -> None:
        for patch in patches:
            assert patch.attribute in vars(patch.owner), f"{name}: the product has no {patch.attribute} any more"
        self.append(SeededBug(name, layer, description, patches))

    def add_edit(self, name: str, description: str, owner: Any, attribute: str, old: str, new: str) -> None:
        original = vars(owner)[attribute]
        if isinstance(original, property):
            replacement: Any = property(edited(original.fget, old, new))
        else:
            replacement = edited(original, old, new)
        self.add(name, _layer(owner), description, Patch(owner, attribute, replacement))

    def instead_of(self, owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the function as a bug with the name and the docstring of the function."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            assert function.__doc__ is not None
            self.add(function.__name__, _layer(owner), function.__doc__, Patch(owner, attribute, function))
            return function

        return register


def _layer(owner: Any) -> str:
    name: str = owner.__module__ if isinstance(owner, type) else owner.__name__
    return name.split(".")[1]
