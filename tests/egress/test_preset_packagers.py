"""What pip and npm of a host say, with servers of the test's own that stand for indexes.

Nothing here reaches a real index: settings come from the test, and whatever would leave the machine
is sent to a proxy that only counts, and must have counted nothing in the end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.egress import presets
from k8e.egress.policy import Rule
from k8e.egress.presets import IndexPage, PackageSource
from tests.egress.index_server import JSON, Server

GITHUB = {"github.com", "raw.githubusercontent.com"}
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


@pytest.fixture
def index() -> Generator[Server]:
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def other() -> Generator[Server]:
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A host where nobody has configured anything, and from which nothing leaves."""
    for name in list(os.environ):
        if name.lower().startswith(("pip_", "npm_config_", "xdg_")) or "proxy" in name.lower():
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("npm_config_userconfig", str(folder / ".npmrc"))
    monkeypatch.setenv("npm_config_globalconfig", str(folder / "etc-npmrc"))
    trap = Server()
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, trap.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    yield folder
    trap.shutdown()
    trap.server_close()
    assert trap.asked == []


def told(rules: tuple[Rule, ...]) -> dict[str, bool]:
    """The rules beside GitHub's as text, and whether they are trusted."""
    return {str(rule): rule.trusted for rule in rules if rule.name not in GITHUB}


def of_pip() -> dict[str, bool]:
    return told(presets.rules_for([presets.ask_pip()]))


def of_npm() -> dict[str, bool]:
    return told(presets.rules_for([presets.ask_npm()]))


def address(server: Server) -> str:
    """How a rule for a server of the test reads."""
    return f"127.0.0.1/32:{server.server_port}"


# pip.


