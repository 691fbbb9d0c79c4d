"""Attacks on sandboxes, line by line, and the behaviours that answer each line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """One line of the checklist."""

    key: str
    """The part that it belongs to, and its number there."""
    text: str
    checks: tuple[str, ...] = ()
    elsewhere: str = ""
    """What of it is not checked on a user's machine, and why."""


class Try(NamedTuple):
    """An attack, and the promises that answer it: ids, or the area before the dot for all of it."""

    text: str
    checks: str
    elsewhere: str = ""


_NO_UPLOADS = "k8e takes no uploads by HTTP: files come as frames, which count their own bytes"

_PARTS: Mapping[str, tuple[Try, ...]] = {
    "kernel": (
        Try(
            "no capabilities, no new privileges, a seccomp filter; unshare, mount, keyctl, bpf, "
            "perf, userfaultfd, io_uring, kexec and modules refused or contained",
            "confinement.no-capabilities confinement.no-new-privileges confinement.seccomp "
            "attacks.system-calls attacks.namespaces attacks.own-namespace attacks.old-calls",
        ),
        Try(
            "/proc/self/fd, /proc/1/root, /proc/sys, /sys and /dev give no handle of the host; no "
            "working directory at a descriptor; no inherited descriptors",
            "host.descriptors host.roots attacks.descriptor-directory attacks.guest "
            "refusals.guest-descriptors refusals.guest-itself exec.clean-start "
            "confinement.no-host-files",
        ),
        Try(
            "cgroup release_agent, core_pattern, binfmt_misc, uevent_helper and modprobe cannot be "
            "written; no core dumps; /dev/mem and its kin are not there",
            "attacks.kernel-files attacks.devices attacks.line-disciplines limits.core-dumps "
            "confinement.writable-places "
            "confinement.kernel-facts confinement.usual-files",
        ),
        Try(
            "no socket of a container runtime or of the gateway, no service-account token, no PID, "
            "IPC, UTS or network namespace of the host",
            "confinement.no-host-secrets confinement.processes confinement.host-name "
            "host.namespaces host.out-of-sight exec.environment",
        ),
        Try(
            "abstract UNIX sockets, inherited sockets, vsock, netlink and raw sockets reach "
            "neither "
            "the host nor siblings",
            "attacks.sockets attacks.protocols network.other-sockets host.out-of-sight "
            "confinement.neighbours",
        ),
        Try(
            "set-uid programs and device nodes on writable mounts have no effect",
            "confinement.mount-flags confinement.no-new-privileges attacks.devices",
        ),
        Try(
            "ptrace, signals, shared memory and files between sandboxes; ptrace and signals of the "
            "guest",
            "confinement.neighbours share.apart attacks.guest attacks.guest-while-spawning "
            "attacks.guest-while-lending "
            "attacks.guest-as-tracer attacks.guest-files attacks.link confinement.user",
        ),
    ),
    "resources": (
        Try(
            "fork bomb and thread bomb meet the limit, and the host answers",
            "limits.pids limits.threads bounds.pids-told noise.forks share.own-limits warm.room",
        ),
        Try(
            "memory balloon, full tmpfs, page cache and swap: only that sandbox suffers, and "
            "says so",
            "limits.memory limits.memory-alone limits.memory-together limits.memory-files "
            "bounds.memory-told bounds.files-in-memory noise.memory",
        ),
        Try(
            "disk filled by bytes, inodes, sparse files, attributes; the end of a sandbox "
            "gives all of it back",
            "limits.disk limits.inodes bounds.places bounds.disk-told noise.disk hoard.attributes "
            "hoard.shared-disk "
            "refusals.full-disk share.disk-limit life.destroy",
        ),
        Try(
            "CPU spin on all cores stays within the limit, and slows others by a bounded factor",
            "limits.cpu limits.cpu-weight noise.cpu",
            "there is no limit on the bandwidth of disks: a sandbox that writes without end can "
            "slow others down until its disk limit is full",
        ),
        Try(
            "endless output with and without a reader, no line ends, bytes that are no text, "
            "escape "
            "sequences",
            "output bounds.output noise.output exec.separate-streams control.terminal-escapes",
        ),
        Try(
            "thousands of sockets, files, watchers, terminals, kernel objects and operations "
            "at once",
            "hoard limits.open-files bounds.open-files noise.sockets files.list-many "
            "exec.parallel exec.many-listed ports.bounded attacks.flood-of-calls",
        ),
        Try(
            "daemons and zombies end with their command; nothing of a sandbox outlives it",
            "exec.orphans-reaped exec.timeout-children exec.timeout-background life "
            "policy.nothing-left "
            "pause.destroy",
        ),
    ),
    "files": (
        Try(
            "paths that are absolute, empty, too long, with dots, NUL, a trailing slash, "
            "look-alikes",
            "refusals.path trespass.odd-names files.unicode files.anywhere",
        ),
        Try(
            "links at the leaf and on the way, dangling, swapped while used, into /proc; hard "
            "links "
            "to foreign files",
            "refusals.swapped-links trespass.swapped-folders trespass.hard-links files.links "
            "refusals.missing refusals.guest-itself maze",
        ),
        Try(
            "pipes, sockets and devices as targets do not hang or leak; reading a growing file "
            "ends",
            "refusals.special files.growing",
        ),
        Try(
            "uploads with hostile names, wrong lengths, endless bodies",
            "files.atomic refusals.protocol refusals.numbers",
            _NO_UPLOADS,
        ),
        Try(
            "archives: paths upwards, absolute names, links out, duplicates, devices, bombs",
            "archives",
        ),
        Try(
            "signed addresses: another path, port, token; use after the end",
            "exposed.token",
        ),
    ),
    "network": (
        Try(
            "with the network off: TCP, UDP, ICMP, IPv6, raw, DNS on any port and any resolver, "
            "mDNS give nothing",
            "network.off network.off-groups network.other-sockets confinement.network",
        ),
        Try(
            "metadata services, loopback, the host, siblings and the gateway refused, also by "
            "a DNS "
            "answer and in every form of an address",
            "network.private-addresses network.disguised-addresses network.rebinding network.host "
            "network.gateway network.siblings network.operator-only network.foreign-source "
            "network.late-answers ports.loopback-only",
        ),
        Try(
            "name rules: other server name, other Host, none, HTTP/2, QUIC, a second request, a "
            "redirection",
            "strict names.known-address names.ports names.allowed",
        ),
        Try(
            "wildcards, trailing dots, upper case, punycode, look-alikes",
            "names.wildcards names.look-alikes",
        ),
        Try(
            "names outside the list are not forwarded; random labels and odd types are capped",
            "names.others names.only-addresses names.tunnel names.tunnel-known "
            "names.tunnel-lengths names.many-addresses names.many-ports names.flood",
        ),
        Try(
            "the filter cannot be stopped, reconfigured or outlived; it fails closed without its "
            "process and while a sandbox starts",
            "policy.first-moment policy.claimed policy.gateway-dies policy.strict-gateway-dies "
            "policy.nothing-left",
        ),
        Try(
            "secrets that only the gateway knows",
            "exposed.secrets control.events",
            "secrets of users are variables of the session; k8e does not broker them",
        ),
        Try(
            "a change of policy takes effect on open connections",
            "policy.cut-connections policy.kept-connections",
        ),
    ),
    "control": (
        Try(
            "DNS rebinding, CSRF and foreign WebSockets fail; by HTTP a token is needed on "
            "loopback too",
            "exposed.origin exposed.token control.http control.wrong-key control.no-plain-text",
            "gRPC on loopback and the socket need no key of processes that have the gateway's own "
            "uid, which the kernel tells; what such a process could do anyway, it may",
        ),
        Try(
            "a guest reaches no control API, and its key is good for its own sandbox alone",
            "network.gateway attacks.link host.identity host.out-of-sight",
        ),
        Try("another owner's objects are not found, in every call and list", "control.other-owner"),
        Try("an idempotent creation compares everything", "control.idempotent-create"),
        Try(
            "exposed ports: credentials and hop headers are stripped, no smuggling, no other port",
            "exposed.secrets exposed.smuggling exposed.token ports.loopback-only",
        ),
        Try(
            "approvals: the text shown is the action, once, for one session; agents do not decide",
            "control.approvals control.roles",
        ),
        Try(
            "records are ordered, without secrets, and survive a crash",
            "control.events control.audit control.no-plain-text",
        ),
        Try(
            "a restart of the gateway finds everything again or cleans it up",
            "life.adopt life.purge life.launch-given-up pause.adopt share.adopt "
            "policy.gateway-dies",
        ),
    ),
    "state": (
        Try(
            "snapshots are whole; every sandbox has keys and randomness of its own",
            "archives.snapshots keep.snapshot-while-writing host.identity files.atomic",
            "a snapshot does not stop the session: files that programs write meanwhile can be of "
            "different moments, which it says; stop the writers first",
        ),
        Try(
            "what was made ready, or was another one's, leaks nothing: variables, files, programs, "
            "lookups, connections",
            "keep.nothing-of-others keep.network-of-others policy.claimed settle.strays "
            "settle.ready warm.alone life.workspace-empty confinement.neighbours",
        ),
        Try("pauses, ten times over, lose nothing", "keep.pauses pause"),
    ),
}


def lines(ids: Mapping[str, object]) -> list[Line]:
    """Every line, with the ids that answer it; ``ids`` are all promises that there are."""
    found: list[Line] = []
    for part, tries in _PARTS.items():
        for number, item in enumerate(tries, 1):
            checks = [name for word in item.checks.split() for name in _expand(word, ids)]
            found.append(Line(f"{part} {number}", item.text, tuple(checks), item.elsewhere))
    return found


def _expand(word: str, ids: Mapping[str, object]) -> list[str]:
    if "." in word:
        return [word]
    return [name for name in ids if name.partition(".")[0] == word]
