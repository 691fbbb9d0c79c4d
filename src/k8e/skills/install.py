"""Installs k8e for agents and removes it again: for each agent completely, or not at all.

A receipt of a configuration says which bytes were replaced. If the file was not changed since, they
are put back, and the file is what it was, byte for byte.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
from collections.abc import Callable, Generator
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from k8e import errors, rights
from k8e.skills import agents, files, jsonc, servers, toml
from k8e.skills.agents import NAME, SKILL, Scope, ServerEntry, SupportedAgent
from k8e.skills.files import FoundFile
from k8e.skills.jsonc import UnreadableConfiguration, line_of

VERSION = 1
_FOLDER = Path(".k8e") / "agents"


class TextChange(NamedTuple):
    """A span of a text that was replaced by another one."""

    at: int
    old: str
    new: str

    @classmethod
    def between(cls, before: str, after: str) -> TextChange:
        limit = min(len(before), len(after))
        start = 0
        while start < limit and before[start] == after[start]:
            start += 1
        end = 0
        while end < limit - start and before[-1 - end] == after[-1 - end]:
            end += 1
        return cls(start, before[start : len(before) - end], after[start : len(after) - end])

    def undo(self, text: str) -> str | None:
        """The text before this change; None if the change is no longer there as it was made."""
        end = self.at + len(self.new)
        if text[self.at : end] != self.new:
            return None
        return text[: self.at] + self.old + text[end:]


class Receipt(NamedTuple):
    """A record of the changes to one agent's files."""

    config: str
    digest: str
    """Of the configuration as we left it."""
    change: TextChange | None
    """None if another program changed the file between two installations."""
    created: bool
    """Whether there was no such file before."""
    made_holder: bool
    """Whether we also made the object around our entry."""
    skill: dict[str, str]
    """Digests of the skill's files, by path."""
    folders: list[str]
    """Folders that were made for all this."""
    backup: str = ""

    def original(self, text: str) -> str | None:
        """The configuration before the installation, if it has not been changed since."""
        if self.change is None or digest(text.encode()) != self.digest:
            return None
        return self.change.undo(text)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Receipts:
    """All receipts of a user, in one file that only the user can read: entries may hold a token."""

    def __init__(self, home: Path) -> None:
        self.folder = home / _FOLDER
        self._file = self.folder / "receipts.json"
        self._all: dict[str, Any] = self._load()

    def _load(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(files.read_private(self._file))
        except (OSError, ValueError):
            return {}  # without receipts, uninstalling looks for what looks like ours
        if not isinstance(found, dict):
            return {}
        told = cast("dict[str, Any]", found)
        return told.get("receipts", {}) if told.get("version") == VERSION else {}

    def get(self, key: str) -> Receipt | None:
        try:
            found: dict[str, Any] = dict(self._all[key])
            change = found.pop("change")
            return Receipt(change=None if change is None else TextChange(*change), **found)
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, key: str, receipt: Receipt | None) -> None:
        if receipt is None:
            self._all.pop(key, None)
        else:
            self._all[key] = receipt._asdict()
        if not self._all:
            files.remove_private(self._file)
            files.remove_folders([self.folder])
            return
        content = json.dumps({"version": VERSION, "receipts": self._all}, indent=1)
        files.write_private(self._file, content.encode())

    def back_up(self, name: str, path: Path, data: bytes) -> Path:
        """Keep a file's earlier content; the newest of each path."""
        mark = digest(str(path).encode())[:8]
        target = self.folder / "backups" / f"{name}-{mark}-{path.name}"
        files.write_private(target, data)
        return target


_ADVICE = "correct that line (nothing was changed), and run this again"


class Edit(NamedTuple):
    """A planned change of a configuration; ``after`` is None if the file is removed."""

    before: str
    after: str | None
    base: str
    """The text without our entry, as far as we know."""
    made_holder: bool = False
    exact: bool = True
    """Whether ``base`` is the text before our installation."""

    @property
    def changed(self) -> bool:
        return self.after != self.before

    def change(self) -> TextChange | None:
        return TextChange.between(self.base, self.after or "") if self.exact else None

    def diff(self, path: str, secret: str) -> str:
        """The change for people to read, without the token."""
        lines = difflib.unified_diff(
            self.before.splitlines(), (self.after or "").splitlines(), path, path, lineterm="", n=2
        )
        shown = "".join(f"{line}\n" for line in lines)
        return shown.replace(secret, "…") if secret else shown


