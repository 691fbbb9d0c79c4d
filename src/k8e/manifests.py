"""Manifests: the files, folders and git repositories of a new session's workspace. Pure checks.

A manifest is a list of entries, as K8E writes them in YAML: each is a mapping with one of ``file``,
``dir`` and ``gitRepo``, or a flat one that has a ``type``.
"""

# What clients send has no static type; everything is checked here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from k8e import errors

FILE, DIR, GIT = "file", "dir", "gitRepo"
WORKSPACE = "/workspace"
MAX_ENTRIES = 1000
MAX_BYTES = 1 << 20
"""Of all paths, contents and addresses together."""
MAX_PATH = 4095
MAX_URL = 2000
HEAD = "HEAD"
_KINDS = {
    "file": FILE,
    "dir": DIR,
    "directory": DIR,
    "gitRepo": GIT,
    "git_repo": GIT,
    "gitrepo": GIT,
    "git": GIT,
}
_FIELDS = {
    FILE: frozenset(("path", "content", "content_base64", "mode")),
    DIR: frozenset(("path",)),
    GIT: frozenset(("path", "repo", "url", "ref")),
}


@dataclass(frozen=True)
class Entry:
    """One entry to make, below ``/workspace``."""

    kind: str
    """``file``, ``dir`` or ``gitRepo``."""
    path: str
    """Relative to ``/workspace``, with no ``..`` in it."""
    content: bytes = b""
    mode: int | None = None
    repo: str = ""
    ref: str = ""


@dataclass(frozen=True)
class Manifest:
    """Entries in the order in which they are made. Manifests with the same digest are equal."""

    digest: str = ""
    """Of all entries; empty for none."""
    entries: tuple[Entry, ...] = field(default=(), compare=False)
    """Also empty where it was read back: what a session was made with is not kept, only this."""

    def __bool__(self) -> bool:
        return bool(self.digest)


def from_json(value: Any) -> Manifest:
    """A manifest from untrusted data, or the digest of one from the store."""
    if isinstance(value, str):
        return Manifest(value[:100])
    if isinstance(value, dict):
        unknown = set(value) - {"entries"}
        if unknown:
            raise errors.InvalidRequest(
                f"unknown field {_shown(min(map(str, unknown)))} beside entries"
            )
        value = value.get("entries")
    if not isinstance(value, (list, tuple)):
        raise errors.InvalidRequest(
            "a manifest is a list of entries", hint="each has one of file, dir and gitRepo"
        )
    if len(value) > MAX_ENTRIES:
        raise errors.LimitExceeded(
            f"the manifest has {len(value)} entries; the limit is {MAX_ENTRIES}"
        )
    entries = tuple(_entry(number, item) for number, item in enumerate(value, 1))
    size = sum(map(_size, entries))
    if size > MAX_BYTES:
        raise errors.LimitExceeded(
            f"the manifest holds {size} bytes; the limit is {MAX_BYTES}",
            hint="write large files with k8e sandbox cp, or restore a snapshot",
        )
    return Manifest(_digest(entries), entries)


def _digest(entries: Iterable[Entry]) -> str:
    parts = [
        [
            item.kind,
            item.path,
            hashlib.sha256(item.content).hexdigest(),
            item.mode,
            item.repo,
            item.ref,
        ]
        for item in entries
    ]
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}" if parts else ""


def _size(entry: Entry) -> int:
    return len(entry.content) + len(entry.path) + len(entry.repo) + len(entry.ref)


def _entry(number: int, item: Any) -> Entry:
    try:
        kind, fields = _unfold(item)
        unknown = set(fields) - _FIELDS[kind]
        if unknown:
            raise errors.InvalidRequest(f"a {kind} has no field {_shown(min(map(str, unknown)))}")
        path = _path(fields.get("path"), kind)
        if kind == FILE:
            return Entry(kind, path, content=_content(fields), mode=_mode(fields.get("mode")))
        if kind == GIT:
            repo = check_url(fields.get("repo") or fields.get("url"))
            return Entry(kind, path, repo=repo, ref=check_ref(fields.get("ref")))
        return Entry(kind, path)
    except errors.InvalidRequest as error:
        raise errors.InvalidRequest(
            f"manifest entry {number}: {error.message}", hint=error.hint
        ) from None


