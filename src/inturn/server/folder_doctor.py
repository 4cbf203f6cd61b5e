"""The checks of `inturn doctor` for a folder: read-only, with findings and next steps.

A log is checked in two steps. First the recovery of an opening is rehearsed on a disk that only notes the changes. So
the same rules tell a torn tail, which opening cuts, from damage. Then all remaining messages are read and verified.

A different process may have the folder open meanwhile; changes by that process are not reported as trouble.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import StaticPool

from inturn.log.disk import Advance, RealDisk, RehearsalDisk, ignore
from inturn.log.recovery import recover, verify
from inturn.log.segment import Segment, parse_name
from inturn.model.batch import partition_seed
from inturn.model.errors import InturnError, InvalidInput, LogDamaged, SchemaMismatch
from inturn.model.settings import LogSettings
from inturn.model.subject import Subject
from inturn.server.folder import DATABASE_NAME, LOCK_NAME, LOG_NAME, holder_in
from inturn.store import schema
from inturn.store.cluster import own_broker_group
from inturn.store.database import Database
from inturn.store.groups import GroupRecord, Groups
from inturn.store.leases import LeaseRow, LeaseRows
from inturn.store.offsets import OffsetRows
from inturn.store.subjects import Subjects

LOW_FACTOR = 4  # warn below this multiple of the reserve
NOTHING_TO_DO = "nothing to do"


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `partition` is "subject/index" for a check of a partition."""

    check: str
    level: Level
    what: str
    next_step: str = ""
    partition: str | None = None
    offset: int | None = None


def disk_finding(free_bytes: int, reserve_bytes: int) -> Finding:
    what = f"{free_bytes:,} bytes are free, {reserve_bytes:,} are kept in reserve"
    if free_bytes < reserve_bytes:
        return Finding(
            "disk", Level.ERROR, f"{what}: appends are refused", "free some space; appends resume by themselves"
        )
    if free_bytes < LOW_FACTOR * reserve_bytes:
        return Finding("disk", Level.WARNING, what, "free some space before appends are refused")
    return Finding("disk", Level.OK, what)


REHEARSALS_MAX = 3  # of a log with concurrent appends


@dataclass(frozen=True, slots=True)
class _LogFolder:
    """The log of a partition: label, folder, and name. The name seeds the checksums."""

    label: str
    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Extent:
    """The first offset and the end of a log."""

    start: int
    end: int


@dataclass(slots=True)
class _State:
    """The contents of the database; empty where reading failed."""

    subjects: list[Subject]
    groups: list[GroupRecord]
    offsets: OffsetRows | None = None
    leases: LeaseRows | None = None
    broker_group: str = ""  # of the folder


def log_bytes(path: str | os.PathLike[str]) -> int:
    """The bytes that `examine` will read, for a progress bar."""
    return sum(one.size_bytes for one in _log_folders(Path(path), []))


def examine(
    path: str | os.PathLike[str], *, settings: LogSettings | None = None, advance: Advance | None = None
) -> list[Finding]:
    """Run all checks; the findings in the order of the checks. `advance` gets the number of bytes read.

    Raise InvalidInput if the path is no folder of inturn. Blocks while all logs are read.
    """
    folder = Path(path)
    if not (folder / DATABASE_NAME).is_file():
        raise InvalidInput(f"no folder of inturn at {str(folder)!r}; give the folder that connect() was called with")
    settings = settings if settings is not None else LogSettings()
    is_open, findings = _check_lock(folder)
    with _opened_state(folder, is_open, findings) as state:
        extents = _check_logs(folder, state, is_open, settings, advance or ignore, findings)
        findings += _check_offsets(state, extents)
        findings += _check_leases(state, is_open)
        findings += _check_orphans(folder, state)
    findings.append(_check_disk(folder, settings))
    if not is_open and _holder(folder)[0]:
        what = "a process opened the folder during the check"
        findings.append(Finding("lock", Level.WARNING, what, "run the doctor again if a finding is unexpected"))
    return findings


# The lock


def _check_lock(folder: Path) -> tuple[bool, list[Finding]]:
    is_open, pid = _holder(folder)
    if not is_open:
        return False, [Finding("lock", Level.OK, "no process has the folder open")]
    who = "a process" if pid is None else f"process {pid}"
    what = f"{who} has the folder open; changes during the check are not reported"
    return True, [Finding("lock", Level.OK, what)]


