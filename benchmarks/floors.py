"""What k8e is compared with: the guest on its own link, and sandboxes without k8e."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Generator
from typing import Any, TypeVar

from k8e import errors
from k8e.guest import wire
from k8e.model import Limits, SandboxSpec, new_id
from k8e.runtimes.base import Binding, Feature, Guest, Support
from k8e.runtimes.host import Host
from k8e.runtimes.oci import OciRuntime
from k8e.settings import Settings

T = TypeVar("T")


class Lone:
    """A sandbox with nothing between us and its guest but the link: no gateway, no session."""

    def __init__(self, runtime: OciRuntime, runner: asyncio.Runner) -> None:
        self._runtime = runtime
        self._runner = runner
        spec = SandboxSpec(sandbox_id=new_id("sb"), limits=Limits(), runtime=runtime.name)
        self.guest: Guest = self._do(runtime.launch(spec))
        self._do(self.guest.bind(Binding(env={})))

    def exec(self, call: dict[str, Any]) -> float:
        """Seconds from sending a call until its EXIT has come back over the link."""
        return self._do(self._exec(call))

    async def _exec(self, call: dict[str, Any]) -> float:
        ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def on_frame(kind: int, body: bytes) -> None:
            if kind == wire.EXIT:
                ended.set_result(time.perf_counter())
            elif kind == wire.ERROR:
                ended.set_exception(errors.from_wire(wire.unpack_dict(body)))

        def on_lost() -> None:
            ended.set_exception(errors.GuestFailed("the link to the guest was lost"))

        link = await self.guest.connect()
        began = time.perf_counter()
        channel = link.open(call, on_frame, on_lost)
        try:
            return await ended - began
        finally:
            channel.close()

    def exec_argv(self, *argv: str) -> list[str]:
        """The command with which the runtime's own program would run ``argv`` in this sandbox."""
        return exec_argv(self._runtime, self.guest.sandbox_id, *argv)

    def close(self) -> None:
        self._do(self.guest.kill())

    def _do(self, work: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await work

        return self._runner.run(wrapped())


@contextlib.contextmanager
def lone(kind: type[OciRuntime], config: Settings, *, tool: str = "") -> Generator[Lone]:
    """A lone sandbox; ``tool`` asks for a program other than the runtime's first choice."""
    config.data_dir.mkdir(parents=True, exist_ok=True)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    host = Host(config)
    host.prepare()
    runtime = kind(host)
    if tool:
        runtime.recall(Support(runtime.name, True, features=[Feature(tool, True)]))
    try:
        with asyncio.Runner() as runner:
            sandbox = Lone(runtime, runner)
            try:
                yield sandbox
            finally:
                sandbox.close()
    finally:
        host.close()


def exec_argv(runtime: OciRuntime, sandbox_id: str, *argv: str) -> list[str]:
    """``runsc exec`` or ``runc exec``, as the user that programs in sandboxes are."""
    return runtime.command("exec", "--user", "1000:1000", sandbox_id, *argv)


def guest_pid(host: Host, sandbox_id: str) -> int:
    """The guest as a process of this host."""
    record = json.loads((host.folder(sandbox_id) / "sandbox.json").read_text("utf-8"))
    return int(record["pid"])
