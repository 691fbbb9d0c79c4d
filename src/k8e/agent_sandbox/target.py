"""Which sandbox and port a request to the router is for, as its headers say. Pure functions.

A header that is there twice, or whose value could mean two things, is refused: whatever stands in
front of the router may have read the other one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from k8e.agent_sandbox.answers import Refusal

Headers = Iterable[tuple[bytes, bytes]]

PREFIX = b"x-sandbox-"
DEFAULT_NAMESPACE = "default"
DEFAULT_PORT = 8888
DEFAULT_SECONDS = 180.0
MAX_SECONDS = 86400.0
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


class Target(NamedTuple):
    """A port of a sandbox, and how long its answer may take to begin."""

    namespace: str
    sandbox: str
    port: int
    seconds: float
    uid: str = ""


def parse(headers: Headers) -> Target:
    """The target of a request. Where a pod has its address is never taken from a client."""
    told: dict[bytes, str] = {}
    for key, value in headers:
        name = key.lower()
        if name.replace(b"_", b"-").startswith(PREFIX):  # some servers take one for the other
            if name in told or b"_" in name:
                raise Refusal(400, f"the header {name.decode('latin-1')} is ambiguous")
            told[name] = value.decode("latin-1").strip()
    sandbox = told.get(b"x-sandbox-id", "")
    if not sandbox:
        raise Refusal(400, "the header X-Sandbox-ID is missing")
    namespace = told.get(b"x-sandbox-namespace") or DEFAULT_NAMESPACE
    for name, value in (("X-Sandbox-ID", sandbox), ("X-Sandbox-Namespace", namespace)):
        if _LABEL.fullmatch(value) is None:
            raise Refusal(400, f"the header {name} is not a valid name")
    return Target(
        namespace,
        sandbox,
        _port(told.get(b"x-sandbox-port", "")),
        _seconds(told.get(b"x-sandbox-timeout", "")),
        told.get(b"x-sandbox-uid", ""),
    )


def _port(text: str) -> int:
    if not text:
        return DEFAULT_PORT
    # int() would also take signs, spaces, underscores and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise Refusal(400, "the header X-Sandbox-Port is not a port")
    return int(text)


def _seconds(text: str) -> float:
    if not text:
        return DEFAULT_SECONDS
    try:
        found = float(text) if len(text) <= 32 else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found <= 0:
        raise Refusal(400, "the header X-Sandbox-Timeout is not a number of seconds")
    return min(found, MAX_SECONDS)
