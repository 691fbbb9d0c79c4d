"""``k8e sandbox …``: each command is a call of the SDK and a line of JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from k8e import errors
from k8e.cli import fast, keyfiles, manifests, parsing, printing, state
from k8e.client import driving, endpoints, operations, requests
from k8e.client.blocking import SandboxClient
from k8e.client.operations import Operation
from k8e.client.results import SessionInfo
from k8e.guest import wire

_PHASES = ("active", "paused", "creating", "ended", "all")
_STANDING = ("active", "paused")
LIMITS = ("cpus", "memory", "pids", "disk", "inodes", "open_files", "output")


def endpoint(options: argparse.Namespace) -> endpoints.Endpoint:
    return endpoints.resolve(*_chosen(options))


def connect(options: argparse.Namespace) -> SandboxClient:
    endpoint, api_key, profile = _chosen(options)
    return SandboxClient(endpoint, api_key=api_key, profile=profile)


def _chosen(options: argparse.Namespace) -> tuple[str | None, str | None, str | None]:
    """What the flags of every command say about the gateway."""
    given = vars(options)
    return given.get("endpoint"), keyfiles.api_key(options), given.get("profile")


def ask(options: argparse.Namespace, operation: Operation[Any]) -> Any:
    """The result of one operation that the SDK has no method for."""
    pool = driving.Pool(driving.connector(endpoint(options)))
    try:
        running = driving.Running(pool.take(), operation, None, pool.renew)
        while running.next_event() is not None:
            pass
        running.connection.close()
        return running.result
    finally:
        pool.close()


# Running.


def run(options: argparse.Namespace) -> int:
    chosen = fast.defaults()
    chosen.update(
        language=options.lang or chosen["language"],
        timeout=_timeout(options),
        runtime=options.runtime,
        template=options.template,
        cwd=options.cwd,
        raw=options.raw,
        stdin=options.stdin,
        env=parsing.pairs(options.env, "--env"),
        session_id=options.session_id or chosen["session_id"],
        tenant=options.tenant or chosen["tenant"],
        allowed_hosts=parsing.hosts(options.allowed_hosts),
    )
    chosen["code"] = _code(options)
    if manifests.is_asked(options):
        _prepare(options, chosen)
    if options.context:
        from k8e.cli import contexts

        return contexts.run(options, chosen, language=options.lang)
    target = endpoint(options)
    if options.background:
        from k8e.cli import runs

        return runs.start(options, chosen)
    if not target.target and not target.socket:
        return fast.execute(chosen)
    return fast.execute(chosen, driving.connector(target).connect)


def _prepare(options: argparse.Namespace, chosen: dict[str, Any]) -> None:
    """Have the tenant's standing session made with the content that is asked for."""
    manifests.refuse_named_session(chosen["session_id"])
    fast.check(chosen)
    tenant = chosen["tenant"] or state.DEFAULT_TENANT
    session = fast.fields(chosen, "")["session"]
    session["spec"]["manifest"] = manifests.entries(options, stdin=False)
    told = ask(options, operations.call({"op": "ping", "session": session}))
    chosen.update(session_id=str(told["session_id"]), allowed_hosts=None, template="")
    fast.note_session(tenant, chosen["session_id"])


def _timeout(options: argparse.Namespace) -> float:
    if options.timeout is not None:
        return options.timeout
    return 0 if options.background else fast.DEFAULT_TIMEOUT


def _code(options: argparse.Namespace) -> bytes:
    """The code from the argument, a file or stdin; of too much only as much as shows that."""
    if options.code not in (None, "-"):
        if options.file:
            raise errors.InvalidRequest("there is code in an argument and in --file")
        return options.code.encode("utf-8", "surrogateescape")
    if options.file:
        with open(options.file, "rb") as file:
            return file.read(wire.MAX_CODE + 1)
    if options.stdin:
        raise errors.InvalidRequest(
            "stdin cannot be both the code and the input of the code",
            hint="with --stdin, pass the code as argument or with --file",
        )
    if options.code is None and os.isatty(0):
        raise errors.InvalidRequest(
            "there is no code", hint='pass it as argument: k8e sandbox run "echo hello"'
        )
    return sys.stdin.buffer.read(wire.MAX_CODE + 1)


# Sessions.


def status(options: argparse.Namespace) -> int:
    tenant = parsing.tenant(options) or state.DEFAULT_TENANT
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
        message, hint = printing.describe(error)
        printing.answer({**found, "available": False, "error": message, "detail": hint})
        printing.complain(message, hint)
        return error.exit_code
    printing.answer(found)
    return 0


def _standing(client: SandboxClient, tenant: str) -> dict[str, str]:
    """The tenant's standing session; the gateway knows it, whatever the state file says."""
    found = [item for item in client.list_sessions(tenant) if item.auto and item.phase in _STANDING]
    return {"session_id": found[0].session_id, "template": found[0].template} if found else {}


def create(options: argparse.Namespace) -> int:
    content = manifests.entries(options, stdin=True)
    asked = session_options(options)
    asked["manifest"] = content
    asked["secrets"] = parsing.pairs(options.secret, "--secret")
    hosts = parsing.hosts(options.allowed_hosts)
    with connect(options) as client:
        session_id = client.create_session(
            options.runtime, hosts, tenant_id=parsing.tenant(options), **asked
        )
    made = {"entries_materialized": len(content), "pod_ip": "", "session_id": session_id}
    printing.answer(made)
    return 0


def session_options(options: argparse.Namespace) -> requests.SessionOptions:
    """What the flags of a new session say."""
    limits = {key: getattr(options, key) for key in LIMITS}
    return {
        "env": parsing.pairs(options.env, "--env"),
        "labels": parsing.pairs(options.label, "--label"),
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
    printing.answer({"ok": True})
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
    printing.answer({"sessions": [_session(item) for item in shown]})
    return 0


def get(options: argparse.Namespace) -> int:
    with connect(options) as client:
        printing.answer(_session(client.get_session(options.session_id)))
    return 0


def extend(options: argparse.Namespace) -> int:
    with connect(options) as client:
        printing.answer(_session(client.extend_session(options.session_id, options.lifetime)))
    return 0


def _session(info: SessionInfo) -> dict[str, Any]:
    fields = {name: getattr(info, name) for name in info.__match_args__}
    return {name: value for name, value in fields.items() if value is not None}


# Files.


def write(options: argparse.Namespace) -> int:
    with connect(options) as client:
        client.write_file(options.session_id, options.path, _stdin(), append=options.mode == "a")
    printing.answer({"ok": True, "path": options.path})
    return 0


def _stdin() -> Iterator[bytes]:
    while data := os.read(0, wire.CHUNK):
        yield data


def read(options: argparse.Namespace) -> int:
    with connect(options) as client:
        chunks = client.read_chunks(options.session_id, options.path)
        if options.raw:
            for chunk in chunks:
                fast.write(1, chunk)
            return 0
        content = b"".join(chunks).decode("utf-8", "replace")
    printing.answer({"content": content, "path": options.path})
    return 0


def list_files(options: argparse.Namespace) -> int:
    with connect(options) as client:
        found = client.list_files(options.session_id, options.since)
    printing.answer({"files": [{"modified": item.modified, "path": item.path} for item in found]})
    return 0
