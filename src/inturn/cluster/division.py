"""Commands about partitions of several brokers: to each broker its part, and of their answers one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from inturn.cluster.gathering import Answers
from inturn.model.commands import (
    Acknowledge,
    Acknowledged,
    Answer,
    Commit,
    Committed,
    Renew,
    Renewed,
)
from inturn.model.errors import InturnError

Divided = Renew | Commit | Acknowledge
_Wanted = TypeVar("_Wanted")


def partitions_of(command: Divided) -> tuple[int, ...]:
    match command:
        case Renew():
            return tuple(index for index, _ in command.held)
        case Commit():
            return tuple(one.partition for one in command.progress)
    return tuple(one.partition for one in command.receipts)


def divided(command: Divided, home: Callable[[int], str]) -> dict[str, Divided]:
    """By broker group; `home` tells that of a partition."""
    homes = list(dict.fromkeys(home(index) for index in partitions_of(command)))
    if len(homes) == 1:
        return {homes[0]: command}
    parts: dict[str, Divided] = {}
    for name in homes:
        match command:
            case Renew():
                held = tuple(one for one in command.held if home(one[0]) == name)
                parts[name] = msgspec.structs.replace(command, held=held)
            case Commit():
                progress = tuple(one for one in command.progress if home(one.partition) == name)
                parts[name] = msgspec.structs.replace(command, progress=progress)
            case Acknowledge():
                receipts = tuple(one for one in command.receipts if home(one.partition) == name)
                parts[name] = msgspec.structs.replace(command, receipts=receipts)
    return parts


def joined(parts: dict[str, Divided], answers: Answers) -> Answer | InturnError:
    """One answer. What a broker could not be asked is `unreached`, so that the others' partitions go on; errors that
    will not pass by themselves, and those of all, are told as they are."""
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, InturnError)}
    first = next(iter(parts.values()))
    lasting = next((error for error in errors.values() if not error.retriable), None)
    if lasting is not None:
        return lasting
    if errors and (len(errors) == len(answers) or isinstance(first, Acknowledge)):
        return next(iter(errors.values()))  # an Acknowledge says all or nothing, and is sent again as it is
    unreached = tuple(index for name in errors for index in partitions_of(parts[name]))
    match first:
        case Renew():
            renewed = _of(answers, Renewed)
            taken = tuple(sorted(index for one in renewed for index in one.partitions))
            wanted = tuple(sorted(index for one in renewed for index in one.wanted_back))
            return Renewed(taken, wanted, unreached)
        case Commit():
            done = tuple(sorted(index for one in _of(answers, Committed) for index in one.partitions))
            return Committed(done, unreached)
    return Acknowledged(tuple(place for one in _of(answers, Acknowledged) for place in one.refused))


def _of(answers: Answers, kind: type[_Wanted]) -> Sequence[_Wanted]:
    return [answer for answer in answers.values() if isinstance(answer, kind)]
