"""The codec: a code for every command, answer and error of `inturn.protocol.commands`, and limits on names.

A body is the msgpack of its struct. New fields come last and have defaults, so an older end can decode the struct. Any
other change needs a new code, or a new version of the protocol.

A name could fill a whole frame. `check_names` limits the length, so that the guard, the audit log and the node never
store or compare longer names. The node checks the characters and the existence of a name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inturn.model import errors
from inturn.model.errors import InturnError, InvalidInput, ProtocolError
from inturn.model.subject import NAME_LENGTH_MAX, RESERVED_LENGTH_MAX, Subject
from inturn.protocol import commands
from inturn.protocol.commands import Answer, Command
from inturn.protocol.frames import Frame, frame_of

MEMBER_LENGTH_MAX = 1000
_LIMITS = {
    "subject": RESERVED_LENGTH_MAX,
    "to_subject": RESERVED_LENGTH_MAX,
    "name": RESERVED_LENGTH_MAX,
    "group": NAME_LENGTH_MAX,
    "member": MEMBER_LENGTH_MAX,
    "owner": MEMBER_LENGTH_MAX,
    "nonce": NAME_LENGTH_MAX,  # of a producer; stored with its name
}
# The limited fields of each kind of command.
_OF_KIND = {
    kind: tuple((field, _LIMITS[field]) for field in kind.__struct_fields__ if field in _LIMITS)
    for kind in Command.__subclasses__()
}


def check_names(command: object) -> None:
    """Raise InvalidInput for a name above the limit."""
    for field, limit in _OF_KIND.get(type(command), ()):  # type: ignore[arg-type]
        named = getattr(command, field)
        name = named.name if isinstance(named, Subject) else named
        if name is not None and len(name) > limit:
            raise InvalidInput(f"{field}: a name of {len(name)} characters; the limit is {limit}, use a shorter one")


VERSIONS = (1, 1)  # of the protocol: lowest and highest of this software
ERROR = 0

# A code never changes its meaning.
KINDS: dict[int, type] = {
    1: commands.Hello,
    2: commands.Welcome,
    3: commands.Ping,
    4: commands.Done,
    10: commands.OpenProducer,
    11: commands.ProducerOpened,
    12: commands.Append,
    13: commands.Appended,
    20: commands.Heartbeat,
    21: commands.Assignment,
    22: commands.Leave,
    30: commands.Acquire,
    31: commands.Granted,
    32: commands.Renew,
    33: commands.Renewed,
    34: commands.Pull,
    35: commands.Pulled,
    36: commands.Commit,
    37: commands.Committed,
    38: commands.Release,
    39: commands.OpenRetry,
    40: commands.OpenDeadLetters,
    41: commands.Move,
    42: commands.ReadLot,
    43: commands.LotContent,
    44: commands.Read,
    45: commands.Claim,
    50: commands.CreateSubject,
    51: commands.FindSubject,
    52: Subject,
    53: commands.ListSubjects,
    54: commands.SubjectList,
    55: commands.DescribeSubject,
    56: commands.SubjectDescription,
    57: commands.ResolvePosition,
    58: commands.Offsets,
    59: commands.GrowSubject,
    60: commands.ListGroups,
    61: commands.GroupList,
    62: commands.DescribeGroup,
    63: commands.GroupDescription,
    64: commands.ResetGroup,
    70: commands.SteerKey,
    71: commands.KeyRequest,
    72: commands.FindRequest,
    73: commands.RequestState,
    74: commands.ListKeys,
    75: commands.KeyList,
    76: commands.DescribeKey,
    77: commands.KeyDetails,
    78: commands.DescribeNode,
    79: commands.NodeDescription,
    155: commands.Fetch,
    156: commands.Fetched,
    157: commands.Acknowledge,
    158: commands.Acknowledged,
    159: commands.SetOrder,
    150: commands.TryMessage,
    151: commands.Trial,
    152: commands.FindTrial,
    153: commands.TrialState,
    154: commands.ReportTrial,
    160: commands.ListBrokerGroups,
    161: commands.BrokerGroupList,
    162: commands.SetBrokerGroup,
    163: commands.BrokerGroupDescription,
    164: commands.ReportBroker,
    165: commands.BrokerOrders,
    166: commands.ReadCatalogue,
    167: commands.Catalogue,
    168: commands.LearnSubject,
    169: commands.LearnProducer,
    170: commands.SealSubject,
    171: commands.Sealed,
    172: commands.OpenGroup,
    173: commands.GroupOpened,
    174: commands.FindGroup,
    175: commands.ForgetMember,
    176: commands.ListRequests,
    177: commands.RequestList,
    178: commands.FindMessage,
}
CODES = {kind: code for code, kind in KINDS.items()}


class ErrorBody(msgspec.Struct, frozen=True):
    """An error: `code` is the class name, `fields` are the attributes."""

    code: str
    message: str
    retriable: bool
    fields: dict[str, Any]


_ERRORS: dict[str, type[InturnError]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, InturnError)
}
_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
    code: msgspec.msgpack.Decoder(kind) for code, kind in KINDS.items()
}
_error_decoder = msgspec.msgpack.Decoder(ErrorBody)
_encoder = msgspec.msgpack.Encoder()


def pack(number: int, value: Command | Answer | InturnError) -> bytes:
    """The whole frame."""
    if isinstance(value, InturnError):
        return frame_of(number, ERROR, _encoder.encode(_error_body(value)))
    return frame_of(number, CODES[type(value)], _encoder.encode(value))


def unpack(frame: Frame) -> Command | Answer | InturnError:
    """Decode a frame. Raise ProtocolError for an unknown code or a wrong body."""
    try:
        if frame.code == ERROR:
            return _error(_error_decoder.decode(frame.body))
        return _decoders[frame.code].decode(frame.body)  # type: ignore[no-any-return]
    except KeyError:
        raise ProtocolError(f"frame {frame.number} has the unknown code {frame.code}") from None
    except (msgspec.MsgspecError, RecursionError, InturnError) as error:
        kind = KINDS[frame.code].__name__ if frame.code else "error"
        raise ProtocolError(f"frame {frame.number} is no {kind}: {error}") from None


def _error_body(error: InturnError) -> ErrorBody:
    kind = next(kind for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    fields = {name: value if isinstance(value, _PLAIN) else repr(value) for name, value in vars(error).items()}
    return ErrorBody(kind.__name__, str(error), error.retriable, fields)


_PLAIN = (str, bytes, int, float, tuple, type(None))


def _error(body: ErrorBody) -> InturnError:
    """The error as raised at the other end; a plain InturnError for an unknown class."""
    kind = _ERRORS.get(body.code, InturnError)
    error = kind.__new__(kind, body.message)
    error.args = (body.message,)
    error.__dict__.update({name: tuple(v) if isinstance(v, list) else v for name, v in body.fields.items()})
    if error.retriable != body.retriable:
        error.retriable = body.retriable
    return error
