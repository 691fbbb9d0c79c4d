"""What egress refused, for people and for programs.

Names come from the sandbox and are hostile: nothing of them reaches a terminal, or a command that
somebody might paste, without being looked at.
"""

from __future__ import annotations

import ipaddress
import shlex
import string
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from k8e.cli import printing
from k8e.client import results
from k8e.client.results import Denial, Egress

_RULE_CHARS = frozenset(string.ascii_letters + string.digits + "-_.:[]")
# What stands in the words of those refusals that a longer allow-list would end.
_LISTED = ("allow-list", "another port", "no allowed name")
_ASK_AGAIN = "look its name up again"


def encode(found: list[dict[str, Any]]) -> str:
    """The denials of a run as JSON."""
    return printing.encode([fields(results.denial(item)) for item in found])


def fields(denial: Denial) -> dict[str, Any]:
    """A denial as a dict; its time only where it is known."""
    return {key: value for key, value in asdict(denial).items() if key != "at" or value}


def lines(found: list[dict[str, Any]], session_id: str) -> str:
    """One line for each denial of a run, with what would allow it if anything does."""
    return "".join(f"{_line(results.denial(item), session_id)}\n" for item in found)


def _line(denial: Denial, session_id: str) -> str:
    where = target(denial)
    # A program that looks up a name once asks for it twice: for both kinds of addresses.
    often = denial.count > 1 and denial.protocol != "dns"
    times = f" ({denial.count} times)" if often else ""
    text = f"k8e: egress to {_plain(where)} was refused{times}: {_plain(denial.rule)}"
    if _could_be_allowed(denial) and _RULE_CHARS.issuperset(where):
        text += f" (k8e sandbox allow-hosts {session_id} --add {shlex.quote(where)})"
    return text


def _could_be_allowed(denial: Denial) -> bool:
    if _ASK_AGAIN in denial.rule:  # it is allowed already
        return False
    listed = any(words in denial.rule for words in _LISTED)
    return listed and (bool(denial.name) or _is_public(denial.address))


def _is_public(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_global and not address.is_multicast


def target(denial: Denial) -> str:
    """What was to be reached, as a policy would name it."""
    host = denial.name or denial.address
    if not denial.port or denial.protocol == "dns":
        return host
    return f"[{host}]:{denial.port}" if ":" in host else f"{host}:{denial.port}"


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def table(found: Egress) -> Iterator[str]:
    """The policy of a session and what it refused."""
    yield f"session   {found.session_id}"
    yield f"asked     {' '.join(found.allowed_hosts)}"
    yield f"in effect {' '.join(found.rules)}"
    yield "network   " + ("yes" if found.network else f"no: {_plain(found.reason)}")
    yield f"denied    {found.denied}"
    if not found.denials:
        return
    rows = [("LAST", "TIMES", "PROTOCOL", "TO", "ADDRESS", "WHY")]
    for item in found.denials:
        last = time.strftime("%H:%M:%S", time.localtime(item.at))
        where, address = _plain(target(item)), _plain(item.address)
        rows.append((last, str(item.count), item.protocol, where, address, _plain(item.rule)))
    widths = [max(len(row[at]) for row in rows) for at in range(5)]
    yield ""
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[5]]).rstrip()
