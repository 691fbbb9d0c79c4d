"""What a policy costs: HTTP of a live sandbox with and without one, and the making of a network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from benchmarks import stage as stages
from benchmarks import world
from benchmarks.serving import Gateway
from benchmarks.stage import Stage
from k8e import SandboxClient
from k8e.bench.measure import Goal, Series, TableRow
from k8e.egress import namespaces
from k8e.egress.dns import Upstream
from k8e.egress.nftables import Nftables
from k8e.egress.policy import parse_policy
from k8e.egress.rules import TABLE
from k8e.egress.service import Egress

ROUNDS = 16
REQUESTS = 150
SIZE = 200 << 20
ALIVE = 200
SLOTS = 50
# Run in the sandbox: new connections with a small answer each, then one large download.
CLIENT = f"""
import json, socket, time
address = socket.getaddrinfo({world.NAME!r}, 80, socket.AF_INET)[0][4]
def get(size):
    with socket.create_connection(address) as c:
        c.sendall(f"GET /{{size}} HTTP/1.1\\r\\nHost: {world.NAME}\\r\\n\\r\\n".encode())
        left, buffer = size, bytearray(1 << 20)
        got = c.recv_into(buffer)
        left -= got - buffer.index(b"\\r\\n\\r\\n") - 4
        while left > 0:
            left -= c.recv_into(buffer)
took = []
for _ in range({REQUESTS}):
    began = time.perf_counter()
    get(100)
    took.append(time.perf_counter() - began)
began = time.perf_counter()
get({SIZE})
download = time.perf_counter() - began
print(json.dumps({{"request": sorted(took)[len(took) // 2], "download": download}}))
"""
# What judges packets; with a rule at its head that accepts all, nothing does.
CHAINS = ("arrive", "divert", "forward")
BYPASS = "bypass"


def measure(stage: Stage) -> Iterator[TableRow]:
    with world.made(stage.folder / "world") as uplink:
        for runtime in stage.runtimes:
            yield from _traffic(stage, uplink, runtime)
        yield from asyncio.run(_slots(stage, uplink))


@contextlib.contextmanager
def _serving(stage: Stage, name: str, uplink: Path) -> Generator[tuple[SandboxClient, Path]]:
    """A gateway whose sandboxes live in our world, and the folder of its networks."""
    config = stages.make_settings(stage.folder / name)
    extra = {"K8E_UPLINK_NAMESPACE": str(uplink), "K8E_RESOLVERS": world.RESOLVER}
    gateway = Gateway(config, stages.environment(config, HOME=str(stage.folder), **extra))
    try:
        with SandboxClient(f"unix:{config.socket}") as client:
            yield client, config.run_dir / "net"
    finally:
        gateway.stop()


def _traffic(stage: Stage, uplink: Path, runtime: str) -> Iterator[TableRow]:
    took: dict[str, dict[str, list[float]]] = {}
    with _serving(stage, runtime, uplink) as (client, network):
        router = network / "router"
        ours = client.create_session(runtime, [world.NAME])
        strict = client.create_session(runtime, ["strict", world.NAME])

        def without() -> dict[str, float]:
            # The same sandbox and the same wires: two of the same kind differ by a tenth.
            namespaces.run_in(router, _insert_bypass)
            try:
                return _run(client, ours)
            finally:
                namespaces.run_in(router, _remove_bypass)

        contenders = {
            "policy": lambda: _run(client, ours),
            "without policy": without,
            "strict": lambda: _run(client, strict),
        }
        for turn in range(-1, stage.rounds(ROUNDS)):
            for name in sorted(contenders, reverse=bool(turn % 2)):
                for what, seconds in contenders[name]().items():
                    if turn >= 0:
                        took.setdefault(name, {}).setdefault(what, []).append(seconds)
    yield from _rows(runtime, took)


def _run(client: SandboxClient, session_id: str) -> dict[str, float]:
    done = client.run(CLIENT, "python", session_id=session_id, timeout=120)
    return json.loads(done.stdout)


def _insert_bypass() -> None:
    nft = Nftables()
    lines = (f'insert rule {TABLE} {chain} accept comment "{BYPASS}"' for chain in CHAINS)
    nft.run("\n".join(lines))
    nft.close()


def _remove_bypass() -> None:
    nft = Nftables()
    for chain in CHAINS:
        listed = json.loads(nft.run_json(f"list chain {TABLE} {chain}"))["nftables"]
        rules = [item["rule"] for item in listed if "rule" in item]
        for rule in rules:
            if rule.get("comment") == BYPASS:
                nft.run(f"delete rule {TABLE} {chain} handle {rule['handle']}")
    nft.close()


def _rows(runtime: str, took: dict[str, dict[str, list[float]]]) -> Iterator[TableRow]:
    peer = took["without policy"]
    for name, bars in (
        ("policy", (Goal("most", 0.2), Goal("ratio", 1.1))),
        ("strict", (None, None)),
    ):
        pairs = zip(took[name]["request"], peer["request"], strict=True)
        added = [(ours - theirs) * 1000 for ours, theirs in pairs]
        yield TableRow(
            "egress", runtime, Series(f"{name}: added to a request", "ms", added), bar=bars[0]
        )
        ours, theirs = (
            Series(f"{label}: request", "ms", [s * 1000 for s in took[label]["request"]])
            for label in (name, "without policy")
        )
        yield TableRow("egress", runtime, ours, theirs)
        ours, theirs = (
            Series(f"{label}: {SIZE >> 20} MiB", "ms", [s * 1000 for s in took[label]["download"]])
            for label in (name, "without policy")
        )
        yield TableRow("egress", runtime, ours, theirs, bars[1])


async def _slots(stage: Stage, uplink: Path) -> list[TableRow]:
    """A sandbox's network made anew, and taken from those that are kept ready."""
    count, alive = stage.rounds(SLOTS), stage.rounds(ALIVE)
    upstreams = [Upstream(world.RESOLVER)]
    # In memory, where a gateway's run folder is too.
    folder = Path(tempfile.mkdtemp(prefix="k8e-b-", dir="/run"))
    egress = Egress(folder, world=uplink, upstreams=upstreams, spare=0)
    policy = parse_policy([world.NAME, "*.bench.test:443", "192.88.0.0/16:80"])
    names: list[str] = []

    async def timed() -> float:
        names.append(f"sb-{len(names)}")
        began = time.perf_counter()
        await egress.attach(names[-1])
        await egress.bind(names[-1], policy)
        return (time.perf_counter() - began) * 1000

    await egress.start(set())
    try:
        for _ in range(alive):
            await timed()
        new = [await timed() for _ in range(count)]
        await egress.prepare(count)
        ready = [await timed() for _ in range(count)]
        least = [await asyncio.to_thread(_bare_namespace, folder / "bare") for _ in range(count)]
    finally:
        for name in names:
            await egress.detach(name)
        await egress.close()
        shutil.rmtree(folder)
    note = f"with {alive} sandboxes alive"
    floor = Series("a network namespace, and nothing in it", "ms", least)
    rows = [("made anew", new, 15), ("from a ready slot", ready, 1)]
    return [
        TableRow(
            "egress", "", Series(f"network {name}", "ms", took), floor, Goal("most", bar), note=note
        )
        for name, took, bar in rows
    ]


def _bare_namespace(path: Path) -> float:
    began = time.perf_counter()
    namespaces.make(path)
    took = (time.perf_counter() - began) * 1000
    namespaces.unmount(path)
    return took
