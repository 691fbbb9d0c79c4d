"""``k8e gateway``, ``k8e status`` and ``k8e doctor``: run a gateway, query it, repair the host."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from k8e import _version, errors, settings
from k8e.cli import fast, output
from k8e.cli.parser import Commands
from k8e.client import driver, local, operations
from k8e.client.blocking import SandboxClient


def serve(options: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise errors.InvalidRequest(
            "a gateway needs Linux; this host can use one elsewhere",
            hint="k8e sandbox login --endpoint gateway.example:50051, or K8E_SANDBOX_ENDPOINT",
        )
    config = settings.load(
        listen=options.listen,
        http=options.http,
        http_trust_local=True if options.http_trust_local else None,
        data_dir=options.data_dir,
        **({} if options.background else _shared_names()),
    )
    if options.background and options.ready_fd < 0:
        return _start(config)
    # In the background a child becomes the gateway, so that our parent need not reap it.
    if options.background and os.fork():
        return 0
    try:
        # The one line that reaches down into the gateway.
        from k8e.gateway import app
    except ImportError as error:
        return _incomplete(error, options.ready_fd)
    if options.background:
        os.chdir("/")
    return app.run(config, background=options.background, ready_fd=options.ready_fd)


SHARED_NAMES = ("DATABASE_URL", "TOKEN_SIGNING_KEY", "TOKEN_TTL", "SANDBOX_NAMESPACE")
"""Variables that other programs use too: not for a gateway that starts by itself."""


def _shared_names() -> dict[str, Any]:
    """The settings that those variables give, where none of ours does."""
    return {
        name.lower(): None if f"K8E_{name}" in os.environ else os.environ.get(name)
        for name in SHARED_NAMES
    }


def _start(config: settings.Settings) -> int:
    from k8e.client import autostart

    with contextlib.closing(autostart.dial(config)) as sock:
        output.answer(ask(local.Connection(sock), "status"))
    return 0


def _incomplete(error: ImportError, ready_fd: int) -> int:
    from k8e.client import installations

    problem = errors.GatewayUnreachable(
        f"a part of the gateway is missing: {error}", hint=installations.INSTALL
    )
    if ready_fd < 0:
        return output.failure(problem)
    with contextlib.suppress(OSError):
        os.write(ready_fd, json.dumps(problem.to_wire()).encode() + b"\n")
    return problem.exit_code


def ask(connection: driver.Connection, op: str, **fields: Any) -> dict[str, Any]:
    operation = operations.call({"op": op, **fields})
    running = driver.SyncOperation(connection, operation, None)
    running.next_event()
    return running.result


def _connect() -> local.Connection | None:
    """A connection to the gateway of this host, if it runs."""
    try:
        return local.Connection(local.dial(os.fsencode(settings.load().socket)))
    except local.NoGateway:
        return None


def status(options: argparse.Namespace) -> int:
    cluster = _cluster()
    connection = _connect()
    if connection is None:
        told = {"running": False, "socket": str(settings.load().socket)}
        output.answer(told | cluster)
        return errors.GatewayUnreachable.exit_code if not cluster else _health(cluster)
    with contextlib.closing(connection):
        output.answer({"running": True, **ask(connection, "status"), **cluster})
    return _health(cluster)


_CLUSTER_MARKS = ("/etc/k8e/installed.json", "/var/lib/k8e/release.json")
"""What the start of a server or an agent leaves; a first look must load nothing of it."""


def _cluster() -> dict[str, Any]:
    """The state of this machine's cluster, as far as the caller may read it."""
    if not any(os.access(path, os.R_OK) for path in _CLUSTER_MARKS):
        return {}
    from k8e.distro import configuration, status

    return {"cluster": status.read(configuration.last_layout())}


def _health(cluster: dict[str, Any]) -> int:
    return 1 if cluster and cluster["cluster"]["alarms"] else 0


def metrics(options: argparse.Namespace) -> int:
    connection = _connect()
    if connection is None:
        raise errors.GatewayUnreachable(
            f"no gateway listens on {settings.load().socket}",
            hint="k8e gateway starts one; so does the first command that needs it",
        )
    with contextlib.closing(connection):
        fast.write(1, str(ask(connection, "metrics")["text"]).encode("utf-8", "replace"))
    return 0


