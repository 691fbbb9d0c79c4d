"""The preset ``default``: GitHub, and the package indexes that pip and npm of this host use.

No index is named here. What pip and npm are set to use is the operator's choice, so such a host may
have a private address; a host that only an index speaks of may not.

pip and npm are asked, because only they know all of their files, variables and defaults; and they
fetch the pages, because only they have the certificates, proxies and passwords for it. None of
their answers raises here, nor does a missing one, and everything ends in bounded time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from k8e import errors
from k8e.egress.policy import Network, Rule, is_public, parse_rule

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0  # for all that one of them is asked
FETCH_SECONDS = 3.0  # until an index must have answered
MAX_PAGE = 2 << 20
MAX_ASKED = 4  # indexes of one of them whose pages are read
_NO_PIP = 3
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"

# For pip's own interpreter. pip knows its default index and where that keeps its files, so it is
# not asked over the network; every other index has a page of pip's, which shows where files are.
# A line is written as soon as it is known, so that a slow index does not cost the others.
_ASK_PIP = """
import json, sys
try:
    from pip._internal.commands import create_command
    from pip._internal.models.index import PyPI
except ImportError:
    sys.exit(int(sys.argv[4]))

seconds, size, most = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
command = create_command("install")
options = command.parser.get_default_values()
options.cache_dir, options.no_input = None, True
urls, pages = [], []
for url in [] if options.no_index else [options.index_url, *options.extra_index_urls]:
    urls.append(url)
    if url.rstrip("/") == PyPI.simple_url.rstrip("/"):
        urls.append("https://" + PyPI.file_storage_domain)
    elif url.lower().startswith(("http:", "https:")):
        pages.append(url.rstrip("/") + "/pip/")
for url in options.find_links:
    urls.append(url)
    if url.lower().startswith(("http:", "https:")) and not url.endswith((".whl", ".gz", ".zip")):
        pages.append(url)
pages = list(dict.fromkeys(pages))[:most]
print(json.dumps({"urls": urls, "pages": len(pages)}), flush=True)
session = command._build_session(options, retries=0, timeout=seconds)
accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
headers = {"Accept": accept, "Accept-Encoding": "identity"}
for page in pages:
    try:
        answer = session.get(page, headers=headers, stream=True)
        text = answer.raw.read(size).decode("utf-8", "replace") if answer.ok else ""
    except Exception as error:
        print(type(error).__name__, file=sys.stderr)
        continue
    kind = answer.headers.get("Content-Type", "")
    via = [step.url for step in answer.history]
    print(json.dumps({"url": answer.url, "via": via, "kind": kind, "text": text}), flush=True)
"""

# Bounded, so that no page makes it slow.
_ANCHOR = re.compile(
    r"""<a\s[^<>]{0,1000}?\bhref\s{0,9}=\s{0,9}["']?([^"'\s<>]{1,2000})""", re.IGNORECASE
)
# A package of npm's own with few versions, so that what a registry says about it is short.
_NPM_PACKAGE = "npm-normalize-package-bin"


@dataclass(frozen=True)
class PackageSource:
    """A source of packages."""

    configured: tuple[str, ...] = ()
    """URLs that pip or npm is set to use."""
    served: tuple[str, ...] = ()
    """URLs that these lead to, as their servers say."""
    complete: bool = True
    """Whether everything answered that was asked."""


class IndexPage(NamedTuple):
    """The answer of an index."""

    url: str
    kind: str
    text: str


# pip.


def pythons() -> list[str]:
    """Interpreters that may have pip: the system's first, since one on PATH may be a slow shim."""
    candidates = ["/usr/bin/python3", sys.executable, shutil.which("python3")]
    return list(dict.fromkeys(item for item in candidates if item and os.access(item, os.X_OK)))


def ask_pip() -> PackageSource:
    """The answer of the first pip that is found."""
    deadline = time.monotonic() + ASK_SECONDS
    limits = [str(FETCH_SECONDS), str(MAX_PAGE), str(MAX_ASKED), str(_NO_PIP)]
    for python in pythons():
        # Isolated: a folder "pip" in a place that others can write to is not pip.
        done = _run([python, "-I", "-c", _ASK_PIP, *limits], deadline)
        if done.code == _NO_PIP:
            continue
        if done.error:
            log.info("pip could not say everything: %s", done.error)
        return read_pip(done.output)
    log.debug("there is no pip on this host")
    return PackageSource()


