"""A host with a neighbour, a container and the internet around it, out of network namespaces."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from k8e.egress import namespaces, uplink
from k8e.egress.netlink import Netlink

PORT = 8000
WEB, WEB6 = "93.184.216.34", "2606:4700::5"
HOST, HOST6 = "203.0.113.2", "2001:db8:1::2"
LAN, LAN6 = "192.168.7.1", "fd00:7::1"
NEIGHBOUR, NEIGHBOUR6 = "192.168.7.2", "fd00:7::2"
BRIDGE, CONTAINER, CONTAINER6 = "172.17.0.1", "172.17.0.2", "fd00:17::2"
REFUSED = "ConnectionRefusedError"
TIMED_OUT = "TimeoutError"
# Long enough for what is dropped to be seen as such, since nothing here takes a millisecond.
BRIEFLY = 0.5

WIRES = f"""
link set lo up
link set wan up
link set lan up
address add {HOST}/24 dev wan
address add {HOST6}/64 dev wan nodad
address add {LAN}/24 dev lan
address add {LAN6}/64 dev lan nodad
route add default via 203.0.113.1
route add default via 2001:db8:1::1
"""
INTERNET = f"""
link set lo up
link set eth0 up
address add 203.0.113.1/24 dev eth0
address add 2001:db8:1::1/64 dev eth0 nodad
address add fe80::1/64 dev eth0 nodad
address add {WEB}/32 dev lo
address add {WEB6}/128 dev lo
route add 192.168.7.0/24 via {HOST}
route add 198.19.0.0/16 via {HOST}
route add fd00:7::/64 via {HOST6}
"""
NEXT_DOOR = f"""
link set lo up
link set eth0 up
address add {NEIGHBOUR}/24 dev eth0
address add {NEIGHBOUR6}/64 dev eth0 nodad
route add default via {LAN}
route add default via {LAN6}
"""
BRIDGED = f"""
link add docker0 type bridge
link set veth0 master docker0
link set docker0 up
link set veth0 up
address add {BRIDGE}/16 dev docker0
address add fd00:17::1/64 dev docker0 nodad
"""
CONTAINED = f"""
link set lo up
link set eth0 up
address add {CONTAINER}/16 dev eth0
address add {CONTAINER6}/64 dev eth0 nodad
route add default via {BRIDGE}
route add default via fd00:17::1
"""
# What Docker makes with iptables, for a container that publishes port 8080.
DOCKER = f"""
table ip filter {{
    chain DOCKER-USER {{ return; }}
    chain FORWARD {{
        type filter hook forward priority filter; policy drop;
        jump DOCKER-USER
        oifname "docker0" ct state established,related accept
        iifname != "docker0" oifname "docker0" ip daddr {CONTAINER} tcp dport {PORT} accept
        iifname "docker0" oifname != "docker0" accept
    }}
}}
table ip6 filter {{
    chain FORWARD {{ type filter hook forward priority filter; policy drop; }}
}}
table ip nat {{
    chain PREROUTING {{
        type nat hook prerouting priority dstnat; policy accept;
        fib daddr type local tcp dport 8080 dnat to {CONTAINER}:{PORT}
    }}
    chain POSTROUTING {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr 172.17.0.0/16 oifname != "docker0" masquerade
    }}
}}
"""


class Service:
    """Tells everybody who connects its name and where they come from, then echoes."""

    def __init__(self, namespace: Path, name: str, port: int = PORT) -> None:
        self.name = name
        self._socket = namespaces.run_in(
            namespace,
            lambda: socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True),
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, source = self._socket.accept()
                threading.Thread(target=self._talk, args=(connection, source), daemon=True).start()

    def _talk(self, connection: socket.socket, source: tuple[str, int]) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            connection.sendall(f"{self.name} {source[0].removeprefix('::ffff:')}\n".encode())
            while data := connection.recv(65536):
                connection.sendall(data)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # accept() would go on after a mere close
        self._socket.close()
        self._thread.join(5)


@dataclass(frozen=True)
class Machine:
    """A network namespace that stands for a machine."""

    path: Path

    def ip(self, commands: str) -> None:
        self.run("ip", "-batch", "-", text=commands)

    def nft(self, commands: str) -> None:
        self.run("nft", "-f", "-", text=commands)

    def ruleset(self) -> str:
        return self.run("nft", "list", "ruleset")

    def run(self, *command: str, text: str = "") -> str:
        done = subprocess.run(
            ["nsenter", f"--net={self.path}", *command],
            input=text,
            capture_output=True,
            timeout=20,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def setting(self, file: str) -> str:
        path = Path("/proc/sys/net", file)
        return namespaces.run_in(self.path, lambda: path.read_text("ascii").strip())

    def set(self, file: str, value: int) -> None:
        path = Path("/proc/sys/net", file)
        namespaces.run_in(self.path, lambda: path.write_text(str(value), "ascii"))

    def settings(self) -> dict[str, str]:
        """Everything about forwarding that k8e might change."""

        def inside() -> dict[str, str]:
            paths = [Path("/proc/sys/net/ipv4/ip_forward")]
            names = ("forwarding", "tag", "force_forwarding", "accept_ra", "disable_ipv6")
            for name in names:
                paths += Path("/proc/sys/net").glob(f"ipv[46]/conf/*/{name}")
            return {str(path): path.read_text("ascii").strip() for path in sorted(paths)}

        return namespaces.run_in(self.path, inside)

    def connect(self, address: str, port: int = PORT, timeout: float = 5) -> socket.socket:
        return namespaces.run_in(
            self.path, lambda: socket.create_connection((address, port), timeout)
        )

    def open(self, address: str, port: int = PORT) -> socket.socket:
        """A connection to a service that has greeted."""
        connection = self.connect(address, port)
        connection.recv(100)
        return connection

    def reach(self, address: str, port: int = PORT, timeout: float = 5) -> str:
        """The greeting of a service, or the error's name."""
        try:
            with self.connect(address, port, timeout) as connection:
                return connection.recv(100).decode().strip()
        except OSError as error:
            return type(error).__name__

    def refused_at(self, address: str, port: int = PORT) -> bool:
        """Whether a connection is refused, and quickly."""
        began = time.monotonic()
        return self.reach(address, port) == REFUSED and time.monotonic() - began < 1

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        made = namespaces.run_in(self.path, lambda: socket.socket(family, kind, protocol))
        made.settimeout(5)
        return made


