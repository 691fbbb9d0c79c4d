"""The templates of a gateway: from files, by API, and the one that is built in.

Files win: they are what the operator keeps, so a name that a file has can neither be applied nor
deleted by API, and a broken file makes its name unusable instead of letting something weaker
stand in for it. Nobody polls: files are looked at when templates are used, once for each session
that is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import errors, templates
from k8e.egress.policy import parse_policy
from k8e.images import references
from k8e.model import DEFAULT_TEMPLATE, SessionSpec
from k8e.runtimes.registry import Runtimes
from k8e.sessions import template_files
from k8e.sessions.sizing import check_total
from k8e.sessions.template_files import Stamp
from k8e.sessions.template_store import TemplateStore
from k8e.templates import BUILT_IN, Template

log = logging.getLogger(__name__)

FILE, API, OWN = "file", "api", "built-in"
MAX_APPLIED = 1000
"""How many templates may come by API."""


@dataclass(frozen=True)
class Entry:
    """A template and where it is from, or why it cannot be used."""

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
    """What refuses a template from which no session could be made, as far as that is known."""

    def check(template: Template) -> None:
        runtimes.resolve(template.runtime)
        parse_policy(template.allowed_hosts or ())
        if template.rootfs.kind == "image":
            references.parse(template.rootfs.source, default_registry)
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
        """Who applies one may ask for ``pool_total`` ready sandboxes; 0 does not look at that."""
        self.folder = folder
        self.on_change: list[Callable[[str], None]] = []
        """Called with the name of each template that came, went or became another."""
        self._database = database
        self._check = check
        self._pool_total = pool_total
        self._opened: TemplateStore | None = None
        self._turn = asyncio.Lock()  # one reader of the folder at a time
        self._stamps: dict[str, Stamp] = {}
        self._files: dict[str, Entry] = {}  # by file name
        self._applied: dict[str, Entry] = {}
        self._entries = {DEFAULT_TEMPLATE: Entry(DEFAULT_TEMPLATE, OWN, BUILT_IN)}

    # Living.

    async def start(self) -> None:
        """Read everything; what is broken is told and stops nothing."""
        if self._database.exists():
            for name, recipe in self._store.all().items():
                self._applied[name] = self._entry(name, API, lambda n=name, r=recipe: _parse(r, n))
        try:
            template_files.scan(self.folder)
        except OSError as error:
            raise errors.InvalidRequest(
                f"the templates in {self.folder} cannot be read: {error.strerror}",
                hint="mend that, or set K8E_TEMPLATES to another folder",
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
        """A template as it was when the files were last looked at; ``default`` for no name."""
        entry = self._entries.get(name or DEFAULT_TEMPLATE)
        if entry is None:
            raise _unknown(name)
        if entry.template is None:
            raise errors.InvalidRequest(
                f"template {name or DEFAULT_TEMPLATE!r} cannot be used: {entry.error}",
                hint="whoever runs the gateway has to mend it; k8e template list shows the others",
            )
        return entry.template

    async def find(self, name: str = "") -> Template:
        """A template as it is now."""
        await self.refresh()
        return self.get(name)

    async def specify(self, asked: dict[str, Any]) -> SessionSpec:
        """What a session is made of: what a client asks for, and its template for the rest."""
        name = asked.get("template") or ""
        if not isinstance(name, str):
            raise errors.InvalidRequest("template must be the name of one")
        return templates.specify(await self.find(name), asked)

    def listing(self) -> list[Entry]:
        return [self._entries[name] for name in sorted(self._entries)]

    def entry(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise _unknown(name)
        return entry

    # Changing.

    async def apply(self, recipe: Any, by: str) -> Entry:
        """Keep a recipe under its name, in the place of the one before."""
        template = templates.parse(recipe, "", "the template")
        self._check(template)
        # Of one that is there already, sessions are made all the same, and what is ready is shared.
        if self._pool_total:
            check_total(template.pool_min or 0, self._pool_total)
        await self.refresh()
        self._refuse_if_file(template.name)
        if template.name not in self._applied and len(self._applied) >= MAX_APPLIED:
            raise errors.LimitExceeded(f"there are {MAX_APPLIED} templates, the most there may be")
        self._store.put(template.name, template.to_json(), by)
        log.info("template %s was applied by %s", template.name, by)
        self._applied[template.name] = Entry(template.name, API, template)
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
            stamps = self._scan()  # somebody else may have been quicker
            changed = [name for name, stamp in stamps.items() if self._stamps.get(name) != stamp]
            read = await asyncio.to_thread(_read_all, self.folder, changed)
            kept = {name: entry for name, entry in self._files.items() if name in stamps}
            fresh = {name: self._entry_of_file(name, found) for name, found in read.items()}
            self._files = {**kept, **fresh}
            self._stamps = stamps
            self._settle()

    def _scan(self) -> dict[str, Stamp]:
        try:
            return template_files.scan(self.folder)
        except OSError as error:
            # What was read before goes on; a weaker template than meant must not take its place.
            log.error("the templates in %s cannot be read: %s", self.folder, error)
            return self._stamps

    def _entry_of_file(self, file: str, found: Template | errors.K8eError) -> Entry:
        def read() -> Template:
            if isinstance(found, errors.K8eError):
                raise found
            return found

        return self._entry(Path(file).stem, FILE, read, file)

    def _entry(self, name: str, source: str, read: Callable[[], Template], file: str = "") -> Entry:
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
            return Entry(name, source, None, told, file)
        return Entry(name, source, template, file=file)

    def _settle(self) -> None:
        """Find out who wins for each name, and tell whoever wants to know of what is new."""
        entries = {DEFAULT_TEMPLATE: Entry(DEFAULT_TEMPLATE, OWN, BUILT_IN), **self._applied}
        of_files: dict[str, Entry] = {}
        for file in sorted(self._files):
            entry = self._files[file]
            other = of_files.get(entry.name)
            of_files[entry.name] = entry if other is None else _doubled(other, entry)
        before, self._entries = self._entries, {**entries, **of_files}
        for name in sorted({*before, *self._entries}):
            if _recipe(before.get(name)) != _recipe(self._entries.get(name)):
                for tell in self.on_change:
                    tell(name)


def _recipe(entry: Entry | None) -> Template | None:
    return entry.template if entry is not None else None


def _doubled(one: Entry, other: Entry) -> Entry:
    error = f"{one.file} and {other.file} have the same name (remove one of them)"
    return Entry(one.name, FILE, None, error, one.file)


def _parse(recipe: Any, name: str) -> Template:
    return templates.parse(recipe, name)


def _read_all(folder: Path, names: list[str]) -> dict[str, Template | errors.K8eError]:
    found: dict[str, Template | errors.K8eError] = {}
    for name in names:
        try:
            found[name] = template_files.read(folder / name)
        except errors.K8eError as error:
            found[name] = error
        except Exception as error:
            # Whatever is wrong with one file must not keep the others from being used.
            log.exception("the template %s cannot be read", name)
            found[name] = errors.InvalidRequest(f"{name}: it cannot be read: {error!r}"[:500])
    return found


def _unknown(name: str) -> errors.TemplateNotFound:
    return errors.TemplateNotFound(
        f"template {name[:80]!r} not found", hint="k8e template list shows those that there are"
    )
