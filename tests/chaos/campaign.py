"""Kills a gateway again and again while clients use it, and looks what is left of everything."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import socket
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import ClassVar

from k8e import errors
from k8e.egress import namespaces
from tests.chaos import actions, launcher, leftovers
from tests.chaos.launcher import Fuse
from tests.chaos.world import ALLOWED, FORBIDDEN, PORT, Someone, World, Wrong
from tests.egress.internet import RESOLVER, Internet
from tests.sessions.gateways import Client, Gateways

ROUND_SECONDS = 60.0
GONE_SECONDS = 15.0  # within which everything of a dead gateway is removed
MANY = 1 << 40  # steps that no action has
MOST_PEOPLE = 4
AUDIT_BYTES = 128 << 10  # so few that old rows go, and gateways die at it
STARTING = "start"
"""The moment of a gateway's own start, which can be cut short as well."""


class Greeter(socketserver.BaseRequestHandler):
    """Tells who came, and notes it."""

    seen: ClassVar[set[str]] = set()

    def handle(self) -> None:
        here: str = self.request.getsockname()[0].removeprefix("::ffff:")
        self.seen.add(here)
        self.request.sendall(f"{here}\n".encode())


class Stepping(Gateways):
    """Gateways with a fuse."""

    def __init__(self, folder: Path, **environ: str) -> None:
        super().__init__(**environ)
        self.fuse = Fuse(folder / "fuse")
        self.made = folder / "made"
        self.program = [launcher.__file__]
        self.arguments = [str(folder / "fuse"), str(self.made)]

    def made_by_others(self) -> set[str]:
        """The sandboxes of gateways that are gone."""
        lines = self.made.read_text().splitlines() if self.made.exists() else []
        return {line.split()[1] for line in lines if int(line.split()[0]) != self.pid}

    def all_made(self) -> set[str]:
        lines = self.made.read_text().splitlines() if self.made.exists() else []
        return {line.split()[1] for line in lines}


