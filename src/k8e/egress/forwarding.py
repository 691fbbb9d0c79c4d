"""Forwarding for the uplink, without making the host a router between its own networks.

IPv4 has a switch per interface: whether what arrives there may be sent on. Those are used, and the
switch of the whole host stays as it is: a program that needs a router later, such as Docker, finds
the host as it was and prepares it as always. Kernels from 6.17 have the same for IPv6. Older ones
have only the switch of the whole host, which is therefore turned and turned back.

An interface whose switch was turned carries a tag: the kernel keeps a number for each that it does
not use itself. So it is known after any loss of rules, to other gateways too, and can be undone.
What arrives at such an interface is sent on to the uplink and nowhere else: see :class:`Switches`.

Everything here works in the namespace of the calling thread.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from k8e import errors
from k8e.egress.netlink import Netlink, NetworkLink

log = logging.getLogger(__name__)

PREFIX = "k8e-up"  # what the names of all uplinks begin with
FORCE = "force_forwarding"  # IPv6's switch per interface, where the kernel has it
_SETTINGS = Path("/proc/sys/net")
_HOST4, _HOST6 = "ipv4/ip_forward", "ipv6/conf/all/forwarding"
_EVERYWHERE = "ipv4/conf/all/tag"
_TAG, _V4, _V6 = 0x6B386500, 1, 2
# Wires to containers and what joins them: the world is behind them only if a default route says so.
_INNER_KINDS = ("veth", "bridge")


@dataclass(frozen=True)
class Guard:
    """A ban on forwarding packets from ``arriving`` to ``leaving``; both are link indexes."""

    arriving: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


@dataclass(frozen=True)
class Switches:
    """The changes to make, after the rules that guard them are in place."""

    uplink: str
    names4: tuple[str, ...] = ()
    names6: tuple[str, ...] = ()
    whole6: bool = False
    """IPv6 for the whole host, since the kernel cannot do less."""
    guard4: Guard = Guard()
    guard6: Guard = Guard()

    def apply(self) -> None:
        """Tag, then switch; correct settings are not written again."""
        for name in self.names4:
            _tag(name, _V4)
            _write(f"ipv4/conf/{name}/forwarding", 1)
        _write(f"ipv4/conf/{self.uplink}/forwarding", 1)
        for name in self.names6:
            _tag(name, _V6)
            if not self.whole6:
                _write(f"ipv6/conf/{name}/{FORCE}", 1)
        if self.whole6:
            _write(_EVERYWHERE, _TAG | _V6)
            _switch_host6()
        elif _exists(f"ipv6/conf/{self.uplink}/{FORCE}"):
            _write(f"ipv6/conf/{self.uplink}/{FORCE}", 1)


def plan(netlink: Netlink, uplink: str) -> Switches:
    """The changes for ``uplink``; makes none yet."""
    links = [link for link in netlink.links() if link.name != "lo" and not is_uplink(link)]
    found = netlink.addresses()
    with4 = {index for index, address in found if address.version == 4}
    with6 = _with6(found)
    ways = {link.index for link in links if link.kind not in _INNER_KINDS}
    if len(ways) < len(links):
        ways |= netlink.default_links()
    switch4 = _Switch("ipv4/conf/{}/forwarding", _HOST4, _V4)
    names4, guard4 = _per_interface(switch4, links, ways & with4)
    if _exists(f"ipv6/conf/all/{FORCE}"):
        switch6 = _Switch("ipv6/conf/{}/" + FORCE, _HOST6, _V6)
        names6, guard6 = _per_interface(switch6, links, ways & with6)
        return Switches(uplink, names4, names6, guard4=guard4, guard6=guard6)
    closed = _whole_host(links, with6)
    names6 = tuple(link.name for link in closed)
    indexes = tuple(link.index for link in closed)
    guard6 = Guard(indexes, indexes)
    return Switches(uplink, names4, names6, whole6=bool(closed), guard4=guard4, guard6=guard6)


def undo(netlink: Netlink) -> None:
    """Switch off what was switched on, once no uplink is left."""
    links = [link for link in netlink.links() if not is_uplink(link)]
    for link in links:
        bits = _bits(link.name)
        # The host has been made a router since: this switch now belongs to whoever did that.
        if bits & _V4 and not _read(_HOST4):
            _write(f"ipv4/conf/{link.name}/forwarding", 0)
        if bits & _V6 and _exists(f"ipv6/conf/{link.name}/{FORCE}"):
            _write(f"ipv6/conf/{link.name}/{FORCE}", 0)
    if _read(_EVERYWHERE) == _TAG | _V6:
        _undo_host6(netlink, links)
        _write(_EVERYWHERE, 0)
    for link in links:
        if _bits(link.name):
            _write(f"ipv4/conf/{link.name}/tag", 0)


def is_uplink(link: NetworkLink) -> bool:
    return link.name.startswith(PREFIX)


# One switch per interface.


@dataclass(frozen=True)
class _Switch:
    each: str
    host: str
    bit: int


def _per_interface(
    switch: _Switch, links: list[NetworkLink], ways: set[int]
) -> tuple[tuple[str, ...], Guard]:
    """The interfaces to switch, among those that lead to the world, and the guards they need."""
    if _read(switch.host):  # its owner made it a router: nothing to switch or to guard
        return (), Guard()
    tagged = [link for link in links if _bits(link.name) & switch.bit]
    others = [link for link in links if link not in tagged]
    closed = [link for link in others if not _read(switch.each.format(link.name))]
    ours = [*tagged, *(link for link in closed if link.index in ways)]
    leaving = tuple(sorted(link.index for link in [*tagged, *closed]))
    arriving = tuple(sorted(link.index for link in ours))
    return tuple(link.name for link in ours), Guard(arriving, leaving if arriving else ())


# One switch for all of IPv6.


def _whole_host(links: list[NetworkLink], with6: set[int]) -> list[NetworkLink]:
    """The interfaces between which nothing was forwarded before; none on a host that is a router.

    Later interfaces are left alone if a container system may have made them, because that system
    may rely on forwarding by now.
    """
    if _read(_EVERYWHERE) == _TAG | _V6:
        return [link for link in links if link.kind not in _INNER_KINDS or _bits(link.name) & _V6]
    needed = any(link.index in with6 for link in links)
    return links if needed and not _read(_HOST6) else []


def _switch_host6() -> None:
    """Forward, but keep every interface a host's interface in all other respects.

    Turning the host's switch makes each interface a router's, and those forget what router
    advertisements told them, unless ``accept_ra`` says to keep it. Only the host's switch decides
    about forwarding, so the interfaces are set back.
    """
    if _read(_HOST6):
        return
    log.info("switching on forwarding of IPv6")
    folder = _SETTINGS / "ipv6/conf"
    names = [path.name for path in folder.iterdir() if path.name != "all"]
    hosts = [name for name in names if not _read(f"ipv6/conf/{name}/forwarding")]
    listening = [name for name in hosts if _read(f"ipv6/conf/{name}/accept_ra") == 1]
    _write_all((f"ipv6/conf/{name}/accept_ra" for name in listening), 2)
    _write(_HOST6, 1)
    _write_all((f"ipv6/conf/{name}/forwarding" for name in hosts), 0)
    _write_all((f"ipv6/conf/{name}/accept_ra" for name in listening), 1)


def _undo_host6(netlink: Netlink, links: list[NetworkLink]) -> None:
    with6 = _with6(netlink.addresses())
    later = [link.name for link in links if link.index in with6 and not _bits(link.name) & _V6]
    later = [name for name in later if name != "lo"]
    if later:
        log.warning("forwarding of IPv6 stays on, since %s may rely on it", ", ".join(later))
    else:
        _write(_HOST6, 0)


def _with6(found: Iterable[tuple[int, ipaddress.IPv4Address | ipaddress.IPv6Address]]) -> set[int]:
    """The links that have an IPv6 address of more than local use."""
    return {index for index, item in found if item.version == 6 and not item.is_link_local}


# Settings of the kernel.


def _bits(name: str) -> int:
    tag = _read(f"ipv4/conf/{name}/tag")
    return tag ^ _TAG if tag & ~0xFF == _TAG else 0


def _tag(name: str, bit: int) -> None:
    _write(f"ipv4/conf/{name}/tag", _TAG | _bits(name) | bit)


def _exists(file: str) -> bool:
    return (_SETTINGS / file).exists()


def _read(file: str) -> int:
    """Read a setting; 0 if this kernel or interface does not have it."""
    try:
        return int((_SETTINGS / file).read_text("ascii"))
    except (OSError, ValueError):
        return 0


def _write_all(files: Iterable[str], value: int) -> None:
    for file in files:
        _write(file, value)


def _write(file: str, value: int) -> None:
    path = _SETTINGS / file
    if _read(file) == value:
        return
    try:
        path.write_text(str(value), "ascii")
    except FileNotFoundError:
        return  # the interface has just gone, or there is no IPv6
    except OSError as error:
        raise errors.RuntimeUnusable(
            f"the kernel's setting {path} cannot be changed: {error.strerror}",
            hint=f"set it to {value}, or run the gateway where it may",
        ) from None
