"""Ports for gateways of checks and tests: two processes never get the same one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from k8e.conformance.lab import ports

ASK = """
import sys
from k8e.conformance.lab import ports
print(*(ports.free_port() for _ in range(ports.BLOCK)), ports.reserve(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_processes_that_run_at_once_have_ports_of_their_own() -> None:
    name = f"test-{os.getpid()}"
    assert ports.reserve(name)
    command = [sys.executable, "-P", "-c", ASK, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        *theirs, reserved = other.stdout.readline().split()
        ours = {ports.free_port() for _ in range(ports.BLOCK)}
        other.communicate(timeout=60)
    assert reserved == b"False", "a name that this process has"
    assert not ours & set(map(int, theirs))


def test_a_port_that_somebody_listens_at_is_not_handed_out() -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        number = taken.getsockname()[1]
        assert number not in {ports.free_port() for _ in range(ports.BLOCK)}


def test_the_kernel_gives_none_of_these_ports_to_connections() -> None:
    first = int(ports.EPHEMERAL.read_text("ascii").split()[0])
    assert all(ports.free_port() < first for _ in range(ports.BLOCK))
