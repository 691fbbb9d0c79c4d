"""Makes this Python look like that of a system which is not POSIX, or one with little installed.

Run as a program: ``python elsewhere.py HOW... -- CODE``, where HOW is ``foreign`` or ``light``.
"""

from __future__ import annotations

import _socket
import argparse
import asyncio
import builtins
import getpass
import importlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STANDARD = (argparse, asyncio, getpass, socket, ssl, subprocess, tempfile, tomllib)
"""Imported before the system changes under them."""
MODULES = "posix fcntl termios tty pty resource pwd grp ctypes".split()
OF_OS = (
    "geteuid getuid getgid getegid fork forkpty memfd_create pidfd_open pipe2 fchmod chown "
    "O_CLOEXEC O_NOFOLLOW O_DIRECTORY O_NONBLOCK killpg setsid WNOHANG environb"
).split()
OF_SIGNAL = "SIGKILL SIGHUP SIGALRM SIGWINCH SIGTSTP SIGSTOP SIGPIPE SIGCHLD setitimer".split()
OF_SOCKET = "AF_UNIX SO_PEERCRED MSG_DONTWAIT AF_NETLINK SO_REUSEPORT".split()
HEAVY = ("cryptography", "dns", "h11", "prometheus_client")
"""What the gateway needs and a client does not."""


class Light:
    """An importer that finds nothing of what is only the gateway's."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def be_light() -> None:
    sys.meta_path.insert(0, Light())


def be_foreign() -> None:
    """Take away from k8e what only POSIX has; the standard library's own innards may stay."""
    import grpc
    import yaml

    assert grpc, yaml
    real_import, real_import_module = builtins.__import__, importlib.import_module

    def checked(
        name: str, globals_: dict[str, Any] | None = None, *rest: Any, **options: Any
    ) -> Any:
        importer = str(globals_.get("__name__", "")) if globals_ else ""
        if importer.startswith("k8e") and name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, globals_, *rest, **options)

    def checked_module(name: str, package: str | None = None) -> Any:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import_module(name, package)

    builtins.__import__ = checked
    importlib.import_module = checked_module
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in OF_SOCKET:
        # Not from `socket`: this machine's event loop needs some of it to wake itself up.
        delattr(_socket, name)
    os.supports_dir_fd.clear()
    sys.platform = "win32"


if __name__ == "__main__":
    at = sys.argv.index("--")
    for how in sys.argv[1:at]:
        {"foreign": be_foreign, "light": be_light}[how]()
    code = sys.argv[at + 1]
    sys.argv = ["k8e", *sys.argv[at + 2 :]]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
