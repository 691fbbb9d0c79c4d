"""``k8e sandbox …``: sessions, and the content of new ones."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from k8e import errors
from k8e.cli import output, state
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands
from k8e.client import driver, endpoints, requests
from k8e.client.blocking import SandboxClient
from k8e.client.operations import Operation
from k8e.client.results import SessionInfo

_MAX_FILE = 4 << 20
"""Bytes of YAML: escapes and indentation need more room than the 1 MiB that they may hold."""
_DEFAULT_PATH = "repo"


def manifest_entries(options: argparse.Namespace, *, stdin: bool) -> list[dict[str, Any]]:
    """The requested entries, checked; ``stdin`` says whether they may come from it."""
    found: list[dict[str, Any]] = []
    if not asks_for_content(options):
        return found
    if options.manifest:
        found += _read_manifest(options.manifest, stdin=stdin)
    if options.git_repo:
        fields = {"path": options.git_path or _DEFAULT_PATH, "repo": options.git_repo}
        found.append({"gitRepo": fields | ({"ref": options.git_ref} if options.git_ref else {})})
    elif options.git_ref or options.git_path:
        raise errors.InvalidRequest("--git-ref and --git-path need --git-repo")
    from k8e import manifests  # most commands do without

    manifests.from_json(found)  # before a gateway is called
    return found


def _read_manifest(name: str, *, stdin: bool) -> list[dict[str, Any]]:
    if name == "-" and not stdin:
        raise errors.InvalidRequest(
            "--manifest - is for create: the stdin of a run is its code's", hint="name a file"
        )
    try:
        if name == "-":
            data = sys.stdin.buffer.read(_MAX_FILE + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise errors.InvalidRequest(
            f"the manifest {name} cannot be read: {error.strerror}", hint="check the path"
        ) from None
    if len(data) > _MAX_FILE:
        raise errors.LimitExceeded(f"the manifest {name} is longer than {_MAX_FILE} bytes")
    return _parse(data, name)


def _parse(data: bytes, name: str) -> list[dict[str, Any]]:
    import yaml  # takes as long to import as everything else of a run

    try:
        value: Any = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = str(error).replace("\n", " ") or type(error).__name__
        raise errors.InvalidRequest(
            f"the manifest {name} is not YAML: {what}", hint="k8e's documents have an example"
        ) from None
    items: Any = value.get("entries") if isinstance(value, dict) else value  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if not isinstance(items, list) or (isinstance(value, dict) and set(value) != {"entries"}):  # pyright: ignore[reportUnknownArgumentType]
        raise errors.InvalidRequest(
            f"the manifest {name} has no list of entries",
            hint="it begins with 'entries:', and each entry has one of file, dir and gitRepo",
        )
    return items  # pyright: ignore[reportUnknownVariableType]


def refuse_named_session(session_id: str) -> None:
    """Content is for a session that is made for a run, not for an existing one."""
    if session_id:
        raise errors.InvalidRequest(
            "--manifest and --git-repo are for a session that is made for the run, and session "
            f"{session_id[:80]} was named (--session-id, K8E_SANDBOX_SESSION_ID)",
            hint=f"k8e sandbox cp FOLDER {session_id[:80]}:/workspace copies files into it",
        )


def asks_for_content(options: argparse.Namespace) -> bool:
    names = ("manifest", "git_repo", "git_ref", "git_path")
    return any(getattr(options, name) is not None for name in names)


STDIN = "-"
MOST = 4096  # characters; a key has less than a hundred


def api_key(options: argparse.Namespace) -> str | None:
    """The API key of the flags, if any; stdin is read once."""
    given = vars(options)
    path = given.pop("apikey_file", None)
    if path is not None:
        if given.get("apikey"):
            raise _refused("--apikey and --apikey-file are two ways to say the same")
        given["apikey"] = _read_key(path)
    return given.get("apikey")


def _read_key(path: str) -> str:
    try:
        if path == STDIN:
            text = sys.stdin.readline(MOST)
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read(MOST)
    except (OSError, ValueError) as error:
        raise _refused(f"the API key cannot be read from {path}: {error}") from None
    if not text.strip():
        raise _refused(f"there is no API key in {'stdin' if path == STDIN else path}")
    return text.strip()


def _refused(why: str) -> Exception:

    return errors.InvalidRequest(
        why, hint="k8e sandbox login --apikey-file PATH, with the key alone in the file"
    )


_PHASES = ("active", "paused", "creating", "ended", "all")
_STANDING = ("active", "paused")
LIMITS = ("cpus", "memory", "pids", "disk", "inodes", "open_files", "output")


def endpoint(options: argparse.Namespace) -> endpoints.Endpoint:
    return endpoints.resolve(*_chosen(options))


def connect(options: argparse.Namespace) -> SandboxClient:
    endpoint, api_key, profile = _chosen(options)
    return SandboxClient(endpoint, api_key=api_key, profile=profile)


def _chosen(options: argparse.Namespace) -> tuple[str | None, str | None, str | None]:
    """Endpoint, API key and profile of the flags that every command has."""
    given = vars(options)
    return given.get("endpoint"), api_key(options), given.get("profile")


def ask(options: argparse.Namespace, operation: Operation[Any]) -> Any:
    """The result of one operation that the SDK has no method for."""
    pool = driver.Pool(driver.connector(endpoint(options)))
    try:
        running = driver.SyncOperation(pool.take(), operation, None, pool.renew)
        while running.next_event() is not None:
            pass
        running.connection.close()
        return running.result
    finally:
        pool.close()


# Sessions.


def status(options: argparse.Namespace) -> int:
    tenant = cli_parser.tenant(options) or state.DEFAULT_TENANT
    found: dict[str, Any] = {
        "available": True,
        "session_id": "",
        "template": "",
        "tenant_id": tenant,
    }
    try:
        with connect(options) as client:
            client.status()
            found.update(_standing(client, tenant))
    except errors.GatewayUnreachable as error:
        message, hint = output.describe(error)
        output.answer({**found, "available": False, "error": message, "detail": hint})
        output.complain(message, hint)
        return error.exit_code
    output.answer(found)
    return 0


def _standing(client: SandboxClient, tenant: str) -> dict[str, str]:
    """The tenant's standing session; the gateway knows it, whatever the state file says."""
    found = [item for item in client.list_sessions(tenant) if item.auto and item.phase in _STANDING]
    return {"session_id": found[0].session_id, "template": found[0].template} if found else {}


