"""Finding out what a cluster lets us do, by asking it, and then by a real sandbox."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from k8e import errors, link
from k8e.guest import wire
from k8e.model import MIB, Limits, Rootfs, SandboxSpec, new_id
from k8e.runtimes.base import Binding, Feature, Guest, Support
from k8e.runtimes.kubernetes import objects

if TYPE_CHECKING:
    from k8e.runtimes.kubernetes.runtime import Kubernetes

ASK_SECONDS = 20.0
_LIMITS = Limits(cpus=1, memory=128 * MIB, pids=64, disk=8 * MIB)
_RIGHTS_FIX = "let the gateway's account do that: docs/howto/kubernetes.md has the rules"
_DIAL = (
    "import socket,sys\n"
    "s=socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET)\n"
    "s.settimeout(3)\n"
    "sys.exit(0 if s.connect_ex((sys.argv[1],int(sys.argv[2])))==0 else 7)\n"
)
_UNREACHED = 7


async def probe(runtime: Kubernetes) -> Support:
    """Whether sandboxes of a runtime work in its cluster, and why not."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            fault = await _fault(runtime)
            network = await runtime.cluster.network()
    except TimeoutError:
        return Support(runtime.name, False, f"the API server did not answer in {ASK_SECONDS:g} s")
    except (errors.K8eError, OSError) as error:
        return Support(runtime.name, False, str(error), getattr(error, "hint", ""))
    if fault is not None:
        return fault
    return await _try(runtime, network)


async def _fault(runtime: Kubernetes) -> Support | None:
    """What is missing before a sandbox can be tried."""
    cluster, name = runtime.cluster, runtime.name
    if await cluster.runtime_class(name) is None:
        known = ", ".join(await cluster.runtime_classes()) or "none"
        fix = "install it on the nodes and make its RuntimeClass, or use one that is there"
        detail = f"the cluster has no RuntimeClass {name!r}; there is: {known}"
        return Support(name, False, detail, fix)
    if not await cluster.serves_claims():
        detail = "the cluster does not know agent-sandbox's resources"
        return Support(name, False, detail, "install the controller: docs/howto/agent-sandbox.md")
    if missing := await cluster.missing_rights():
        detail = f"the gateway may not: {', '.join(missing)}"
        return Support(name, False, detail, _RIGHTS_FIX)
    runtime.recipe(_LIMITS, Rootfs())  # says what is not set
    return None


async def _try(runtime: Kubernetes, network: str) -> Support:
    """Start a sandbox, and look at what it can do and must not."""
    began = time.monotonic()
    spec = SandboxSpec(sandbox_id=new_id("sb"), limits=_LIMITS, runtime=runtime.name)
    try:
        guest = await runtime.launch(spec)
        try:
            found = time.monotonic()
            await guest.bind(Binding(env={}, warm={}))
            features = await _features(runtime, guest, network)
        finally:
            await asyncio.shield(guest.kill())
    except (errors.K8eError, OSError, TimeoutError) as error:
        return Support(runtime.name, False, str(error), getattr(error, "hint", ""))
    took = (found - began) * 1000
    open_ones = [item for item in features if not item.usable]
    if open_ones:
        return Support(runtime.name, False, open_ones[0].detail, open_ones[0].fix, features)
    detail = f"a pod's guest answered after {took:.0f} ms"
    return Support(runtime.name, True, detail, "", features)


async def _features(runtime: Kubernetes, guest: Guest, network: str) -> list[Feature]:
    ready = await guest.connect()
    if code := await _run(ready, ["/bin/sh", "-c", "id -u >/dev/null && test -w /workspace"]):
        raise errors.RuntimeUnusable(f"a program in the sandbox failed with exit code {code}")
    address, port = await runtime.cluster.server_address()
    code = await _run(ready, [*objects.PYTHON, "-c", _DIAL, address, str(port)])
    if code == _UNREACHED:
        detail = f"a sandbox does not reach the API server ({network or 'an unknown network'})"
        return [Feature("network policy", True, detail)]
    if code:
        raise errors.RuntimeUnusable(f"trying the network failed with exit code {code}")
    return [
        Feature(
            "network policy",
            False,
            "the cluster's network enforces no NetworkPolicy: a sandbox reaches the API server",
            "use a network that does, such as Cilium (k8e server --cni cilium)",
        )
    ]


async def _run(ready: link.Link, argv: list[str]) -> int:
    """The exit code of a program in the sandbox."""
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_frame(kind: int, body: bytes) -> None:
        if done.done():
            return
        if kind == wire.EXIT:
            done.set_result(int(wire.unpack_dict(body)["code"]))
        elif kind == wire.ERROR:
            done.set_exception(errors.from_wire(wire.unpack_dict(body)))

    def on_lost() -> None:
        if not done.done():
            done.set_exception(errors.GuestFailed("the link to the guest was lost"))

    channel = ready.open({"op": "exec", "argv": argv, "timeout": 10.0}, on_frame, on_lost)
    try:
        return await done
    finally:
        channel.close()
