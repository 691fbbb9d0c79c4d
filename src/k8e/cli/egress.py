"""``k8e sandbox allow-hosts`` and ``egress``: what a session may reach, and what it was refused.

Names come from the sandbox and are hostile: they are checked before they reach a terminal, or a
command that a user might paste.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import shlex
import string
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from k8e import errors
from k8e.cli import fast, output, sessions
from k8e.cli.parser import Commands
from k8e.client import operations, requests, results
from k8e.client.results import Denial, Egress

_RULE_CHARS = frozenset(string.ascii_letters + string.digits + "-_.:[]")
# What stands in the words of those refusals that a longer allow-list would end.
_LISTED = ("allow-list", "another port", "no allowed name")
_ASK_AGAIN = "look its name up again"


def encode(found: list[dict[str, Any]]) -> str:
    """The denials of a run as JSON."""
    return output.encode([denial_fields(results.denial(item)) for item in found])


def denial_fields(denial: Denial) -> dict[str, Any]:
    """A denial as a dict; its time only where it is known."""
    return {key: value for key, value in asdict(denial).items() if key != "at" or value}


def lines(found: list[dict[str, Any]], session_id: str) -> str:
    """A line for each denial of a run, with a command that would allow it, if one would."""
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
    """The refused destination, as a policy would name it."""
    host = denial.name or denial.address
    if not denial.port or denial.protocol == "dns":
        return host
    return f"[{host}]:{denial.port}" if ":" in host else f"{host}:{denial.port}"


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def egress_report(found: Egress) -> Iterator[str]:
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
    yield ""
    yield from output.table(rows)


def allow_hosts(options: argparse.Namespace) -> int:
    """Replace a session's policy, or change it by words."""
    found: dict[str, Any] = sessions.ask(options, operations.call(_change(options)))["session"]
    shown = ("allowed_hosts", "session_id")
    output.answer({name: found[name] for name in shown})
    return 0


def _change(options: argparse.Namespace) -> dict[str, Any]:
    """The call. The gateway changes the list, since other clients may change it too."""
    given = fast.split_hosts([*options.hosts, *(options.list or ())])
    changes = bool(options.add or options.remove)
    if bool(given) + changes + options.clear > 1:
        raise errors.InvalidRequest(
            "hosts replace the list, --add and --remove change it, --clear empties it",
            hint="use one of the three; separate hosts of --add and --remove with commas",
        )
    if changes:
        add, remove = fast.split_hosts(options.add or []), fast.split_hosts(options.remove or [])
        return requests.change_call(options.session_id, add, remove)
    if not given and not options.clear:
        raise errors.InvalidRequest(
            "no hosts are named",
            hint="--clear allows nothing; k8e sandbox egress ID shows what is allowed",
        )
    return requests.allow_call(options.session_id, given)


def egress(options: argparse.Namespace) -> int:
    """Print the policy of a session and its refusals."""
    with sessions.connect(options) as client:
        found = client.egress(options.session_id)
    if options.json or not os.isatty(1):
        told = asdict(found) | {"denials": [denial_fields(item) for item in found.denials]}
        output.answer(told)
    else:
        output.write_lines(egress_report(found))
    return 0


def add_allow_hosts(commands: Commands) -> None:
    parser = commands.add(
        "allow-hosts",
        "replace what a session may reach; open connections are judged again",
        "k8e sandbox allow-hosts ID default api.example.org:443\n"
        "         k8e sandbox allow-hosts ID --add '*.example.net' --remove api.example.org:443\n"
        "         k8e sandbox allow-hosts ID --clear",
        allow_hosts,
        remote=True,
    )
    parser.add_argument("session_id", metavar="ID")
    parser.add_argument(
        "hosts", nargs="*", metavar="HOST", help="a word of the policy, or a comma list of them"
    )
    # K8E's own way to say the same.
    parser.add_argument("--hosts", dest="list", action="append", help=argparse.SUPPRESS)
    for flag, text in (("--add", "allow these too"), ("--remove", "remove these words")):
        parser.add_argument(
            flag, action="append", metavar="HOSTS", help=f"{text}; a comma list, repeatable"
        )
    parser.add_argument("--clear", action="store_true", help="allow nothing, like the word none")


def add_egress(commands: Commands) -> None:
    parser = commands.add(
        "egress",
        "show what a session may reach, and what it was refused: a table on a terminal, else JSON",
        "k8e sandbox egress ID",
        egress,
        remote=True,
    )
    parser.add_argument("session_id", metavar="ID")
    parser.add_argument("--json", action="store_true", help="print JSON on a terminal too")
