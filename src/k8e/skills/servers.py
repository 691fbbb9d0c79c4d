"""The MCP server in an agent's configuration: a command, or a URL with its token."""

from __future__ import annotations

import secrets
import shutil
import sys
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from k8e import access, errors
from k8e.skills import files
from k8e.skills.agents import TOKEN_VARIABLE, Scope, ServerEntry

ADDRESS_VARIABLE = "K8E_SANDBOX_MCP_ADDR"
FILE_VARIABLE = "K8E_SANDBOX_MCP_TOKEN_FILE"
SETTINGS = Path("/etc/k8e/sandbox-mcp.yaml")
COMMAND = "sandbox-mcp"
PATH = "/mcp"
_EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - where a server listens; a client needs a place


def choose(scope: Scope, *, dry: bool = False) -> ServerEntry:
    """The server that the environment, or the machine's settings, ask for.

    A server that has not run yet has no token; so it gets one now, unless this is a ``dry`` run.
    """
    address = scope.environ.get(ADDRESS_VARIABLE, "").strip() or _machines_address()
    if not address:
        return ServerEntry(command=_command(scope))
    url = url_of(address)
    # A project's files are shared with others, and a token is not.
    return ServerEntry(url=url, token="" if scope.project else _token(scope, url, dry=dry))


def _machines_address() -> str:
    """The key ``addr`` of K8E's file, which has one plain key in each line."""
    try:
        lines = SETTINGS.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key == "addr":
            return value.partition(" #")[0].strip().strip("'\"")
    return ""


def _command(scope: Scope) -> tuple[str, ...]:
    """The command that starts it, with its full path: a desktop's programs have another PATH."""
    if scope.project is not None:
        return ("k8e", COMMAND)  # the path is another one on every machine
    found = shutil.which("k8e", path=scope.environ.get("PATH"))
    return (found, COMMAND) if found else (sys.executable, "-m", "k8e", COMMAND)


def url_of(address: str) -> str:
    """The URL of ``:8811``, ``host:8811`` or a URL."""
    if "://" not in address:
        address = f"http://{address}"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _bad(address, str(error)) from None
    if parts.scheme not in ("http", "https"):
        raise _bad(address, "it is neither http nor https")
    if host in _EVERYWHERE:
        host = "127.0.0.1"
    if parts.scheme == "http" and not access.is_loopback(host):
        raise errors.InvalidRequest(
            f"{ADDRESS_VARIABLE} {address!r} would send the token over the network in clear text",
            hint="put a proxy with TLS in front of the server, and give its https:// URL",
        )
    place = f"[{host}]" if ":" in host else host
    if port is not None:
        place += f":{port}"
    path = parts.path if parts.path.strip("/") else PATH
    return SplitResult(parts.scheme, place, path, parts.query, "").geturl()


def _bad(address: str, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"{ADDRESS_VARIABLE} {address!r} is not an address: {why}",
        hint="give it as :8811, HOST:8811 or https://HOST/mcp",
    )


def token_file(scope: Scope) -> Path:
    """The file in which ``k8e sandbox-mcp --http`` keeps its token."""
    given = scope.environ.get(FILE_VARIABLE)
    return Path(given) if given else scope.home / ".k8e" / "sandbox" / "mcp-token"


def _token(scope: Scope, url: str, *, dry: bool) -> str:
    given = scope.environ.get(TOKEN_VARIABLE, "").strip()
    if given:
        return given
    if not access.is_loopback(urlsplit(url).hostname or ""):
        raise errors.InvalidRequest(
            f"{url} is another machine's server, and its token is not known here",
            hint=f"set {TOKEN_VARIABLE} to its token; the one of this machine is not sent there",
        )
    file = token_file(scope)
    return _kept(file) or _made(file, dry=dry)


def _kept(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise errors.InvalidRequest(
            f"the token in {file} cannot be read: {error}",
            hint=f"make it readable, or set {TOKEN_VARIABLE}",
        ) from None


def _made(file: Path, *, dry: bool) -> str:
    """A new token, written where the server will look for it at its first start."""
    made = secrets.token_urlsafe(32)
    if dry:
        return made
    try:
        found = files.read(file, None)
        files.replace(found, f"{made}\n".encode(), private=True)
    except errors.Conflict:
        return _kept(file)  # a server that starts at this moment has made one
    except OSError as error:
        raise errors.InvalidRequest(
            f"a token cannot be kept in {file}: {error.strerror}",
            hint=f"name another file with {FILE_VARIABLE}, or set {TOKEN_VARIABLE}",
        ) from None
    return made