def install_entry(
    agent: SupportedAgent, found: FoundFile, server: ServerEntry, receipt: Receipt | None
) -> Edit:
    text = _text(found)
    editor = _editor(agent)
    with _Naming(found):
        original = receipt.original(text) if receipt else None
        base = text if original is None else original
        made = not editor.has(base, agent.holder)
        exact = receipt is None or original is not None
        if not exact and receipt is not None and receipt.made_holder:
            made = True
        wanted = agent.entry(server)
        ours = agents.OURS_TOML if agent.toml else agents.OURS
        if _says(editor.read(text, agent.holder, NAME), wanted, ours):
            return Edit(text, text, base, made, exact)
        after = editor.put(base, agent.holder, NAME, wanted, ours)
        _check(editor, agent, base, after, wanted)
    return Edit(text, after, base, made, exact)


def uninstall_entry(agent: SupportedAgent, found: FoundFile, receipt: Receipt | None) -> Edit:
    text = _text(found)
    editor = _editor(agent)
    with _Naming(found):
        after = receipt.original(text) if receipt else None
        exact = after is not None
        if after is None:
            made = receipt is not None and receipt.made_holder
            after = editor.remove(text, agent.holder, NAME, emptied=made)
            _check(editor, agent, text, after, None)
    created = receipt is not None and receipt.created
    if created and after.strip("\ufeff \t\r\n") in ("", "{}"):
        return Edit(text, None, "", exact=True)  # all of it was ours
    return Edit(text, after, after, exact=exact)


def _says(now: dict[str, Any] | None, wanted: dict[str, Any], ours: tuple[str, ...]) -> bool:
    """Whether an entry has the right values; keys that the user added do not count."""
    return now is not None and {key: now[key] for key in now if key in ours} == wanted


def _editor(agent: SupportedAgent) -> ModuleType:
    return toml if agent.toml else jsonc


def _text(found: FoundFile) -> str:
    data = found.data or b""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableConfiguration(
            f"{found.path} is not UTF-8", line, "save it as UTF-8, and run this again"
        ) from None


def _check(
    editor: ModuleType,
    agent: SupportedAgent,
    before: str,
    after: str,
    wanted: dict[str, Any] | None,
) -> None:
    """Read the result: our entry is there (or gone), and nothing else is different."""
    holder = agent.holder[0]
    old, new = editor.data(before), editor.data(after)
    entries_old, entries_new = dict(old.pop(holder, {})), dict(new.pop(holder, {}))
    entries_old.pop(NAME, None)
    entry = entries_new.pop(NAME, None)
    right = (
        entry is None if wanted is None else entry is not None and wanted.items() <= entry.items()
    )
    if old != new or entries_old != entries_new or not right:
        where = before.find(holder)
        raise UnreadableConfiguration(
            "this is written in a way that k8e cannot change safely", line_of(before, max(where, 0))
        )


class _Naming:
    """Adds the file's name and advice to errors about its content."""

    def __init__(self, found: FoundFile) -> None:
        self._path = found.path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, UnreadableConfiguration):
            error.message = f"{self._path}, line {error.line}: {error.problem}"
            error.args = (error.message,)
            error.hint = error.hint or _ADVICE


def write_configuration(found: FoundFile, edit: Edit, server: ServerEntry | None) -> list[str]:
    """Write it; return the folders that were made."""
    if edit.after is None:
        files.remove(found)
        return []
    secret = server is not None and bool(server.token)
    made = files.replace(found, edit.after.encode(), private=secret)
    return [str(folder) for folder in made]


PARTS = ("SKILL.md", "references/cli.md", "references/tools.md")


def texts() -> dict[str, bytes]:
    """The skill's files, by their paths in its folder."""
    root = resources.files("k8e.skills") / "skill"
    return {part: root.joinpath(*part.split("/")).read_bytes() for part in PARTS}


class Copy(NamedTuple):
    """One file of the skill, and its destination."""

    found: FoundFile
    content: bytes | None
    """Its new content; None to remove it."""
    foreign: bool
    """Whether another program wrote the present content."""

    @property
    def changed(self) -> bool:
        return self.content != self.found.data


def plan_skill(folder: Path, root: Path | None, known: dict[str, str], *, gone: bool) -> list[Copy]:
    """The change of each file. ``known`` has the digests of the files that we wrote last time."""
    shipped = texts()
    names = {str(folder.joinpath(*part.split("/"))): part for part in shipped}
    plans: list[Copy] = []
    for path in dict.fromkeys([*names, *known]):
        content = shipped.get(names.get(path, ""))
        found = files.read(Path(path), root)
        ours = found.data is None or found.data == content
        ours = ours or digest(found.data or b"") == known.get(path)
        plans.append(Copy(found, None if gone else content, not ours))
    return plans