def _holder(folder: Path) -> tuple[bool, int | None]:
    """Whether a process holds the lock, and which. Takes a shared lock for a moment, without writing."""
    try:
        lock_file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False, None
    try:
        fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, holder_in(lock_file).pid
    finally:
        os.close(lock_file)
    return False, None


# The database


@contextlib.contextmanager
def _opened_state(folder: Path, is_open: bool, findings: list[Finding]) -> Iterator[_State]:
    with contextlib.ExitStack() as stack:
        state = _State([], [])
        try:
            connection = stack.enter_context(_read_only(folder / DATABASE_NAME, is_open))
            findings.append(_check_integrity(connection))
            found = _check_schema(connection)
            findings.append(found)
            if found.level is Level.OK:
                state = _load(stack.enter_context(_as_database(connection)))
        except (sqlite3.Error, DatabaseError, InturnError, OSError) as error:
            what = f"{DATABASE_NAME} cannot be read: {error}"
            findings.append(Finding("state", Level.ERROR, what, f"restore {DATABASE_NAME} from a backup"))
        yield state


@contextlib.contextmanager
def _read_only(path: Path, is_open: bool) -> Iterator[sqlite3.Connection]:
    """A connection that creates no files beside the database.

    Without a write-ahead log, the database is read as a plain file. The write-ahead log of a dead process has to be
    read, too, and SQLite would create files for that: so a copy is read. While the folder is open, the files exist.
    """
    with contextlib.ExitStack() as stack:
        wal = path.with_name(path.name + "-wal")
        mode = "mode=ro"
        if not is_open:
            mode = "immutable=1"
            if wal.exists() and wal.stat().st_size:
                copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-doctor-")))
                for file in (path, wal):
                    shutil.copyfile(file, copy / file.name)
                path, mode = copy / path.name, "mode=rw"
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, check_same_thread=False)
        stack.callback(connection.close)
        yield connection


@contextlib.contextmanager
def _as_database(connection: sqlite3.Connection) -> Iterator[Database]:
    """The database for the classes of the store, which only read here."""
    engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    database = Database(engine, engine.connect())
    try:
        yield database
    finally:
        database.close()


def _check_integrity(connection: sqlite3.Connection) -> Finding:
    said = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(10)")]
    dangling = connection.execute("PRAGMA foreign_key_check").fetchall()
    if said == ["ok"] and not dangling:
        return Finding("state", Level.OK, f"{DATABASE_NAME} is intact")
    trouble = [one for one in said if one != "ok"] + [
        f"table {row[0]} has a row that refers to a missing row" for row in dangling
    ]
    what = f"{DATABASE_NAME} is damaged: {'; '.join(trouble[:3])}"
    return Finding("state", Level.ERROR, what, f"restore {DATABASE_NAME} from a backup")


def _check_schema(connection: sqlite3.Connection) -> Finding:
    try:
        rows = connection.execute("SELECT version FROM schema_version").fetchall()
    except sqlite3.OperationalError:
        rows = []
    found = rows[0][0] if len(rows) == 1 and isinstance(rows[0][0], int) else 0
    if found == schema.SCHEMA_VERSION:
        return Finding("schema", Level.OK, f"schema version {found}")
    if 1 <= found < schema.SCHEMA_VERSION:
        what = f"schema version {found}; the next open migrates to version {schema.SCHEMA_VERSION}"
        return Finding("schema", Level.WARNING, what, "open the folder once, then run the doctor again")
    return Finding(
        "schema",
        Level.ERROR,
        str(SchemaMismatch(found, schema.SCHEMA_VERSION)),
        "run the doctor of that version of inturn",
    )


def _load(database: Database) -> _State:
    own = own_broker_group(database)
    return _State(Subjects(database).all(), Groups(database).all(), OffsetRows(database), LeaseRows(database), own)


# The logs


def _log_folders(folder: Path, subjects: Sequence[Subject]) -> list[_LogFolder]:
    """The logs of all subjects with a folder; without known subjects, all folders."""
    root = folder / LOG_NAME
    if subjects:
        labels = {
            partition.name: f"{subject.name}/{index}"
            for subject in subjects
            for index, partition in enumerate(subject.route.partitions)
        }
    else:
        names = sorted(os.listdir(root), key=lambda name: (len(name), name)) if root.is_dir() else []
        labels = {name: name for name in names}
    return [
        _LogFolder(label, name, root / name, _segment_bytes(root / name))
        for name, label in labels.items()
        if (root / name).is_dir()
    ]


