"""Asks pip and npm of this host where they get packages from.

They are asked themselves, because only they know all of their files, variables and defaults; and
they fetch what has to be fetched, because only they have the certificates, proxies and passwords
for it. Nothing here raises for what they say or do not say, and everything ends in bounded time.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

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
class Found:
    """Where packages come from."""

    configured: tuple[str, ...] = ()
    """URLs that pip or npm is set to use."""
    served: tuple[str, ...] = ()
    """URLs that these lead to, as their servers say."""
    complete: bool = True
    """Whether everything answered that was asked."""


class Page(NamedTuple):
    """What an index said."""

    url: str
    kind: str
    text: str


# pip.


def pythons() -> list[str]:
    """Interpreters that may have pip: the system's first, since one on PATH may be a slow shim."""
    candidates = ["/usr/bin/python3", sys.executable, shutil.which("python3")]
    return list(dict.fromkeys(item for item in candidates if item and os.access(item, os.X_OK)))


def ask_pip() -> Found:
    """What the first pip says that there is."""
    deadline = time.monotonic() + ASK_SECONDS
    limits = [str(FETCH_SECONDS), str(MAX_PAGE), str(MAX_ASKED), str(_NO_PIP)]
    for python in pythons():
        # Isolated: a folder "pip" where somebody may write is not pip.
        done = _run([python, "-I", "-c", _ASK_PIP, *limits], deadline)
        if done.code == _NO_PIP:
            continue
        if done.error:
            log.info("pip could not say everything: %s", done.error)
        return read_pip(done.output)
    log.debug("there is no pip on this host")
    return Found()


def read_pip(output: str) -> Found:
    """What pip wrote, which may end anywhere."""
    lines = [_object(line) for line in output.splitlines()]
    if not lines or not lines[0]:
        return Found(complete=False)
    configured = _texts(lines[0].get("urls"))
    served: list[str] = []
    asked = [line for line in lines[1:] if line]
    for line in asked:
        page = Page(*(str(line.get(key, "")) for key in Page._fields))
        served += [*_texts(line.get("via")), page.url, *links(page)]
    return Found(tuple(configured), tuple(served), len(asked) >= lines[0].get("pages", 0))


def links(page: Page) -> list[str]:
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


def ask_npm() -> Found:
    """The registries of npm, those of scopes too."""
    npm = shutil.which("npm", path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}")
    if npm is None:
        log.debug("there is no npm on this host")
        return Found()
    with tempfile.TemporaryDirectory(prefix="k8e-npm-", ignore_cleanup_errors=True) as cache:
        return _ask_npm(_Npm(npm, cache, time.monotonic() + ASK_SECONDS))


class _Npm(NamedTuple):
    """How npm is called: without a look for a newer npm, a log of each call, a trace at home."""

    program: str
    cache: str
    deadline: float

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> _Done:
        quiet = ("--no-update-notifier", "--logs-max=0", f"--cache={self.cache}", "--json")
        return _run([self.program, *words, *quiet], self.deadline, env)


def _ask_npm(npm: _Npm) -> Found:
    nobodys = ("--userconfig=/nonexistent/user", "--globalconfig=/nonexistent/global")
    with ThreadPoolExecutor(2) as pool:
        listed = pool.submit(npm, "config", "ls")
        bare = _without(os.environ, "npm_config_")
        default = pool.submit(npm, "config", "ls", *nobodys, env=bare)
        registries = read_npm(listed.result().output)
        usual = [url.rstrip("/") for url in read_npm(default.result().output)]
    if not registries:
        log.info("npm names no registry: %s", listed.result().error)
        return Found(complete=False)
    others = [url for url in registries if url.rstrip("/") not in usual]
    seen = [_ask_registry(npm, url) for url in others[:MAX_ASKED]]
    served = tuple(url for urls in seen for url in urls or ())
    return Found(tuple(registries), served, None not in seen)


def read_npm(output: str) -> list[str]:
    """The registries in npm's configuration."""
    found = [
        value
        for key, value in _object(output).items()
        if key == "registry" or (key.startswith("@") and key.endswith(":registry"))
    ]
    return list(dict.fromkeys(_texts(found)))


def _ask_registry(npm: _Npm, url: str) -> list[str] | None:
    """Where a registry keeps a package's file, if it has that package; None if it is silent."""
    # By the environment: an address may have a password, and anyone can read arguments.
    env = {**_without(os.environ, "npm_config_registry"), "npm_config_registry": url}
    patience = ("--fetch-retries=0", f"--fetch-timeout={int(FETCH_SECONDS * 1000)}")
    return read_tarball(npm("view", _NPM_PACKAGE, "dist.tarball", *patience, env=env).output)


def read_tarball(output: str) -> list[str] | None:
    """What npm wrote about a package: the address of its file, or an error."""
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


def ask_all() -> list[Found]:
    """What pip and npm say, asked at once."""

    def ask(one: Callable[[], Found]) -> Found:
        try:
            return one()
        except Exception:  # whatever they answered, a gateway has to start
            log.warning("a package manager could not be asked", exc_info=True)
            return Found(complete=False)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask, (ask_pip, ask_npm)))


class _Done(NamedTuple):
    code: int
    output: str
    error: str
    """The last line that it complained with."""


def _run(argv: list[str], deadline: float, env: dict[str, str] | None = None) -> _Done:
    """Run a program to its end or to the deadline; what it wrote until then."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",  # no package of someone else's above it
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
    except subprocess.TimeoutExpired as late:  # somebody else holds the pipes
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
    """The texts of a list; none for what is no list."""
    items = cast("list[Any]", values) if isinstance(values, list) else []
    return [item for item in items if isinstance(item, str)]
