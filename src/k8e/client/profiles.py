"""The profiles file: gateways by name, and the current one.

Absent on most machines; then nothing here is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e import errors, system

MAX_FILE = 1 << 20
VERSION = 1
_FIELDS = ("endpoint", "cert_dir", "device_name", "api_key_file")


@dataclass(frozen=True)
class Profile:
    """One gateway: its address, and our credentials for it."""

    name: str
    endpoint: str = ""
    cert_dir: str = ""
    """A folder with ``ca.crt``, ``client.crt``, ``client.key`` and ``endpoint``."""
    device_name: str = ""
    api_key_file: str = ""


@dataclass(frozen=True)
class Profiles:
    """The content of a profiles file."""

    path: Path
    current: str
    profiles: dict[str, Profile]

    def get(self, name: str) -> Profile:
        if name not in self.profiles:
            known = ", ".join(sorted(self.profiles)) or "none"
            raise errors.InvalidRequest(
                f"there is no profile {name[:80]!r} in {self.path}",
                hint=f"known are: {known}; k8e sandbox login --profile makes one",
            )
        return self.profiles[name]


def load(path: Path) -> Profiles:
    """Read a profiles file; a missing one has no profiles."""
    raw = _read(path)
    found: dict[str, Profile] = {}
    for name, fields in _mapping(path, raw, "profiles").items():
        if not isinstance(fields, dict):
            raise _broken(path, f"profile {name!r} is not a mapping")
        values = {key: _text(path, fields, key) for key in _FIELDS}  # pyright: ignore[reportUnknownArgumentType]
        for key in ("cert_dir", "api_key_file"):
            if values[key]:
                values[key] = str(path.parent / Path(values[key]).expanduser())
        found[str(name)] = Profile(str(name), **values)
    return Profiles(path, _text(path, raw, "current_profile"), found)


def save(path: Path, profile: Profile) -> None:
    """Add or replace a profile, and make it the current one; the rest of the file is kept."""
    raw = _read(path)
    fields = {key: getattr(profile, key) for key in _FIELDS if getattr(profile, key)}
    profiles = {**_mapping(path, raw, "profiles"), profile.name: fields}
    _write(path, {**raw, "current_profile": profile.name, "profiles": profiles})


def use(path: Path, name: str) -> None:
    """Choose the current profile; an empty name means none, so this host's own gateway."""
    raw = _read(path)
    raw.pop("current_profile", None)
    if name:
        load(path).get(name)
        raw["current_profile"] = name
    _write(path, raw)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, str(error)) from None
    import yaml

    try:
        raw: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _broken(path, " ".join(str(error).split())) from None
    if not isinstance(raw or {}, dict):
        raise _broken(path, "it is not a mapping")
    return raw or {}


def _write(path: Path, raw: dict[str, Any]) -> None:
    """Replace the file as a whole."""
    import yaml

    text = yaml.safe_dump({"version": VERSION, **raw}, sort_keys=True)
    try:
        system.replace_files(path.parent, {path.name: text.encode()})
    except OSError as error:
        raise errors.InvalidRequest(
            f"the profiles cannot be written to {path}: {error.strerror}",
            hint=errors.folder_hint(
                error, "make its folder writable, or set K8E_SANDBOX_CONFIG to another file"
            ),
        ) from None


def _mapping(path: Path, raw: dict[str, Any], key: str) -> dict[str, Any]:
    value: Any = raw.get(key) or {}
    if not isinstance(value, dict):
        raise _broken(path, f"{key} is not a mapping")
    return value  # pyright: ignore[reportUnknownVariableType]


def _text(path: Path, raw: dict[str, Any], key: str) -> str:
    value = raw.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _broken(path, f"{key} is not text")
    return value


def _broken(path: Path, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"the profiles file {path} cannot be used: {why}",
        hint="correct it, or set K8E_SANDBOX_CONFIG to another one",
    )