class Campaign:
    """One gateway after the other, on a small internet, and clients that expect things."""

    def __init__(self, runtime: str, seed: int, *, pool: bool = True, slow: bool = False) -> None:
        self.kinds = [*actions.ALONE, *actions.WITH_ONE]
        if not slow:
            self.kinds = [kind for kind in self.kinds if kind not in actions.SLOW]
        self.world = World(seed, runtime)
        self.random = self.world.random
        self.rounds = 0
        self.steps: dict[str, int] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="k8e-chaos-"))
        self.internet = Internet(self._folder)
        self.internet.own(ALLOWED, FORBIDDEN)
        Greeter.seen.clear()
        self.internet.serve(("::", PORT), Greeter)
        self.gateways = Stepping(
            self._folder,
            K8E_ALLOWED_HOSTS="none",
            K8E_AUDIT_MAX_BYTES=str(AUDIT_BYTES),
            K8E_POOL_MIN="1",
            K8E_POOL_MAX="2" if pool else "0",
            K8E_RESOLVERS=RESOLVER,
            K8E_RUNTIME=runtime,
            K8E_UPLINK_NAMESPACE=str(self.internet.world),
        )
        self.gateways.start().call("doctor")

    # Rounds.

    def round(self, kind: str = "", step: int | None = None, *, alone: bool = False) -> None:
        """Do some things at once, kill the gateway meanwhile, start another, look around."""
        self.rounds += 1
        chosen = self._choose(kind, others=0 if alone else self.random.randrange(3))
        kind = next(iter(chosen))
        if step is None and self.random.random() < 0.3:
            seconds = self.random.uniform(0, 0.8)
            print(f"round {self.rounds}: {', '.join(chosen)}; killed after {seconds:.3f} s")
            self._run(chosen, seconds=seconds)
        else:
            step = self.random.randrange(1 + self.steps[kind]) if step is None else step
            print(f"round {self.rounds}: {', '.join(chosen)}; killed at step {step}")
            self.gateways.fuse.left = step
            self._run(chosen)
        self._start_again()
        self.look()

    def _choose(self, kind: str, others: int) -> dict[str, Callable[[Client], None]]:
        """Up to three actions; each with a family of sessions to itself."""
        wanted = [kind] if kind else [self._any()]
        wanted += [self._any() for _ in range(others)]
        chosen: dict[str, Callable[[Client], None]] = {}
        busy: set[str] = set()
        for name in wanted:
            if name in chosen:
                continue
            found = self._prepare(name, busy)
            if found is not None:
                chosen[name] = found
        return chosen or {"create": self._bound(actions.create, None)}

    def _any(self) -> str:
        if len(self.world.people) < 2:
            return "create"
        names = self.kinds
        if len(self.world.people) >= MOST_PEOPLE:
            names = [name for name in names if name not in ("create", "restore", "have_child")]
            names += ["destroy"] * 3
        return self.random.choice(names)

    def _prepare(self, name: str, busy: set[str]) -> Callable[[Client], None] | None:
        if name in actions.ALONE:
            if name in actions.WITH_SNAPSHOT and not self.world.saved():
                return None
            return self._bound(actions.ALONE[name], None)
        action, phases, children = actions.WITH_ONE[name]
        one = self.world.one(phases, children=children, but=busy)
        if one is None:
            return None
        busy.add(one.parent or one.session_id)
        return self._bound(action, one)

    def _bound(self, action: actions.Action, one: Someone | None) -> Callable[[Client], None]:
        own = random.Random(self.random.random())
        return lambda client: action(actions.Turn(self.world, client, own, one))

    def _run(self, chosen: dict[str, Callable[[Client], None]], seconds: float = 0) -> None:
        failures: list[BaseException] = []

        def act(work: Callable[[Client], None], client: Client) -> None:
            try:
                work(client)
            except (ConnectionError, errors.GatewayUnreachable):
                pass  # the gateway died
            except OSError as error:
                if error.errno != errno.EBADF:  # of a connection that was closed meanwhile
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

        threads: list[threading.Thread] = []
        for work in chosen.values():
            client = self._connected()
            if client is not None:
                threads.append(threading.Thread(target=act, args=(work, client)))
        for thread in threads:
            thread.start()
        until = time.monotonic() + (seconds or ROUND_SECONDS)
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        died = self.gateways.died
        self.gateways.kill()
        for thread in threads:
            thread.join(ROUND_SECONDS)
        if failures:
            raise Wrong(f"{failures[0]!r} (killed before: {died})") from failures[0]

    def _connected(self) -> Client | None:
        try:
            return self.gateways.connect()
        except OSError:
            return None  # it died of an earlier action

    def _start_again(self) -> None:
        """Start another gateway; now and then that one dies at its start, too."""
        for _ in range(2):
            if self.random.random() < 0.15:
                step = self.random.randrange(1 + self.steps[STARTING])
                print(f"    and the next one at step {step} of its start")
                self.gateways.fuse.left = step
                if not self.gateways.start_and_die():
                    break  # it had fewer steps
        self.gateways.fuse.left = launcher.OFF
        if self.gateways.died:
            self.gateways.start()

    def measure(self) -> None:
        """How many steps each action has, with nothing killed."""
        for kind in sorted(self.kinds, key=actions.WITH_SNAPSHOT.__contains__):
            for _ in range(2 if kind == "create" else 1):
                work = self._prepare(kind, set())
                assert work is not None, kind
                self.gateways.fuse.left = MANY
                work(self.gateways.connect())
                self.steps[kind] = MANY - self.gateways.fuse.left
        self.gateways.fuse.left = launcher.OFF
        self.gateways.kill()
        self.gateways.fuse.left = MANY
        self.gateways.start()
        self.steps[STARTING] = MANY - self.gateways.fuse.left
        self.gateways.fuse.left = launcher.OFF
        # A sandbox that waited saves most of them, and is not always there.
        most = max(count for kind, count in self.steps.items() if kind != "probe")
        self.steps["create"] = self.steps["restore"] = most
        self.look()

    def prepare(self, kind: str) -> None:
        """Have what an action of this kind needs, and not many others."""
        client = self.gateways.connect()
        for one in list(self.world.people.values())[:-2]:
            if one.session_id in self.world.people and not one.deadline:
                self._bound(actions.destroy, one)(client)
                self.world.check(client)
        needs = {"resume": "pause", "forget": "save", "restore": "save"}
        while self._prepare(kind, set()) is None:
            work = self._prepare(needs.get(kind, "create"), set()) or self._prepare("create", set())
            assert work is not None
            work(self.gateways.connect())

    # Looking.

    def look(self) -> None:
        """Nothing is lost, nothing is left, and nobody got out."""
        client = self.gateways.connect()
        self.world.check(client)
        if problems := client.call("verify_audit")["problems"]:
            raise Wrong("\n".join(["the audit trail is damaged", *problems]))
        until = time.monotonic() + GONE_SECONDS
        while left := self._left(client):
            if time.monotonic() > until:
                raise Wrong("\n".join(["there is still", *left]))
            time.sleep(0.05)
        if FORBIDDEN in Greeter.seen:
            raise Wrong("a sandbox reached what no policy ever allowed")

    def _left(self, client: Client) -> list[str]:
        listed = client.call("list_sessions")["sessions"]
        by_session = self.gateways.sandboxes()
        live = {by_session[item["session_id"]] for item in listed}
        others = self.gateways.made_by_others()
        net = self.gateways.run_dir / "net"
        owned = live | (self.gateways.all_made() - others)
        return [
            *leftovers.of_sandboxes(others - live, self.gateways.folder),
            *leftovers.of_router(net, owned),
            *self._blobs(),
        ]

    def _blobs(self) -> list[str]:
        folder = self.gateways.data / "snapshots"
        there = list(folder.iterdir()) if folder.exists() else []
        kept = sum(aspect.sure is True for aspect in self.world.snapshots.values())
        return [str(path) for path in there] if len(there) != kept else []

    def close(self) -> None:
        """End everything, and insist that nothing is left of it."""
        made = self.gateways.all_made()
        folder = self.gateways.folder
        self.gateways.fuse.left = launcher.OFF
        code = self.gateways.stop()
        try:
            left = [
                *leftovers.of_sandboxes(made, folder),
                *leftovers.of_folder(folder),
                *self._network_left(),
            ]
            if left or code:
                raise Wrong("\n".join([f"the gateway left with {code}; there is still", *left]))
        finally:
            self.internet.close()
        shutil.rmtree(folder)
        shutil.rmtree(self._folder)

    def _network_left(self) -> list[str]:
        world = self.internet.world
        links = [name for _, name in namespaces.run_in(world, socket.if_nameindex)]
        rules = leftovers.ruleset(world).strip()
        return [f"link {name}" for name in links if name.startswith("k8e")] + (
            [f"rules of the host: {rules}"] if rules else []
        )