def read_pip(output: str) -> PackageSource:
    """Parse the output of pip, which may be cut off anywhere."""
    lines = [_object(line) for line in output.splitlines()]
    if not lines or not lines[0]:
        return PackageSource(complete=False)
    configured = _texts(lines[0].get("urls"))
    served: list[str] = []
    asked = [line for line in lines[1:] if line]
    for line in asked:
        page = IndexPage(*(str(line.get(key, "")) for key in IndexPage._fields))
        served += [*_texts(line.get("via")), page.url, *links(page)]
    return PackageSource(tuple(configured), tuple(served), len(asked) >= lines[0].get("pages", 0))


def links(page: IndexPage) -> list[str]:
    """One link for every server that a page of an index names."""
    found: list[str] = []
    if "json" in page.kind:
        files = _object(page.text).get("files")
        items = cast("list[Any]", files) if isinstance(files, list) else []
        found = _texts([_dict(item).get("url") for item in items])
    else:
        found = _ANCHOR.findall(page.text)
    by_server: dict[str, str] = {}
    for link in found:
        with contextlib.suppress(ValueError):
            url = urllib.parse.urljoin(page.url, link)
            by_server.setdefault(urllib.parse.urlsplit(url).netloc, url)
    return list(by_server.values())


# npm.


def ask_npm() -> PackageSource:
    """The registries of npm, those of scopes too."""
    npm = shutil.which("npm", path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}")
    if npm is None:
        log.debug("there is no npm on this host")
        return PackageSource()
    with tempfile.TemporaryDirectory(prefix="k8e-npm-", ignore_cleanup_errors=True) as cache:
        return _ask_npm(_Npm(npm, cache, time.monotonic() + ASK_SECONDS))


class _Npm(NamedTuple):
    """The way to call npm: without a check for a newer npm, a log of each call, traces at home."""

    program: str
    cache: str
    deadline: float

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> _Done:
        quiet = ("--no-update-notifier", "--logs-max=0", f"--cache={self.cache}", "--json")
        return _run([self.program, *words, *quiet], self.deadline, env)


def _ask_npm(npm: _Npm) -> PackageSource:
    nobodys = ("--userconfig=/nonexistent/user", "--globalconfig=/nonexistent/global")
    with ThreadPoolExecutor(2) as pool:
        listed = pool.submit(npm, "config", "ls")
        bare = _without(os.environ, "npm_config_")
        default = pool.submit(npm, "config", "ls", *nobodys, env=bare)
        registries = read_npm(listed.result().output)
        usual = [url.rstrip("/") for url in read_npm(default.result().output)]
    if not registries:
        log.info("npm names no registry: %s", listed.result().error)
        return PackageSource(complete=False)
    others = [url for url in registries if url.rstrip("/") not in usual]
    seen = [_ask_registry(npm, url) for url in others[:MAX_ASKED]]
    served = tuple(url for urls in seen for url in urls or ())
    return PackageSource(tuple(registries), served, None not in seen)


def read_npm(output: str) -> list[str]:
    """The registries in npm's configuration."""
    found = [
        value
        for key, value in _object(output).items()
        if key == "registry" or (key.startswith("@") and key.endswith(":registry"))
    ]
    return list(dict.fromkeys(_texts(found)))


def _ask_registry(npm: _Npm, url: str) -> list[str] | None:
    """The URL of a package's file in a registry, if it has one; None if it does not answer."""
    # By the environment: an address may have a password, and anyone can read arguments.
    env = {**_without(os.environ, "npm_config_registry"), "npm_config_registry": url}
    patience = ("--fetch-retries=0", f"--fetch-timeout={int(FETCH_SECONDS * 1000)}")
    return read_tarball(npm("view", _NPM_PACKAGE, "dist.tarball", *patience, env=env).output)


def read_tarball(output: str) -> list[str] | None:
    """Parse the output of npm about a package: the address of its file, or an error."""
    try:
        answer: Any = json.loads(output)
    except (ValueError, RecursionError):
        return None
    if isinstance(answer, str):
        return [answer]
    error = _dict(_dict(answer).get("error"))
    # A refusal by HTTP: the registry will not say more if it is asked again.
    return [] if str(error.get("code", "")).startswith("E4") else None


