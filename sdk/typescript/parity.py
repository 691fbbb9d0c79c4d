"""The surface of both SDKs, side by side: what Python exports, and its name in TypeScript."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import k8e
from k8e.client.sandbox import SandboxFiles

SOURCE = Path(__file__).resolve().parent / "src"
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/sdk-parity.md"
HEAD = """\
<!-- Written by sdk/typescript/generate.py. -->

# Python and TypeScript

Every public name of the [Python SDK](sdk.md), and the same in
[TypeScript](../howto/typescript.md). Arguments by keyword are members of an object in TypeScript,
which comes last; all calls there take `signal` and `requestTimeout` too, and are awaited, as those
of `AsyncSandboxClient` and its handles are.
"""
_RENAMED = {
    "run": "sandboxRun",
    "arun": "sandboxRun",
    "sandbox_session": "sandboxSession",
    "__version__": "version",
}
"""Functions of the package that have another name in TypeScript, where each stands alone."""
_INTERNAL = {"Process.begin": "the client calls it once"}
"""What is public only by its name, and why."""
_THEIRS = {
    "ExecResult.toJSON": "what `JSON.stringify` calls; `dataclasses.asdict` in Python",
    "Exposed.wait": "`Sandbox.expose(…).wait()` and `wait_for_port` in Python",
    "Process.open": "internal",
    "SandboxClient.connections": "internal",
    "SandboxClient.readStream": "a web stream; `read_chunks` in Python",
    "SandboxFiles.readStream": "a web stream; `read_chunks` in Python",
}
"""What TypeScript has beside, and why. `type` tells events apart, where Python has classes."""
_CLASS = re.compile(
    r"^export (?:abstract )?(?:class|interface) (\w+)(?:<[^>]*>)?([^{]*)\{\n(.*?)^\}$",
    re.MULTILINE | re.DOTALL,
)
_MEMBER = re.compile(
    r"^  (?:(?:static|async|readonly|get|override|declare) )*\*?(\w+)\??(?=[(<:;])", re.MULTILINE
)
_TOP = re.compile(r"^export (?:async )?(?:function\*?|const|type) (\w+)", re.MULTILINE)


class Row(NamedTuple):
    """A public name of Python and what it is in TypeScript; empty if it is missing there."""

    python: str
    typescript: str


def rows() -> list[Row]:
    """All rows: classes with their members, then what else the package has."""
    kinds, functions = _typescript()
    exported = _exported()
    found: list[Row] = []
    for name in sorted(
        k8e.__all__, key=lambda name: (not inspect.isclass(getattr(k8e, name)), name)
    ):
        if name.startswith("Async"):
            continue  # the same names, held by a test of Python's
        kind = getattr(k8e, name)
        theirs = _RENAMED.get(name, name)
        there = theirs in exported and (theirs in kinds or theirs in functions or name == "errors")
        found.append(Row(name, theirs if there else ""))
        if inspect.isclass(kind):
            found += _members(kind, name, kinds.get(name, frozenset()))
        if kind is k8e.Sandbox:
            found.append(Row("SandboxFiles", "SandboxFiles"))
            found += _members(SandboxFiles, "SandboxFiles", kinds["SandboxFiles"])
    raised = _raised()
    for name, kind in vars(k8e.errors).items():
        if inspect.isclass(kind) and issubclass(kind, k8e.errors.K8eError):
            found.append(Row(f"errors.{name}", f"errors.{name}" if name in raised else ""))
    return found


def only_in_typescript() -> set[str]:
    """Members of classes of both for which nobody has said why Python has none."""
    kinds, _ = _typescript()
    ours = [getattr(k8e, name) for name in k8e.__all__ if not name.startswith("Async")]
    found: set[str] = set()
    for kind in filter(inspect.isclass, [*ours, SandboxFiles]):
        mine = {camel(name) for name in _public(kind) | _set_when_made(kind)}
        beside = kinds.get(kind.__name__, frozenset()) - mine - {"constructor", "type"}
        found |= {f"{kind.__name__}.{name}" for name in beside}
    return found - set(_THEIRS)


def _set_when_made(kind: type) -> set[str]:
    """Attributes that each object gets when it is made."""
    names: set[str] = set()
    for one in kind.__mro__[:-1]:
        with contextlib.suppress(OSError):
            names |= set(re.findall(r"\bself\.([a-z]\w*)(?::.*)? = ", inspect.getsource(one)))
            names |= set(re.findall(r"\bself\.([a-z]\w*), self\.", inspect.getsource(one)))
            names |= set(re.findall(r", self\.([a-z]\w*) = ", inspect.getsource(one)))
    return names


def _raised() -> set[str]:
    """The errors that the package exports."""
    text = (SOURCE / "errors.ts").read_text("utf-8")
    lists = re.findall(r"^export \{(.*?)\}", text, re.MULTILINE | re.DOTALL)
    listed = {item.strip() for part in lists for item in part.split(",")}
    return listed | set(re.findall(r"^export class (\w+)", text, re.MULTILINE))


def _members(kind: type, name: str, theirs: frozenset[str]) -> Iterator[Row]:
    for member in sorted(_public(kind)):
        if f"{name}.{member}" in _INTERNAL:
            continue
        wanted = camel(member)
        yield Row(f"{name}.{member}", f"{name}.{wanted}" if wanted in theirs else "")


def _public(kind: type) -> set[str]:
    names = {name for name in dir(kind) if not name.startswith("_")}
    return names | set(getattr(kind, "__match_args__", ()))


def camel(name: str) -> str:
    """A name as TypeScript has it."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _typescript() -> tuple[dict[str, frozenset[str]], set[str]]:
    """The members of each class and interface, with those of what it extends; and functions."""
    own: dict[str, set[str]] = {}
    above: dict[str, list[str]] = {}
    functions: set[str] = set()
    for path in SOURCE.glob("*.ts"):
        text = path.read_text("utf-8")
        functions |= set(_TOP.findall(text))
        for name, heritage, body in _CLASS.findall(text):
            own[name] = set(_MEMBER.findall(body))
            above[name] = re.findall(r"\b[A-Z]\w+", heritage)

    def members(name: str) -> set[str]:
        return own.get(name, set()).union(*map(members, above.get(name, ())))

    return {name: frozenset(members(name)) for name in own}, functions