def echoes(connection: socket.socket) -> bool:
    """Whether a connection is alive."""
    try:
        connection.sendall(b"hello")
        return connection.recv(100) == b"hello"
    except OSError:
        return False


class Host:
    """The host, what is around it, and routers for it."""

    def __init__(self, folder: Path, *, container: bool = False) -> None:
        self._folder = folder
        self._services: list[Service] = []
        self._named: list[str] = []
        self.machine = self._machine("host")
        self.world = self.machine.path
        self.internet = self._machine("internet")
        self.neighbour = self._machine("neighbour")
        self.container = self._machine("container")
        self.router = self._machine("router")
        self._wire("wan", self.internet)
        self._wire("lan", self.neighbour)
        self.machine.ip(WIRES)
        self.internet.ip(INTERNET)
        self.neighbour.ip(NEXT_DOOR)
        self._settle(self.internet, self.neighbour)
        if container:
            self.add_container()
        for name in ("host", "internet", "neighbour"):
            self._services.append(Service(folder / name, name))

    def add_container(self) -> None:
        """What starting Docker and a container does to links."""
        self._wire("veth0", self.container)
        self.machine.ip(BRIDGED)
        self.container.ip(CONTAINED)
        self._settle(self.container)
        self._services.append(Service(self.container.path, "container"))

    def serve(self, machine: Machine, port: int = PORT) -> None:
        self._services.append(Service(machine.path, machine.path.name, port))

    def another_router(self) -> Machine:
        return self._machine("router2")

    def another_world(self) -> Machine:
        return self._machine("elsewhere")

    def _machine(self, name: str) -> Machine:
        namespaces.make(self._folder / name)
        self._named.append(name)
        machine = Machine(self._folder / name)
        # Nobody here has an address twice, and looking for that takes a second.
        for scope in ("all", "default"):
            machine.set(f"ipv6/conf/{scope}/accept_dad", 0)
        return machine

    def _wire(self, name: str, other: Machine) -> None:
        """Between the host's interface ``name`` and the other machine's eth0."""

        def inside(descriptor: int) -> None:
            with contextlib.closing(Netlink()) as netlink:
                netlink.add_veth(name, "eth0", descriptor)

        with open(other.path, "rb") as file:
            namespaces.run_in(self.world, lambda: inside(file.fileno()))

    def _settle(self, *others: Machine) -> None:
        """Have the kernel see at once what is up, or the first packets get lost."""

        def inside() -> None:
            with contextlib.closing(Netlink()) as netlink:
                for link in netlink.links():
                    netlink.link(link.index)

        for machine in (self.machine, *others):
            namespaces.run_in(machine.path, inside)

    def close(self) -> None:
        for service in self._services:
            service.close()
        for name in self._named:
            namespaces.unmount(self._folder / name)


def start_docker(host: Host) -> None:
    host.machine.set("ipv4/ip_forward", 1)
    host.machine.nft(DOCKER)


class Connected:
    """An uplink for as long as a ``with`` lasts; afterwards, nothing may be left of it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __enter__(self) -> str:
        machine = self._host.machine
        self._before = machine.ruleset(), machine.settings(), machine.run("ip", "-br", "link")
        self.name = uplink.connect(self._host.router.path, self._host.world)
        return self.name

    def __exit__(self, kind: object, *_: object) -> None:
        uplink.disconnect(self._host.world, self.name)
        if kind is not None:
            return  # the test has failed already
        machine = self._host.machine
        after = machine.ruleset(), machine.settings(), machine.run("ip", "-br", "link")
        assert after == self._before
