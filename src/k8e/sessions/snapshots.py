"""Snapshots: copies of /workspace under a name, for sessions to begin with.

A snapshot belongs to its owner; others do not find it. Its archive is a blob, written before its
row and removed after it: so a row always has its blob, and a blob without a row is swept away when
a gateway starts.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from k8e import database, disk, errors
from k8e.database import DONE, Done
from k8e.link import FrameSink
from k8e.model import MIB, Principal, Session, check_snapshot_name, words_from_json
from k8e.sessions import archives, tasks
from k8e.sessions.exchange import Open
from k8e.sessions.operations import Operation

log = logging.getLogger(__name__)

MIGRATIONS = (
    """
    CREATE TABLE snapshots (
        owner      TEXT NOT NULL,
        name       TEXT NOT NULL,
        created_at REAL NOT NULL,
        file_count INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        digest     TEXT NOT NULL,
        session_id TEXT NOT NULL,
        layers     TEXT NOT NULL,
        blob       TEXT NOT NULL,
        PRIMARY KEY (owner, name)
    ) STRICT;
    """,
)
_COLUMNS = "owner, name, created_at, file_count, size_bytes, digest, session_id, layers, blob"

_BRIEF = _COLUMNS.replace("layers", "CASE blob WHEN '' THEN '[]' ELSE layers END")


@dataclass(frozen=True)
class Snapshot:
    """A saved copy of a session's /workspace, or only a name for content elsewhere."""

    owner: str
    name: str
    created_at: float
    file_count: int = 0
    size_bytes: int = 0
    """Of the archive."""
    digest: str = ""
    """Of the archive; empty if the content is not here."""
    session_id: str = ""
    layers: tuple[str, ...] = ()
    """What K8E's registry knows it by; for ours, the digest alone."""
    blob: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that a client may see."""
        return {
            "name": self.name,
            "created_at": self.created_at,
            "file_count": self.file_count,
            "size_bytes": self.size_bytes,
            "digest": self.digest,
            "session_id": self.session_id,
            "layers": list(self.layers),
        }


class SnapshotStore(Protocol):
    """The rows of snapshots of one gateway, or of several that share a database."""

    def close(self) -> None: ...

    def get(self, owner: str, name: str) -> Snapshot | None: ...

    def of_owner(self, owner: str) -> list[Snapshot]:
        """All snapshots of an owner, without the layers of content elsewhere: they may be many."""
        ...

    def owners(self) -> set[str]: ...

    def used(self, owner: str) -> int:
        """Bytes of all snapshots of an owner."""
        ...

    def count(self, owner: str) -> int: ...

    def with_blobs(self) -> list[Snapshot]:
        """Those whose archive is in the folder of this gateway."""
        ...

    def place(self, snapshot: Snapshot) -> str:
        """The gateway in whose folder the archive is; empty for this one."""
        ...

    def insert(self, snapshot: Snapshot, *, replace: bool) -> Awaitable[None]:
        """Store a snapshot: in place of one of the same name, or only if there is none (Conflict).

        One statement, so that every reader finds the old one or the new one.
        """
        ...

    def delete(self, owner: str, name: str) -> Awaitable[None]: ...


class SqliteSnapshotStore:
    """The rows of snapshots of one gateway, in a file."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=True)

    def close(self) -> None:
        self._db.close()

    def insert(self, snapshot: Snapshot, *, replace: bool) -> Done[None]:
        values = (
            snapshot.owner,
            snapshot.name,
            snapshot.created_at,
            snapshot.file_count,
            snapshot.size_bytes,
            snapshot.digest,
            snapshot.session_id,
            json.dumps(snapshot.layers),
            snapshot.blob,
        )
        verb = "REPLACE" if replace else "INSERT"
        try:
            self._db.execute(
                f"{verb} INTO snapshots ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)",
                values,
            )
        except sqlite3.IntegrityError:
            raise taken(snapshot.name) from None
        return DONE

    def delete(self, owner: str, name: str) -> Done[None]:
        self._db.execute("DELETE FROM snapshots WHERE owner=? AND name=?", (owner, name))
        return DONE

    def place(self, snapshot: Snapshot) -> str:
        return ""

    def get(self, owner: str, name: str) -> Snapshot | None:
        found = self._select("owner=? AND name=?", owner, name)
        return found[0] if found else None

    def of_owner(self, owner: str) -> list[Snapshot]:
        return self._select("owner=? ORDER BY created_at, name", owner, columns=_BRIEF)

    def owners(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT DISTINCT owner FROM snapshots")}

    def used(self, owner: str) -> int:
        query = "SELECT COALESCE(SUM(size_bytes), 0) FROM snapshots WHERE owner=?"
        return self._db.execute(query, (owner,)).fetchone()[0]

    def count(self, owner: str) -> int:
        query = "SELECT COUNT(*) FROM snapshots WHERE owner=?"
        return self._db.execute(query, (owner,)).fetchone()[0]

    def with_blobs(self) -> list[Snapshot]:
        return self._select("blob != ''")

    def _select(self, condition: str, *values: Any, columns: str = _COLUMNS) -> list[Snapshot]:
        if not database.is_text(*values):
            return []
        query = f"SELECT {columns} FROM snapshots WHERE {condition}"  # noqa: S608 - our constants
        return [
            Snapshot(*row[:7], layers=_layers(row[7]), blob=row[8])
            for row in self._db.execute(query, values)
        ]


def _layers(text: str) -> tuple[str, ...]:
    """The digests of content elsewhere; none if they cannot be read."""
    try:
        return words_from_json(json.loads(text))
    except errors.UNREADABLE:
        log.error("the layers of a snapshot cannot be read")
        return ()


def taken(name: str) -> errors.Conflict:
    return errors.Conflict(
        f"snapshot {name!r} exists already",
        hint="choose another name, or replace it: k8e sandbox snapshot save --replace",
    )


NEED = "a snapshot needs"
MAX_NAMES = 1000  # of one owner
MAX_LAYERS = 1000
MAX_DIGEST = 200  # characters


class Source(Protocol):
    """The functions of sessions that snapshots need."""

    def get(self, principal: Principal, session_id: str) -> Session: ...

    async def open(
        self,
        principal: Principal,
        session_id: str,
        call: dict[str, Any],
        on_frame: FrameSink,
        *,
        own: bool = False,
    ) -> Operation: ...


class Snapshots:
    """The snapshots of a gateway, in a folder that is made with the first of them."""

    def __init__(
        self,
        data_dir: Path,
        source: Source,
        *,
        max_bytes: int,
        min_free: int = 0,
        store: SnapshotStore | None = None,
    ) -> None:
        """``min_free`` bytes of the disk are left to others, however much an owner may have.

        Without a ``store``, rows are in a file that is made with the first snapshot.
        """
        self._min_free = min_free
        self._folder = data_dir / "snapshots"
        self._database = data_dir / "snapshots.db"
        self._source = source
        self._max_bytes = max_bytes
        self._opened = store
        self._shared = store is not None
        self._writing: Counter[str] = Counter()  # bytes of an owner that are being written
        # One save of a session at a time: each holds a thread and some MiB, and reads the same.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # Living.

    async def start(self) -> None:
        """Remove what an earlier gateway left unfinished."""
        if self._shared:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        if not self._folder.is_dir():
            return  # no snapshot was ever saved here
        known = {item.blob: item for item in self._store.with_blobs()}
        found = await asyncio.to_thread(archives.sweep, self._folder, set(known))
        for blob in set(known) - found:
            lost = known[blob]
            log.error("the archive of snapshot %s is gone, so it is forgotten", lost.name)
            await self._store.delete(lost.owner, lost.name)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _store(self) -> SnapshotStore:
        if self._opened is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._opened = SqliteSnapshotStore(self._database)
        return self._opened

    # Finding.

    def get(self, owner: str, name: str) -> Snapshot:
        found = self._store.get(owner, check_snapshot_name(name))
        if found is None:
            raise errors.SnapshotNotFound(
                f"snapshot {name!r} not found", hint="k8e sandbox snapshot list shows yours"
            )
        return found

    def listing(self, owner: str) -> list[Snapshot]:
        return self._store.of_owner(owner)

    def get_content(self, owner: str, name: str) -> Snapshot:
        """Get a snapshot whose archive is on this gateway's disk."""
        found = self.get(owner, name)
        if not found.blob:
            raise errors.InvalidRequest(
                f"snapshot {name!r} is only a name here: its content was never saved",
                hint=f"k8e sandbox snapshot save --replace ID {name} saves some under it",
            )
        place = self._store.place(found)
        if place:
            raise errors.Conflict(
                f"the archive of snapshot {name!r} is on gateway {place}",
                hint="restore it there; archives are not shared between gateways",
            )
        return found

    # Saving.

    async def save(
        self,
        principal: Principal,
        session_id: str,
        name: str,
        *,
        replace: bool,
        partly: bool = False,
    ) -> tuple[Snapshot, str]:
        """Save a session's workspace; return the snapshot, and a warning or an empty text.

        ``partly`` leaves out unreadable files of a broken workspace.
        """
        self._source.get(principal, session_id)
        turn = self._turns.setdefault(session_id, asyncio.Lock())
        async with turn:
            return await self._save(principal, session_id, name, replace=replace, partly=partly)

    async def _save(
        self, principal: Principal, session_id: str, name: str, *, replace: bool, partly: bool
    ) -> tuple[Snapshot, str]:
        owner = principal.name
        session = self._source.get(principal, session_id)
        before = self._store.get(owner, check_snapshot_name(name))
        if before is not None and not replace:
            raise taken(name)
        self._check_count(owner, before)
        quota = _Quota(session.spec.limits.disk, self._left(owner), self._writing, owner)
        refuse = partial(disk.refuse_if_full, self._folder, self._min_free, NEED)
        refuse()
        try:
            async with archives.Writer(self._folder) as writer:
                listing = archives.TarListing()

                async def take(data: bytes) -> None:
                    if quota.add(len(data)):
                        refuse()
                    await writer.write(data)
                    tasks.progress(writer.size)

                async def hear(data: bytes) -> None:
                    quota.hear(len(data))

                opening = partial(self._source.open, principal, session_id, own=True)
                warning = await archives.pack(opening, take, hear, listing, partly=partly)
                quota.check()
                await writer.commit()
                saved = Snapshot(
                    owner=owner,
                    name=name,
                    created_at=time.time(),
                    file_count=listing.files,
                    size_bytes=writer.size,
                    digest=writer.digest,
                    session_id=session_id,
                    layers=(writer.digest,),
                    blob=writer.name,
                )
                before = self._store.get(owner, name)
                await self._store.insert(saved, replace=replace)
                writer.kept = True
        except OSError as error:
            raise _disk(error) from None
        finally:
            quota.close()
        if before is not None and not self._store.place(before):
            await self._remove(before.blob)
        return saved, warning

    def _left(self, owner: str) -> Callable[[], int]:
        """How many bytes an owner may still save, besides saves of theirs that are under way."""
        return lambda: self._max_bytes - self._store.used(owner) - self._writing[owner]

    def _check_count(self, owner: str, before: Snapshot | None) -> None:
        if before is None and self._store.count(owner) >= MAX_NAMES:
            raise errors.LimitExceeded(
                f"you have {MAX_NAMES} snapshots, the most that one owner may have",
                hint="delete some: k8e sandbox snapshot delete NAME",
            )

    async def _remove(self, blob: str) -> None:
        if blob:
            await asyncio.to_thread((self._folder / blob).unlink, missing_ok=True)

    async def delete(self, owner: str, name: str) -> None:
        """Delete one; readers that have it open can go on reading."""
        found = self.get(owner, name)
        await self._store.delete(owner, name)
        if not self._store.place(found):  # otherwise its gateway removes it when it starts
            await self._remove(found.blob)

    async def evict(self, owner: str) -> None:
        """Delete all snapshots of an owner that no longer exists."""
        if self._folder.is_dir():
            for item in self.listing(owner):
                await self.delete(owner, item.name)

    def owners(self) -> set[str]:
        """The owners of snapshots."""
        return self._store.owners() if self._folder.is_dir() else set()

    # K8E's registry.

    async def put(self, owner: str, name: str, layers: Sequence[str]) -> Snapshot:
        """Store a name for content that is kept elsewhere."""
        before = self._store.get(owner, check_snapshot_name(name))
        if before is not None and before.blob:
            raise errors.Conflict(
                f"snapshot {name!r} holds content of its own",
                hint="choose another name, or delete it first",
            )
        if len(layers) > MAX_LAYERS:
            raise errors.LimitExceeded(f"more than {MAX_LAYERS} layers")
        if any(not 0 < len(item) <= MAX_DIGEST or not item.isprintable() for item in layers):
            raise errors.InvalidRequest(f"a layer is a digest of at most {MAX_DIGEST} characters")
        self._check_count(owner, before)
        named = Snapshot(owner=owner, name=name, created_at=time.time(), layers=tuple(layers))
        await self._store.insert(named, replace=True)
        return named

    # Restoring.

    async def unpack(self, owner: str, name: str, opening: Open) -> None:
        """Unpack a snapshot into the empty workspace of a new session."""
        found = self.get_content(owner, name)
        reader = archives.BlobReader(self._folder / found.blob)
        try:
            async with reader:

                async def feed(count: int) -> bytes:
                    tasks.progress(reader.done, found.size_bytes)
                    return await reader.read(count)

                await archives.unpack(opening, feed)
                while await reader.read(MIB):  # tar may leave the end of the archive unread
                    pass
        except FileNotFoundError:
            self.get(owner, name)  # it was deleted just now, or replaced
            raise errors.Conflict(
                f"snapshot {name!r} was replaced just now", hint="restore it again"
            ) from None
        if reader.digest != found.digest:
            raise errors.ToolFailed(
                f"the archive of snapshot {name!r} is damaged: it is not what was saved",
                hint="delete it, and save it again",
            )


class _Quota:
    """The limit of one archive: its session's disk, and what is left of its owner's quota."""

    def __init__(
        self, disk: int, left: Callable[[], int], writing: Counter[str], owner: str
    ) -> None:
        # Small files need headers and padding; long names need more.
        self._limit = disk + disk // 2 + 16 * MIB
        self._disk = disk
        self._left = left
        self._writing = writing
        self._owner = owner
        self._size = self._checked = self._heard = 0

    def add(self, count: int) -> bool:
        """Count bytes, or refuse them; return whether it is time to check the disk as well."""
        self._size += count
        self._writing[self._owner] += count
        if self._size > self._limit:
            raise errors.LimitExceeded(
                f"the archive is larger than {self._limit} bytes, which is more than a disk of "
                f"{self._disk} bytes can need"
            )
        if self._size < self._checked + MIB:
            return False
        self.check()
        return True

    def check(self) -> None:
        """Refuse an archive that is larger than what is left of the owner's quota."""
        self._checked = self._size
        if self._left() < 0:
            raise errors.LimitExceeded(
                "your snapshots would hold more than K8E_MAX_SNAPSHOT_BYTES allows",
                hint="delete some: k8e sandbox snapshot list, k8e sandbox snapshot delete NAME",
            )

    def hear(self, count: int) -> None:
        """Count names and error lines too: they are not stored, but must not be endless."""
        self._heard += count
        if self._heard > self._limit:
            raise errors.LimitExceeded("the sandbox lists more files than its disk can hold")

    def close(self) -> None:
        self._writing[self._owner] -= self._size


def _disk(error: OSError) -> errors.K8eError:
    """An error of the gateway's own files, without its paths: those are not for clients."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return errors.LimitExceeded(
            "the gateway's disk is full", hint="delete snapshots, or ask the gateway's operator"
        )
    log.error("a snapshot could not be written", exc_info=error)
    return errors.K8eError(f"the snapshot could not be written: {error.strerror}")