def _exported() -> set[str]:
    """The names that the package exports."""
    text = (SOURCE / "index.ts").read_text("utf-8")
    lists = re.findall(r"^export (?:type )?\{(.*?)\}", text, re.MULTILINE | re.DOTALL)
    names = {
        item.strip().removeprefix("type ").split(" as ")[-1]
        for part in lists
        for item in part.split(",")
    }
    return names | set(re.findall(r"^export \* as (\w+)", text, re.MULTILINE))


def page() -> str:
    """The table as Markdown, a section for each class."""
    parts = [HEAD]
    section = ""
    for row in rows():
        owner, dot, _ = row.python.partition(".")
        if not dot and inspect.isclass(getattr(k8e, owner, SandboxFiles)):
            section = owner
            parts.append(f"\n## {owner}\n\n| Python | TypeScript |\n|---|---|\n")
            continue
        if not dot and section != "functions":
            section = "functions"
            parts.append("\n## The package\n\n| Python | TypeScript |\n|---|---|\n")
        if dot and owner == "errors" and section != "errors":
            section = "errors"
            parts.append("\n## Errors, in `errors`\n\n| Python | TypeScript |\n|---|---|\n")
        mine = row.python.removeprefix(f"{section}.")
        theirs = row.typescript.removeprefix(f"{section}.")
        parts.append(f"| `{mine}` | {f'`{theirs}`' if theirs else '**missing**'} |\n")
    return "".join(parts)