def _unfold(item: Any) -> tuple[str, dict[str, Any]]:
    """The kind and the fields of an entry, in either of its spellings."""
    if isinstance(item, dict):
        if "type" in item:
            kind = _KINDS.get(item["type"]) if isinstance(item["type"], str) else None
            if kind is not None:
                return kind, {key: value for key, value in item.items() if key != "type"}
        elif len(item) == 1:
            ((name, fields),) = item.items()
            kind = _KINDS.get(name) if isinstance(name, str) else None
            if kind is not None and isinstance(fields, str):
                fields = {"path": fields}
            if kind is not None and isinstance(fields, dict):
                return kind, fields
    raise errors.InvalidRequest(
        "it is no entry", hint="an entry has exactly one of file, dir and gitRepo, with its fields"
    )


def _path(value: Any, kind: str) -> str:
    if not isinstance(value, str) or not value:
        raise errors.InvalidRequest("the path is missing")
    path = value.removeprefix(WORKSPACE + "/") if value != WORKSPACE else "."
    if path.startswith("/") or ".." in path.split("/") or "\0" in path or len(path) > MAX_PATH:
        raise errors.InvalidRequest(
            f"the path {_shown(value)} is not one below {WORKSPACE}",
            hint=f"use a path relative to {WORKSPACE}, without ..",
        )
    tidy = posixpath.normpath(path)
    if kind == FILE and (tidy == "." or path.endswith("/")):
        raise errors.InvalidRequest(f"the path {_shown(value)} is not that of a file")
    return tidy


def _content(fields: dict[str, Any]) -> bytes:
    text, coded = fields.get("content"), fields.get("content_base64")
    if text is not None and coded is not None:
        raise errors.InvalidRequest("it has both content and content_base64")
    if coded is not None:
        try:
            return base64.b64decode(coded, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise errors.InvalidRequest("content_base64 is not base64") from None
    if isinstance(text, bytes):
        return text
    if text is None or isinstance(text, str):
        return (text or "").encode("utf-8", "surrogateescape")
    raise errors.InvalidRequest(
        "the content is not text", hint="in YAML, put numbers and dates in quotes"
    )


def _mode(value: Any) -> int | None:
    if value is None or value == "":
        return None
    digits = value.removeprefix("0o") if isinstance(value, str) else ""
    if 3 <= len(digits) <= 4 and set(digits) <= set("01234567") and int(digits, 8) <= 0o777:
        return int(digits, 8)
    # A number is refused: YAML reads 0644 as 420, and 644 as 644.
    raise errors.InvalidRequest(
        f"the mode {_shown(value)} is not one", hint='write it in octal and in quotes, like "0755"'
    )


def check_url(value: Any) -> str:
    """The address of a repository: http or https, since nothing else gets out of a sandbox."""
    if not isinstance(value, str) or not value:
        raise errors.InvalidRequest("the repository's address (repo) is missing")
    try:
        parts = urlsplit(value)
        fits = parts.scheme.lower() in ("http", "https") and bool(parts.hostname)
    except ValueError:
        fits = False
    if not fits or not value.isprintable() or " " in value or len(value) > MAX_URL:
        raise errors.InvalidRequest(
            f"the repository {_shown(value)} cannot be fetched: its address must begin with "
            "https:// or http://",
            hint="ssh needs a key that no sandbox should hold, and local paths are not in it",
        )
    return value


def check_ref(value: Any) -> str:
    """A branch, a tag or a commit id; the remote's HEAD if none is given."""
    if value is None or value == "":
        return HEAD
    # Names that git check-ref-format refuses, and names that would be an option or a refspec.
    bad = set(" ~^:?*[\\") | {chr(code) for code in range(33)} | {"\x7f"}
    if (
        not isinstance(value, str)
        or len(value) > 250
        or value.startswith(("-", "+", "/"))
        or set(value) & bad
        or ".." in value
    ):
        raise errors.InvalidRequest(
            f"the ref {_shown(value)} is not one", hint="name a branch, a tag or a commit id"
        )
    return value


def _shown(value: Any) -> str:
    return repr(value)[:80]