def test_an_index_of_pip_is_trusted_and_where_it_keeps_files_is_not(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple/")
    files = ["https://files.example.org/a/pip-1.whl", "http://old.example.org/pip-0.whl", "/b.whl"]
    index.serve_files("/simple/pip/", *files)
    assert of_pip() == {
        address(index): True,
        "files.example.org:443": False,
        "old.example.org:80": False,
        "old.example.org:443": False,
    }
    ((_, headers),) = index.asked
    assert headers["Accept"] == f"{JSON}, text/html;q=0.5"


def test_an_index_that_speaks_html_is_understood(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
    page = """<!DOCTYPE html><head><link href="https://style.example.org/s.css"></head>
        <A data-requires-python="&gt;=3" HREF='//cdn.example.org:8443/pip-1.whl#sha256=0'>pip</A>
        <a href=../../files/pip-2.whl>2</a> <a href="https://[broken/x">3</a> <a>4</a>
        <a href="ftp://ftp.example.org/pip-3.whl">5</a> <a href="https://last.example.org/"""
    index.serve("/simple/pip/", page, "text/html; charset=utf-8")
    expected = {address(index): True, "cdn.example.org:8443": False, "last.example.org:443": False}
    assert of_pip() == expected


def test_a_private_address_that_an_index_speaks_of_is_not_opened(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple/")
    private = ["169.254.169.254", "10.0.0.1", "127.0.0.2", "[::1]", "[::ffff:10.0.0.1]"]
    urls = [f"http://{host}/pip.whl" for host in private]
    index.serve_files("/simple/pip/", *urls, "http://127.0.0.1:9/pip.whl", "https://1.1.1.1/x")
    expected = {address(index): True, "127.0.0.1/32:9": True, "1.1.1.1/32:443": False}
    assert of_pip() == expected


def test_an_index_opens_a_few_hosts_and_not_a_thousand(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple/")
    index.serve_files("/simple/pip/", *(f"https://h{n}.example.org/x" for n in range(1000)))
    assert len(of_pip()) == 1 + presets.MAX_SERVED


def test_a_password_goes_to_the_index_and_nowhere_else(
    index: Server,
    other: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    url = index.url.replace("//", "//bob:s3cr%40t@")
    monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://bob:s3cr%40t@127.0.0.1:99999/simple")
    monkeypatch.setattr(presets, "ask_npm", PackageSource)
    elsewhere = other.url.replace("127.0.0.1", "localhost")
    index.redirect("/simple/pip/", f"{elsewhere}/mirror/pip/")
    other.serve_files("/mirror/pip/", "https://files.example.org/x.whl")
    cache = tmp_path / "cache" / "indexes.json"
    assert told(presets.default_rules(cache)) == {
        address(index): True,
        f"localhost:{other.server_port}": False,
        "files.example.org:443": False,
    }
    assert [headers.get("Authorization") for _, headers in index.asked] == [
        "Basic Ym9iOnMzY3JAdA=="
    ]
    assert [headers.get("Authorization") for _, headers in other.asked] == [None]
    assert "s3cr" not in caplog.text + cache.read_text()
    assert cache.stat().st_mode & 0o77 == 0


def test_the_default_index_is_known_to_pip_and_asked_nothing() -> None:
    known = importlib.import_module("pip._internal.models.index").PyPI
    assert of_pip() == {f"{known.netloc}:443": True, f"{known.file_storage_domain}:443": True}


def test_files_and_variables_of_pip_are_read_as_pip_reads_them(
    index: Server, other: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_CONFIG_FILE")
    settings = home / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(
        f"[global]\nindex-url = {index.url}/file\n"
        f"extra-index-url = {other.url}/one\n    file:///srv/wheels\n"
        f"[install]\nfind-links = {other.url}/wheels.html\n    /srv/more\n"
    )
    other.serve("/wheels.html", '<a href="https://wheels.example.org/x.whl">', "text/html")
    assert of_pip() == {address(index): True, address(other): True, "wheels.example.org:443": False}
    assert [path for path, _ in index.asked] == ["/file/pip/"]
    monkeypatch.setenv("PIP_INDEX_URL", f"{other.url}/variable")
    assert address(index) not in of_pip()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert set(of_pip()) == {address(other), "wheels.example.org:443"}


def test_an_index_that_is_silent_is_allowed_all_the_same(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "FETCH_SECONDS", 0.2)
    index.serve_files("/simple/pip/", "https://files.example.org/x")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{index.url}/simple")
        found = presets.ask_pip()
    assert not found.complete
    assert set(told(presets.rules_for([found]))) == {
        f"127.0.0.1/32:{port}",
        address(index),
        "files.example.org:443",
    }


def test_an_index_without_the_page_has_answered(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    found = presets.ask_pip()
    assert (found.complete, found.configured) == (True, (index.url,))
    assert told(presets.rules_for([found])) == {address(index): True}


def test_an_endless_page_is_not_read_to_its_end(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "MAX_PAGE", 100)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    page = '<a href="https://a.example.org/x">' + " " * 100 + '<a href="https://b.example.org/x">'
    index.serve("/pip/", page, "text/html")
    assert set(of_pip()) == {address(index), "a.example.org:443"}


def test_a_python_without_pip_is_passed_over(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    command = ["/usr/bin/python3", "-m", "venv", "--without-pip", str(tmp_path / "bare")]
    subprocess.run(command, check=True, timeout=30)
    real = presets.pythons()
    bare = [str(tmp_path / "bare/bin/python"), "/nonexistent/python"]
    monkeypatch.setattr(presets, "pythons", lambda: [bare[0], *real])
    assert of_pip() == {address(index): True}
    monkeypatch.setattr(presets, "pythons", lambda: bare[:1])
    assert presets.ask_pip() == PackageSource()
    monkeypatch.setattr(presets, "pythons", lambda: bare[1:])
    assert not presets.ask_pip().complete


def test_a_folder_named_pip_is_not_run(
    index: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    assert of_pip() == {address(index): True}
    assert not (tmp_path / "ran").exists()


def test_settings_that_pip_cannot_read_leave_it_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("[global\nindex-url")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert presets.ask_pip() == PackageSource(complete=False)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "\n",
        "Traceback",
        "[]",
        "{}",
        '{"urls": 5, "pages": 0}',
        '{"urls": ["https://a.example.org", 7, null], "pages": 0}',
        '{"urls": ["https://a.example.org"], "pages": 1}\n{"url": "https://b.exa',
        '{"urls": [], "pages": 1}\n{"url": 7, "via": {}, "kind": null, "text": []}',
        '{"urls": [], "pages": 1}\n{"url": "", "kind": "json", "text": "{\\"files\\": {}}"}',
        '{"urls": [], "pages": 1}\n{"url": "", "kind": "json", "text": "{\\"files\\": [1]}"}',
    ],
)
def test_whatever_pip_writes_is_survived(output: str) -> None:
    found = presets.read_pip(output)
    assert set(told(presets.rules_for([found]))) <= {"a.example.org:443"}


@pytest.mark.parametrize("part", ["<a ", "<a href", "<a href=", "href = ", "<a" + " " * 999, "<"])
def test_no_page_takes_long_to_read(part: str) -> None:
    page = IndexPage(
        "https://index.example.org/pip/", "text/html", part * (presets.MAX_PAGE // len(part))
    )
    began = time.process_time()
    presets.links(page)
    assert time.process_time() - began < 5


# npm.


@needs_npm
def test_a_registry_of_npm_is_trusted_and_where_it_keeps_files_is_not(
    index: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("npm_config_registry", f"{index.url}/npm/")
    index.serve_package("https://tarballs.example.org/x-1.0.0.tgz", "/npm")
    assert of_npm() == {address(index): True, "tarballs.example.org:443": False}
    assert list(home.iterdir()) == []


@needs_npm
def test_registries_of_scopes_are_allowed_too(index: Server, other: Server, home: Path) -> None:
    (home / ".npmrc").write_text(f"registry={index.url}/\n@corp:registry={other.url}/\n")
    other.serve_package("https://corp.example.org/x-1.0.0.tgz")
    found = presets.ask_npm()
    assert found.complete
    expected = {address(index): True, address(other): True, "corp.example.org:443": False}
    assert told(presets.rules_for([found])) == expected


@needs_npm
def test_the_default_registry_is_asked_nothing() -> None:
    found = presets.ask_npm()
    assert found.complete
    assert [rule.trusted for rule in presets.rules_for([found])[2:]] == [True]
    assert len(found.configured) == 1
    assert found.served == ()


@needs_npm
def test_a_registry_that_is_down_is_allowed_all_the_same(
    index: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{port}/")
    found = presets.ask_npm()
    assert not found.complete
    assert told(presets.rules_for([found])) == {f"127.0.0.1/32:{port}": True}


def put_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is found first when npm is looked for."""
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_an_npm_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    put_npm(tmp_path / "bin", f"sleep 600 & echo $$ $! >>{pids}; wait", monkeypatch)
    monkeypatch.setattr(presets, "ASK_SECONDS", 1.0)
    began = time.monotonic()
    assert presets.ask_npm() == PackageSource(complete=False)
    assert time.monotonic() - began < 8
    deadline = time.monotonic() + 10
    for pid in pids.read_text().split():
        while _runs(pid):
            assert time.monotonic() < deadline


def _runs(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    "script", ["exit 1", "echo '{'", "echo '[]'", """echo '{"registry": 5, "@a:registry": null}'"""]
)
def test_an_npm_that_says_nothing_useful_is_survived(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_npm(tmp_path / "bin", script, monkeypatch)
    assert presets.ask_npm() == PackageSource(complete=False)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ('"https://a.example.org/x.tgz"', ["https://a.example.org/x.tgz"]),
        ('{"error": {"code": "E404"}}', []),
        ('{"error": {"code": "E401", "summary": "no"}}', []),
        ('{"error": {"code": "ECONNREFUSED"}}', None),
        ('{"error": "E404"}', None),
        ("", None),
        ("[", None),
        ("7", None),
    ],
)
def test_what_npm_says_about_a_package(output: str, expected: list[str] | None) -> None:
    assert presets.read_tarball(output) == expected


# Both.


def test_a_host_without_pip_and_npm_gets_github(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(presets, "_SYSTEM_PATH", "")
    monkeypatch.setattr(presets, "pythons", list[str])
    assert presets.ask_all() == [PackageSource(), PackageSource()]
    assert {rule.name for rule in presets.default_rules()} == GITHUB


@needs_npm
def test_no_default_index_is_named_in_our_files() -> None:
    names = [rule.name for rule in presets.rules_for(presets.ask_all())[2:]]
    assert len(names) == 3
    repository = Path(presets.__file__).parents[3]
    places = [repository / name for name in ("src", "tests", "docs", "requirements", "install.sh")]
    files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
    assert len(files) > 100
    for file in files:
        text = file.read_bytes()
        assert not any(name.encode() in text for name in names), file
