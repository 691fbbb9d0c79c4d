"""``k8e sandbox allow-hosts`` and ``egress``: what a session may reach, and what it was refused."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict

from k8e import errors
from k8e.cli import denials, fast, printing, sandbox

_NONE = "none"


def allow_hosts(options: argparse.Namespace) -> int:
    """Replace a session's policy, or change it by words."""
    with sandbox.connect(options) as client:
        if options.add or options.remove:
            before = client.get_session(options.session_id).allowed_hosts
        else:
            before = []
        client.update_allowed_hosts(options.session_id, _wanted(options, before))
        found = client.get_session(options.session_id)
    printing.answer({"allowed_hosts": found.allowed_hosts, "session_id": found.session_id})
    return 0


def _wanted(options: argparse.Namespace, before: Sequence[str]) -> list[str]:
    """The words of the new policy."""
    given = fast.split_hosts([*options.hosts, *(options.list or ())])
    changes = bool(options.add or options.remove)
    if bool(given) + changes + options.clear > 1:
        raise errors.InvalidRequest(
            "hosts replace the list, --add and --remove change it, --clear empties it",
            hint="use one of the three; separate hosts of --add and --remove with commas",
        )
    if changes:
        add, remove = fast.split_hosts(options.add or []), fast.split_hosts(options.remove or [])
        return changed(before, add=add, remove=remove)
    if not given and not options.clear:
        raise errors.InvalidRequest(
            "no hosts are named",
            hint="--clear allows nothing; k8e sandbox egress ID shows what is allowed",
        )
    return given


def changed(before: Sequence[str], *, add: Sequence[str], remove: Sequence[str]) -> list[str]:
    """The words of a policy after a change; words that mean the same are told by their letters."""
    words = {_key(word): word for word in before if _key(word) != _NONE}
    for word in remove:
        if _key(word) not in words:
            raise errors.InvalidRequest(
                f"{word[:80]!r} is none of the words of this policy: {' '.join(before)[:400]}",
                hint="what 'default' or a wildcard allows cannot be taken out of it: "
                "replace that word by the hosts that are needed",
            )
        del words[_key(word)]
    words |= {_key(word): word for word in add if _key(word) not in words}
    return list(words.values())


def _key(word: str) -> str:
    return word.strip().lower()


def egress(options: argparse.Namespace) -> int:
    """Print what is allowed and what was refused."""
    with sandbox.connect(options) as client:
        found = client.egress(options.session_id)
    if options.json or not os.isatty(1):
        told = asdict(found) | {"denials": [denials.fields(item) for item in found.denials]}
        printing.answer(told)
    else:
        fast.write(1, "".join(f"{line}\n" for line in denials.table(found)).encode())
    return 0
