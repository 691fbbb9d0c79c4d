"""Other firewalls of the host: read as the kernel has them, and passed by two rules of ours each.

A packet must pass the chains of every table, so a firewall that drops what is forwarded (Docker's
does, and firewalld's, and ufw's) gets two rules at the head of its own chain. They carry the
uplink's name as a comment, and nothing but what ``iptables`` understands: it gives up a chain in
which it finds anything else, such as the state of a connection, and Docker with it. They need no
more, since the uplink's own table has already dropped unrequested packets.

Rules are read without libnftables, which would have to understand all of them.
Everything here works in the namespace of the calling thread.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from k8e.egress import netlink
from k8e.egress.netlink import attributes
from k8e.egress.nftables import Nftables, NftFailed

log = logging.getLogger(__name__)

NETLINK_NETFILTER = 12
INET = 1
FAMILIES = {INET: "inet", 2: "ip", 10: "ip6"}
NFT = 10 << 8  # the subsystem
GETTABLE, GETCHAIN, GETRULE = NFT | 1, NFT | 4, NFT | 7
TABLE, RULE_CHAIN, RULE_HANDLE, RULE_EXPRESSIONS, RULE_USERDATA = 1, 2, 3, 4, 7
CHAIN_NAME, CHAIN_HOOK, CHAIN_POLICY, CHAIN_TYPE = 3, 4, 5, 7
NAME, DATA = 1, 2  # of an expression
FORWARD, NF_DROP = 2, 0
UPLINK_NAME = re.compile(r"k8e-up[0-9]+")
_PROGRAM_SECONDS = 10


@dataclass(frozen=True)
class Chain:
    """A chain that filters forwarded packets."""

    family: int
    table: str
    name: str
    drops: bool
    """What none of its rules decides about."""

    def __str__(self) -> str:
        return f"{FAMILIES[self.family]} {self.table} {self.name}"


@dataclass(frozen=True)
class FirewallRule:
    """The parts of a rule that matter here."""

    chain: str
    handle: int
    comment: str
    drops: bool
    """Whether it may end the way of a packet."""


class Firewall:
    """The rules of nftables in this namespace."""

    def __init__(self, nft: Nftables) -> None:
        self._nft = nft
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.settimeout(5)

    def close(self) -> None:
        self._socket.close()

    def tables(self) -> set[str]:
        """The names of the tables of uplinks."""
        names = (_text(attributes(body[4:])[TABLE]) for body in self._dump(GETTABLE))
        return {name for name in names if UPLINK_NAME.fullmatch(name)}

    def chains(self) -> list[Chain]:
        """Other programs' chains that filter forwarded packets."""
        found = [_chain(body) for body in self._dump(GETCHAIN)]
        return [item for item in found if item and not UPLINK_NAME.fullmatch(item.table)]

    def rules(self, family: int, table: str, chain: str = "") -> list[FirewallRule]:
        """The rules of a table, or of one of its chains, in order."""
        body = netlink.attribute(TABLE, table.encode() + b"\0")
        if chain:
            body += netlink.attribute(RULE_CHAIN, chain.encode() + b"\0")
        return [_rule(attributes(item[4:])) for item in self._dump(GETRULE, family, body)]

    def let_through(self, name: str) -> None:
        """Make the host's other firewalls accept the traffic of the uplink ``name``."""
        for chain in self.chains():
            try:
                self._pass(chain, name)
            except NftFailed as error:
                self._pass_again(chain, name, error)
        _legacy(name, wanted=True)

    def withdraw(self, name: str) -> None:
        """Remove everything of the uplink ``name`` that there is."""
        self._try(f"delete table inet {name}", self.tables() & {name})
        for chain in self.chains():
            rules = self.rules(chain.family, chain.table, chain.name)
            handles = [rule.handle for rule in rules if rule.comment == name]
            self._try(_delete(chain, handles), handles)
        _legacy(name, wanted=False)

    def forgotten(self, alive: set[str]) -> set[str]:
        """Uplinks that left rules behind and are not ``alive``."""
        found = self.tables()
        for chain in self.chains():
            rules = self.rules(chain.family, chain.table, chain.name)
            found |= {rule.comment for rule in rules if UPLINK_NAME.fullmatch(rule.comment)}
        return found - alive

    def _may_drop(self, chain: Chain, rules: list[FirewallRule]) -> bool:
        """Whether a packet may end in a chain, or in one that it leads to."""
        if chain.drops or any(rule.drops for rule in rules):
            return True
        return any(rule.drops for rule in self.rules(chain.family, chain.table))

    def _pass(self, chain: Chain, name: str) -> None:
        rules = self.rules(chain.family, chain.table, chain.name)
        if not self._may_drop(chain, rules) or _in_place((rule.comment for rule in rules), name):
            return
        text = _delete(chain, [rule.handle for rule in rules if rule.comment == name])
        for match in ("oifname", "iifname"):
            text += f'insert rule {chain} {match} "{name}" accept comment "{name}"\n'
        self._nft.run(text)

    def _pass_again(self, chain: Chain, name: str, error: NftFailed) -> None:
        """Try again, since the chain may just have changed; or say what the operator has to do."""
        try:
            if chain in self.chains():
                self._pass(chain, name)
        except NftFailed:
            # A table may belong to one program alone; firewalld's does since 2.1.
            _warn(
                f"the firewall chain {chain} drops what is forwarded and cannot be changed; let "
                f"{name} pass there (firewall-cmd --zone=trusted --add-interface={name}): {error}"
            )

    def _try(self, text: str, wanted: object) -> None:
        try:
            if wanted:
                self._nft.run(text)
        except NftFailed as error:  # another program was quicker
            log.debug("removing rules of an uplink: %s", error)

    def _dump(self, kind: int, family: int = 0, body: bytes = b"") -> list[bytes]:
        return netlink.dump(self._socket, kind, struct.pack("!BBH", family, 0, 0) + body)


