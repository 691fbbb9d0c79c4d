"""The preset ``default``: rules for what pip and npm said, and what is remembered of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from k8e.egress import presets
from k8e.egress.policy import Rule, parse_rule
from k8e.egress.presets import PackageSource

GITHUB = {"github.com", "raw.githubusercontent.com"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host where nobody has configured anything."""
    for name in list(os.environ):
        if name.lower().startswith(("pip_", "npm_config_", "xdg_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("npm_config_globalconfig", str(folder / "etc-npmrc"))
    return folder


def told(rules: tuple[Rule, ...]) -> dict[str, bool]:
    """The rules beside GitHub's as text, and whether they are trusted."""
    return {str(rule): rule.trusted for rule in rules if rule.name not in GITHUB}


# Addresses.


@pytest.mark.parametrize(
    ("url", "rules"),
    [
        ("https://pkg.example.org/simple", ["pkg.example.org:443"]),
        ("http://pkg.example.org", ["pkg.example.org:80", "pkg.example.org:443"]),
        ("http://pkg.example.org:8081/x/", ["pkg.example.org:8081"]),
        ("HTTPS://Pkg.Example.ORG.:443/", ["pkg.example.org:443"]),
        ("https://u:p@ss:w/rd@pkg.example.org/", []),
        ("https://bob:a%2Fb@pkg.example.org:444/", ["pkg.example.org:444"]),
        ("https://bob:a@b@pkg.example.org/", ["pkg.example.org:443"]),
        (" 'https://pkg.example.org/simple/',\n", ["pkg.example.org:443"]),
        ("https://pkg.example.org?x=1#y", ["pkg.example.org:443"]),
        ("https://bücher.example/", ["xn--bcher-kva.example:443"]),
        ("https://nexus/repository", ["nexus:443"]),
        ("https://10.0.0.5:8443/", ["10.0.0.5/32:8443"]),
        ("http://[2001:db8::1]:8081/simple", ["[2001:db8::1/128]:8081"]),
        ("https://[2001:db8::1]/simple", ["[2001:db8::1/128]:443"]),
        ("https://[fe80::1%eth0]/", []),
        ("https://[2001:db8::1/", []),
        ("https://pkg.example.org:99999/", []),
        ("https://pkg.example.org:port/", []),
        ("https://*.example.org/", []),
        ("https://10.0.0.0%2F8/", []),
        ("https://pkg example.org/", []),
        ("https://2130706433/", []),
        ("https:///simple", []),
        ("file:///srv/wheels", []),
        ("/srv/wheels", []),
        ("git+ssh://git@example.org/x", []),
        ("pkg.example.org", []),
        ("", []),
    ],
)
def test_an_address_of_an_index_becomes_rules(url: str, rules: list[str]) -> None:
    assert [str(rule) for rule in presets.url_rules(url)] == rules
    assert [parse_rule(str(rule)) for rule in presets.url_rules(url)] == presets.url_rules(url)


def test_github_is_always_allowed_and_not_trusted() -> None:
    rules = presets.rules_for([])
    assert {rule.name for rule in rules} == GITHUB
    assert not any(rule.trusted or rule.port for rule in rules)


def test_a_host_that_one_of_them_is_set_to_use_is_trusted_wherever_it_is_met() -> None:
    first = PackageSource(("https://a.example.org/",), ("https://b.example.org:8443/x",))
    second = PackageSource(("https://b.example.org/",), ("https://a.example.org/x",))
    expected = dict.fromkeys(("a.example.org:443", "b.example.org:443", "b.example.org:8443"), True)
    assert told(presets.rules_for([first, second])) == expected


# What is remembered.


class Asked:
    """Stands where pip and npm are asked; counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self.found = PackageSource(
            ("https://a.example.org", "http://[2001:db8::1]:81/"), ("https://b.example.org",)
        )
        monkeypatch.setattr(presets, "ask_all", self)

    def __call__(self) -> list[PackageSource]:
        self.times += 1
        return [self.found]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "state" / "indexes.json"


def test_what_was_asked_is_not_asked_again(asked: Asked, cache: Path) -> None:
    first = presets.default_rules(cache)
    assert presets.default_rules(cache) == first
    assert asked.times == 1
    assert [path.name for path in cache.parent.iterdir()] == ["indexes.json"]
    assert told(first) == {
        "a.example.org:443": True,
        "[2001:db8::1/128]:81": True,
        "b.example.org:443": False,
    }


def test_without_a_cache_it_is_asked_each_time(asked: Asked) -> None:
    assert presets.default_rules() == presets.default_rules()
    assert asked.times == 2


@pytest.mark.parametrize(
    "name", ["PIP_INDEX_URL", "PIP_NO_INDEX", "npm_config_registry", "NPM_CONFIG_REGISTRY", "HOME"]
)
def test_a_changed_variable_is_noticed(
    name: str, asked: Asked, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets.default_rules(cache)
    monkeypatch.setenv(name, "https://new.example.org")
    presets.default_rules(cache)
    assert asked.times == 2


@pytest.mark.parametrize("name", [".config/pip/pip.conf", ".pip/pip.conf", ".npmrc", "etc-npmrc"])
def test_a_changed_file_is_noticed(name: str, asked: Asked, cache: Path, home: Path) -> None:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in ("one", "three", None):
        presets.default_rules(cache)
        path.write_text(text) if text else path.unlink()
    presets.default_rules(cache)
    assert asked.times == 4


def test_it_is_asked_again_after_a_day(
    asked: Asked, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets.default_rules(cache)
    now = time.time()
    for seconds, times in ((23 * 3600, 1), (25 * 3600, 2), (-3600, 3)):
        monkeypatch.setattr(time, "time", lambda moment=now + seconds: moment)
        presets.default_rules(cache)
        assert asked.times == times


def test_an_index_that_was_silent_is_asked_soon_again_and_what_it_said_before_stays(
    asked: Asked, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = presets.default_rules(cache)
    now = time.time()
    asked.found = PackageSource(asked.found.configured, (), complete=False)
    for seconds, times in ((25 * 3600, 2), (25 * 3600 + 200, 2), (25 * 3600 + 400, 3)):
        monkeypatch.setattr(time, "time", lambda moment=now + seconds: moment)
        assert set(presets.default_rules(cache)) == set(before)
        assert asked.times == times


@pytest.mark.parametrize(
    "change",
    [
        {"rules": [["*", True]]},
        {"rules": 5},
        {"rules": [5]},
        {"rules": [[5, True]]},
        {"made": None},
        {"until": "soon"},
        {"key": None},
        None,
    ],
)
def test_a_cache_that_is_broken_is_not_believed(
    change: dict[str, Any] | None, asked: Asked, cache: Path
) -> None:
    rules = presets.default_rules(cache)
    text = json.dumps({**json.loads(cache.read_text()), **change}) if change else "{"
    cache.write_text(text)
    assert presets.default_rules(cache) == rules
    assert asked.times == 2
    assert presets.default_rules(cache) == rules
    assert asked.times == 2


def test_a_cache_that_cannot_be_written_costs_only_time(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rules = presets.default_rules(tmp_path / "file" / "indexes.json")
    assert "a.example.org:443" in told(rules)
    assert presets.default_rules(tmp_path) == rules
    assert asked.times == 2


def test_nothing_that_a_package_manager_does_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> PackageSource:
        raise RuntimeError("unheard of")

    monkeypatch.setattr(presets, "ask_pip", broken)
    monkeypatch.setattr(presets, "ask_npm", lambda: PackageSource(("https://a.example.org",)))
    assert told(presets.default_rules()) == {"a.example.org:443": True}
