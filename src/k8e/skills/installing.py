"""Installs k8e into agents and takes it away again: for each agent all of it, or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from k8e import errors, rights
from k8e.skills import agents, configuring, files, servers, shipped
from k8e.skills.agents import NAME, SKILL, Agent, Scope, Server
from k8e.skills.configuring import Edit
from k8e.skills.files import Found
from k8e.skills.receipts import Receipt, Receipts, digest
from k8e.skills.shipped import Copy

ATTEMPTS = 3


class Outcome(NamedTuple):
    """What was done, or with a dry run what would be."""

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
    agent: Agent
    scope: Scope
    found: Found
    edit: Edit
    copies: list[Copy]
    receipt: Receipt | None
    server: Server | None

    @property
    def folder(self) -> Path:
        return self.agent.skills(self.scope) / SKILL

    @property
    def key(self) -> str:
        return f"{self.agent.name}:{self.agent.config(self.scope)}"


def choose(names: list[str], scope: Scope, *, everything: bool) -> list[Agent]:
    """The agents that were named; ``all`` are those that are used here."""
    some = bool(names) and agents.ALL not in names
    return [
        agent
        for agent in agents.AGENTS.values()
        if agent.name in names or (not some and (everything or agent.is_used(scope)))
    ]


def _again(act: Callable[[Agent, Scope, bool], Outcome]) -> Callable[..., Outcome]:
    """Agents that run write their own files now and then: then it is done anew, from the start."""

    def wrapped(agent: Agent, scope: Scope, *, dry: bool = False) -> Outcome:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(errors.Conflict):
                return act(agent, scope, dry)
        return act(agent, scope, dry)

    wrapped.__doc__ = act.__doc__
    return wrapped


@_again
def install(agent: Agent, scope: Scope, dry: bool) -> Outcome:
    """Tell an agent of the MCP server, and give it the skill."""
    # All of it with the rights of whose home it is: what receipts say is theirs, too.
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
def uninstall(agent: Agent, scope: Scope, dry: bool) -> Outcome:
    """Take away what was installed; what others wrote stays as it is."""
    # All of it with the rights of whose home it is: what receipts say is theirs, too.
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
    """Nobody else of this user installs in the meantime."""
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


def _plan(agent: Agent, scope: Scope, receipts: Receipts, server: Server | None) -> _Plan:
    """Find out everything that can go wrong before anything is changed."""
    config = agent.config(scope)
    receipt = receipts.get(f"{agent.name}:{config}")
    found = files.read(config, scope.project)
    if server is None:
        edit = configuring.uninstall(agent, found, receipt)
    else:
        edit = configuring.install(agent, found, server, receipt)
    known = receipt.skill if receipt else {}
    folder = agent.skills(scope) / SKILL
    copies = shipped.plan(folder, scope.project, known, gone=server is None)
    return _Plan(agent, scope, found, edit, copies, receipt, server)


def _is_there(plan: _Plan) -> bool:
    return plan.receipt is not None or any(copy.found.data is not None for copy in plan.copies)


def _apply(plan: _Plan, receipts: Receipts, action: str) -> Outcome:
    """Do all of it; if something fails, undo what was done before."""
    undo: list[Callable[[], object]] = []
    made: list[Path] = []
    notes: list[str] = []
    backup = ""
    try:
        if plan.edit.changed:
            if plan.found.data is not None and not _is_exact_removal(plan):
                kept = receipts.back_up(plan.agent.name, plan.found.path, plan.found.data)
                backup = str(kept)
            made += map(Path, configuring.write(plan.found, plan.edit, plan.server))
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
    """Whether a file becomes what it was: then there is nothing that could be lost."""
    return plan.server is None and plan.edit.exact


def _apply_copy(
    plan: _Plan,
    copy: Copy,
    receipts: Receipts,
    made: list[Path],
    undo: list[Callable[[], object]],
) -> list[str]:
    """Write or remove one file of the skill; what there is to tell about it."""
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
        notes.append(f"{path} was changed by hand; what it had is in {kept}")
    made += files.replace(copy.found, copy.content)
    undo.append(lambda: _put_back(copy.found))
    return notes


def _put_back(found: Found) -> None:
    if found.data is None:
        files.remove(found)
        return
    now = files.read(found.path, None)
    files.replace(now, found.data)


def _leave_old_places(plan: _Plan) -> None:
    """Remove folders that an older skill of ours had to itself."""
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
) -> Outcome:
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
    return Outcome(
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