def _segment_bytes(path: Path) -> int:
    total = 0
    for name in os.listdir(path):
        if parse_name(name) is not None:
            with contextlib.suppress(FileNotFoundError):  # removed by retention just now
                total += (path / name).stat().st_size
    return total


def _check_logs(
    folder: Path, state: _State, is_open: bool, settings: LogSettings, advance: Advance, findings: list[Finding]
) -> dict[str, _Extent]:
    """The extents of undamaged logs, by label."""
    extents: dict[str, _Extent] = {}
    logs = _log_folders(folder, state.subjects)
    sound_count, sound_bytes = 0, 0
    for log in logs:
        try:
            extent, found = _check_log(log, is_open, settings, advance)
        except OSError as error:
            extent, found = None, [_unreadable(log, error)]
        findings += found
        if extent is not None:
            extents[log.label] = extent
            sound_count += 1
            sound_bytes += log.size_bytes
    what = f"{sound_count} of {len(logs)} partitions are intact: {sound_bytes:,} bytes read, all checksums match"
    findings.append(Finding("log", Level.OK, what))
    findings += _check_missing(folder, state, extents)
    return extents


def _check_log(
    log: _LogFolder, is_open: bool, settings: LogSettings, advance: Advance
) -> tuple[_Extent | None, list[Finding]]:
    """The extent of an undamaged log, and the findings."""
    for _ in range(REHEARSALS_MAX if is_open else 1):
        disk = RehearsalDisk()
        seed = partition_seed(log.name)
        recovered = recover(disk, str(log.path), log.label, seed, settings.index_every_bytes)
        if recovered.damage is None:
            break
    disk.advance = advance
    segments = recovered.segments
    if recovered.damage is not None:
        segments = _all_segments(disk, log, seed, settings)
    places = list(verify(log.label, segments, [segment.size for segment in segments]))
    if recovered.damage is not None and recovered.damage.offset not in {place.offset for place in places}:
        places.append(recovered.damage)
    if places:
        return None, [_damaged(log, place) for place in places]
    findings = []
    if disk.cut_bytes and not is_open:
        findings.append(_torn(log, recovered.end_offset, disk.cut_bytes))
    start = segments[0].base if segments else 0
    return _Extent(start, recovered.end_offset), findings


def _all_segments(disk: RehearsalDisk, log: _LogFolder, seed: int, settings: LogSettings) -> list[Segment]:
    """All segments with all contents, also behind the damage."""
    segments = []
    for name in sorted(os.listdir(log.path)):
        parsed = parse_name(name)
        if parsed is not None:
            size = (log.path / name).stat().st_size
            segments.append(Segment(disk, str(log.path), *parsed, size, seed, settings.index_every_bytes))
    return segments


def _damaged(log: _LogFolder, place: LogDamaged) -> Finding:
    what = f"partition {log.label} is damaged at offset {place.offset}: {place.detail}"
    next_step = (
        f"readers stop at this offset, other partitions work; close the folder and restore {log.path} from a backup"
    )
    return Finding("log", Level.ERROR, what, next_step, log.label, place.offset)


def _torn(log: _LogFolder, end_offset: int, cut_bytes: int) -> Finding:
    what = f"partition {log.label} has a torn tail of {cut_bytes:,} bytes after offset {end_offset - 1}"
    if end_offset == 0:
        what = f"partition {log.label} has a torn tail of {cut_bytes:,} bytes, and no message before"
    next_step = (
        f"{NOTHING_TO_DO}: the tail will be cut at the next open; no message in the tail was known to be on disk "
        "(a crash during a write)"
    )
    return Finding("log", Level.WARNING, what, next_step, log.label, end_offset)


def _unreadable(log: _LogFolder, error: OSError) -> Finding:
    what = f"partition {log.label} cannot be read: {error}"
    return Finding("log", Level.ERROR, what, "check permissions and the disk, then run the doctor again", log.label)