def _without(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    """An environment without some variables of npm's, which it takes in either case."""
    return {key: item for key, item in environment.items() if not key.lower().startswith(prefix)}


# Both.


def ask_all() -> list[PackageSource]:
    """The answers of pip and npm, asked at once."""

    def ask(one: Callable[[], PackageSource]) -> PackageSource:
        try:
            return one()
        except Exception:  # whatever they answer, a gateway has to start
            log.warning("a package manager could not be asked", exc_info=True)
            return PackageSource(complete=False)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask, (ask_pip, ask_npm)))


class _Done(NamedTuple):
    code: int
    output: str
    error: str
    """The last line that it complained with."""


def _run(argv: list[str], deadline: float, env: dict[str, str] | None = None) -> _Done:
    """Run a program to its end or to the deadline; return its output."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",  # a directory with no other project's package above it
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        return _Done(-1, "", str(error))
    try:
        output, complaint = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        # All of it: a wrapper's child would keep the pipes open.
        os.killpg(process.pid, signal.SIGKILL)
        output, complaint = _rest(process)
    told = complaint.decode("utf-8", "replace").strip().splitlines() or [""]
    # An address in it may have a password.
    error = re.sub(r"//[^/\s]*@", "//", told[-1])
    return _Done(process.wait(), output.decode("utf-8", "replace"), error)


def _rest(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    try:
        return process.communicate(timeout=1)[0], b"it took too long"
    except subprocess.TimeoutExpired as late:  # another process holds the pipes
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return late.stdout or b"", b"it took too long"


def _object(text: str) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        return _dict(json.loads(text))
    return {}


def _dict(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _texts(values: Any) -> list[str]:
    """The texts of a list; none for other values."""
    items = cast("list[Any]", values) if isinstance(values, list) else []
    return [item for item in items if isinstance(item, str)]


ALWAYS = ("github.com", "raw.githubusercontent.com")
FRESH_SECONDS = 24 * 3600.0
AGAIN_SECONDS = 300.0  # until an index is asked again that did not answer
MAX_SERVED = 16  # rules for hosts that indexes speak of
_FORMAT = 1  # of the cache, and of what is asked
_PORTS = {"https": (443,), "http": (80, 443)}  # many servers redirect from http to https


def default_rules(cache: Path | None = None) -> tuple[Rule, ...]:
    """The rules of the preset ``default``. Blocks for a second if ``cache`` does not have them."""
    key = _fingerprint()
    known = _load(cache, key)
    if known is not None and known.fresh:
        return known.rules
    found = ask_all()
    rules = rules_for(found)
    complete = all(one.complete for one in found)
    if known is not None and not complete:
        rules = tuple(dict.fromkeys([*rules, *known.rules]))  # what an index said yesterday
    _store(cache, key, rules, FRESH_SECONDS if complete else AGAIN_SECONDS)
    log.info("the preset default allows %s", ", ".join(map(str, rules)))
    return rules


# From addresses to rules.


def rules_for(found: Iterable[PackageSource]) -> tuple[Rule, ...]:
    """The rules for the answers of pip and npm."""
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
    """A rule for each port of a URL; none if it is not the address of a web server."""
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
        log.warning("the address of a package index cannot become a rule")
        return []


def _host(rule: Rule) -> tuple[str, Network | None]:
    return rule.name, rule.network


def _may_be_learned(rule: Rule) -> bool:
    """An index may not open private addresses; for names, the DNS responder sees to that."""
    return rule.trusted or rule.network is None or is_public(rule.network.network_address)


# What is remembered.


def _fingerprint() -> str:
    """A value that changes when pip or npm may answer differently, as far as a quick look shows."""
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
    """The files that may have settings of pip and npm, and the programs themselves."""
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
        *(Path(item) for item in (*pythons(), *([npm] if npm else []))),
    ]


class _Known(NamedTuple):
    rules: tuple[Rule, ...]
    fresh: bool


def _load(cache: Path | None, key: str) -> _Known | None:
    """The stored answer for ``key``, however old it is."""
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
