"""How long names in a command may be, before anybody looks at what they name.

A name could fill a whole frame. Whoever checks, remembers or writes down names (the guard, the audit log, the node) is
to see only such as could exist. Whether one does, and has the right characters, is the node's business.
"""

from __future__ import annotations

from inturn.model.commands import Command
from inturn.model.errors import InvalidInput
from inturn.model.names import NAME_LENGTH_MAX, RESERVED_LENGTH_MAX
from inturn.model.subject import Subject

MEMBER_LENGTH_MAX = 1000
_LIMITS = {
    "subject": RESERVED_LENGTH_MAX,
    "to_subject": RESERVED_LENGTH_MAX,
    "name": RESERVED_LENGTH_MAX,
    "group": NAME_LENGTH_MAX,
    "member": MEMBER_LENGTH_MAX,
    "owner": MEMBER_LENGTH_MAX,
    "nonce": NAME_LENGTH_MAX,  # of a producer; kept with its name
}
# By kind, so that nobody asks each command for what it does not have.
_OF_KIND = {
    kind: tuple((field, _LIMITS[field]) for field in kind.__struct_fields__ if field in _LIMITS)
    for kind in Command.__subclasses__()
}


def check_names(command: object) -> None:
    """Raises InvalidInput for a name that nothing can have."""
    for field, limit in _OF_KIND.get(type(command), ()):  # type: ignore[arg-type]
        named = getattr(command, field)
        name = named.name if isinstance(named, Subject) else named
        if name is not None and len(name) > limit:
            raise InvalidInput(f"{field}: a name of {len(name)} characters; the limit is {limit}, use a shorter one")
