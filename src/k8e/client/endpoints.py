"""Choice of the gateway that a client talks to, and of the credentials.

The order is: argument, K8E_SANDBOX_ENDPOINT, the profile that was asked for, the current profile,
this host's own gateway. The credentials of a profile are sent to its own endpoint only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from k8e import errors
from k8e.client.records import Record, field, replace

if TYPE_CHECKING:
    from pathlib import Path

    from k8e.client.profiles import Profile

DEFAULT_PORT = 50051
MAX_KEY_FILE = 4096
_FILES = (".k8e/sandbox/profiles.yaml", ".k8e/config.yaml")


class Endpoint(Record):
    """The address of a gateway, and the credentials for it."""

    socket: str = ""
    """Path of a unix socket; no gateway is started if none listens there."""
    target: str = ""
    """Host and port of a gRPC endpoint. Neither: this host's gateway, started when needed."""
    api_key: str = field(default="", repr=False)
    cert_dir: str = ""
    """A folder with ``ca.crt``, and with ``client.crt`` and ``client.key`` after a login."""
    profile: str = ""
    """The profile that this comes from."""


def resolve(
    endpoint: str | None, api_key: str | None = None, profile: str | None = None
) -> Endpoint:
    """The endpoint to use, in the order of this module's description."""
    environ = os.environ
    key = api_key or environ.get("K8E_SANDBOX_APIKEY") or ""
    cert_dir = environ.get("K8E_SANDBOX_CERT_DIR") or ""
    text = endpoint or environ.get("K8E_SANDBOX_ENDPOINT") or ""
    if text:
        found = parse(text)
        return replace(found, api_key=key, cert_dir=cert_dir) if found.target else found
    chosen = chosen_profile(profile or environ.get("K8E_SANDBOX_PROFILE") or "")
    if chosen is None:
        return Endpoint()
    cert_dir = cert_dir or chosen.cert_dir
    text = chosen.endpoint or (_first_line(f"{cert_dir}/endpoint") if cert_dir else "")
    if not text:
        raise errors.InvalidRequest(
            f"profile {chosen.name!r} names no endpoint",
            hint="add one to the profiles file: endpoint: gateway.example:50051",
        )
    found = parse(text)
    if not key and chosen.api_key_file:
        key = _first_line(chosen.api_key_file)
    return replace(found, api_key=key, cert_dir=cert_dir, profile=chosen.name)


def parse(text: str) -> Endpoint:
    """``host:port``, ``host``, ``https://host:port`` or ``unix:path``."""
    if text.startswith("unix:"):
        return Endpoint(socket=text.removeprefix("unix:").replace("//", "", 1))
    for prefix in ("https://", "grpcs://"):
        text = text.removeprefix(prefix)
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):  # a name, or an IPv6 address in brackets
        return Endpoint(target=f"{text}:{DEFAULT_PORT}")
    if not host or not port.isdigit():
        raise errors.InvalidRequest(
            f"{text!r} is not an endpoint",
            hint="endpoints look like gateway.example:50051 or unix:/run/k8e/gateway.sock",
        )
    return Endpoint(target=text)


def profiles_file() -> str:
    """The profiles file in use: that of the environment, or the first of the usual ones."""
    given = os.environ.get("K8E_SANDBOX_CONFIG")
    if given:
        return given
    paths = [os.path.expanduser(f"~/{name}") for name in _FILES]  # noqa: PTH111 - pathlib is slow
    return next((path for path in paths if os.path.exists(path)), paths[0])  # noqa: PTH110 - the same


def chosen_profile(name: str) -> Profile | None:
    """The profile of this name, or the current one; None if there is neither."""
    path = profiles_file()
    if not name and not os.path.exists(path):  # noqa: PTH110 - the same
        return None
    from pathlib import Path

    from k8e.client import profiles

    known = profiles.load(Path(path))
    wanted = name or known.current
    return known.get(wanted) if wanted else None


def _first_line(path: str | Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline(MAX_KEY_FILE).strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"{path} cannot be read: {error}") from None
