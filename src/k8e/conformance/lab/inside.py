"""Attempts of a hostile program. This file is copied into sandboxes and run there.

It is called with a JSON list of attempts, each the name of a function here and its arguments, and
prints the outcome of each of them. Only the standard library is there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import json
import os
import socket
import ssl
import struct
import sys
import time
import urllib.error
import urllib.request
from typing import Any

SECONDS = 5.0  # more than any refusal may take
LONG = 30.0
TYPES = {"A": 1, "NULL": 10, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "HTTPS": 65, "ANY": 255}
CODES = {0: "NOERROR", 1: "FORMERR", 2: "SERVFAIL", 3: "NXDOMAIN", 4: "NOTIMP", 5: "REFUSED"}
FREEBIND, FREEBIND6 = 15, 78  # <linux/in.h>; Python has no names for them


# Connections.


def tcp(host: str, port: int) -> str:
    """The greeting of a server."""
    with socket.create_connection((host, port), SECONDS) as connection:
        return connection.recv(200).decode().strip()


def udp(host: str, port: int, text: str = "hello") -> str:
    """The answer of a server, or how the kernel says that there is none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as connection:
        connection.settimeout(SECONDS)
        connection.connect(found[4])
        connection.send(text.encode())
        return connection.recv(2000).decode()


def shout(host: str, port: int) -> str:
    """Send a datagram that cannot be answered, as to a group."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as connection:
        connection.settimeout(SECONDS)
        return str(connection.sendto(b"hello", (host, port)))


def ping(host: str) -> str:
    """Send an echo, by the kind of socket that any user may have where the kernel allows it."""
    six = ":" in host
    family, protocol = (socket.AF_INET6, 58) if six else (socket.AF_INET, 1)
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as connection:
        connection.settimeout(1)  # every peer is near
        connection.connect((host, 0))
        connection.send(struct.pack("!BBHHH", 128 if six else 8, 0, 0, 1, 1) + b"hello")
        return str(len(connection.recv(2000)))


def make(family: int, kind: int, protocol: int = 0) -> str:
    """Make a socket of some kind."""
    with socket.socket(family, kind, protocol):
        return "made"


def vsock(host: int, port: int) -> str:
    """Connect to the host of a virtual machine, around its network."""
    with socket.socket(40, socket.SOCK_STREAM) as connection:
        connection.settimeout(SECONDS)
        connection.connect((host, port))
        return "connected"


def disguised(source: str, host: str, port: int, source_port: int = 0) -> str:
    """Send a datagram with a false source address."""
    six = ":" in source
    family = socket.AF_INET6 if six else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as connection:
        level, option = (socket.IPPROTO_IPV6, FREEBIND6) if six else (socket.IPPROTO_IP, FREEBIND)
        connection.setsockopt(level, option, 1)
        connection.bind((source, source_port))
        return str(connection.sendto(b"hello", (host, port)))


def address() -> list[str]:
    """The sandbox's own addresses."""
    found: list[str] = []
    for family, host in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2606:4700::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as connection:
            connection.connect((host, 9))  # a datagram's socket: nothing is sent
            found.append(connection.getsockname()[0])
    return found


