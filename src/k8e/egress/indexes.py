"""The package indexes that pip and npm of this host are configured to use, asked of them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import urllib.parse

from k8e import errors
from k8e.egress.policy import Rule, parse_rule

log = logging.getLogger(__name__)

ALWAYS = ("github.com", "raw.githubusercontent.com")
ASK_SECONDS = 10
# pip knows its own default index and where that keeps its files; we only ask.
_ASK_PIP = """
import json
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
config = Configuration(isolated=False)
config.load()
found = {"default": PyPI.simple_url, "files": PyPI.file_storage_domain, "set": {}}
for key, value in config.items():
    for name, text in value.items() if isinstance(value, dict) else [(key, value)]:
        if name.rpartition(".")[2] in ("index-url", "extra-index-url", "find-links"):
            found["set"][name] = text
print(json.dumps(found))
"""


def default_rules() -> tuple[Rule, ...]:
    """What the preset ``default`` allows. The indexes are the operator's own, so trusted."""
    urls = [*_pip(), *_npm()]
    rules = [parse_rule(name) for name in ALWAYS]
    for url in urls:
        parts = urllib.parse.urlsplit(url if "//" in url else f"//{url}")
        if not parts.hostname:
            continue
        try:
            text = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
            rules.append(parse_rule(text, trusted=True))
        except (errors.InvalidRequest, ValueError):
            log.warning("an index of pip or npm has an address that is no rule: %r", url)
    return tuple(dict.fromkeys(rules))


def _pip() -> list[str]:
    for python in ("/usr/bin/python3", "python3"):
        output = _ask([python, "-c", _ASK_PIP])
        if not output:
            continue
        found = json.loads(output)
        settings: dict[str, str] = found["set"]
        urls = [word for text in settings.values() for word in text.split() if "://" in word]
        if not any(name.rpartition(".")[2] == "index-url" for name in settings):
            urls += [found["default"], found["files"]]
        return urls
    return []


def _npm() -> list[str]:
    output = _ask(["npm", "config", "get", "registry"])
    return [output.strip()] if "://" in output else []


def _ask(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=ASK_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return os.fsdecode(done.stdout)