def run(runtime: str, seed: int, count: int, *, seconds: float = 1e9, slow: bool = False) -> int:
    """Kill so many gateways, or for so long; how many. Everything that is wrong raises."""
    with _campaign(runtime, seed, slow=slow) as campaign:
        until = time.monotonic() + seconds
        while campaign.rounds < count and time.monotonic() < until:
            campaign.round()
    return campaign.rounds


def sweep(runtime: str, seed: int, kinds: Sequence[str], *, every: int = 1) -> int:
    """Kill a gateway at every step of these actions, or at every so many; how many."""
    with _campaign(runtime, seed, slow=True, pool=False) as campaign:
        for kind in kinds:
            for step in range(seed % every, campaign.steps[kind], every):
                campaign.prepare(kind)
                campaign.round(kind, step, alone=True)
    return campaign.rounds


@contextlib.contextmanager
def _campaign(runtime: str, seed: int, **how: bool) -> Generator[Campaign]:
    print(f"chaos: runtime {runtime}, seed {seed}")
    campaign = Campaign(runtime, seed, **how)
    try:
        campaign.measure()
        yield campaign
    except BaseException:
        print(f"--- the last gateway's log\n{campaign.gateways.log()[-6000:]}", file=sys.stderr)
        with contextlib.suppress(Exception):
            campaign.close()
        raise
    campaign.close()
    steps = ", ".join(f"{name} {count}" for name, count in campaign.steps.items())
    print(f"chaos: {campaign.rounds} gateways killed, nothing lost, nothing left. Steps: {steps}")
