"""The templates of a gateway: from files, by API, and the one that is built in.

Files win: they are the operator's, so a name that a file has can neither be applied nor deleted by
API, and a broken file makes its name unusable instead of letting something weaker stand in for it.
There is no polling: files are examined when templates are used, once for each session that is made.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k8e import database, errors, templates
from k8e.egress.policy import parse_policy
from k8e.images import manifest
from k8e.model import DEFAULT_TEMPLATE, SessionSpec
from k8e.runtimes.registry import Runtimes
from k8e.sessions.demand import check_total
from k8e.templates import BUILT_IN, Template


class Stamp(NamedTuple):
    """A value that changes when a file is changed or replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def scan_templates(folder: Path) -> dict[str, Stamp]:
    """The templates' files in a folder, by name; nothing where there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    found: dict[str, Stamp] = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(templates.ENDINGS) and not entry.name.startswith("."):
                found[entry.name] = _stamp(entry)
    return found


def _stamp(entry: os.DirEntry[str]) -> Stamp:
    try:
        info = entry.stat()
    except OSError:  # a link to nowhere: reading it will say so
        return Stamp(0, 0, 0, 0, 0)
    return Stamp(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def read_template(path: Path) -> Template:
    """The template in a file; InvalidRequest says what is wrong with it."""
    try:
        data = _content(path)
    except OSError as error:
        what = error.strerror or str(error)
        raise errors.InvalidRequest(f"{path.name}: it cannot be read: {what}") from None
    return templates.parse(templates.load(data, path.name), path.stem, path.name)


def _content(path: Path) -> bytes:
    # A pipe that is named like a template must not make us wait for it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise errors.InvalidRequest(f"{path.name}: it is not a file")
        # A template can name any path of this machine, so no other user may write it.
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise errors.InvalidRequest(
                f"{path.name}: others can write to it, so it is not used",
                hint=f"chown it to the gateway's user, and chmod go-w {path.name}",
            )
        return b"".join(_chunks(fd))
    finally:
        os.close(fd)


def _chunks(fd: int) -> Iterator[bytes]:
    left = templates.MAX_FILE + 1
    while left > 0 and (data := os.read(fd, left)):
        left -= len(data)
        yield data


MIGRATIONS = (
    """
    CREATE TABLE templates (
        name       TEXT PRIMARY KEY,
        recipe     TEXT NOT NULL,
        applied_by TEXT NOT NULL,
        applied_at REAL NOT NULL
    ) STRICT;
    """,
)


class TemplateStore:
    """The recipes of one gateway, as they were applied."""

    def __init__(self, path: Path) -> None:
        self._db = database.connect(path, MIGRATIONS, durable=True)

    def close(self) -> None:
        self._db.close()

    def put(self, name: str, recipe: dict[str, Any], by: str) -> None:
        """Store a recipe in place of the one before. One statement: the last writer wins."""
        self._db.execute(
            "REPLACE INTO templates (name, recipe, applied_by, applied_at) VALUES (?,?,?,?)",
            (name, json.dumps(recipe), by, time.time()),
        )

    def delete(self, name: str) -> None:
        self._db.execute("DELETE FROM templates WHERE name=?", (name,))

    def all(self) -> dict[str, Any]:
        rows = self._db.execute("SELECT name, recipe FROM templates ORDER BY name")
        return {name: _recipe(recipe) for name, recipe in rows}


def _recipe(text: str) -> Any:
    """The stored recipe; None where it cannot be read."""
    try:
        return json.loads(text)
    except errors.UNREADABLE:
        return None


log = logging.getLogger(__name__)

FILE, API, OWN = "file", "api", "built-in"
MAX_APPLIED = 1000
"""How many templates may come by API."""


@dataclass(frozen=True)
class TemplateEntry:
    """A template and its origin, or why it cannot be used."""

    name: str
    source: str
    """``file``, ``api`` or ``built-in``."""
    template: Template | None = None
    error: str = ""
    file: str = ""
    """The name of its file."""


def checker(
    runtimes: Runtimes, longest: float, default_registry: str = ""
) -> Callable[[Template], None]:
    """A check that refuses a template from which no session could be made, as far as is known."""

    def check(template: Template) -> None:
        runtimes.resolve(template.runtime)
        parse_policy(template.allowed_hosts or ())
        if template.rootfs.kind == "image":
            manifest.parse_reference(template.rootfs.source, default_registry)
        if template.lifetime > longest:
            raise errors.LimitExceeded(
                f"its lifetime of {template.lifetime:g} s is above the limit of {longest:g} s "
                "(K8E_MAX_LIFETIME)"
            )

    return check


class Templates:
    """All templates of this gateway, by name. Used on one event loop."""

    def __init__(
        self,
        folder: Path,
        database: Path,
        check: Callable[[Template], None],
        *,
        pool_total: int = 0,
    ) -> None:
        """Templates may ask for ``pool_total`` ready sandboxes in all; 0 means no check."""
        self.folder = folder
        self.on_change: list[Callable[[str], None]] = []
        """Called with the name of each template that came, went or became another."""
        self._database = database
        self._check = check
        self._pool_total = pool_total
        self._opened: TemplateStore | None = None
        self._turn = asyncio.Lock()  # one reader of the folder at a time
        self._stamps: dict[str, Stamp] = {}
        self._files: dict[str, TemplateEntry] = {}  # by file name
        self._applied: dict[str, TemplateEntry] = {}
        self._entries = {DEFAULT_TEMPLATE: TemplateEntry(DEFAULT_TEMPLATE, OWN, BUILT_IN)}

    # Living.

    async def start(self) -> None:
        """Read everything; broken templates are logged and stop nothing."""
        if self._database.exists():
            for name, recipe in self._store.all().items():
                self._applied[name] = self._entry(name, API, lambda n=name, r=recipe: _parse(r, n))
        try:
            scan_templates(self.folder)
        except OSError as error:
            raise errors.InvalidRequest(
                f"the templates in {self.folder} cannot be read: {error.strerror}",
                hint="fix that, or set K8E_TEMPLATES to another folder",
            ) from None
        await self.refresh()
        self._settle()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _store(self) -> TemplateStore:
        if self._opened is None:
            self._opened = TemplateStore(self._database)
        return self._opened

    # Finding.

    def get(self, name: str = "") -> Template:
        """A template as of the last look at the files; ``default`` for no name."""
        entry = self._entries.get(name or DEFAULT_TEMPLATE)
        if entry is None:
            raise _unknown(name)
        if entry.template is None:
            raise errors.InvalidRequest(
                f"template {name or DEFAULT_TEMPLATE!r} cannot be used: {entry.error}",
                hint="the gateway's operator has to fix it; k8e template list shows the others",
            )
        return entry.template

    async def find(self, name: str = "") -> Template:
        """A template as it is now."""
        await self.refresh()
        return self.get(name)

    async def specify(self, asked: dict[str, Any]) -> SessionSpec:
        """The specification of a session: the client's request, and its template for the rest."""
        name = asked.get("template") or ""
        if not isinstance(name, str):
            raise errors.InvalidRequest("template must be the name of one")
        return templates.specify(await self.find(name), asked)

    def listing(self) -> list[TemplateEntry]:
        return [self._entries[name] for name in sorted(self._entries)]

    def entry(self, name: str) -> TemplateEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise _unknown(name)
        return entry

    # Changing.

    async def apply(self, recipe: Any, by: str) -> TemplateEntry:
        """Store a recipe under its name, in place of the one before."""
        template = templates.parse(recipe, "", "the template")
        self._check(template)
        # Sessions are made from an existing one all the same, and ready sandboxes are shared.
        if self._pool_total:
            check_total(template.pool_min or 0, self._pool_total)
        await self.refresh()
        self._refuse_if_file(template.name)
        if template.name not in self._applied and len(self._applied) >= MAX_APPLIED:
            raise errors.LimitExceeded(
                f"there are {MAX_APPLIED} templates already, which is the limit"
            )
        self._store.put(template.name, template.to_json(), by)
        log.info("template %s was applied by %s", template.name, by)
        self._applied[template.name] = TemplateEntry(template.name, API, template)
        self._settle()
        return self._applied[template.name]

    async def delete(self, name: str, by: str) -> None:
        await self.refresh()
        self._refuse_if_file(name)
        if name not in self._applied:
            if name == DEFAULT_TEMPLATE:
                raise errors.InvalidRequest(
                    f"template {name!r} is built in", hint="apply another one under this name"
                )
            raise _unknown(name)
        self._store.delete(name)
        log.info("template %s was deleted by %s", name, by)
        del self._applied[name]
        self._settle()

    def _refuse_if_file(self, name: str) -> None:
        known = self._entries.get(name)
        if known is not None and known.source == FILE:
            raise errors.Conflict(
                f"template {name!r} is kept in the file {known.file}",
                hint=f"change that file, in {self.folder}",
            )

    # Files.

    async def refresh(self) -> None:
        """Read the files that have changed since they were read."""
        if self._scan() == self._stamps:
            return
        async with self._turn:
            stamps = self._scan()  # another task may have been quicker
            changed = [name for name, stamp in stamps.items() if self._stamps.get(name) != stamp]
            read = await asyncio.to_thread(_read_all, self.folder, changed)
            kept = {name: entry for name, entry in self._files.items() if name in stamps}
            fresh = {name: self._entry_of_file(name, found) for name, found in read.items()}
            self._files = {**kept, **fresh}
            self._stamps = stamps
            self._settle()

    def _scan(self) -> dict[str, Stamp]:
        try:
            return scan_templates(self.folder)
        except OSError as error:
            # The version that was read before stays in force; a weaker template must not take its
            # place.
            log.error("the templates in %s cannot be read: %s", self.folder, error)
            return self._stamps

    def _entry_of_file(self, file: str, found: Template | errors.K8eError) -> TemplateEntry:
        def read() -> Template:
            if isinstance(found, errors.K8eError):
                raise found
            return found

        return self._entry(Path(file).stem, FILE, read, file)

    def _entry(
        self, name: str, source: str, read: Callable[[], Template], file: str = ""
    ) -> TemplateEntry:
        try:
            template = read()
            try:
                self._check(template)
            except errors.K8eError as error:
                where = f"{file}: " if file else ""
                raise type(error)(f"{where}{error.message}", hint=error.hint) from None
        except errors.K8eError as error:
            log.warning("template %s cannot be used: %s", name, error)
            told = f"{error.message} ({error.hint})" if error.hint else error.message
            return TemplateEntry(name, source, None, told, file)
        return TemplateEntry(name, source, template, file=file)

    def _settle(self) -> None:
        """Find the template that wins for each name, and tell observers about changes."""
        entries = {
            DEFAULT_TEMPLATE: TemplateEntry(DEFAULT_TEMPLATE, OWN, BUILT_IN),
            **self._applied,
        }
        of_files: dict[str, TemplateEntry] = {}
        for file in sorted(self._files):
            entry = self._files[file]
            other = of_files.get(entry.name)
            of_files[entry.name] = entry if other is None else _doubled(other, entry)
        before, self._entries = self._entries, {**entries, **of_files}
        for name in sorted({*before, *self._entries}):
            if _template_recipe(before.get(name)) != _template_recipe(self._entries.get(name)):
                for tell in self.on_change:
                    tell(name)


def _template_recipe(entry: TemplateEntry | None) -> Template | None:
    return entry.template if entry is not None else None


def _doubled(one: TemplateEntry, other: TemplateEntry) -> TemplateEntry:
    error = f"{one.file} and {other.file} have the same name (remove one of them)"
    return TemplateEntry(one.name, FILE, None, error, one.file)


def _parse(recipe: Any, name: str) -> Template:
    return templates.parse(recipe, name)


def _read_all(folder: Path, names: list[str]) -> dict[str, Template | errors.K8eError]:
    found: dict[str, Template | errors.K8eError] = {}
    for name in names:
        try:
            found[name] = read_template(folder / name)
        except errors.K8eError as error:
            found[name] = error
        except Exception as error:
            # An error in one file must not keep the others from being used.
            log.exception("the template %s cannot be read", name)
            found[name] = errors.InvalidRequest(f"{name}: it cannot be read: {error!r}"[:500])
    return found


def _unknown(name: str) -> errors.TemplateNotFound:
    return errors.TemplateNotFound(
        f"template {name[:80]!r} not found", hint="k8e template list shows the templates"
    )