def stop(options: argparse.Namespace) -> int:
    """Stop the gateway and wait until it is gone."""
    connection = _connect()
    if connection is None and options.destroy:
        connection = _start_again()
    if connection is None:
        _leave_holder()
        output.answer({"ok": True, "running": False, "sessions": 0})
        return 0
    with contextlib.closing(connection):
        pid = int(ask(connection, "status")["pid"])
        process = _open_process(pid)
        left = ask(connection, "stop", destroy=options.destroy)["sessions"]
    if process >= 0:
        _wait(process, pid)
    output.answer({"ok": True, "running": False, "sessions": left})
    return 0


def _leave_holder() -> None:
    """Let go of a dead gateway's holder if it has no sandboxes; so for interrupted checks."""
    run_dir = settings.load().run_dir
    for place in (run_dir, run_dir / "checks"):
        if os.geteuid() != 0 and (place / "holder.json").exists():
            from k8e import rootless, system

            with contextlib.suppress(OSError):  # another user's gateway is not ours to touch
                system.make_own(place)
                rootless.leave(place)


def _start_again() -> local.Connection | None:
    """A gateway that takes over the sessions of a dead one, so that they can be destroyed."""
    from k8e.client import autostart

    config = settings.load()
    known = (config.data_dir / "sessions.db").exists()
    if not known and not any(config.run_dir.glob("sandboxes/sb-*")):
        return None
    return local.Connection(autostart.dial(config))


def repair(options: argparse.Namespace) -> int:
    """Repair databases that a gateway can no longer read."""
    config = settings.load()
    try:
        from k8e.gateway import app
    except ImportError as error:
        return _incomplete(error, -1)
    output.answer({"ok": True, "repaired": app.repair(config)})
    return 0


def migrate(options: argparse.Namespace) -> int:
    """Bring the tables of the database to this release, or one step back."""
    config = settings.load(database_url=_shared_names()["database_url"])
    if not config.database_url:
        raise errors.InvalidRequest(
            "there is no database to migrate: DATABASE_URL is not set",
            hint="SQLite, in the data folder, is brought up to date by the gateway itself",
        )
    try:
        from k8e.postgres import address, migration
    except ImportError as error:
        return _incomplete(error, -1)
    before, after = migration.migrate(address.parse(config.database_url), down=options.down)
    output.answer({"ok": True, "from": before or "empty", "to": after or "empty"})
    return 0


STOP_SECONDS = 60.0