def _check_missing(folder: Path, state: _State, extents: dict[str, _Extent]) -> Iterator[Finding]:
    for subject in state.subjects:
        for index, partition in enumerate(subject.route.partitions):
            path = folder / LOG_NAME / partition.name
            if path.is_dir() or partition.broker_group != state.broker_group:  # or at a different broker
                continue
            label = f"{subject.name}/{index}"
            if path.exists():
                what = f"the log of partition {label} is not a folder ({path}), so the folder cannot be opened"
                yield Finding("log", Level.ERROR, what, f"restore {path} from a backup", label, 0)
                continue
            floor = state.offsets.highest(partition.name, partition.broker_group) if state.offsets else 0
            if floor == 0:
                what = f"partition {label} has no folder yet"
                yield Finding(
                    "log", Level.WARNING, what, f"{NOTHING_TO_DO}: the next open creates the folder", label, 0
                )
            else:
                what = f"the log of partition {label} is gone ({path}); groups had read the log up to offset {floor}"
                yield Finding("log", Level.ERROR, what, f"restore {path} from a backup", label, 0)


# Groups


def _check_offsets(state: _State, extents: dict[str, _Extent]) -> list[Finding]:
    if state.offsets is None:
        return []
    findings, count = [], 0
    for group in state.groups:
        for index, committed in state.offsets.committed(group.id).items():
            count += 1
            label = f"{group.subject}/{index}"
            extent = extents.get(label)
            if extent is not None and not extent.start <= committed <= extent.end:
                findings.append(_offset_outside(group, label, committed, extent))
    if not findings:
        findings.append(Finding("offsets", Level.OK, f"{count} committed offsets are within the logs"))
    return findings


def _offset_outside(group: GroupRecord, label: str, committed: int, extent: _Extent) -> Finding:
    what = (
        f"group {group.name} is at offset {committed} of partition {label}; the log has {extent.start} to {extent.end}"
    )
    if committed < extent.start:
        next_step = (
            f"retention removed {extent.start - committed} unread messages; the group continues at {extent.start}; "
            "raise the retention or add consumers"
        )
    else:
        next_step = (
            f"messages that the group has read are gone (a power loss with flush interval or os?); new messages get "
            f"offset {committed} or above, so no offset is used twice"
        )
    return Finding("offsets", Level.WARNING, what, next_step, label, committed)


def _check_leases(state: _State, is_open: bool) -> list[Finding]:
    if state.leases is None:
        return []
    held: dict[tuple[int, str, bool], list[LeaseRow]] = {}
    for row in state.leases.all():
        if row.owner is not None:
            held.setdefault((row.group_id, row.owner, row.local), []).append(row)
    if not held:
        return [Finding("leases", Level.OK, "no lease is held")]
    groups = {group.id: group for group in state.groups}
    return [
        _held(groups[group_id], owner, is_local, rows, is_open) for (group_id, owner, is_local), rows in held.items()
    ]


def _held(group: GroupRecord, owner: str, is_local: bool, rows: list[LeaseRow], is_open: bool) -> Finding:
    listed = ", ".join(f"{group.subject}/{row.partition} (epoch {row.epoch})" for row in rows)
    what = f"{owner} of group {group.name} holds {listed}"
    if is_open:
        return Finding("leases", Level.OK, what)
    if is_local:
        next_step = f"{NOTHING_TO_DO}: the process is dead, and the next open releases the leases"
    else:
        next_step = f"{NOTHING_TO_DO}: the leases expire if the owner does not come back"
    return Finding("leases", Level.WARNING, what, next_step)


# Folders and disk


def _check_orphans(folder: Path, state: _State) -> list[Finding]:
    root = folder / LOG_NAME
    if state.offsets is None or not root.is_dir():
        return []
    known = {partition.name for subject in state.subjects for partition in subject.route.partitions}
    strangers = sorted(set(os.listdir(root)) - known)
    if not strangers:
        return [Finding("folders", Level.OK, f"{LOG_NAME}/ contains only logs of subjects")]
    next_step = "move the folder away if unneeded; inturn never changes the folder"
    return [Finding("folders", Level.WARNING, f"{root / name} belongs to no subject", next_step) for name in strangers]


def _check_disk(folder: Path, settings: LogSettings) -> Finding:
    return disk_finding(RealDisk().free_bytes(str(folder)), settings.reserve_bytes)
