"""The preset ``default``: GitHub, and the package indexes that pip and npm of this host use.

No index is named here. What pip and npm are set to use is the operator's choice, so such a host may
have a private address; a host that only an index speaks of may not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import urllib.parse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from k8e import errors
from k8e.egress import packagers
from k8e.egress.packagers import Found
from k8e.egress.policy import Network, Rule, is_public, parse_rule

log = logging.getLogger(__name__)

ALWAYS = ("github.com", "raw.githubusercontent.com")
FRESH_SECONDS = 24 * 3600.0
AGAIN_SECONDS = 300.0  # until an index is asked again that did not answer
MAX_SERVED = 16  # rules for hosts that indexes speak of
_FORMAT = 1  # of the cache, and of what is asked
_PORTS = {"https": (443,), "http": (80, 443)}  # many a server sends from http to https


def default_rules(cache: Path | None = None) -> tuple[Rule, ...]:
    """What the preset ``default`` allows. Blocks for a second where ``cache`` does not know it."""
    key = _fingerprint()
    known = _load(cache, key)
    if known is not None and known.fresh:
        return known.rules
    found = packagers.ask_all()
    rules = rules_for(found)
    complete = all(one.complete for one in found)
    if known is not None and not complete:
        rules = tuple(dict.fromkeys([*rules, *known.rules]))  # what an index said yesterday
    _store(cache, key, rules, FRESH_SECONDS if complete else AGAIN_SECONDS)
    log.info("the preset default allows %s", ", ".join(map(str, rules)))
    return rules


# From addresses to rules.


def rules_for(found: Iterable[Found]) -> tuple[Rule, ...]:
    """The rules for what pip and npm said."""
    found = list(found)
    configured = [rule for one in found for url in one.configured for rule in url_rules(url)]
    served = [rule for one in found for url in one.served for rule in url_rules(url)]
    hosts = {_host(rule) for rule in configured}
    rules = dict.fromkeys(parse_rule(name) for name in ALWAYS)
    rules |= dict.fromkeys(replace(rule, trusted=True) for rule in configured)
    learned = [replace(rule, trusted=_host(rule) in hosts) for rule in served]
    learned = [rule for rule in learned if rule not in rules and _may_be_learned(rule)]
    return (*rules, *list(dict.fromkeys(learned))[:MAX_SERVED])


def url_rules(url: str) -> list[Rule]:
    """A rule for each port of a URL; none for what is no address of a web server."""
    try:
        parts = urllib.parse.urlsplit(url.strip(" \t\r\n\"'<>,;"))
        host = parts.hostname
        if parts.scheme not in _PORTS or not host:
            return []
        if set(host) & set("*%/"):  # a pattern, an interface, a network: rules have more than hosts
            raise ValueError("not a host")
        ports = (parts.port,) if parts.port else _PORTS[parts.scheme]
        host = f"[{host}]" if ":" in host else host
        return [parse_rule(f"{host}:{port}") for port in ports]
    except (errors.InvalidRequest, ValueError):
        # Without the URL, which may have a password.
        log.warning("an address of a package index is no rule")
        return []


def _host(rule: Rule) -> tuple[str, Network | None]:
    return rule.name, rule.network


def _may_be_learned(rule: Rule) -> bool:
    """An index may not open private addresses; for names, the DNS responder sees to that."""
    return rule.trusted or rule.network is None or is_public(rule.network.network_address)


# What is remembered.


def _fingerprint() -> str:
    """Changes when pip or npm may answer differently, as far as that can be seen at once."""
    prefixes = ("pip_", "npm_config_")
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS")
    variables = sorted(
        (key, value)
        for key, value in os.environ.items()
        if key.lower().startswith(prefixes) or key in names
    )
    files: list[tuple[str, int, int]] = []
    for path in _files():
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
            files.append((str(path), status.st_mtime_ns, status.st_size))
    text = json.dumps([_FORMAT, variables, files])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _files() -> list[Path]:
    """Where the settings of pip and npm may be, and what starts them."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 # Path.expanduser raises without a home
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    everyone = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    npm = shutil.which("npm")
    prefixes = [Path("/usr"), Path("/usr/local"), Path(sys.prefix)]
    prefixes += [Path(npm).parent.parent] if npm else []
    named = [
        value
        for key, value in os.environ.items()
        if key.lower() in ("pip_config_file", "npm_config_userconfig", "npm_config_globalconfig")
    ]
    return [
        *(Path(item, "pip", "pip.conf") for item in (user, *everyone)),
        *(Path(item) for item in ("/etc/pip.conf", "/etc/npmrc", home / ".npmrc", *named)),
        home / ".pip" / "pip.conf",
        *(item / name for item in prefixes for name in ("pip.conf", "etc/npmrc")),
        *(Path(item) for item in (*packagers.pythons(), *([npm] if npm else []))),
    ]


class _Known(NamedTuple):
    rules: tuple[Rule, ...]
    fresh: bool


def _load(cache: Path | None, key: str) -> _Known | None:
    """What was remembered for ``key``, however old it is."""
    if cache is None:
        return None
    try:
        entry: Any = json.loads(cache.read_text("utf-8"))
        if entry["key"] != key:
            return None
        stored: list[tuple[str, object]] = entry["rules"]
        rules = tuple(parse_rule(text, trusted=trusted is True) for text, trusted in stored)
        # From a moment that has not come yet, it is of another clock.
        return _Known(rules, float(entry["made"]) <= time.time() < float(entry["until"]))
    except FileNotFoundError:
        return None
    except errors.UNREADABLE:
        log.info("what was remembered of the package indexes is of no use")
        return None


def _store(cache: Path | None, key: str, rules: tuple[Rule, ...], seconds: float) -> None:
    if cache is None:
        return
    now = time.time()
    stored = [[str(rule), rule.trusted] for rule in rules]
    entry = {"key": key, "made": now, "until": now + seconds, "rules": stored}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        scratch = cache.with_name(f"{cache.name}.{os.getpid()}")
        scratch.touch(0o600)
        scratch.write_text(json.dumps(entry), "utf-8")
        scratch.rename(cache)
    except OSError as error:
        log.warning("cannot remember the package indexes: %s", error)
