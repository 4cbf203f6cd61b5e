"""A guard and sessions without sockets: the commands that reach the node, and the answers."""

from __future__ import annotations

import types
import typing
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from inturn.model.batch import Batch, payload_checksum
from inturn.model.routing import Partition, Route, even_ranges
from inturn.model.settings import LeaseSettings
from inturn.model.subject import Subject
from inturn.model.time import Clock, SystemClock
from inturn.protocol import commands
from inturn.protocol.codec import VERSIONS, pack, unpack
from inturn.protocol.commands import Command, Hello, Reply
from inturn.protocol.frames import FrameReader
from inturn.security.guard import Guard
from inturn.security.settings import SecuritySettings
from inturn.security.tokens import TokenFile
from inturn.transport.server_session import ServerSession, ServerSettings

NOW_MS = 1_800_000_000_000
NAMES = {"subject": "orders", "name": "orders", "group": "billing", "member": "m-1"}


def all_commands() -> list[type[Command]]:
    return [
        one
        for one in vars(commands).values()
        if isinstance(one, type) and issubclass(one, Command) and one is not Command
    ]


def sample(kind: type, **given: Any) -> Any:
    """A value of the kind. A field that is not given has any value that the type allows."""
    hints = typing.get_type_hints(kind)
    values = {name: given.get(name, _value(name, hint)) for name, hint in hints.items() if not name.startswith("_")}
    return kind(**values)


def _value(name: str, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if hint is Batch:
        return batch()
    if hint is Subject:
        return Subject("orders", Route("orders", 1, (Partition("local", "p1"),), even_ranges(1)))
    if origin in (typing.Union, types.UnionType):
        return _value(name, next(one for one in typing.get_args(hint) if one is not type(None)))
    if origin is tuple:
        inner = typing.get_args(hint)
        return tuple(_value(name, one) for one in inner if one is not Ellipsis)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return sample(hint)
    if hint is str:
        return {"subject": "orders", "name": "orders", "group": "billing", "member": "m-1", "to_subject": "x"}.get(
            name, ""
        )
    return hint()  # 0, an empty value, or default settings


def batch(producer_id: int = 0) -> Batch:
    payload = b"\x00\x00\x91\x90"
    return Batch(1, producer_id, 0, 0, 1, 0, payload_checksum(payload), payload)


class FakeNode:
    """Records all commands."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Command, Reply]] = deque()

    def submit(self, command: Command, reply: Reply) -> None:
        raise AssertionError("a client in another process is remote")

    def submit_remote(self, command: Command, reply: Reply) -> None:
        self.asked.append((command, reply))

    def hung_up(self, session: object) -> None:
        pass


class PlayedGuard:
    def __init__(self, folder: Path, access: str | None = None, clock: Clock | None = None) -> None:
        self.folder = folder
        file = TokenFile(folder / "tokens.json")
        self.tokens = {name: file.create(name, NOW_MS) for name in ("shop", "billing", "mallory", "ops")}
        self.access_file = folder / "access.toml"
        if access is not None:
            self.access_file.write_text(access)
        settings = SecuritySettings(
            tokens=str(file.path),
            access=None if access is None else str(self.access_file),
            audit_log=str(folder / "audit.jsonl"),
        )
        self.settings = ServerSettings()
        self.node = FakeNode()
        self.guard = Guard(settings, clock if clock is not None else SystemClock())

    def enter(self, principal: str) -> PlayedClient:
        return PlayedClient(self, self.tokens[principal])

    def enter_locally(self) -> PlayedClient:
        """Through the socket in the folder."""
        return PlayedClient(self, "", is_local=True)


class PlayedClient:
    """A greeted session."""

    def __init__(self, played: PlayedGuard, token: str, *, is_local: bool = False) -> None:
        self._node = played.node
        self._sent = bytearray()
        self._reader = FrameReader(1 << 30)
        self._number = 1
        visitor = played.guard.session_guard("192.0.2.7", None, is_local=is_local)
        self.session = ServerSession(
            played.node, played.settings, LeaseSettings(), "test", self._send, lambda: None, None, visitor
        )
        self.session.received(pack(1, Hello(VERSIONS, "test", token)))
        self.welcome = self._answers()[1]

    def _send(self, frame: bytes) -> None:
        self._sent += frame
        self.session.written(len(frame))

    def ask(self, command: Command) -> Any:
        """The answer without the node, or the command that reached the node."""
        self._number += 1
        before = len(self._node.asked)
        self.session.received(pack(self._number, command))
        if len(self._node.asked) > before:
            return self._node.asked[-1][0]
        return self._answers().get(self._number)

    @property
    def asked(self) -> list[Command]:
        """All commands that reached the node, from all clients."""
        return [command for command, _ in self._node.asked]

    def answered(self, answer: Any) -> Any:
        """The node answers the last command. Return the answer that the client gets."""
        self._node.asked[-1][1](answer)
        return self._answers()[self._number]

    def _answers(self) -> dict[int, Any]:
        found = {frame.number: unpack(frame) for frame in self._reader.feed(bytes(self._sent))}
        self._sent.clear()
        return found