def _in_place(comments: Iterable[str], name: str) -> bool:
    """Whether both rules are there, preceded by no rules but those of other uplinks."""
    return list(itertools.takewhile(UPLINK_NAME.fullmatch, comments)).count(name) == 2


def _delete(chain: Chain, handles: list[int]) -> str:
    return "".join(f"delete rule {chain} handle {handle}\n" for handle in handles)


# Reading the kernel's answers.


def _chain(body: bytes) -> Chain | None:
    values = attributes(body[4:])
    hook = attributes(values.get(CHAIN_HOOK, b""))
    if body[0] not in FAMILIES or _text(values.get(CHAIN_TYPE, b"")) != "filter":
        return None
    if struct.unpack("!I", hook.get(1, bytes(4)))[0] != FORWARD:
        return None
    drops = struct.unpack("!I", values.get(CHAIN_POLICY, b"\0\0\0\1"))[0] == NF_DROP
    return Chain(body[0], _text(values[TABLE]), _text(values[CHAIN_NAME]), drops)


def _rule(values: dict[int, bytes]) -> FirewallRule:
    expressions = _expressions(values.get(RULE_EXPRESSIONS, b""))
    return FirewallRule(
        chain=_text(values[RULE_CHAIN]),
        handle=struct.unpack("!Q", values[RULE_HANDLE])[0],
        comment=comment(values.get(RULE_USERDATA, b"")),
        drops=any(_may_drop(name, data) for name, data in expressions),
    )


def _expressions(data: bytes) -> Iterator[tuple[str, bytes]]:
    for _, item in netlink.pairs(data):
        values = attributes(item)
        yield _text(values.get(NAME, b"")), values.get(DATA, b"")


def _may_drop(name: str, data: bytes) -> bool:
    if name == "immediate":
        verdict = attributes(attributes(attributes(data).get(2, b"")).get(2, b""))
        code = verdict.get(1)
        return code is not None and struct.unpack("!i", code)[0] & 0xFF in (NF_DROP, 3)  # 3: queue
    if name == "lookup":  # a map of verdicts: its third attribute is the register of verdicts
        return attributes(data).get(3) == bytes(4)
    if name == "target":
        return _text(attributes(data).get(1, b"")) in ("REJECT", "NFQUEUE", "TARPIT")
    return name in ("reject", "queue", "synproxy")


def comment(userdata: bytes) -> str:
    """The comment in a rule's user data: kind, length and value each time; 0 is the comment."""
    while len(userdata) >= 2:
        kind, length = userdata[:2]
        if kind == 0:
            return _text(userdata[2 : 2 + length])
        userdata = userdata[2 + length :]
    return ""


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


# The older iptables, whose tables nftables does not show.


def _legacy(name: str, *, wanted: bool) -> None:
    for program in ("iptables", "ip6tables"):
        tables = Path("/proc/thread-self/net", program.replace("tables", "_tables_names"))
        try:
            if "filter" not in tables.read_text("ascii").split():
                continue
        except OSError:  # this kernel has none
            continue
        path = _legacy_program(program)
        if path is not None:
            _change_legacy(path, name, wanted=wanted)
        elif wanted:
            _warn(
                f"this host has rules of an older {program}, and no {program}-legacy to look at "
                f"them; if they drop what is forwarded, let {name} pass"
            )


def _legacy_program(program: str) -> str | None:
    found = shutil.which(f"{program}-legacy")
    if found is None and (found := shutil.which(program)) is not None:
        return None if "nf_tables" in _run(found, "-V") else found
    return found


def _change_legacy(program: str, name: str, *, wanted: bool) -> None:
    try:
        lines = _run(program, "-w", "5", "-S").splitlines()
        drops = any(re.search(r"^-P FORWARD DROP| -j (DROP|REJECT)", line) for line in lines)
        forward = {line: _legacy_comment(line) for line in lines if line.startswith("-A FORWARD ")}
        if wanted and (not drops or _in_place(forward.values(), name)):
            return
        for line in (line for line, comment in forward.items() if comment == name):
            _run(program, "-w", "5", "-D", *line.split()[1:])
        for flag in ("-o", "-i") if wanted else ():
            words = [flag, name, "-m", "comment", "--comment", name, "-j", "ACCEPT"]
            _run(program, "-w", "5", "-I", "FORWARD", *words)
    except (OSError, subprocess.SubprocessError) as error:
        _warn(f"{program} cannot be asked to let {name} pass: {error}")


def _legacy_comment(line: str) -> str:
    found = re.search(r' --comment "?(\S+?)"? ', line)
    return found[1] if found else ""


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, check=True, timeout=_PROGRAM_SECONDS, encoding="utf-8"
    )
    return done.stdout


@functools.cache
def _warn(message: str) -> None:
    """Warn once: rules are examined whenever something changes."""
    log.warning("%s", message)