ATTEMPTS = 3


class InstallOutcome(NamedTuple):
    """The changes that were made, or with a dry run would be."""

    agent: str
    action: str
    """``installed``, ``updated``, ``unchanged``, ``removed`` or ``absent``."""
    config: str
    skill: str
    backup: str = ""
    notes: tuple[str, ...] = ()
    diff: str = ""
    """What would change in the configuration, after a dry run."""


class _Plan(NamedTuple):
    agent: SupportedAgent
    scope: Scope
    found: FoundFile
    edit: Edit
    copies: list[Copy]
    receipt: Receipt | None
    server: ServerEntry | None

    @property
    def folder(self) -> Path:
        return self.agent.skills(self.scope) / SKILL

    @property
    def key(self) -> str:
        return f"{self.agent.name}:{self.agent.config(self.scope)}"


def choose(names: list[str], scope: Scope, *, everything: bool) -> list[SupportedAgent]:
    """The named agents; ``all`` are those that are used here."""
    some = bool(names) and agents.ALL not in names
    return [
        agent
        for agent in agents.AGENTS.values()
        if agent.name in names or (not some and (everything or agent.is_used(scope)))
    ]


def _again(
    act: Callable[[SupportedAgent, Scope, bool], InstallOutcome],
) -> Callable[..., InstallOutcome]:
    """Repeat everything if a running agent has written its own files meanwhile."""

    def wrapped(agent: SupportedAgent, scope: Scope, *, dry: bool = False) -> InstallOutcome:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(errors.Conflict):
                return act(agent, scope, dry)
        return act(agent, scope, dry)

    wrapped.__doc__ = act.__doc__
    return wrapped


@_again
def install(agent: SupportedAgent, scope: Scope, dry: bool) -> InstallOutcome:
    """Install the MCP server and the skill for an agent."""
    # With the rights of the home's owner: the receipts can name only that user's files, too.
    with rights.of_master(scope.home):
        server = servers.choose(scope, dry=dry)
    with rights.of_master(scope.home), _locked(scope.home, dry=dry):
        receipts = Receipts(scope.home)
        plan = _plan(agent, scope, receipts, server)
        changed = plan.edit.changed or any(copy.changed for copy in plan.copies)
        action = "unchanged"
        if changed:
            action = "updated" if _is_there(plan) else "installed"
        if dry or not changed:
            return _outcome(plan, action, dry=dry)
        return _apply(plan, receipts, action)


@_again
def uninstall(agent: SupportedAgent, scope: Scope, dry: bool) -> InstallOutcome:
    """Remove what was installed; the rest of the files stays as it is."""
    # With the rights of the home's owner: the receipts can name only that user's files, too.
    with rights.of_master(scope.home), _locked(scope.home, dry=dry):
        receipts = Receipts(scope.home)
        plan = _plan(agent, scope, receipts, None)
        here = [copy for copy in plan.copies if copy.found.data is not None and not copy.foreign]
        action = "removed" if plan.edit.changed or here else "absent"
        if dry:
            return _outcome(plan, action, dry=True)
        if action == "absent":
            receipts.put(plan.key, None)
            return _outcome(plan, action)
        return _apply(plan, receipts, action)


@contextlib.contextmanager
def _locked(home: Path, *, dry: bool) -> Generator[None]:
    """Keeps other installations of this user out for the meantime."""
    if os.name == "nt" or dry:
        yield
        return
    import fcntl

    handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _plan(
    agent: SupportedAgent, scope: Scope, receipts: Receipts, server: ServerEntry | None
) -> _Plan:
    """Find everything that can go wrong before anything is changed."""
    config = agent.config(scope)
    receipt = receipts.get(f"{agent.name}:{config}")
    found = files.read(config, scope.project)
    if server is None:
        edit = uninstall_entry(agent, found, receipt)
    else:
        edit = install_entry(agent, found, server, receipt)
    known = receipt.skill if receipt else {}
    folder = agent.skills(scope) / SKILL
    copies = plan_skill(folder, scope.project, known, gone=server is None)
    return _Plan(agent, scope, found, edit, copies, receipt, server)


def _is_there(plan: _Plan) -> bool:
    return plan.receipt is not None or any(copy.found.data is not None for copy in plan.copies)


