"""`inturn produce`: send lines of files, of stdin, or given on the command line."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
import typer

from inturn.cli.options import DEFAULT_DATA, Data, Json, Server, Subject, examples
from inturn.cli.progress import Meter
from inturn.cli.screen import Screen, counted, plain
from inturn.cli.session import command, opened
from inturn.model.errors import InturnError, InvalidInput
from inturn.model.settings import Flush, LogSettings, Routing

if TYPE_CHECKING:
    from inturn.model.subject import Subject as SubjectValue
    from inturn.producer.producer import Producer
    from inturn.producer.send_batch import SendHandle

_SKIP_BYTES = 1024 * 1024


class BadLine(InvalidInput):
    """A line that cannot be sent. The `sent` messages of earlier lines are stored and stay."""

    def __init__(self, line: int, why: str, sent: int) -> None:
        self.line, self.why, self.sent = line, why, sent
        super().__init__(
            f"line {line}: {why}; the {sent} messages before are stored and stay; "
            f"correct the line and send from line {line} on, or use --skip-bad"
        )


@dataclass(frozen=True, slots=True)
class InputLine:
    number: int  # counted from 1
    data: bytes  # without the line end
    read_bytes: int
    is_cut: bool = False  # longer than allowed; the rest was skipped


@dataclass(frozen=True, slots=True)
class Keying:
    """The source of keys: a fixed key, a field of the JSON object, the start of the line, or no key."""

    key: bytes | None = None
    field: tuple[str, ...] = ()
    separator: bytes = b""
    is_json: bool = False

    def split(self, line: bytes) -> tuple[bytes | None, bytes]:
        """(key, body) of a line. Raises ValueError with the reason if the key is missing."""
        key, body = self.key, line
        if self.separator:
            start, found, body = line.partition(self.separator)
            if not found:
                raise ValueError(f"there is no separator {_text(self.separator)} in {_text(line)}")
            key = start
        if self.is_json or self.field:
            value = _json_object(body)
            if self.field:
                key = _key_at(value, self.field)
        if key == b"":
            raise ValueError(f"the key is empty in {_text(line)}")
        return key, body


def read_lines(stream: BinaryIO, bytes_max: int) -> Iterator[InputLine]:
    """Lines without line ends (\\n or \\r\\n). Holds at most `bytes_max` bytes of a line."""
    number = 0
    while data := stream.readline(bytes_max + 2):
        number += 1
        read_bytes, last = len(data), data
        while not last.endswith(b"\n") and (last := stream.readline(_SKIP_BYTES)):
            read_bytes += len(last)
        is_cut = read_bytes > len(data)
        if data.endswith(b"\n"):
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        yield InputLine(number, data, read_bytes, is_cut or len(data) > bytes_max)


def _json_object(body: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {_text(body)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {_kind(value)}, not an object: {_text(body)}")
    return value


def _key_at(value: object, path: tuple[str, ...]) -> bytes:
    for depth, name in enumerate(path):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"there is no field {'.'.join(path[: depth + 1])!r}")
        value = value[name]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"field {'.'.join(path)!r} is a {_kind(value)}; a key is a text or a whole number")
    return str(value).encode()


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list():
            return "list"
    return "object"


def _text(data: bytes) -> str:
    """The first 40 bytes, for an error text."""
    shown = data[:40].decode(errors="backslashreplace")
    return repr(shown) + ("…" if len(data) > 40 else "")


EXAMPLES = examples(
    "inturn produce orders orders.jsonl --key-field customer.id",
    "tail -f app.log | inturn produce logs --key web-1",
    "printf 'alice:1\\nbob:2\\n' | inturn produce orders --key-separator :",
    "inturn produce orders paid.jsonl --key-field customer.id --tag paid",
)
BAD_LINES_TOLD = 10
GRACE_S = 2.0  # to wait for acknowledgements after Ctrl-C


def produce(
    subject: Subject,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Where the lines are; stdin if left out or '-'.",
            show_default=False,
        ),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json-lines", help="Every line must be a JSON object.")] = False,
    key: Annotated[str | None, typer.Option(help="The key of all messages.", show_default=False)] = None,
    key_field: Annotated[
        str | None,
        typer.Option(help="The key is this field of the JSON object; a.b goes deeper.", show_default=False),
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(help="Separator in a line: the key before, the body behind.", show_default=False),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="A tag of all messages; may be given again.", show_default=False)
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            help="All to this partition; only for subjects with routing by selector.", min=0, show_default=False
        ),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(help="The name of the producer: fences an earlier producer of the name.", show_default=False),
    ] = None,
    flush: Annotated[
        Flush | None,
        typer.Option(help="The crash that an acknowledged message survives. Default: always. Not for servers."),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    data: Data = DEFAULT_DATA,
    server: Server = None,
    json_output: Json = False,
) -> None:
    """Send lines as messages, a message per line, in their order.

    The line end (\\n or \\r\\n) is not part of the body.
    With --json-lines or --key-field empty lines are skipped.
    A bad line ends the command with the number of the line. Messages of earlier lines stay.
    """
    if file is not None and str(file) != "-" and not os.access(file, os.R_OK):
        raise typer.BadParameter(f"file {str(file)!r} is not there or may not be read")
    keying = _keying(key, key_field, key_separator, json_lines)
    with command(json_output) as screen, _opened_lines(file) as source:
        with opened(data, log=None if flush is None else LogSettings(flush=flush)) as connection:
            found = connection.subject(subject)
            _check_routing(found, keying, partition)
            run = _Run(screen, found, keying, partition, skip_bad, tuple(tag or ()))
            run.send(connection.producer(producer), source)
        run.tell()


def _keying(key: str | None, key_field: str | None, key_separator: str | None, json_lines: bool) -> Keying:
    given = [
        name
        for name, value in (("--key", key), ("--key-field", key_field), ("--key-separator", key_separator))
        if value is not None
    ]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} cannot go together: give one of them")
    if "" in (key, key_field, key_separator):
        raise typer.BadParameter(f"{given[0]} must not be empty")
    return Keying(
        None if key is None else os.fsencode(key),
        () if key_field is None else tuple(key_field.split(".")),
        b"" if key_separator is None else os.fsencode(key_separator),
        json_lines or key_field is not None,
    )


@contextlib.contextmanager
def _opened_lines(file: Path | None) -> Iterator[BinaryIO]:
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
    else:
        with file.open("rb") as stream:
            yield stream


def _check_routing(subject: SubjectValue, keying: Keying, partition: int | None) -> None:
    has_key = keying != Keying(is_json=keying.is_json)
    if subject.routing is Routing.SLOTS and partition is not None:
        raise InvalidInput(f"subject {subject.name!r} routes by the slots of keys; leave --partition out")
    if subject.routing is Routing.SELECTOR and partition is None and has_key:
        raise InvalidInput(
            f"subject {subject.name!r} routes by a selector, which is a function of the program that sends; "
            "give --partition here"
        )
    if partition is not None and partition >= subject.partition_count:
        raise InvalidInput(f"subject {subject.name!r} has partitions 0 to {subject.partition_count - 1}")


def _size_of(source: BinaryIO) -> int | None:
    """The size of the input, if known."""
    try:
        found = os.fstat(source.fileno())
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@dataclass(frozen=True, slots=True)
class _Bad:
    line: int
    why: str


@dataclass(slots=True)
class _Run:
    """A run of the command: sends, counts, reports."""

    screen: Screen
    subject: SubjectValue
    keying: Keying
    partition: int | None
    skip_bad: bool
    tags: tuple[str, ...] = ()
    bad_count: int = 0
    elapsed_s: float = 0.0
    stored: Counter[int] = field(default_factory=Counter)  # partition → acknowledged messages
    sent: deque[SendHandle] = field(default_factory=deque)  # not acknowledged yet

    def send(self, producer: Producer, source: BinaryIO) -> None:
        try:
            with Meter(self.screen, "sending", _size_of(source)) as meter:
                bad = self._send_lines(producer, source, meter)
                producer.flush()
                self._count()
                self.elapsed_s = meter.elapsed_s
        except (InturnError, KeyboardInterrupt) as error:
            with contextlib.suppress(InturnError):  # not for ever: the disk may be full
                producer.close(GRACE_S)
            self._count_rest()
            sent = sum(self.stored.values())
            error.sent = sent  # type: ignore[union-attr]  # an extra field for --json
            self.screen.note(f"{counted(sent, 'message')} stored and stay")
            raise
        if bad is not None:
            raise BadLine(bad.line, bad.why, sum(self.stored.values()))

    def _send_lines(self, producer: Producer, source: BinaryIO, meter: Meter) -> _Bad | None:
        """The bad line that ended the run, if any."""
        limits = self.subject.limits
        longest = limits.body_bytes + limits.key_bytes + len(self.keying.separator)
        send, name, split, sent = producer.send, self.subject.name, self.keying.split, self.sent
        selector = self._selector()
        for line in read_lines(source, longest):
            if not line.data and self.keying.is_json:
                meter.advance(line.read_bytes)
                continue
            try:
                if line.is_cut:
                    raise ValueError(f"it has more than {longest} bytes, which is more than the subject accepts")
                key, body = split(line.data)
                sent.append(send(name, body, key=key, tags=self.tags, selector=selector))
            except (InvalidInput, ValueError) as error:
                if not self.skip_bad:
                    return _Bad(line.number, str(error))
                self._skip(line.number, str(error))
                meter.advance(line.read_bytes)
            else:
                meter.advance(line.read_bytes, 1)
                self._count()
        return None

    def _selector(self) -> Callable[..., int] | None:
        chosen = self.partition
        return None if chosen is None else lambda *_: chosen

    def _skip(self, line: int, why: str) -> None:
        self.bad_count += 1
        if self.bad_count <= BAD_LINES_TOLD:
            self.screen.note(f"[yellow]skipped line {line}: {plain(why)}[/yellow]")

    def _count(self) -> None:
        """Settle the acknowledged messages at the front. Raises the error of a failed message."""
        sent = self.sent
        while sent and sent[0].done:
            self.stored[sent.popleft().result().partition] += 1

    def _count_rest(self) -> None:
        """When no more will be acknowledged."""
        while self.sent:
            with contextlib.suppress(InturnError):  # failed: the error is raised elsewhere
                self._count()
            if self.sent and not self.sent[0].done:
                self.sent.popleft()

    def tell(self) -> None:
        sent = sum(self.stored.values())
        per_s = sent / max(self.elapsed_s, 1e-6)
        if self.screen.is_json:
            self.screen.json(
                {
                    "subject": self.subject.name,
                    "sent": sent,
                    "skipped": self.bad_count,
                    "elapsed_s": round(self.elapsed_s, 6),
                    "per_s": round(per_s, 1),
                    "partitions": [{"partition": index, "sent": count} for index, count in self.stored.items()],
                }
            )
            return
        touched = ", ".join(f"{index}: {count:,}" for index, count in self.stored.items())
        self.screen.out.print(
            f"[green]{counted(sent, 'message')}[/green] to [bold]{plain(self.subject.name)}[/bold] "
            f"in {self.elapsed_s:.2f} s ({per_s:,.0f}/s)  [dim]by partition[/dim] {touched or 'none'}",
            soft_wrap=True,
        )
        if self.bad_count:
            self.screen.note(f"[yellow]{counted(self.bad_count, 'bad line')} skipped[/yellow]")
