"""The gateway as a process: starts, says when it is ready, serves, and leaves cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import resource
import signal
from collections.abc import AsyncGenerator, Generator
from logging.handlers import RotatingFileHandler
from pathlib import Path

from k8e import errors, rootless, system
from k8e.audit.trail import Trail
from k8e.auth.keys import Keys
from k8e.auth.store import Key
from k8e.auth.tokens import subject
from k8e.gateway import audit, local, state, stores
from k8e.gateway.conversations import ConversationCalls
from k8e.gateway.http import endpoint
from k8e.gateway.http.endpoint import HttpEndpoint
from k8e.gateway.images import ImageCalls
from k8e.gateway.ports.exposures import ExposureCalls, Exposures
from k8e.gateway.rpc import endpoint as rpc_endpoint
from k8e.gateway.service import Gateway
from k8e.gateway.stores import Stores
from k8e.gateway.tokens import SandboxTokens, TokenCalls, TokenDesk
from k8e.runtimes.registry import Runtimes, this_machine
from k8e.sessions.approvals import Approvals
from k8e.sessions.exposures import ExposureStore
from k8e.sessions.service import Sessions
from k8e.settings import Settings

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
MAX_SOCKET_PATH = 60
"""Bytes of the run folder's path: sockets below it must fit into 108."""
PID_FILE = "gateway.pid"
"""The file in the run folder that the gateway which runs has locked."""
LOG_BYTES = 16 << 20  # after which the log file is renamed and begun anew


def run(settings: Settings, *, background: bool, ready_fd: int = -1) -> int:
    """Be the gateway until told to stop; the exit code of the process."""
    os.umask(0o077)
    try:
        if os.geteuid() != 0:
            rootless.enter(settings.run_dir, detach=background)
        return _run(settings, background=background, ready_fd=ready_fd)
    except errors.K8eError as error:
        log.error("%s", error)
        _report(ready_fd, json.dumps(error.to_wire()))
        if not background:
            hint = f" ({error.hint})" if error.hint else ""
            os.write(2, f"k8e gateway: {error}{hint}\n".encode())
        return error.exit_code
    finally:
        if background and rootless.inside():
            logging.shutdown()
            rootless.leave(settings.run_dir)


def _run(settings: Settings, *, background: bool, ready_fd: int) -> int:
    _keep_memory()
    # Each session needs a few descriptors; the soft limit is for programs that use select(2).
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _make_folders(settings)
    _log_to(settings.log_file, stderr=not background)
    with _only_one(settings.run_dir):
        asyncio.run(_main(settings, background=background, ready_fd=ready_fd))
    return 0


def repair(settings: Settings) -> list[dict[str, object]]:
    """Repair state with which a gateway cannot start; returns what was done."""
    before = os.umask(0o077)
    try:
        _make_folders(settings)
        with _only_one(settings.run_dir):
            return [item.to_json() for item in state.repair(settings.data_dir)]
    finally:
        os.umask(before)


async def _main(settings: Settings, *, background: bool, ready_fd: int) -> None:
    host = this_machine(settings)
    state.check(settings.data_dir, host.running(), shared=bool(settings.database_url))
    async with stores.opened(settings) as known:
        exposures = ExposureStore(settings.data_dir / "exposures.db")
        trail = Trail(
            settings.data_dir / "audit",
            max_bytes=settings.audit_max_bytes,
            max_age=settings.audit_max_age,
            content=settings.audit_content,
        )
        desk: TokenDesk | None = None
        try:
            await asyncio.to_thread(host.prepare)
            sessions = Sessions(settings, known.sessions, Runtimes(host))
            state.remember(settings.data_dir)
            approvals = Approvals(known.approvals, sessions)
            gateway = Gateway(settings, sessions, approvals, Keys(known.keys))
            _share(gateway, known)
            exposed = Exposures(exposures, sessions)
            gateway.operations.add(ExposureCalls(exposed, sessions))
            gateway.operations.add(ImageCalls(host, sessions))
            desk, renewing = _converse(gateway, known)
            sessions.quotas.sessions_of = gateway.keys.max_sessions
            audit.attach(gateway, trail)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, gateway.stopping.set)
            async with trail.running(), sessions.running():
                await sessions.evictions.sweep(gateway.keys.gone())
                renewing.start()
                async with exposed.running(), _serving(gateway, background=background):
                    log.info("ready on %s", settings.socket)
                    _report(ready_fd, "ready")
                    await _until_stopped(gateway, idle_exit=settings.idle_exit if background else 0)
                state.remember(settings.data_dir)  # also what was made since the start
                for say in list(gateway.farewells):
                    say()  # now: calls that are read later would begin and be lost
                if gateway.destroy_on_stop:
                    await sessions.destroy_all("the gateway was stopped with its sessions")
                await renewing.stop()
                if known.shared is not None and not sessions.count():
                    await known.shared.gateways.leave()
        finally:
            exposures.close()
            if desk is not None:
                desk.close()
            await asyncio.to_thread(host.leave)  # waits for threads that fetch images


def _converse(gateway: Gateway, known: Stores) -> tuple[TokenDesk, SandboxTokens]:
    """Let a gateway have conversations, and tokens for them."""
    sessions, settings = gateway.sessions, gateway.settings
    desk = gateway.tokens = TokenDesk(settings, known, sessions)
    gateway.operations.add(ConversationCalls(desk, sessions, settings.sandbox_namespace))
    gateway.operations.add(TokenCalls(desk, sessions))

    def forget(key: Key) -> None:
        gateway.spawn(desk.evict(key.owner))

    def renew(key: Key) -> None:  # sandboxes go on with the key's new secret
        desk.tell_revoked(subject("owner", key.owner))

    gateway.keys.on_delete.append(forget)
    gateway.keys.on_end.append(renew)
    return desk, SandboxTokens(desk, sessions)


