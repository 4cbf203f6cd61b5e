"""After a subject has grown: the partitions that groups cannot consume yet, and what each of them waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inturn.cli.screen import Screen, plain
from inturn.client import Connection

LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Shut:
    group: str
    partition: int
    parent: int
    offset: int | None

    def fields(self) -> dict[str, object]:
        return {"group": self.group, "partition": self.partition, "waits_for": self.parent, "offset": self.offset}


def shut(connection: Connection, subject: str) -> list[Shut]:
    found = []
    for one in connection.groups():
        if one.subject == subject:
            for partition in connection.group(subject, one.group).describe().partitions:
                if partition.gate is not None:
                    gate = partition.gate
                    found.append(Shut(one.group, partition.partition, gate.parent, gate.offset))
    return found


def watch(screen: Screen, connection: Connection, subject: str) -> list[Shut]:
    """Wait until nothing is shut; Ctrl-C ends only the waiting."""
    waiting = shut(connection, subject)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen.err, transient=True, disable=screen.is_json) as progress:
        total = len(waiting)
        task = progress.add_task("partitions open to their groups", total=total)
        try:
            while waiting:
                time.sleep(LOOK_S)
                waiting = shut(connection, subject)
                progress.update(task, completed=total - len(waiting))
        except KeyboardInterrupt:
            pass
    return waiting


def show(screen: Screen, waiting: list[Shut]) -> None:
    if not waiting:
        screen.note("all groups consume all partitions")
        return
    screen.table(
        ["group", ">partition", ">waits for partition", ">offset"],
        (
            [plain(one.group), str(one.partition), str(one.parent), "–" if one.offset is None else f"{one.offset:,}"]
            for one in waiting
        ),
    )
    screen.note("a group consumes a new partition when it has finished what was stored before of the keys in it")