def create(options: argparse.Namespace) -> int:
    content = manifest_entries(options, stdin=True)
    asked = session_options(options)
    asked["manifest"] = content
    asked["secrets"] = cli_parser.pairs(options.secret, "--secret")
    hosts = cli_parser.hosts(options.allowed_hosts)
    with connect(options) as client:
        session_id = client.create_session(
            options.runtime, hosts, tenant_id=cli_parser.tenant(options), **asked
        )
    made = {"entries_materialized": len(content), "pod_ip": "", "session_id": session_id}
    output.answer(made)
    return 0


def session_options(options: argparse.Namespace) -> requests.SessionOptions:
    """The options of a new session, from its flags."""
    limits = {key: getattr(options, key) for key in LIMITS}
    return {
        "env": cli_parser.pairs(options.env, "--env"),
        "labels": cli_parser.pairs(options.label, "--label"),
        "limits": {key: value for key, value in limits.items() if value is not None},
        "lifetime": options.lifetime,
        "idle_timeout": options.idle_timeout,
        "session_id": options.session_id,
        "template": options.template,
    }


def destroy(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.destroy_session(options.session_id)
    state.forget(options.session_id)
    output.answer({"ok": True})
    return 0


def sessions(options: argparse.Namespace) -> int:
    phase = (options.phase or "").lower()
    if phase and phase not in _PHASES:
        raise errors.InvalidRequest(
            f"unknown phase {options.phase[:80]!r}", hint=f"known are {', '.join(_PHASES)}"
        )
    with connect(options) as client:
        found = client.list_sessions(options.tenant, ended=options.all or phase in ("all", "ended"))
    shown = [item for item in found if phase in ("", "all", item.phase)]
    output.answer({"sessions": [_session(item) for item in shown]})
    return 0


def get(options: argparse.Namespace) -> int:
    with connect(options) as client:
        output.answer(_session(client.get_session(options.session_id)))
    return 0


def extend(options: argparse.Namespace) -> int:
    with connect(options) as client:
        output.answer(_session(client.extend_session(options.session_id, options.lifetime)))
    return 0


def _session(info: SessionInfo) -> dict[str, Any]:
    fields = {name: getattr(info, name) for name in info.__match_args__}
    return {name: value for name, value in fields.items() if value is not None}


def add_create(commands: Commands) -> None:
    parser = commands.add(
        "create",
        "make a session and print its id",
        "k8e sandbox create --runtime gvisor --memory 512M --lifetime 3600\n"
        "         k8e sandbox create --allowed-hosts default,api.example.org:443\n"
        "         k8e sandbox create --manifest project.yaml\n"
        "         k8e sandbox create --template data --memory 2G",
        create,
        remote=True,
    )
    add_session_flags(parser)
    add_content_flags(parser, stdin=True)
    parser.add_argument(
        "--secret",
        action="append",
        metavar="ENV=NAME[:KEY]",
        help="a variable whose value is a secret, see k8e secret set; repeatable",
    )


def add_session_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every new session."""
    parser.add_argument("--runtime", default="", help="gvisor or container; by default the best")
    parser.add_argument(
        "--template",
        default="",
        metavar="NAME",
        help="what it is made from; other flags win over the template",
    )
    parser.add_argument(
        "--tenant", metavar="NAME", help="the tenant that it belongs to [K8E_SANDBOX_TENANT]"
    )
    parser.add_argument("--session-id", default="", metavar="ID", help="choose its id")
    parser.add_argument("--memory", metavar="SIZE", help="bytes of memory, like 512M")
    parser.add_argument("--cpus", metavar="N", help="CPUs, like 0.5")
    parser.add_argument("--pids", metavar="N", help="processes and threads")
    parser.add_argument("--inodes", metavar="N", help="files and folders in /workspace")
    parser.add_argument("--open-files", metavar="N", help="open files of one process")
    parser.add_argument(
        "--max-output", dest="output", metavar="SIZE", help="bytes that one run may print, like 1G"
    )
    parser.add_argument("--disk", metavar="SIZE", help="bytes in /workspace, like 1G")
    parser.add_argument(
        "--lifetime", type=float, default=0, metavar="SECONDS", help="destroy it after this long"
    )
    parser.add_argument(
        "--idle-timeout",
        type=float,
        default=0,
        metavar="SECONDS",
        help="destroy it after this long without activity",
    )
    parser.add_argument("--env", action="append", metavar="K=V", help="a variable; repeatable")
    parser.add_argument("--label", action="append", metavar="K=V", help="a label; repeatable")
    cli_parser.add_allowed_hosts(parser, "what it may reach")


def add_content_flags(parser: argparse.ArgumentParser, *, stdin: bool) -> None:
    """The flags for the first content of a new session's workspace."""
    parser.add_argument(
        "--manifest",
        metavar="FILE",
        help="put the files, folders and repositories of a YAML file into /workspace first"
        + ("; - for stdin" if stdin else ""),
    )
    parser.add_argument("--git-repo", metavar="URL", help="put this git repository there, too")
    parser.add_argument(
        "--git-ref", metavar="REF", help="its branch, tag or commit id (default: its HEAD)"
    )
    parser.add_argument("--git-path", metavar="PATH", help="where, below /workspace (default repo)")


def add_status(commands: Commands) -> None:
    parser = commands.add(
        "status",
        "print whether sandboxes are available, and the standing session",
        "k8e sandbox status",
        status,
        remote=True,
    )
    parser.add_argument("--tenant", metavar="NAME", help="whose session [K8E_SANDBOX_TENANT]")


def add_sessions(commands: Commands) -> None:
    parser = commands.add(
        "sessions", "list sessions", "k8e sandbox sessions", sessions, remote=True
    )
    parser.add_argument("--all", action="store_true", help="include sessions that have ended")
    parser.add_argument(
        "--phase",
        metavar="PHASE",
        help="only those that are active, paused, creating, ended; or all",
    )
    parser.add_argument("--tenant", default="", metavar="NAME", help="only this tenant's")


def add_get(commands: Commands) -> None:
    parser = commands.add("get", "show a session", "k8e sandbox get ID", get, remote=True)
    parser.add_argument("session_id", metavar="ID")


def add_extend(commands: Commands) -> None:
    parser = commands.add(
        "extend",
        "let a session live longer",
        "k8e sandbox extend ID --lifetime 3600",
        extend,
        remote=True,
    )
    parser.add_argument("session_id", metavar="ID")
    parser.add_argument(
        "--lifetime", type=float, required=True, metavar="SECONDS", help="counted from now"
    )


def add_destroy(commands: Commands) -> None:
    parser = commands.add(
        "destroy",
        "destroy a session and everything in it",
        "k8e sandbox destroy ID",
        destroy,
        remote=True,
        answers_ok=True,
    )
    parser.add_argument("session_id", metavar="ID")