def _open_process(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1  # gone already


def _wait(process: int, pid: int) -> None:
    import select

    poll = select.poll()
    poll.register(process, select.POLLIN)
    ended = poll.poll(STOP_SECONDS * 1000)
    os.close(process)
    if not ended:
        raise errors.K8eError(
            f"the gateway (pid {pid}) was told to stop, but still runs after {STOP_SECONDS:g} s",
            hint="its log says what it is doing; kill it as a last resort, sessions survive that",
        )


def fingerprint(options: argparse.Namespace) -> int:
    """Print the fingerprint that ``login --ca-fingerprint`` takes on another machine."""
    from k8e.client import credentials
    from k8e.client import login as client_login

    path = settings.load().data_dir / "tls" / credentials.CA
    try:
        found = client_login.fingerprint(path.read_text("ascii"))
    except (OSError, ValueError):
        raise errors.InvalidRequest(
            f"there is no CA yet: {path} cannot be read",
            hint="it is made when a gateway with a gRPC endpoint starts: k8e gateway --background",
        ) from None
    output.answer({"ca_file": str(path), "fingerprint": found})
    return 0


def version(options: argparse.Namespace) -> int:
    output.answer({"version": _version.__version__})
    return 0


_MARKS = {True: "yes", False: "no"}
_COLOURS = {True: "\033[32m", False: "\033[31m"}
_PLAIN = "\033[0m"
_DEFAULT_WIDTH = 100
_REMOVAL = "nothing to do: the gateway tries again; restart the machine if it never succeeds"


def doctor(options: argparse.Namespace) -> int:
    """Print the table; 0 if any runtime can be used."""
    with SandboxClient() as client:
        found = client.doctor(fresh=options.fresh)
    if options.json:
        output.answer(found)
    else:
        output.write_lines(doctor_report(found, colours=os.isatty(1)))
    return 0 if any(item["usable"] for item in found["runtimes"]) else 1


def doctor_report(found: dict[str, Any], *, colours: bool) -> Iterator[str]:
    """Each runtime and feature: usable, or why not and how to fix it."""
    rows: list[tuple[str, str, bool, str, str]] = []
    for runtime in found["runtimes"]:
        rows.append((runtime["runtime"], "", runtime["usable"], runtime["detail"], runtime["fix"]))
        rows += [
            ("", item["name"], item["usable"], item["detail"], item["fix"])
            for item in runtime["features"]
        ]
    if egress := found.get("egress"):
        rows.append((egress["name"], "", egress["usable"], egress["detail"], egress["fix"]))
    if disk := found.get("disk"):
        rows.append(("disk", "", *_disk(disk)))
    rows += [
        (f"template {item['name']}", "", False, item["error"], "")
        for item in found.get("broken_templates", ())
    ]
    rows += [
        (item["sandbox_id"], "", False, f"not removed yet: {item['what']}", _REMOVAL)
        for item in found.get("removals", ())
    ]
    cells = [("RUNTIME", "FEATURE", "USABLE", "DETAIL")]
    for name, feature, usable, detail, fix in rows:
        mark = _MARKS[usable]
        if colours:
            mark = _COLOURS[usable] + mark + _PLAIN
        text = detail if not fix else f"{detail} → {fix}" if detail else f"→ {fix}"
        cells.append((name, feature, mark, text))
    width = max(shutil.get_terminal_size((_DEFAULT_WIDTH, 0)).columns, 40)
    yield from output.table(cells, width=width)
    if found.get("warning"):
        yield ""
        yield from textwrap.wrap(f"warning: {found['warning']}", width)


def _disk(told: dict[str, int]) -> tuple[bool, str, str]:
    """Whether workspaces can grow, how much room there is, and how to get more."""
    mib = {name: value >> 20 for name, value in told.items()}
    detail = (
        f"{mib['free']} of {mib['total']} MiB free, {mib['kept_free']} of them stay free; the "
        f"gateway's reserve is {mib['reserve_held']} of {mib['reserve']} MiB"
    )
    if told["held_back"]:
        detail += f"; {told['held_back']} of {told['workspaces']} workspaces cannot grow"
    if told["broken"]:
        detail += f"; {told['broken']} workspaces are broken"
    well = told["free"] > told["kept_free"] and not told["held_back"] and not told["broken"]
    fix = "destroy sessions, remove snapshots and images, or use a larger disk (K8E_DATA_DIR)"
    return well, detail, "" if well else fix


def add_gateway(commands: Commands) -> None:
    parser = commands.add(
        "gateway",
        "serve sandboxes to local and remote clients",
        "k8e gateway\n         k8e gateway stop",
        serve,
    )
    parser.add_argument(
        "--background",
        action="store_true",
        help="start it in the background, and return when it is ready",
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="gRPC address, or none [K8E_LISTEN]")
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="address of /sandbox, /mcp, /a2a and /metrics, or none [K8E_HTTP]",
    )
    parser.add_argument(
        "--http-trust-local",
        action="store_true",
        help="let your own programs use /sandbox without a key [K8E_HTTP_TRUST_LOCAL]",
    )
    parser.add_argument("--data-dir", metavar="PATH", help="state and logs [K8E_DATA_DIR]")
    # For the program that starts a gateway: the gateway writes to it when it is ready.
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    group = parser.commands()
    stop_parser = group.add(
        "stop",
        "stop the gateway; sessions live on and are taken over by the next one",
        "k8e gateway stop --destroy",
        stop,
        answers_ok=True,
    )
    stop_parser.add_argument("--destroy", action="store_true", help="destroy all sessions first")
    group.add(
        "metrics",
        "print the gateway's counters as text for Prometheus",
        "k8e gateway metrics | grep egress",
        metrics,
    )
    group.add(
        "repair",
        "repair damaged databases; the gateway must not be running",
        "k8e gateway repair",
        repair,
        answers_ok=True,
    )
    migrate_parser = group.add(
        "migrate",
        "bring the tables in PostgreSQL (DATABASE_URL) to this release",
        "k8e gateway migrate",
        migrate,
        answers_ok=True,
    )
    migrate_parser.add_argument(
        "--down", action="store_true", help="go back one schema version; its tables are removed"
    )
    group.add(
        "fingerprint",
        "print the fingerprint of the gateway's CA, for k8e sandbox login on another machine",
        "k8e gateway fingerprint",
        fingerprint,
    )


def add_status(commands: Commands) -> None:
    commands.add("status", "show the gateway's state", "k8e status", status)


def add_doctor(commands: Commands) -> None:
    parser = commands.add(
        "doctor",
        "show what works on this host, and how to fix the rest",
        "k8e doctor",
        doctor,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fresh", action="store_true", help="probe everything again")


def add_version(commands: Commands) -> None:
    commands.add("version", "print the version", "k8e version", version)
