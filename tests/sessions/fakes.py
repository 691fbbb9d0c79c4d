"""A runtime without sandboxes, for what sessions themselves decide."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from k8e import errors, settings
from k8e.link import Link
from k8e.model import Limits, Principal, Rootfs, SandboxSpec
from k8e.runtimes.base import Binding, Guest, Leftover, LendNetwork, RegisteredRuntime, Support
from k8e.runtimes.host import Host
from k8e.runtimes.registry import Runtimes
from k8e.sessions.service import Sessions
from k8e.sessions.store import SessionStore, SqliteSessionStore

PATIENCE = 60.0
ME = Principal("me")
OTHER = Principal("somebody-else")


async def until(holds: Callable[[], object]) -> None:
    """Let everything run until something holds."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.001)


class FakeLink:
    """Takes calls and answers none of them, until it is told to."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.frames: list[tuple[int, bytes]] = []
        self._sinks: list[tuple[Any, Any]] = []

    def check_room(self) -> None:
        """There always is."""

    def open(
        self, call: dict[str, Any], on_frame: Any, on_lost: Any, body: bytes = b""
    ) -> FakeLink:
        self.calls.append(call)
        self._sinks.append((on_frame, on_lost))
        return self

    def send(self, kind: int, body: bytes = b"") -> None:
        self.frames.append((kind, body))

    def close(self) -> None:
        pass

    def answer(self, kind: int, body: bytes = b"") -> None:
        """Send a frame to the newest call."""
        self._sinks[-1][0](kind, body)

    def break_off(self) -> None:
        for _, on_lost in self._sinks:
            on_lost()


class FakeGuest:
    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.talk = FakeLink()
        self.env: dict[str, str] | None = None
        self.hidden: tuple[str, ...] = ()
        self.killed = asyncio.Event()
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.fails_to_die = False
        self.cwd = ""
        self.frozen = False
        self.turns: list[str] = []
        self.fails_to_freeze = False
        self.settled: Mapping[str, Sequence[str]] | None = None
        self.limits: Limits | None = None
        self.unhealthy: Exception | None = None
        self.hits: dict[str, int] = {}
        """How often its kernel held it to each limit."""
        self.answers = asyncio.Event()
        """Binding waits for it."""
        self.answers.set()

    @property
    def link(self) -> Link:
        return cast("Link", self.talk)

    async def connect(self) -> Link:
        return self.link

    async def settle(self, warm: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        self.settled = warm
        return ()

    async def bind(self, binding: Binding) -> None:
        if self.unhealthy is not None:
            raise self.unhealthy
        await self.answers.wait()
        self.limits = binding.limits
        self.env = binding.env
        self.hidden = binding.hidden
        self.cwd = binding.cwd

    async def wait(self) -> str:
        return await asyncio.shield(self.death)

    def limit_hits(self) -> dict[str, int]:
        return dict(self.hits)

    async def freeze(self) -> None:
        await asyncio.sleep(0)
        if self.fails_to_freeze:
            raise errors.ToolFailed("it does not freeze")
        self.frozen = True
        self.turns.append("freeze")

    async def heal_workspace(self) -> bool:
        return False

    async def thaw(self) -> None:
        await asyncio.sleep(0)
        self.frozen = False
        self.turns.append("thaw")

    async def kill(self) -> None:
        self.killed.set()
        if self.fails_to_die:
            raise OSError("something is busy")
        if not self.death.done():
            self.death.set_result("destroyed")

    async def was_killed(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.killed.wait()


class FakeRuntime:
    name = "gvisor"
    networked = False

    def __init__(self) -> None:
        self.launched: list[FakeGuest] = []
        self.specs: list[SandboxSpec] = []
        self.purged: list[str] = []
        self.survivors: list[FakeGuest] = []
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        """Launches wait for it."""
        self.gate.set()
        self.failure: Exception | None = None

    async def probe(self) -> Support:
        return Support(self.name, usable=True)

    def can_change(self, launched: Limits, asked: Limits) -> bool:
        return asked.cpus <= launched.cpus

    async def fetch(self, rootfs: Rootfs) -> None:
        pass

    async def launch(self, spec: SandboxSpec) -> Guest:
        self.specs.append(spec)
        self.asked.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.launched.append(FakeGuest(spec.sandbox_id))
        return self.launched[-1]

    async def adopt(self) -> list[Guest]:
        return list(self.survivors)

    async def purge(self, sandbox_id: str) -> None:
        self.purged.append(sandbox_id)


class FakeRuntimes:
    """The registry, with one runtime that always works."""

    def __init__(self, runtime: FakeRuntime, host: Host) -> None:
        self.disk, self.machine = host.growth, host
        self.all = {runtime.name: runtime}
        self.on_change: list[Callable[[], None]] = []
        self.network_fault = ""
        self._runtime = runtime

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def stronger(self, name: str) -> RegisteredRuntime | None:
        return None

    def use_network(self, lend: LendNetwork) -> None:
        pass

    def leftovers(self) -> list[Leftover]:
        return []

    async def held_disks(self) -> dict[str, str]:
        return {}

    async def adopt(self) -> list[Guest]:
        return await self._runtime.adopt()

    def orphans(self, owned: Collection[str]) -> set[str]:
        return self.machine.remains() - set(owned)

    async def find_greedy(self, sandboxes: Iterable[tuple[str, str]]) -> dict[str, str]:
        return {}

    def excess(self, name: str, limits: Limits) -> str:
        return ""

    def forget(self) -> None:
        pass

    def resolve(self, asked: str) -> str:
        if asked and asked not in ("gvisor", "container"):
            raise errors.InvalidRequest(f"unknown runtime {asked!r}")
        return asked

    async def choose(self, asked: str, default: str = "") -> FakeRuntime:
        self.resolve(asked)
        return self._runtime

    async def purge(self, sandbox_id: str) -> None:
        await self._runtime.purge(sandbox_id)

    def warning(self, *, named: bool = False) -> str:
        return ""


class World:
    """Sessions on a fake runtime, with a real store that outlives them."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        # Nothing of the machine's network is touched, and no sandbox starts unasked.
        environ = {"K8E_ALLOWED_HOSTS": "none", "K8E_POOL_MAX": "0"}
        self.settings = settings.load(environ, data_dir=folder, run_dir=folder, **flags)
        self.runtime = FakeRuntime()
        (folder / "sandboxes").mkdir(exist_ok=True)

    @asynccontextmanager
    async def running(self, shared: SessionStore | None = None) -> AsyncGenerator[Sessions]:
        """Sessions in a store of their own, or in one that others share."""
        store = shared or SqliteSessionStore(self.settings.data_dir / "sessions.db")
        runtimes = cast("Runtimes", FakeRuntimes(self.runtime, Host(self.settings)))
        sessions = Sessions(self.settings, store, runtimes)
        try:
            async with sessions.running():
                yield sessions
        finally:
            store.close()