def overhear(source_port: int, host: str, port: int) -> str:
    """Wait for bytes of a server to which nothing was sent, or for a refusal."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as connection:
        connection.bind(("::", source_port))
        connection.connect((host, port))
        connection.settimeout(1)
        print("ready", flush=True)
        return connection.recv(2000).decode()


def crowd(kind: str, count: int) -> str:
    """Send a datagram to each of many addresses that a kernel could take for neighbours."""
    link = socket.if_nametoindex("eth0")
    family = socket.AF_INET6 if kind.endswith("6") else socket.AF_INET
    sent, errors = 0, set[str]()
    with socket.socket(family, socket.SOCK_DGRAM) as connection:
        flags = _prepared(connection, kind, link)
        for number in range(count):
            high, low = divmod(number, 256)
            target: tuple[Any, ...] = {
                "link6": (f"fe80::1:{number:x}", 9, 0, link),
                "group6": (f"ff02::1:{number:x}", 9, 0, link),
                "wide6": (f"ff0e::1:{number:x}", 9),
                "near6": (f"fd6b:3865:0:1::{number:x}", 9),
                "group4": (f"239.1.{high}.{low}", 9),
                "local4": (f"224.0.0.{low}", 9),
                "near4": (f"198.18.{high}.{low}", 9),
                "direct4": (f"9.9.{high}.{low}", 9),
                "shout4": (f"198.18.{high}.{low}", 9),
            }[kind]
            try:
                sent += connection.sendto(b"x", flags, target)
            except OSError as error:
                errors.add(type(error).__name__)
    return f"{sent} sent, {len(errors)} kinds of errors"


def _prepared(connection: socket.socket, kind: str, link: int) -> int:
    """A socket that uses nothing but the link, and the flags to send with."""
    with contextlib.suppress(OSError):  # of gVisor, which has less of this
        if kind in ("group4", "local4"):
            chosen = struct.pack("=4s4si", bytes(4), bytes(4), link)
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, chosen)
        if kind in ("direct4", "shout4"):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
            return int(socket.MSG_DONTROUTE)
    return 0


def listen(port: int) -> None:
    """Serve every client, until killed."""
    with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        print("ready", flush=True)
        while True:
            connection, source = server.accept()
            connection.sendall(b"sibling")
            connection.close()
            print(source[0], flush=True)


# Names.


def lookup(name: str) -> list[str]:
    """The addresses of a name, as every program asks for them."""
    found = socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)
    return sorted({str(item[4][0]) for item in found})


def dns(server: str, name: str, kind: str = "A", transport: str = "udp") -> str:
    """A resolver's answer: its code and its records."""
    query = question(name, kind)
    if transport == "udp":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
            connection.settimeout(SECONDS)
            connection.connect((server, 53))
            connection.send(query)
            return read(connection.recv(65535))
    with socket.create_connection((server, 53), SECONDS) as connection:
        connection.sendall(len(query).to_bytes(2, "big") + query)
        size = int.from_bytes(connection.recv(2), "big")
        return read(connection.recv(size))


def question(name: str, kind: str = "A") -> bytes:
    # %2e is a dot within a label, where a careless parser sees the end of one.
    labels = [label.encode().replace(b"%2e", b".") for label in name.split(".") if label]
    body = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return os.urandom(2) + b"\x01\0\0\1\0\0\0\0\0\0" + body + struct.pack("!HH", TYPES[kind], 1)


def read(answer: bytes) -> str:
    """Parse an answer of k8e's: every record in it repeats the question's name, by a pointer."""
    code, count = answer[3] & 15, int.from_bytes(answer[6:8], "big")
    at = answer.index(b"\0", 12) + 5
    words = [CODES.get(code, str(code))]
    for _ in range(count):
        size = int.from_bytes(answer[at + 10 : at + 12], "big")
        data = answer[at + 12 : at + 12 + size]
        words.append(str(ipaddress.ip_address(data)) if size in (4, 16) else data.hex())
        at += 12 + size
    return " ".join(words)


def flood(server: str, name: str, count: int) -> dict[str, int]:
    """Ask a flood of questions without waiting; return the numbers of answers and refusals."""
    told = {"answered": 0, "refused": 0}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect((server, 53))
        connection.settimeout(1.0)
        for number in range(count):
            try:
                connection.send(question(name.replace("#", str(number))))
            except ConnectionRefusedError:
                told["refused"] += 1
        while True:
            try:
                connection.recv(2000)
                told["answered"] += 1
            except ConnectionRefusedError:
                told["refused"] += 1
            except TimeoutError:
                return told


def flood_streams(server: str, name: str, streams: int, seconds: float) -> int:
    """The same over connections; returns the number of answers."""

    def ask(_: int) -> int:
        query = question(name)
        count = 0
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError), socket.create_connection((server, 53), 2) as connection:
            while time.monotonic() < until:
                connection.sendall(len(query).to_bytes(2, "big") + query)
                if not connection.recv(2000):
                    break
                count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        return sum(pool.map(ask, range(streams)))


def tunnel(server: str, base: str, count: int) -> dict[str, Any]:
    """Carry random bytes out in names below ``base``; return how many bytes were asked about."""
    codes: dict[str, int] = {}
    for _ in range(count):
        code = dns(server, f"{os.urandom(20).hex()}.{base}").split()[0]
        codes[code] = codes.get(code, 0) + 1
    return codes


def repeat(server: str, base: str, count: int) -> int:
    """Signal by the order of known names, and by the type; return the answers."""
    names = [f"n{number}.{base}" for number in range(16)]
    answered = 0
    for _ in range(count):
        choice = os.urandom(2)
        with contextlib.suppress(OSError, ValueError):  # more than so many a second are refused
            dns(server, names[choice[0] % 16], ("A", "AAAA")[choice[1] % 2])
            answered += 1
    return answered


