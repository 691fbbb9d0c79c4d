"""``k8e gateway`` and ``k8e status``: be the gateway, start it, ask it, stop it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import Any

from k8e import _version, errors, settings
from k8e.cli import fast, printing
from k8e.client import driving, local, operations


def serve(options: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise errors.InvalidRequest(
            "a gateway needs Linux; this host can use one elsewhere",
            hint="k8e sandbox login --endpoint gateway.example:50051, or K8E_SANDBOX_ENDPOINT",
        )
    config = settings.load(listen=options.listen, http=options.http, data_dir=options.data_dir)
    if options.background and options.ready_fd < 0:
        return _start(config)
    # In the background a child is the gateway, so that whoever started us need not reap it.
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


def _start(config: settings.Settings) -> int:
    from k8e.client import starting

    with contextlib.closing(starting.dial(config)) as sock:
        printing.answer(_ask(local.Connection(sock), "status"))
    return 0


def _incomplete(error: ImportError, ready_fd: int) -> int:
    from k8e.client import installations

    problem = errors.GatewayUnreachable(
        f"a part of the gateway is missing: {error}", hint=installations.INSTALL
    )
    if ready_fd < 0:
        return printing.failure(problem)
    with contextlib.suppress(OSError):
        os.write(ready_fd, json.dumps(problem.to_wire()).encode() + b"\n")
    return problem.exit_code


def _ask(connection: driving.Connection, op: str, **fields: Any) -> dict[str, Any]:
    operation = operations.call({"op": op, **fields})
    running = driving.Running(connection, operation, None)
    running.next_event()
    return running.result


def _connect() -> local.Connection | None:
    """A connection to the gateway of this host, if it runs."""
    try:
        return local.Connection(local.dial(os.fsencode(settings.load().socket)))
    except local.Refused:
        return None


def status(options: argparse.Namespace) -> int:
    connection = _connect()
    if connection is None:
        printing.answer({"running": False, "socket": str(settings.load().socket)})
        return errors.GatewayUnreachable.exit_code
    with contextlib.closing(connection):
        printing.answer({"running": True, **_ask(connection, "status")})
    return 0


def metrics(options: argparse.Namespace) -> int:
    connection = _connect()
    if connection is None:
        raise errors.GatewayUnreachable(
            f"no gateway listens on {settings.load().socket}",
            hint="k8e gateway starts one; so does the first command that needs it",
        )
    with contextlib.closing(connection):
        fast.write(1, str(_ask(connection, "metrics")["text"]).encode("utf-8", "replace"))
    return 0


def stop(options: argparse.Namespace) -> int:
    """Stop the gateway and wait until it is gone."""
    connection = _connect()
    if connection is None and options.destroy:
        connection = _start_again()
    if connection is None:
        _leave_holder()
        printing.answer({"ok": True, "running": False, "sessions": 0})
        return 0
    with contextlib.closing(connection):
        pid = int(_ask(connection, "status")["pid"])
        process = _open_process(pid)
        left = _ask(connection, "stop", destroy=options.destroy)["sessions"]
    if process >= 0:
        _wait(process, pid)
    printing.answer({"ok": True, "running": False, "sessions": left})
    return 0


def _leave_holder() -> None:
    """Let go of what a dead gateway kept for sandboxes, if there are none; so of dead checks."""
    run_dir = settings.load().run_dir
    for place in (run_dir, run_dir / "checks"):
        if os.geteuid() != 0 and (place / "holder.json").exists():
            from k8e import folders, rootless

            with contextlib.suppress(OSError):  # another user's is not ours to touch
                folders.make_own(place)
                rootless.leave(place)


def _start_again() -> local.Connection | None:
    """A gateway that takes over what a dead one left, so that it can be destroyed."""
    from k8e.client import starting

    config = settings.load()
    known = (config.data_dir / "sessions.db").exists()
    if not known and not any(config.run_dir.glob("sandboxes/sb-*")):
        return None
    return local.Connection(starting.dial(config))


def repair(options: argparse.Namespace) -> int:
    """Make usable what a gateway wrote down and cannot read any more."""
    config = settings.load()
    try:
        from k8e.gateway import app
    except ImportError as error:
        return _incomplete(error, -1)
    printing.answer({"ok": True, "repaired": app.repair(config)})
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


def version(options: argparse.Namespace) -> int:
    printing.answer({"version": _version.__version__})
    return 0


def later(options: argparse.Namespace) -> int:
    raise errors.NotImplementedYet(
        f"k8e {options.name} is not part of this release",
        hint="k8e gateway serves sandboxes on this host; Kubernetes comes with a later release",
    )
