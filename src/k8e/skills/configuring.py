"""One agent's configuration before and after: what is to be changed, and how it is undone."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import Any, NamedTuple

from k8e.skills import agents, files, json_edits, toml
from k8e.skills.agents import NAME, Agent, Server
from k8e.skills.files import Found
from k8e.skills.receipts import Change, Receipt
from k8e.skills.texts import Unreadable, line_of

_ADVICE = "mend that line (nothing was changed), and run this again"


class Edit(NamedTuple):
    """What becomes of a configuration; ``after`` is None if the file goes away."""

    before: str
    after: str | None
    base: str
    """The text without anything of ours, as far as we know."""
    made_holder: bool = False
    exact: bool = True
    """Whether ``base`` is what was there before we came."""

    @property
    def changed(self) -> bool:
        return self.after != self.before

    def change(self) -> Change | None:
        return Change.between(self.base, self.after or "") if self.exact else None

    def diff(self, path: str, secret: str) -> str:
        """For people: what changes, without the token."""
        lines = difflib.unified_diff(
            self.before.splitlines(), (self.after or "").splitlines(), path, path, lineterm="", n=2
        )
        shown = "".join(f"{line}\n" for line in lines)
        return shown.replace(secret, "…") if secret else shown


def install(agent: Agent, found: Found, server: Server, receipt: Receipt | None) -> Edit:
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


def uninstall(agent: Agent, found: Found, receipt: Receipt | None) -> Edit:
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
    """Whether an entry says what it should; what the user added does not count."""
    return now is not None and {key: now[key] for key in now if key in ours} == wanted


def _editor(agent: Agent) -> ModuleType:
    return toml if agent.toml else json_edits


def _text(found: Found) -> str:
    data = found.data or b""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(
            f"{found.path} is not UTF-8", line, "save it as UTF-8, and run this again"
        ) from None


def _check(
    editor: ModuleType, agent: Agent, before: str, after: str, wanted: dict[str, Any] | None
) -> None:
    """Read what was written: our entry is there (or gone), and nothing else is different."""
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
        raise Unreadable(
            "this is written in a way that k8e cannot change safely", line_of(before, max(where, 0))
        )


class _Naming:
    """Adds the file's name, and advice, to what is wrong in it."""

    def __init__(self, found: Found) -> None:
        self._path = found.path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Unreadable):
            error.message = f"{self._path}, line {error.line}: {error.problem}"
            error.args = (error.message,)
            error.hint = error.hint or _ADVICE


def write(found: Found, edit: Edit, server: Server | None) -> list[str]:
    """Do it; which folders were made."""
    if edit.after is None:
        files.remove(found)
        return []
    secret = server is not None and bool(server.token)
    made = files.replace(found, edit.after.encode(), private=secret)
    return [str(folder) for folder in made]