def _share(gateway: Gateway, known: Stores) -> None:
    """Let a gateway take part among others that use the same database."""
    shared = known.shared
    if shared is None:
        return
    evict = gateway.sessions.evictions.evict

    async def end_sessions(key: Key) -> None:
        await evict(key.owner, f"key {key.name} was deleted on another gateway")

    def ended(key: Key) -> None:
        if key.revoked_at:
            gateway.spawn(end_sessions(key))

    known.keys.on_end.append(ended)
    gateway.describe_database = known.describe
    gateway.on_listening.append(
        lambda address: gateway.spawn(shared.gateways.announce(_advertised(gateway, address)))
    )


def _advertised(gateway: Gateway, address: str) -> str:
    """The address by which other machines call this gateway."""
    names = gateway.settings.advertise_names.replace(" ", "").split(",")
    return f"{names[0]}:{address.rpartition(':')[2]}" if names[0] else address


@contextlib.asynccontextmanager
async def _serving(gateway: Gateway, *, background: bool) -> AsyncGenerator[None]:
    """All listeners, for as long as the block runs."""
    path = gateway.settings.socket
    server = await local.listen(gateway, path)
    opening = asyncio.create_task(_open_grpc(gateway, background=background))
    opening_http = asyncio.create_task(endpoint.open_endpoint(gateway, background=background))
    try:
        # A user's first `k8e sandbox run` waits for the unix socket, not for this port.
        if not background:
            await opening
            await opening_http
        yield
    finally:
        # First, while it can still destroy the sessions of its callers.
        await _close(opening_http)
        path.unlink(missing_ok=True)
        server.close()
        await _close(opening)


async def _close(
    opening: asyncio.Task[rpc_endpoint.GrpcEndpoint | None] | asyncio.Task[HttpEndpoint | None],
) -> None:
    """Close an endpoint that is open, or is just being opened."""
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError, errors.K8eError):
        endpoint = await opening
        if endpoint is not None:
            await endpoint.close()


async def _open_grpc(gateway: Gateway, *, background: bool) -> rpc_endpoint.GrpcEndpoint | None:
    """The gRPC endpoint; in the background, the lack of it is only told."""
    if gateway.settings.listen == "none":
        gateway.listening_on = "none"
        return None
    try:
        endpoint = await rpc_endpoint.listen(gateway)
    except errors.K8eError as error:
        if not background:
            raise
        log.warning("no gRPC endpoint: %s", error)
        gateway.listening_on = f"none: {error}"
        return None
    gateway.listening_on = endpoint.address
    log.info("gRPC on %s", endpoint.address)
    for tell in gateway.on_listening:
        tell(endpoint.address)
    return endpoint


async def _until_stopped(gateway: Gateway, *, idle_exit: float) -> None:
    """Wait for a signal, a stop call, or (in the background) for having nothing to do."""
    if not idle_exit:
        await gateway.stopping.wait()
        return
    idle_for = 0.0
    step = max(0.1, idle_exit / 4)
    while idle_for < idle_exit:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(step):
                await gateway.stopping.wait()
                return
        working = gateway.sessions.count() or gateway.sessions.leftovers()
        busy = working or gateway.connections
        idle_for = 0.0 if busy else idle_for + step
    log.info("leaving after %g s with nothing to do", idle_exit)


def _keep_memory() -> None:
    """Use the memory of one chunk for the next: new pages cost more than copying into them."""
    with contextlib.suppress(AttributeError):  # not every libc can be told
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 8 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 16 << 20)


def _make_folders(settings: Settings) -> None:
    for folder in (settings.data_dir, settings.run_dir):
        # Sandboxes with uids of their own pass through the data folder to their root file
        # system; everything else in it is closed to them by our umask.
        mode = 0o711 if folder == settings.data_dir else 0o700
        try:
            marks = {state.MADE, state.SESSIONS, PID_FILE}
            # What its user, or the client that starts it, puts there.
            early = {"config.toml", "templates", settings.log_file.name}
            system.make_with_rights(folder, mode, marks, early)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            raise errors.InvalidRequest(
                f"the folder {folder} cannot be used: {error.strerror or error}",
                hint=errors.folder_hint(
                    error, "name folders of the gateway's own with K8E_DATA_DIR and K8E_RUN_DIR"
                ),
            ) from None
    if len(os.fsencode(settings.run_dir)) > MAX_SOCKET_PATH:
        raise errors.InvalidRequest(
            f"the run folder's path {settings.run_dir} is longer than {MAX_SOCKET_PATH} bytes",
            hint="set K8E_RUN_DIR to a shorter one",
        )


@contextlib.contextmanager
def _only_one(run_dir: Path) -> Generator[None]:
    """Hold the gateway's lock; the kernel lets go of it however we end."""
    with open(run_dir / PID_FILE, "a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise errors.Conflict(
                f"a gateway is running already (pid {file.read().strip() or 'unknown'})",
                hint="k8e gateway stop ends it",
            ) from None
        file.truncate(0)
        file.write(f"{rootless.outer_pid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _log_to(path: Path, *, stderr: bool) -> None:
    handlers: list[logging.Handler] = [
        RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    ]
    if stderr:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=handlers,
        force=True,
    )


def _report(ready_fd: int, line: str) -> None:
    """Write a line to the process that started us."""
    if ready_fd >= 0:
        with contextlib.suppress(OSError):
            os.write(ready_fd, line.encode() + b"\n")
            os.close(ready_fd)