def stretch(server: str, base: str, count: int) -> dict[str, int]:
    """Signal by the lengths of runs of one letter."""
    codes: dict[str, int] = {}
    for _ in range(count):
        name = ".".join("a" * (1 + byte % 60) for byte in os.urandom(4))
        code = dns(server, f"{name}.{base}").split()[0]
        codes[code] = codes.get(code, 0) + 1
    return codes


def ask_all(server: str, pattern: str, count: int) -> dict[str, int]:
    """Ask for many names, one after the other; return the answers."""
    codes: dict[str, int] = {}
    for number in range(count):
        code = dns(server, pattern.replace("#", str(number))).split()[0]
        codes[code] = codes.get(code, 0) + 1
    return codes


# Messages on connections.


def fetch(url: str, ca: str = "", host: str = "") -> str:
    """Fetch a page with the usual library; redirects are followed."""
    headers = {"Host": host} if host else {}
    context = ssl.create_default_context(cadata=ca) if ca else None
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.read().decode()}"


def hello(host: str, name: str, ca: str = "", target: str = "") -> str:
    """TLS with any server name, or none, and a request for another host inside of it."""
    context = ssl.create_default_context(cadata=ca)
    context.check_hostname = bool(name)
    with (
        socket.create_connection((host, 443), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=name or None) as connection,
    ):
        connection.sendall(request(target or name))
        return "".join(_rest(connection))


def request(host: str, path: str = "/", connection: str = "close") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: {connection}\r\n\r\n".encode()


def talk(host: str, port: int, *parts: str) -> list[str]:
    """Send messages, each after the answer to the one before."""
    answers: list[str] = []
    with socket.create_connection((host, port), SECONDS) as connection:
        for part in parts:
            try:
                connection.sendall(part.encode("latin-1"))
                answers.append(connection.recv(65536).decode("latin-1"))
            except OSError as error:
                answers.append(type(error).__name__)
    return answers


def _rest(connection: socket.socket) -> list[str]:
    parts: list[str] = []
    while data := connection.recv(65536):
        parts.append(data.decode())
    return parts


def download(host: str, port: int, first: str = "") -> str:
    """Receive until the end, and report every line."""
    with socket.create_connection((host, port), SECONDS) as connection:
        connection.settimeout(10)
        connection.sendall(first.encode())
        print("ready", flush=True)
        with connection.makefile("rb") as lines:
            for line in lines:
                print(line.decode().strip(), flush=True)
    return "the end"


def obey(host: str, port: int) -> str:
    """Follow the commands of the other end, as long as there is a connection."""
    with socket.create_connection((host, port), SECONDS) as connection:
        connection.settimeout(30)
        print("ready", flush=True)
        with connection.makefile("rwb") as stream:
            for line in stream:
                stream.write(json.dumps(attempt(json.loads(line))).encode() + b"\n")
                stream.flush()
    return "the end"


def insist(enough: str, *words: Any) -> list[Any]:
    """Try the same thing again and again until there is a file; return how each try went."""
    until = time.monotonic() + LONG
    told: list[Any] = []
    print("ready", flush=True)
    while time.monotonic() < until and not os.path.exists(enough):  # noqa: PTH110 - it is quick
        told.append(attempt(list(words)))
        time.sleep(0.02)
    return told


# Trying.


def attempt(words: list[Any]) -> dict[str, Any]:
    """Try one thing; return its answer or failure, and how long that took."""
    began = time.perf_counter()
    told: dict[str, Any] = {"error": "", "said": None}
    try:
        told["said"] = globals()[words[0]](*words[1:])
    except Exception as error:
        reason = getattr(error, "reason", None)  # urllib packs errors into its own
        cause = reason if isinstance(reason, Exception) else error
        told["error"] = type(cause).__name__
        told["text"] = str(cause)
    told["seconds"] = time.perf_counter() - began
    return told


def main() -> None:
    attempts = json.loads(sys.argv[1])
    with contextlib.suppress(UnicodeError):
        "a".encode("idna")  # what only the first look-up would pay for
    if len(sys.argv) > 2:  # at once
        with concurrent.futures.ThreadPoolExecutor(len(attempts)) as pool:
            print(json.dumps(list(pool.map(attempt, attempts))))
    else:
        print(json.dumps([attempt(words) for words in attempts]))


if __name__ == "__main__":
    main()