def _apply(plan: _Plan, receipts: Receipts, action: str) -> InstallOutcome:
    """Make all changes; if one fails, undo the earlier ones."""
    undo: list[Callable[[], object]] = []
    made: list[Path] = []
    notes: list[str] = []
    backup = ""
    try:
        if plan.edit.changed:
            if plan.found.data is not None and not _is_exact_removal(plan):
                kept = receipts.back_up(plan.agent.name, plan.found.path, plan.found.data)
                backup = str(kept)
            made += map(Path, write_configuration(plan.found, plan.edit, plan.server))
            undo.append(lambda: _put_back(plan.found))
        for copy in plan.copies:
            notes += _apply_copy(plan, copy, receipts, made, undo)
        if plan.server is None:
            receipts.put(plan.key, None)
            _tidy(plan)
        else:
            receipts.put(plan.key, _receipt(plan, [str(item) for item in made], backup))
            _leave_old_places(plan)
    except BaseException:
        for step in reversed(undo):
            with contextlib.suppress(OSError):
                step()
        files.remove_folders(made)
        raise
    return _outcome(plan, action, backup, notes)


def _is_exact_removal(plan: _Plan) -> bool:
    """Whether a file becomes what it was: then nothing can be lost."""
    return plan.server is None and plan.edit.exact


def _apply_copy(
    plan: _Plan,
    copy: Copy,
    receipts: Receipts,
    made: list[Path],
    undo: list[Callable[[], object]],
) -> list[str]:
    """Write or remove one file of the skill; return notes for the user."""
    path = copy.found.path
    if not copy.changed:
        return []
    if copy.content is None:
        if copy.foreign:
            return [f"{path} was changed by hand, so it stays"]
        if copy.found.data is not None:
            files.remove(copy.found)
            undo.append(lambda: _put_back(copy.found))
        return []
    notes: list[str] = []
    if copy.foreign:
        kept = receipts.back_up(plan.agent.name, path, copy.found.data or b"")
        notes.append(f"{path} was changed by hand; its old content is in {kept}")
    made += files.replace(copy.found, copy.content)
    undo.append(lambda: _put_back(copy.found))
    return notes


def _put_back(found: FoundFile) -> None:
    if found.data is None:
        files.remove(found)
        return
    now = files.read(found.path, None)
    files.replace(now, found.data)


def _leave_old_places(plan: _Plan) -> None:
    """Remove folders that only an older skill of ours used."""
    gone = [copy.found.path.parent for copy in plan.copies if copy.content is None]
    above = [item.parent for item in gone if item.parent.parent == plan.folder.parent]
    files.remove_folders(list(dict.fromkeys([*gone, *above])))


def _tidy(plan: _Plan) -> None:
    """Remove the folders that were made for this and are empty now."""
    folders = [Path(item) for item in plan.receipt.folders] if plan.receipt else []
    if plan.receipt and plan.receipt.backup and plan.edit.exact:
        files.remove_private(Path(plan.receipt.backup))
        folders += [Path(plan.receipt.backup).parent, Path(plan.receipt.backup).parent.parent]
    own = [plan.folder, *(copy.found.path.parent for copy in plan.copies)]
    files.remove_folders(list(dict.fromkeys([*folders, *own])))


def _receipt(plan: _Plan, made: list[str], backup: str) -> Receipt:
    before = plan.receipt
    text = plan.edit.after or ""
    return Receipt(
        config=str(plan.found.path),
        digest=digest(text.encode()),
        change=plan.edit.change(),
        created=before.created if before else plan.found.data is None,
        made_holder=plan.edit.made_holder,
        skill={
            str(copy.found.path): digest(copy.content)
            for copy in plan.copies
            if copy.content is not None
        },
        folders=list(dict.fromkeys([*(before.folders if before else []), *made])),
        backup=backup or (before.backup if before else ""),
    )


def _outcome(
    plan: _Plan, action: str, backup: str = "", notes: list[str] | None = None, *, dry: bool = False
) -> InstallOutcome:
    told = list(notes or [])
    secret = plan.server.token if plan.server else ""
    if plan.server is None and plan.receipt and plan.edit.after and NAME in plan.edit.after:
        told.append(f"the entry {NAME} that was there before is back in {plan.found.path}")
    if secret and _is_open(plan.found.target):
        told.append(
            f"{plan.found.path} holds a token and others can read it: chmod 600 it if it should not"
        )
    if plan.server is not None and plan.server.url and not plan.server.token:
        told.append(f"the token is taken from {agents.TOKEN_VARIABLE} when the agent starts")
    return InstallOutcome(
        agent=plan.agent.name,
        action=action,
        config=str(plan.found.path),
        skill=str(plan.folder),
        backup=backup,
        notes=tuple(told),
        diff=plan.edit.diff(str(plan.found.path), secret) if dry else "",
    )


def _is_open(path: Path) -> bool:
    try:
        return os.name != "nt" and bool(path.stat().st_mode & 0o077)
    except OSError:
        return False
