"""Templates: named recipes that sessions are made from. Pure: their content, and how it is read.

A template may leave everything open. A client's request wins, for limits, variables and labels key
by key; the template decides the rest, and the gateway's settings decide what is left.
"""

# What files and clients say has no static type; everything is checked here.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k8e import errors, model
from k8e.model import DEFAULT_TEMPLATE, Limits, Rootfs, SessionSpec, Warm

ENDINGS = (".yaml", ".yml", ".toml")
MAX_FILE = 64 << 10
"""Bytes of a template's file."""
MAX_DESCRIPTION = 1000
MAX_HOSTS = 256
MAX_MODULES = 64
MAX_POOL = 1000
LANGUAGES = ("python", "node")
"""Whose interpreters can be kept warm."""
_ROOTFS = "host, dir:/PATH, tar:/PATH or image:REFERENCE"
_SHARED = ("limits", "env", "labels")
_PYTHON_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)
_LIMITS = tuple(item.name for item in dataclasses.fields(Limits))


def _no_strings() -> dict[str, str]:
    return {}


def _no_limits() -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Template:
    """A recipe. Empty, 0 and None mean that it does not set a field."""

    name: str
    description: str = ""
    runtime: str = ""
    rootfs: Rootfs = field(default_factory=Rootfs)
    limits: Mapping[str, float] = field(default_factory=_no_limits)
    """Only those that it sets."""
    env: Mapping[str, str] = field(default_factory=_no_strings)
    labels: Mapping[str, str] = field(default_factory=_no_strings)
    allowed_hosts: tuple[str, ...] | None = None
    lifetime: float = 0
    idle_timeout: float = 0
    warm: Warm = (("python", ()),)
    pool_min: int | None = None
    """How many ready sandboxes are kept at least, and at most."""
    pool_max: int | None = None

    @property
    def full_limits(self) -> Limits:
        """The limits of a sandbox that is started before a session asks for it."""
        return model.limits_from_json(dict(self.limits))

    @property
    def digest(self) -> str:
        """A value that changes with everything that makes a ready sandbox, and nothing else."""
        limits = dataclasses.asdict(self.full_limits)
        made_of = [self.runtime, self.rootfs.kind, self.rootfs.source, limits, self.warm]
        text = json.dumps(made_of, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The form that :func:`parse` reads back, without unset fields."""
        pool = {"min": self.pool_min, "max": self.pool_max}
        told: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "runtime": self.runtime,
            "rootfs": rootfs_text(self.rootfs),
            "limits": dict(self.limits),
            "env": dict(self.env),
            "labels": dict(self.labels),
            "lifetime": self.lifetime,
            "idle_timeout": self.idle_timeout,
            "pool": {key: value for key, value in pool.items() if value is not None},
        }
        told = {key: value for key, value in told.items() if value}
        if self.allowed_hosts is not None:
            told["allowed_hosts"] = list(self.allowed_hosts)
        return told | {"warm": {language: list(modules) for language, modules in self.warm}}


BUILT_IN = Template(
    DEFAULT_TEMPLATE, "What sessions are made from that name no template: this host's programs"
)


def specify(template: Template, asked: dict[str, Any]) -> SessionSpec:
    """The specification of a session: the client's request, and the template for the rest."""
    filled = {**asked, "template": template.name}
    for key in ("runtime", "lifetime", "idle_timeout"):
        filled[key] = asked.get(key) or getattr(template, key)
    if asked.get("allowed_hosts") is None:  # an empty list says something: nothing is allowed
        filled["allowed_hosts"] = template.allowed_hosts
    for key in _SHARED:
        given = asked.get(key) or {}
        if not isinstance(given, dict):
            raise errors.InvalidRequest(f"malformed session: {key} must be a mapping")
        said = {name: value for name, value in given.items() if value or key != "limits"}
        filled[key] = {**getattr(template, key), **said}
    return SessionSpec.from_json(filled, rootfs=template.rootfs, warm=template.warm)


# Root file systems.


def rootfs_text(rootfs: Rootfs) -> str:
    return f"{rootfs.kind}:{rootfs.source}" if rootfs.source else rootfs.kind


def parse_rootfs(text: str) -> Rootfs:
    """The root file system that ``text`` names; ValueError says what is wrong with it."""
    kind, _, source = text.partition(":")
    if text == "host":
        return Rootfs()
    if kind in ("dir", "tar"):
        if not source.startswith("/") or "\0" in source or len(source) > 4000:
            raise ValueError(f"is {text[:80]!r}, which has no absolute path: write {kind}:/PATH")
        source = "/" + posixpath.normpath(source).lstrip("/")
        if source == "/":
            raise ValueError(f"is {text[:80]!r}, which would be all of this machine: write host")
        return Rootfs(kind, source)
    if kind == "image":
        if not source or len(source) > 500 or not source.isascii() or set(source) & set(" \t\n\r"):
            raise ValueError(f"is {text[:80]!r}, which names no image: write image:REFERENCE")
        if source.isprintable():
            return Rootfs(kind, source)
    raise ValueError(f"is {text[:80]!r}; known are {_ROOTFS}")


# Reading.


def load(data: bytes, file_name: str) -> Any:
    """The content of a YAML or TOML file, unchecked; InvalidRequest if it is neither."""
    if len(data) > MAX_FILE:
        raise errors.LimitExceeded(f"{file_name}: it is longer than {MAX_FILE} bytes")
    try:
        if file_name.endswith(".toml"):
            return tomllib.loads(data.decode("utf-8"))
        return _load_yaml(data)
    except Exception as error:  # PyYAML fails in many ways on what it cannot construct
        kind = "TOML" if file_name.endswith(".toml") else "YAML"
        what = " ".join(str(error).split()) or type(error).__name__
        raise errors.InvalidRequest(f"{file_name}: it is not {kind}: {what[:500]}") from None


def _load_yaml(data: bytes) -> Any:
    import yaml  # takes longer to import than most templates to use

    class Loader(yaml.SafeLoader):
        """Refuses duplicate keys, of which YAML would silently drop one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    line = key.start_mark.line + 1
                    raise ValueError(f"the key {name[:80]!r} is there twice, line {line}")
                seen.add(name)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(data, Loader)  # noqa: S506 - it is a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def parse(data: Any, name: str, where: str = "") -> Template:
    """A template from untrusted data.

    Args:
        data: a mapping, as files have it.
        name: what it is to be called; if empty, what ``data`` says.
        where: what errors call it, such as its file.

    Raises:
        InvalidRequest: with the place, the key and what is allowed.
    """
    reader = _Reader(where or f"template {name[:80]!r}")
    if not isinstance(data, dict):
        raise reader.wrong("", f"a template is a mapping; known keys are {', '.join(_KEYS)}")
    unknown = [key for key in data if key not in _KEYS]
    if unknown:
        raise reader.wrong(str(unknown[0])[:80], "is no key", f"known are {', '.join(_KEYS)}")
    said = reader.text("name", data.get("name", ""))
    if name and said and said != name:
        raise reader.wrong("name", f"is {said[:80]!r}, and the file's name says {name!r}")
    values = {
        key: read(reader, data[key])
        for key, read in _KEYS.items()
        if data.get(key) is not None and key not in ("name", "pool")
    }
    try:
        model.check_id(name or said, "template")
    except errors.InvalidRequest as error:
        raise errors.InvalidRequest(f"{reader.where}: {error.message}", hint=error.hint) from None
    return Template(name=name or said, **values, **reader.pool(data.get("pool")))


class _Reader:
    """Reads the values of one template; explains what is wrong with them."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, key: str, what: str, hint: str = "") -> errors.InvalidRequest:
        text = f"{self.where}: {key} {what}" if key else f"{self.where}: {what}"
        return errors.InvalidRequest(text, hint=hint or "docs/howto/templates.md has an example")

    def text(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            hint = "write it in quotes" if isinstance(value, (int, float)) else ""
            raise self.wrong(key, f"must be text, not {_kind(value)}", hint)
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise self.wrong(key, "is not UTF-8")
        return value

    def description(self, value: Any) -> str:
        text = self.text("description", value)
        if len(text) > MAX_DESCRIPTION:
            raise self.wrong("description", f"is longer than {MAX_DESCRIPTION} characters")
        return text

    def runtime(self, value: Any) -> str:
        return self.text("runtime", value)

    def rootfs(self, value: Any) -> Rootfs:
        try:
            return parse_rootfs(self.text("rootfs", value))
        except ValueError as error:
            raise self.wrong("rootfs", str(error)) from None

    def limits(self, value: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, limit in self._mapping("limits", value, _LIMITS).items():
            if not isinstance(limit, (int, float, str)) or isinstance(limit, bool):
                raise self.wrong(f"limits.{key}", f"must be a number, not {_kind(limit)}")
            try:
                number = model.parse_limit(key, limit)
                found[key] = float(number) if key == "cpus" else int(number)
                model.limits_from_json({key: found[key] or -1})  # 0 would not be looked at
            except errors.InvalidRequest as error:
                raise self.wrong(
                    f"limits.{key}", f"is refused: {error.message}", error.hint
                ) from None
            except (ValueError, OverflowError):
                raise self.wrong(f"limits.{key}", f"is {limit!r}, which is no limit") from None
        return found

    def env(self, value: Any) -> dict[str, str]:
        found = self._strings("env", value)
        try:
            model.check_env(found)
        except errors.K8eError as error:
            raise self.wrong("env", f"is refused: {error.message}") from None
        return found

    def labels(self, value: Any) -> dict[str, str]:
        found = self._strings("labels", value)
        if len(found) > model.MAX_LABELS or sum(map(len, found.values())) > 16 << 10:
            raise self.wrong("labels", f"are more than {model.MAX_LABELS}, or 16 KiB of them")
        return found

    def allowed_hosts(self, value: Any) -> tuple[str, ...]:
        """The words of a policy; egress interprets them."""
        words = self._texts("allowed_hosts", value)
        if len(words) > MAX_HOSTS:
            raise self.wrong("allowed_hosts", f"has more than {MAX_HOSTS} words")
        return words

    def lifetime(self, value: Any) -> float:
        return self._seconds("lifetime", value)

    def idle_timeout(self, value: Any) -> float:
        return self._seconds("idle_timeout", value)

    def warm(self, value: Any) -> Warm:
        """Languages in a fixed order."""
        if isinstance(value, dict) and "bash" in value:
            hint = "leave it out: a new bash starts as quickly as one that waits could be used"
            raise self.wrong("warm.bash", "is refused: no bash is kept waiting", hint)
        found = self._mapping("warm", value, LANGUAGES)
        return tuple((key, self._modules(key, found[key])) for key in LANGUAGES if key in found)

    def _modules(self, language: str, value: Any) -> tuple[str, ...]:
        key = f"warm.{language}"
        modules = () if value is None else self._texts(key, value)
        if modules and language != "python":
            hint = f"write {language}: [] and import them in the code"
            raise self.wrong(key, "must be []: modules are loaded ahead only for python", hint)
        for module in modules:
            if len(module) > 200 or not _PYTHON_MODULE.fullmatch(module):
                raise self.wrong(key, f"has {module[:80]!r}, which is not the name of a module")
        if len(modules) > MAX_MODULES:
            raise self.wrong(key, f"has more than {MAX_MODULES} modules")
        return modules

    def pool(self, value: Any) -> dict[str, Any]:
        sizes = {} if value is None else self._mapping("pool", value, ("min", "max"))
        for key, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_POOL:
                raise self.wrong(f"pool.{key}", f"must be a number from 0 to {MAX_POOL}")
        if sizes.get("min", 0) > sizes.get("max", MAX_POOL):
            raise self.wrong("pool", "has a min that is above its max")
        return {f"pool_{key}": size for key, size in sizes.items()}

    def _mapping(self, key: str, value: Any, known: tuple[str, ...] = ()) -> dict[str, Any]:
        hint = f"known are {', '.join(known)}" if known else ""
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, f"must be a mapping, not {_kind(value)}", hint)
        unknown = [name for name in value if known and name not in known]
        if unknown:
            raise self.wrong(f"{key}.{unknown[0][:80]}", "is no key", hint)
        return value

    def _strings(self, key: str, value: Any) -> dict[str, str]:
        found = self._mapping(key, value)
        return {
            self.text(key, name): self.text(f"{key}.{name[:80]}", item)
            for name, item in found.items()
        }

    def _texts(self, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            raise self.wrong(key, f"must be a list, not {_kind(value)}")
        return tuple(self.text(key, item) for item in value)

    def _seconds(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, f"must be a number of seconds, not {_kind(value)}")
        if not 0 < value < 1e9:  # NaN is not either
            raise self.wrong(key, f"is {str(value)[:40]}, which is no number of seconds above 0")
        return float(value)


_KEYS: dict[str, Callable[[_Reader, Any], Any]] = {
    "name": lambda reader, value: reader.text("name", value),
    "description": _Reader.description,
    "runtime": _Reader.runtime,
    "rootfs": _Reader.rootfs,
    "limits": _Reader.limits,
    "env": _Reader.env,
    "labels": _Reader.labels,
    "allowed_hosts": _Reader.allowed_hosts,
    "lifetime": _Reader.lifetime,
    "idle_timeout": _Reader.idle_timeout,
    "warm": _Reader.warm,
    "pool": _Reader.pool,
}


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", tuple: "a list", str: "a text", bool: "yes or no"}
    if value is None:
        return "nothing"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "that")
